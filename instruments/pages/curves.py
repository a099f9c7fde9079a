"""The pictures of a run's page, and of several runs.

Draws what run_folder.py has checked, in the style of picture.py. Next: report.py puts them on the
page.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from instruments.pages import picture
from instruments.pages.run_folder import RunFolder, one_line
from machinery.screen import short

PANELS = (  # title, key of the training records, key of the validations
    ("bits per byte", "bpb", "val_bpb"),
    ("loss, nats per token", "loss", "val_loss"),
    ("gradient norm", "norm", None),
    ("learning rate, factor of its peak", "lr", None),
    ("speed, tokens per second", "tokens_per_s", None),
    ("waiting for data, ms per step", "data_wait_ms", None),
)
MARKERS = "os^Dv<>p"  # told apart without colours


def paint(title: str, height: float, *panels: Callable) -> str:
    """An SVG of panels, one below the other, each drawn by a function of its axes; as wide as a
    telephone, where it can be read."""
    figure = picture.figure(4.6, height)
    for axes, draw in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels):
        axes.grid()
        draw(axes)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_view_interval()[1] >= 2000:
                axis.set_major_formatter(lambda x, _: short(x))
    return picture.svg(figure, title)


def draw_run(run: RunFolder) -> list[str]:
    """The SVGs of the page; none before a step."""
    return [
        paint(f"{panel[0]}, over tokens", 2.9, partial(draw_steps, run, *panel))
        for panel in PANELS
        if run.steps
    ]


def draw_steps(run: RunFolder, title, key, val_key, axes) -> None:
    """One quantity of the steps against the tokens trained on, which begin at the first step."""
    tokens = np.array([line.tokens for line in run.steps], float)
    values = np.array([getattr(line, key) for line in run.steps], float)
    shown = np.unique(np.geomspace(1, len(tokens), 600).round().astype(int)) - 1
    if val_key or key == "norm":  # it is noisy
        axes.plot(tokens[shown], values[shown], color="silver", linewidth=0.6)
        values = np.array(smooth(values))
    axes.plot(tokens[shown], values[shown], label="training")
    points = [
        (line.tokens, getattr(line, val_key))
        for line in run.validations
        if val_key and line.tokens > 0
    ]
    if points:
        axes.plot(*zip(*points), "o-", markersize=3, label="validation")
        axes.legend()
    axes.set(title=title, xlabel="tokens")
    if 0 < tokens[0] < tokens[-1]:
        axes.set_xscale("log")
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


def draw_compared(runs: list[RunFolder], common: int) -> str:
    """Validation bits per byte over tokens and over training time; below them, which line is which
    run."""

    def draw(axes, by_time=False):
        for n, run in enumerate(runs):
            # without the untrained model's value, which would squeeze the scale for all the others
            tokens, bpb = zip(*run.curve)
            x = [run.seconds_at(at) / 60 for at in tokens] if by_time else tokens
            if run.first_step == 1 or not by_time:
                axes.plot(
                    x,
                    bpb,
                    marker=MARKERS[n % len(MARKERS)],
                    markersize=4,
                    color=f"C{n}",
                    label=one_line(run.dir)[-50:].replace("$", r"\$"),  # as it begins a formula
                )
        axes.set(xlabel="minutes of training" if by_time else "tokens", xlim=(0, None))
        if not by_time:
            axes.axvline(common, color="gray", linewidth=0.8, linestyle=":", label="compared here")
            axes.set_title("validation, bits per byte")
            axes.figure.legend(loc="outside lower left")

    return paint("bits per byte", 5.6 + 0.2 * len(runs), draw, partial(draw, by_time=True))
