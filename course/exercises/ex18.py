"""Exercise 18: forget the intermediate results, and compute them again.

    recompute(fn, *args) -> fn(*args)

fn takes tensors and returns one tensor; it may use others (weights) from outside. Rules:
1. the result, and after backward all gradients, are those of fn(*args), bit for bit: of the weights
   that fn uses, and of every argument that requires one (the others get none);
2. until backward, autograd keeps the arguments and nothing that fn computed in between;
3. fn may draw random numbers (dropout): the second time it draws the same, and whoever draws
   afterwards notices nothing (torch's global generator is left as it was found).

torch.utils.checkpoint is off limits; torch.autograd.Function is all you need.
"""


def recompute(fn, *args):
    raise NotImplementedError("write recompute, then: python course/check.py 18")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import torch
    import torch.nn.functional as F

    def run(way, wants: tuple[bool, ...], dropout: float) -> dict:
        torch.manual_seed(10)
        weight = torch.randn(16, 16, requires_grad=True)
        args = [torch.randn(8, 16, requires_grad=want) for want in wants]
        calls = [0]

        def fn(a, b):
            calls[0] += 1
            for _ in range(10):
                a = torch.tanh(a @ weight) * b
                a = F.dropout(a, dropout)
            return a

        kept = []

        def pack(t):
            kept.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = way(fn, *args)
        calls_before = calls[0]
        given = [t.data_ptr() for t in (*args, weight, out)]
        bytes_kept = sum(t.nbytes for t in kept if t.is_floating_point())
        bytes_kept -= sum(t.nbytes for t in kept if t.data_ptr() in given and t.is_floating_point())
        after = torch.rand(3)
        out.square().sum().backward()
        grads = {"the weight": weight.grad, "argument 0": args[0].grad, "argument 1": args[1].grad}
        again = torch.rand(3)
        return dict(
            out=out,
            grads=grads,
            kept=bytes_kept,
            after=after,
            again=again,
            calls=(calls_before, calls[0]),
        )

    for wants in ((True, True), (False, True), (True, False), (False, False)):
        for dropout in (0.0, 0.3):
            ours, plain = (
                run(answer.recompute, wants, dropout),
                run(lambda fn, *a: fn(*a), wants, dropout),
            )
            case = f"gradients wanted for {wants}, dropout {dropout}"
            assert torch.equal(ours["out"], plain["out"]), f"another result: {case}"
            assert ours["kept"] == 0, (
                f"{ours['kept']:,} bytes of intermediate results are kept, should be 0: {case}"
            )
            assert ours["calls"] == (1, 2), (
                f"fn ran {ours['calls']} times, should be (1, 2): {case}"
            )
            for name, expected in plain["grads"].items():
                found = ours["grads"][name]
                assert (found is None) == (expected is None), (
                    f"the gradient of {name} is {found if found is None else 'there'}, should be "
                    f"{expected if expected is None else 'there'}: {case}"
                )
                assert found is None or torch.equal(found, expected), (
                    f"the gradient of {name} is off by {(found - expected).abs().max():.2g}: {case}"
                )
            for when in ("after", "again"):
                assert torch.equal(ours[when], plain[when]), (
                    f"numbers drawn {'after forward' if when == 'after' else 'after backward'} "
                    f"differ, {ours[when].tolist()}: {case}"
                )
