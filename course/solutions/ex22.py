"""Exercise 22: the reference, and answers that the oracle must refuse."""

import torch
from edits import edits


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, switch, *args):
        ctx.fn = fn
        ctx.rng = torch.get_rng_state()
        ctx.save_for_backward(*args)
        return fn(*args)  # autograd does not look inside

    @staticmethod
    def backward(ctx, grad):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.rng)
        wanted = ctx.needs_input_grad[2:]
        args = [t.detach().requires_grad_(want) for t, want in zip(ctx.saved_tensors, wanted)]
        with torch.enable_grad():
            out = ctx.fn(*args)
        torch.set_rng_state(now)
        out.backward(grad)  # the weights get theirs here
        return None, None, *(t.grad for t in args)


def recompute(fn, *args):
    switch = torch.empty(0, requires_grad=True)  # else no backward if only weights want gradients
    return Recompute.apply(fn, switch, *args)


def from_the_library(fn, *args):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(fn, *args, use_reentrant=False)


class KeepsTheGraph(Recompute):
    """Runs fn with a graph in forward, and uses that graph in backward."""

    @staticmethod
    def forward(ctx, fn, switch, *args):
        state = torch.get_rng_state()
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in args]
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda b: b[0]),
        ):
            ctx.out = fn(*inputs)
        ctx.inputs = inputs
        ctx.fn = fn
        ctx.rng = state
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        state = torch.get_rng_state()
        with torch.no_grad():
            ctx.fn(*ctx.inputs)
        torch.set_rng_state(state)
        ctx.out.backward(grad)
        return None, None, *(t.grad for t in ctx.inputs)


edit = edits(__file__)
ARGS = "args = [t.detach().requires_grad_(want) for t, want in zip(ctx.saved_tensors, wanted)]"
GRADS = "*(t.grad for t in args)"
APPLY = "return Recompute.apply(fn, switch, *args)"
RETURN = "        return None, None, " + GRADS
WRONG = {  # name -> what of the reference it replaces
    "leaves the generator elsewhere": edit(
        RETURN, "        torch.set_rng_state(ctx.rng)\n" + RETURN
    ),
    "forgets weights that no argument leads to": edit(
        "torch.empty(0, requires_grad=True)", "torch.empty(0)", APPLY, APPLY + ".requires_grad_()"
    ),
    # the new graph hangs on what was computed before, and backward frees that too
    "does not detach": edit(ARGS, "args = ctx.saved_tensors", GRADS, "*(None for _ in args)"),
    "is torch.utils.checkpoint": dict(recompute=from_the_library),
    "keeps the graph in its Function": edit(APPLY, APPLY.replace("Recompute", "KeepsTheGraph")),
}


EQUIVALENT = {
    "switch = torch.empty(0, requires_grad=True)  # else no backward if only weights want "
    "gradients: `0` -> `1`": "the switch is never read, only that it wants a gradient"
}
