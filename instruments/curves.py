"""More of a run's page: bits per byte by source, and the scores of eval.py over its checkpoints.

Reads the validations of metrics.jsonl and the lines that `eval.py choice` appends to eval.jsonl.
An exam's panel has a gray band: where a model that guesses is in 95 of 100 cases. report.py calls
the four functions.
"""

import math

import numpy as np

from machinery.log import read_jsonl, short

GUESSING = 1.96  # standard deviations on each side hold 95% of what guessing gives


def sources_of(record: dict, key: str = "val_bpb_by_source") -> dict[str, float]:
    """Bits per byte by source, as a validation has them; {} of an older version, or damaged."""
    found = record.get(key)
    is_good = isinstance(found, dict) and all(isinstance(x, int | float) for x in found.values())
    return found if is_good else {}


def by_source(run) -> list[tuple[str, str]]:
    """(name, text) of each source at the last validation, and on all rows if that is done; nothing
    for a single source, whose number is that of the whole."""
    last, whole = run.validations[-1:], run.whole_validation or {}
    now, full = sources_of(last[0] if last else {}), sources_of(whole, "full_val_bpb_by_source")
    rows = []
    for name in now if len(now) > 1 else ():
        text = f"{now[name]:.4f} bits per byte at step {last[0]['step']:,}"
        text += f", {full[name]:.4f} on all rows" if name in full else ""
        rows.append((f"source {name}", text))
    return rows


def compare_sources(runs: list, common: float) -> list[tuple[str, ...]]:
    """A table with its head: the bits per byte of each source after `common` tokens, by run; empty
    unless some run has two sources or more."""
    found = [[(r["tokens"], sources_of(r)) for r in run.validations] for run in runs]
    names = list(dict.fromkeys(name for run in found for _, own in run for name in own))
    if len(names) < 2:
        return []
    rows = [(f"bpb by source at {short(common)}", *names)]
    for run, validations in zip(runs, found):
        cells = []
        for name in names:
            known = [(tokens, own[name]) for tokens, own in validations if name in own]
            cells.append(f"{np.interp(common, *zip(*known)):.4f}" if known else "n/a")
        rows.append((str(run.dir), *cells))
    return rows


# ------------------------------------------------------------------------------------- pictures


def figures(run) -> list:
    """A picture of the sources if there are two or more, and one of each exam (of CORE, too) that
    was taken; as matplotlib's figures."""
    trained = [r for r in run.validations if r["tokens"] and len(sources_of(r)) > 1]
    panels = [lambda axes: draw_sources(axes, trained)] if trained else []
    exams: dict[tuple, list[dict]] = {}
    for r in filter(is_score, read_jsonl(run.dir / "eval.jsonl", lambda line: True)):
        exams.setdefault((r["task"], r.get("mode"), r.get("shots", 0), r["n"]), []).append(r)
    panels += [lambda axes, own=own: draw_exam(axes, own) for own in exams.values()]
    drawn = []
    for panel in panels:
        drawn.append(new_figure())
        panel(axes := drawn[-1].subplots())
        axes.set_xlabel("tokens")
        axes.legend(fontsize="small", frameon=False)
        tidy(axes)
    return drawn


def new_figure():
    from matplotlib.figure import Figure

    return Figure(figsize=(4.6, 2.9), layout="constrained")


def is_score(line: dict) -> bool:
    """Whether a line of eval.jsonl is a score that can be drawn."""
    numbers = [line.get(name) for name in ("step", "tokens", "n", "stderr", "chance")]
    numbers.append(value_of(line))
    return isinstance(line.get("task"), str) and all(isinstance(x, int | float) for x in numbers)


def value_of(line: dict) -> float | None:
    """CORE, which is a mean of centered accuracies, or an exam's accuracy."""
    return line.get("core", line.get("accuracy"))


def draw_sources(axes, validations: list[dict]) -> None:
    for name in sources_of(validations[-1]):
        known = [(r["tokens"], sources_of(r)) for r in validations]
        points = [(tokens, own[name]) for tokens, own in known if name in own]
        axes.plot(*zip(*points), marker="o", markersize=3, linewidth=1.2, label=name)
    axes.set_title("validation by source", fontsize="medium", loc="left")
    axes.set_ylabel("bits per byte")


def draw_exam(axes, records: list[dict]) -> None:
    """The score over the checkpoints, with its standard error, a line for each norm."""
    r = records[-1]
    deviation = r.get("chance_sd") or math.sqrt(r["chance"] * (1 - r["chance"]) / r["n"])
    low, high = (r["chance"] + side * GUESSING * deviation for side in (-1, 1))
    axes.axhspan(low, high, color="0.9")
    axes.axhline(r["chance"], color="0.6", linewidth=0.8, linestyle=":", label="guessing")
    for norm in dict.fromkeys(r.get("norm", "") for r in records):
        latest = {r["step"]: r for r in records if r.get("norm", "") == norm}  # of each checkpoint
        own = [latest[step] for step in sorted(latest)]
        points = [(r["tokens"], value_of(r), r["stderr"]) for r in own]
        axes.errorbar(*zip(*points), marker="o", markersize=3, linewidth=1.2, label=norm or "score")
    if "gpt2_xl" in r:
        axes.axhline(r["gpt2_xl"], color="tab:red", linewidth=0.8, label="GPT-2 XL")
    kind = ", ".join(filter(None, (r["task"], r.get("mode"))))
    axes.set_title(f"{kind}: {r['n']:,} questions", fontsize="medium", loc="left")


def tidy(axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")
    axes.xaxis.set_major_formatter(lambda x, _: short(x))
