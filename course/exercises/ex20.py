"""Exercise 20: merge the attention over two blocks of keys.

    merge(o1, lse1, o2, lse2) -> o, lse

Each of n queries has attended to one block of keys, then to another. For each block, o (n, D) is
the softmax's weighted mean of the values *in that block*, and lse (n,) is the log of the sum of the
exponentials of its scores. Return both for the two blocks together, as if all keys had been in one.
1. Scores may be 20,000 or -20,000: nothing overflows.
2. A query for which a block is wholly masked has lse = -inf and o = 0 there. If both blocks are, so
   has the result: never NaN.
3. The arguments stay as they are, and so does the dtype (float64, 32 or 16). The results are new
   arrays.
"""

import numpy as np


def merge(
    o1: np.ndarray, lse1: np.ndarray, o2: np.ndarray, lse2: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError("write merge, then: python course/check.py 20")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    from itertools import product

    import numpy as np
    from subject import same

    rng = np.random.default_rng(5)

    def attend(scores, values):
        """By the definition, in float64; where all is masked, o is 0 and lse -inf."""
        top = scores.max(0, initial=-30_000)
        weights = np.exp(scores - top)
        total = weights.sum(0)  # 1 or more, unless all is masked
        return weights.T @ values / np.maximum(total, 1)[:, None], np.log(total) + top

    @np.errstate(all="ignore")
    def check(add1, add2, dtype):
        scores = rng.normal(size=(2, 3, 2))  # (block, key, query)
        scores[:, :, 0] += [[add1], [add2]]
        values = rng.normal(size=(2, 3, 2))  # (block, key, D)
        first, second = map(attend, scores, values)
        o, lse = answer.merge(*[x.astype(dtype) for x in (*first, *second)])
        right_o, right_lse = attend(np.vstack(scores), np.vstack(values))
        case = f"{dtype}, {add1} added to query 0's scores in block 1, {add2} in block 2"
        near = np.finfo(dtype).eps ** 0.5
        same(o, right_o, f"{case}: o", 0, near, dtype)
        same(lse, right_lse, f"{case}: lse", 0, near, dtype)

    for added in product((0, 20_000, -20_000, -np.inf), repeat=2):
        check(*added, "float64")  # rule 1; rule 2 with -inf
    for dtype in ("float32", "float16"):
        check(0, 5, dtype)  # rule 3
