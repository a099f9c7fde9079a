"""Exercise 25: the best learning rate from a grid of runs, or what to run next.

    best_rate({0.01: [2.4, 2.5], 0.02: [2.1, 2.2], 0.04: [2.4, 2.5]}) -> 0.02
    best_rate({0.01: [2.4], 0.02: [2.2], 0.04: [2.1]}) -> "higher"

`results` maps each rate to the losses of its runs, one for each seed; their order means nothing.
1. A rate with a loss that is NaN or infinite has diverged; it is worse than any rate that has not.
   If all have diverged, the answer is "lower".
2. Otherwise compare mean losses; if two are equal, the lower rate is better (in rule 3, too). If
   the best rate is the lowest of the grid, the answer is "lower"; if it is the highest, "higher",
   since nothing is known beyond the edge. If the grid has only one rate, the answer is "higher".
3. If neither neighbor of the best rate has diverged, and every rate has two runs or more, ask
   whether the seeds allow an answer. The standard error of a rate's mean is
   sqrt(variance of its losses / number of runs), with the unbiased variance. Take the better of the
   two neighbors. If it is worse than the best by no more than the root of the sum of the squares of
   their two standard errors, the answer is "seeds": you need more of them.
4. Otherwise the answer is the lowest point of the parabola over the logarithm of the rate that goes
   through the best and its two neighbors. The rates may be spaced unevenly. If a neighbor has
   diverged there is no parabola, and the answer is the best rate itself.
"""


def best_rate(results: dict[float, list[float]]) -> float | str:
    raise NotImplementedError("write best_rate, then: python course/check.py 25")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    from math import inf, log, nan

    from subject import equal, same

    def judge(rule: str, right: float | str, results: dict) -> None:
        found = answer.best_rate(results)
        if isinstance(found, str) or isinstance(right, str):
            equal(found, right, f"{rule}: the answer")
        else:
            same(found, right, f"{rule}: the rate", 1e-6)

    judge("an example", 0.02, {0.01: [2.4, 2.5], 0.02: [2.1, 2.2], 0.04: [2.4, 2.5]})
    judge("an example", "higher", {0.01: [2.4], 0.02: [2.2], 0.04: [2.1]})

    judge("rule 1, all have diverged", "lower", {0.1: [inf, 2.0], 0.2: [nan, 1.0]})
    judge("rule 1, one has diverged", 2, {1: [2.4], 2: [2.1], 4: [2.4], 8: [nan, 1.0]})

    judge("rule 2, the lowest rate is the best", "lower", {2: [2.2], 1: [2.1], 4: [2.4]})
    judge("rule 2, the lowest, the other has diverged", "lower", {1: [2.0, 2.1], 2: [1.0, nan]})
    judge("rule 2, one rate only", "higher", {0.3: [2.1]})
    judge("rule 2, equal means", 8**0.5, {4: [2.0], 2: [2.0], 1: [3.0]})

    # three standard errors of 0.1: that of a difference is 0.141
    judge("rule 3, 0.13 better", "seeds", {1: [2.03, 2.23], 2: [1.9, 2.1], 4: [2.03, 2.23]})
    judge("rule 3, 0.15 better", 2, {1: [2.05, 2.25], 2: [1.9, 2.1], 4: [2.05, 2.25]})
    judge("rule 3, a noisy neighbour", "seeds", {1: [2.0, 4.0], 2: [2.0, 2.1], 4: [4.0, 4.1]})
    far = {1: [3.0, 3.0], 2: [2.0, 2.1], 4: [3.0, 3.0], 8: [2.06, 2.07]}
    judge("rule 3, a rate that is no neighbour", 2, far)
    judge("rule 3, equal", "seeds", {1: [3.0, 3.0], 2: [2.0, 2.0], 4: [2.0, 2.0], 8: [3.0, 3.0]})
    judge("rule 3, one run of a rate", 2, {1: [1.0, 5.2], 2: [2.0, 2.1], 4: [1.0, 5.2], 8: [nan]})

    parabola = {rate: [2 + log(rate / 0.003) ** 2] for rate in (0.001, 0.002, 0.008)}
    judge("rule 4, lowest at 0.003", 0.003, parabola)
    judge("rule 4, a neighbour has diverged", 2, {1: [2.4], 2: [2.1], 4: [-inf, 1.0]})
