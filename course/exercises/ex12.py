"""Exercise 12: one step of Muon.

    polar(G) -> U V^T, nearly; G is a float64 matrix of numpy, G = U S V^T

by matrix products `@`, sums, and multiplication with numbers; np.linalg.norm is allowed, and
nothing else that takes a matrix apart.
1. The result R, of G's shape, is U diag(r) V^T with the U and V of G. For every singular value s of
   G of at least 0.001 times G's Frobenius norm, r is within 0.15 of 1: the lesson's five
   polynomials (`from optim import POLAR_EXPRESS`) do that. A smaller s gives an r from 0 to 1.15,
   and s = 0 gives r = 0 (so zeros give zeros).
2. The length of G must not matter: 1e-200 times G gives the same R.
3. Products are counted in multiplications: (a x b) @ (b x c) takes abc. With the short side m and
   the long side n of G, you may use 6 (2 m^2 n + m^3): six iterations of the lesson's kind, on the
   short side. The arrays that you get count their products: keep their type (np.asarray would take
   it away).
4. G itself is not changed.

    muon(W, G, average, lr, momentum, polar) -> None; W, G, average: torch tensors (rows, columns)

changes W and `average` in place, G not at all. First `average` moves towards the gradient G by the
share 1 - momentum of the way. Then Nesterov looks ahead: from G, by the share `momentum` of the way
to the new average. Of this matrix take polar(..), which is called once with a tensor and gives a
tensor: the judge, and the trainer that calls muon, bring it. W goes `lr` times that way downhill,
and a matrix with more rows than columns sqrt(rows / columns) times as far.

Starred: accurate_polar(G, tolerance) with r within `tolerance` of 1 for s down to 3e-4, with 8
iterations for a tolerance of 0.01, 9 for 1e-5, 10 for 1e-12. Which of the five polynomials, used
twice, makes small values larger and leaves none above 2? And which a x + b x^3 + c x^5 brings what
is near 1 nearest to 1? If you write it, it is judged too.
"""

import numpy as np
from torch import Tensor


def polar(G: np.ndarray) -> np.ndarray:
    raise NotImplementedError("write polar, then: python course/check.py 12")


