"""Exercise 22: forget the intermediate results, and compute them again.

    recompute(fn, *args) -> fn(*args)

fn takes tensors and returns one tensor; it may use others (weights) from outside. Rules:
1. the result, and after backward all gradients, are those of fn(*args), bit for bit: of the weights
   that fn uses, and of every argument that requires one (the others get none). An argument may be a
   leaf or the result of other operations, may be used elsewhere too, as in x + recompute(fn, x),
   and may hold whole numbers;
2. until backward, autograd keeps the arguments and nothing that fn computed in between;
3. fn runs once in forward and once in backward, and may draw random numbers (dropout): the second
   time it draws the same, and whoever draws afterwards notices nothing (torch's global generator is
   left as it was found);
4. a call inside of fn may be a recompute, too.
(All is on one device, and nobody uses torch.autocast, whose state would have to be kept as well.)

torch.utils.checkpoint is off limits; torch.autograd.Function is all you need.
"""


def recompute(fn, *args):
    raise NotImplementedError("write recompute, then: python course/check.py 22")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import gc
    import inspect
    import weakref

    import torch
    import torch.nn.functional as F

    class Token:
        pass

    class Probe(torch.autograd.Function):
        """Gives x back, and leaves a token in the graph: it lives as long as the graph does."""

        @staticmethod
        def forward(ctx, x, tokens):
            ctx.token = Token()
            tokens.append(weakref.ref(ctx.token))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    def run(way, fn, make, after=lambda out, *args: out) -> dict:
        """fn by way of `way` on the tensors that make() returns -> all that can be seen of it."""
        torch.manual_seed(10)
        weight = torch.randn(16, 16, requires_grad=True)
        leaves, args = make()
        calls = [0]
        kept = []
        tokens = []

        def counted(*inputs):
            calls[0] += 1
            files = [frame.filename for frame in inspect.stack(0)]
            assert not any(f.endswith("torch/utils/checkpoint.py") for f in files), (
                "fn is called by torch.utils.checkpoint, which is off limits"
            )
            return fn(weight, tokens, *inputs)

        def pack(t):
            kept.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = way(counted, *args)
        gc.collect()
        found = dict(calls=calls[0], alive=sum(token() is not None for token in tokens), out=out)
        own = {t.untyped_storage().data_ptr() for t in (*args, weight, out)}
        storages = {t.untyped_storage().data_ptr(): t for t in kept if t.is_floating_point()}
        found["kept"] = sum(t.nbytes for at, t in storages.items() if at not in own)
        found["drawn after forward"] = torch.rand(3)
        if out.requires_grad:
            after(out, *args).square().sum().backward()
        found |= {"calls with backward": calls[0], "drawn after backward": torch.rand(3)}
        found["grads"] = {"the weight": weight.grad}
        found["grads"] |= {f"argument {i}": leaf.grad for i, leaf in enumerate(leaves)}
        return found

    def compare(case, *how, runs=(1, 2), **named):
        try:
            ours = run(answer.recompute, *how, **named)
        except NotImplementedError:  # not begun; Python counts it as a RuntimeError
            raise
        except RuntimeError as error:
            raise AssertionError(f"{str(error).splitlines()[0]}: {case}") from error
        plain = run(lambda fn, *args: fn(*args), *how, **named)
        assert torch.equal(ours["out"], plain["out"]), f"another result: {case}"
        assert ours["out"].requires_grad == plain["out"].requires_grad, (
            f"the result {'wants a' if ours['out'].requires_grad else 'has no'} gradient: {case}"
        )
        assert ours["alive"] == 0 and ours["kept"] == 0, (
            f"rule 2: {ours['kept']:,} bytes of what fn computed and {ours['alive']} operations of "
            f"its graph are kept until backward, should be 0 and 0: {case}"
        )
        assert (ours["calls"], ours["calls with backward"]) == runs, (
            f"rule 3: fn ran {ours['calls']} times before and {ours['calls with backward']} times "
            f"after backward, should be {runs}: {case}"
        )
        for name, expected in plain["grads"].items():
            found = ours["grads"][name]
            assert (found is None) == (expected is None), (
                f"rule 1: the gradient of {name} is {found if found is None else 'there'}, should "
                f"be {expected if expected is None else 'there'}: {case}"
            )
            assert found is None or torch.equal(found, expected), (
                f"rule 1: the gradient of {name} is off by {(found - expected).abs().max():.2g}, "
                f"should be the same bits: {case}"
            )
        for when in ("drawn after forward", "drawn after backward"):
            assert torch.equal(ours[when], plain[when]), (
                f"rule 3: numbers {when} are {ours[when].tolist()}, not {plain[when].tolist()}: "
                f"{case}"
            )

    def deep(dropout):
        def fn(weight, tokens, a, b):
            for _ in range(6):
                a = Probe.apply(torch.tanh(a @ weight) * b, tokens)
                a = F.dropout(a, dropout)
            return a

        return fn

    def leaves(*wants):
        def make():
            made = [torch.randn(8, 16, requires_grad=want) for want in wants]
            return made, made

        return make

    for wants in ((True, True), (False, True), (True, False), (False, False)):
        for dropout in (0.0, 0.3):
            case = f"two leaves that want gradients {wants}, dropout {dropout}"
            compare(case, deep(dropout), leaves(*wants))

    def computed():
        a, b = (torch.randn(8, 16, requires_grad=True) for _ in range(2))
        return [a, b], [a * 2, b.exp()]

    compare("arguments that are results of other operations", deep(0.0), computed)
    compare("x + recompute(fn, x, y), x computed", deep(0.2), computed, lambda out, x, y: x + out)

    def twice():
        a = torch.randn(8, 16, requires_grad=True)
        return [a], [a, a]

    compare("recompute(fn, x, x)", deep(0.0), twice)

    def indices():
        table = torch.randn(5, 16, requires_grad=True)
        return [table], [torch.randint(5, (8,)), table]

    compare(
        "an argument of whole numbers",
        lambda weight, tokens, i, t: torch.tanh(t[i] @ weight),
        indices,
    )

    def nested(weight, tokens, a):
        def inner(z):
            return F.dropout(torch.tanh(Probe.apply(z, tokens) @ weight), 0.3)

        return torch.tanh(answer.recompute(inner, torch.sin(a)))

    compare("a recompute inside of fn", nested, leaves(True))

    x = torch.randn(8, 16, requires_grad=True)
    with torch.no_grad():
        out = answer.recompute(lambda z: z.tanh(), x)
    assert not out.requires_grad and torch.equal(out, x.detach().tanh()), (
        "under no_grad the result is another, or wants a gradient"
    )
