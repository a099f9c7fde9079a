"""Exercise 38: attention with a window, over ranks that send no more than is needed.

    spans(lengths, window) -> int64 array (P, 2)
    ring_attention(rank, world, send, recv, q, k, v, lengths, window) -> o

A sequence lies on P ranks in blocks: lengths[r] >= 1 consecutive positions on rank r, those of rank
0 first. A query at position t sees the keys at t - window + 1 .. t (those that there are).

1. spans: for each rank, the first position whose key any of its queries sees, and one more than the
   last. spans([3, 3, 2], 3) -> [[0, 3], [1, 6], [4, 8]]: positions 3, 4, 5 on rank 1 see 1 .. 5. A
   sequence may have more than 2^31 positions: lengths of 10^9 each must not overflow, even when
   they are given as an int32 array.
2. ring_attention: each rank (a thread here) has q, k, v (its length, D) of its block. o, as large,
   is softmax(q k^T / sqrt(D)) v over the keys that a query sees, of q's dtype (float32 or float64)
   and as exact. Scores of 1,000 must not overflow. q, k and v are left as they are.
3. send(to, x) sends a copy of one array to a rank and does not wait: send k, then v, not a tuple.
   recv(source) waits for the next array from there. Rank r sends to r + 1 only, and passes on, as
   keys and values, whole blocks: those of which rank r + 1 sees a key, and no others. In the
   example rank 2 sees 4 .. 7, so rank 1 sends it its own block and not that of rank 0. The last
   rank sends nothing.
4. A rank does not collect blocks, it works with one at a time: with n the length of the longest, it
   holds at most 16 n D + 12 n n numbers at any moment, beside its own q, k and v. With numpy alone:
   the judge sees its memory.
"""

from collections.abc import Callable

import numpy as np


def spans(lengths: np.ndarray, window: int) -> np.ndarray:
    raise NotImplementedError("write spans, then: python course/check.py 38")


