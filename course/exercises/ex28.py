"""Exercise 28: write the ring all-reduce.

    ring_all_reduce(rank, world, send, recv, x) -> the sum of all ranks' x

Three ranks with x = [1, 2, 3], [10, 20, 30] and [100, 200, 300] all return [111, 222, 333].

Each of `world` ranks (0 .. world - 1, each a thread here) calls it with its own x: an array (n,), n
being the same on all ranks, but not always a multiple of `world`; it may be 0, and x a slice with a
step. send(to, a) sends a copy of one array (not of a tuple or a number) to a rank and does not
wait; recv(source) waits for the next one from there, and returns it.
1. All ranks return the sum in a new array, with the same bits. It is of x's dtype, and so is every
   addition: the sum of int64 is exact. x itself stays as it is.
2. A rank sends to the next one only, rank + 1, and the last one to rank 0.
3. It sends at most 2 (world - 1) messages, and no element more often than it must: all ranks
   together send 2 (world - 1) times the bytes of x, in parts that differ by at most one element.

A way to do it: each rank cuts x into `world` parts. For world - 1 turns each passes on a part to
which it has added its own, until each has the whole sum of one part; then the sums go round.
"""

from collections.abc import Callable

import numpy as np


def ring_all_reduce(rank: int, world: int, send: Callable, recv: Callable, x: np.ndarray):
    raise NotImplementedError("write ring_all_reduce, then: python course/check.py 28")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import lesson

    def check(world, n, dtype, scale=100, step=1):
        rng = np.random.default_rng(world * 1000 + n)
        xs = [(scale * rng.normal(size=n * step)).astype(dtype)[::step] for _ in range(world)]
        before = [x.copy() for x in xs]
        sizes = [[] for _ in xs]
        name = f"{world} ranks, {n} of {np.dtype(dtype).name}" + ", every other one" * (step > 1)

        def one(rank, world, send, recv):
            def noted(to, part):
                assert 0 <= to < world, f"{name}: rank {rank} sends to rank {to}"
                assert to == (rank + 1) % world, (
                    f"{name}: rank {rank} sends to {to}, which is not its neighbour on the right"
                )
                assert isinstance(part, np.ndarray), (
                    f"{name}: send takes an array, rank {rank} gives it a {type(part).__name__}"
                )
                assert part.dtype == dtype, (
                    f"{name}: rank {rank} sends {part.dtype}, not {np.dtype(dtype).name}"
                )
                sizes[rank].append(part.size)
                assert len(sizes[rank]) <= 2 * (world - 1), (
                    f"{name}: rank {rank} sends more than {2 * (world - 1)} messages"
                )
                send(to, part)

            return answer.ring_all_reduce(rank, world, noted, recv, xs[rank])

        results, sent = lesson.threads(world, one)
        exact = np.int64 if np.issubdtype(dtype, np.integer) else np.longdouble
        want = sum(x.astype(exact) for x in before)
        total = 2 * (world - 1) * xs[0].nbytes
        near = {np.float32: 1e-5, np.float64: 1e-13}.get(dtype, 0) * scale * world  # rounding
        for rank, got in enumerate(results):
            assert isinstance(got, np.ndarray), f"{name}: rank {rank} returns {got!r}"
            assert got.shape == (n,) and got.dtype == dtype, (
                f"{name}: rank {rank} returns {got.dtype} of shape {got.shape}"
            )
            far = np.flatnonzero(~(np.abs(got.astype(exact) - want) <= near))
            assert not far.size, (
                f"{name}: on rank {rank}, element {far[0]} is {got[far[0]]}, not {want[far[0]]}"
            )
            assert not any(np.shares_memory(got, x) for x in xs), f"{name}: the result is x itself"
            assert np.array_equal(xs[rank], before[rank]), f"{name}: x of rank {rank} was changed"
        assert sum(sent) == total, f"{name}: {sum(sent)} bytes were sent in all, not {total}"
        lengths = [length for one_rank in sizes for length in one_rank]
        assert not lengths or max(lengths) - min(lengths) <= 1, (
            f"{name}: messages have {min(lengths)} to {max(lengths)} elements"
        )
        for rank, got in enumerate(results):
            assert got.tobytes() == results[0].tobytes(), (
                f"{name}: ranks 0 and {rank} have the same sum, but not the same bits"
            )

    for world, n in ((1, 7), (2, 8), (2, 5), (3, 12), (3, 10), (5, 23), (5, 3), (4, 64)):
        check(world, n, np.float32)
    check(3, 7, np.int64)
    check(4, 9, np.int64, scale=2.0**60)  # float64 has 53 bits
    check(3, 8, np.int32, scale=2.0**28)  # float32 has 24
    check(4, 10, np.float64)  # not by way of float32
    check(5, 999, np.float32)
    check(3, 8, np.float32, step=2)
    check(3, 0, np.float32)
    check(8, 30, np.float64)
