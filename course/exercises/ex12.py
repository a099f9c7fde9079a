"""Exercise 12: one step of Muon.

    polar(G) -> U V^T, nearly; G is a float64 matrix of numpy, G = U S V^T

by matrix products `@`, sums, and multiplication with numbers; np.linalg.norm is allowed, and
nothing else that takes a matrix apart.
1. The result R, of G's shape and type, is U diag(r) V^T with the U and V of G. For every singular
   value s of G of at least 0.001 times G's Frobenius norm (the root of the sum of all s^2), r is
   within 0.15 of 1: the lesson's five polynomials (`from optim import POLAR_EXPRESS`) do that. A
   smaller s gives an r from 0 to 1.15, and s = 0 gives r = 0 (so zeros give zeros).
2. The length of G must not matter: 1e-200 times G gives the same R.
3. Products are counted in multiplications: (a x b) @ (b x c) takes abc. With the short side m and
   the long side n of G, you may use 6 (2 m^2 n + m^3): six iterations of the lesson's kind, on the
   short side. The arrays that you get count their products: keep their type (np.asarray would take
   it away).
4. G itself is not changed.

    muon(W, G, average, lr, momentum, polar) -> None; W, G, average: torch tensors (rows, columns)

changes W and `average` (float32 or float64) in place, G not at all. First `average` moves towards
the gradient G by the share 1 - momentum of the way. Then Nesterov looks ahead: from G, by the share
`momentum` of the way to the new average. Of this matrix take polar(..), which is called once with a
tensor and gives a tensor: the judge, and the trainer that calls muon, bring it. W goes `lr` times
that way downhill, and a matrix with more rows than columns sqrt(rows / columns) times as far.
"""

import numpy as np
from torch import Tensor


def polar(G: np.ndarray) -> np.ndarray:
    raise NotImplementedError("write polar, then: python course/check.py 12")


def muon(W: Tensor, G: Tensor, average: Tensor, lr: float, momentum: float, polar) -> None:
    raise NotImplementedError("write muon too, then: python course/check.py 12")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import sys
    import warnings

    import numpy as np
    import torch
    from subject import same

    class Counted(np.ndarray):
        """A float64 matrix that counts the multiplications of its products in `Counted.spent`."""

        spent = 0
        dot = np.ndarray.__matmul__

        def __array_ufunc__(self, ufunc, method, *inputs, **options):
            arrays = [np.asarray(x) for x in inputs]
            if ufunc is np.matmul:
                a, b = arrays
                Counted.spent += a.size * b.size // a.shape[-1]
            if "out" in options:
                options["out"] = tuple(np.asarray(x) for x in options["out"])
            result = getattr(ufunc, method)(*arrays, **options)
            return result.view(Counted) if isinstance(result, np.ndarray) else result

        def __array_function__(self, function, types, args, options):
            counted = function.__name__ not in ("dot", "einsum", "tensordot", "inner", "vdot")
            assert counted, f"np.{function.__name__} is not counted: write products as A @ B"
            return super().__array_function__(function, types, args, options)

    def watch(frame, event, called) -> None:
        """Of numpy's, torch's and scipy's linalg an answer calls norms alone."""
        name = called.__name__ if event == "c_call" else ""
        if event == "call":
            name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
            frame = frame.f_back
        inside = "linalg" in frame.f_globals.get("__name__", "")
        allowed = inside or "linalg" not in name or "norm" in name
        assert allowed, f"{name}: of linalg only norms are allowed; use products"

    rng = np.random.default_rng(20)

    def judge(what, shape, s, length=1.0) -> None:
        m, n = sorted(shape)
        U, V = (np.linalg.qr(rng.normal(size=(side, m)))[0] for side in shape)
        s = np.append(s, np.zeros(m - len(s)))
        G = length * ((U * s) @ V.T)
        Counted.spent = 0
        sys.setprofile(watch)
        try:
            with warnings.catch_warnings(action="ignore"):
                R = answer.polar(G.view(Counted))
        finally:
            sys.setprofile(None)
        case = f"{shape[0]} x {shape[1]}, {what}"
        typed = isinstance(R, Counted) or not s.any()
        assert typed, f"rule 3: {case}: keep the type of what you get, so that products are counted"
        spare = 6 * (2 * m * m * n + m**3) - Counted.spent
        assert spare >= 0, f"rule 3: {case}: {-spare:,} multiplications more than allowed"
        R = np.asarray(R)
        r = np.diag(U.T @ R @ V)
        share = s / max(np.linalg.norm(s), 1e-300)
        low = np.where(share >= 1e-3, 0.85, -1e-6)  # 1e-6: rounding
        high = np.where(share > 1e-12, 1.15, 1e-6)
        bad = ~((low <= r) & (r <= high))
        shown = f"rule 1: {case}: s of {share[bad][:1]} of the norm became {r[bad][:1]}"
        assert not bad.any(), shown
        same(R, (U * r) @ V.T, f"rule 1: {case}: with the r that it has, R", 0, 1e-6)

    judge("all singular values equal", (12, 12), [1.0] * 12)
    for shape in ((1, 9), (9, 1), (1, 1), (70_000, 1)):
        judge("one singular value", shape, [2.5])
    spread = np.geomspace(1, 8e-4, 24)
    for shape in ((24, 24), (160, 24), (24, 300), (300, 300)):
        judge("s down to 0.0008 of the largest", shape, spread)
    for length in (*np.geomspace(1e-163, 1e-153, 41), 1e-300, 1e153, 1e154, 1e300):
        judge(f"the same, times {length:.1e}", (24, 40), spread, length)
    judge("half of the directions missing", (16, 20), [1.0] * 8)
    judge("s between 1e-7 and 1", (20, 30), np.geomspace(1, 1e-7, 20))
    judge("zeros", (5, 7), [])
    for s in np.geomspace(2e-4, 1, 40):  # one small value, wherever it is
        judge("one small value", (2, 3), [1.0, s])

    answer.may("muon", change="W average")
    draw = torch.Generator().manual_seed(20)
    for rows, columns, lr, momentum in (
        (4, 4, 0.5, 0.9),
        (4, 4, 0.1, 0.9),
        (7, 5, 0.1, 0.5),
        (8, 2, 0.1, 0.95),
        (3, 12, 2.0, 0.0),
        (1, 5, 0.1, 0.5),
        (300, 3, 0.0, 0.9),
    ):
        for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            memory = torch.randn(2, columns, rows, generator=draw, dtype=dtype).mT
            W, average = memory  # views: what is not changed in place is not seen in `memory`
            right_W, right_average = memory.clone()
            for way in (torch.tanh, torch.sin, torch.tanh):
                G = torch.randn(rows, columns, generator=draw, dtype=dtype)
                asked = []

                def stand_in(M, way=way, asked=asked):
                    asked.append(M.clone())
                    return way(M)

                result = answer.muon(W, G, average, lr, momentum, stand_in)
                assert result is None, f"returned {type(result)}; W changes in place"
                assert len(asked) == 1, f"polar was called {len(asked)} times"
                right_average = torch.lerp(G, right_average, momentum)
                ahead = torch.lerp(G, right_average, momentum)
                further = lr * (max(rows, columns) / columns) ** 0.5
                right_W = right_W - further * way(ahead)
                same(memory[1], right_average, "average", near, near)
                same(asked[0], ahead, "what polar is asked for", near, near)
                same(memory[0], right_W, "W", near, near)
