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
    import numpy as np
    from subject import same

    def check(logits, edges, targets=()):
        logits = logits.astype(np.float32, order="K")
        B, V = logits.shape
        targets = np.array(targets if len(targets) else rng.integers(0, V, B))
        x = logits.astype(float)
        top = x.max(1, keepdims=True)
        p = np.exp(x - top)
        total = p.sum(1, keepdims=True)
        d = (p / total).astype(np.float32)
        d[range(B), targets] -= 1
        losses = (np.log(total) + top)[:, 0] - x[range(B), targets]

        def one(rank, world, send, recv):
            given = 0

            def all_reduce(x, op):
                nonlocal given
                assert op in ("sum", "max"), f"all_reduce with {op!r}, not with sum or max"
                given += x.size
                assert given <= 3 * B, f"{given} numbers to all_reduce, for {B} positions"
                for other in range(world):
                    send(other, x)
                parts = [recv(other) for other in range(world)]
                kinds = {(part.shape, part.dtype.name) for part in parts}
                assert len(kinds) == 1, f"the ranks gave all_reduce {kinds}"
                return np.sum(parts, 0, x.dtype) if op == "sum" else np.max(parts, 0)

            first = edges[rank]
            mine = slice(first, edges[rank + 1])
            with np.errstate(all="ignore"):
                loss, gradient = answer.parallel_loss(all_reduce, logits[:, mine], first, targets)
            same(loss, losses.astype(np.float32), f"loss on rank {rank}", 1e-5, 1e-5)
            same(gradient, d[:, mine], f"d_logits on rank {rank}", 1e-5, 1e-5)
            return loss.tobytes()

        results, _ = lesson.threads(len(edges) - 1, one)
        assert len(set(results)) == 1, "the ranks differ in the last bits of the loss"

    rng = np.random.default_rng(26)
    draw = lambda *shape: rng.normal(size=shape)
    check(np.array([[1, 2, 3, 4]]), [0, 2, 4], [2])
    check(np.asfortranarray(draw(5, 7)), [0, 3, 7])
    check(draw(3, 4) - 30_000, [0, 2, 4])
    check(draw(5, 7), [0, 7])
    check(draw(9, 300), [0, 1, 130, 300])
    check(draw(4, 6), [0, 3, 3, 6])  # a rank without tokens
    check(draw(4, 6), [0, 3, 6], [5, 5, 0, 5])
    check(draw(8, 12) * 3000, [0, 4, 8, 12])
    for shift in (10_000, -10_000):
        check(draw(8, 12) + shift, [0, 6, 12], range(8))
    out = draw(6, 12)
    out[:, 8:] += 200  # the largest logit is on the last rank alone
    check(out, [0, 4, 8, 12], range(6, 12))
    out[:, :4] = -np.inf  # a whole rank
    out[0, 5:] = -np.inf
    for targets in ([4, 5, 7, 8, 9, 11], [4, 0, 7, 8, 1, 11]):  # 0 and 1 are ruled out
        check(out, [0, 4, 8, 12], targets)
    check(draw(0, 6), [0, 3, 6])
    check(draw(6, 140_000), [0, 70_000, 140_000], [0, 66_000, 69_999, 70_000, 136_000, 139_999])
    check(draw(70_000, 4), [0, 2, 4])
