"""Exercise 11: the reference, and answers that the oracle must refuse."""

from edits import edits


def pack_lengths(lengths, row):
    held = {d: (0, n) for d, n in enumerate(lengths)}  # document -> (next token, places it needs)
    rows = []
    while sum(n for _, n in held.values()) >= row:
        pieces = []
        space = row
        while space:
            fits = [d for d in held if held[d][1] <= space]
            d = max(fits or held, key=lambda d: held[d][1])  # none fits: cut the longest
            start, need = held.pop(d)
            took = min(need, space)
            stop = start + took - (start > 0)
            pieces.append((d, start, stop))
            space -= took
            if took < need:
                held[d] = (stop, need - took + 1)
        rows.append(pieces)
    return rows


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "throws the tails away": edit(
        "if took < need:", "if False:", "while space:", "while space and held:"
    ),
    "takes the longest, whether it fits or not": edit("fits or held", "held"),
    "cuts though something fits exactly": edit("<= space]", "< space]"),
    "leaves out empty rests": edit("took < need:", "took < need - 1:"),
    "pads the last row": edit(">= row:", "> 0:", "while space:", "while space and held:"),
    "forgets the repeated BOS": edit(
        "took - (start > 0)", "took", "need - took + 1", "need - took"
    ),
    "a piece begins with the token before": edit("(stop, need", "(stop - 1, need"),
    "keeps one row less": edit(">= row:", "> row:"),
}
