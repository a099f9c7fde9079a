"""Exercise 12: one step of Muon.

    polar(G) -> U V^T, nearly; G is a float64 matrix of numpy, G = U S V^T

Use matrix products `@`, sums, and multiplication by numbers. np.linalg.norm is allowed too, but
nothing else that takes a matrix apart.
1. The result R has the shape and type of G, and is U diag(r) V^T with the U and V of G. For every
   singular value s of G that is at least 0.001 times G's Frobenius norm (the root of the sum of all
   s^2), r is within 0.15 of 1: the lesson's five polynomials (`from optim import POLAR_EXPRESS`)
   do that. A smaller s gives an r from 0 to 1.15, and s = 0 gives r = 0 (so zeros give zeros).
2. The length of G must not matter: 1e-200 times G gives the same R. (Mind that the square of 1e-200
   is 0 in float64.)
3. Products are counted in multiplications: (a x b) @ (b x c) takes abc. If m is the short side of G
   and n the long side, you may use 6 (2 m^2 n + m^3): six iterations of the lesson's kind, on the
   short side. The arrays you are given count their own products, so keep their type (np.asarray
   would take it away).
4. G itself does not change.

    muon(W, G, average, lr, momentum, polar) -> None; W, G, average: torch tensors (rows, columns)

changes W and `average` (float32 or float64) in place, and leaves G as it is. First, `average` moves
towards the gradient G by 1 - momentum of the way. Then Nesterov looks ahead: start at G and go
`momentum` of the way to the new average. Take polar(..) of the matrix you reach. Call it once, with
a tensor; it returns a tensor, and it is given to you by the judge, and by the trainer that calls
muon. Move W by `lr` times that result, downhill; a matrix with more rows than columns moves
sqrt(rows / columns) times as far.
"""

import numpy as np
from torch import Tensor


def polar(G: np.ndarray) -> np.ndarray:
    raise NotImplementedError("write polar, then: python course/check.py 12")


def muon(W: Tensor, G: Tensor, average: Tensor, lr: float, momentum: float, polar) -> None:
    raise NotImplementedError("write muon too, then: python course/check.py 12")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import numpy as np
    import torch
    from subject import equal, same

    class Counted(np.ndarray):
        """A matrix that counts the multiplications of its products."""

        spent = 0

        def __matmul__(self, other):
            Counted.spent += self.size * other.size // len(other)  # (a b)(b c) / b
            return super().__matmul__(other)

        def __array_function__(self, function, *rest):
            """numpy calls this in place of most of its functions."""
            other = "linalg" in function.__module__ and function is not np.linalg.norm
            assert not other, f"np.linalg.{function.__name__}: of linalg only norm is allowed"
            return super().__array_function__(function, *rest)

    rng = np.random.default_rng(20)

    def judge(rule, rows, columns, s, length=1.0):
        """G has the singular values `s` times `length`, and zeros."""
        U, V = (np.linalg.qr(rng.normal(size=(side, len(s))))[0] for side in (rows, columns))
        Counted.spent = 0
        R = answer.polar((length * (U * s) @ V.T).view(Counted))
        equal(R.shape, (rows, columns), f"{rule}: the shape of R")
        assert isinstance(R, Counted), "rule 3: R is not of G's type, which counts products"
        m, n = sorted(R.shape)
        most = 6 * (2 * m * m * n + m**3)
        assert Counted.spent <= most, f"rule 3: {Counted.spent:,} multiplications, {most:,} allowed"
        r = np.diag(U.T @ R @ V)
        norm = np.linalg.norm(s)
        low = np.where(s > 1e-3 * norm, 0.85, 0)
        good = (low - 1e-6 <= r) & (r <= 1.15)  # 1e-6: rounding
        at = good.argmin()
        assert good[at], (
            f"{rule}: G has the norm {norm:.3g}, and its singular value {s[at]:.3g} becomes "
            f"{r[at]:.3g}, and should become {low[at]:.3g} to 1.15"
        )
        same(R, (U * r) @ V.T, f"{rule}: R, which should be U diag(r) V^T,", 0, 1e-6)

    spread = np.geomspace(1, 8e-4, 24)
    judge("rule 1", 3, 2, np.array([1, 0.01]))
    judge("rule 1: zeros", 5, 7, np.zeros(2))
    judge("rule 1", 30, 30, spread)
    for length in (1e-200, 1e200):
        judge(f"rule 2: {length} times a matrix G of rule 1", 24, 160, spread, length)

    answer.may("muon", change="W average")
    draw = torch.Generator().manual_seed(20)
    asked = []

    def tanh(M):
        asked.append(M.clone())
        return torch.tanh(M)

    lr = 0.1
    momentum = 0.75
    for rows, columns, dtype in ((2, 1, torch.float64), (3, 12, torch.float32)):
        W, average, G = torch.randn(3, rows, columns, generator=draw, dtype=dtype)
        new = torch.lerp(G, average, momentum)
        ahead = torch.lerp(G, new, momentum)
        down = W - lr * (max(rows, columns) / columns) ** 0.5 * torch.tanh(ahead)
        asked.clear()
        answer.muon(W, G, average, lr, momentum, tanh)
        equal(len(asked), 1, "the number of calls of polar (here it is tanh)")
        same(average, new, "afterwards, average", 1e-5, 1e-5)
        same(asked[0], ahead, "what polar (here it is tanh) was given", 1e-5, 1e-5)
        same(W, down, "afterwards, W", 1e-5, 1e-5)
