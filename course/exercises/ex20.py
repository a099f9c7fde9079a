"""Exercise 20: U V^T of a matrix, as accurate as asked, with few products.

    polar([[3, 0], [0, 0.01]], 1e-5) -> [[1, 0], [0, 1]] within 1e-5

G is a float64 matrix (numpy), G = U S V^T. Return R, of the same shape, by matrix products `@`,
sums, and multiplication with numbers; np.linalg.norm is allowed, and nothing else of np.linalg.
1. R = U diag(r) V^T with the U and V of G. For every singular value s of G of at least 3e-4 times
   G's Frobenius norm, r is within `tolerance` of 1. A smaller s gives an r from 0 to
   1 + tolerance, and s = 0 gives r = 0 (so zeros give zeros).
2. The length of G must not matter: 1e-100 times G gives the same R.
3. Products are counted in multiplications: (a x b) @ (b x c) takes abc. With the short side m and
   the long side n of G, you may use k (2 m^2 n + m^3): k iterations of the lesson's kind, on the
   short side. k is 8 for a tolerance of 0.01, 9 for 1e-5, 10 for 1e-12.
4. G itself is not changed.

The lesson's five polynomials (`optim.POLAR_EXPRESS`) end near 1, not at 1, and are made for s down
to 0.001. Which polynomial a x + b x^3 + c x^5 brings what is near 1 nearest to 1? The arrays that
you get count their products: keep their type (np.asarray would take it away).
"""

import numpy as np


def polar(G: np.ndarray, tolerance: float) -> np.ndarray:
    raise NotImplementedError("write polar, then: python course/check.py 20")


class Counted(np.ndarray):
    """A float64 matrix that counts the multiplications of its products in `Counted.spent`."""

    spent = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        plain = [x.view(np.ndarray) if isinstance(x, Counted) else x for x in inputs]
        if options.get("out"):
            options["out"] = tuple(x.view(np.ndarray) for x in options["out"])
        if ufunc is np.matmul:
            a, b = (np.shape(x) for x in plain)
            Counted.spent += int(np.prod(a)) * (b[-1] if len(b) > 1 else 1)
        result = getattr(ufunc, method)(*plain, **options)
        return result.view(Counted) if isinstance(result, np.ndarray) else result

    def __array_function__(self, function, types, args, options):
        name, place = function.__name__, getattr(function, "__module__", "")
        assert name not in ("dot", "einsum", "tensordot", "inner", "vdot", "matrix_power"), (
            f"np.{name} is not counted: write products as A @ B"
        )
        assert "linalg" not in place or name == "norm", f"np.linalg.{name} is not allowed"
        result = super().__array_function__(function, types, args, options)
        return result

    def dot(self, *_):
        raise AssertionError("A.dot(B) is not counted: write products as A @ B")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    rng = np.random.default_rng(20)

    def judge(name: str, shape: tuple, s: list, tolerance: float, length: float = 1.0) -> None:
        m, n = min(shape), max(shape)
        U, V = (np.linalg.qr(rng.normal(size=(side, m)))[0] for side in shape)
        s = np.array([*s, *[0.0] * (m - len(s))])
        G = length * ((U * s) @ V.T)
        given, Counted.spent = G.copy().view(Counted), 0
        case = f"{name}, {shape[0]} x {shape[1]}, tolerance {tolerance:g}"
        with np.errstate(all="ignore"):
            R = answer.polar(given, tolerance)
        assert isinstance(R, np.ndarray) and R.shape == shape, f"{case}: got {type(R)}"
        R, spent = R.view(np.ndarray), Counted.spent
        assert np.array_equal(given.view(np.ndarray), G), f"rule 4: {case}: G was changed"
        assert np.isfinite(R).all(), f"{case}: NaN or infinity in the result"
        k = {0.01: 8, 1e-5: 9, 1e-12: 10}[tolerance]
        allowed = k * (2 * m * m * n + m**3)
        if s.any():
            assert spent, f"{case}: no product was counted; keep the type of what you get"
        assert spent <= allowed, f"rule 3: {case}: {spent:,} multiplications, allowed {allowed:,}"
        found, share = U.T @ R @ V, s / max(np.linalg.norm(s), 1e-300)
        r = np.diag(found)
        rounding = 1e-13  # of U and V themselves
        for value, part in zip(r, share):
            if part >= 3e-4:
                assert abs(value - 1) <= tolerance + rounding, (
                    f"rule 1: {case}: s of {part:.2e} of the norm became {value:.14g}"
                )
            else:
                most = (1 + tolerance if part > 1e-12 else 0) + 1e-6
                assert -1e-6 <= value <= most, (
                    f"rule 1: {case}: s of {part:.2e} of the norm became {value:.6g}"
                )
        kept = share >= 3e-4  # the rounding in a direction without s is enlarged
        off = np.abs(found - np.diag(r))[np.ix_(kept, kept)].max(initial=0)
        assert off < 1e-9, f"rule 1: {case}: U or V changed: {off:.1e} outside of the diagonal"
        if s.any():
            outside = np.linalg.norm(R - (U * r) @ V.T)
            assert outside < 1e-6, f"rule 1: {case}: {outside:.1e} in directions that G lacks"

    for tolerance in (0.01, 1e-5, 1e-12):
        judge("all singular values equal", (12, 12), [1.0] * 12, tolerance)
        judge("one singular value", (1, 9), [2.5], tolerance)
        judge("a column", (9, 1), [2.5], tolerance)
        spread = np.geomspace(1, 8e-4, 24)
        judge("s down to 0.0008 of the largest", (24, 24), spread, tolerance)
        judge("the same, tall", (160, 24), spread, tolerance)
        judge("the same, wide", (24, 160), spread, tolerance)
        judge("the same, times 1e-100", (24, 40), spread, tolerance, 1e-100)
        judge("the same, times 1e100", (40, 24), spread, tolerance, 1e100)
        judge("half of the directions missing", (16, 20), [1.0] * 8, tolerance)
        judge("s between 1e-7 and 1", (20, 30), np.geomspace(1, 1e-7, 20), tolerance)
        judge("zeros", (5, 7), [], tolerance)
        for _ in range(6):
            m, n = rng.integers(2, 30, 2)
            s = 10 ** rng.uniform(-3.5, 1, min(m, n))
            judge("random", (int(m), int(n)), s, tolerance, 10.0 ** rng.integers(-20, 20))
        for s in np.geomspace(2e-4, 1, 40):  # one small value, wherever it is
            judge("one small value", (2, 3), [1.0, float(s)], tolerance)
