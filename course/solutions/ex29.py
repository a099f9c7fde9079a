"""Exercise 29: the reference, and answers that the oracle must refuse."""


def one_f_one_b(P, M, F, B, send):
    hop = 1 + -(-2 * send // (F + B))  # forward passes that fill a device's round trip
    return [alternate(M, warmup=min((P - 1 - d) * hop, M)) for d in range(P)]


def alternate(M, warmup):
    """`warmup` forward passes, then one forward for one backward, then what is left."""
    order = [f"F{m}" for m in range(warmup)]
    for m in range(M):
        if warmup + m < M:
            order.append(f"F{warmup + m}")
        order.append(f"B{m}")
    return order


def with_warmup(warmup):
    """warmup(P, d, F, B, send): the forward passes with which device d begins."""
    return lambda P, M, *times: [
        alternate(M, min(max(0, warmup(P, d, *times)), M)) for d in range(P)
    ]


def gpipe(P, M, F, B, send):
    """Ends as early, and keeps all M."""
    return [[f"{kind}{m}" for kind in "FB" for m in range(M)] for d in range(P)]


def forgets_the_rest(P, M, F, B, send):
    """The backward passes after the last forward pass are missing."""
    orders = one_f_one_b(P, M, F, B, send)
    return [order[: -(P - 1 - d) or None] for d, order in enumerate(orders)]


def newest_first(P, M, F, B, send):
    """Backward of the micro-batch that came last: its gradient is the last to arrive."""
    forward, backward = [f"F{m}" for m in range(M)], [f"B{m}" for m in reversed(range(M))]
    return [forward + backward for d in range(P)]


def backward_before_forward(P, M, F, B, send):
    """After the warm-up, backward first: one activation less, and a wait."""
    orders = []
    for order in one_f_one_b(P, M, F, B, send):
        warmup = order.index("B0")
        order = [f"F{m}" for m in range(max(warmup - 1, 1))]
        for m in range(M):
            order.append(f"B{m}")
            order += [f"F{len(order) - m - 1}"] if len(order) - m - 1 < M else []
        orders.append(order)
    return orders


WRONG = {  # name -> what of the reference it replaces
    "the lesson's order": dict(one_f_one_b=with_warmup(lambda P, d, F, B, s: P - 1 - d)),
    "all forward passes first (GPipe)": dict(one_f_one_b=gpipe),
    "one way, not a round trip": dict(
        one_f_one_b=with_warmup(lambda P, d, F, B, s: (P - 1 - d) * (1 + -(-s // (F + B))))
    ),
    "rounds down": dict(
        one_f_one_b=with_warmup(lambda P, d, F, B, s: (P - 1 - d) * (1 + 2 * s // (F + B)))
    ),
    "rounds the whole way up, not each hop": dict(
        one_f_one_b=with_warmup(
            lambda P, d, F, B, s: P - 1 - d + -(-2 * s * (P - 1 - d) // (F + B))
        )
    ),
    "twice the warm-up, whatever the times": dict(
        one_f_one_b=with_warmup(lambda P, d, F, B, s: 2 * (P - 1 - d))
    ),
    "a warm-up of one more": dict(
        one_f_one_b=with_warmup(lambda P, d, F, B, s: (P - d) * (1 + -(-2 * s // (F + B))))
    ),
    "the same warm-up everywhere": dict(
        one_f_one_b=with_warmup(lambda P, d, F, B, s: (P - 1) * (1 + -(-2 * s // (F + B))))
    ),
    "counts F twice": dict(
        one_f_one_b=with_warmup(lambda P, d, F, B, s: (P - 1 - d) * (1 + -(-2 * s // (2 * F))))
    ),
    "forgets the last backward passes": dict(one_f_one_b=forgets_the_rest),
    "backward of the newest": dict(one_f_one_b=newest_first),
    "backward before forward": dict(one_f_one_b=backward_before_forward),
}
