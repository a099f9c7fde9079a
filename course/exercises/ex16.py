"""Exercise 16: a layer with a small change beside it, to be merged and taken apart again.

    lora = Lora(linear, rank, alpha)      to be put where `linear`, an nn.Linear, was
    lora(x), lora.merge(), lora.unmerge()

1. Lora keeps the layer as its attribute `linear`, and freezes it: weight and bias ask for no
   gradient. It has two parameters of the weight's dtype: A (rank, in), random numbers, and
   B (out, rank), zeros.
2. lora(x), for x (..., in), is linear(x) + alpha / rank * (x A^T) B^T: to the bit linear(x) at
   first.
3. merge() adds alpha / rank * B A to the weight, in place. From then on lora(x) computes no more
   than linear(x), which is the same as before but for rounding. unmerge() undoes it, and the weight
   has its old bits (adding and subtracting would change the last ones). To merge what is merged, or
   unmerge what is not, changes nothing.
"""

from torch import Tensor, nn


class Lora(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__()
        raise NotImplementedError("write the class, then: python course/check.py 16")

    def forward(self, x: Tensor) -> Tensor: ...

    def merge(self) -> None: ...

    def unmerge(self) -> None: ...


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import torch

    torch.manual_seed(16)

    def judge(n_in, n_out, rank, alpha, bias):
        case = f"Lora(nn.Linear({n_in}, {n_out}, {bias}), {rank}, {alpha})"

        def same(what, found, right, slack=0.0):
            say = lambda said: f"{case}{what}: {said}"
            torch.testing.assert_close(found, right, rtol=slack, atol=slack, msg=say)

        linear = nn.Linear(n_in, n_out, bias, dtype=torch.float64)
        old = linear.weight.detach().clone()
        lora = answer.Lora(linear, rank, alpha)
        asked = {n: tuple(w.shape) for n, w in lora.named_parameters() if w.requires_grad}
        right = {"A": (rank, n_in), "B": (n_out, rank)}
        assert asked == right, f"{case}: gradients are for {asked}, not for {right}"
        assert len(lora.A.unique()) == rank * n_in, f"{case}: A is not random: {lora.A.tolist()}"
        x = torch.randn(2, 3, n_in, dtype=torch.float64)
        same(", at first", lora(x), linear(x))
        nn.init.normal_(lora.B)
        change = alpha / rank * torch.einsum("or,ri->oi", lora.B, lora.A)
        found = lora(x)
        right = linear(x) + x @ change.T
        same(", with another B", found, right, 1e-9)
        slopes = [torch.autograd.grad(y.square().sum(), [lora.A, lora.B]) for y in (found, right)]
        same(", the gradients of A and B", *slopes, 1e-9)
        for times in ("", ", twice"):
            lora.merge()
            same(f", merged{times}: the weight", linear.weight, old + change, 1e-9)
            same(f", merged{times}", lora(x), linear(x))
        for times in ("", ", twice"):
            lora.unmerge()
            same(f", unmerged{times}: the weight", linear.weight, old)
            same(f", unmerged{times}", lora(x), right, 1e-9)

    judge(3, 5, 2, 8.0, True)
    judge(6, 4, 3, 1.0, False)
