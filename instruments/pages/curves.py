"""The pictures of a run's page, and of several runs.

Draws what records.py has checked, as SVGs in the page's colours or as PNGs. Next: report.py puts
them on the page.
"""

import io
import re
from collections.abc import Callable

import numpy as np

from instruments.pages.records import RunFolder, plain
from machinery.log import short

PANELS = (  # title, key of the training records, key of the validations, is it noisy?
    ("bits per byte", "bpb", "val_bpb", True),
    ("loss, nats per token", "loss", "val_loss", True),
    ("gradient norm", "norm", None, True),
    ("learning rate, factor of its peak", "lr", None, False),
    ("speed, tokens per second", "tokens_per_s", None, False),
    ("waiting for data, ms per step", "data_wait_ms", None, False),
)
# matplotlib's -> the page's.
COLOURS = {"#000000": "currentColor", "#1f77b4": "var(--first)", "#ff7f0e": "var(--second)"}


def label(text: str) -> str:
    """A text for a picture, where `$` begins a formula."""
    return plain(text)[:60].replace("$", r"\$")


def paint(form: str, size: tuple[float, float], *panels: Callable) -> bytes:
    """Panels side by side, each drawn by a function of its axes. form: png or svg."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: works without a display

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "axes.titlelocation": "left"}):
        figure = Figure(figsize=size, layout="constrained")
        buffer = io.BytesIO()
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
    box = re.search(r'viewBox="([^"]*)"', drawn)[1]
    drawn = drawn.partition("</defs>")[2]
    drawn = re.sub(r'(?<=<g) id="[^"]*"| clip-path="[^"]*"|font-family: [^;"]*; ', "", drawn)
    drawn = re.sub(r' d="[^"]*"', lambda d: re.sub(r"(\.\d)\d+|\n", r"\1", d[0]), drawn)
    for colour, own in COLOURS.items():
        drawn = drawn.replace(colour, own)
    return box, drawn.partition("<defs>\n  <clipPath")[0].removesuffix("</svg>")


def draw_run(run: RunFolder) -> tuple[list[tuple[str, str, str]], bytes]:
    """(title, viewBox, SVG) of each picture of the page; and loss.png. Nothing before a step."""
    if not run.steps:
        return [], b""
    waits = run.median("data_wait_ms") >= 10 * run.median("step_s")  # 1% of a step
    panels = PANELS if waits else PANELS[:-1]
    pictures = [(p[0], *svg_of(lambda axes, p=p: draw_steps(axes, run, *p))) for p in panels]
    return pictures, paint("png", (6, 4), lambda axes: draw_steps(axes, run, *panels[0]))


def draw_steps(axes, run: RunFolder, title, key, val_key, is_noisy) -> None:
    """One quantity of the steps against the tokens trained on, which begin at the first step."""
    tokens = np.array([line.tokens for line in run.steps], float)
    values = np.array([getattr(line, key) for line in run.steps], float)
    last = len(tokens)
    shown = np.unique(np.geomspace(1, last, 600).round().astype(int)) - 1
    if is_noisy:
        axes.plot(tokens[shown], values[shown], color="black", alpha=0.2, linewidth=0.6)
        values = np.array(smooth(values))
    axes.plot(tokens[shown], values[shown], linewidth=1.6, label="training")
    scored = [line for line in run.validations if val_key and line.tokens > 0]
    points = [(line.tokens, getattr(line, val_key)) for line in scored]
    if points:
        style = "o-" if len(points) > 2 else "o"  # a line between two would look like a decline
        axes.plot(*zip(*points), style, markersize=3, linewidth=1.2, label="validation")
        axes.legend(fontsize="small", frameon=False)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("tokens")
    if last > 2 and 0 < tokens[0] < tokens[-1]:
        axes.set_xscale("log", subs=[])
        marks = (1, 2, 5) if tokens[-1] < 2000 * tokens[0] else (1,)
        axes.xaxis.get_major_locator().set_params(subs=marks)
    if val_key is None:  # a loss ends far from 0, and from 0 its end would look flat
        axes.set_ylim(0, None)


def smooth(values) -> list[float]:
    """Moving average of the values, over about the last 20, or a tenth of those until then."""
    average = values[0]
    averages = []
    for n, value in enumerate(values):
        average += max(0.05, 1 / (1 + n / 10)) * (value - average)
        averages.append(average)
    return averages


def draw_compared(runs: list[RunFolder], common: int) -> bytes:
    """Validation bits per byte over tokens and over training time."""
    is_long = max(run.seconds_at(run.tokens) for run in runs) > 2 * 3600
    unit_s, unit = (3600, "hours") if is_long else (60, "minutes")

    def draw(axes, by_time: bool) -> None:
        for n, run in enumerate(runs):
            # not the untrained model's value: it would squeeze the scale for all the others
            trained = [(line.tokens, line.val_bpb) for line in run.validations if line.tokens]
            x = [run.seconds_at(tokens) / unit_s if by_time else tokens for tokens, _ in trained]
            if run.first_step == 1 or not by_time:
                axes.plot(
                    x,
                    [bpb for _, bpb in trained],
                    linewidth=1.4,
                    marker="o",
                    markersize=3,
                    color=f"C{n}",
                    label=label(run.dir),
                )
        axes.set(xlabel=f"{unit} of training" if by_time else "tokens", xlim=(0, None))

    def over_tokens(axes) -> None:
        draw(axes, by_time=False)
        axes.axvline(common, color="0.6", linewidth=0.8, linestyle=":", label="compared here")
        axes.set_ylabel("validation, bits per byte")
        axes.legend(frameon=False)

    return paint("png", (11, 4.5), over_tokens, lambda axes: draw(axes, by_time=True))
