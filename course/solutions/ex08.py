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
ANGLE = "angle = positions[:, :, None, None] * speeds.astype(np.float64)"
RULE = "    return speeds * (kept + (1 - kept) / factor)\n"
WRONG = {  # name -> what of the reference it replaces
    "pairs neighbouring channels": edit(
        "a, b = np.split(x, 2, axis=-1)",
        "a, b = x[..., ::2], x[..., 1::2]",
        "np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)",
        "np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)",
    ),
    "turns the other way": edit(
        "[a * cos - b * sin, b * cos + a * sin]", "[a * cos + b * sin, b * cos - a * sin]"
    ),
    "counts positions itself": edit(
        "angle = positions", "positions = np.arange(x.shape[1])[None]\n    angle = positions"
    ),
    "takes the first row's positions for all": edit("angle = positions[", "angle = positions[:1]["),
    "computes angles in float32": edit(
        ANGLE, "angle = positions[:, :, None, None].astype(np.float32) * speeds.astype(np.float32)"
    ),
    "rounds the angle to float32 at the end": edit(
        "cos = np.cos(angle)",
        "angle = (angle % (2 * np.pi)).astype(np.float32)\n    cos = np.cos(angle)",
    ),
    "positions of 16 bits": edit(
        "angle = positions", "positions = positions.astype(np.int16)\n    angle = positions"
    ),
    "a table of all positions": edit(
        ANGLE,
        "table = np.arange(positions.max() + 1)[:, None] * speeds\n"
        "    angle = table[positions % len(table)][:, :, None]",
    ),
    "a table that begins at the smallest": edit(
        ANGLE,
        "low = positions.min()\n"
        "    table = np.arange(low, positions.max() + 1)[:, None] * speeds\n"
        "    angle = table[positions - low][:, :, None]",
    ),
    "negative positions stay where they are": edit(
        "angle = positions", "positions = positions.clip(0)\n    angle = positions"
    ),
    "negative ones turn forwards": edit(
        "angle = positions", "positions = abs(positions)\n    angle = positions"
    ),
    "one speed for all pairs": edit(
        ANGLE, ANGLE.replace("speeds.", "np.full_like(speeds, speeds[0]).")
    ),
    "returns float64": edit("-1).astype(x.dtype)", "-1)"),
    "writes into x": edit(
        "return np.concatenate(",
        "x[:] = np.concatenate(",
        "-1).astype(x.dtype)",
        "-1)\n    return x",
    ),
    "divides every speed": edit(RULE, "    return speeds / factor\n"),
    "jumps from one rule to the other": edit(
        "np.clip((turns - low) / (high - low), 0, 1)", "turns > (low + high) / 2"
    ),
    "mixes by wavelength": edit(
        "(turns - low) / (high - low)", "(1 / turns - 1 / low) / (1 / high - 1 / low)"
    ),
    "mixes the lengths, not the speeds": edit(
        RULE, "    return speeds / (kept + (1 - kept) * factor)\n"
    ),
}
