"""Exercise 22: the reference, and answers that the oracle must refuse."""

import torch
from edits import edits
from torch.autograd.graph import saved_tensors_hooks


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, rng, results, switch, *args):
        ctx.fn = fn
        ctx.rng = rng
        ctx.save_for_backward(*args)
        return results[0]

    @staticmethod
    def backward(ctx, grad):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.rng)
        wanted = ctx.needs_input_grad[4:]
        args = [t.detach().requires_grad_(want) for t, want in zip(ctx.saved_tensors, wanted)]
        with torch.enable_grad():
            out = ctx.fn(*args)
        torch.set_rng_state(now)
        out.backward(grad)  # the weights get theirs here
        return None, None, None, None, *(t.grad for t in args)


def recompute(fn, *args):
    rng = torch.get_rng_state()
    with saved_tensors_hooks(lambda t: None, lambda none: none):
        out = fn(*args)  # its graph holds no tensors; it only tells whether one wants a gradient
    if not out.requires_grad:
        return out
    switch = torch.empty(0, requires_grad=True)  # else no backward if only weights want gradients
    return Recompute.apply(fn, rng, [out.detach()], switch, *args)


def from_the_library(fn, *args):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(fn, *args, use_reentrant=False)


edit = edits(__file__)
SAVED = "ctx.save_for_backward(*args)"
DETACHED = "    return Recompute.apply(fn, rng, [out.detach()], switch, *args)"
LOST = "with saved_tensors_hooks(lambda t: None, lambda none: none):"
WRONG = {  # name -> what of the reference it replaces
    "leaves the generator elsewhere": edit("        torch.set_rng_state(now)\n", ""),
    "forgets weights that no argument leads to": edit(
        "torch.empty(0, requires_grad=True)",
        "torch.empty(0)",
        DETACHED,
        DETACHED + ".requires_grad_()",
    ),
    "always wants a gradient": edit("if not out.requires_grad:", "if not torch.is_grad_enabled():"),
    "is torch.utils.checkpoint": dict(recompute=from_the_library),
    "keeps the graph": edit(
        LOST,
        "with torch.enable_grad():",
        SAVED,
        SAVED + "\n        ctx.results = results",
        "[out.detach()]",
        "[out.detach(), out]",
    ),
    "keeps clones": edit(
        "lambda t: None",
        "lambda t: t.clone()",
        SAVED,
        SAVED + "\n        ctx.results = results",
        "[out.detach()]",
        "[out.detach(), out]",
    ),
    "does not see that an argument has changed": edit(
        SAVED, "ctx.args = args", "zip(ctx.saved_tensors, wanted)", "zip(ctx.args, wanted)"
    ),
    "one function for all": edit(
        "ctx.fn = fn", "Recompute.fn = fn", "ctx.fn(*args)", "Recompute.fn(*args)"
    ),
}


EQUIVALENT = {
    "switch = torch.empty(0, requires_grad=True)  # else no backward if only weights want "
    "gradients: `0` -> `1`": "the switch is never read, only that it wants a gradient"
}
