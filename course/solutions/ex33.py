"""Exercise 33: the reference, and answers that the oracle must refuse."""

import torch
import torch.nn.functional as F


def copied(ids):
    """(T, T): whether j follows an earlier copy of i."""
    T = len(ids)
    same = torch.zeros(T, T, dtype=torch.bool)
    same[:, 1:] = ids[:, None] == ids[:-1]
    return same.tril()


def habits(attention, ids):
    places, shares = copied(ids), torch.stack(list(attention))  # (T, T), (L, H, T, T)
    back = shares.diagonal(-1, 2, 3).mean(-1)
    return back, (shares * places).sum(-1)[..., places.any(1)].mean(-1)


def without(layer, head, mean=lambda z: z.mean(0)):
    def edit(at, z):
        z = z.clone()
        if at == layer:
            z[head] = mean(z[head])
        return z

    return edit


def loss(logits, ids):
    return F.cross_entropy(logits[:-1], ids[1:])


def worth(run, ids, without=without, loss=loss):
    logits, attention = run(ids)
    found = torch.zeros(len(attention), len(attention[0]), dtype=torch.float64)
    for place in torch.ones_like(found).nonzero().tolist():
        found[tuple(place)] = loss(run(ids, without(*place))[0], ids) - loss(logits, ids)
    return found


def circuit(run, ids, without=without):
    copy = habits(run(ids)[1], ids)[1]
    layer, head = divmod(int(copy.argmax()), copy.shape[1])
    earlier = {}
    for i in range(layer):
        for j in range(copy.shape[1]):
            left = habits(run(ids, without(i, j))[1], ids)[1][layer, head]
            earlier[i, j] = float(left)
    return (layer, head), min(earlier, key=earlier.get)


def looks_at_the_copy(attention, ids):
    """On the earlier copy itself, not on what followed it."""
    shares = torch.stack(attention)
    places = (ids[:, None] == ids).tril(-1)
    return habits(attention, ids)[0], (shares * places).sum(-1)[..., places.any(1)].mean(-1)


def counts_the_first(attention, ids):
    """The first position has none before it, and is counted with a share of 0."""
    back, copy = habits(attention, ids)
    return back * (len(ids) - 1) / len(ids), copy


def zero(layer, head):
    return without(layer, head, lambda z: 0 * z)


def with_zero(run, ids):
    return worth(run, ids, zero)


def own_token(run, ids):
    """Scores the token at hand, not the next one."""
    return worth(run, ids, loss=F.cross_entropy)


def looks_back_most(run, ids):
    """The map decides: the earlier head that looks back most, though nobody may read it."""
    back, _ = habits(run(ids)[1], ids)
    first, _ = circuit(run, ids)
    best = back[: first[0]].argmax()
    return first, tuple(divmod(int(best), back.shape[1]))


def one_layer_back(run, ids):
    """Only in the layer just before the head that copies."""
    first, _ = circuit(run, ids)
    left = {}
    for j in range(habits(run(ids)[1], ids)[1].shape[1]):
        _, attention = run(ids, without(first[0] - 1, j))
        left[first[0] - 1, j] = float(habits(attention, ids)[1][first])
    return first, min(left, key=left.get)


def circuit_with_zero(run, ids):
    """A head that adds the same everywhere is taken for the one that is needed."""
    return circuit(run, ids, zero)


WRONG = {  # name -> what of the reference it replaces
    "looks for the copy, not for what followed": dict(habits=looks_at_the_copy),
    "counts position 0": dict(habits=counts_the_first),
    "zero in place of the mean": dict(worth=with_zero),
    "the loss of the token at hand": dict(worth=own_token),
    "believes the map": dict(circuit=looks_back_most),
    "looks one layer back only": dict(circuit=one_layer_back),
    "circuit: zero in place of the mean": dict(circuit=circuit_with_zero),
}

EQUIVALENT = {"z = z.clone(): dropped": "nobody else reads the tensor that edit is given"}
