"""Exercise 16: a layer with a small change beside it, to be merged and taken apart again.

    lora = Lora(linear, rank, alpha)      to be put where `linear`, an nn.Linear, was
    lora(x), lora.merge(), lora.unmerge()

1. Lora keeps the layer as its attribute `linear`, and freezes it: weight and bias ask for no
   gradient. It has two parameters of the weight's dtype: A (rank, in), random numbers (torch's
   global generator may be used), and B (out, rank), zeros.
2. lora(x), for x (..., in), is linear(x) + alpha / rank * (x A^T) B^T: to the bit linear(x) at
   first.
3. merge() adds alpha / rank * B A to the weight, in place. From then on lora(x) computes no more
   than linear(x), which is the same as before but for rounding. unmerge() undoes it: the weight has
   the bits that it had before merge(), whatever A and B are now (adding and subtracting would
   change the last ones). To merge what is merged, or unmerge what is not, changes nothing.
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
    from subject import same
    from torch import nn

    answer.may("Lora.__init__", draw=True)
    torch.manual_seed(16)
    answer.Lora(nn.Linear(3, 2), 1, 1.0).merge()  # another one

    def judge(n_in, n_out, rank, alpha, bias, dtype):
        linear = nn.Linear(n_in, n_out, bias, dtype=dtype)
        weight = linear.weight.detach()  # the same memory
        lora = answer.Lora(linear, rank, alpha)
        asked = {n: tuple(w.shape) for n, w in lora.named_parameters() if w.requires_grad}
        right = {"A": (rank, n_in), "B": (n_out, rank)}
        assert asked == right, f"gradients are for {asked}, not for {right}"
        many = len(lora.A.unique())
        assert many > 0.9 * lora.A.numel(), f"A is not random: it has {many} different numbers"
        for shape in ((), (0,), (2, 3)):
            x = torch.randn(*shape, n_in, dtype=dtype, requires_grad=True)
            same(lora(x), linear(x), "lora(x), at first,", 0, 0)
        for old in (weight.clone(), 2 * weight):  # another one may be loaded
            weight.copy_(old)
            nn.init.normal_(lora.B)
            change = alpha / rank * (lora.B @ lora.A)
            right = linear(x) + x @ change.T
            found = lora(x)
            same(found, right, "lora(x), with another B,", 1e-5, 1e-5)
            slopes = [torch.autograd.grad(y.sum(), [x, lora.A, lora.B]) for y in (found, right)]
            for pair in zip(*slopes):
                same(*pair, "the gradient of x, A or B", 1e-5, 1e-5)
            lora.merge()
            A = lora.A.detach().clone()
            nn.init.constant_(lora.A, torch.nan)  # so that it shows where A is used
            lora.merge()
            same(weight, old + change, "the weight, changed in place,", 1e-5, 1e-5)
            same(lora(x), linear(x), "lora(x), merged,", 0, 0)
            assert not linear.weight.requires_grad, "merged, the weight asks for a gradient"
            lora.unmerge()
            same(weight, old, "unmerged (after merge, A became NaN), the weight", 0, 0)
            lora.A.data.copy_(A)
            lora.unmerge()
            same(lora(x), right, "lora(x), unmerged,", 1e-5, 1e-5)

    half = answer.Lora(nn.Linear(2, 2, dtype=torch.bfloat16), 1, 1.0)
    was = half.linear.weight.clone()
    nn.init.ones_(half.B)
    half.merge()
    half.unmerge()
    same(half.linear.weight, was, "the unmerged weight", 0, 0)
    judge(3, 5, 2, 8.0, True, torch.float64)
    judge(6, 4, 3, 1.0, False, torch.float32)
    judge(70_000, 3, 2, 0.3, True, torch.float64)
