"""Exercise 16: the reference, and answers that the oracle must refuse."""

import torch
from torch import nn

from edits import edits


class Lora(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = alpha / rank
        weight = linear.weight
        self.A = nn.Parameter(torch.randn(rank, weight.size(1), dtype=weight.dtype))
        self.B = nn.Parameter(weight.new_zeros(len(weight), rank))
        self.old = None  # the weight without the change, while it is merged

    def forward(self, x):
        y = self.linear(x)
        if self.old is None:
            y = y + self.scale * (x @ self.A.T) @ self.B.T
        return y

    @torch.no_grad()
    def merge(self):
        if self.old is None:
            self.old = self.linear.weight.clone()
            self.linear.weight += self.scale * self.B @ self.A

    def unmerge(self):
        if self.old is not None:
            self.linear.weight.data.copy_(self.old)
            self.old = None


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "both begin at zero": edit("torch.randn(", "torch.zeros("),
    "the layer learns too": edit("linear.requires_grad_(False)", "linear"),
    "alpha is the scale": edit("self.scale = alpha / rank", "self.scale = alpha"),
    "merged, it still adds": edit(
        "        if self.old is None:\n            y", "        if True:\n            y"
    ),
    "merges twice": edit(
        "        if self.old is None:\n            self.old",
        "        if True:\n            self.old",
    ),
    "subtracts": edit("data.copy_(self.old)", "data -= self.scale * (self.B @ self.A).data"),
}
