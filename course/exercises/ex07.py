"""Exercise 7: the loop at the heart of every training run.

    train(weights, loss, batch, update, steps, micro) -> the loss of each step, a list of floats

`weights` is a list of tensors that require gradients. batch(step) gives the rows of a step, a
tensor (rows, ...). loss(rows) gives their mean loss, a tensor of one number, which may be bfloat16.
update(step) changes the weights, using their `.grad`. For step = 0, 1, ... `steps` - 1:
1. Ask for the rows of this step, once.
2. No more than `micro` rows fit into memory at a time. Go through the rows in order, in passes,
   each row in one pass. Every pass has `micro` rows, except the last, which may have fewer.
3. Call update(step) once for each step, after its last pass, even if the loss is NaN or infinite.
   At that moment the gradients are those of the mean loss over *all* rows of the step. backward
   *adds* to `.grad`, so nothing that was there before may be left in it, whether it comes from an
   earlier step, another caller or batch(step); and each pass counts by its share of the rows.
4. The loss of a step is the mean over all its rows, as it was before the update. It is a Python
   float, not a tensor, which would keep its graph.
5. backward frees what forward has kept: never have more than one pass in memory.

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
    from subject import equal, same

    answer.may("train", change="weights")
    torch.manual_seed(5)

    def judge(rows, micro, dtype=torch.float32):
        data = torch.randn(3, rows, 3)
        data[:, :, 0] = torch.arange(rows)  # the row's number, for the judge
        data[-1, 0, 1] = torch.nan  # a step with a bad loss is a step
        w = torch.ones(2, requires_grad=True)
        passes = [part.tolist() for part in torch.arange(rows).split(micro)]
        asked = []
        seen = []
        kept = weakref.WeakSet()
        means = []

        def keep(tensor):
            """What forward keeps for backward is in memory as long as something refers to it."""
            tensor = tensor.detach().clone()
            kept.add(tensor)
            return tensor

        def mean_loss(part):
            return ((part[:, 1:] @ w - 1) ** 2).mean()

        def batch(step):
            asked.append(step)
            if step:
                w.grad = torch.full_like(w, 100.0)
            return data[step]

        def loss(part):
            seen.append(part[:, 0].int().tolist())
            assert not kept, (
                "rule 5: a pass begins while what forward kept in the last one is in memory"
            )
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return mean_loss(part).to(dtype)

        def update(step):
            what = f"rule 1: before update({step}), the list of the steps that batch was asked for"
            equal(asked, [*range(step + 1)], what)
            equal(seen, passes, f"rule 2: before update({step}), the list of each pass's rows")
            seen.clear()
            mean = mean_loss(data[step])
            means.append(mean.item())
            (slope,) = torch.autograd.grad(mean, w)
            note = " (batch had set w.grad to 100)" * (step > 0)
            what = f"rule 3{note}: at update({step}) w.grad"
            same(w.grad, slope, what, 1e-4, 1e-4)
            w.data -= 0.1 * slope

        losses = answer.train([w], loss, batch, update, 3, micro)
        what = "rule 3: in 3 steps, the last with a loss of NaN, the number of calls of update"
        equal(len(means), 3, what)
        for step, (found, right) in enumerate(zip(losses, means, strict=True)):
            what = f"rule 4: {rows} rows in passes of {micro}: the loss of step {step}"
            assert isinstance(found, float), f"{what} is {found!r}, and should be a Python float"
            same(found, right, what, 0.01)  # of bfloat16

    judge(7, 3)
    judge(1024, 1, torch.bfloat16)  # a sum in bfloat16 stops growing