def ring_attention(
    rank: int,
    world: int,
    send: Callable,
    recv: Callable,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: np.ndarray,
    window: int,
) -> np.ndarray:
    raise NotImplementedError("write ring_attention, then: python course/check.py 38")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import re
    import threading
    import tracemalloc
    from pathlib import Path

    import lesson

    source = Path(answer.__file__).read_text()
    assert not re.search(r"^ *(import|from) torch", source, re.M), "with numpy alone"
    rng = np.random.default_rng(27)

    def needed(lengths, window):
        ends = [sum(lengths[: r + 1]) for r in range(len(lengths))]  # exact: Python's integers
        return [[max(0, b - n - window + 1), b] for n, b in zip(lengths, ends)]

    cases = [([3, 3, 2], 3), ([5], 2), ([4, 4], 1), ([2, 2, 2], 100), ([1, 7, 1, 3], 4)]
    cases += [([10**9] * 5, 10**6), ([2 * 10**9] * 3, 3 * 10**9)]
    cases += [([int(n) for n in rng.integers(1, 9, 6)], int(w)) for w in (1, 2, 5, 13, 60)]
    for lengths, window in cases:
        for kind in (list, lambda x: np.array(x, np.int64), lambda x: np.array(x, np.int32)):
            given = kind(lengths)
            name = f"spans({lengths}, {window}), lengths as {getattr(given, 'dtype', 'a list')}"
            got = answer.spans(given, window)
            want = np.array(needed(lengths, window), np.int64)
            assert isinstance(got, np.ndarray) and got.dtype == np.int64, (
                f"{name} is {got.dtype if isinstance(got, np.ndarray) else type(got)}, not int64"
            )
            assert np.array_equal(got, want), f"{name} is {got.tolist()}, not {want.tolist()}"

    def check(name, lengths, window, scale=1.0, D=4, dtype=np.float64, measured=False):
        T = sum(lengths)
        world = len(lengths)
        edges = np.cumsum([0, *lengths])
        q, k, v = rng.normal(size=(3, T, D)).astype(dtype)
        q *= scale
        t = np.arange(T)
        seen = (t[:, None] >= t) & (t[:, None] - window < t)
        scores = np.where(seen, q.astype(float) @ k.T.astype(float) / D**0.5, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        want = weights @ v / weights.sum(1, keepdims=True)
        spans = needed(lengths, window)
        blocks = [[] for _ in lengths]
        one_at_a_time = threading.Lock()
        held = [0] * world
        peak = [0] * world
        low = [0] * world  # memory when a rank began to work
        inside = [False] * world

        def note(rank):
            now, most = tracemalloc.get_traced_memory()
            peak[rank] = max(peak[rank], held[rank] + most - low[rank])
            held[rank] += now - low[rank]

        def start(rank):
            tracemalloc.reset_peak()
            low[rank] = tracemalloc.get_traced_memory()[0]

        def enter(rank):
            one_at_a_time.acquire()
            inside[rank] = True
            start(rank)

        def leave(rank):
            if inside[rank]:
                note(rank)
                inside[rank] = False
                one_at_a_time.release()

        given = [[x[a:b].copy() for x in (q, k, v)] for a, b in zip(edges, edges[1:])]

        def one(rank, world, send, recv):
            def noted_send(to, x):
                assert isinstance(x, np.ndarray), (
                    f"{name}: send takes one array, rank {rank} gives it a {type(x).__name__}; "
                    f"send k, then v"
                )
                assert to == rank + 1 < world, f"{name}: rank {rank} of {world} sends to rank {to}"
                assert x.shape[1:] == (D,) and x.dtype == dtype, (
                    f"{name}: rank {rank} sends {x.dtype} of shape {x.shape}"
                )
                blocks[rank].append(len(x))
                note(rank) if measured else None
                send(to, x)  # its copy does not count
                start(rank) if measured else None

            def noted_recv(source):
                leave(rank) if measured else None
                x = recv(source)
                if measured:
                    enter(rank)
                    held[rank] += x.nbytes  # allocated by another rank
                return x

            enter(rank) if measured else None
            try:
                with np.errstate(all="ignore"):
                    args = (*given[rank], np.array(lengths), window)
                    return answer.ring_attention(rank, world, noted_send, noted_recv, *args)
            finally:
                leave(rank)

        tracemalloc.start() if measured else None
        try:
            results, sent = lesson.threads(world, one)
        finally:
            tracemalloc.stop() if measured else None
        near = 1e-9 if dtype == np.float64 else 1e-4
        for rank, o in enumerate(results):
            mine = slice(edges[rank], edges[rank + 1])
            assert all(np.array_equal(x[mine], y) for x, y in zip((q, k, v), given[rank])), (
                f"{name}: rank {rank} changed its q, k or v"
            )
            kind = f"{o.dtype} {o.shape}" if isinstance(o, np.ndarray) else type(o)
            right = f"{np.dtype(dtype)} {(lengths[rank], D)}"
            assert kind == right, f"{name}: o of rank {rank} is {kind}, not {right}"
            part = want[mine]
            bad = ~(np.abs(o - part) <= near * (1 + np.abs(part))).all(1)
            if bad.any():
                i = int(np.argmax(bad))
                raise AssertionError(
                    f"{name}: position {edges[rank] + i} on rank {rank} is {o[i]}, not {part[i]}"
                )
            lends = [r for r in range(rank + 1) if rank + 1 < world]
            lends = [r for r in lends if spans[rank + 1][0] < edges[r + 1]]
            right = sorted(2 * [lengths[r] for r in lends])
            assert sorted(blocks[rank]) == right, (
                f"{name}: rank {rank} sends arrays of {blocks[rank]} positions; the next rank "
                f"needs keys and values of blocks {lends}, of {right}"
            )
        if measured:
            size = np.dtype(dtype).itemsize
            n = max(lengths)
            most = size * (16 * n * D + 12 * n * n) + 20_000  # what Python itself needs
            for rank, held_most in enumerate(peak):
                assert held_most <= most, (
                    f"{name}: rank {rank} held {held_most:,} bytes beside its own q, k and v; "
                    f"16 x {n} x {D} + 12 x {n} x {n} numbers are {most:,}"
                )

    check("one rank", [6], 3)
    check("one rank, window of 1", [6], 1)
    check("the example", [3, 3, 2], 3)
    check("window of 1: each position sees itself", [4, 4, 4], 1)
    check("window of 2: a rank needs one key of the one before", [4, 4, 4], 2)
    check("window as long as a block, and 1", [4, 4, 4, 4], 5)
    check("one longer still: two blocks back", [4, 4, 4, 4], 6)
    check("window longer than the sequence", [4, 4, 4], 100)
    check("uneven blocks", [5, 1, 2, 7, 1, 3], 4)
    check("scores near 1,000", [6, 6, 6], 7, scale=1000.0)
    check("float32", [6, 6, 6], 7, dtype=np.float32)
    check("D = 9", [8, 8, 8], 12, D=9)
    check("16 ranks, long blocks", [48] * 16, 10_000, D=4, measured=True)
    check("16 ranks, many channels", [8] * 16, 10_000, D=512, measured=True)
    check("no change to its own block", [5, 5], 8, dtype=np.float32)
