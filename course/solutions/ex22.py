"""Exercise 22: the reference, and answers that the oracle must refuse."""

from itertools import count

import torch
from edits import edits
from torch.autograd.graph import saved_tensors_hooks


class Keep(torch.autograd.Function):
    """Saves tensors as an operation does: their changes are noticed, and of those in a recompute
    around it only the places are kept."""

    @staticmethod
    def forward(ctx, switch, *args):
        ctx.save_for_backward(*args)
        return switch.clone()


def recompute(fn, *args):
    rng = torch.get_rng_state()
    kept = Keep.apply(torch.empty(0, requires_grad=True), *args)
    again = {}  # the tensors that a backward still asks for, by the place in which fn saved them

    def run():
        now = torch.get_rng_state()
        torch.set_rng_state(rng)
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in kept.grad_fn.saved_tensors]
        places = count()

        def save(t):
            again[next(places)] = t.detach()

        with torch.enable_grad(), saved_tensors_hooks(save, lambda none: none):
            fn(*inputs)
        torch.set_rng_state(now)

    def load(place):
        if place not in again:
            run()
        return again.pop(place)

    places = count()
    with saved_tensors_hooks(lambda t: next(places), load):
        return fn(*args)


edit = edits(__file__)


def alone(fn, *args):
    """What one writes first: backward calls backward on a graph of its own."""
    rng = torch.get_rng_state()
    result = fn(*args)

    def backward(grad):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(rng)
            fn(*args).backward(grad)

    out = result.detach().requires_grad_(result.requires_grad)
    if out.requires_grad:
        out.register_hook(backward)
    return out


RETURN = "        return fn(*args)\n"
WRONG = {  # name -> what of the reference it replaces
    "backward goes through the operations of a weight": dict(recompute=alone),
    "always wants a gradient": edit(
        RETURN, "        return fn(*args) + torch.zeros((), requires_grad=True)\n"
    ),
    "does not see that an argument has changed": edit("kept.grad_fn.saved_tensors", "args"),
    "keeps all": dict(recompute=lambda fn, *args: fn(*args)),
    "leaves the generator elsewhere": edit("        torch.set_rng_state(now)\n", ""),
    "draws other numbers in backward": edit("        torch.set_rng_state(rng)\n", ""),
    "runs fn for each tensor": edit("again.pop(place)", "[again[place], again.clear()][0]"),
}
