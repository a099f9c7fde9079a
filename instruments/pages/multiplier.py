"""How many tokens, FLOPs or seconds one run needs for what another has: the measure of a change.

2% of a loss may be worth a tenth of the tokens or half of them; their ratio tells a change that
saves a factor from one that saves a head start. A change of shape may save tokens and cost FLOPs,
or save FLOPs and cost time. All is read off the validations. How much of it is chance in the
held-out text follows from the rows that `eval.py loss` keeps, resampled in blocks of neighbours,
since a long document fills several (a block bootstrap: Künsch 1989).
"""

import io
import math
from pathlib import Path

import numpy as np

from instruments.pages.run_folder import RunFolder
from machinery import disk
from machinery.screen import short

TOO_EARLY = "n/a: one had it before its first validation"
BLOCK = 8  # rows that are drawn together
DRAWS = 1000
LARGEST_ROWS = 1 << 28  # bytes of the largest file that is read: three million rows


def rows_file(run_dir: Path, step: int) -> Path:
    return run_dir / f"val_rows_{step:08d}.npy"


def newest_rows(run: RunFolder) -> np.ndarray | None:
    """(rows, classes, 4), as exams/loss.py keeps them, of the newest step; None if there are none,
    or the file is damaged."""
    try:
        newest = max(run.dir.glob("val_rows_*.npy"))
        content = io.BytesIO(disk.read_bytes(newest, LARGEST_ROWS))
        rows = np.lib.format.read_array(content, allow_pickle=False).astype(np.float64)
    except (OSError, ValueError, MemoryError):  # ValueError: also of max, if there are none
        return None
    return rows if rows.ndim == 3 and rows.shape[2] == 4 else None


def reached(loss: float, curve: list[tuple[float, float]]) -> float:
    """After how many tokens a run first had this loss; 0: before its first validation. curve:
    (tokens, loss) of its validations, between which the loss is taken to fall in proportion to the
    logarithm of the tokens. One that ends above this loss gets all its tokens."""
    tokens, losses = np.array(sorted(curve)).T
    best = np.minimum.accumulate(losses)
    better = np.diff(best, prepend=np.inf) < 0  # than all validations before
    if loss > best[0]:
        return 0.0
    return float(np.exp(np.interp(-loss, -best[better], np.log(tokens[better]))))


def meet(
    a: list[tuple[float, float]], b: list[tuple[float, float]], tokens: float
) -> tuple[float, float]:
    """After how many tokens each of two runs had the loss that both have after `tokens`: the
    higher of the two. a, b: (tokens, loss) of their validations, as in `reached`."""
    higher = max(
        float(np.interp(np.log(tokens), np.log(at), losses))
        for at, losses in (np.array(sorted(curve)).T for curve in (a, b))
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


def times_less(
    measure: str, base: RunFolder, other: RunFolder, tokens: float, shift: float = 0.0
) -> float:
    """How many times less `other` needs than `base` for the loss that both have after `tokens`; not
    finite if one had it before its first validation. shift: added to the loss of `other`."""
    a = base.curve
    b = [(n, bpb + shift) for n, bpb in other.curve]
    cost = MEASURES[measure]
    needed = [cost(run, at) for run, at in zip((base, other), meet(a, b, tokens))]
    return needed[0] / needed[1] if needed[1] else math.inf


def bootstrap(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Rows of the same text, (rows, classes, 4) -> (DRAWS,): by how much the difference in bits per
    byte, theirs - ours, changes when the rows are resampled."""
    begin = np.arange(0, len(ours), BLOCK)
    a, b = (np.add.reduceat(rows[..., 2:], begin).sum(1) for rows in (ours, theirs))  # (blocks, 2)
    nats = b[:, 0] - a[:, 0]
    size = a[:, 1]
    drawn = np.random.default_rng(0).integers(len(begin), size=(DRAWS, len(begin)))
    bits = lambda i: nats[i].sum(-1) / np.log(2) / np.maximum(size[i].sum(-1), 1)
    return bits(drawn) - bits(np.arange(len(begin)))


def noise_of(a: np.ndarray | None, b: np.ndarray | None) -> tuple[np.ndarray | None, str]:
    """`bootstrap` by the rows of each run; or None, and why not."""
    if a is None or b is None:
        return None, " (how sure that is: python eval.py loss, of each)"
    if a.shape != b.shape or (a[..., 3] != b[..., 3]).any():
        return None, " (how sure that is cannot be said: eval.py loss scored different text)"
    return bootstrap(a, b), ""


def cell(
    measure: str, base: RunFolder, other: RunFolder, tokens: float, noise, only_noise: bool
) -> str:
    """`times_less`, and between which factors 90% of the draws of `noise` lie: what chance adds to
    the difference in bits per byte; None: not known."""
    reason = missing(measure, base, other)
    if reason:
        return reason
    times = times_less(measure, base, other, tokens)
    if not 0 < times < math.inf:
        return TOO_EARLY
    if noise is None:
        return f"no difference ({times:.2f})" if only_noise else f"{times:.2f}"
    drawn = [times_less(measure, base, other, tokens, x) for x in noise]
    low, high = np.quantile(drawn, (0.05, 0.95), method="nearest")
    between = f"({low:.2f} to {high:.2f})"
    same = only_noise or round(low, 2) <= 1 <= round(high, 2)
    return f"no difference {between}" if same else f"{times:.2f} {between}"


def table_of(base: RunFolder, other: RunFolder, common: float, only_noise: bool) -> list[str]:
    """How many times less `other` needs than `base`, in tokens, FLOPs and time, for the loss that
    both have after `common` tokens, a half and a quarter of them. only_noise: only the seed
    differs."""
    noise, remark = noise_of(newest_rows(base), newest_rows(other))
    begin = max(run.curve[0][0] for run in (base, other))
    rows = [("loss of both after", *MEASURES)]
    for tokens in (common, common / 2, common / 4):
        cells = [cell(m, base, other, tokens, noise, only_noise) for m in MEASURES]
        if tokens >= begin and cells[0] != TOO_EARLY:
            rows.append((f"{short(tokens)} tokens", *cells))
    title = f"how many times less {other.dir} needs than {base.dir}"
    if len(rows) == 1:
        return [f"{title}: n/a, they have no validation in the same range of tokens and loss"]
    return [f"{title}{remark}:", *aligned(rows)]


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
