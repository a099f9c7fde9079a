"""Exercise 32: the reference, and answers that the oracle must refuse."""

from collections import Counter

import numpy as np


def is_chance(correct, n, k):
    return abs(correct - n / k) <= 2 * (n / k * (1 - 1 / k)) ** 0.5


def constant_answer(predictions, golds):
    letter, times = Counter(sorted(predictions)).most_common(1)[0]
    return letter, times / len(predictions), golds.count(letter) / len(golds)


def bradley_terry(wins, limit=1e-12, times=100_000):
    matches, p, won = wins + wins.T, np.ones(len(wins)), wins.sum(1)
    for _ in range(times):
        before, p = p, won / (matches / (p[:, None] + p)).sum(1)
        if np.abs(p / before - 1).max() < limit:  # nobody moves any more
            break
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


def a_hundred_times(wins):
    """Enough for seven players who have all met; on a chain, news travels slowly."""
    return bradley_terry(wins, times=100)


def two_thousand_times(wins):
    return bradley_terry(wins, times=2000)


def stops_too_soon(wins):
    """A step is small long before the way that is left is."""
    return bradley_terry(wins, limit=1e-5)


def mean_of_the_strengths(wins):
    """The mean strength is rated 1000, not the mean rating."""
    rating = bradley_terry(wins)
    return rating - 400 * np.log10((10 ** (rating / 400)).mean()) + 1000


def last_of_several(predictions, golds):
    letter = max(sorted(set(predictions)), key=lambda x: (predictions.count(x), x))
    return letter, predictions.count(letter) / len(predictions), golds.count(letter) / len(golds)


WRONG = {  # name -> what of the reference it replaces
    "calls z = -5 random": dict(is_chance=below_is_random_too),
    "deviation without the root of n": dict(is_chance=forgets_the_root),
    "two points are near enough": dict(is_chance=near_enough),
    "accuracy of the predictions": dict(constant_answer=accuracy_of_the_predictions),
    "Elo in one pass": dict(bradley_terry=elo_in_one_pass),
    "odds of all matches together": dict(bradley_terry=share_of_wins),
    "100 fixed iterations": dict(bradley_terry=a_hundred_times),
    "2,000 fixed iterations": dict(bradley_terry=two_thousand_times),
    "stops as soon as a step is small": dict(bradley_terry=stops_too_soon),
    "the mean strength is 1000": dict(bradley_terry=mean_of_the_strengths),
    "of two letters, the last": dict(constant_answer=last_of_several),
}

EQUIVALENT = {
    "letter, times = Counter(sorted(predictions)).most_common(1)[0]: `1` -> `2`": (
        "the first of two is the first of one"
    ),
    "def bradley_terry(wins, limit=1e-12, times=100_000):: `100000` -> `200000`": (
        "it ends by itself, long before"
    ),
    "if np.abs(p / before - 1).max() < limit:  # nobody moves any more: "
    "`np.abs(p / before - 1).max() < limit` -> `np.abs(p / before - 1).max() <= limit`": (
        "a step is never exactly as long as the limit"
    ),
}
