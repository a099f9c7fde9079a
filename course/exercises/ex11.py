"""Exercise 11: pack documents into full rows and lose nothing.

    pack_lengths([3, 9, 4, 2], row=5) -> [[(2, 0, 4), (1, 0, 1)], [(0, 0, 3), (3, 0, 2)],
                                          [(1, 1, 5)], [(1, 5, 9)]]

A piece (document, start, stop) is its tokens start .. stop - 1. Every piece but a document's first
begins with one repeated token (the BOS of the document), so a piece with start > 0 takes
stop - start + 1 places of its row. All documents are held from the start; when one is cut, its rest
is held in its place, the repeated token included. Rules:
1. the pieces of a row take exactly `row` places; what is left at the end, fewer places than a row,
   is not in the result;
2. every other token of every document (all but the repeated ones and what is left) is in exactly
   one piece, a document's pieces in order;
3. a document (or the rest of one) is cut only when nothing that is held fits in the space. Take any
   of those that fit, or cut any. The piece fills the row to its end. A rest that is cut in a space
   of 1 leaves there its repeated token and nothing else: the piece (d, a, a).
"""


def pack_lengths(lengths: list[int], row: int) -> list[list[tuple[int, int, int]]]:
    raise NotImplementedError("write pack_lengths, then: python course/check.py 11")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random

    rng = random.Random(3)
    cases = [
        ([3, 9, 4, 2], 5),
        ([1200, 500, 800, 2500], 2049),
        ([5], 5),
        ([2, 2, 2], 5),
        ([50, 1, 1], 7),
        ([], 5),
    ]
    cases += [([rng.randint(1, 40) for _ in range(60)], 16) for _ in range(20)]
    for lengths, row in cases:
        given = list(lengths)
        rows = answer.pack_lengths(given, row)
        assert given == lengths, f"pack_lengths changes the lengths it was given, {lengths}"
        need = dict(enumerate(lengths))  # a document -> the places it still needs
        done = [0] * len(lengths)  # the tokens of each that were placed
        for pieces in rows:
            space = row
            for d, start, stop in pieces:
                took = stop - start + (start > 0)
                assert start == done[d], (
                    f"rule 2: document {d}: token {start} follows {done[d] - 1}"
                )
                assert stop > start or took == 1, f"an empty piece: {(d, start, stop)}"
                assert stop <= lengths[d], f"document {d} of {lengths[d]} tokens ends at {stop}"
                assert took <= space, (
                    f"rule 1: {(d, start, stop)} takes {took} places, {space} are left in the row; "
                    f"lengths {lengths}, row {row}"
                )
                assert stop == lengths[d] or took == space, (
                    f"rule 3: document {d} is cut at {stop} though {space - took} places of the "
                    f"row are left: {pieces}; lengths {lengths}, row {row}"
                )
                fits = [n for n in need.values() if n <= space]
                assert stop == lengths[d] or not fits, (
                    f"rule 3: document {d} is cut in a space of {space}, where one of {max(fits)} "
                    f"fits; lengths {lengths}, row {row}"
                )
                done[d] = stop
                space = space - took
                need[d] = lengths[d] - stop + 1
                if stop == lengths[d]:
                    del need[d]
            filled = f"a row of {row} has {row - space} places filled: {pieces}"
            assert space == 0, f"rule 1: {filled}; lengths {lengths}"
        left = sum(need.values())
        assert left < row, (
            f"rule 1: {left} places are left over, more than a row of {row}: {lengths}"
        )
