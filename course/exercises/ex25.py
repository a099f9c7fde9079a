"""Exercise 25: the best learning rate from a grid of runs, or what to run next.

    best_rate({0.01: [2.4, 2.5], 0.02: [2.1, 2.2], 0.04: [2.4, 2.5]}) -> 0.02
    best_rate({0.01: [2.4], 0.02: [2.2], 0.04: [2.1]}) -> "higher"

`results` maps each rate to the losses of its runs, one for each seed; their order means nothing.
1. A rate with a loss that is NaN or infinite has diverged; it is worse than any rate that has not.
   If all have diverged, the answer is "lower".
2. Otherwise compare mean losses. If the best rate is the lowest of the grid, the answer is "lower",
   if it is the highest, "higher": nothing is known beyond the edge. If the grid has one rate only,
   the answer is "higher". (No two means in the judge's cases are equal.)
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
    import copy
    import math
    import random

    rng = random.Random(21)
    inf = math.inf
    nan = math.nan

    def judge(results: dict, expected: float | str, why: str) -> None:
        given = copy.deepcopy(results)
        said = answer.best_rate(given)
        assert repr(given) == repr(results), f"{why}: the results were changed: {results}"
        words = isinstance(said, str) or isinstance(expected, str)
        same = said == expected if words else said and abs(said / expected - 1) < 1e-6
        assert same, f"{why}: expected {expected!r}, got {said!r} for {results}"

    judge({0.01: [2.4, 2.5], 0.02: [2.1, 2.2], 0.04: [2.4, 2.5]}, 0.02, "symmetric")
    judge({0.01: [2.4], 0.02: [2.2], 0.04: [2.1]}, "higher", "the best is the highest rate")
    judge({0.01: [2.1], 0.02: [2.2], 0.04: [2.4]}, "lower", "the best is the lowest rate")
    judge({0.3: [2.1]}, "higher", "one rate")
    judge({0.3: [nan]}, "lower", "one rate, diverged")
    judge({0.1: [inf, 2.0], 0.2: [nan, 1.0]}, "lower", "all diverged")
    judge({0.1: [2.0, 2.1], 0.2: [1.0, nan]}, "lower", "only the lowest rate has not diverged")
    judge({0.1: [nan], 0.2: [2.0], 0.4: [2.1]}, 0.2, "its lower neighbour has diverged")
    judge({0.1: [2.2], 0.2: [2.0], 0.4: [inf]}, 0.2, "its higher neighbour has diverged")
    judge({0.1: [2.1], 0.2: [2.0, nan], 0.4: [1.9]}, "higher", "diverged between two that have not")
    judge({0.1: [2.5], 0.2: [nan], 0.4: [1.9], 0.8: [2.0]}, 0.4, "a seed diverged at its neighbour")
    judge({1: [2.0, 2.2], 2: [1.98, 2.2], 4: [3.0, 3.1]}, "seeds", "the difference is 0.01, +-0.15")
    judge({1: [3.0, 3.1], 2: [1.98, 2.2], 4: [2.0, 2.2]}, "seeds", "the other neighbour is as good")
    few = {1: [1.0, 5.2], 2: [2.0], 4: [1.0, 5.2]}
    judge(few, 2, "the best has one run, so no standard error")
    few = {1: [1.0, 5.2], 2: [2.0, 2.1], 4: [1.0, 5.2], 8: [9.0]}
    judge(few, 2, "one of the rates has one run")
    far = {1: [3.0, 3.0], 2: [2.0, 2.1], 4: [3.0, 3.0], 8: [2.06, 2.07], 16: [5.0, 5.0]}
    judge(far, 2, "a rate that is as good, but no neighbour")

    for _ in range(60):  # means that lie on a parabola; the seeds' deviations cancel
        rates = [rng.uniform(0.001, 0.1)]
        for _ in range(rng.randint(2, 6)):
            rates.append(rates[-1] * rng.uniform(1.3, 4))
        logs = [math.log(rate) for rate in rates]
        at = rng.uniform(logs[0] - 0.5, logs[-1] + 0.5)
        bend = rng.uniform(0.1, 2)
        floor = rng.uniform(1, 3)
        seeds = rng.randint(1, 4)
        means = [floor + bend * (x - at) ** 2 for x in logs]
        best = min(range(len(rates)), key=lambda i: means[i])
        expected = "lower" if best == 0 else "higher" if best == len(rates) - 1 else math.exp(at)
        gap = sorted(means)[1] - means[best]
        spread = rng.uniform(0, 0.3) * gap
        results = {}
        for rate, mean in zip(rates, means):
            offsets = [rng.uniform(-spread, spread) for _ in range(seeds)]
            middle = sum(offsets) / seeds
            results[rate] = [mean + offset - middle for offset in offsets]
        items = list(results.items())
        rng.shuffle(items)
        judge(dict(items), expected, f"the lowest point is at {math.exp(at):.4g}")
        inner = 0 < best < len(rates) - 1
        if inner and len(rates) > 3:  # a rate far away diverges, or has one run: no change
            away = next(i for i in range(len(rates)) if abs(i - best) > 1)
            judge(results | {rates[away]: [nan, 1.0]}, expected, "a rate far away has diverged")
        if inner:
            side = rates[best + rng.choice((-1, 1))]
            judge(results | {side: [rng.choice((nan, inf))]}, rates[best], "a neighbour diverged")

    # how large a difference has to be: n runs, deviations of -d, 0 and d, so the error of a mean is
    # d sqrt(2 / (n - 1) / n)
    for d, n in ((0.01, 3), (0.1, 4), (1.0, 6), (0.3, 12)):
        for factor, more in ((0.98, True), (1.02, False)):
            gap = factor * d * (4 / (n - 1) / n) ** 0.5  # of two means
            off = [-d, d, *[0.0] * (n - 2)]
            wings = {r: [4 + gap + x for x in off] for r in (1, 4)}
            results = wings | {2: [4 + x for x in off]}
            judge(results, "seeds" if more else 2, f"{gap:.4g}, errors of {n} runs")
            one = {rate: sum(losses) / n for rate, losses in results.items()}
            judge({rate: [mean] for rate, mean in one.items()}, 2, "one run each: no error known")
            worse = results | {4: [9 - 3 * d, 9.0, 9 + 3 * d]}
            if more:
                judge(worse, "seeds", "the worse neighbour's errors do not matter")
    # the errors of the best and of its better neighbour count, and no others
    calm = [2.0, 2.0]
    wild = [1.0, 9.0]
    judge({1: [3.0, 3.0], 2: calm, 4: [3.0, 3.0], 8: wild}, 2, "a noisy rate that is no neighbour")
    judge({1: [2.0, 4.0], 2: [2.0, 2.1], 4: [4.0, 4.1]}, "seeds", "0.95 apart, error 1.0")
    judge({1: [3.0, 3.0], 2: [1.0, 3.1], 4: [4.0, 4.1]}, "seeds", "0.95 apart, error 1.05")
    judge(
        {1: [3.0, 3.0], 2: [2.0, 2.0], 4: [0.0, 6.02]}, 1.99655448, "the calm neighbour is better"
    )
