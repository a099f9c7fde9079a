"""The pictures of a run's page: its curves, and exams over checkpoints.

Draws what records.py has checked, as SVGs in the page's colours or as PNGs. An exam has a gray
band, in which a model that guesses falls in 95 of 100 cases. Next: report.py puts them on the page.
"""

import io
import math
import os
import re
from collections.abc import Callable

import numpy as np

from instruments.pages.records import Run, plain
from machinery.log import short

GUESSING = 1.96  # standard deviations on each side hold 95% of what guessing gives
MOST = 12  # exams that are drawn, and lines in one; eval.jsonl may hold any number
PANELS = (  # title, unit, key of the training records, key of the validations, is it noisy?
    ("bits per byte", "", "bpb", "val_bpb", True),
    ("loss", "nats per token", "loss", "val_loss", True),
    ("gradient norm", "", "norm", None, True),
    ("learning rate", "factor of its peak", "lr", None, False),
    ("speed", "tokens per second", "tokens_per_s", None, False),
    ("waiting for data", "ms per step", "data_wait_ms", None, False),
)
# matplotlib's -> the page's.
COLOURS = {"#000000": "currentColor", "#1f77b4": "var(--first)", "#ff7f0e": "var(--second)"}


def label(text: str) -> str:
    """A text for a picture, where `$` begins a formula."""
    return plain(text)[:60].replace("$", r"\$")


def paint(form: str, size: tuple[float, float], *panels: Callable) -> bytes:
    """Panels side by side, each drawn by a function of its axes. form: png or svg."""
    if os.path.expanduser("~").startswith("~"):  # who has no home, for which matplotlib asks
        os.environ.setdefault("MPLCONFIGDIR", os.devnull)  # it then makes a folder, and removes it
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: works without a display

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "axes.titlelocation": "left"}):
        figure, buffer = Figure(figsize=size, layout="constrained"), io.BytesIO()
        for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
            draw(axes)
            axes.grid(color="black", alpha=0.12, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize="small")
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_view_interval()[1] >= 2000:
                    axis.set_major_formatter(lambda x, _: short(x))
        figure.savefig(buffer, dpi=150, format=form, transparent=form == "svg")
    return buffer.getvalue()


def svg_of(panel: Callable) -> tuple[str, str]:
    """A panel for a page: the viewBox of an SVG, and its elements, without style sheets, links
    and clip paths, and with ids for markers only. matplotlib escapes the texts in them."""
    drawn = paint("svg", (4.6, 2.9), panel).decode()
    box, drawn = re.search(r'viewBox="([^"]*)"', drawn)[1], drawn.partition("</defs>")[2]
    drawn = re.sub(r'(?<=<g) id="[^"]*"| clip-path="[^"]*"|font-family: [^;"]*; ', "", drawn)
    drawn = re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d)\d+|\n", r"\1", d[0]), drawn)
    for colour, own in COLOURS.items():
        drawn = drawn.replace(colour, own)
    return box, drawn.partition("<defs>\n  <clipPath")[0].removesuffix("</svg>")


def draw_run(run: Run) -> tuple[list[tuple[str, str, str]], bytes, int]:
    """(title, viewBox, SVG) of each picture of the page, none before a step; loss.png; and how many
    exams, those taken first, are left out."""
    if not run.steps:
        return [], b"", 0
    waits = run.median("data_wait_ms") >= 10 * run.median("step_s")  # 1% of a step
    panels, exams = PANELS if waits else PANELS[:-1], panels_of_exams(run)
    drawn = [(title, lambda axes, p=(title, *p): draw_steps(axes, run, *p)) for title, *p in panels]
    pictures = [(title, *svg_of(draw)) for title, draw in drawn + exams[-MOST:]]
    return pictures, paint("png", (6, 4), drawn[0][1]), len(exams[:-MOST])


