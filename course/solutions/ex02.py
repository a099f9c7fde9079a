"""Exercise 2: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


def loss_and_slopes(scores, y):
    """scores (N, V) -> the loss, and its slope for each score."""
    shifted = scores - scores.max(1, keepdims=True)
    sums = np.exp(shifted).sum(1, keepdims=True)
    places = np.arange(len(y))
    loss = (np.log(sums)[:, 0] - shifted[places, y]).mean()
    slopes = np.exp(shifted) / sums
    slopes[places, y] -= 1
    return loss, slopes / len(y)


def table_gradient(W, x, y):
    loss, slopes = loss_and_slopes(W[x], y)
    dW = np.zeros_like(W)
    np.add.at(dW, x, slopes)  # dW[x] += slopes would forget all but one of equal bytes
    return loss, dW


def factored_gradient(E, U, x, y):
    loss, slopes = loss_and_slopes(E[x] @ U, y)
    dE = np.zeros_like(E)
    np.add.at(dE, x, slopes @ U.T)
    return loss, dE, E[x].T @ slopes


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "one place of a repeated byte": edit("np.add.at(dW, x, slopes)", "dW[x] += slopes"),
    "one place of a repeated byte, in E": edit(
        "np.add.at(dE, x, slopes @ U.T)", "dE[x] = slopes @ U.T"
    ),
    "the sum instead of the mean": edit("slopes / len(y)", "slopes"),
    "overflows": edit("scores - scores.max(1, keepdims=True)", "scores"),
    "subtracts the largest score of all rows": edit("scores.max(1, keepdims=True)", "scores.max()"),
    "the loss in bits, the gradient not": edit(
        "return loss, slopes /", "return loss / np.log(2), slopes /"
    ),
    "p without minus 1": edit("slopes[places, y] -= 1", ""),
    "builds the whole table": edit("(E[x] @ U, y)", "((E @ U)[x], y)"),
}
