"""Exercise 6: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


def distribution(scores, temperature, top_p):
    if temperature == 0:
        return np.arange(len(scores)) == scores.argmax()
    powers = np.exp((scores - scores.max()) / temperature)
    p = powers / powers.sum()
    order = np.argsort(-p, kind="stable")  # of equal ones, the smaller number first
    before = np.cumsum(p[order]) - p[order]
    if top_p < 1:  # else rounded sums may reach it
        p[order[before >= top_p]] = 0
    return p / p.sum()


def generate(model, prompt, n, length, temperature, top_p, rng):
    whole = list(prompt)
    for _ in range(n):
        scores = model(whole[-length:])[-1]
        p = distribution(scores, temperature, top_p)
        above = np.flatnonzero(np.cumsum(p) > rng.random())
        whole.append(int(above[0]) if len(above) else int(np.flatnonzero(p)[-1]))
    return whole[len(prompt) :]


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "overflows": edit("(scores - scores.max())", "scores"),
    "of the likeliest, takes the last": edit(
        "scores.argmax()", "len(scores) - 1 - scores[::-1].argmax()"
    ),
    "cuts what exceeds top_p": edit(
        "before >= top_p", "(before + p[order] > top_p) & (before > 0)"
    ),
    "changes the model's scores": edit(
        "(whole[-length:])[-1]", "(whole[-length:])[-1]\n        scores -= 1"
    ),
    "shows the model everything": edit("whole[-length:]", "whole"),
    "temperature 0 draws nothing": edit("rng.random())", "(rng.random() if temperature else 0.5))"),
    "falls back to the last token of all": edit("int(np.flatnonzero(p)[-1])", "len(p) - 1"),
}
