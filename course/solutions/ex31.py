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


def changed(mode=None, missing=None, over=None):
    """The update with another mode, with zeros for a missing gradient, or over other counts."""

    def update(w, gradients, examples, lr, asked):
        zeros = [np.zeros_like(p) for p in w]
        if missing:
            gradients = [zeros if g is None else g for g in gradients]
        counts = [over] * len(examples) if over else examples
        return server_update(w, gradients, counts, lr, (mode or {}).get(asked, asked))

    return update


def examples_of_all(w, gradients, examples, lr, mode):
    """Divides by the examples of those, too, that did not report."""
    got = sum(k for g, k in zip(gradients, examples) if g is not None)
    return server_update(
        w, gradients, examples, lr * (got / sum(examples) if mode == "examples" else 1), mode
    )


def sums_examples(w, gradients, examples, lr, mode):
    """Each gradient times its examples, not divided."""
    got = sum(k for g, k in zip(gradients, examples) if g is not None)
    return server_update(w, gradients, examples, lr * (got if mode == "examples" else 1), mode)


def the_last_only(w, gradients, examples, lr, mode):
    got = [i for i, g in enumerate(gradients) if g is not None][-1:]
    return server_update(w, [gradients[i] for i in got], [examples[i] for i in got], lr, mode)


def in_place(w, gradients, examples, lr, mode):
    for p, q in zip(w, server_update(w, gradients, examples, lr, mode)):
        p[:] = q
    return w


def sums_into_a_gradient(w, gradients, examples, lr, mode):
    """The first worker's gradient becomes the sum."""
    new = server_update(w, gradients, examples, lr, mode)
    got = [g for g in gradients if g is not None]
    for g in got[1:]:
        for total, x in zip(got[0], g):
            total += x
    return new


def waits_for_all(w, gradients, examples, lr, mode):
    """No update as long as one is missing."""
    if None in [g if g is None else 0 for g in gradients]:
        return [p.copy() for p in w]
    return server_update(w, gradients, examples, lr, mode)


def in_float64(w, gradients, examples, lr, mode):
    return [p.astype(float) for p in server_update(w, gradients, examples, lr, mode)]


def at_the_newest(w, order, gradient, lr, limit):
    """As if every worker had the server's weights: nothing is ever stale."""
    now = [p.copy() for p in w]
    for worker in order:
        now = [p - np.float32(lr) * x for p, x in zip(now, gradient(worker, now))]
    return now, asynchronous(w, order, lambda worker, weights: weights, lr, limit)[1]


def shares_arrays(w, order, gradient, lr, limit):
    """Workers hold the server's own arrays, which change under them."""
    version, held, fate, now = 0, {}, [], [p.copy() for p in w]
    for worker in order:
        g, stale = gradient(worker, now), version - held.get(worker, 0)
        if stale <= limit:
            for p, x in zip(now, g):
                p -= np.float32(lr) * x
            version += 1
        fate.append(stale if stale <= limit else None)
        held[worker] = version
    return now, fate


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


def damped(w, order, gradient, lr, limit):
    """Takes stale ones with a smaller step."""
    _, fate = asynchronous(w, order, lambda worker, weights: weights, lr, limit)
    steps = iter(fate)

    def smaller(worker, weights):
        return [x / (1 + (next_stale or 0)) for x in gradient(worker, weights)]

    version, held, now = 0, {}, [p.copy() for p in w]
    first = now
    for worker in order:
        next_stale = next(steps)
        g = smaller(worker, held.get(worker, first))
        if next_stale is not None:
            now, version = [p - np.float32(lr) * x for p, x in zip(now, g)], version + 1
        held[worker] = now
    return now, fate


WRONG = {  # name -> what of the reference it replaces
    "sums in mean mode": dict(server_update=changed(mode={"mean": "sum"})),
    "mean over workers, not examples": dict(server_update=changed(mode={"examples": "mean"})),
    "counts the missing as zeros": dict(server_update=changed(missing=True)),
    "all examples alike": dict(server_update=changed(over=7)),
    "divides by the examples of all": dict(server_update=examples_of_all),
    "does not divide by the examples": dict(server_update=sums_examples),
    "keeps the last gradient only": dict(server_update=the_last_only),
    "writes into w": dict(server_update=in_place),
    "sums into a worker's gradient": dict(server_update=sums_into_a_gradient),
    "waits for all": dict(server_update=waits_for_all),
    "float64": dict(server_update=in_float64),
    "gradients at the newest weights": dict(asynchronous=at_the_newest),
    "workers share the server's arrays": dict(asynchronous=shares_arrays),
    "counts arrivals": dict(asynchronous=with_rules(count="arrivals")),
    "takes all": dict(asynchronous=with_rules(take=lambda stale, limit: True)),
    "refuses at the limit": dict(asynchronous=with_rules(take=lambda stale, limit: stale < limit)),
    "no new weights for the refused": dict(asynchronous=with_rules(resend=False)),
    "smaller steps for the stale": dict(asynchronous=damped),
}
