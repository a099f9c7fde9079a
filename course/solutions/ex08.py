"""Exercise 8: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


def rotate(x, positions, speeds):
    angle = positions[:, :, None, None] * speeds.astype(np.float64)  # (B, T, 1, D/2)
    cos = np.cos(angle)
    sin = np.sin(angle)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def stretch(speeds, factor, trained, low=1.0, high=4.0):
    speeds = speeds.astype(np.float64)
    turns = trained * speeds / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: the speed is kept, 0: divided
    return speeds * (kept + (1 - kept) / factor)


edit = edits(__file__)
ANGLE = "positions[:, :, None, None] * speeds.astype(np.float64)"
PAIRS = "[a * cos - b * sin, b * cos + a * sin]"
TABLE = """np.arange(positions.min(), positions.max() + 1)[:, None] * speeds
    angle = angle[positions - positions.min()][:, :, None]"""
WRONG = {  # name -> what of the reference it replaces
    "pairs neighbouring channels": edit(
        "a, b = np.split(x, 2, axis=-1)",
        "a, b = x[..., ::2], x[..., 1::2]",
        f"np.concatenate({PAIRS}, -1)",
        f"np.stack({PAIRS}, -1).reshape(x.shape)",
    ),
    "turns the other way": edit(PAIRS, "[a * cos + b * sin, b * cos - a * sin]"),
    "computes angles in float32": edit("angle)\n    sin", "angle.astype(np.float32))\n    sin"),
    "a table that begins at the smallest": edit(ANGLE, TABLE),
    "negative ones turn forwards": edit("positions[:", "abs(positions)[:"),
    "returns float64": edit("-1).astype(x.dtype)", "-1)"),
    "divides every speed": edit("speeds * (kept + (1 - kept) / factor)", "speeds / factor"),
    "jumps from one rule to the other": edit(
        "np.clip((turns - low) / (high - low), 0, 1)", "turns > (low + high) / 2"
    ),
    "mixes by wavelength": edit(
        "(turns - low) / (high - low)", "(1 / turns - 1 / low) / (1 / high - 1 / low)"
    ),
}
