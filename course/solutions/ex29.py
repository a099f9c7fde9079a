"""Exercise 29: the reference, and answers that the oracle must refuse."""


def one_f_one_b(P, M):
    return [alternate(M, warmup=min(P - 1 - d, M)) for d in range(P)]


def alternate(M, warmup):
    """`warmup` forward passes, then one forward for one backward, then what is left."""
    order = [f"F{m}" for m in range(warmup)]
    for m in range(M):
        if warmup + m < M:
            order.append(f"F{warmup + m}")
        order.append(f"B{m}")
    return order


def gpipe(P, M):
    """Ends as early, and keeps all M."""
    return [[f"{kind}{m}" for kind in "FB" for m in range(M)] for d in range(P)]


def one_too_many(P, M):
    return [alternate(M, warmup=min(P - d, M)) for d in range(P)]


def too_short_a_warmup(P, M):
    return [alternate(M, warmup=min(max(0, P - 2 - d), M)) for d in range(P)]


def all_alike(P, M):
    """Each device begins with P - 1 forward passes, the last one too."""
    return [alternate(M, warmup=min(P - 1, M)) for d in range(P)]


def forgets_the_rest(P, M):
    """The backward passes after the last forward pass are missing."""
    return [order[: -(P - 1 - d) or None] for d, order in enumerate(one_f_one_b(P, M))]


def newest_first(P, M):
    """Backward of the micro-batch that came last: its gradient is the last to arrive."""
    forward, backward = [f"F{m}" for m in range(M)], [f"B{m}" for m in reversed(range(M))]
    return [forward + backward for d in range(P)]


WRONG = {  # name -> what of the reference it replaces
    "all forward passes first (GPipe)": dict(one_f_one_b=gpipe),
    "a warm-up of P - d": dict(one_f_one_b=one_too_many),
    "too short a warm-up": dict(one_f_one_b=too_short_a_warmup),
    "the same warm-up everywhere": dict(one_f_one_b=all_alike),
    "forgets the last backward passes": dict(one_f_one_b=forgets_the_rest),
    "backward of the newest": dict(one_f_one_b=newest_first),
}
