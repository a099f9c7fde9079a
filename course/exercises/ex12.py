"""Exercise 12: one step of Muon.

    polar(G) -> U V^T, nearly; G is a float64 matrix of numpy, G = U S V^T

by matrix products `@`, sums, and multiplication with numbers; np.linalg.norm is allowed, and
nothing else that takes a matrix apart.
1. The result R, of G's shape, is U diag(r) V^T with the U and V of G. For every singular value s of
   G of at least 0.001 times G's Frobenius norm (the root of the sum of all s^2), r is within 0.15
   of 1: the lesson's five polynomials (`from optim import POLAR_EXPRESS`) do that. A smaller s
   gives an r from 0 to 1.15, and s = 0 gives r = 0 (so zeros give zeros).
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
"""

import numpy as np
from torch import Tensor


def polar(G: np.ndarray) -> np.ndarray:
    raise NotImplementedError("write polar, then: python course/check.py 12")


def muon(W: Tensor, G: Tensor, average: Tensor, lr: float, momentum: float, polar) -> None:
    raise NotImplementedError("write muon too, then: python course/check.py 12")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
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
            stack.enter_context(np.errstate(all="ignore"))
            return function(*args)

    rng = np.random.default_rng(20)

    def judge(name: str, shape: tuple, s, length: float = 1.0) -> None:
        m = min(shape)
        n = max(shape)
        U, V = (np.linalg.qr(rng.normal(size=(side, m)))[0] for side in shape)
        s = np.array([*s, *[0.0] * (m - len(s))])
        G = length * ((U * s) @ V.T)
        given = G.copy().view(Counted)
        Counted.spent = 0
        case = f"polar, {shape[0]} x {shape[1]}, {name}"
        R = alone(answer.polar, given)
        assert isinstance(R, np.ndarray) and R.shape == shape, f"{case}: got {type(R)}"
        R = R.view(np.ndarray)
        allowed = 6 * (2 * m * m * n + m**3)
        assert np.array_equal(given.view(np.ndarray), G), f"rule 4: {case}: G was changed"
        assert np.isfinite(R).all(), f"{case}: NaN or infinity in the result"
        assert Counted.spent or not s.any(), (
            f"rule 3: {case}: no multiplication was counted; keep the type of what you get"
        )
        assert Counted.spent <= allowed, (
            f"rule 3: {case}: {Counted.spent:,} multiplications, allowed {allowed:,}"
        )
        found = U.T @ R @ V
        share = s / max(np.linalg.norm(s), 1e-300)
        r = np.diag(found)
        kept = share >= 1e-3
        for value, part, must in zip(r, share, kept):
            low = 0.85 if must else -1e-6  # rounding
            high = 1.15 if part > 1e-12 else 1e-6
            assert low <= value <= high, (
                f"rule 1: {case}: s of {part:.2e} of the norm became {value:.14g}"
            )
        off = np.abs(found - np.diag(r))[np.ix_(kept, kept)].max(initial=0)
        assert off < 1e-9, f"rule 1: {case}: U or V changed: {off:.1e} outside of the diagonal"
        outside = np.linalg.norm(R - (U * r) @ V.T)
        assert outside < 1e-6 or not s.any(), (
            f"rule 1: {case}: {outside:.1e} in directions that G lacks"
        )

    judge("all singular values equal", (12, 12), [1.0] * 12)
    judge("one singular value", (1, 9), [2.5])
    judge("one singular value", (9, 1), [2.5])
    spread = np.geomspace(1, 8e-4, 24)
    for shape in ((24, 24), (160, 24), (24, 160)):
        judge("s down to 0.0008 of the largest", shape, spread)
    judge("the same, times 1e-200", (24, 40), spread, 1e-200)
    judge("the same, times 1e200", (40, 24), spread, 1e200)
    judge("half of the directions missing", (16, 20), [1.0] * 8)
    judge("s between 1e-7 and 1", (20, 30), np.geomspace(1, 1e-7, 20))
    judge("zeros", (5, 7), [])
    for s in np.geomspace(2e-4, 1, 40):  # one small value, wherever it is
        judge("one small value", (2, 3), [1.0, float(s)])

    draw = torch.Generator().manual_seed(20)
    for rows, columns, lr, momentum in (
        (4, 4, 0.5, 0.9),
        (8, 2, 0.1, 0.95),
        (3, 12, 2.0, 0.0),
        (1, 5, 0.1, 0.5),
        (6, 3, 0.0, 0.9),
    ):
        memory = torch.randn(2, rows, columns, generator=draw, dtype=torch.float64)
        W, average = memory  # views: what is not changed in place is not seen in `memory`
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
            assert torch.allclose(memory[1], right_average, rtol=1e-12), (
                f"{case}: average is off by {(memory[1] - right_average).abs().max():.3g}"
            )
            assert len(asked) == 1, f"{case}: polar was called {len(asked)} times"
            ahead = torch.lerp(G, right_average, momentum)
            assert torch.allclose(asked[0], ahead, rtol=1e-12), (
                f"{case}: polar was asked for another matrix, off by "
                f"{(asked[0] - ahead).abs().max():.3g}"
            )
            further = lr * max(rows, columns) ** 0.5 / columns**0.5
            right_W = torch.sub(right_W, ahead.tanh(), alpha=further)
            assert torch.allclose(memory[0], right_W, rtol=1e-12), (
                f"{case}: W is off by {(memory[0] - right_W).abs().max():.3g}"
            )
