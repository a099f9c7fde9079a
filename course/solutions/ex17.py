"""Exercise 17: the reference, and answers that the oracle must refuse."""

from math import isqrt

from edits import edits


def order(p, sizes, weights, seed, hashed):
    source, i = deal(p, weights)
    epoch, i = divmod(i, sizes[source])
    return source, shuffled(
        i, sizes[source], lambda text: hashed(f"{seed}/{source}/{epoch}/{text}")
    )


def deal(p, weights):
    """Position -> source, how many earlier positions it had. Rounds of sum(weights) positions: of
    the sources with less than their share, the one with most weight for what it will have had.
    (Whichever is furthest behind would do, but for a few weights.)"""
    total = sum(weights)
    whole_rounds, i = divmod(p, total)
    had = [0] * len(weights)
    for k in range(1, i + 2):
        due = [s for s, w in enumerate(weights) if had[s] * total < k * w]
        source = max(due, key=lambda s: weights[s] / (had[s] + 1))
        had[source] += 1
    return source, whole_rounds * weights[source] + had[source] - 1


def shuffled(x, n, turn, rounds=8):
    """A Feistel network on pairs below a x b >= n; what falls outside n goes again."""
    b = max(2, isqrt(n))  # of three rows, 1 x 3 cells would only be rotated
    a = -(-n // b)
    while True:
        left, right = divmod(x, b)
        for i in range(0, rounds, 2):
            left = (left + turn(f"{i}/{right}")) % a
            right = (right + turn(f"{i + 1}/{left}")) % b
        x = left * b + right
        if x < n:
            return x


edit = edits(__file__)
SIDES = "b = max(2, isqrt(n))"
LIST = """rows = list(range(n))
    for i in range(n - 1):
        j = i + turn(str(i)) % (n - i)
        rows[i], rows[j] = rows[j], rows[i]
    return rows[x]
    """
WRONG = {  # name -> what of the reference it replaces
    "one shuffle for all epochs": edit("{epoch}/{text}", "0/{text}"),
    "a list of all rows": edit(SIDES, LIST + SIDES),
    "three rows are only rotated": edit(SIDES, "b = isqrt(n)"),
    "two rounds": edit("rounds=8", "rounds=2"),
    "no walk: a row below n by the remainder": edit(
        "if x < n:\n            return x", "return x % n"
    ),
    "the time grows with the position": edit("divmod(p, total)", "0, p"),
    "one source after the other": edit(
        "max(due, key=lambda s: weights[s] / (had[s] + 1))",
        "min(i for i in range(len(had)) if had[i] < weights[i])",
    ),
}
