"""Exercise 17: which row comes at position p?

    order(p, sizes, weights, seed, hashed) -> (source, row)

sizes: rows of each source; weights: whole numbers from 1 on, a source of weight 2 gets twice the
positions of one of weight 1; p: any position from 0 on, also 10^12. Nothing is saved between calls.
hashed("any text") -> a whole number from 0 to 2^64 - 1 that looks random, and is the same for the
same text. It is the only source of chance. Rules:
1. after any number of positions each source has had its share of them, within one row;
2. the rows that a source gives are epochs: it gives each row once before it gives one again;
3. each epoch is shuffled, whatever its size; each seed, source and epoch in an order of its own;
4. hashed is called only with texts that begin with SEED/SOURCE/EPOCH/ of the row that comes, such
   as "5/0/2/round 1" in epoch 2 (the third) of source 0 with seed 5. Rule 1 needs no chance. The
   judge brings hashes of its own. If one gives 0 for every text, there is no chance: each epoch
   gives its rows as 0, 1, 2;
5. memory does not grow with the sizes or with p, and neither does the time.
"""

from collections.abc import Callable


def order(
    p: int, sizes: list[int], weights: list[int], seed: int, hashed: Callable[[str], int]
) -> tuple[int, int]:
    raise NotImplementedError("write order, then: python course/check.py 17")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import time
    import tracemalloc
    from collections import Counter
    from hashlib import blake2b
    from itertools import product

    own = answer.own  # unwatched, for thousands of calls
    texts = []
    seen = {}

    def hashed(text):
        texts.append(text)
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")

    def zero(text):
        return 0

    def begin(start):
        """All texts since the last time."""
        for text in texts:
            assert text.startswith(start), f"hashed was called with {text!r}, not {start}..."
        texts.clear()

    def shares_and_epochs(sizes, weights, seed):
        had = [[] for _ in sizes]
        for p in range(150):
            source, row = answer.order(p, sizes, weights, seed, hashed)
            epoch, place = divmod(len(had[source]), sizes[source])
            begin(f"{seed}/{source}/{epoch}/")
            found = own["order"](p, sizes, weights, seed, zero)
            assert found == (source, place), (
                f"where hashed gives 0 for every text, {found} comes, not {source, place}"
            )
            had[source].append(row)
            for i, rows in enumerate(had):
                share = (p + 1) * weights[i] / sum(weights)
                assert abs(len(rows) - share) <= 1, (
                    f"of {p + 1} rows source {i} gave {len(rows)}, its share is {share:.1f}"
                )
        for i, (rows, n) in enumerate(zip(had, sizes)):
            for k in range(0, len(rows) - n + 1, n):
                epoch = rows[k : k + n]
                here = f"epoch {k // n} of source {i} with seed {seed}"
                assert sorted(epoch) == [*range(n)], f"{here} is {epoch}, not each row once"
                other = seen.setdefault(tuple(epoch), here)
                assert n < 9 or other == here, f"{here} has the order of {other}, {epoch}"

    def rows_of(n, count, first=0):
        """What one source of n rows gives."""
        answer.order(first, [n], [1], 3, hashed)
        texts.clear()
        rows = []
        for p in range(first, first + count):
            rows.append(own["order"](p, [n], [1], 3, hashed)[1])
            begin(f"3/0/{p // n}/")
        return rows

    for sizes, weights, seed in (
        ([7], [1], 5),
        ([12, 25, 9], [27, 28, 9], 5),
        ([1, 2], [1, 9], 5),
        ([23, 23], [3, 3], 1),
        ([23, 23], [3, 3], 70_000),
    ):
        shares_and_epochs(sizes, weights, seed)

    for n in (1, 2, 7, 20, 300):
        rows = [own["order"](p, [n], [1], 3, lambda text: 2**64 - 1)[1] for p in range(n)]
        assert sorted(rows) == [*range(n)], f"with the largest hash, {n} rows are {rows}"
    start = time.process_time()
    rows_of(7, 1, 300_000)
    took = time.process_time() - start
    assert took < 0.2, f"it takes {took / 2:.1f} s: the time must not grow with p"
    epoch = rows_of(7, 7, 7 * 10**15)
    assert len({*epoch}) == 7, f"an epoch of 7 rows is {epoch}"
    for n in (30_000, 10**9):  # a table of n rows is found out before it gets large
        tracemalloc.start()
        answer.order(10**12, [n, 5], [3, 1], 1, zero)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 100_000, f"{most:,} bytes of memory"
    for weights in ([50, *[1] * 50], [*[1] * 299, 1000], [70_000, 1]):
        for p in (49, 299, 66_000, 10**12):  # each row is new, so it tells how many came before
            source, row = answer.order(p, [10**13] * len(weights), weights, 5, zero)
            share = p * weights[source] / sum(weights)
            assert abs(row - share) <= 1, f"it had {row} before, its share is {share:.1f}"

    counts = Counter((p % 7, row) for p, row in enumerate(rows_of(7, 7000)))
    for p, row in product(range(7), range(7)):
        assert 80 < counts[p, row] < 206, (
            f"in 1000 epochs of 7 rows place {p} has row {row} {counts[p, row]} times, "
            "about 143 are expected; are there enough rounds?"
        )
    for n, orders in ((2, 2), (3, 6)):  # the smallest ones are shuffled too
        rows = rows_of(n, 100 * n)
        epochs = {tuple(rows[k : k + n]) for k in range(0, 100 * n, n)}
        assert len(epochs) == orders, f"100 epochs had only the orders {epochs}"
    for n in (307, 1013, 30_000, 10**9, 10**12):  # one shuffle of all: no blocks, no runs
        rows = rows_of(n, 300)
        times = max(Counter((b - a) % n for a, b in zip(rows, rows[1:])).values())
        assert times < 20, f"successive rows differ by the same at {times} of 300 places"
        assert min(rows) < 0.1 * n and max(rows) > 0.9 * n, (
            f"of the first 300 rows the smallest is {min(rows):,}, the largest {max(rows):,}"
        )
