"""Exercise 29: the loss, with the vocabulary cut over the ranks.

    parallel_loss(all_reduce, logits, first, targets) -> loss (B,), d_logits (B, n)

The last matrix of a language model is large, so you cut its columns: each rank has the logits of
the tokens first .. first + n - 1 only (first and n differ from rank to rank), for all B positions.
targets (B,), int64, are the right tokens, as ids of the whole vocabulary, and are the same on all
ranks. Take two ranks, four tokens, logits [[1, 2]] and [[3, 4]], and the target 2. The loss is
log(e^1 + e^2 + e^3 + e^4) - 3 = 1.4402 on both ranks, and d_logits is the softmax over all four
tokens minus 1 at the target: [[0.0321, 0.0871]] on rank 0, [[0.2369 - 1, 0.6439]] on rank 1.

all_reduce(x, "sum") and all_reduce(x, "max") take an array of the same shape and dtype from every
rank, and return the sum or the maximum over the ranks; x itself stays as it is. All ranks must call
all_reduce equally often, in the same order.
1. loss is the cross-entropy at each position, the same on all ranks, float32; d_logits is the
   gradient of the *sum* of the losses, for this rank's logits, float32.
2. Logits of +-10,000, or -inf (a token that is ruled out), cause neither overflow nor NaN. At each
   position, some logit in the vocabulary is finite. A target that is ruled out has the loss inf.
3. The logits stay where they are: a rank gives all_reduce at most 3 numbers for each position, over
   all its calls.
4. Leave `logits` (float32) and `targets` as they are.
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
    import torch
    from subject import same

    def check(logits, edges, targets=(), rule=1):
        """Rank 0 has the columns from edges[0] to edges[1], and so on."""
        logits = np.float32(logits)
        B, V = logits.shape
        targets = np.array(targets or rng.integers(0, V, B))
        exact = torch.tensor(logits).double().requires_grad_()
        right = -exact.log_softmax(1)[range(B), targets]
        right.sum().backward()

        def one(rank, world, send, recv):
            first, end = edges[rank : rank + 2]
            who = f"rank {rank}, with the tokens {first} .. {end - 1},"
            sizes = []

            def all_reduce(x, op):
                sizes.append(x.size)
                assert sum(sizes) <= 3 * B, (
                    f"rule 3: {who} gives {sum(sizes)} numbers to all_reduce, "
                    f"and should give {3 * B} at most"
                )
                for other in range(world):
                    send(other, x)
                xs = [recv(other) for other in range(world)]
                return np.max(xs, 0) if op == "max" else np.sum(xs, 0)

            loss, d = answer.parallel_loss(all_reduce, logits[:, first:end], first, targets)
            same(loss, np.float32(right.detach()), f"rule {rule}: on {who} loss", 1e-5, 1e-5)
            slopes = np.float32(exact.grad[:, first:end])
            same(d, slopes, f"rule {rule}: on {who} d_logits", 1e-5, 1e-5)

        lesson.threads(len(edges) - 1, one)

    rng = np.random.default_rng(26)
    check([[1, 2, 3, 4]], [0, 2, 4], [2])  # the text's example
    check([[0, 1, 2], [3, 4, 5]], [0, 1, 3], [0, 1])  # the gradient is not that of the mean
    check([[10_000, -10_000], [-10_000, -9000]], [0, 1, 2], [1, 1], 2)
    check([[-np.inf, 0, 0]] * 2, [0, 1, 3], [2, 0], 2)  # all of rank 0, and so a target
    check(rng.normal(size=(20, 9)), [0, 1, 6, 9])
    check(rng.normal(size=(5, 70_000)), [0, 66_000, 70_000])
