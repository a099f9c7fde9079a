"""Exercise 17: which row comes at position p?

    order(p, sizes, weights, seed, hashed) -> (source, row)

p: any position from 0 on, also 10^12. Nothing is kept from one call to the next.
sizes: how many rows each source has.
weights: whole numbers from 1 on. A source of weight 2 gets twice as many positions as one of
    weight 1.
hashed("any text") -> a whole number from 0 to 2^64 - 1. It looks random, and is the same whenever
    the text is the same. It is your only source of chance.

You can answer in three steps, each in a function of its own:
- deal: which source has position p, and how many positions had it before?
- epoch: with n rows in the source, that number is place `number % n` of epoch `number // n`;
- shuffle: which row comes at this place of this epoch?

Rules:
1. Deal fairly. After any number of positions, each source has had its share of them, within one
   row. This needs no chance.
2. The rows that a source gives are epochs: it gives each row once before it gives any row again.
3. Each epoch is shuffled, whatever its size. Each seed, source and epoch has an order of its own.
4. Call hashed only with texts that begin with SEED/SOURCE/EPOCH/, where source and epoch are those
   of position p: "5/0/2/round 1", say, for epoch 2 (the third) of source 0 with seed 5. The judge
   brings hashes of its own. If one gives 0 for every text, there is no chance: each epoch gives its
   rows as 0, 1, 2.
5. Neither memory nor time grows with the sizes or with p.

For example, sizes [3, 2], weights [2, 1], and a hash that always gives 0 (you may deal in another
way, if it is as fair):

    p        0  1  2  3  4  5  6  7  8
    source   0  1  0  0  1  0  0  1  0
    row      0  0  1  2  1  0  1  0  2
"""

from collections.abc import Callable


def order(
    p: int, sizes: list[int], weights: list[int], seed: int, hashed: Callable[[str], int]
) -> tuple[int, int]:
    raise NotImplementedError("write order, then: python course/check.py 17")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import time
    import tracemalloc
    from hashlib import blake2b

    from subject import equal

    texts = []

    def hashed(text):
        texts.append(text)
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")

    def zero(text):
        return 0

    def play(count, sizes, weights, seed=5, hashed=hashed):
        """Judge the rules 1, 2 and 4 -> the rows that each source gives."""
        rows = [[] for _ in sizes]
        for p in range(count):
            texts.clear()
            source, row = answer.order(p, sizes, weights, seed, hashed)
            epoch, place = divmod(len(rows[source]), sizes[source])
            start = f"{seed}/{source}/{epoch}/"
            for text in texts:
                right = text.startswith(start)
                assert right, f"rule 4: hashed was called with {text!r}, and not with {start!r}.."
            rows[source].append(row)
            for i, weight in enumerate(weights):
                share = (p + 1) * weight / sum(weights)
                right = abs(len(rows[i]) - share) <= 1
                gave = f"source {i} gave {len(rows[i])} of the rows of p = 0 to {p}"
                assert right, f"rule 1: {gave}, and its share is {share:.1f}"
            if place == sizes[source] - 1:
                last = rows[source][-sizes[source] :]
                once = sorted(last) == [*range(sizes[source])]
                assert once, f"rule 2: epoch {epoch} of source {source} has the rows {last}"
            found = answer.order(p, sizes, weights, seed, zero)
            equal(found, (source, place), "rule 4: where hashed gives 0, the result")
        return rows

    play(30, [7], [1])
    play(200, [12, 25, 9], [27, 28, 9])
    play(200, [1, 9, 9, 9, 9], [10, 1, 1, 1, 1], 70_000)

    for p, size in ((300_000, 7), (10**12, 70_000), (10**12, 10**12)):
        tracemalloc.start()
        began = time.process_time()
        found = answer.order(p, [size], [1], 5, zero)
        took = time.process_time() - began
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 100_000, f"rule 5: it takes {most:,} bytes of memory, and may take 100,000"
        assert took < 0.5, f"rule 5: it takes {took:.1f} s; the time should not grow with p"
        equal(found, (0, p % size), "rule 4: where hashed gives 0, the result")

    for n, epochs, least in ((2, 100, 2), (3, 100, 6), (7, 300, 240)):
        (rows,) = play(epochs * n, [n], [1])
        orders = len({tuple(rows[k : k + n]) for k in range(0, epochs * n, n)})
        assert orders >= least, f"rule 3: {epochs} epochs of {n} rows have only {orders} orders"
    (rows,) = play(300, [70_000], [1])
    near = max(rows) - min(rows) < 60_000
    assert not near, f"rule 3: the first 300 of 70,000 are only from {min(rows)} to {max(rows)}"
