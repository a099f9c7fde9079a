"""Exercise 16: the reference, and answers that the oracle must refuse."""

import numpy as np


def quantize(x, block):
    starts = range(0, len(x), block)
    largest = [np.abs(x[i : i + block]).max() for i in starts]
    scales = np.array(largest, np.float32) / np.float32(127)
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


def from_the_mean(x, block):
    """Three times the mean size covers nearly all; the rest is clipped."""
    _, scales = quantize(x, block)
    scales = [3 * np.abs(x[i * block : (i + 1) * block]).mean() / 127 for i in range(len(scales))]
    scales = np.array(scales, np.float32)
    step = np.maximum(np.repeat(scales, block)[: len(x)], 1e-38)
    return np.clip(np.round(x / step), -127, 127).astype(np.int8), scales


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


def up_to_128(x, block):
    """2 to the 7th is 128, but int8 ends at 127: the largest becomes -128."""
    _, scales = quantize(x, block)
    scales = scales * np.float32(127 / 128)
    step = np.repeat(scales, block)[: len(x)]
    codes = np.round(np.divide(x, step, out=np.zeros_like(x), where=step > 0))
    return codes.astype(np.int16).astype(np.int8), scales


WRONG = {  # name -> what of the reference it replaces
    "one scale for all": dict(quantize=one_scale),
    "takes the scale from the mean": dict(quantize=from_the_mean),
    "keeps the scale above 1e-8": dict(quantize=clamped_scale),
    "rounds towards zero": dict(quantize=towards_zero),
    "overflows at 128": dict(quantize=up_to_128),
}
