"""Exercise 26: ring attention with an even load.

    zigzag(T, P) -> for each of P ranks, its positions (T / P of 0 .. T - 1, ascending)
    ring_attention(rank, world, send, recv, q, k, v, positions) -> o

1. zigzag: causal attention gives position t the work t + 1. All ranks have the same number of
   positions and exactly the same work; a rank's positions are at most two runs of consecutive ones.
   T is a multiple of 2 P; an array of int64 for each rank.
2. ring_attention: each rank has q, k, v (t, D) of its positions, which may be any that together are
   0 .. T - 1. A query sees the keys at its own position and before, wherever they are. o (t, D) is
   softmax(q k^T / sqrt(D)) v over those; scores of 1,000 must not overflow.
3. A rank sends to rank + 1 only (the last to rank 0) and receives from rank - 1. It never holds the
   k and v of all ranks: in each of world - 1 turns it passes on those of one, with their positions.
"""

from collections.abc import Callable

import numpy as np


def zigzag(T: int, P: int) -> list[np.ndarray]:
    raise NotImplementedError("write zigzag, then: python course/check.py 26")


def ring_attention(
    rank: int,
    world: int,
    send: Callable,
    recv: Callable,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    raise NotImplementedError("write ring_attention, then: python course/check.py 26")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import lesson

    for T, P in ((2, 1), (4, 2), (16, 2), (24, 3), (64, 4), (80, 5), (4096, 8)):
        name, parts = f"zigzag({T}, {P})", answer.zigzag(T, P)
        assert len(parts) == P, f"{name} has {len(parts)} parts"
        for rank, part in enumerate(parts):
            assert len(part) == T // P, f"{name}: rank {rank} has {len(part)} positions"
            runs = 1 + np.count_nonzero(np.diff(part) != 1)
            assert runs <= 2, f"{name}: rank {rank} has {runs} runs of positions"
            assert (np.diff(part) > 0).all(), f"{name}: the positions of rank {rank} do not ascend"
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(T)), (
            f"{name}: together the ranks do not have each of {T} positions once"
        )
        work = [int(np.sum(np.asarray(part) + 1)) for part in parts]
        assert min(work) == max(work), f"{name}: a rank has work {max(work)}, another {min(work)}"

    def check(name, parts, scale=1.0, D=4):
        T, world = sum(map(len, parts)), len(parts)
        rng = np.random.default_rng(T + world)
        q, k, v = rng.normal(size=(3, T, D))
        q *= scale
        scores = np.where(np.tri(T, dtype=bool), q @ k.T / D**0.5, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        want = weights @ v / weights.sum(1, keepdims=True)

        def one(rank, world, send, recv):
            def to_the_right(to, x):
                assert to == (rank + 1) % world, f"{name}: rank {rank} sends to rank {to}"
                send(to, np.asarray(x))

            mine = parts[rank]
            given = [x[mine].copy() for x in (q, k, v)]
            with np.errstate(all="ignore"):
                o = answer.ring_attention(rank, world, to_the_right, recv, *given, mine.copy())
            assert all(np.array_equal(x[mine], y) for x, y in zip((q, k, v), given)), (
                f"{name}: rank {rank} changed its q, k or v"
            )
            return o

        results, sent = lesson.threads(world, one)
        for rank, o in enumerate(results):
            assert np.shape(o) == (len(parts[rank]), D), f"{name}: o has shape {np.shape(o)}"
            bad = ~np.isclose(o, want[parts[rank]], rtol=1e-9, atol=1e-9).all(1)
            if bad.any():
                i = int(np.argmax(bad))
                t = int(parts[rank][i])
                raise AssertionError(
                    f"{name}: position {t} on rank {rank} is {o[i]}, not {want[t]}"
                )
        lap = (world - 1) * len(parts[0]) * (2 * D * 8 + 8)
        assert max(sent) <= lap, f"{name}: a rank sent {max(sent)} bytes, {lap} go round the ring"

    blocks = np.split(np.arange(24), 3)
    check("one rank", [np.arange(6)])
    check("the ranks' own zigzag", answer.zigzag(24, 3))
    check("zigzag over 4 ranks", answer.zigzag(32, 4))
    check("blocks: a rank sees nothing of the next one's", blocks)
    check("blocks in reverse", blocks[::-1])
    check("every third position", [np.arange(r, 24, 3) for r in range(3)])
    check("scores near 1,000", answer.zigzag(16, 2), scale=1000.0)
    check("D = 9", blocks, D=9)