def draw_steps(axes, run: Run, title, unit, key, val_key, is_noisy) -> None:
    """One quantity of the steps against the tokens trained on, which begin at the first step."""
    tokens, values = (np.array([r[name] for r in run.steps], float) for name in ("tokens", key))
    shown = np.unique(np.geomspace(1, last := len(tokens), 600).round().astype(int)) - 1
    if is_noisy:
        axes.plot(tokens[shown], values[shown], color="black", alpha=0.2, linewidth=0.6)
        values = np.array(smooth(values))
    axes.plot(tokens[shown], values[shown], linewidth=1.6, label="training")
    points = [(r["tokens"], r[val_key]) for r in run.validations if val_key and r["tokens"] > 0]
    if points:
        style = "o-" if len(points) > 2 else "o"  # a line between two would look like a decline
        axes.plot(*zip(*points), style, markersize=3, linewidth=1.2, label="validation")
        axes.legend(fontsize="small", frameon=False)
    axes.set_title(", ".join(filter(None, (title, unit))), fontsize="medium")
    axes.set_xlabel("tokens")
    if last > 2 and 0 < tokens[0] < tokens[-1]:
        axes.set_xscale("log", subs=[])
        marks = (1, 2, 5) if tokens[-1] < 2000 * tokens[0] else (1,)
        axes.xaxis.get_major_locator().set_params(subs=marks)
    if val_key is None:  # a loss ends far from 0, and from 0 its end would look flat
        axes.set_ylim(0, None)


def smooth(values) -> list[float]:
    """Moving average of the values, over about the last 20, or a tenth of those until then."""
    average, averages = values[0], []
    for n, value in enumerate(values):
        average += max(0.05, 1 / (1 + n / 10)) * (value - average)
        averages.append(average)
    return averages


def draw_compared(runs: list[Run], common: int) -> bytes:
    """Validation bits per byte over tokens and over training time."""
    is_long = max(run.seconds_at(run.tokens) for run in runs) > 2 * 3600
    unit_s, unit = (3600, "hours") if is_long else (60, "minutes")

    def draw(axes, by_time: bool) -> None:
        for n, run in enumerate(runs):
            # not the untrained model's value: it would squeeze the scale for all the others
            trained = [(r["tokens"], r["val_bpb"]) for r in run.validations if r["tokens"]]
            x = [run.seconds_at(tokens) / unit_s if by_time else tokens for tokens, _ in trained]
            if run.first_step == 1 or not by_time:
                style = dict(marker="o", markersize=3, color=f"C{n}", label=label(run.dir))
                axes.plot(x, [bpb for _, bpb in trained], linewidth=1.4, **style)
        axes.set(xlabel=f"{unit} of training" if by_time else "tokens", xlim=(0, None))

    def over_tokens(axes) -> None:
        draw(axes, by_time=False)
        axes.axvline(common, color="0.6", linewidth=0.8, linestyle=":", label="compared here")
        axes.set_ylabel("validation, bits per byte")
        axes.legend(frameon=False)

    return paint("png", (11, 4.5), over_tokens, lambda axes: draw(axes, by_time=True))


# --------------------------------------------------------------------------- exams


def panels_of_exams(run: Run) -> list[tuple[str, Callable]]:
    """(title, panel) of each exam (CORE included) that eval.py gave the run's checkpoints."""
    exams: dict[tuple, list[dict]] = {}
    for r in run.scores():
        exams.setdefault((r["task"], r.get("mode"), r.get("shots") or 0, r["n"]), []).append(r)
    return [(plain(r[0]["task"]), lambda axes, r=r: draw_exam(axes, r)) for r in exams.values()]


def draw_exam(axes, records: list[dict]) -> None:
    """The score over the checkpoints, with its standard error, a line for each norm."""
    r = records[-1]
    deviation = r.get("chance_sd") or math.sqrt(r["chance"] * (1 - r["chance"]) / r["n"])
    low, high = (r["chance"] + side * GUESSING * deviation for side in (-1, 1))
    axes.axhspan(low, high, color="black", alpha=0.1)
    axes.axhline(r["chance"], color="0.5", linewidth=0.8, linestyle=":", label="guessing")
    for norm in [*dict.fromkeys(r.get("norm") or "" for r in records)][-MOST:]:
        latest = {r["step"]: r for r in records if (r.get("norm") or "") == norm}
        own = [latest[step] for step in sorted(latest)]
        points = [(r["tokens"], r.get("core", r.get("accuracy")), r["stderr"]) for r in own]
        style = dict(marker="o", markersize=3, linewidth=1.2)
        axes.errorbar(*zip(*points), label=label(norm) or "score", **style)
    if r.get("gpt2_xl") is not None:
        axes.axhline(r["gpt2_xl"], color="tab:red", linewidth=0.8, label="GPT-2 XL")
    kind = ", ".join(filter(None, (r["task"], r.get("mode"))))
    axes.set_title(f"{label(kind)}: {r['n']:,} questions", fontsize="medium")
    axes.set_xlabel("tokens")
    axes.legend(fontsize="small", frameon=False)
