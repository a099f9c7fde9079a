"""Exercise 39: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


def quantize(x, block):
    starts = range(0, len(x), block)
    largest = [np.abs(x[i : i + block]).max() for i in starts]
    largest = np.array(largest, np.float32)
    scales = np.where(largest < 1e-35, 0, largest / np.float32(127)).astype(np.float32)
    step = np.repeat(scales, block)[: len(x)]
    codes = np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0))
    return codes.astype(np.int8), scales


edit = edits(__file__)
SCALE = "np.where(largest < 1e-35, 0, largest / np.float32(127))"
WRONG = {  # name -> what of the reference it replaces
    "keeps the scale above 1e-8": edit(SCALE, SCALE.replace("0, ", "0, 1e-8 + ")),
    "divides by a denormal scale": edit(SCALE, "(largest / np.float32(127))"),
    "forgets negative numbers in the scale": edit(
        "np.abs(x[i : i + block]).max()",
        "max(x[i : i + block].max(), 0)",
        "codes.astype",
        "np.clip(codes, -127, 127).astype",
    ),
}

EQUIVALENT = {
    "scales = np.where(largest < 1e-35, 0, largest / np.float32(127)).astype(np.float32): "
    "`largest < 1e-35` -> `largest <= 1e-35`": "no float32 is 1e-35 exactly",
    "codes = np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0)): "
    "`step > 0` -> `step >= 0`": "0 / 0 is NaN, and numpy casts NaN to the int8 0",
}
