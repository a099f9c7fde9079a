"""Exercise 23: bring a model from meta to a device.

    materialize(model, device) -> None

`model` was built on meta by some code that you do not know: modules in modules, parameters (some
may be None, like the bias of a layer without one), buffers, perhaps a table that several modules
share. Afterwards:
1. every parameter and buffer is on `device`, with the dtype it had; the modules are the same
   objects;
2. parameters that were one object are one object again, and so are buffers (`named_parameters` and
   `named_buffers` with remove_duplicate=False show you each name);
3. every module that has `reset_parameters()` was asked once to give its own parameters and buffers
   their values, in the order of `model.modules()`, when its memory was already there and its shared
   tables were already shared: then the random numbers are those of a plain build;
4. what was frozen (requires_grad False) is frozen.
"""

from torch import nn


def materialize(model: nn.Module, device: str) -> None:
    raise NotImplementedError("write materialize, then: python course/check.py 23")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    from itertools import combinations

    import torch
    from subject import equal, same
    from torch import nn

    class Table(nn.Module):
        def __init__(self, rows: int, dtype=None) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(rows, 2, dtype=dtype))
            self.register_parameter("bias", None)
            self.register_buffer("scale", torch.empty(rows), persistent=rows != 3)
            self.asked = 0

        def reset_parameters(self) -> None:
            self.asked += 1
            nn.init.normal_(self.weight)
            nn.init.normal_(self.scale)

    class Model(Table):
        """A module with others inside; containers have no reset_parameters."""

        def __init__(self) -> None:
            super().__init__(5)
            self.layers = nn.Sequential(Table(3), nn.Sequential(Table(5), Table(3, torch.bfloat16)))
            self.head = Table(5)
            self.head.weight = self.weight
            self.layers[1][0].scale = self.head.scale
            self.again = self.layers[0]
            self.layers[0].weight.requires_grad_(False)

    def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
        named = dict(model.named_parameters(remove_duplicate=False))
        return named | dict(model.named_buffers(remove_duplicate=False))

    answer.may("materialize", draw=True)
    plain = Model()
    torch.manual_seed(0)
    for module in plain.modules():
        if isinstance(module, Table):
            module.reset_parameters()
    right = tensors(plain)
    for device in ("cpu", "meta"):  # which every machine has
        with torch.device("meta"):
            model = Model()
        modules = list(model.modules())
        torch.manual_seed(0)
        answer.materialize(model, device)
        assert modules == list(model.modules()), "rule 1: a module was replaced by another"
        found = tensors(model)
        for name, t in found.items():
            equal(t.device.type, device, f"rule 1: the device of model.{name}")
            equal(t.dtype, right[name].dtype, f"rule 1: the dtype of model.{name}")
            equal(t.requires_grad, right[name].requires_grad, f"rule 4: model.{name}.requires_grad")
        for a, b in combinations(right, 2):
            one = right[a] is right[b]
            equal(
                found[a] is found[b], one, f"rule 2: whether model.{a} and model.{b} are one object"
            )
        for name, module in model.named_modules():
            if isinstance(module, Table):
                what = f"rule 3: how often reset_parameters of {name or 'the model'} was called"
                equal(module.asked, 1, what)
        if device == "cpu":
            for name, t in found.items():
                same(t, right[name], f"rule 3: after torch.manual_seed(0), model.{name}", 0, 0)
