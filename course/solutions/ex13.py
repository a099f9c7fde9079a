"""Exercise 13: the reference, and answers that the oracle must refuse."""

import math

import numpy as np
from edits import edits


def bits_of_text(nats, sizes):
    text = sizes > 0
    bits = nats[text].sum(dtype=np.float64) / math.log(2)
    return float(bits / sizes.sum(dtype=np.float64))


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "the mean of the targets' ratios": edit(
        "float(bits / sizes.sum(dtype=np.float64))",
        "float((nats[text] / math.log(2) / sizes[text]).mean(dtype=np.float64))",
    ),
    "what stands for no text counts": edit("nats[text].sum", "nats.sum"),
    "infinity times zero": edit("nats[text].sum", "(nats * text).sum"),
    "in the type of the losses": edit("nats[text].sum(dtype=np.float64)", "nats[text].sum()"),
    "bytes in the type of the sizes": edit(
        "sizes.sum(dtype=np.float64)", "sizes.sum(dtype=sizes.dtype)"
    ),
}
