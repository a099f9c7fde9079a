"""Exercise 23: bring a model from meta to a device.

    materialize(model, device) -> None

`model` was built on meta, by any code: modules in modules, parameters (some may be None, as the
bias of a layer without one), buffers, perhaps a table that several modules share. Afterwards:
1. every parameter and buffer is on `device`, with the dtype that it had; the modules are the same
   objects;
2. parameters that were one object are one object again, and so are buffers (`named_parameters` and
   `named_buffers` with remove_duplicate=False see each name);
3. every module that has `reset_parameters()` was asked once to give its own parameters and buffers
   their values, in the order of `model.modules()`, when its memory was already there and its shared
   tables were already shared: then the random numbers are those of a plain build;
4. what was frozen (requires_grad False) is frozen.
"""

from torch import nn


def materialize(model: nn.Module, device: str) -> None:
    raise NotImplementedError("write materialize, then: python course/check.py 23")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import torch

    class Table(nn.Module):
        def __init__(self, rows: int, width: int, bias=True, dtype=None) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None

        def reset_parameters(self) -> None:
            self.asked = getattr(self, "asked", 0) + 1
            with torch.no_grad():
                self.weight.normal_()
                if self.bias is not None:
                    self.bias.zero_()

    class Rotary(nn.Module):
        def __init__(self, n: int, persistent: bool) -> None:
            super().__init__()
            self.register_buffer("cos", torch.empty(n), persistent=persistent)
            self.register_buffer("places", torch.empty(n, dtype=torch.int64))
            self.asked = 0

        def reset_parameters(self) -> None:
            self.asked += 1
            self.cos.copy_(torch.arange(len(self.cos)).cos())
            self.places.copy_(torch.arange(len(self.cos)))

    class Net(nn.Module):  # no parameter of its own, no reset_parameters: a container
        def __init__(self, shared: str) -> None:
            super().__init__()
            self.embed = Table(6, 4)
            self.blocks = nn.ModuleList(
                nn.Sequential(Table(4, 4), Rotary(3, i > 0)) for i in (0, 1, 2)
            )
            self.head = Table(6, 4)
            self.middle = Table(6, 4)
            self.half = Table(3, 4, bias=False, dtype=torch.bfloat16)
            first, *others = self.blocks
            if shared in ("two", "ten"):
                self.head.weight = self.embed.weight
                others[0][0].bias = first[0].bias
            if shared == "ten":
                self.middle.weight = self.embed.weight
                self.rows = nn.ModuleList(Table(6, 4) for _ in range(7))
                for table in self.rows:
                    table.weight = self.embed.weight
                for block in others:
                    block[0].weight, block[0].bias = first[0].weight, first[0].bias
            if shared == "buffers":
                for block in others:
                    block[1].cos = first[1].cos
            if shared == "a module":
                self.again = nn.ModuleDict({"head": self.head, "block": self.blocks[1]})
            first[0].weight.requires_grad_(False)

    def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
        named = dict(model.named_parameters(remove_duplicate=False))
        return named | dict(model.named_buffers(remove_duplicate=False))

    words = {
        "nothing": "nothing is shared",
        "two": "two modules share a table",
        "ten": "ten modules share a table, three another",
        "buffers": "three modules share a buffer",
        "a module": "a module has two names",
    }
    for seed, shared in enumerate(words):
        case = f"a net in which {words[shared]}"
        plain = Net(shared)
        torch.manual_seed(seed)
        for module in plain.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        with torch.device("meta"):
            model = Net(shared)
        modules = list(model.modules())
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)  # new memory is full of NaN
        try:
            answer.materialize(model, "cpu")
        finally:
            torch.use_deterministic_algorithms(False)
        same = [a is b for a, b in zip(modules, model.modules())]
        assert all(same) and len(same) == len(modules), "a module was replaced by another"
        found = tensors(model)
        expected = tensors(plain)
        assert found.keys() == expected.keys(), f"names {sorted(found.keys() ^ expected.keys())}"
        saved = model.state_dict().keys() ^ plain.state_dict().keys()
        assert not saved, f"{sorted(saved)} should be in the state dict, or should not: {case}"
        for name, t in found.items():
            kinds = t.dtype, expected[name].dtype
            assert kinds[0] == kinds[1], f"{name} has become {kinds[0]}, was {kinds[1]}: {case}"
            assert t.device.type == "cpu", f"{name} is on {t.device}: {case}"
            assert not t.isnan().any(), f"{name} was given memory, but no values: {t.tolist()}"
            frozen = not expected[name].requires_grad
            assert t.requires_grad != frozen, f"{name} should{' ' if frozen else ' not '}be frozen"
        for name in found:
            ties, ought = ([n for n in x if x[n] is x[name]] for x in (found, expected))
            assert ties == ought, (
                f"{name} should be one tensor for {ought}, it is for {ties}: {case}"
            )
        for name, module in model.named_modules():
            if hasattr(module, "reset_parameters"):
                n = getattr(module, "asked", 0)
                assert n == 1, f"reset_parameters of {name} was called {n} times, should be once"
        for name, t in found.items():
            assert torch.equal(t, expected[name]), (
                f"{name} has other values than a plain build: {t.flatten()[:3].tolist()}..., not "
                f"{expected[name].flatten()[:3].tolist()}..."
            )
    with torch.device("meta"):
        elsewhere = Net("two")
        model = Table(2, 3)  # no module below it
    answer.materialize(elsewhere, "meta")  # where there is nothing to see but the device
    left = [name for name, t in tensors(elsewhere).items() if not t.is_meta]
    assert not left, f"asked for the device meta, {left} are elsewhere"
    answer.materialize(model, "cpu")
    assert not model.weight.is_meta and model.asked == 1, "a model of one module counts, too"
