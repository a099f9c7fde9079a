"""Exercise 7: the reference, and answers that the oracle must refuse."""


def pack_lengths(lengths, row, keep_tails=True, pad=False):
    held = {d: (0, n) for d, n in enumerate(lengths)}  # document -> (next token, places it needs)
    rows = []
    while sum(n for _, n in held.values()) >= row or (pad and held):
        pieces, space = [], row
        while space and held:
            fits = [d for d in held if held[d][1] <= space]
            d = max(fits or held, key=lambda d: held[d][1])  # none fits: cut the longest
            start, need = held.pop(d)
            took = min(need, space)
            stop = start + took - (start > 0)
            pieces.append((d, start, stop))
            space -= took
            if took < need and keep_tails:
                held[d] = (stop, need - took + 1)
        rows.append(pieces)
    return rows


def throws_tails_away(lengths, row):
    return pack_lengths(lengths, row, keep_tails=False)


def pads_the_last_row(lengths, row):
    return pack_lengths(lengths, row, pad=True)


def as_they_come(lengths, row):
    """A document is cut although another one would have fitted."""
    held = [(d, 0, n) for d, n in enumerate(lengths)]
    rows = []
    while sum(n for *_, n in held) >= row:
        pieces, space = [], row
        while space:
            d, start, need = held.pop(0)
            took = min(need, space)
            stop = start + took - (start > 0)
            pieces.append((d, start, stop))
            space -= took
            if took < need:
                held.insert(0, (d, stop, need - took + 1))
        rows.append(pieces)
    return rows


def forgets_the_bos(lengths, row):
    """The rest of a cut document goes on without BOS, so its row is one place too long."""
    held = dict(enumerate(lengths))
    done, rows = [0] * len(lengths), []
    while sum(held.values()) >= row:
        pieces, space = [], row
        while space:
            fits = [d for d in held if held[d] <= space]
            d = max(fits or held, key=lambda d: held[d])
            took = min(held[d], space)
            pieces.append((d, done[d], done[d] + took))
            done[d], held[d], space = done[d] + took, held[d] - took, space - took
            if not held[d]:
                del held[d]
        rows.append(pieces)
    return rows


def fills_with_bos(lengths, row):
    """Where nothing fits, the repeated token fills the rest of the row: padding by another name."""
    held, begun = dict(enumerate(lengths)), None  # begun: a document that a row was filled from
    done, rows = [0] * len(lengths), []
    while sum(held.values()) >= row:
        pieces, space = [], row
        while space:
            fits = [d for d in held if held[d] <= space]
            d = max(fits or held, key=lambda d: held[d])
            if not fits and begun in held and space < row:
                pieces += [(begun, done[begun], done[begun])] * space
                break
            start, took = done[d], min(held[d], space)
            done[d] = start + took - (start > 0)
            pieces.append((d, start, done[d]))
            space, held[d] = space - took, held[d] - took + 1
            if done[d] == lengths[d]:
                del held[d]
            else:
                begun = d
        rows.append(pieces)
    return rows


def no_long_documents(lengths, row):
    """Leaves out what is longer than a row, and closes up the numbers."""
    return pack_lengths([n for n in lengths if n <= row], row)


WRONG = {  # name -> what of the reference it replaces
    "throws the tails away": dict(pack_lengths=throws_tails_away),
    "takes documents as they come": dict(pack_lengths=as_they_come),
    "fills the row with BOS": dict(pack_lengths=fills_with_bos),
    "leaves out long documents": dict(pack_lengths=no_long_documents),
    "pads the last row": dict(pack_lengths=pads_the_last_row),
    "forgets the repeated BOS": dict(pack_lengths=forgets_the_bos),
}
