"""Exercise 24: the reference, and answers that the oracle must refuse."""

import numpy as np


def ring_all_reduce(rank, world, send, recv, x):
    parts = [part.copy() for part in np.array_split(x, world)]
    for turn in range(2 * (world - 1)):
        out, into = (rank - turn) % world, (rank - turn - 1) % world
        send((rank + 1) % world, parts[out])
        arrived = recv((rank - 1) % world)
        parts[into] = parts[into] + arrived if turn < world - 1 else arrived
    return np.concatenate(parts)


def gathers_all_to_all(rank, world, send, recv, x):
    """Each x goes round whole: (N - 1) S bytes per rank, which 2 ranks do not notice."""
    total, passing = x.copy(), x
    for _ in range(world - 1):
        send((rank + 1) % world, passing)
        passing = recv((rank - 1) % world)
        total = total + passing
    return total


def forgets_the_second_phase(rank, world, send, recv, x):
    parts = [part.copy() for part in np.array_split(x, world)]
    for turn in range(world - 1):
        send((rank + 1) % world, parts[(rank - turn) % world])
        parts[(rank - turn - 1) % world] += recv((rank - 1) % world)
    return np.concatenate(parts)


def adds_in_the_second_phase(rank, world, send, recv, x):
    parts = [part.copy() for part in np.array_split(x, world)]
    for turn in range(2 * (world - 1)):
        send((rank + 1) % world, parts[(rank - turn) % world])
        parts[(rank - turn - 1) % world] += recv((rank - 1) % world)
    return np.concatenate(parts)


def loses_the_rest(rank, world, send, recv, x):
    """Parts of n // world elements: right when n is a multiple."""
    n = len(x) // world * world
    return np.concatenate([ring_all_reduce(rank, world, send, recv, x[:n]), x[n:]])


def writes_into_x(rank, world, send, recv, x):
    x[:] = ring_all_reduce(rank, world, send, recv, x)
    return x


def through(dtype):
    """Sums in another dtype, and says nothing."""

    def way(rank, world, send, recv, x):
        narrow = lambda to, part: send(to, part.astype(x.dtype))
        return ring_all_reduce(rank, world, narrow, recv, x.astype(dtype)).astype(x.dtype)

    return way


def sends_float64(rank, world, send, recv, x):
    return ring_all_reduce(rank, world, send, recv, x.astype(np.float64)).astype(x.dtype)


def sums_in_float64(rank, world, send, recv, x):
    """The messages are of x's dtype, each addition is not."""
    parts = [part.copy() for part in np.array_split(x, world)]
    for turn in range(2 * (world - 1)):
        out, into = (rank - turn) % world, (rank - turn - 1) % world
        send((rank + 1) % world, parts[out])
        arrived = recv((rank - 1) % world)
        total = parts[into].astype(np.float64) + arrived
        parts[into] = total.astype(x.dtype) if turn < world - 1 else arrived
    return np.concatenate(parts)


def sends_pairs(rank, world, send, recv, x):
    """A message with its number."""
    parts = [part.copy() for part in np.array_split(x, world)]
    for turn in range(2 * (world - 1)):
        send((rank + 1) % world, (turn, parts[(rank - turn) % world]))
        _, arrived = recv((rank - 1) % world)
        into = (rank - turn - 1) % world
        parts[into] = parts[into] + arrived if turn < world - 1 else arrived
    return np.concatenate(parts)


def by_way_of_rank_0(rank, world, send, recv, x):
    """Rank 0 sums and tells: its link carries everything."""
    if rank:
        send(0, x)
        return recv(0)
    total = sum((recv(r) for r in range(1, world)), x)
    for r in range(1, world):
        send(r, total)
    return total.copy()


WRONG = {  # name -> what of the reference it replaces
    "gathers all to all": dict(ring_all_reduce=gathers_all_to_all),
    "forgets the second phase": dict(ring_all_reduce=forgets_the_second_phase),
    "adds in the second phase": dict(ring_all_reduce=adds_in_the_second_phase),
    "loses what does not divide": dict(ring_all_reduce=loses_the_rest),
    "writes into x": dict(ring_all_reduce=writes_into_x),
    "sums on rank 0": dict(ring_all_reduce=by_way_of_rank_0),
    "int64 through float64": dict(ring_all_reduce=through(np.float64)),
    "adds int64 in float64": dict(ring_all_reduce=sums_in_float64),
    "float64 through float32": dict(ring_all_reduce=through(np.float32)),
    "sends float64": dict(ring_all_reduce=sends_float64),
    "sends pairs": dict(ring_all_reduce=sends_pairs),
}
