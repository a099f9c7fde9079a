"""Exercise 22: forget the intermediate results, and compute them again.

    recompute(fn, *args) -> fn(*args)

fn takes tensors and returns one tensor; it may use others (weights) from outside. Rules:
1. The result, and after backward all gradients, are those of fn(*args), bit for bit: the gradients
   of the weights that fn uses, and of every argument that requires one (the others get none).
   Weights and arguments may be leaves or the results of other operations, and may be used elsewhere
   too, as in x + recompute(fn, x); an argument may hold whole numbers. The result wants a gradient
   where that of fn(*args) does. If an argument was changed in place before backward, that is a
   RuntimeError, as for fn(*args).
2. Until backward, autograd keeps the arguments and nothing that fn computed in between.
3. fn runs once in forward and once in each backward (there may be several). It may draw random
   numbers (dropout): it draws the same ones each time, and code that draws afterwards notices
   nothing (torch's global generator is left as it was found).
4. A call inside fn may be a recompute, too.
(Everything is on one device. Nobody asks for gradients of gradients, or uses torch.autocast, whose
state you would have to keep as well.)

torch.utils.checkpoint is off limits; torch.autograd.graph.saved_tensors_hooks, and a
torch.autograd.Function that keeps the arguments, are all you need. (A Function whose backward calls
backward on a graph of its own won't do: if two of them share a weight that is itself the result of
operations, the first one's backward frees what the second one's needs.)
"""


def recompute(fn, *args):
    raise NotImplementedError("write recompute, then: python course/check.py 22")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import gc
    from contextlib import suppress
    from weakref import ref

    import torch
    from subject import equal, same
    from torch.nn.functional import dropout

    answer.may("recompute", draw=True)
    weight = torch.randn(3, 3, requires_grad=True)
    runs = []  # of layers
    between = []  # weak references to the memory of what fn computes on its way

    def noted(t):
        between.append(ref(t.untyped_storage()))
        return t

    def product(a, b):
        return torch.tanh(a @ weight) * b

    def layers(a, b):
        runs.append(1)
        return torch.sin(noted(dropout(product(a, b))))

    def nested(a):
        return torch.tanh(answer.recompute(dropout, noted(torch.sin(a))))

    def computed(call, a):
        w = weight.tanh()
        return call(lambda x: x @ w, a) + call(lambda x: torch.sin(x @ w), a) * w

    def see(case, call, expression, wants):
        """Yield all that can be seen of an expression; call(fn, *args) is fn(*args)."""
        torch.manual_seed(10)
        weight.grad = None
        leaves = [torch.randn(3, 3, requires_grad=want) for want in wants]
        out = expression(call, *leaves)
        yield f"rule 1, {case}: requires_grad of the result", out.requires_grad
        yield f"rule 1, {case}: the result", out.detach()
        yield f"rule 3, {case}: torch.rand(3) after the call", torch.rand(3)
        try:
            if out.requires_grad:
                out.square().sum().backward()
        except RuntimeError as error:
            raise AssertionError(f"rule 1, {case}: backward fails: {error}") from error
        yield f"rule 3, {case}: torch.rand(3) after backward", torch.rand(3)
        for name, leaf in zip(("weight", "a", "b"), (weight, *leaves)):
            has = leaf.grad is not None
            yield f"rule 1, {case}: whether {name} has a gradient", has
            if has:
                yield f"rule 1, {case}: {name}.grad", leaf.grad

    def judge(case, expression, *wants):
        right = dict(see(case, lambda fn, *args: fn(*args), expression, wants))
        for what, found in see(case, answer.recompute, expression, wants):
            same(found, right[what], what, 0, 0)

    judge("fn(a, b) = tanh(a @ weight) * b", lambda call, *ab: call(product, *ab), True, False)
    judge("a + fn(a, e^b)", lambda call, a, b: a + call(product, a, b.exp()), True, True)
    judge("fn(i, a) = a[i]", lambda call, a: call(lambda i, a: a[i], torch.arange(2), a), True)
    judge("fn(a) = 2 * a.detach()", lambda call, a: call(lambda a: 2 * a.detach(), a), True)
    judge("a computed weight in two recomputes", computed, True)
    x = torch.randn(3, 3)
    out = answer.recompute(product, x, x)
    x.zero_()
    with suppress(RuntimeError):
        out.sum().backward()
        raise AssertionError("rule 1: x was changed in place before backward, and that is no error")
    judge("fn has dropout and a weight", lambda call, *ab: call(layers, *ab), False, False)
    judge("a recompute inside of fn (rule 4)", lambda call, a: call(nested, a), True)

    between.clear()
    runs.clear()
    outs = answer.recompute(layers, weight, weight), answer.recompute(nested, weight)
    gc.collect()
    kept = sum(memory() is not None for memory in between)
    equal(kept, 0, "rule 2: the number of tensors kept of those that fn computed")
    for backward in (1, 2):
        outs[0].sum().backward(retain_graph=True)
        equal(len(runs), 1 + backward, f"rule 3: the number of fn's runs up to backward {backward}")
