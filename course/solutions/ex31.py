"""Exercise 31: the reference, and answers that the oracle must refuse."""

import numpy as np


def server_update(w, gradients, examples, lr, mode):
    got = [(g, k) for g, k in zip(gradients, examples) if g is not None]
    whole = sum(k for _, k in got)
    shares = [{"sum": 1, "mean": 1 / len(got), "examples": k / whole}[mode] for _, k in got]
    new = [p.copy() for p in w]
    for share, (g, _) in zip(shares, got):
        for p, x in zip(new, g):
            p -= np.float32(lr * share) * x
    return new


def asynchronous(w, order, gradient, lr, limit):
    version, held, fate = 0, {}, []
    first = now = [p.copy() for p in w]
    for worker in order:
        weights, sent = held.get(worker, (first, 0))
        g = gradient(worker, weights)
        stale = version - sent
        if stale <= limit:
            now = [p - np.float32(lr) * x for p, x in zip(now, g)]
            version += 1
        fate.append(stale if stale <= limit else None)
        held[worker] = now, version
    return now, fate


def changed(mode=None, missing=None):
    """The update with another mode, or with zeros for a missing gradient."""

    def update(w, gradients, examples, lr, asked):
        zeros = [np.zeros_like(p) for p in w]
        if missing:
            gradients = [zeros if g is None else g for g in gradients]
        return server_update(w, gradients, examples, lr, (mode or {}).get(asked, asked))

    return update


def in_float64(w, gradients, examples, lr, mode):
    return [p.astype(float) for p in server_update(w, gradients, examples, lr, mode)]


def with_rules(take=None, count=None, resend=True):
    """asynchronous with other rules: what is taken, what is counted, who gets new weights."""

    def run(w, order, gradient, lr, limit):
        version, held, fate, now = 0, {}, [], [p.copy() for p in w]
        first = now
        for arrival, worker in enumerate(order):
            weights, sent, when = held.get(worker, (first, 0, 0))
            g = gradient(worker, weights)
            stale = arrival - when if count == "arrivals" else version - sent
            taken = (take or (lambda stale, limit: stale <= limit))(stale, limit)
            if taken:
                now = [p - np.float32(lr) * x for p, x in zip(now, g)]
                version += 1
            fate.append(stale if taken else None)
            if taken or resend:
                held[worker] = now, version, arrival + 1
        return now, fate

    return run


def scales_the_gradient(w, order, gradient, lr, limit):
    """The rate goes into the arrays that gradient handed over."""

    def scaled(worker, weights):
        g = gradient(worker, weights)
        for x in g:
            x *= np.float32(lr)
        return g

    return asynchronous(w, order, scaled, 1.0, limit)


def nothing_was_taken(w, order, gradient, lr, limit):
    new, fate = asynchronous(w, order, gradient, lr, limit)
    return (new if any(stale is not None for stale in fate) else w), fate


WRONG = {  # name -> what of the reference it replaces
    "sums in mean mode": dict(server_update=changed(mode={"mean": "sum"})),
    "mean over workers, not examples": dict(server_update=changed(mode={"examples": "mean"})),
    "counts the missing as zeros": dict(server_update=changed(missing=True)),
    "float64": dict(server_update=in_float64),
    "scales what gradient handed over": dict(asynchronous=scales_the_gradient),
    "returns w if nothing was taken": dict(asynchronous=nothing_was_taken),
    "counts arrivals": dict(asynchronous=with_rules(count="arrivals")),
    "refuses at the limit": dict(asynchronous=with_rules(take=lambda stale, limit: stale < limit)),
    "no new weights for the refused": dict(asynchronous=with_rules(resend=False)),
}
