"""Exercise 10: the schedule of your trainer, a few lines that are worth much.

    rate(step, steps, warmup) -> what the learning rate is multiplied by at `step`, from 0 on

It rises in a straight line over the first `warmup` steps: 1/warmup at step 0, 1 at step warmup - 1
(a warmup of 0 or 1 is none). Then it is 1. Over the second half of the `steps` it falls in a
straight line from 1 at step steps/2 to 0 at step `steps`, which is not taken any more, so the last
step still moves. Where both lines are below 1, it is the lower of the two.

    rate(0, 100, 20) -> 0.05    rate(40, 100, 20) -> 1    rate(75, 100, 20) -> 0.5
"""


def rate(step: int, steps: int, warmup: int) -> float:
    raise NotImplementedError("write rate, then: python course/check.py 10")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math

    def multiplier(step: int, steps: int, warmup: int, right: float) -> None:
        found = answer.rate(step, steps, warmup)
        assert math.isclose(found, right, rel_tol=1e-6), (
            f"rate({step}, {steps}, {warmup}) is {found}, not {right}"
        )

    def on_line(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
        return (y0 * (x1 - x) + y1 * (x - x0)) / (x1 - x0)

    for steps, warmup in ((100, 20), (101, 1), (7, 0), (1200, 20), (1, 0), (10, 5), (64, 32)):
        for step in range(steps):
            if step < warmup - 1:
                right = on_line(step, 0, 1 / warmup, warmup - 1, 1)
            else:
                right = on_line(step, steps / 2, 1, steps, 0) if step > steps / 2 else 1
            multiplier(step, steps, warmup, right)
    multiplier(9, 20, 40, 0.25)  # still rising
    multiplier(15, 20, 40, 0.4)  # it rises at 0.4, where falling would give 0.5
    multiplier(18, 20, 40, 0.2)
    multiplier(10**9 - 1, 10**9, 2000, 2e-9)
