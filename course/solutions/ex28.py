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


edit = edits(__file__)
PARTS = "    parts ="
WHOLE = """    total = passing = x
    for _ in range(world - 1):
        send((rank + 1) % world, passing)
        passing = recv((rank - 1) % world)
        total = total + passing
    return total.copy()
"""
WRONG = {  # name -> what of the reference it replaces
    "passes each x on whole": edit(PARTS, WHOLE + PARTS),
    "loses what does not divide": edit(
        "np.array_split(x, world)", "np.split(x[: len(x) // world * world], world)"
    ),
    "adds int64 in float64": edit(
        "parts[into] + arrived if", "(parts[into] + arrived.astype(float)).astype(x.dtype) if"
    ),
    "adds in the second round too": edit(" if turn < world - 1 else arrived", ""),
    "stops after the first round": edit("2 * (world - 1)", "world - 1"),
    "sends to the one before": edit("rank + 1", "rank - 1", "recv((rank - 1)", "recv((rank + 1)"),
}