def muon(W: Tensor, G: Tensor, average: Tensor, lr: float, momentum: float, polar) -> None:
    raise NotImplementedError("write muon too, then: python course/check.py 12")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import sys
    from contextlib import ExitStack
    from unittest.mock import patch

    import torch

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
            name = function.__name__
            assert name not in ("dot", "einsum", "tensordot", "inner", "vdot", "matrix_power"), (
                f"np.{name} is not counted: write products as A @ B"
            )
            return super().__array_function__(function, types, args, options)

        def dot(self, *_):
            raise AssertionError("A.dot(B) is not counted: write products as A @ B")

    def alone(function, *args):
        """Call it where nothing takes a matrix apart."""

        def forbid(name: str):
            def forbidden(*args, **options):
                raise AssertionError(f"linalg.{name} is not allowed: use products")

            return forbidden

        with ExitStack() as stack:
            for module in (np.linalg, torch.linalg):
                for name in {*dir(module)} - {"norm", "vector_norm"}:
                    if name.islower() and name[0] != "_" and callable(getattr(module, name)):
                        stack.enter_context(patch.object(module, name, forbid(name)))
            modules = {f"scipy{part}": None for part in ("", ".linalg", ".linalg.lapack")}
            stack.enter_context(patch.dict(sys.modules, modules))
            stack.enter_context(np.errstate(all="ignore"))
            try:
                return function(*args)
            except ImportError as error:
                raise AssertionError(f"products alone: {error}") from None

    rng = np.random.default_rng(20)

    def judge(polar, name, shape, s, tolerance, least, most, length=1.0) -> None:
        m = min(shape)
        n = max(shape)
        U, V = (np.linalg.qr(rng.normal(size=(side, m)))[0] for side in shape)
        s = np.array([*s, *[0.0] * (m - len(s))])
        G = length * ((U * s) @ V.T)
        given = G.copy().view(Counted)
        Counted.spent = 0
        case = f"{name}, {shape[0]} x {shape[1]}, tolerance {tolerance:g}"
        R = alone(polar, given)
        assert isinstance(R, np.ndarray) and R.shape == shape, f"{case}: got {type(R)}"
        R = R.view(np.ndarray)
        spent = Counted.spent
        iteration = 2 * m * m * n + m**3
        assert np.array_equal(given.view(np.ndarray), G), f"rule 4: {case}: G was changed"
        assert np.isfinite(R).all(), f"{case}: NaN or infinity in the result"
        assert not s.any() or spent >= 2 * iteration, (
            f"{case}: {spent:,} multiplications were counted; keep the type of what you get"
        )
        assert spent <= most * iteration, (
            f"rule 3: {case}: {spent:,} multiplications, allowed {most * iteration:,}"
        )
        found = U.T @ R @ V
        share = s / max(np.linalg.norm(s), 1e-300)
        r = np.diag(found)
        kept = share >= least
        for value, part, must in zip(r, share, kept):
            low = 1 - tolerance if must else 0
            high = 1 + tolerance if part > 1e-12 else 0
            spare = 1e-13 if must else 1e-6  # rounding
            assert low - spare <= value <= high + spare, (
                f"rule 1: {case}: s of {part:.2e} of the norm became {value:.14g}"
            )
        off = np.abs(found - np.diag(r))[np.ix_(kept, kept)].max(initial=0)
        assert off < 1e-9, f"rule 1: {case}: U or V changed: {off:.1e} outside of the diagonal"
        if s.any():
            outside = np.linalg.norm(R - (U * r) @ V.T)
            assert outside < 1e-6, f"rule 1: {case}: {outside:.1e} in directions that G lacks"

    versions = [(answer.polar, 0.15, 1e-3, 6)]
    if hasattr(answer, "accurate_polar"):
        for tolerance, k in ((0.01, 8), (1e-5, 9), (1e-12, 10)):
            accurate = lambda G, tolerance=tolerance: answer.accurate_polar(G, tolerance)
            versions.append((accurate, tolerance, 3e-4, k))
    for polar, *limits in versions:
        judge(polar, "all singular values equal", (12, 12), [1.0] * 12, *limits)
        judge(polar, "one singular value", (1, 9), [2.5], *limits)
        judge(polar, "a column", (9, 1), [2.5], *limits)
        spread = np.geomspace(1, 8e-4, 24)
        for name, shape in (("square", (24, 24)), ("tall", (160, 24)), ("wide", (24, 160))):
            judge(polar, f"s down to 0.0008 of the largest, {name}", shape, spread, *limits)
        judge(polar, "the same, times 1e-200", (24, 40), spread, *limits, 1e-200)
        judge(polar, "the same, times 1e200", (40, 24), spread, *limits, 1e200)
        judge(polar, "half of the directions missing", (16, 20), [1.0] * 8, *limits)
        judge(polar, "s between 1e-7 and 1", (20, 30), np.geomspace(1, 1e-7, 20), *limits)
        judge(polar, "zeros", (5, 7), [], *limits)
        for _ in range(6):
            m, n = (int(side) for side in rng.integers(2, 30, 2))
            s = 10 ** rng.uniform(-3.5, 1, min(m, n))
            judge(polar, "random", (m, n), s, *limits, 10.0 ** rng.integers(-20, 20))
        for s in np.geomspace(2e-4, 1, 40):  # one small value, wherever it is
            judge(polar, "one small value", (2, 3), [1.0, float(s)], *limits)

    draw = torch.Generator().manual_seed(20)
    for rows, columns, lr, momentum in (
        (4, 4, 0.5, 0.9),
        (8, 2, 0.1, 0.95),
        (3, 12, 2.0, 0.0),
        (1, 5, 0.1, 0.5),
        (6, 3, 0.0, 0.9),
    ):
        W, average = torch.randn(2, rows, columns, generator=draw, dtype=torch.float64)
        right_W = W.clone()
        right_average = average.clone()
        for step in range(4):
            G = torch.randn(rows, columns, generator=draw, dtype=torch.float64)
            given = G.clone()
            asked = []

            def stand_in(M: Tensor, asked=asked) -> Tensor:
                asked.append(M.clone())
                return M.tanh()

            case = f"muon, {rows} x {columns}, lr {lr}, momentum {momentum}, step {step}"
            result = answer.muon(W, given, average, lr, momentum, stand_in)
            assert result is None, f"{case}: returned {type(result)}; W changes in place"
            assert torch.equal(given, G), f"{case}: G was changed"
            right_average = torch.lerp(G, right_average, momentum)
            assert torch.allclose(average, right_average, rtol=1e-12), (
                f"{case}: average is off by {(average - right_average).abs().max():.3g}"
            )
            assert len(asked) == 1, f"{case}: polar was called {len(asked)} times"
            ahead = torch.lerp(G, right_average, momentum)
            assert torch.allclose(asked[0], ahead, rtol=1e-12), (
                f"{case}: polar was asked for another matrix, off by "
                f"{(asked[0] - ahead).abs().max():.3g}"
            )
            further = lr * max(rows, columns) ** 0.5 / columns**0.5
            right_W = torch.sub(right_W, ahead.tanh(), alpha=further)
            assert torch.allclose(W, right_W, rtol=1e-12), (
                f"{case}: W is off by {(W - right_W).abs().max():.3g}"
            )
