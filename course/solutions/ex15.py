"""Exercise 15: the reference, and answers that the oracle must refuse."""

import numpy as np


def rotate(x, positions, speeds):
    angle = positions[:, :, None, None] * speeds.astype(np.float64)  # (B, T, 1, D/2)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def stretch(speeds, factor, trained, low=1.0, high=4.0):
    turns = trained * speeds / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: the speed is kept, 0: divided
    return speeds * (kept + (1 - kept) / factor)


def neighbours(x, positions, speeds):
    """Pairs (i, i + 1), as the paper has it."""
    D = x.shape[-1]
    order = np.r_[0:D:2, 1:D:2]
    y = rotate(x[..., order], positions, speeds)
    return y[..., np.argsort(order)]


def backwards(x, positions, speeds):
    return rotate(x, -positions, speeds)


def counts_for_itself(x, positions, speeds):
    """Positions 0, 1, 2, ..., whatever it was given."""
    return rotate(x, np.tile(np.arange(x.shape[1]), (len(x), 1)), speeds)


def first_row_only(x, positions, speeds):
    return rotate(x, np.repeat(positions[:1], len(x), 0), speeds)


def angles_in_float32(x, positions, speeds):
    """At position 1,000,000 an angle in fp32 is off by up to 0.03 radians."""
    angle = positions[:, :, None, None].astype(np.float32) * speeds.astype(np.float32)
    a, b = np.split(x, 2, axis=-1)
    turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.concatenate(turned, -1).astype(x.dtype)


def sixteen_bits(x, positions, speeds):
    """Positions beyond 32,767 begin again below 0: distances stay, angles do not."""
    return rotate(x, positions.astype(np.int16), speeds)


def float32_at_the_end(x, positions, speeds):
    """Reduces the angle in float64, and then takes float32."""
    angle = (positions[:, :, None, None] * speeds % (2 * np.pi)).astype(np.float32)
    a, b = np.split(x, 2, axis=-1)
    turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.concatenate(turned, -1).astype(x.dtype)


def one_speed(x, positions, speeds):
    return rotate(x, positions, np.full_like(speeds, speeds[0]))


def float64_result(x, positions, speeds):
    return rotate(x.astype(np.float64), positions, speeds)


def in_place(x, positions, speeds):
    x[:] = rotate(x, positions, speeds)
    return x


def all_divided(speeds, factor, trained, low=1.0, high=4.0):
    """Position interpolation: neighbours come closer, too."""
    return speeds / factor


def larger_theta(speeds, factor, trained, low=1.0, high=4.0):
    """From factor 1 for the first pair to 1 / factor for the last, whatever their turns."""
    return speeds * factor ** -np.linspace(0, 1, len(speeds))


def a_step(speeds, factor, trained, low=1.0, high=4.0):
    turns = trained * speeds / (2 * np.pi)
    return np.where(turns > (low + high) / 2, speeds, speeds / factor)


def by_wavelength(speeds, factor, trained, low=1.0, high=4.0):
    """Even in the length of a turn, not in the number of turns."""
    turns = trained * speeds / (2 * np.pi)
    kept = np.clip((1 / turns - 1 / low) / (1 / high - 1 / low), 0, 1)
    return speeds * (kept + (1 - kept) / factor)


def radians_for_turns(speeds, factor, trained, low=1.0, high=4.0):
    return stretch(speeds, factor, 2 * np.pi * trained, low, high)


def fixed_limits(speeds, factor, trained, low=1.0, high=4.0):
    return stretch(speeds, factor, trained)


WRONG = {  # name -> what of the reference it replaces
    "pairs neighbouring channels": dict(rotate=neighbours),
    "turns the other way": dict(rotate=backwards),
    "counts positions itself": dict(rotate=counts_for_itself),
    "takes the first row's positions for all": dict(rotate=first_row_only),
    "computes angles in float32": dict(rotate=angles_in_float32),
    "rounds the angle to float32 at the end": dict(rotate=float32_at_the_end),
    "positions of 16 bits": dict(rotate=sixteen_bits),
    "one speed for all pairs": dict(rotate=one_speed),
    "returns float64": dict(rotate=float64_result),
    "writes into x": dict(rotate=in_place),
    "divides every speed": dict(stretch=all_divided),
    "goes by the pair's number": dict(stretch=larger_theta),
    "jumps from one rule to the other": dict(stretch=a_step),
    "mixes by wavelength": dict(stretch=by_wavelength),
    "takes radians for turns": dict(stretch=radians_for_turns),
    "has the limits 1 and 4 built in": dict(stretch=fixed_limits),
}
