"""Exercise 30: the reference, and answers that the oracle must refuse."""

from edits import edits


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


edit = edits(__file__)
TRIP = "-(-2 * send // (F + B))"
WRONG = {  # name -> what of the reference it replaces
    "the lesson's order": edit(TRIP, "0"),
    "one way, not a round trip": edit(TRIP, "-(-send // (F + B))"),
    "rounds down": edit(TRIP, "2 * send // (F + B)"),
    "a warm-up of one more": edit("(P - 1 - d)", "(P - d)"),
    "all forward passes first": edit("min((P - 1 - d) * hop, M)", "M"),
}
