"""Exercise 2: the reference, and answers that the oracle must refuse."""

import numpy as np


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


# ------------------------------------------------------------------------------ wrong answers
def forgets_repeats(W, x, y):
    loss, slopes = loss_and_slopes(W[x], y)
    dW = np.zeros_like(W)
    dW[x] += slopes
    return loss, dW


def forgets_repeats_in_E(E, U, x, y):
    loss, slopes = loss_and_slopes(E[x] @ U, y)
    dE = np.zeros_like(E)
    dE[x] = slopes @ U.T
    return loss, dE, E[x].T @ slopes


def summed(W, x, y):
    loss, dW = honest_table(W, x, y)
    return loss, dW * len(y)


def overflows(scores, y):
    places = np.arange(len(y))
    with np.errstate(all="ignore"):
        p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        loss = -np.log(p[places, y]).mean()
    p[places, y] -= 1
    return loss, p / len(y)


def shifts_by_the_largest_of_all(scores, y):
    return overflows(scores - scores.max(), y)


def in_bits(scores, y):
    loss, slopes = honest_slopes(scores, y)
    return loss / np.log(2), slopes / np.log(2)


def bits_of_the_loss_only(scores, y):
    loss, slopes = honest_slopes(scores, y)
    return loss / np.log(2), slopes


def points_downhill(scores, y):
    loss, slopes = honest_slopes(scores, y)
    return loss, -slopes


def without_the_one(scores, y):
    """p, but not p - 1 for the byte that came."""
    loss, slopes = honest_slopes(scores, y)
    slopes[np.arange(len(y)), y] += 1 / len(y)
    return loss, slopes


def with_other_slopes(function):
    """Both functions on another `loss_and_slopes`."""

    def table(W, x, y):
        loss, slopes = function(W[x], y)
        dW = np.zeros_like(W)
        np.add.at(dW, x, slopes)
        return loss, dW

    def factored(E, U, x, y):
        loss, slopes = function(E[x] @ U, y)
        dE = np.zeros_like(E)
        np.add.at(dE, x, slopes @ U.T)
        return loss, dE, E[x].T @ slopes

    return dict(table_gradient=table, factored_gradient=factored)


def by_the_whole_table(E, U, x, y):
    loss, dW = honest_table(E @ U, x, y)
    return loss, dW @ U.T, E.T @ dW


def shifts_in_place(E, U, x, y):
    """Moves the scores by changing U: the gradient is right, the matrix is not what it was."""
    U -= U.mean(1, keepdims=True)
    return honest_factored(E, U, x, y)


def only_the_last(E, U, x, y):
    """The gradient of E as if U had been stepped already."""
    loss, _, dU = honest_factored(E, U, x, y)
    return loss, honest_factored(E, U - 0.1 * dU, x, y)[1], dU


def coarse_nudges(W, x, y):
    """Nudges by a hundredth, to one side."""
    loss, dW = honest_slopes(W[x], y)[0], np.zeros_like(W)
    for place in np.ndindex(W.shape):
        moved = W.copy()
        moved[place] += 0.01
        dW[place] = (honest_slopes(moved[x], y)[0] - loss) / 0.01
    return loss, dW


def fine_nudges(W, x, y):
    """Nudges by a hundred-thousandth, to both sides: eight digits are right."""
    loss, dW = honest_slopes(W[x], y)[0], np.zeros_like(W)
    for place in np.ndindex(W.shape):
        moved = W.copy()
        moved[place] += 1e-5
        more = honest_slopes(moved[x], y)[0]
        moved[place] -= 2e-5
        dW[place] = (more - honest_slopes(moved[x], y)[0]) / 2e-5
    return loss, dW


def by_torch(W, x, y):
    import torch

    weights = torch.tensor(W, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(weights[torch.tensor(x)], torch.tensor(y))
    loss.backward()
    return loss.item(), weights.grad.numpy()


honest_slopes, honest_table, honest_factored = loss_and_slopes, table_gradient, factored_gradient
WRONG = {  # name -> what of the reference it replaces
    "one place of a repeated byte": dict(table_gradient=forgets_repeats),
    "one place of a repeated byte, in E": dict(factored_gradient=forgets_repeats_in_E),
    "the sum instead of the mean": dict(table_gradient=summed),
    "overflows": with_other_slopes(overflows),
    "subtracts the largest score of all rows": with_other_slopes(shifts_by_the_largest_of_all),
    "bits": with_other_slopes(in_bits),
    "the loss in bits, the gradient not": with_other_slopes(bits_of_the_loss_only),
    "downhill": with_other_slopes(points_downhill),
    "p without minus 1": with_other_slopes(without_the_one),
    "builds the whole table": dict(factored_gradient=by_the_whole_table),
    "changes U": dict(factored_gradient=shifts_in_place),
    "steps U before E": dict(factored_gradient=only_the_last),
    "coarse nudges": dict(table_gradient=coarse_nudges),
    "fine nudges": dict(table_gradient=fine_nudges),
    "torch's backward": dict(table_gradient=by_torch),
}
