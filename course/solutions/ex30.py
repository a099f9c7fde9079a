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


def tokens_first(scores, top, room):
    """A token's second choice before the first choice of the next token."""
    expert, _, _ = route(scores, top, room)
    flat = places(expert.reshape(-1, 1), scores.shape[1], room)
    place = flat.reshape(expert.shape)
    weight = softmax(np.take_along_axis(scores, expert, 1))
    return expert, place, np.where(place >= 0, weight, 0.0)


def in_float32(scores, top, room):
    """Scores that are nearly equal become equal."""
    expert = choose(scores.astype(np.float32), top)
    place = places(expert, scores.shape[1], room)
    weight = softmax(np.take_along_axis(scores, expert, 1))
    return expert, place, np.where(place >= 0, weight, 0.0)


def weighted_again(scores, top, room):
    """What is left adds up to 1."""
    expert, place, weight = route(scores, top, room)
    total = weight.sum(1, keepdims=True)
    return expert, place, weight / np.where(total == 0, 1, total)


def softmax_of_all(scores, top, room):
    expert, place, _ = route(scores, top, room)
    return expert, place, np.take_along_axis(softmax(scores), expert, 1) * (place >= 0)


def keeps_weights(scores, top, room):
    expert, place, _ = route(scores, top, room)
    return expert, place, softmax(np.take_along_axis(scores, expert, 1))


def overflows(scores, top, room):
    expert, place, _ = route(scores, top, room)
    with np.errstate(all="ignore"):
        exp = np.exp(np.take_along_axis(scores, expert, 1))
        return expert, place, np.where(place >= 0, exp / exp.sum(1, keepdims=True), 0.0)


def ties_to_the_last(scores, top, room):
    E = scores.shape[1]
    expert = E - 1 - choose(scores[:, ::-1], top)
    place = places(expert, E, room)
    weight = softmax(np.take_along_axis(scores, expert, 1))
    return expert, place, np.where(place >= 0, weight, 0.0)


def in_any_order(scores, top, room):
    """argpartition finds the best, and does not sort them."""
    expert = np.sort(choose(scores, top), 1)
    place = places(expert, scores.shape[1], room)
    weight = softmax(np.take_along_axis(scores, expert, 1))
    return expert, place, np.where(place >= 0, weight, 0.0)


def room_for_each_choice(scores, top, room):
    """First and second choices are counted apart, so that two copies share a place."""
    expert, _, _ = route(scores, top, room)
    parts = [places(expert[:, [i]], scores.shape[1], room) for i in range(top)]
    place = np.concatenate(parts, 1)
    weight = softmax(np.take_along_axis(scores, expert, 1))
    return expert, place, np.where(place >= 0, weight, 0.0)


def all_or_nothing(scores, top, room):
    """A token that loses one expert loses all."""
    expert, place, weight = route(scores, top, room)
    whole = (place >= 0).all(1, keepdims=True)
    return expert, np.where(whole, place, -1), weight * whole


def best_tokens_first(scores, top, room):
    """The largest scores get the places."""
    order = np.argsort(-scores.max(1), kind="stable") if len(scores) else np.arange(0)
    back = np.argsort(order)
    return tuple(x[back] for x in route(scores[order], top, room))


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
    "token by token": dict(route=tokens_first),
    "chooses in float32": dict(route=in_float32),
    "weights add up to 1 again": dict(route=weighted_again),
    "softmax over all experts": dict(route=softmax_of_all),
    "dropped copies keep weights": dict(route=keeps_weights),
    "overflows": dict(route=overflows),
    "ties to the last": dict(route=ties_to_the_last),
    "choices in any order": dict(route=in_any_order),
    "counts choices apart": dict(route=room_for_each_choice),
    "drops the whole token": dict(route=all_or_nothing),
    "the best tokens first": dict(route=best_tokens_first),
    "one place more": dict(route=one_place_more),
    "place -1 is the last": dict(combine=takes_the_last_place),
    "adds once": dict(combine=once_per_token),
    "writes into outputs": dict(combine=fills_outputs),
}
