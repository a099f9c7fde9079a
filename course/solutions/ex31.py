"""Exercise 31: the reference, and answers that the oracle must refuse."""


def server_update(w, gradients, lr, mode):
    share = lr / len(gradients) if mode == "mean" else lr
    return [p - share * sum(parts) for p, parts in zip(w, zip(*gradients))]


def bytes_sent(n, T, mode, floats=25_450):
    model = 4 * floats
    return n * (T * model + 4) if mode == "sync" else (n + T) * model


def always_sums(w, gradients, lr, mode):
    return server_update(w, gradients, lr, "sum")


def one_after_the_other(w, gradients, lr, mode):
    """Each worker's gradient replaces the one before."""
    for g in gradients:
        new = [p - lr * x for p, x in zip(w, g)]
    return new


def in_place(w, gradients, lr, mode):
    for p, q in zip(w, server_update(w, gradients, lr, mode)):
        p[:] = q
    return w


def one_broadcast_for_all(n, T, mode, floats=25_450):
    model = 4 * floats
    return T * model + 4 * n if mode == "sync" else (n + T) * model


def no_first_weights(n, T, mode, floats=25_450):
    return T * 4 * floats if mode == "async" else bytes_sent(n, T, mode, floats)


def answers_everybody(n, T, mode, floats=25_450):
    """After each asynchronous update, too."""
    return (n + n * T) * 4 * floats if mode == "async" else bytes_sent(n, T, mode, floats)


WRONG = {  # name -> what of the reference it replaces
    "sums in mean mode": dict(server_update=always_sums),
    "keeps the last gradient only": dict(server_update=one_after_the_other),
    "writes into w": dict(server_update=in_place),
    "counts a broadcast once": dict(bytes_sent=one_broadcast_for_all),
    "forgets the first weights": dict(bytes_sent=no_first_weights),
    "answers everybody": dict(bytes_sent=answers_everybody),
}
