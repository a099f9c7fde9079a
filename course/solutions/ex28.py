"""Exercise 28: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


def ring_all_reduce(rank, world, send, recv, x):
    parts = [part.copy() for part in np.array_split(x, world)]
    for turn in range(2 * (world - 1)):
        out = (rank - turn) % world
        into = (rank - turn - 1) % world
        send((rank + 1) % world, parts[out])
        arrived = recv((rank - 1) % world)
        parts[into] = parts[into] + arrived if turn < world - 1 else arrived
    return np.concatenate(parts)


def gathers_all_to_all(rank, world, send, recv, x):
    """Each x goes round whole: (N - 1) S bytes per rank, which 2 ranks do not notice."""
    total = x.copy()
    passing = x
    for _ in range(world - 1):
        send((rank + 1) % world, passing)
        passing = recv((rank - 1) % world)
        total = total + passing
    return total


def loses_the_rest(rank, world, send, recv, x):
    """Parts of n // world elements: right when n is a multiple."""
    n = len(x) // world * world
    return np.concatenate([ring_all_reduce(rank, world, send, recv, x[:n]), x[n:]])


def through_float64(rank, world, send, recv, x):
    """Sums in another dtype, and says nothing."""
    narrow = lambda to, part: send(to, part.astype(x.dtype))
    return ring_all_reduce(rank, world, narrow, recv, x.astype(np.float64)).astype(x.dtype)


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "gathers all to all": dict(ring_all_reduce=gathers_all_to_all),
    "loses what does not divide": dict(ring_all_reduce=loses_the_rest),
    "writes into x": edit(
        "return np.concatenate(parts)", "x[:] = np.concatenate(parts)\n    return x"
    ),
    "int64 through float64": dict(ring_all_reduce=through_float64),
    "adds int64 in float64": edit(
        "parts[into] + arrived if", "(parts[into] + arrived.astype(float)).astype(x.dtype) if"
    ),
    "wants x in one piece": edit(
        "    parts = [part.copy()",
        "    assert x.flags.contiguous and x.size, 'x is a slice with a step, or empty'\n"
        "    parts = [part.copy()",
    ),
}
