"""Ratings from wins: Bradley-Terry with an interval over prompts, and Elo with its spread.

Reads `wins` (N, P, P), float: for each of N prompts, 1 where the row's player beat the column's,
0.5 for a tie. Both scales are Elo's: 400 points more are odds of ten to one, the mean is 1000.
Bradley-Terry needs no order of the matches, and its interval says how much to believe of it; Elo
depends on the order, as `elo_orders` shows. Next: judge.py makes the wins.
"""

from collections.abc import Iterable

import numpy as np


def bradley_terry(wins: np.ndarray, prior: float = 0.5) -> np.ndarray:
    """Sums of wins over prompts (..., P, P) -> ratings (..., P).

    The strengths p that make the wins likeliest if i beats j with probability p_i / (p_i + p_j),
    by Newman's iteration (2023, "Efficient computation of rankings from pairwise comparisons",
    equation 11). prior: virtual wins of each player over each other, half of one by default; else
    a player that has won every match would have no finite rating.
    """
    n_players = wins.shape[-1]
    wins = (wins + prior) * (1 - np.eye(n_players))
    p = np.ones(wins.shape[:-1])  # (..., P)
    for _ in range(10_000):
        before = p.copy()
        for i in range(n_players):  # one by one: updated together, two would swap forever
            meetings = p[..., i, None] + p  # (..., P)
            won = (wins[..., i, :] * p / meetings).sum(-1)
            p[..., i] = won / (wins[..., :, i] / meetings).sum(-1)
        p /= np.exp(np.log(p).mean(-1, keepdims=True))
        if np.abs(np.log(p / before)).max() < 1e-9:
            break
    return 1000 + 400 * np.log10(p)


def interval(wins: np.ndarray, resamples: int = 1000, seed: int = 0) -> tuple[np.ndarray, ...]:
    """wins (N, P, P) -> the 2.5% and 97.5% quantiles (P,) of the rating over resampled prompts.

    Prompts are drawn with replacement, not matches: a prompt's matches share its text, so they are
    not independent, and resampling them one by one would give intervals that are too narrow.
    """
    n, n_players = wins.shape[:2]
    times = np.random.default_rng(seed).multinomial(n, [1 / n] * n, size=resamples)  # (R, N)
    sums = (times @ wins.reshape(n, -1)).reshape(resamples, n_players, n_players)
    return tuple(np.quantile(bradley_terry(sums), (0.025, 0.975), axis=0))


def elo(matches: Iterable[tuple[int, int, float]], n_players: int, k: float = 32) -> np.ndarray:
    """Matches (i, j, what i scored: 1, 0.5 or 0), in the order they are played -> ratings (P,)."""
    ratings = np.full(n_players, 1000.0)
    for i, j, score in matches:
        gain = k * (score - 1 / (1 + 10 ** ((ratings[j] - ratings[i]) / 400)))
        ratings[i] += gain
        ratings[j] -= gain
    return ratings


def elo_orders(wins: np.ndarray, orders: int = 100, matches: int = 100, seed: int = 0):
    """wins (N, P, P) -> Elo ratings (orders, P): each time `matches` pairs drawn at random, a match
    decided by the majority over all prompts."""
    total, rng = wins.sum(0), np.random.default_rng(seed)
    score = 0.5 + 0.5 * np.sign(total - total.T)  # (P, P)
    pairs = [
        [rng.choice(len(total), 2, replace=False) for _ in range(matches)] for _ in range(orders)
    ]
    return np.array([elo([(i, j, score[i, j]) for i, j in order], len(total)) for order in pairs])
