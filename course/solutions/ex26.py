"""Exercise 26: the reference, and answers that the oracle must refuse."""

import numpy as np


def zigzag(T, P):
    runs = np.split(np.arange(T), 2 * P)
    return [np.concatenate([runs[r], runs[2 * P - 1 - r]]) for r in range(P)]


def attend(q, k, v, seen):
    """-> o (t, D), lse (t,); both 0 and -inf for a query that sees no key."""
    scores = np.where(seen, q @ k.T / q.shape[1] ** 0.5, -np.inf)
    top = scores.max(1, keepdims=True)
    top = np.where(np.isinf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(1, keepdims=True)
    o = weights @ v / np.where(total == 0, 1, total)
    return o, (np.log(total) + top)[:, 0]


def merge(o1, lse1, o2, lse2):
    lse = np.logaddexp(lse1, lse2)
    base = np.where(np.isinf(lse), 0, lse)
    return o1 * np.exp(lse1 - base)[:, None] + o2 * np.exp(lse2 - base)[:, None], lse


def by_position(mine, theirs):
    return mine[:, None] >= theirs[None, :]


def by_index(mine, theirs):
    return np.tri(len(mine), len(theirs), dtype=bool)


def ring(rank, world, send, recv, q, k, v, positions, seen=by_position, attend=attend, merge=merge):
    o, lse, there = np.zeros_like(q), np.full(len(q), -np.inf), positions
    for turn in range(world):
        o, lse = merge(o, lse, *attend(q, k, v, seen(positions, there)))
        if turn < world - 1:
            for x in (k, v, there):
                send((rank + 1) % world, x)
            k, v, there = (recv((rank - 1) % world) for _ in range(3))
    return o


def ring_attention(rank, world, send, recv, q, k, v, positions):
    return ring(rank, world, send, recv, q, k, v, positions)


def nan_attend(q, k, v, seen):
    """-inf - -inf is NaN where a block is wholly masked."""
    scores = np.where(seen, q @ k.T / q.shape[1] ** 0.5, -np.inf)
    top = scores.max(1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(1, keepdims=True)
    return weights @ v / total, (np.log(total) + top)[:, 0]


def mean_merge(o1, lse1, o2, lse2):
    return (o1 + o2) / 2, np.logaddexp(lse1, lse2)


def overflowing_merge(o1, lse1, o2, lse2):
    total = np.exp(lse1) + np.exp(lse2)
    safe = np.where(total == 0, 1, total)
    o = o1 * (np.exp(lse1) / safe)[:, None] + o2 * (np.exp(lse2) / safe)[:, None]
    return o, np.log(total)


def ring_with(**parts):
    return lambda *args: ring(*args, **parts)


def blocks(T, P):
    """The last rank has nearly twice the mean work."""
    return np.split(np.arange(T), P)


def in_turn(T, P):
    """Position by position: nearly even, but P runs, and not quite."""
    return [np.arange(r, T, P) for r in range(P)]


def turns_too_often(rank, world, send, recv, q, k, v, positions):
    """Sends what nobody needs once more."""
    o = ring(rank, world, send, recv, q, k, v, positions)
    send((rank + 1) % world, k)
    recv((rank - 1) % world)
    return o


WRONG = {  # name -> what of the reference it replaces
    "blocks": dict(zigzag=blocks),
    "one position each in turn": dict(zigzag=in_turn),
    "a mask without positions": dict(ring_attention=ring_with(seen=by_index)),
    "NaN where a block is masked": dict(ring_attention=ring_with(attend=nan_attend)),
    "averages the blocks": dict(ring_attention=ring_with(merge=mean_merge)),
    "overflows": dict(ring_attention=ring_with(merge=overflowing_merge)),
    "one turn too many": dict(ring_attention=turns_too_often),
}
