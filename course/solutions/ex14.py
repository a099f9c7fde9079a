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


WRONG = {  # name -> what of the reference it replaces
    "averages the outputs": dict(merge=averages),
    "adds exponentials without the maximum": dict(merge=without_the_maximum),
    "NaN when all is masked": dict(merge=nan_when_masked),
    "adds the logs": dict(merge=adds_the_logs),
    "adds the outputs": dict(merge=sums_the_outputs),
    "writes into its arguments": dict(merge=in_place),
}
