"""Exercise 10: the reference, and answers that the oracle must refuse."""

from edits import edits


def rate(step, steps, warmup):
    rising = (step + 1) / max(1, warmup)
    return min(1.0, rising, 2 * (steps - step) / steps)


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "begins at 0": edit("(step + 1)", "step"),
    "rises one step longer": edit("max(1, warmup)", "(warmup + 1)"),
    "the last step is 0": edit("2 * (steps - step)", "2 * (steps - 1 - step)"),
    "falls from the beginning": edit("2 * (steps", "(steps"),
    "falls in a curve": edit("2 * (steps - step) / steps", "4 * (1 - step / steps) ** 2"),
    "the product of both": edit("min(1.0, rising, 2 *", "min(1.0, rising) * min(1.0, 2 *"),
    "falls after the warmup only": edit(
        "    return min(1.0, rising,",
        "    if rising < 1:\n        return rising\n    return min(1.0, rising,",
    ),
}
