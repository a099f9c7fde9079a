"""Exercise 20: merge the attention over two blocks of keys.

    merge(o1, lse1, o2, lse2) -> o, lse

Each of n queries has attended to one block of keys, then to another: o (n, D) is the softmax's
weighted mean of the values *in that block*, lse (n,) the log of the sum of the exponentials of its
scores. The result is both for the two blocks together, as if all keys had been in one.
1. Scores may be 20,000 or -20,000: nothing overflows.
2. A query for which a block is wholly masked has lse = -inf and o = 0 there; if both are, so has
   the result: no NaN, ever.
3. The arguments stay as they are; the dtype (float64, 32 or 16) too. The results are new arrays.
"""

import numpy as np


def merge(
    o1: np.ndarray, lse1: np.ndarray, o2: np.ndarray, lse2: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError("write merge, then: python course/check.py 20")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import numpy as np
    from subject import same

    rng = np.random.default_rng(5)
    values = rng.normal(size=500)

    def draw(n, keys):
        return rng.integers(-2000, 2000, (n, keys)) / 1024

    def attend(scores, v):
        """softmax(scores) v and lse in float64; a row of -inf gives 0 and -inf."""
        top = scores.max(1, keepdims=True, initial=-30_000)
        weights = np.exp(scores - top)
        total = weights.sum(1, keepdims=True)  # 1 or more, if a key is seen
        return weights @ v / np.maximum(total, 1), (np.log(total) + top)[:, 0]

    def check(scores, cuts, dtype="float64", width=3, values=values):
        v = np.resize(values, (scores.shape[1], width))
        near = np.finfo(dtype).eps ** 0.5
        with np.errstate(all="ignore"):
            found, *blocks = [
                [x.astype(dtype) for x in attend(*block)]
                for block in zip(np.split(scores, cuts, 1), np.split(v, cuts))
            ]
            for block in blocks:
                found = answer.merge(*found, *block)
            for what, x, right in zip(("o", "lse"), found, attend(scores, v)):
                same(x, right, what, 0, near, dtype)

    scores = draw(6, 12)
    block = attend(scores, scores.T)
    answer.merge(*block, *block)  # where numpy warns
    first = np.arange(12) < 6
    for i in (-1, 0, 35):  # another value in none, or one of either block
        check(scores, [6], values=np.where(np.arange(500) == i, 9, values))
    zeros = np.zeros((2, 2)), np.zeros(2), np.ones((2, 2)), np.zeros(2)
    same(answer.merge(*zeros)[0], np.full((2, 2), 0.5), "o", 0, 1e-9)
    wide = np.array([[60000.0]], np.float16), np.zeros(1, np.float16)
    same(answer.merge(*wide, -wide[0], wide[1])[0], np.zeros((1, 1), np.float16), "o", 0, 1)
    for above in (1, 9, 15, 800):  # where a small weight still counts, and where it is 0
        for block in (first, ~first):
            check(scores + above * block, [6])
    for dtype in ("float32", "float16"):
        check(scores, [5], dtype)
    check(draw(2, 300), range(1, 300))  # one by one
    for n, width in ((1, 1), (1, 64), (8, 1), (0, 4), (3, 0), (66_000, 1)):
        check(draw(n, 3), [1, 2], width=width)
    for shift in (1000, -1000):
        check(scores + shift, [6], "float32")
    for shift in (20_000, -20_000):
        check(scores + shift, [4, 8])
    check(scores + np.array([0, 3000, -3000, 0, 5000, -5000])[:, None], [4, 8])
    causal = np.arange(6)[:, None] * 2 >= np.arange(12)
    nothing = np.arange(6)[:, None] == 2  # is seen by one query
    for seen in (causal, causal[:, ::-1], causal & ~nothing, first, ~first):
        check(np.where(seen, scores, -np.inf), [4, 8])
