"""The rule of luck: is a change of the code more than another seed? For referee.py.

Two versions are trained at several sizes with pairs of seeds, each for a whole budget and for half
of it. What counts is how many times less one version needs for a loss that both reach, not the
difference of their losses: 2% of a loss may be worth a tenth of the tokens or half of them.

The rule: a change helps if at the two largest sizes, with each seed, it needs less by a larger
factor than any between two seeds of one version, which is luck; it harms if it needs more in the
same way. Anything else is no difference.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from instruments.pages.multiplier import reached


def per_token(measure: str, rows: list[dict]) -> float:
    """What a token has cost: in the longer run beyond the shorter one, so that what both begin and
    end with is left out."""
    cost, tokens = (rows[1][name] - rows[0][name] for name in (measure, "tokens"))
    return max(cost, rows[0][measure] / 9) / tokens  # of seconds that vary, it may be below 0


def less(measure: str, base: list[dict], other: list[dict]) -> tuple[float, str]:
    """How many times less `other` needs than `base` for the higher of their final losses; and
    whether that is a bound, as `other` had that loss before the end of its shorter run (">"), or
    `base` had ("<"). Each: the rows of its shorter and of its longer run."""
    curves = [[(row["tokens"], row["bpb"]) for row in rows] for rows in (base, other)]
    goal = max(curve[-1][1] for curve in curves)
    at = [reached(goal, curve) for curve in curves]
    bound = "" if all(at) else "<" if at[1] else ">"
    tokens = [n or curve[0][0] for n, curve in zip(at, curves)]
    costs = [n * per_token(measure, rows) for n, rows in zip(tokens, (base, other))]
    return costs[0] / costs[1], bound


@dataclass
class Measured:
    """One size by one measure."""

    factors: list[tuple[float, str]]  # for each seed, how many times less the change needs
    luck: float  # the largest factor between two seeds of one version

    @property
    def word(self) -> str:
        if all(factor > self.luck and bound != "<" for factor, bound in self.factors):
            return "helps"
        harms = all(factor < 1 / self.luck and bound != ">" for factor, bound in self.factors)
        return "harms" if harms else "no difference"

    def __str__(self) -> str:
        factors = (f"{bound}{factor:.2f}" for factor, bound in self.factors)
        return f"{', '.join(factors)} ({self.luck:.2f})"


def measure(name: str, base: list[list[dict]], change: list[list[dict]]) -> Measured:
    """base, change: for each seed, the rows of both runs."""
    between = [
        less(name, *pair)[0] for version in (base, change) for pair in combinations(version, 2)
    ]
    luck = max(max(factor, 1 / factor) for factor in between)
    return Measured([less(name, a, b) for a, b in zip(base, change)], luck)


def verdict(sizes: list[Measured]) -> str:
    """By the rule. sizes: from the smallest to the largest."""
    words = {size.word for size in sizes[-2:]}
    return words.pop() if len(words) == 1 else "no difference"


def chance(seeds: int) -> float:
    """How often a change that does nothing is said to help, by the rule, if the losses of all seeds
    are drawn alike (from a normal distribution; how wide it is does not matter)."""
    base, change = np.random.default_rng(0).standard_normal((2, 100_000, seeds))
    luck = np.maximum(np.ptp(base, axis=1), np.ptp(change, axis=1))
    return np.mean((base - change > luck[:, None]).all(1)) ** 2
