"""Exercise 29: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


def parallel_loss(all_reduce, logits, first, targets):
    top = all_reduce(logits.max(1, initial=-np.inf), "max")  # (B,)
    p = np.exp(logits - top[:, None])
    place = targets - first
    rows = np.flatnonzero((0 <= place) & (place < logits.shape[1]))  # whose target is here
    right = np.zeros(len(targets), np.float32)
    right[rows] = (logits[rows, place[rows]] - top[rows]).astype(np.float32)
    total, right = all_reduce(np.stack([p.sum(1), right]), "sum")
    d = p / total[:, None]
    d[rows, place[rows]] -= 1
    return np.log(total) - right, d


edit = edits(__file__)
GATHER = """    V = int(all_reduce(np.array([first + logits.shape[1]]), "max")[0])
    whole = np.zeros((len(targets), V), np.float32)
    whole[:, first : first + logits.shape[1]] = logits
    logits = all_reduce(whole, "sum")[:, first : first + logits.shape[1]]
"""
WRONG = {  # name -> what of the reference it replaces
    "gathers all logits": edit("    top =", GATHER + "    top ="),
    "a maximum for each rank": edit(
        'all_reduce(logits.max(1, initial=-np.inf), "max")', "logits.max(1, initial=-np.inf)"
    ),
    "counts negative places from the end": edit("(0 <= place)", "(-logits.shape[1] <= place)"),
    "clips logits at -1e9": edit(
        "    top =", "    logits = np.maximum(logits, np.float32(-1e9))\n    top ="
    ),
    "adds an epsilon": edit(
        "np.log(total) - right", "-np.log(np.exp(right - np.log(total)) + np.float32(1e-6))"
    ),
}
