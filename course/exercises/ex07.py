"""Exercise 7: the loop, which every training run has.

    train(weights, loss, batch, update, steps, micro) -> the loss of each step, a list of floats

`weights` is a list of tensors that require gradients. batch(step) gives the rows of a step, a
tensor (rows, ...); loss(rows) the mean of their losses, a tensor of one number; update(step)
changes the weights, using their `.grad`. For step = 0, 1, ... `steps` - 1:
1. ask for the rows of this step, once;
2. no more than `micro` rows fit into memory at a time: go through the rows in passes, in their
   order, each row in one pass, all passes of `micro` rows but the last, which may be smaller;
3. when update(step) is called, once for each step and after its last pass, the gradients are those
   of the mean loss over *all* rows of the step. backward *adds* to `.grad`: so whatever is there
   from before, from an earlier step or another caller, must not be in it, and a pass must count by
   its share of the rows;
4. the loss of a step is the mean over all its rows, as it was before the update: a float of
   Python's, not a tensor, which would keep its graph;
5. backward frees what forward has kept: of the passes, one at most is in memory at any time.

    with rows 7, micro 3: passes of 3, 3 and 1 rows, which count 3/7, 3/7 and 1/7
"""

from collections.abc import Callable

from torch import Tensor


def train(
    weights: list[Tensor],
    loss: Callable[[Tensor], Tensor],
    batch: Callable[[int], Tensor],
    update: Callable[[int], None],
    steps: int,
    micro: int,
) -> list[float]:
    raise NotImplementedError("write train, then: python course/check.py 7")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math
    import weakref

    import torch

    draw = torch.Generator().manual_seed(5)

    class Kept:
        """What forward keeps for backward; gone when nothing refers to it any more."""

        def __init__(self, tensor: Tensor):
            self.tensor = tensor
            alive.add(self)

    def shown(x: Tensor) -> list[float]:
        return [round(float(number), 4) for number in x.flatten()]

    alive: weakref.WeakSet = weakref.WeakSet()

    def judge(rows: int, micro: int, steps: int) -> None:
        case = f"{rows} rows, micro {micro}, {steps} steps"
        data = torch.randn(steps + 1, rows, 6, generator=draw, dtype=torch.float64)
        w = torch.randn(5, generator=draw, dtype=torch.float64).requires_grad_()
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        unused = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # in no loss
        w.grad = torch.full_like(w, 100.0)
        scale.grad = torch.full_like(scale, -7.0)
        log: list[tuple] = []

        def mean_loss(part: Tensor) -> Tensor:
            predicted = torch.tanh(scale * part[:, :5] @ w)
            return ((predicted - part[:, 5]) ** 2).mean()

        def loss(part: Tensor) -> Tensor:
            waiting = len(alive)
            assert not waiting, (
                f"rule 5: forward of a pass begins while {waiting} tensors that an earlier one "
                f"has kept are in memory: {case}"
            )
            log.append(("loss", part.detach().clone()))
            with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
                return mean_loss(part)

        def batch(step: int) -> Tensor:
            log.append(("batch", step))
            return data[step].clone()

        def update(step: int) -> None:
            whole = torch.autograd.grad(mean_loss(data[step]), [w, scale])
            for name, found, right in zip(
                ("weights[0]", "weights[1]"), (w.grad, scale.grad), whole
            ):
                assert found is not None, (
                    f"rule 3: at the update {name} has no gradient: step {step}, {case}"
                )
                assert torch.allclose(found, right, rtol=1e-9, atol=1e-12), (
                    f"rule 3: at the update the gradient of {name} is {shown(found)}, of the mean "
                    f"loss over all rows it is {shown(right)}: step {step}, {case}"
                )
            log.append(("update", step, mean_loss(data[step]).item()))
            with torch.no_grad():
                w.sub_(0.3 * whole[0])
                scale.sub_(0.1 * whole[1])

        losses = answer.train([w, scale, unused], loss, batch, update, steps, micro)
        asked = [entry[1] for entry in log if entry[0] == "batch"]
        assert asked == [*range(steps)], f"rule 1: batch was asked for the steps {asked}: {case}"
        updates = [entry for entry in log if entry[0] == "update"]
        assert [u[1] for u in updates] == [*range(steps)], (
            f"rule 3: update was called for the steps {[u[1] for u in updates]}: {case}"
        )
        passes = []
        step = 0
        for kind, *what in log:
            if kind == "loss":
                passes.append(what[0])
            if kind == "update":
                sizes = [len(part) for part in passes]
                right = [min(micro, rows - at) for at in range(0, rows, micro)]
                assert sizes == right, f"rule 2: passes of {sizes} rows, not {right}: {case}"
                assert torch.equal(torch.cat(passes), data[step]), (
                    f"rule 2: the passes' rows are not the step's, in their order: step {step}, "
                    f"{case}"
                )
                passes = []
                step = step + 1
        assert not passes, f"rule 3: {len(passes)} passes after the last update: {case}"
        assert isinstance(losses, list) and len(losses) == steps, (
            f"returned {losses}, not a list of {steps} losses: {case}"
        )
        for step, (found, entry) in enumerate(zip(losses, updates)):
            assert isinstance(found, float), (
                f"rule 4: the loss of step {step} is a {type(found).__name__}, not a float: {case}"
            )
            assert math.isclose(found, entry[2], rel_tol=1e-9), (
                f"rule 4: the loss of step {step} is {found}, over all its rows and before the "
                f"update it is {entry[2]}: {case}"
            )

    for case in ((4, 2, 3), (7, 3, 4), (5, 8, 2), (3, 1, 3), (2, 2, 0)):
        judge(*case)
