"""Exercise 17: which row comes at position p?

    order(p, sizes, weights, seed, hashed) -> (source, row)

sizes: rows of each source; weights: whole numbers, a source of weight 2 gets twice the positions of
one of weight 1; p: any position from 0 on, also 10^12. Nothing is saved between calls.
hashed("any text") -> a whole number from 0 to 2^64 - 1 that looks random, and is the same for the
same text. It is the only source of chance. Rules:
1. after any number of positions each source has had its share of them, within one row;
2. the rows that a source gives are epochs: it gives each row once before it gives one again;
3. each epoch is shuffled, whatever its size; each seed, source and epoch in an order of its own;
4. the shuffle of an epoch calls hashed only with texts that begin with SEED/SOURCE/EPOCH/, such as
   "5/0/2/round 1" in epoch 2 (the third) of source 0 with seed 5. Rule 1 needs no chance. The judge
   brings hashes of its own. If one gives other numbers for one epoch, that epoch changes, and no
   other. If one gives 0 for every text, there is no chance: each epoch gives its rows as 0, 1, 2;
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
    from itertools import permutations

    def hash_of(changed: str = "?", calls: list | None = None) -> Callable[[str], int]:
        """A hash; of texts that begin with `changed`, another one."""

        def hashed(text: str) -> int:
            assert isinstance(text, str), f"hashed was called with {text!r}, which is no text"
            if calls is not None:
                calls.append(text)
            key = b"another" if text.startswith(changed) else b"the judge"
            return int.from_bytes(blake2b(text.encode(), digest_size=8, key=key).digest(), "big")

        return hashed

    def shares_and_epochs(sizes: list[int], weights: list[int]) -> None:
        case = f"sizes {sizes}, weights {weights}"
        had = [[] for _ in sizes]
        for p in range(300):
            source, row = answer.order(p, list(sizes), list(weights), 5, hash_of())
            no_chance = answer.order(p, list(sizes), list(weights), 5, lambda text: 0)
            here = f"{case}, position {p}"
            assert 0 <= row < sizes[source], f"{here}: no row {row} in source {source}"
            expected = (source, len(had[source]) % sizes[source])
            assert no_chance == expected, (
                f"{here}: hashed gives 0 for every text, and yet {no_chance} comes where "
                f"{expected} should, so something else shuffles"
            )
            had[source].append(row)
            for i, rows in enumerate(had):
                share = (p + 1) * weights[i] / sum(weights)
                assert abs(len(rows) - share) <= 1, (
                    f"{case}: of {p + 1} rows source {i} gave {len(rows)}, its share is {share:.1f}"
                )
        for i, (rows, n) in enumerate(zip(had, sizes)):
            epochs = [rows[k : k + n] for k in range(0, len(rows) - n + 1, n)]
            for k, epoch in enumerate(epochs):
                assert len({*epoch}) == n, (
                    f"{case}: epoch {k} of source {i} gives {epoch}, and each row should come once"
                )
            different = len({tuple(epoch) for epoch in epochs})
            assert n < 9 or different == len(epochs), (
                f"{case}: {len(epochs)} epochs of source {i} have {different} orders: {epochs[:2]}"
            )

    def keys() -> None:
        n = 23
        first = {}
        played = {}
        strange = []

        def play(seed: int, hashed) -> dict[tuple[int, int], list[int]]:
            """Four epochs of two sources -> (source, epoch): rows."""
            places = [answer.order(p, [n, n], [3, 3], seed, hashed) for p in range(8 * n)]
            rows = [[row for s, row in places if s == source] for source in (0, 1)]
            return {(s, e): rows[s][e * n : e * n + n] for s in (0, 1) for e in range(4)}

        for seed in (1, 2, 3, 11):
            calls: list[str] = []
            played[seed] = play(seed, hash_of("?", calls))
            for (source, epoch), rows in played[seed].items():
                here = f"epoch {epoch} of source {source} with seed {seed}"
                other = first.setdefault(tuple(rows), here)
                assert other == here, f"{here} has the order of {other}, {rows}"
            strange += [(seed, t) for t in calls if not t.startswith((f"{seed}/0/", f"{seed}/1/"))]
        assert not strange, (
            f"hashed is called with {strange[0][1]!r}, and the seed is {strange[0][0]}"
        )
        for seed, changed in ((1, 2), (2, 1), (3, 0), (11, 0)):  # a seed, an epoch of source 1
            start = f"{seed}/1/{changed}/"
            for (source, epoch), rows in play(seed, hash_of(start)).items():
                before = played[seed][source, epoch]
                here = f"epoch {epoch} of source {source}"
                said = f"hashed gives other numbers for texts that begin with {start}, and {here}"
                if (source, epoch) == (1, changed):
                    assert rows != before, f"{said} is as before, {rows}"
                else:
                    assert rows == before, f"{said} changes, {before} to {rows}"

    def looks_random() -> None:
        keys = 1000
        n = 7
        counts = Counter(
            (x, answer.order(x, [n], [1], seed, hash_of())[1])
            for seed in range(keys)
            for x in range(n)
        )
        for x in range(n):
            for row in range(n):
                assert 80 < counts[x, row] < 206, (
                    f"{n} rows, {keys} seeds: position {x} gets row {row} {counts[x, row]} times, "
                    f"about {keys // n} are expected; are there enough rounds?"
                )
        for n in (2, 3):  # the smallest ones are shuffled too, in all of their orders
            epochs = {
                tuple(answer.order(p, [n], [1], seed, hash_of())[1] for p in range(n))
                for seed in range(100 * n)
            }
            missing = {*permutations(range(n))} - epochs
            assert not missing, f"{n} rows: in {100 * n} epochs the order {min(missing)} never came"
        for n in (307, 1013, 30_000, 10**9, 10**12):  # one shuffle of all: no blocks, no runs
            rows = [answer.order(p, [n], [1], 3, hash_of())[1] for p in range(300)]
            steps = Counter((b - a) % n for a, b in zip(rows, rows[1:]))
            step, times = steps.most_common(1)[0]
            assert times < 20, (
                f"{n:,} rows: successive ones differ by {step} at {times} of 300 places"
            )
            ends = min(rows), max(rows)
            assert ends[0] < 0.1 * n and ends[1] > 0.9 * n, (
                f"{n:,} rows: of the first 300 the smallest is {ends[0]:,}, the largest {ends[1]:,}"
            )

    def far_and_large() -> None:
        start = time.process_time()
        answer.order(10**6, [7], [1], 5, hash_of())
        took = time.process_time() - start
        assert took < 0.2, f"position 10^6 takes {took:.1f} s: the time must not grow with p"
        far = [answer.order(7 * 10**15 + i, [7], [1], 5, hash_of())[1] for i in range(7)]
        assert len(set(far)) == 7, f"an epoch of 7 rows at position 7 x 10^15 is {far}"
        for n in (30_000, 10**9):  # a table of n rows is found out before it gets large
            tracemalloc.start()
            for p in (0, 17, 10**12, 10**12 + 1):
                answer.order(p, [n, 5], [3, 1], 1, hash_of())
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert most < 100_000, f"{n:,} rows: {most:,} bytes of memory"

    for sizes, weights in (
        ([7], [1]),
        ([40, 31], [2, 1]),
        ([12, 25, 9], [5, 3, 2]),
        ([1, 2], [1, 9]),
        ([11, 13, 6], [1, 1, 1]),
    ):
        shares_and_epochs(sizes, weights)
    keys()
    far_and_large()
    looks_random()
