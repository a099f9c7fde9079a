"""Exercise 14: the reference, and answers that the oracle must refuse."""

import numpy as np


def merge(o1, lse1, o2, lse2):
    lse = np.logaddexp(lse1, lse2)  # -inf if both are
    base = np.where(np.isinf(lse), 0, lse)
    w1, w2 = np.exp(lse1 - base), np.exp(lse2 - base)  # the share of each block, 0 if masked
    return o1 * w1[:, None] + o2 * w2[:, None], lse


def averages(o1, lse1, o2, lse2):
    return (o1 + o2) / 2, np.logaddexp(lse1, lse2)


def without_the_maximum(o1, lse1, o2, lse2):
    """exp of a score of 1,000 is inf, of -1,000 it is 0."""
    s1, s2 = np.exp(lse1), np.exp(lse2)
    total = s1 + s2
    safe = np.where(total == 0, 1, total)
    return o1 * (s1 / safe)[:, None] + o2 * (s2 / safe)[:, None], np.log(total)


def nan_when_masked(o1, lse1, o2, lse2):
    """-inf - -inf is NaN where both blocks are masked."""
    lse = np.logaddexp(lse1, lse2)
    return o1 * np.exp(lse1 - lse)[:, None] + o2 * np.exp(lse2 - lse)[:, None], lse


def adds_the_logs(o1, lse1, o2, lse2):
    o, _ = merge(o1, lse1, o2, lse2)
    return o, lse1 + lse2


def sums_the_outputs(o1, lse1, o2, lse2):
    """Forgets that each output was divided by its own block's sum."""
    return o1 + o2, np.logaddexp(lse1, lse2)


def in_place(o1, lse1, o2, lse2):
    o, lse = merge(o1, lse1, o2, lse2)
    o1[:], lse1[:] = o, lse
    return o1, lse1


def six_by_three(o1, lse1, o2, lse2):
    """Loops over the sizes of the first case."""
    o, lse = np.zeros_like(o1), np.zeros_like(lse1)
    for i in range(min(6, len(o))):
        for j in range(min(3, o.shape[1])):
            o_i, lse[i : i + 1] = merge(
                o1[i : i + 1], lse1[i : i + 1], o2[i : i + 1], lse2[i : i + 1]
            )
            o[i, j] = o_i[0, j]
    return o, lse


def in_long_double(o1, lse1, o2, lse2):
    """More digits only overflow later."""
    s1, s2 = np.exp(lse1.astype(np.longdouble)), np.exp(lse2.astype(np.longdouble))
    total = s1 + s2
    safe = np.where(total == 0, 1, total)
    o = o1 * (s1 / safe)[:, None] + o2 * (s2 / safe)[:, None]
    return o.astype(o1.dtype), np.log(total).astype(o1.dtype)


def one_maximum_for_all(o1, lse1, o2, lse2):
    """Subtracts the largest lse of all queries: right until two queries differ by 1,000."""
    top = max(lse1.max(initial=-np.inf), lse2.max(initial=-np.inf))
    top = lse1.dtype.type(0 if np.isinf(top) else top)
    s1, s2 = np.exp(lse1 - top), np.exp(lse2 - top)
    safe = np.where(s1 + s2 == 0, 1, s1 + s2)
    return o1 * (s1 / safe)[:, None] + o2 * (s2 / safe)[:, None], np.log(s1 + s2) + top


def the_heavier_block(o1, lse1, o2, lse2):
    o = np.where((lse1 > lse2)[:, None], o1, o2)
    return o, np.logaddexp(lse1, lse2)


def in_float64(o1, lse1, o2, lse2):
    return merge(*(x.astype(np.float64) for x in (o1, lse1, o2, lse2)))


WRONG = {  # name -> what of the reference it replaces
    "averages the outputs": dict(merge=averages),
    "adds exponentials without the maximum": dict(merge=without_the_maximum),
    "NaN when all is masked": dict(merge=nan_when_masked),
    "adds the logs": dict(merge=adds_the_logs),
    "adds the outputs": dict(merge=sums_the_outputs),
    "writes into its arguments": dict(merge=in_place),
    "works for 6 queries and 3 channels": dict(merge=six_by_three),
    "works in long double": dict(merge=in_long_double),
    "one maximum for all queries": dict(merge=one_maximum_for_all),
    "takes the heavier block": dict(merge=the_heavier_block),
    "returns float64 for float32": dict(merge=in_float64),
}

EQUIVALENT = {
    "base = np.where(np.isinf(lse), 0, lse): `0` -> `1`": (
        "any finite number will do: exp(-inf - base) is 0"
    )
}
