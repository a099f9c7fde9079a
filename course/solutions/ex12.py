"""Exercise 12: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits

from optim import POLAR_EXPRESS


def polar(G):
    X = G.T if len(G) > len(G.T) else G
    largest = abs(X).max()
    if not largest:
        return 0 * G
    X = X / largest  # before anything is squared
    X = X / (1.01 * np.linalg.norm(X))
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.T
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.T if len(G) > len(G.T) else X


def muon(W, G, average, lr, momentum, polar):
    average += (1 - momentum) * (G - average)
    ahead = G + momentum * (average - G)
    rows, columns = W.shape
    W -= lr * max(1, rows / columns) ** 0.5 * polar(ahead)


edit = edits(__file__)
LOOK = "ahead = G + momentum * (average - G)"
WRONG = {  # name -> what of the reference it replaces
    "polar: four of the five": edit("in POLAR_EXPRESS", "in POLAR_EXPRESS[1:]"),
    "polar: the classical polynomial": edit("in POLAR_EXPRESS", "in [(1.5, -0.5, 0)] * 6"),
    "polar: works on the long side": edit(
        "X = G.T if len(G) > len(G.T)",
        "X = G.T if len(G) < len(G.T)",
        "X.T if len(G) > len(G.T)",
        "X.T if len(G) < len(G.T)",
    ),
    "polar: does not turn a tall one back": edit(
        "return X.T if len(G) > len(G.T) else X", "return X"
    ),
    "polar: divides by the largest entry alone": edit(
        "    X = X / (1.01 * np.linalg.norm(X))\n", ""
    ),
    "polar: squares before it divides": edit("X = X / largest  #", "#"),
    "polar: divides zeros by zero": edit("    if not largest:\n        return 0 * G\n", ""),
    "polar: the SVD": edit(
        "    for a, b", "    U, _, Vt = np.linalg.svd(G, False)\n    return U @ Vt\n    for a, b"
    ),
    "polar: G's type is lost": edit("X = G.T if", "G = np.asarray(G)\n    X = G.T if"),
    "muon: does not look ahead": edit(LOOK, "ahead = average"),
    "muon: looks ahead from the average": edit(LOOK, "ahead = average + momentum * (G - average)"),
    "muon: sums up gradients": edit(
        "average += (1 - momentum) * (G - average)", "average *= momentum\n    average += G"
    ),
    "muon: average of its own": edit("average += (1", "average = average + (1"),
    "muon: wide matrices go further": edit("rows / columns)", "columns / rows)"),
    "muon: rows over columns without the root": edit(" ** 0.5 * polar", " * polar"),
    "muon: polar before the average": edit(
        LOOK,
        LOOK.replace("G +", "polar(G) +").replace("- G", "- polar(G)"),
        "* polar(ahead)",
        "* ahead",
    ),
}
