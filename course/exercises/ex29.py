"""Exercise 29: the loss, with the vocabulary cut over the ranks.

    parallel_loss(all_reduce, logits, first, targets) -> loss (B,), d_logits (B, n)

The last matrix of a language model is large, so its columns are cut: a rank has the logits of the
tokens first .. first + n - 1 only (first and n differ from rank to rank), for all B positions.
targets (B,), int64, are the right tokens, of the whole vocabulary, and the same on all ranks. With
two ranks, four tokens, logits [[1, 2]] and [[3, 4]], and the target 2: the loss is
log(e^1 + e^2 + e^3 + e^4) - 3 = 1.4402 on both, and d_logits is the softmax over all four minus 1
at the target: [[0.0321, 0.0871]] on rank 0, [[0.2369 - 1, 0.6439]] on rank 1.

all_reduce(x, "sum") and all_reduce(x, "max") take an array of the same shape and dtype from every
rank, and return the sum or the maximum over the ranks; x itself stays. All ranks must call it
equally often, in the same order.
1. loss: cross-entropy of each position, the same on all ranks, as float32; d_logits: the gradient
   of the *sum* of the losses, for this rank's logits, float32.
2. Logits of +-10,000, or -inf (a token that is ruled out), give neither overflow nor NaN. Of each
   position, some logit in the vocabulary is finite. A target that is ruled out has the loss inf.
3. The logits stay where they are: a rank gives to all_reduce at most 3 numbers for each position.
4. `logits` (float32) and `targets` are left as they are.
"""

from collections.abc import Callable

import numpy as np


def parallel_loss(
    all_reduce: Callable, logits: np.ndarray, first: int, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError("write parallel_loss, then: python course/check.py 29")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import lesson

    def check(name, whole, targets, edges):
        world = len(edges) - 1
        B = len(targets)
        x = whole.astype(np.float64)
        top = x.max(1, keepdims=True)
        p = np.exp(x - top)
        want = np.log(p.sum(1)) + top[:, 0] - x[np.arange(B), targets]
        d = p / p.sum(1, keepdims=True)
        d[np.arange(B), targets] -= 1

        def one(rank, world, send, recv):
            given = 0

            def all_reduce(x, op):
                nonlocal given
                where = f"{name}: rank {rank} calls all_reduce"
                assert op in ("sum", "max"), f"{where} with {op!r}, which is neither sum nor max"
                assert isinstance(x, np.ndarray), f"{where} with a {type(x).__name__}"
                given += x.size
                assert given <= 3 * B, (
                    f"{where} with {given} numbers, more than 3 for each of {B} positions"
                )
                for other in range(world):
                    send(other, x)
                parts = [recv(other) for other in range(world)]
                kinds = {(part.shape, part.dtype.name) for part in parts}
                assert len(kinds) == 1, f"{where}, and the ranks gave it {sorted(kinds, key=str)}"
                return np.sum(parts, 0, parts[0].dtype) if op == "sum" else np.max(parts, 0)

            mine = whole[:, edges[rank] : edges[rank + 1]].copy()
            mine_before = mine.copy()
            targets_before = targets.copy()
            with np.errstate(all="ignore"):
                out = answer.parallel_loss(all_reduce, mine, edges[rank], targets_before)
            assert np.array_equal(mine, mine_before), f"{name}: rank {rank} changed its logits"
            assert np.array_equal(targets, targets_before), f"{name}: rank {rank} changed targets"
            return out

        results, _ = lesson.threads(world, one)
        for rank, (loss, gradient) in enumerate(results):
            a, b = edges[rank], edges[rank + 1]
            for label, got, right in (("loss", loss, want), ("d_logits", gradient, d[:, a:b])):
                kind = f"{got.dtype} {got.shape}" if isinstance(got, np.ndarray) else type(got)
                assert kind == f"float32 {right.shape}", (
                    f"{name}: {label} of rank {rank} is {kind}, not float32 {right.shape}"
                )
                bad = ~np.isclose(got, right, 1e-5, 1e-5)
                if bad.any():
                    at = tuple(int(i) for i in np.argwhere(bad)[0])
                    raise AssertionError(
                        f"{name}: {label}{list(at)} of rank {rank} (tokens {a} to {b - 1}, target "
                        f"{targets[at[0]]}) is {got[at]}, not {right[at]:.6f}"
                    )
            assert np.array_equal(loss, results[0][0]), f"{name}: ranks 0 and {rank} differ in loss"

    rng = np.random.default_rng(26)

    def draw(B, V, scale=1.0, shift=0.0):
        return (shift + scale * rng.normal(size=(B, V))).astype(np.float32), rng.integers(0, V, B)

    example = np.array([[1, 2, 3, 4]], np.float32)
    check("the example", example, np.array([2]), [0, 2, 4])
    check("one rank", *draw(5, 7), [0, 7])
    check("two ranks", *draw(6, 8), [0, 4, 8])
    check("uneven parts", *draw(9, 13), [0, 1, 6, 13])
    check("300 tokens", *draw(40, 300), [0, 130, 300])
    check("a rank without tokens", *draw(4, 6), [0, 3, 3, 6])
    check("every token is a target once", draw(12, 12)[0], np.arange(12), [0, 4, 8, 12])
    check("the same target twice", draw(4, 6)[0], np.array([5, 5, 0, 5]), [0, 3, 6])
    check("logits of 10,000", *draw(8, 12, 3000.0), [0, 4, 8, 12])
    check("all logits near 10,000", *draw(8, 12, 1.0, 10_000.0), [0, 6, 12])
    check("all logits near -10,000", *draw(8, 12, 1.0, -10_000.0), [0, 6, 12])
    far = draw(6, 12)[0]
    far[:, 8:] += 200  # the largest logit is on the last rank alone
    check("the last rank has all the weight", far, np.arange(6, 12), [0, 4, 8, 12])
    out = draw(6, 12)[0]
    out[:, :4] = -np.inf
    out[0, 5:] = -np.inf
    check("tokens ruled out on a whole rank", out, np.array([4, 5, 7, 8, 9, 11]), [0, 4, 8, 12])
    check("a target that is ruled out", out, np.array([4, 0, 7, 8, 1, 11]), [0, 4, 8, 12])
    check("no positions", np.zeros((0, 6), np.float32), np.zeros(0, np.int64), [0, 3, 6])
