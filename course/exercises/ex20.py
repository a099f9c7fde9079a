"""Exercise 20: merge the attention over two blocks of keys.

    merge(o1, lse1, o2, lse2) -> o, lse

Each of n queries has attended to one block of keys, then to another: o (n, D) is the softmax's
weighted mean of the values *in that block*, lse (n,) the log of the sum of the exponentials of its
scores. The result is both for the two blocks together, as if all keys had been in one.
1. Scores may be 20,000 or -20,000: nothing overflows.
2. A query for which a block is wholly masked has lse = -inf and o = 0 there; if both are, so has
   the result: no NaN, ever.
3. The arguments stay as they are; the dtype too. The results are new arrays.
"""

import numpy as np


def merge(
    o1: np.ndarray, lse1: np.ndarray, o2: np.ndarray, lse2: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError("write merge, then: python course/check.py 20")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    rng = np.random.default_rng(5)

    def attend(scores, v):
        """softmax(scores) v and lse in float64; a row of -inf gives 0 and -inf."""
        top = scores.max(1, keepdims=True)
        weights = np.exp(scores - np.where(np.isinf(top), 0, top))  # (n, keys)
        total = weights.sum(1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = (np.log(total) + np.where(np.isinf(top), 0, top))[:, 0]
        return weights @ v / np.where(total == 0, 1, total), lse

    def check(name, scores, cuts, dtype=np.float64, width=3):
        v = rng.normal(size=(scores.shape[1], width))
        name += f", {len(scores)} queries, D {width}"
        edges = [0, *cuts, scores.shape[1]]
        parts = [attend(scores[:, a:b], v[a:b]) for a, b in zip(edges, edges[1:])]
        parts = [(o.astype(dtype), lse.astype(dtype)) for o, lse in parts]
        o, lse = parts[0]
        for o2, lse2 in parts[1:]:
            given = [x.copy() for x in (o, lse, o2, lse2)]
            with np.errstate(all="ignore"):
                o_new, lse_new = answer.merge(*given)
            same = all(
                np.array_equal(a, b, equal_nan=True) for a, b in zip(given, (o, lse, o2, lse2))
            )
            assert same, f"{name}: an argument was changed"
            alias = any(np.shares_memory(x, y) for x in (o_new, lse_new) for y in given)
            assert not alias, f"{name}: a result shares memory with an argument"
            assert o_new.dtype == lse_new.dtype == dtype, (
                f"{name}: {dtype.__name__} became {o_new.dtype} and {lse_new.dtype}"
            )
            o = o_new
            lse = lse_new
        want, want_lse = attend(scores, v)
        tol = 1e-4 if dtype == np.float32 else 1e-9
        shapes = f"{o.shape} and {lse.shape}, not {want.shape} and {want_lse.shape}"
        assert o.shape == want.shape and lse.shape == want_lse.shape, f"{name}: shapes {shapes}"
        for what, got, right in (("o", o, want), ("lse", lse, want_lse)):
            bad = ~np.isclose(got, right, rtol=tol, atol=tol)
            if bad.any():
                at = tuple(np.argwhere(bad)[0].tolist())
                raise AssertionError(f"{name}: {what}{list(at)} is {got[at]}, not {right[at]}")

    scores = rng.normal(size=(6, 12))
    check("two equal blocks", scores, [6])
    check("blocks of 1 and 11", scores, [1])
    check("four blocks, one by one", scores, [2, 5, 9])
    check("float32", scores, [5], np.float32)
    for n, width in ((1, 1), (1, 64), (17, 2), (3, 3), (8, 1), (0, 4)):
        check("any shape", rng.normal(size=(n, 10)), [4, 7], width=width)
    check("one query, one key in each block", rng.normal(size=(1, 2)), [1], width=5)
    steep = scores.copy()
    steep[:, 7:] += 3
    check("the second block weighs more", steep, [7])
    for shift in (1000, -1000):
        check(f"scores near {shift:,}", scores + shift, [4, 8])
        check(f"scores near {shift:,} in float32", scores + shift, [6], np.float32)
    for shift in (20_000, -20_000):
        check(f"scores near {shift:,}", scores + shift, [4, 8], width=7)
    for above in (9, 15, 25):  # where a small weight still counts
        tilted = scores.copy()
        tilted[:, :6] += above
        check(f"the first block {above} above the second", tilted, [6])
    far = scores.copy()
    far[:, :6] += 800
    check("the first block 800 above the second", far, [6])
    check("the second block 800 above the first", far[:, ::-1], [6])
    apart = scores + np.array([0, 3000, -3000, 0, 5000, -5000])[:, None]
    check("queries whose scores differ by thousands", apart, [4, 8])
    causal = np.where(np.arange(6)[:, None] * 2 >= np.arange(12), scores, -np.inf)
    check("causal: some queries see nothing of the second block", causal, [6])
    check("causal, the blocks in reverse", causal[:, ::-1], [6])
    check("causal, three blocks", causal, [4, 8])
    masked = causal.copy()
    masked[2] = -np.inf
    check("a query that sees nothing at all", masked, [3, 7])
    for i, cuts in ((slice(0, 6), [6]), (slice(6, 12), [6])):
        hidden = scores.copy()
        hidden[:, i] = -np.inf
        check("a block that nobody sees", hidden, cuts)
