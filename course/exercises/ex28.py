"""Exercise 28: write the ring all-reduce.

    ring_all_reduce(rank, world, send, recv, x) -> the sum of all ranks' x

Three ranks with x = [1, 2, 3], [10, 20, 30] and [100, 200, 300] all return [111, 222, 333].

Each of `world` ranks (0 .. world - 1, each a thread here) calls it with its own x: an array (n,).
n is the same on all ranks, but not always a multiple of `world`; it may be 0, and x may be a slice
with a step. send(to, a) sends a copy of one array (not of a tuple or a number) to a rank and does
not wait; recv(source) waits for the next one from there, and returns it.
1. All ranks return the sum in a new array, with the same bits. It has the dtype of x, and so does
   every addition: the sum of int64 is exact. x itself stays as it is.
2. A rank sends only to the next one, rank + 1; the last one sends to rank 0.
3. It sends at most 2 (world - 1) messages, and no element more often than it must: all ranks
   together send 2 (world - 1) times the bytes of x, in parts of n / world elements, rounded up or
   down.

One way to do it: each rank cuts x into `world` parts. For world - 1 turns, each passes on a part to
which it has added its own, until each rank has the whole sum of one part; then the sums go round.
"""

from collections.abc import Callable

import numpy as np


def ring_all_reduce(rank: int, world: int, send: Callable, recv: Callable, x: np.ndarray):
    raise NotImplementedError("write ring_all_reduce, then: python course/check.py 28")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import lesson
    import numpy as np
    from subject import equal, same

    def check(xs, near=0.0):
        """xs (world, n): the x of each rank. near: how far rounding may move a sum."""
        world = len(xs)
        most = 2 * (world - 1)
        right = xs.sum(0, xs.dtype)
        sizes = []  # of all messages

        def one(rank, world, send, recv):
            def noted(to, part):
                equal(to, (rank + 1) % world, f"rule 2: the rank that rank {rank} sends to")
                sizes.append(part.size)
                send(to, part)

            found = answer.ring_all_reduce(rank, world, noted, recv, xs[rank])
            same(found, right, f"rule 1: on rank {rank}, sum", 0, near)
            return found.tobytes()

        results, sent = lesson.threads(world, one)
        assert len(set(results)) == 1, "rule 1: the ranks' sums differ in their last bits"
        assert len(sizes) <= most * world, (
            f"rule 3: all ranks together send {len(sizes)} messages, "
            f"and should send {most * world} at most"
        )
        equal(sum(sent), most * right.nbytes, "rule 3: what all ranks together send, in bytes,")
        n = xs.shape[1]
        assert {*sizes} <= {n // world, -(-n // world)}, (
            f"rule 3: the messages have {sorted(sizes)} elements, and should have {n} / {world}"
        )

    rng = np.random.default_rng(28)
    check(np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300]]))  # the text's example
    check(np.array([[2**53, 0], [1, 5]]))  # float64 has no 2^53 + 1
    for world, n in ((2, 3), (3, 2), (3, 0), (1, 7), (5, 23)):
        check(np.float32(rng.normal(size=(world, n))), 1e-5)
    check(rng.normal(size=(3, 140_000))[:, ::2], 1e-13)  # slices with a step, float64
