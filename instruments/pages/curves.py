"""The pictures of a run's page: its curves, and exams over checkpoints.

Draws what records.py has checked, as PNGs in memory. An exam's panel has a gray band: where a model
that guesses is in 95 of 100 cases. Next: report.py puts them on the page.
"""

import io
import math
from collections.abc import Callable
from itertools import accumulate

from instruments.pages.records import Run, plain
from machinery.log import short

GUESSING = 1.96  # standard deviations on each side hold 95% of what guessing gives
MOST = 12  # exams that are drawn, and lines in one; eval.jsonl may hold any number
PANELS = (  # title, unit, key of the training records, key of the validations, is it noisy?
    ("loss", "nats per token", "loss", "val_loss", True),
    ("bits per byte", "bits per byte", "bpb", "val_bpb", True),
    ("learning rate", "factor", "lr", None, False),
    ("gradient norm", "", "norm", None, True),
    ("speed", "tokens per second", "tokens_per_s", None, False),
    ("waiting for data", "ms per step", "data_wait_ms", None, False),
)


def label(text: str) -> str:
    """A text for a picture, where `$` begins a formula."""
    return plain(text)[:60].replace("$", r"\$")


def png_of(size: tuple[float, float], *panels: Callable) -> bytes:
    """Panels side by side, each drawn by a function of its axes."""
    from matplotlib.figure import Figure  # no pyplot: works without a display

    figure, buffer = Figure(figsize=size, layout="constrained"), io.BytesIO()
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        draw(axes)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize="small")
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_view_interval()[1] >= 2000:
                axis.set_major_formatter(lambda x, _: short(x))
    figure.savefig(buffer, dpi=150, format="png")
    return buffer.getvalue()


def draw_run(run: Run) -> tuple[list[bytes], bytes, int]:
    """The PNGs of the page; loss.png, the first two of them; and how many exams, those taken first,
    are left out. None before the first step."""
    if not run.steps:
        return [], b"", 0
    panels = [lambda axes, panel=panel: draw_steps(axes, run, *panel) for panel in PANELS]
    exams = panels_of_exams(run)
    pictures = [png_of((4.6, 2.9), panel) for panel in panels + exams[-MOST:]]
    return pictures, png_of((10, 4), *panels[:2]), len(exams[:-MOST])


def draw_steps(axes, run: Run, title, unit, key, val_key, is_noisy) -> None:
    """One quantity of the steps against the tokens trained on."""
    tokens, values = zip(*((r["tokens"], r[key]) for r in run.steps))
    if is_noisy:
        axes.plot(tokens, values, color="0.82", linewidth=0.6)
        values = smooth(values)
    axes.plot(tokens, values, linewidth=1.4, label="training")
    if val_key and run.validations:
        points = zip(*((r["tokens"], r[val_key]) for r in run.validations))
        axes.plot(*points, marker="o", markersize=3, linewidth=1, label="validation")
        axes.legend(fontsize="small", frameon=False)
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set(xlabel="tokens", ylabel=unit)
    if val_key is None:  # a loss ends far from 0, and from 0 its end would look flat
        axes.set_ylim(0, None)


def smooth(values) -> list[float]:
    """Exponential moving average of the values, over about the last 20 (decay 0.95)."""
    sums = accumulate(values, lambda total, value: 0.95 * total + value)
    weights = accumulate([1.0] * len(values), lambda total, one: 0.95 * total + one)
    return [total / weight for total, weight in zip(sums, weights)]


def draw_compared(runs: list[Run], common: int) -> bytes:
    """Validation bits per byte over tokens and over training time."""
    is_long = max(run.seconds_at(run.tokens) for run in runs) > 2 * 3600
    unit_s, unit = (3600, "hours") if is_long else (60, "minutes")

    def draw(axes, by_time: bool) -> None:
        for run in runs:
            # not the untrained model's value: it would squeeze the scale for all the others
            trained = [(r["tokens"], r["val_bpb"]) for r in run.validations if r["tokens"]]
            x = [run.seconds_at(tokens) / unit_s if by_time else tokens for tokens, _ in trained]
            if run.first_step == 1 or not by_time:
                bpb, style = [bpb for _, bpb in trained], dict(marker="o", markersize=3)
                axes.plot(x, bpb, linewidth=1.4, label=label(run.dir), **style)
        axes.set(xlabel=f"{unit} of training" if by_time else "tokens", xlim=(0, None))

    def over_tokens(axes) -> None:
        draw(axes, by_time=False)
        axes.axvline(common, color="0.6", linewidth=0.8, linestyle=":")
        axes.set_ylabel("validation, bits per byte")
        axes.legend(frameon=False)

    return png_of((11, 4.5), over_tokens, lambda axes: draw(axes, by_time=True))


# --------------------------------------------------------------------------- exams


def panels_of_exams(run: Run) -> list[Callable]:
    """A panel for each exam (for CORE, too) that eval.py took of the run's checkpoints."""
    exams: dict[tuple, list[dict]] = {}
    for r in run.scores():
        exams.setdefault((r["task"], r.get("mode"), r.get("shots") or 0, r["n"]), []).append(r)
    return [lambda axes, own=own: draw_exam(axes, own) for own in exams.values()]


def draw_exam(axes, records: list[dict]) -> None:
    """The score over the checkpoints, with its standard error, a line for each norm."""
    r = records[-1]
    deviation = r.get("chance_sd") or math.sqrt(r["chance"] * (1 - r["chance"]) / r["n"])
    low, high = (r["chance"] + side * GUESSING * deviation for side in (-1, 1))
    axes.axhspan(low, high, color="0.9")
    axes.axhline(r["chance"], color="0.6", linewidth=0.8, linestyle=":", label="guessing")
    for norm in [*dict.fromkeys(r.get("norm") or "" for r in records)][-MOST:]:
        latest = {r["step"]: r for r in records if (r.get("norm") or "") == norm}
        own = [latest[step] for step in sorted(latest)]
        points = [(r["tokens"], r.get("core", r.get("accuracy")), r["stderr"]) for r in own]
        style = dict(marker="o", markersize=3, linewidth=1.2)
        axes.errorbar(*zip(*points), label=label(norm) or "score", **style)
    if r.get("gpt2_xl") is not None:
        axes.axhline(r["gpt2_xl"], color="tab:red", linewidth=0.8, label="GPT-2 XL")
    kind = ", ".join(filter(None, (r["task"], r.get("mode"))))
    axes.set_title(f"{label(kind)}: {r['n']:,} questions", fontsize="medium", loc="left")
    axes.set_xlabel("tokens")
    axes.legend(fontsize="small", frameon=False)
