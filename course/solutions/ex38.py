"""Exercise 38: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


def spans(lengths, window):
    lengths = np.asarray(lengths, np.int64)
    stop = np.cumsum(lengths)
    return np.stack([np.maximum(0, stop - lengths - window + 1), stop], 1)


def piece(q, k, v, seen):
    """-> o, lse (n, 1): 0 and -inf for a query that sees no key."""
    scores = np.where(seen, q @ k.T / np.sqrt(q.shape[1]).astype(q.dtype), -np.inf)
    top = scores.max(1, keepdims=True)
    top = np.where(np.isinf(top), 0, top).astype(q.dtype)
    weights = np.exp(scores - top).astype(q.dtype)
    total = weights.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights @ v / np.where(total == 0, 1, total), np.log(total) + top


def merge(o1, lse1, o2, lse2):
    lse = np.logaddexp(lse1, lse2)
    return o1 * np.exp(lse1 - lse) + o2 * np.exp(lse2 - lse), lse


def ring_attention(rank, world, send, recv, q, k, v, lengths, window):
    reach = spans(lengths, window)
    stop = np.cumsum(lengths)
    wants = lambda r, block: r < world and reach[r, 0] < stop[block]
    mine = np.arange(stop[rank] - lengths[rank], stop[rank])[:, None]
    state = None
    for block in range(rank, -1, -1):
        if block < rank:
            if not wants(rank, block):
                break
            k = recv(rank - 1)
            v = recv(rank - 1)
        if wants(rank + 1, block):
            send(rank + 1, k)
            send(rank + 1, v)
        there = np.arange(stop[block] - lengths[block], stop[block])
        new = piece(q, k, v, (mine >= there) & (mine - window < there))
        state = merge(*state, *new) if state else new
    return state[0]


def collects(rank, world, send, recv, q, k, v, lengths, window):
    """Gathers all keys and values, and takes a plain softmax."""
    reach = spans(lengths, window)
    stop = np.cumsum(lengths)
    keys = [k]
    values = [v]
    first = rank
    for block in range(rank, -1, -1):
        if block < rank:
            if reach[rank, 0] >= stop[block]:
                break
            keys.insert(0, recv(rank - 1))
            values.insert(0, recv(rank - 1))
            first = block
        if rank + 1 < world and reach[rank + 1, 0] < stop[block]:
            send(rank + 1, keys[0])
            send(rank + 1, values[0])
    there = np.arange(stop[first] - lengths[first], stop[rank])
    mine = np.arange(stop[rank] - lengths[rank], stop[rank])[:, None]
    seen = (mine >= there) & (mine - window < there)
    return piece(q, np.concatenate(keys), np.concatenate(values), seen)[0]


edit = edits(__file__)
TOP = "    top = np.where(np.isinf(top), 0, top).astype(q.dtype)\n"
STOP = "    stop = np.cumsum(lengths)\n    return"
WRONG = {  # name -> what of the reference it replaces
    "gathers k and v, plain softmax": dict(ring_attention=collects),
    "a full lap": edit("r < world and reach[r, 0] < stop[block]", "r < world"),
    "NaN where a query sees no key": edit(TOP, "", "np.where(total == 0, 1, total)", "total"),
    "scales its queries in place": edit("return state[0]", "q /= 2\n    return state[0]"),
    "spans: off by one": edit("- window + 1), stop]", "- window), stop]"),
    "spans: int32": edit("stop], 1)", "stop], 1).astype(np.int32)"),
    "spans: overflow within": edit(STOP, STOP.replace("lengths)", "lengths, dtype=np.int32)")),
}

EQUIVALENT = {  # a change that changes nothing -> why
    "lengths = np.asarray(lengths, np.int64): dropped": "np.cumsum of int32 is int64, on Linux",
    "top = np.where(np.isinf(top), 0, top).astype(q.dtype): `0` -> `1`": (
        "exp(-inf - anything) is 0; the log of that sum is -inf, plus anything"
    ),
    "return weights @ v / np.where(total == 0, 1, total), np.log(total) + top: `1` -> `2`": (
        "0 / 1 is 0 / 2"
    ),
}
