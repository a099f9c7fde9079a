"""Exercise 31: the reference, and answers that the oracle must refuse."""

from edits import edits

import numpy as np


def asynchronous(w, order, gradient, lr, limit):
    version = 0
    held = {}
    fate = []
    first = now = [p.copy() for p in w]
    for worker in order:
        weights, sent = held.get(worker, (first, 0))
        g = gradient(worker, weights)
        stale = version - sent
        if stale <= limit:
            now = [np.asarray(p - np.float32(lr) * x) for p, x in zip(now, g)]
            version += 1
        fate.append(stale if stale <= limit else None)
        held[worker] = now, version
    return now, fate


edit = edits(__file__)
TAKE = "if stale <= limit:"
HELD = "        held[worker] = now, version"
WRONG = {  # name -> what of the reference it replaces
    "a rate of float64": edit("np.float32(lr)", "lr"),
    "no array for a single number": edit(
        "np.asarray(p - np.float32(lr) * x)", "p - np.float32(lr) * x"
    ),
    "changes what a worker holds": edit(
        "now = [np.asarray(p - np.float32(lr) * x) for p, x in zip(now, g)]",
        "[np.subtract(p, np.float32(lr) * x, out=p) for p, x in zip(now, g)]",
    ),
    "scales what gradient handed over": edit(
        "np.float32(lr) * x", "np.multiply(x, np.float32(lr), out=x)"
    ),
    "counts arrivals": edit(
        "for worker in order",
        "for arrival, worker in enumerate(order)",
        "version - sent",
        "arrival - sent",
        HELD,
        "        held[worker] = now, arrival + 1",
    ),
    "refuses at the limit": edit(
        TAKE, "if stale < limit:", "if stale <= limit else", "if stale < limit else"
    ),
    "no new weights for the refused": edit(HELD, f"        {TAKE}\n    {HELD}"),
}
