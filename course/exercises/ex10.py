"""Exercise 10: your trainer's schedule, a few lines that are worth a lot.

    rate(step, steps, warmup) -> what multiplies the learning rate at `step`, counted from 0

It rises in a straight line over the first `warmup` steps: 1/warmup at step 0, 1 at step warmup - 1
(a warmup of 0 or 1 is none). Then it is 1. Over the second half of the `steps` it falls in a
straight line, from 1 at step steps/2 to 0 at step `steps`. That step is never taken, so the last
one still moves the weights. Where the rise and the fall overlap, the lower of the two counts.

    rate(0, 100, 20) -> 0.05    rate(40, 100, 20) -> 1    rate(75, 100, 20) -> 0.5
"""


def rate(step: int, steps: int, warmup: int) -> float:
    raise NotImplementedError("write rate, then: python course/check.py 10")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    from subject import same

    for steps, warmup, rates in (
        (100, 20, {0: 0.05, 40: 1, 75: 0.5}),  # the text's
        (8, 4, {0: 0.25, 3: 1, 4: 1, 5: 0.75, 7: 0.25}),
        (3, 0, {0: 1, 1: 1, 2: 2 / 3}),  # half of the steps is no whole number
        (4, 5, {2: 0.6, 3: 0.5}),  # the lower of the two lines
    ):
        for step, right in rates.items():
            rate = f"the rate at step {step} of {steps}, with a warmup of {warmup},"
            same(answer.rate(step, steps, warmup), right, rate, 1e-6)
