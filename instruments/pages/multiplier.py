"""How many tokens one run needs for what another has: the measure of a change.

2% of a loss may be worth a tenth of the tokens or half of them; their ratio tells a change that
saves a factor from one that saves a head start. It is read off the validations. How much of it is
chance in the held-out text follows from the rows that `eval.py loss` keeps, resampled in blocks of
neighbours, since a long document fills several (a block bootstrap: Künsch 1989).
"""

import io
from pathlib import Path

import numpy as np

from instruments.pages.records import RunFolder
from machinery import disk
from machinery.log import short

BLOCK = 8  # rows that are drawn together
DRAWS = 1000
LARGEST_ROWS = 1 << 28  # bytes of the largest file that is read: three million rows


def rows_file(run_dir: Path, step: int) -> Path:
    return run_dir / f"val_rows_{step:08d}.npy"


def newest_rows(run: RunFolder) -> np.ndarray | None:
    """(rows, classes, 4), as exams/loss.py keeps them, of the newest step; None if there are none,
    or the file is damaged."""
    files = sorted(run.dir.glob("val_rows_*.npy"))
    if not files:
        return None
    try:
        content = io.BytesIO(disk.read_bytes(files[-1], LARGEST_ROWS))
        rows = np.lib.format.read_array(content, allow_pickle=False).astype(np.float64)
    except (OSError, ValueError, MemoryError):
        return None
    return rows if rows.ndim == 3 and rows.shape[2] == 4 else None


def multiplier(loss: float, tokens: float, curve: list[tuple[float, float]]) -> float:
    """How many times fewer tokens the run of `curve` needs for a loss that another has after
    `tokens`: 2 is half of them, 0: it never got there, infinity: it had it by the first. curve:
    (tokens, loss) of its validations, between which the loss is taken to fall in proportion to the
    logarithm of the tokens."""
    tokens_at, losses = np.array(sorted(curve)).T
    best = np.minimum.accumulate(losses)
    if not best[-1] <= loss <= best[0]:
        return 0.0 if loss < best[-1] else float("inf")
    return tokens / float(np.exp(np.interp(-loss, -best, np.log(tokens_at))))


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


def lines_of(base: RunFolder, other: RunFolder, common: float) -> list[str]:
    """What `other` needs for what `base` has after `common` tokens, a half and a quarter of
    them."""
    points = lambda run: [(r.tokens, r.val_bpb) for r in run.validations if r.tokens > 0]
    curves = [points(base), points(other)]
    noise, remark = noise_of(newest_rows(base), newest_rows(other))
    lines = [f"{other.dir} needs, for what {base.dir} has after so many tokens{remark}:"]
    for tokens in (common, common / 2, common / 4):
        if tokens >= max(curve[0][0] for curve in curves):
            lines.append(f"  {short(tokens)}: {needed(tokens, *curves, noise)}")
    return lines


def noise_of(a: np.ndarray | None, b: np.ndarray | None) -> tuple[np.ndarray | None, str]:
    """`bootstrap` by the rows of each run; or None, and why not."""
    if a is None or b is None:
        return None, " (how sure that is: python eval.py loss, of each)"
    if a.shape != b.shape or (a[..., 3] != b[..., 3]).any():
        return None, " (how sure that is cannot be said: eval.py loss scored different text)"
    return bootstrap(a, b), ""


def needed(tokens: float, ours: list, theirs: list, noise: np.ndarray | None) -> str:
    """In words, for the loss of `ours`, a curve, after `tokens`. noise: draws of what chance adds
    to the difference in bits per byte; None: not known."""
    tokens_at, losses = np.array(sorted(ours)).T
    loss = float(np.interp(np.log(tokens), np.log(tokens_at), losses))
    times = multiplier(loss, tokens, theirs)
    if times in (0, np.inf):  # beyond its last validation, or before its first
        word, (end, _) = ("no more", min(theirs)) if times else ("more", max(theirs))
        return f"{word} than its {short(end)}"
    drawn = [multiplier(loss - x, tokens, theirs) for x in (noise if noise is not None else [0])]
    low, high = np.quantile(drawn, (0.05, 0.95), method="nearest")
    same = noise is not None and low <= 1 <= high
    word = "as many" if times < 1 else "fewer"
    if times < 1:
        times, low, high = (1 / x if x else np.inf for x in (times, high, low))
    text = f"{times:.2f} times {word} tokens"
    if noise is not None:
        text += f" ({low:.2f} to {high:.2f}{'; no difference' if same else ''})"
    return text
