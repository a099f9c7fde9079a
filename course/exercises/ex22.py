"""Exercise 22: forget the intermediate results, and compute them again.

    recompute(fn, *args) -> fn(*args)

fn takes tensors and returns one tensor; it may use others (weights) from outside. Rules:
1. the result, and after backward all gradients, are those of fn(*args), bit for bit: of the weights
   that fn uses, and of every argument that requires one (the others get none). An argument may be a
   leaf or the result of other operations, may be used elsewhere too, as in x + recompute(fn, x),
   and may hold whole numbers. The result wants a gradient where that of fn(*args) does, and an
   argument that was changed in place before backward is a RuntimeError, as for fn(*args);
2. until backward, autograd keeps the arguments and nothing that fn computed in between;
3. fn runs once in forward and once in each backward (there may be several), and may draw random
   numbers (dropout): it draws the same each time, and whoever draws afterwards notices nothing
   (torch's global generator is left as it was found);
4. a call inside of fn may be a recompute, too.
(All is on one device, and nobody uses torch.autocast, whose state would have to be kept as well.)

torch.utils.checkpoint is off limits; torch.autograd.Function and
torch.autograd.graph.saved_tensors_hooks are all you need, and either can do it.
"""


def recompute(fn, *args):
    raise NotImplementedError("write recompute, then: python course/check.py 22")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import gc
    from functools import cache
    from itertools import product
    from traceback import walk_stack

    import torch
    import torch.nn.functional as F
    import torch.utils.checkpoint as library
    from subject import same
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    made = {}  # memory of tensors by its address: (weak reference, bytes)

    class Watch(TorchDispatchMode):
        """Notes the memory of each tensor that is computed, and does not keep it."""

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            out = operation(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                memory = out.untyped_storage()
                made[memory.data_ptr()] = StorageWeakRef(memory), memory.nbytes()
            return out

    def run(recompute, expression, wants, gradient) -> tuple:
        """The expression, in which `recompute` is called -> all that can be seen of it."""
        gc.freeze()  # a collection need not look at what is older
        torch.manual_seed(10)
        made.clear()
        leaves = [torch.randn(64, 32, requires_grad=want) for want in wants]
        known = [weight]  # may be kept: arguments and results, too
        runs = []
        results = []

        @cache  # one function stays one
        def watched(fn):
            def watching(*inputs):
                files = [frame.f_code.co_filename for frame, _ in walk_stack(None)]
                assert library.__file__ not in files, "torch.utils.checkpoint is off limits"
                runs.append(fn)
                with Watch():
                    return fn(*inputs)

            return watching

        def call(fn, *args):
            results.append(recompute(watched(fn), *args))
            known.extend([*args, results[-1]])
            return results[-1]

        out = expression(call, *leaves)
        assert out.requires_grad == gradient, f"rule 1: requires_grad should be {gradient}"
        gc.collect()
        own = [t.untyped_storage().data_ptr() for t in known]
        kept = [x for at, (memory, x) in made.items() if not (memory.expired() or at in own)]
        seen = [out.detach().clone(), torch.rand(3)]
        before = len(runs)
        if gradient:
            for part in (results[0], out):  # backward of the first, then of all
                weight.grad = None
                part.square().sum().backward(retain_graph=True)
        seen += [torch.rand(3), *(leaf.grad for leaf in (weight, *leaves))]
        return sum(kept), (before, len(runs)), seen

    def judge(case: str, expression, *wants: bool, gradient=True) -> None:
        given = expression, wants, gradient
        _, (once, _), plain = run(lambda fn, *args: fn(*args), *given)
        kept, times, ours = run(answer.recompute, *given)
        assert kept < 64 * 32, f"rule 2, {case}: {kept:,} bytes that fn computed are kept"
        right = once, once + gradient * (1 + once)
        assert times == right, (
            f"rule 3, {case}: runs before and after backward {times}, not {right}"
        )
        what = ["the result", "what is drawn next", "what is drawn in the end"]
        what += ["the weight's gradient", "the first argument's", "the second argument's"]
        for name, found, right in zip(what, ours, plain):
            if found is None or right is None:
                assert found is right, f"{case}: {name} is None, or should be"
            else:
                same(found, right, f"in {case} {name}", 0, 0)

    def layers(a, b):
        for _ in range(6):
            a = F.dropout(torch.tanh(a @ weight) * b, 0.3)
        return a

    def other(a):
        return F.dropout(torch.sin(a @ weight).exp())

    def lookup(i, table):
        return other(table[i].float())

    def nested(a):
        return torch.tanh(answer.own["recompute"](layers, torch.sin(a), a))

    def long(call, a):
        for _ in range(1200):
            a = call(torch.sin, a)
        return a

    answer.may("recompute", draw=True)
    weight = torch.randn(32, 32, requires_grad=True)
    for wants in product((True, False), repeat=2):
        judge(f"recompute(fn, a, b), {wants}", lambda c, a, b: c(layers, a, b), *wants)
    judge("recompute(fn, x, x)", lambda c, x: c(layers, x, x), True)
    judge("x + recompute(fn, x, e^y)", lambda c, x, y: x + c(layers, x, y.exp()), True, True)
    judge("fn, sin and fn of a", lambda c, a: c(other, a) * c(torch.sin, a) * c(other, a), True)
    judge("whole numbers", lambda c, t: c(lookup, torch.arange(40), t.bfloat16()), True)
    judge("recompute(fn)", lambda c: c(lambda: other(weight)))
    judge("sin", lambda c, a: c(torch.sin, a), False, gradient=False)
    judge("no_grad", torch.no_grad()(lambda c, a: c(torch.sin, a)), True, gradient=False)
    judge("a recompute inside of fn", lambda c, a: c(nested, a), True)
    judge("1,200 in a row", long, True)
    x = torch.randn(64, 32)
    out = answer.recompute(layers, x, x)
    x.zero_()
    try:
        out.sum().backward()
    except RuntimeError:
        return
    raise AssertionError("rule 1: x was changed in place before backward, and there is no error")
