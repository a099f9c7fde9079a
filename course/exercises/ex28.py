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
    import numpy as np
    from subject import same

    def check(world, n, dtype, scale=100.0, step=1):
        xs = (scale * rng.normal(size=(world, n * step))).astype(dtype)[:, ::step]
        xs[0] = np.arange(n) % 6  # the same in all calls
        right = xs.sum(0, dtype)
        near = scale * world * {2: 0.01, 4: 1e-5, 8: 1e-13}[right.itemsize]  # of whole numbers: 0
        sizes = [[] for _ in xs]
        most = 2 * (world - 1)

        def one(rank, world, send, recv):
            def noted(to, part):
                assert to == (rank + 1) % world, f"rank {rank} sends to {to}, not to the next"
                fits = isinstance(part, np.ndarray) and part.dtype == dtype
                assert fits, f"rank {rank} sends {part!r}, not an array of x's dtype"
                sizes[rank].append(part.size)
                assert len(sizes[rank]) <= most, f"rank {rank} sends more than {most} messages"
                again = answer.own["ring_all_reduce"]
                again(rank, 1, None, None, np.zeros_like(xs[rank]))  # another ring
                send(to, part)

            found = answer.ring_all_reduce(rank, world, noted, recv, xs[rank])
            same(found, right, f"the sum on rank {rank}", 0, near)
            return found.tobytes()

        results, sent = lesson.threads(world, one)
        total = most * right.nbytes
        assert sum(sent) == total, f"{sum(sent)} bytes were sent in all, not {total}"
        lengths = {size for of_rank in sizes for size in of_rank} or {0}
        assert max(lengths) - min(lengths) < 2, f"the messages have {lengths} elements"
        assert len(set(results)) == 1, "the ranks have the same sum, but not the same bits"

    rng = np.random.default_rng(28)
    for world, n in ((1, 7), (2, 5), (2, 5), (3, 12), (3, 10), (5, 23), (5, 3)):
        check(world, n, np.float32)
    check(4, 9, np.int64, scale=2.0**60)  # float64 has 53 bits
    check(3, 8, np.int32, scale=2.0**28)  # float32 has 24
    check(4, 10, np.float64)  # not by way of float32
    check(3, 10, np.float16, scale=1.0, step=2)
    check(3, 0, np.float32)
    check(2, 5, np.float32, scale=np.inf)
    check(3, 150_000, np.float64)
    check(130, 131, np.float32)
