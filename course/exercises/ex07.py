"""Exercise 7: the loop, which every training run has.

    train(weights, loss, batch, update, steps, micro) -> the loss of each step, a list of floats

`weights` is a list of tensors that require gradients. batch(step) gives the rows of a step, a
tensor (rows, ...); loss(rows) the mean of their losses, a tensor of one number, also in bfloat16;
update(step) changes the weights, using their `.grad`. For step = 0, 1, ... `steps` - 1:
1. ask for the rows of this step, once;
2. no more than `micro` rows fit into memory at a time: go through the rows in passes, in their
   order, each row in one pass, all passes of `micro` rows but the last, which may be smaller;
3. when update(step) is called, once for each step and after its last pass, the gradients are those
   of the mean loss over *all* rows of the step. backward *adds* to `.grad`: so whatever is there
   from before, from an earlier step, another caller or batch(step), must not be in it, and a pass
   must count by its share of the rows;
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
    import weakref

    import torch
    from subject import same

    draw = torch.Generator().manual_seed(5)
    alive = weakref.WeakSet()
    answer.may("train", change="weights")

    class Kept:
        """What forward keeps for backward; gone when nothing refers to it any more."""

        def __init__(self, tensor):
            self.tensor = tensor
            alive.add(self)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def judge(rows, micro, steps, dtype=torch.float64):
        data = normal(steps, rows, 6)
        weights = [w.requires_grad_() for w in (normal(5), normal(), normal(2))]
        # the last is in no loss
        asked = []
        passes = []
        means = []

        def mean_loss(part):
            predicted = torch.tanh(weights[1] * part[:, :5] @ weights[0])
            return ((predicted - part[:, 5]) ** 2).mean().reshape([1] * (rows % 2))

        def loss(part):
            left = f"{len(alive)} tensors that an earlier one has kept are in memory"
            assert not alive, f"rule 5: forward of a pass begins while {left}"
            passes.append(part.clone())
            with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
                return mean_loss(part).to(dtype)

        def batch(step):
            asked.append(step)
            for w in weights:
                w.grad = 100 * w.detach()
            return data[step].clone()

        def update(step):
            before = f"before update({step}), of {rows} rows,"
            assert asked == [*range(step + 1)], f"rule 1: {before} batch was asked for {asked}"
            assert len(means) == step, f"rule 3: {before} update was called {len(means)} times"
            sizes = [len(part) for part in passes]
            right = [min(micro, rows - at) for at in range(0, rows, micro)]
            assert sizes == right, f"rule 2: {before} there were passes of {sizes}, not {right}"
            same(torch.cat(passes), data[step], f"rule 2: {before} what the passes had")
            passes.clear()
            whole = mean_loss(data[step])
            means.append(whole.item())
            slopes = torch.autograd.grad(whole, weights, materialize_grads=True)
            for i, (w, slope) in enumerate(zip(weights, slopes)):
                found = 0 * slope if w.grad is None else w.grad
                same(found, slope, f"rule 3: {before} the gradient of weights[{i}]")
                w.data -= 0.3 * slope

        losses = answer.train(weights, loss, batch, update, steps, micro)
        calls = len(asked), len(means), len(passes)
        assert calls == (steps, steps, 0), f"batch, update, passes at the end: {calls}"
        floats = [isinstance(found, float) for found in losses]
        assert isinstance(losses, list) and all(floats), f"rule 4: {losses} is no list of floats"
        same(losses, means, "rule 4: the losses", torch.finfo(dtype).eps ** 0.5)

    for case in ((4, 2, 3), (9, 4, 3), (10, 6, 2), (5, 8, 2), (3, 1, 3), (2, 2, 0)):
        judge(*case)
    judge(70_000, 300, 1)
    judge(2, 1, 1200)
    judge(1024, 1, 1, torch.bfloat16)
