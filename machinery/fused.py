"""Parts of model.py in forms that move or keep fewer bytes: the same numbers, the same gradients.

setup.py puts in place each form that `usable` finds equal to model.py's, and the plan line names
them. If you edit the loss or the MLP in model.py so that it computes something else, your version
runs. Next: model.py.
"""

import copy
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import model

FORMS = ("loss", "MLP", "gates")
LARGEST_CAP = 50  # e^50 still fits in fp32, with room for the sum
THIN = 24  # most input channels of a matrix that is too small to be worth a matmul kernel


def usable(config: model.GPTConfig) -> tuple[str, ...]:
    """Those FORMS that give a small model of this kind the losses and gradients of model.py."""
    small = replace(config, seq_len=8, vocab_size=50, n_layer=3, n_embd=32, mlp_hidden=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain, found = model.GPT(small), []
        for p in plain.parameters():
            torch.nn.init.normal_(p, std=0.3)
        wanted = _numbers(plain)
        for form in FORMS:
            lean = copy.deepcopy(plain)
            if install(lean, (form,)) and all(map(_same, wanted, _numbers(lean))):
                found.append(form)
    return tuple(found)


def _numbers(gpt: model.GPT) -> list[Tensor]:
    """The loss of each position, and the gradients when each position has another weight."""
    torch.manual_seed(0)  # equal dropout, if there is any
    ids = torch.arange(16).view(2, 8)
    losses = gpt(ids, ids + 9, reduction="none")
    parameters = list(gpt.parameters())
    return [losses, *torch.autograd.grad(losses.square().sum(), parameters, materialize_grads=True)]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= 1e-4 * a.norm())


def install(gpt: model.GPT, forms: tuple[str, ...]) -> int:
    """Give a model the forms that are named; returns how many of its parts have changed."""
    changed = 0
    if "loss" in forms and 0 < gpt.config.logit_softcap <= LARGEST_CAP:
        gpt.cross_entropy, changed = cross_entropy, 1
    for module in gpt.modules():
        if "MLP" in forms and type(module) is model.MLP:
            module.__class__, changed = LeanMLP, changed + 1
        if "gates" in forms and type(module) is model.Linear and module.in_features <= THIN:
            module.__class__, changed = ThinLinear, changed + 1
    return changed


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, config: model.GPTConfig) -> Tensor:
    """What model.cross_entropy computes: x (B, T, C), weight (padded V, C) -> nats, (B, T)."""
    sizes = config.vocab_size, config.logit_softcap
    return _HeadLoss.apply(x, weight, targets, *sizes, torch.is_grad_enabled())


class _HeadLoss(torch.autograd.Function):
    """The gradient of the logits, (softmax - one_hot) times the slope of the cap, is made together
    with the loss: one kernel reads the logits, the largest tensor there is, and they are not kept.
    The gradient that backward receives, one number per position, then scales (B, T, C) tensors.

    Capped logits cannot overflow exp, so there is no maximum to find first. Powers of two (exp2)
    take one instruction each on a GPU."""

    @staticmethod
    def forward(ctx, x, weight, targets, vocab, cap, with_gradient):
        log2_e = math.log2(math.e)
        logits = F.linear(x, weight)  # (B, T, padded V)
        ids = torch.arange(weight.size(0), device=x.device)
        sigmoid = torch.reciprocal(1 + torch.exp2(logits.float() * (-2 * log2_e / cap)))
        capped = sigmoid * (2 * cap * log2_e) - cap * log2_e  # as tanh(y) = 2 sigmoid(2 y) - 1
        if vocab < weight.size(0):
            capped = capped.masked_fill(ids >= vocab, -math.inf)  # no probability, no gradient
        log_sum = capped.exp2().sum(-1, keepdim=True).log2()  # (B, T, 1)
        if with_gradient:
            one_hot = (ids == targets[..., None]).float()
            error = ((capped - log_sum).exp2() - one_hot) * (4 * sigmoid * (1 - sigmoid))
            ctx.save_for_backward(x, weight, error.to(x.dtype))
        target = cap * log2_e * torch.tanh(logits.gather(-1, targets[..., None]).float() / cap)
        return (log_sum - target).squeeze(-1) / log2_e

    @staticmethod
    def backward(ctx, grad):
        x, weight, error = ctx.saved_tensors
        grad = grad[..., None].to(x.dtype)  # (B, T, 1)
        scaled = (x * grad).flatten(0, -2)  # (B T, C)
        return (error @ weight) * grad, error.flatten(0, -2).mT @ scaled, None, None, None, None


class LeanMLP(model.MLP):
    """relu^2 that keeps less; SwiGLU with one matmul for both of its matrices."""

    def forward(self, x):
        if not self.swiglu:
            return self.down(_ReluSquared.apply(self.up(x)))
        both = torch.cat([self.gate.weight, self.up.weight]).to(x.dtype)
        gate, up = F.linear(x, both).chunk(2, dim=-1)  # (B, T, mlp_hidden) each
        return self.down(F.silu(gate) * up)


class _ReluSquared(torch.autograd.Function):
    """relu(x)^2, which keeps its result alone (the next matmul keeps it anyway): the slope,
    2 relu(x), is 2 sqrt(result)."""

    @staticmethod
    def forward(ctx, x):
        h = F.relu(x).square()
        ctx.save_for_backward(h)
        return h

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        return grad * (4 * h).sqrt()


class ThinLinear(model.Linear):
    """A product that the compiler fuses with its neighbours: for a matrix so thin, starting the
    matmuls of forward and backward takes longer than what they compute."""

    def forward(self, x):
        return (x[..., None, :].float() * self.weight).sum(-1).to(x.dtype)  # (..., n_out)
