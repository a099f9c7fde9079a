"""Exercise 43: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


def choose(scores, top):
    return np.argsort(-scores, 1, kind="stable")[:, :top]


def places(expert, E, room):
    """First choices first, tokens in order."""
    place = np.full(expert.shape, -1)
    taken = [0] * E
    for i in range(expert.shape[1]):
        for t in range(expert.shape[0]):
            e = expert[t, i]
            if taken[e] < room:
                place[t, i] = taken[e]
                taken[e] += 1
    return place


def softmax(x):
    exp = np.exp(x - x.max(1, keepdims=True))
    return exp / exp.sum(1, keepdims=True)


def route(scores, top, room):
    expert = choose(scores, top)
    place = places(expert, scores.shape[1], room)
    weight = softmax(np.take_along_axis(scores, expert, 1))
    return expert, place, np.where(place >= 0, weight, 0.0)


def combine(outputs, expert, place, weight):
    t, i = np.nonzero(place >= 0)
    y = np.zeros((len(expert), outputs.shape[2]))
    np.add.at(y, t, weight[t, i][:, None] * outputs[expert[t, i], place[t, i]])
    return y


edit = edits(__file__)
RETURN = "return expert, place, np.where(place >= 0, weight, 0.0)"
PLACES = "t, i = np.nonzero(place >= 0)"
WRONG = {  # name -> what of the reference it replaces
    "dropped copies keep weights": edit(RETURN, "return expert, place, weight"),
    "counts places in int8": edit(
        RETURN, RETURN.replace("place,", "place.astype(np.int8).astype(np.int64),")
    ),
    "one place more": edit("if taken[e] < room", "if taken[e] <= room"),
    "place -1 is the last": edit(PLACES, PLACES.replace("0", "-1")),
    "adds once": edit("np.add.at(y, t, ", "y[t] += ("),
    "writes into outputs": edit(PLACES, "outputs[np.isnan(outputs)] = 0\n    " + PLACES),
}
