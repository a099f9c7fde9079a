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
    import numpy as np
    from subject import same

    cases = [  # step, steps, warmup, right
        (9, 20, 40, 0.25),  # still rising
        (15, 20, 40, 0.4),  # it rises at 0.4, where falling would give 0.5
        (18, 20, 40, 0.2),
        (299, 1000, 600, 0.5),
        (69_999, 10**6, 280_000, 0.25),
        (2**24 - 1, 2**40, 2**25, 0.5),
        (3 * 2**38 + 1, 2**40, 2, 0.5),
        (2**24, 2**24 + 1, 2, 2 / (2**24 + 1)),
        (10**9 - 1, 10**9, 2000, 2e-9),
    ]
    for steps, warmup in ((100, 20), (101, 1), (100, 50), (7, 0), (1200, 20), (1, 0), (10, 5)):
        ends = np.array([-1, warmup - 1, steps / 2, steps])  # where the lines begin and end
        heights = np.interp(range(steps), ends, [0, 1, 1, 0])
        cases += [(step, steps, warmup, right) for step, right in enumerate(heights)]
    for steps in (5, 6):  # wherever the lines cross
        for warmup in range(1, 2 * steps + 2):
            for step in range(steps):
                right = min(1, (step + 1) / warmup, 2 - 2 * step / steps)
                cases.append((step, steps, warmup, right))
    for *given, right in cases:
        same(answer.rate(*given), right, "it", 1e-6)
