"""Exercise 32: the reference, and answers that the oracle must refuse."""

from collections import Counter

import numpy as np
from edits import edits


def is_chance(correct, n, k):
    return abs(correct - n / k) <= 2 * (n / k * (1 - 1 / k)) ** 0.5


def constant_answer(predictions, golds):
    letter, times = Counter(sorted(predictions)).most_common(1)[0]
    return letter, times / len(predictions), golds.count(letter) / len(golds)


def bradley_terry(wins):
    wins = np.asarray(wins, float)
    matches = wins + wins.T
    p = np.ones(len(wins))
    won = wins.sum(1)
    for _ in range(100_000):
        before = p
        p = won / (matches / (p[:, None] + p)).sum(1)
        if np.abs(p / before - 1).max() < 1e-12:  # nobody moves any more
            break
    rating = 400 * np.log10(p)
    return rating - rating.mean() + 1000


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "calls z = -5 random": edit("abs(correct - n / k) <=", "correct - n / k <="),
    "deviation without the root of n": edit(
        "(n / k * (1 - 1 / k)) ** 0.5", "n * (1 / k * (1 - 1 / k)) ** 0.5"
    ),
    "two points are near enough": edit("2 * (n / k * (1 - 1 / k)) ** 0.5", "0.02 * n"),
    "accuracy of the predictions": edit(
        "golds.count(letter) / len(golds)",
        "sum(a == b for a, b in zip(predictions, golds)) / len(golds)",
    ),
    "of two letters, the first met": edit("Counter(sorted(predictions))", "Counter(predictions)"),
    "the letters A to E": edit(
        "Counter(sorted(predictions))", "Counter(sorted(x for x in predictions if x < 'F'))"
    ),
    "odds of all matches together": edit(
        "rating = 400 * np.log10(p)", "rating = 400 * np.log10(won / wins.sum(0))"
    ),
    "2,000 fixed iterations": edit("range(100_000)", "range(2000)"),
    "stops as soon as a step is small": edit("< 1e-12:", "< 1e-5:"),
    "the mean strength is 1000": edit(
        "rating - rating.mean()", "rating - 400 * np.log10(p.mean())"
    ),
}

EQUIVALENT = {
    "letter, times = Counter(sorted(predictions)).most_common(1)[0]: `1` -> `2`": (
        "the first of two is the first of one"
    )
}
