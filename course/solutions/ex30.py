"""Exercise 30: the reference, and answers that the oracle must refuse."""


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


def if_it_is_small(P, M, F, B, send):
    """What was tried is right; beyond, the lesson's order."""
    return one_f_one_b(P, M, F, B, send if P <= 8 and M <= 20 else 0)


WRONG = {  # name -> what of the reference it replaces
    "the lesson's order": dict(one_f_one_b=with_warmup(lambda P, d, F, B, s: P - 1 - d)),
    "one way, not a round trip": dict(
        one_f_one_b=with_warmup(lambda P, d, F, B, s: (P - 1 - d) * (1 + -(-s // (F + B))))
    ),
    "rounds down": dict(
        one_f_one_b=with_warmup(lambda P, d, F, B, s: (P - 1 - d) * (1 + 2 * s // (F + B)))
    ),
    "a warm-up of one more": dict(
        one_f_one_b=with_warmup(lambda P, d, F, B, s: (P - d) * (1 + -(-2 * s // (F + B))))
    ),
    "right if it is small": dict(one_f_one_b=if_it_is_small),
}
