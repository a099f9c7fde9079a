"""Exercise 30: the reference, and answers that the oracle must refuse."""

import numpy as np


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


def keeps_weights(scores, top, room):
    expert, place, _ = route(scores, top, room)
    return expert, place, softmax(np.take_along_axis(scores, expert, 1))


def in_small_integers(scores, top, room):
    """Counts in int8: from 128 copies of an expert on, places are negative."""
    expert, place, weight = route(scores, top, room)
    return expert, place.astype(np.int8).astype(np.int64), weight


def one_place_more(scores, top, room):
    return route(scores, top, room + 1)


def takes_the_last_place(outputs, expert, place, weight):
    """-1 is the last place of the buffer."""
    picked = outputs[expert, place] if outputs.shape[1] else np.zeros((*place.shape, 3))
    return (weight[..., None] * picked).sum(1)


def once_per_token(outputs, expert, place, weight):
    """y[t] += with an index that comes twice adds once."""
    t, i = np.nonzero(place >= 0)
    y = np.zeros((len(expert), outputs.shape[2]))
    y[t] += weight[t, i][:, None] * outputs[expert[t, i], place[t, i]]
    return y


def fills_outputs(outputs, expert, place, weight):
    outputs[np.isnan(outputs)] = 0
    return combine(outputs, expert, place, weight)


WRONG = {  # name -> what of the reference it replaces
    "dropped copies keep weights": dict(route=keeps_weights),
    "counts places in int8": dict(route=in_small_integers),
    "one place more": dict(route=one_place_more),
    "place -1 is the last": dict(combine=takes_the_last_place),
    "adds once": dict(combine=once_per_token),
    "writes into outputs": dict(combine=fills_outputs),
}
