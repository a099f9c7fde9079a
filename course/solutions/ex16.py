"""Exercise 16: the reference, and answers that the oracle must refuse."""

import numpy as np


def quantize(x, block):
    starts = range(0, len(x), block)
    largest = [np.abs(x[i : i + block]).max() for i in starts]
    largest = np.array(largest, np.float32)
    scales = np.where(largest < 1e-35, 0, largest / np.float32(127)).astype(np.float32)
    step = np.repeat(scales, block)[: len(x)]
    codes = np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0))
    return codes.astype(np.int8), scales


def clamped_scale(x, block):
    """A scale kept above 1e-8, against the division by zero: small blocks are rounded away."""
    _, scales = quantize(x, block)
    scales = np.where(scales > 0, np.maximum(scales, np.float32(1e-8)), 0).astype(np.float32)
    step = np.maximum(np.repeat(scales, block)[: len(x)], np.float32(1e-8))
    return np.round(x / step).astype(np.int8), scales


def with_denormals(x, block):
    """A scale of 1e-44 / 127 is 0, one of 1e-42 / 127 has three bits: the largest is not 127."""
    largest = [np.abs(x[i : i + block]).max() for i in range(0, len(x), block)]
    scales = np.array(largest, np.float32) / np.float32(127)
    step = np.repeat(scales, block)[: len(x)]
    codes = np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0))
    return codes.astype(np.int8), scales


def positive_only(x, block):
    """The scale from the largest number, not the largest magnitude."""
    parts = [x[i : i + block] for i in range(0, len(x), block)]
    scales = np.array([max(p.max(), 0) for p in parts], np.float32) / np.float32(127)
    step = np.repeat(scales, block)[: len(x)]
    codes = np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0))
    return np.clip(codes, -127, 127).astype(np.int8), scales


WRONG = {  # name -> what of the reference it replaces
    "keeps the scale above 1e-8": dict(quantize=clamped_scale),
    "divides by a denormal scale": dict(quantize=with_denormals),
    "forgets negative numbers in the scale": dict(quantize=positive_only),
}

EQUIVALENT = {
    "scales = np.where(largest < 1e-35, 0, largest / np.float32(127)).astype(np.float32): "
    "`largest < 1e-35` -> `largest <= 1e-35`": "no float32 is 1e-35 exactly",
    "codes = np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0)): "
    "`step > 0` -> `step >= 0`": "0 / 0 is NaN, and numpy casts NaN to the int8 0",
}
