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
    from subject import same
    from torch import nn

    class Places(nn.Module):
        """With buffers only."""

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.register_buffer("places", torch.empty(rows, dtype=torch.int64))
            self.register_buffer("cos", torch.empty(rows), persistent=rows > 5)
            self.register_buffer("none", None)
            self.asked = 0

        def reset_parameters(self) -> None:
            self.asked += 1
            with torch.no_grad():
                for t in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
                    t.copy_(10 * torch.randn(t.shape))

    class Table(Places):
        """A module with another one inside; it inherits reset_parameters."""

        def __init__(self, rows: int, dtype=None) -> None:
            super().__init__(rows)
            weight = torch.empty(rows, 4, dtype=dtype)
            self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
            self.bias = nn.Parameter(torch.empty(()))
            self.register_parameter("absent", None)
            self.inside = Places(rows)

    def build(shared: bool) -> nn.Module:
        """A container, so it has no reset_parameters."""
        kinds = (torch.bfloat16, torch.int8, None)
        model = nn.ModuleDict(
            {
                "wide": Table(70_000),
                "layers": nn.ModuleList(
                    nn.Sequential(*(Table(5, k) for k in kinds)) for _ in kinds
                ),
                "many": nn.ModuleList(Table(6) for _ in range(300)),
            }
        )
        first, *others = model["layers"]
        first[2].weight.requires_grad_(False)
        if shared:
            model["again"] = nn.Sequential(first, model["many"][7])
            for table in model["many"]:
                table.weight = model["many"][0].weight
            for layer in others:
                layer[1].absent = first[1].weight
                layer[2].weight = first[2].weight
                layer[0].bias = first[1].bias
                layer[2].cos = first[2].cos
        return model

    def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
        named = dict(model.named_parameters(remove_duplicate=False))
        return named | dict(model.named_buffers(remove_duplicate=False))

    def firsts(tensors: dict) -> dict:
        """For each name the first name of its tensor."""
        seen = {}
        return {name: seen.setdefault(id(t), name) for name, t in tensors.items()}

    answer.may("materialize", draw=True)
    for seed, (make, given) in enumerate([(build, False), (build, True), (Table, 6)]):
        plain = make(given)
        torch.manual_seed(seed)
        for module in plain.modules():
            if hasattr(module, "asked"):
                module.reset_parameters()
        with torch.device("meta"):
            model = make(given)
            elsewhere = make(given)
        modules = list(model.modules())
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)  # new memory is full of NaN
        try:
            answer.materialize(model, "cpu")
        finally:
            torch.use_deterministic_algorithms(False)
        assert modules == list(model.modules()), "a module was replaced by another"
        for name, module in model.named_modules():
            asked = getattr(module, "asked", 1)
            assert asked == 1, f"reset_parameters of {name} was called {asked} times"
        found = tensors(model)
        right = tensors(plain)
        for ours, theirs in ((found, right), (model.state_dict(), plain.state_dict())):
            other = sorted(ours.keys() ^ theirs.keys())[:4]
            assert not other, f"{other} are new, gone, or not to be saved any more, or now"
        ties = firsts(right)
        for name, first in firsts(found).items():
            t = found[name]
            assert t.device.type == "cpu", f"{name} is on {t.device}"
            wants = right[name].requires_grad
            assert t.requires_grad == wants, f"requires_grad of {name} should be {wants}"
            assert first == ties[name], f"{name} should be one tensor with {ties[name]}"
            same(t, right[name], name, 0, 0)
        answer.materialize(elsewhere, "meta")  # where there is nothing to see but the device
        for name, t in tensors(elsewhere).items():
            assert t.is_meta, f"{name} is on {t.device}"
