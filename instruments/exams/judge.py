"""Who wins in the tournament, and what follows: a checkpoint decides by likelihood, and its
decisions become ratings.

`novel_mean` scores each completion alone; `compare` turns scores into wins, (N, P, P): for each
of N prompts, 1 where the row's player beat the column's, 0.5 for a tie.
`bradley_terry` turns wins into ratings on Elo's scale: 400 points more are odds of ten to one, the
mean is 1000; `interval` says how far to trust them. Next: tournament.py, which asks.
"""

import numpy as np
import torch


def novel(prompt: list[int], completion: list[int]) -> list[bool]:
    """Which tokens end a bigram not seen before: [1, 2] and [1, 2, 3] -> [True, False, True]."""
    seen = set(zip(prompt, prompt[1:]))
    new = []
    text = prompt[-1:] + completion
    for bigram in zip(text, text[1:]):
        new.append(bigram not in seen)
        seen.add(bigram)
    return new


@torch.no_grad()
def novel_mean(model, prompts: list[list[int]], completions: list[list[int]]) -> np.ndarray:
    """Mean log p (nats) over the new tokens (`novel`) of each completion, (N,); -inf without any.

    The plain mean puts a loop first, since a copied token is the easiest to predict. Leaving copies
    out of the mean neither rewards nor punishes them.
    """
    scores = np.full(len(prompts), -np.inf)
    for n, (prompt, completion) in enumerate(zip(prompts, completions)):
        before = [model.config.bos_id, *prompt]
        new = novel(before, completion)
        if any(new):
            text = torch.tensor([[*before, *completion]], device=model.cos.device)  # (1, T)
            nats = model(text[:, :-1], text[:, 1:], reduction="none")[0]  # (T - 1,)
            scores[n] = -nats[len(prompt) :].float().cpu().numpy()[new].mean()
    return scores


def compare(scores: list[np.ndarray]) -> np.ndarray:
    """P players' scores, (N,) each -> wins (N, P, P)."""
    s = np.stack(scores, axis=1)  # (N, P)
    own = s[:, :, None]
    others = s[:, None]
    return (own > others) + 0.5 * (own == others)


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """Sums of wins over prompts (..., P, P) -> ratings (..., P).

    The strengths p that make the wins likeliest if i beats j with probability p_i / (p_i + p_j),
    by Newman's iteration (2023, "Efficient computation of rankings from pairwise comparisons",
    equation 11). Each player gets half a virtual win over each other; else
    a player that has won every match would have no finite rating.
    """
    n_players = wins.shape[-1]
    wins = (wins + 0.5) * (1 - np.eye(n_players))
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
