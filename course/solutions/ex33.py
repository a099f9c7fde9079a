"""Exercise 33: the reference, and answers that the oracle must refuse."""

import torch
import torch.nn.functional as F
from edits import edits


def copied(ids):
    """(T, T): whether j follows an earlier copy of i."""
    T = len(ids)
    same = torch.zeros(T, T, dtype=torch.bool)
    same[:, 1:] = ids[:, None] == ids[:-1]
    return same.tril()


def habits(attention, ids):
    places = copied(ids)  # (T, T)
    shares = torch.stack(list(attention))  # (L, H, T, T)
    back = shares.diagonal(-1, 2, 3).mean(-1)
    return back, (shares * places).sum(-1)[..., places.any(1)].mean(-1)


def without(layer, head):
    def edit(at, z):
        z = z.clone()
        if at == layer:
            z[head] = z[head].mean(0)
        return z

    return edit


def loss(logits, ids):
    return F.cross_entropy(logits[:-1], ids[1:])


def worth(run, ids):
    logits, attention = run(ids)
    found = torch.zeros(len(attention), len(attention[0]), dtype=torch.float64)
    for place in torch.ones_like(found).nonzero().tolist():
        found[tuple(place)] = loss(run(ids, without(*place))[0], ids) - loss(logits, ids)
    return found


def circuit(run, ids):
    copy = habits(run(ids)[1], ids)[1]
    layer, head = divmod(int(copy.argmax()), copy.shape[1])
    earlier = {}
    for i in range(layer):
        for j in range(copy.shape[1]):
            left = habits(run(ids, without(i, j))[1], ids)[1][layer, head]
            earlier[i, j] = float(left)
    return (layer, head), min(earlier, key=earlier.get)


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "looks for the copy, not for what followed": edit(
        "return same.tril()", "return (ids[:, None] == ids).tril(-1)"
    ),
    "counts position 0": edit("return back,", "return back * (len(ids) - 1) / len(ids),"),
    "changes what the model handed over": edit("        z = z.clone()\n", ""),
    "zero in place of the mean": edit("z[head].mean(0)", "0"),
    "the loss of the token at hand": edit("logits[:-1], ids[1:]", "logits, ids"),
    "believes the map": edit(  # the earlier head that looks back most, though nobody may read it
        "return (layer, head), min(earlier, key=earlier.get)",
        "back = habits(run(ids)[1], ids)[0]\n"
        "    return (layer, head), divmod(int(back[:layer].argmax()), back.shape[1])",
    ),
    "looks one layer back only": edit("range(layer):", "range(layer - 1, layer):"),
}
