"""Exercise 18: the reference, and answers that the oracle must refuse."""

import torch


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, switch, *args):
        ctx.fn, ctx.rng = fn, torch.get_rng_state()
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


class OtherDice(Recompute):
    """Draws new random numbers the second time."""

    @staticmethod
    def backward(ctx, grad):
        ctx.rng = torch.get_rng_state()
        return Recompute.backward(ctx, grad)


class FirstOnly(Recompute):
    """Only the first argument gets its gradient."""

    @staticmethod
    def backward(ctx, grad):
        _, _, first, *others = Recompute.backward(ctx, grad)
        return None, None, first, *(None for _ in others)


class SpoilsTheDice(Recompute):
    """Leaves the generator where the second run of fn left it."""

    @staticmethod
    def backward(ctx, grad):
        grads = Recompute.backward(ctx, grad)
        torch.set_rng_state(ctx.rng)
        return grads


def keeps_everything(fn, *args):
    return fn(*args)


def without_switch(fn, *args):
    return Recompute.apply(fn, torch.empty(0), *args).requires_grad_()


WRONG = {  # name -> what of the reference it replaces
    "draws other random numbers": dict(recompute=lambda fn, *a: apply(OtherDice, fn, a)),
    "drops the gradients of other arguments": dict(
        recompute=lambda fn, *a: apply(FirstOnly, fn, a)
    ),
    "leaves the generator elsewhere": dict(recompute=lambda fn, *a: apply(SpoilsTheDice, fn, a)),
    "keeps everything": dict(recompute=keeps_everything),
    "forgets weights that no argument leads to": dict(recompute=without_switch),
}


def apply(function, fn, args):
    return function.apply(fn, torch.empty(0, requires_grad=True), *args)
