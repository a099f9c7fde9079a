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
AT_E = "    np.add.at(dE, x, slopes @ U.T)\n"
AT_W = "    np.add.at(dW, x, slopes)  # dW[x] += slopes would forget all but one of equal bytes\n"
RETURN = "return loss, dE, E[x].T @ slopes"
TABLE = """def nudged(W, x, y):
    loss, dW = loss_and_slopes(W[x], y)[0], np.zeros_like(W)
    for place in np.ndindex(W.shape):
        more, less = W.copy(), W.copy()
        more[place] += {0}
        less[place] -= {1}
        more, less = (loss_and_slopes(V[x], y)[0] for V in (more, less))
        dW[place] = (more - less) / {2}
    return loss, dW


def table_gradient(W, x, y):
    return nudged(W, x, y)
    """
WRONG = {  # name -> what of the reference it replaces
    "one place of a repeated byte": edit(AT_W, "    dW[x] += slopes\n"),
    "one place of a repeated byte, in E": edit(AT_E, "    dE[x] = slopes @ U.T\n"),
    "repeated bytes, each as the mean of its places": edit(
        AT_E, AT_E + "    dE /= np.maximum(1, np.bincount(x, minlength=len(E)))[:, None]\n"
    ),
    "the sum instead of the mean": edit("return loss, slopes / len(y)", "return loss, slopes"),
    "overflows": edit("scores - scores.max(1, keepdims=True)", "scores"),
    "subtracts the largest score of all rows": edit("scores.max(1, keepdims=True)", "scores.max()"),
    "the loss in bits, the gradient not": edit(
        "return loss, slopes / len", "return loss / np.log(2), slopes / len"
    ),
    "the loss without what was subtracted": edit("shifted[places, y]", "scores[places, y]"),
    "p without minus 1": edit("    slopes[places, y] -= 1\n", ""),
    "builds the whole table": edit(
        "loss_and_slopes(E[x] @ U, y)", "loss_and_slopes((E @ U)[x], y)"
    ),
    "only for x = 0, 1, 2, ...": edit(AT_E, "    dE[: len(x)] = slopes @ U.T\n"),
    "changes U": edit(RETURN, "U -= U.mean(1, keepdims=True)\n    " + RETURN),
    "dE is a view of E": edit("dE = np.zeros_like(E)", "dE, E = E, E.copy()\n    dE *= 0"),
    "U's gradient in the order of the bytes": edit("E[x].T @ slopes", "E[np.sort(x)].T @ slopes"),
    "fine nudges": edit("def table_gradient(W, x, y):\n    ", TABLE.format(1e-5, 1e-5, 2e-5)),
    "torch's backward": edit(
        "def table_gradient(W, x, y):\n",
        "def table_gradient(W, x, y):\n    import torch\n"
        "    W = torch.tensor(W, requires_grad=True)\n"
        "    loss = torch.nn.functional.cross_entropy(W[torch.tensor(x)], torch.tensor(y))\n"
        "    loss.backward()\n    return loss.item(), W.grad.numpy()\n",
    ),
    "torch's engine, imported at the top": edit(
        "places = np.arange", "places = engine(len(y)) or np.arange"
    )
    | {"engine": __import__("torch").autograd.backward},
}
