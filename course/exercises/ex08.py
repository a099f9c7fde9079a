"""Exercise 8: which row comes at position p?

    order(p, sizes, weights, seed) -> (source, row)

sizes: rows of each source; weights: whole numbers, a source of weight 2 gets twice the positions of
one of weight 1; p: any position from 0 on, also 10^12. Nothing is saved between calls. Rules:
1. after any number of positions each source has had its share of them, within one row;
2. the rows that a source gives are epochs: it gives each row once before it gives one again;
3. each epoch of each source, and each seed, has an order of its own; it looks random: two rows in
   succession do not always differ by the same number, modulo the size;
4. memory does not grow with the sizes or with p, and neither does the time.
"""


def order(p: int, sizes: list[int], weights: list[int], seed: int) -> tuple[int, int]:
    raise NotImplementedError("write order, then: python course/check.py 8")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import time
    import tracemalloc
    from collections import Counter

    for sizes, weights in (
        ([7], [1]),
        ([40, 31], [2, 1]),
        ([12, 25, 9], [5, 3, 2]),
        ([1, 2], [1, 9]),
    ):
        case, had = f"sizes {sizes}, weights {weights}", [[] for _ in sizes]
        for p in range(300):
            source, row = answer.order(p, list(sizes), list(weights), 5)
            assert 0 <= row < sizes[source], (
                f"{case}, position {p}: no row {row} in source {source}"
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
                twice = [row for row, times in Counter(epoch).items() if times > 1]
                assert not twice, f"{case}: epoch {k} of source {i} gives row {twice[0]} twice"
            different = len({tuple(epoch) for epoch in epochs})
            assert n < 9 or different == len(epochs), (
                f"{case}: {len(epochs)} epochs of source {i} have {different} orders: {epochs[:2]}"
            )
    start = time.perf_counter()
    answer.order(10**6, [7], [1], 5)
    took = time.perf_counter() - start
    assert took < 0.2, f"position 10^6 takes {took:.1f} s: the time must not grow with p"
    far = [answer.order(7 * 10**15 + i, [7], [1], 5)[1] for i in range(7)]
    assert len(set(far)) == 7, f"an epoch of 7 rows at position 7 x 10^15 is {far}"
    n, runs = 307, {}
    for seed in (1, 2):
        places = [answer.order(p, [n, n], [1, 1], seed) for p in range(2 * n)]
        for source in (0, 1):
            rows = [row for s, row in places if s == source]
            steps = Counter((b - a) % n for a, b in zip(rows, rows[1:]))
            step, times = steps.most_common(1)[0]
            assert times < 20, f"successive rows differ by {step} at {times} of {n} places"
            runs[seed, source] = rows
    for a, b in (((1, 0), (2, 0)), ((1, 0), (1, 1))):
        same = sum(x == y for x, y in zip(runs[a], runs[b]))
        assert same < 20, f"(seed, source) {a} and {b}: the same row at {same} of {n} places"

    for n in (30_000, 10**9):  # a table of n rows is found out before it gets large
        tracemalloc.start()
        places = [answer.order(p, [n, 5], [3, 1], 1) for p in (0, 17, 10**12, 10**12 + 1)]
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 100_000, f"{n:,} rows: {most:,} bytes of memory"
        assert len(set(places)) > 2, f"{n:,} rows: {places} at positions 0, 17, 10^12, 10^12 + 1"
