"""How many tokens, FLOPs or seconds one run needs for what another has: the measure of a change.

2% of a loss may be worth a tenth of the tokens or half of them; their ratio tells a change that
saves a factor from one that saves a head start. A change of shape may save tokens and cost FLOPs,
or save FLOPs and cost time. All is read off the validations. How much of it is luck, one pair of
runs cannot tell: two seeds differ, too.
"""

import numpy as np

from instruments.pages.run_folder import Curve, RunFolder
from machinery.screen import short


def reached(loss: float, curve: Curve) -> float:
    """After how many tokens a run first had this loss; 0: before its first validation. Between
    validations the loss is taken to fall in proportion to the logarithm of the tokens. One that
    ends above this loss gets all its tokens."""
    tokens, losses = np.array(curve).T
    best = np.minimum.accumulate(losses)
    better = np.diff(best, prepend=np.inf) < 0  # than all validations before
    if loss > best[0]:
        return 0.0
    return float(np.exp(np.interp(-loss, -best[better], np.log(tokens[better]))))


def meet(a: Curve, b: Curve, tokens: float) -> tuple[float, float]:
    """After how many tokens each of two runs had the loss that both have after `tokens`: the
    higher of the two."""
    higher = max(
        float(np.interp(np.log(tokens), np.log(at), losses))
        for at, losses in (np.array(curve).T for curve in (a, b))
    )
    return reached(higher, a), reached(higher, b)


# What a run has needed up to a number of tokens.
MEASURES = {
    "tokens": lambda run, tokens: tokens,
    "FLOPs": lambda run, tokens: tokens * run.flops_per_token,
    "time": RunFolder.seconds_at,
}


def missing(measure: str, a: RunFolder, b: RunFolder) -> str:
    """Why two runs cannot be compared by this measure; "" if they can."""
    if measure == "FLOPs" and None in (a.flops_per_token, b.flops_per_token):
        return "n/a: not recorded"
    if measure == "time":
        if len({*a.devices, *b.devices}) != 1:
            return "n/a: not on one device"
        if a.first_step > 1 or b.first_step > 1:
            return "n/a: one begins later"
    return ""


def table_of(base: RunFolder, other: RunFolder, common: float) -> list[str]:
    """How many times less `other` needs than `base`, in tokens, FLOPs and time, for the loss that
    both have after `common` tokens, a half and a quarter of them."""
    begin = max(run.curve[0][0] for run in (base, other))
    rows = [("loss of both after", *MEASURES)]
    for tokens in (common, common / 2, common / 4):
        ours, theirs = meet(base.curve, other.curve, tokens)
        if tokens >= begin and ours and theirs:
            cells = [
                missing(name, base, other) or f"{need(base, ours) / need(other, theirs):.2f}"
                for name, need in MEASURES.items()
            ]
            rows.append((f"{short(tokens)} tokens", *cells))
    title = f"how many times less {other.dir} needs than {base.dir}"
    if len(rows) == 1:
        return [f"{title}: n/a, they have no validation in the same range of tokens and loss"]
    return [f"{title}:", *aligned(rows)]


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
