"""Exercise 16: a layer with a small change beside it, to be merged and taken apart again.

    lora = Lora(linear, rank, alpha)      takes the place of `linear`, an nn.Linear
    lora(x), lora.merge(), lora.unmerge()

1. Lora keeps the layer as its attribute `linear` and freezes it: neither weight nor bias asks for a
   gradient. It has two parameters of the weight's dtype: A (rank, in), random numbers (you may use
   torch's global generator), and B (out, rank), zeros.
2. lora(x), for x (..., in), calls the layer: linear(x) + alpha / rank * (x A^T) B^T, which at first
   is linear(x) to the bit.
3. merge() adds alpha / rank * B A to the weight, in place. From then on lora(x) computes no more
   than linear(x), which gives what lora(x) gave before, except for rounding. unmerge() undoes it:
   the weight has the bits that it had before merge(), whatever A and B are by now (adding and then
   subtracting would change the last bits). Merging twice, or unmerging what is not merged, changes
   nothing.
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
    from subject import equal, same
    from torch import nn

    answer.may("Lora.__init__", draw=True)
    torch.manual_seed(16)

    def judge(n_in, n_out, rank, alpha, bias, shape, dtype):
        near = torch.finfo(dtype).eps ** 0.5
        linear = nn.Linear(n_in, n_out, bias, dtype=dtype)
        linear.register_forward_hook(lambda layer, given, y: y + 1)
        weight = linear.weight.detach()  # the same memory
        lora = answer.Lora(linear, rank, alpha)
        asked = {n: tuple(w.shape) for n, w in lora.named_parameters() if w.requires_grad}
        right = {"A": (rank, n_in), "B": (n_out, rank)}
        equal(asked, right, "rule 1: what asks for a gradient, with its shape,")
        same(lora.B, weight.new_zeros(n_out, rank), "rule 1: B", 0, 0)
        assert len(lora.A.unique()) > 1, "rule 1: the numbers of A are not random"
        x = torch.randn(*shape, n_in, dtype=dtype, requires_grad=True)
        hook = "rule 2: at first, with a layer whose hook adds 1, lora(x)"
        same(lora(x), linear(x), hook, 0, 0)

        for old in (weight.clone(), 2 * weight):  # another one may be loaded
            weight.copy_(old)
            lora.unmerge()
            nn.init.normal_(lora.A)
            nn.init.normal_(lora.B)
            change = alpha / rank * (lora.B @ lora.A)
            right = linear(x) + x @ change.T
            found = lora(x)
            same(found, right, "rule 2: with another A and B, lora(x)", near, near)
            slopes = [torch.autograd.grad(y.sum(), [x, lora.A, lora.B]) for y in (found, right)]
            for name, *pair in zip("xAB", *slopes):
                same(*pair, f"rule 2: the gradient of {name}", near, near)
            lora.merge()
            nn.init.constant_(lora.A, torch.nan)  # so that it shows where A is used
            lora.merge()
            after = "rule 3: after merge(), A filled with NaN, and merge() again,"
            same(weight, old + change, f"{after} the weight", near, near)
            same(lora(x), linear(x), f"{after} lora(x)", 0, 0)
            lora.unmerge()
            same(weight, old, f"{after} then unmerge(), the weight", 0, 0)

    judge(1, 2, 2, 8.0, True, (2, 3), torch.float64)
    judge(6, 4, 3, 1.0, False, (), torch.float32)
