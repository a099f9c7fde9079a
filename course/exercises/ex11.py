"""Exercise 11: pack documents into full rows and lose nothing.

    pack_lengths([3, 9, 4, 2], row=5) -> [[(2, 0, 4), (1, 0, 1)], [(0, 0, 3), (3, 0, 2)],
                                          [(1, 1, 5)], [(1, 5, 9)]]

A piece (document, start, stop) holds the document's tokens start .. stop - 1. Every piece except
the first of a document begins with one repeated token (the document's BOS), so a piece with
start > 0 takes stop - start + 1 places of its row. All documents, of one token or more, are held
from the start. When one is cut, its rest is held instead of it, and needs one place more than it
has tokens, for the repeated one. A row has two places or more. Rules:
1. The pieces of a row take exactly `row` places. What is left at the end, fewer places than a row,
   is not in the result.
2. Every other token of every document (all except the repeated ones and what is left) is in exactly
   one piece, and a document's pieces come in order.
3. Cut a document (or the rest of one) only when nothing that is held fits in the space. Of those
   that fit you may take any; if none fits, you may cut any. The piece you cut fills the row to its
   end. A rest that is cut in a space of 1 leaves there its repeated token and nothing else: the
   piece (d, a, a).
"""


def pack_lengths(lengths: list[int], row: int) -> list[list[tuple[int, int, int]]]:
    raise NotImplementedError("write pack_lengths, then: python course/check.py 11")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random

    drawn = random.Random(3).choices(range(1, 41), k=180)
    for lengths, row in (
        ([3, 9, 4, 2], 5),
        ([3, 9, 4, 2], 7),
        ([6, 6, 6], 5),
        ([], 5),
        ([12, 4, 4], 5),  # a rest may be cut in a space of 1
        (drawn, 16),
        ([3, 200_000, 70_000, 1], 70_002),
    ):
        need = dict(enumerate(lengths))  # a document -> the places that it, or its rest, takes
        first = [0] * len(lengths)  # the token with which the next piece of each begins
        for pieces in answer.pack_lengths(lengths, row):
            space = row
            for d, start, stop in pieces:
                piece = f"the piece {(d, start, stop)}, where {space} places of the row were left,"
                needed = need.pop(d, 0)
                took = stop - start + (start > 0)
                right = 0 < took <= needed
                assert right, f"rule 2: {piece} takes {took}, and {needed} are left of document {d}"
                assert start == first[d], f"rule 2: {piece} should begin at {first[d]}"
                assert took <= space, f"rule 1: {piece} takes {took}"
                if took < needed:
                    fits = [d for d, n in need.items() if n <= space]
                    cut = f"rule 3: {piece} cuts document {d}"
                    assert not fits, f"{cut}, though these documents fit: {fits[:9]}"
                    assert took == space, f"{cut}, and takes only {took}"
                    need[d] = needed - took + 1
                first[d] = stop
                space -= took
            assert space == 0, f"rule 1: {space} of {row} places are empty in the row {pieces}"
        left = sum(need.values())
        assert left < row, f"rule 1: {left} places of documents are in no row, enough for one more"
