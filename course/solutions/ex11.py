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
FITS = "fits = [d for d in held if held[d][1] <= space]"
REST = "held[d] = (stop, need - took + 1)"
HELD = "held = {d: (0, n) for d, n in enumerate(lengths)}"
WRONG = {  # name -> what of the reference it replaces
    "throws the tails away": edit(
        "if took < need:", "if False:", "while space:", "while space and held:"
    ),
    "takes documents as they come": edit(FITS, "fits = [min(held)]"),
    "cuts though something fits": edit(FITS, "fits = []"),
    "looks at the next eight documents only": edit(
        FITS, "fits = [d for d in [*held][:8] if held[d][1] <= space]"
    ),
    "cuts though something fits exactly": edit("<= space]", "< space]"),
    "fills the row with BOS": edit(
        FITS,
        FITS + "\n            if not fits and pieces and rows and rows[-1][-1][0] in held:\n"
        "                d, _, stop = rows[-1][-1]\n"
        "                pieces += [(d, stop, stop)] * space\n"
        "                break",
    ),
    "leaves out long documents": edit(HELD, HELD.replace("}", " if n <= row}")),
    "leaves out empty rests": edit(
        REST, REST + "\n                if held[d][1] == 2:\n                    del held[d]"
    ),
    "pads the last row": edit(">= row:", "> 0:", "while space:", "while space and held:"),
    "forgets the repeated BOS": edit(
        "took - (start > 0)", "took", "need - took + 1", "need - took"
    ),
    "counts the repeated BOS, but gives a token": edit("took - (start > 0)", "took"),
    "a piece begins with the token before": edit(
        "(stop, need - took + 1)", "(stop - 1, need - took + 1)"
    ),
    "keeps one row less": edit(">= row:", "> row:"),
    "stops after 25 rows": edit(">= row:", ">= row and len(rows) < 25:"),
    "sorts what it was given": edit(HELD, "lengths.sort()\n    " + HELD),
    "the pieces of a row by document": edit(
        "rows.append(pieces)", "rows.append(sorted(pieces)[::-1])"
    ),
    "the rest goes by the number of another": edit(
        REST, "held[min(held, default=d)] = (stop, need - took + 1)"
    ),
}
