"""Exercise 25: the best learning rate from a grid of runs, or what to run next.

    best_rate({0.01: [2.4, 2.5], 0.02: [2.1, 2.2], 0.04: [2.4, 2.5]}) -> 0.02
    best_rate({0.01: [2.4], 0.02: [2.2], 0.04: [2.1]}) -> "higher"

`results` maps each rate to the losses of its runs, one for each seed; their order means nothing.
1. A rate with a loss that is NaN or infinite has diverged; it is worse than any rate that has not.
   If all have diverged, the answer is "lower".
2. Otherwise compare mean losses. If the best rate is the lowest of the grid, the answer is "lower",
   if it is the highest, "higher": nothing is known beyond the edge. If the grid has one rate only,
   the answer is "higher". (One rate alone has the lowest mean.)
3. If the best rate's neighbours have both not diverged, and every rate has two runs or more, ask
   whether the seeds allow an answer. The standard error of a rate's mean is
   sqrt(variance of its losses / number of runs), with the unbiased variance. If the better of the
   two neighbours is not worse than the best by more than the root of the sum of the squares of
   their two standard errors, the answer is "seeds": more of them are needed.
4. Otherwise the answer is the lowest point of the parabola over the logarithm of the rate that goes
   through the best and its two neighbours. The rates may be spaced unevenly. If a neighbour has
   diverged, there is no parabola, and the answer is the best rate itself.
"""


def best_rate(results: dict[float, list[float]]) -> float | str:
    raise NotImplementedError("write best_rate, then: python course/check.py 25")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math
    import random

    from subject import same

    def judge(results: dict, right: float | str) -> None:
        said = answer.best_rate(results)
        if isinstance(said, str) or isinstance(right, str):
            assert said == right, f"{said!r}, not {right!r}"
        else:
            same(said, right, "the rate", 1e-6)

    rng = random.Random(21)
    inf = math.inf
    nan = math.nan
    judge({0.01: [2.4, 2.5], 0.02: [2.1, 2.2], 0.04: [2.4, 2.5]}, 0.02)
    judge({0.3: [2.1]}, "higher")
    judge({0.3: [nan]}, "lower")
    judge({0.1: [inf, 2.0], 0.2: [nan, 1.0]}, "lower")
    judge({0.1: [2.0, 2.1], 0.2: [1.0, nan]}, "lower")

    for n in (*[2, 3, 4, 5, 6] * 12, 300):  # means that lie on a parabola above n
        rates = [0.001]
        for _ in range(n):
            rates.append(rates[-1] * rng.uniform(1.3, 4))
        logs = [math.log(rate) for rate in rates]
        at = rng.uniform(logs[0] - 0.5, logs[-1] + 0.5)
        bend = rng.uniform(0.1, 2)
        means = [n + bend * (x - at) ** 2 for x in logs]
        least, second, *_ = sorted(means)
        best = means.index(least)
        right = {0: "lower", n: "higher"}.get(best, math.exp(at))
        d = rng.uniform(0, 0.5) * (second - least)
        results = {}
        for rate, mean in rng.sample([*zip(rates, means)], n + 1):
            results[rate] = [mean + d * x for x in rng.choice(([0], [1, -1], [-1, 1, 0]))]
        judge(results, right)
        for rate in [rate for i, rate in enumerate(rates) if abs(i - best) > 1][:1]:
            judge(results | {rate: [nan, 1.0]}, right)  # a rate far away has diverged
        if 0 < best < n:
            side = rates[best + rng.choice((-1, 1))]
            judge(results | {side: [rng.choice((nan, inf, -inf)), 1.0]}, rates[best])

    for d, n in ((0.01, 3), (0.1, 4), (0.3, 12), (0.3, 300)):
        off = [-d, d, *[0.0] * (n - 2)]
        error = d * (4 / (n - 1) / n) ** 0.5  # of the difference of two means
        for gap, right in ((0.98 * error, "seeds"), (1.02 * error, 2)):
            sides = [4 + gap + x for x in off]
            judge({1: sides, 4: sides, 2: [4 + x for x in off]}, right)
            judge({1: [4 + gap], 4: [4 + gap], 2: [4.0]}, 2)  # the same means
    sides = [1.01, 3.01] * 35_000  # 0.01 more, and the error is 0.005
    judge({1: sides, 2: [1.0, 3.0] * 35_000, 4: sides}, 2)
    judge({1: [2.5] * 3, 2: [2.31] * 3, 4: [2.5] * 3}, 2)  # no error at all
    judge({1: [1.0, 5.2], 2: [2.0, 2.1], 4: [1.0, 5.2], 8: [nan]}, 2)  # one run of a rate
    # the errors of the best and of its better neighbour count, and no others
    judge({1: [3.0, 3.0], 2: [2.0, 2.1], 4: [3.0, 3.0], 8: [2.06, 2.07], 16: [1.0, 9.0]}, 2)
    judge({1: [2.0, 4.0], 2: [2.0, 2.1], 4: [4.0, 4.1]}, "seeds")
    judge({1: [4.0, 4.1], 2: [1.0, 3.1], 4: [3.0] * 6}, "seeds")
    judge({1: [3.0, 3.0], 2: [2.0, 2.0], 4: [0.0, 6.02]}, 1.99655448)
