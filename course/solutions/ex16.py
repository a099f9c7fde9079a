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


def one_scale(x, block):
    _, scales = quantize(x, max(1, len(x)))
    scales = np.full(-(-len(x) // block), scales.max(initial=0), np.float32)
    step = np.repeat(scales, block)[: len(x)]
    return np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0)).astype(
        np.int8
    ), scales


def clamped_scale(x, block):
    """A scale kept above 1e-8, against the division by zero: small blocks are rounded away."""
    _, scales = quantize(x, block)
    scales = np.where(scales > 0, np.maximum(scales, np.float32(1e-8)), 0).astype(np.float32)
    step = np.maximum(np.repeat(scales, block)[: len(x)], np.float32(1e-8))
    return np.round(x / step).astype(np.int8), scales


def towards_zero(x, block):
    _, scales = quantize(x, block)
    step = np.repeat(scales, block)[: len(x)]
    codes = np.divide(x, step * np.float32(0.9999), out=np.zeros_like(x), where=step > 0)
    return codes.astype(np.int8), scales


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


def whole_blocks_only(x, block):
    n = len(x) // block * block
    codes, scales = quantize(x[:n], block)
    return np.r_[codes, np.zeros(len(x) - n, np.int8)], np.r_[
        scales, np.zeros(int(len(x) > n), np.float32)
    ]


WRONG = {  # name -> what of the reference it replaces
    "one scale for all": dict(quantize=one_scale),
    "keeps the scale above 1e-8": dict(quantize=clamped_scale),
    "rounds towards zero": dict(quantize=towards_zero),
    "divides by a denormal scale": dict(quantize=with_denormals),
    "forgets negative numbers in the scale": dict(quantize=positive_only),
    "leaves out the last, short block": dict(quantize=whole_blocks_only),
}

EQUIVALENT = {
    "scales = np.where(largest < 1e-35, 0, largest / np.float32(127)).astype(np.float32): "
    "`largest < 1e-35` -> `largest <= 1e-35`": "no float32 is 1e-35 exactly",
    "codes = np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0)): "
    "`step > 0` -> `step >= 0`": "0 / 0 is NaN, and numpy casts NaN to the int8 0",
}
