"""Exercise 32: the reference, and answers that the oracle must refuse."""

from collections import Counter

import numpy as np


def is_chance(correct, n, k):
    return abs(correct - n / k) <= 2 * (n / k * (1 - 1 / k)) ** 0.5


def constant_answer(predictions, golds):
    letter, times = Counter(predictions).most_common(1)[0]
    return letter, times / len(predictions), golds.count(letter) / len(golds)


def bradley_terry(wins):
    matches, p = wins + wins.T, np.ones(len(wins))
    for _ in range(2000):
        p = wins.sum(1) / (matches / (p[:, None] + p)).sum(1)
        p /= p.mean()
    rating = 400 * np.log10(p)
    return rating - rating.mean() + 1000


def below_is_random_too(correct, n, k):
    """Looks at one side only: worse than chance is called chance."""
    return correct <= n / k + 2 * (n / k * (1 - 1 / k)) ** 0.5


def forgets_the_root(correct, n, k):
    """The deviation of one question instead of that of n."""
    return abs(correct / n - 1 / k) <= 2 * (1 / k * (1 - 1 / k)) ** 0.5


def near_enough(correct, n, k):
    """Two points of a hundred are called near, whatever n is."""
    return abs(correct / n - 1 / k) <= 0.02


def accuracy_of_the_predictions(predictions, golds):
    letter, share, _ = constant_answer(predictions, golds)
    return letter, share, sum(a == b for a, b in zip(predictions, golds)) / len(golds)


def elo_in_one_pass(wins):
    """Match after match, as they stand in the table: the last ones count most."""
    rating = np.full(len(wins), 1000.0)
    for i, j in np.ndindex(wins.shape):
        for _ in range(round(wins[i, j])):
            gain = 32 / (1 + 10 ** ((rating[i] - rating[j]) / 400))
            rating[i], rating[j] = rating[i] + gain, rating[j] - gain
    return rating


def share_of_wins(wins):
    """Whom one has met does not count: a win against the weakest is a win."""
    odds = 400 * np.log10(wins.sum(1) / wins.sum(0))
    return odds - odds.mean() + 1000


WRONG = {  # name -> what of the reference it replaces
    "calls z = -5 random": dict(is_chance=below_is_random_too),
    "deviation without the root of n": dict(is_chance=forgets_the_root),
    "two points are near enough": dict(is_chance=near_enough),
    "accuracy of the predictions": dict(constant_answer=accuracy_of_the_predictions),
    "Elo in one pass": dict(bradley_terry=elo_in_one_pass),
    "odds of all matches together": dict(bradley_terry=share_of_wins),
}
