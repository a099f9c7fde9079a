"""Exercise 32: the reference, and answers that the oracle must refuse."""

from collections import Counter

import numpy as np
from edits import edits


def is_chance(correct, n, k):
    return (k * correct - n) ** 2 <= 4 * n * (k - 1)  # squares, times k^2: whole numbers


def constant_answer(predictions, golds):
    letter, times = Counter(sorted(predictions)).most_common(1)[0]
    return letter, times / len(predictions), golds.count(letter) / len(golds)


def bradley_terry(wins):
    wins = np.asarray(wins, float)
    matches = wins + wins.T
    log_p = np.zeros(len(wins))  # the first one stays 0
    step = np.zeros(len(wins))
    largest = 1.0
    while largest > 1e-6:
        beats = 1 / (1 + np.exp(log_p - log_p[:, None]))  # (i, j): the chance that i beats j
        gradient = (wins - matches * beats).sum(1)
        curvature = matches * beats * beats.T
        hessian = np.diag(curvature.sum(1)) - curvature  # of minus the log-likelihood
        step[1:] = np.linalg.solve(hessian[1:, 1:], gradient[1:])
        largest = np.ptp(step)
        log_p = log_p + step / max(1, largest)  # no difference grows by over 1: this is uphill
    rating = 400 / np.log(10) * log_p
    return rating - rating.mean() + 1000


edit = edits(__file__)
ROUNDS = """    p = np.ones(len(wins))
    for _ in range(1000):
        p = wins.sum(1) / (matches / (p[:, None] + p)).sum(1)
    rating = 400 * np.log10(p)
    return rating - rating.mean() + 1000
"""
WRONG = {  # name -> what of the reference it replaces
    "calls z = -5 random": edit(
        "(k * correct - n) ** 2 <= 4 * n * (k - 1)", "k * correct - n <= 2 * (n * (k - 1)) ** 0.5"
    ),
    "deviation without the root of n": edit("4 * n * (k - 1)", "4 * n**2 * (k - 1)"),
    "accuracy of the predictions": edit(
        "golds.count(letter) / len(golds)",
        "sum(a == b for a, b in zip(predictions, golds)) / len(golds)",
    ),
    "of two letters, the first met": edit("Counter(sorted(predictions))", "Counter(predictions)"),
    "odds of all matches together": edit(
        "400 / np.log(10) * log_p", "400 * np.log10(wins.sum(1) / wins.sum(0))"
    ),
    "1,000 rounds of the books": edit("    log_p = np.zeros", ROUNDS + "    log_p = np.zeros"),
    "the mean strength is 1000": edit(
        "rating - rating.mean()", "rating - 400 * np.log10(np.exp(log_p).mean())"
    ),
}
