"""A run on one page, and several runs in one picture: `python eval.py report`, `... compare A B`.

Reads what a run left in its folder (metrics.jsonl, config.json, status.json, samples.jsonl) and the
manifest of its data. `write` makes RUN_DIR/loss.png, report.md and report.html, which needs no
other file; `compare` draws compare.png and returns the table. A run may have been killed in the
middle of a line, resumed, or never validated. train.py calls `update` at each validation, and
`write` when a run ends; eval.py calls the rest.
"""

import base64
import io
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Literal

import numpy as np

from config import READ_BY, Count, UsageError
from instruments import curves, positions, watch
from machinery import checkpoint, disk, shards
from machinery.errors import CheckpointError, DataError
from machinery.log import duration, read_jsonl, short
from machinery.trained import EvalConfig, is_tuned, open_data, open_tokenizer
from preparation.chat import prompt_ids
from tokenizer import Tokenizer

pages: dict[Path, tuple[float, float]] = {}  # run -> when its page was written, in what time (s)
SHARE = 1 / 20  # of the time that the pages of a running run may take
SAMPLE_TOKENS, SAMPLE_SHOWN = 40, 72  # at a validation: tokens drawn, characters on the screen
ELSEWHERE = "copy the run to where you may write"
PAUSES = ("eval_s", "save_s", "report_s")
HASHES = ("data_fingerprint", "tokenizer_sha256")
CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1000px;
  margin: 0 auto; padding: 0 1em 2em; }
h2 { border-bottom: 1px solid #ddd; margin: 1.5em 0 .4em; }
.row { display: flex; flex-wrap: wrap; column-gap: 1em; padding: .2em 0; break-inside: avoid; }
.row b { flex: 0 0 10em; font-weight: 600; }
.row span { flex: 1 1 12em; overflow-wrap: anywhere; }
.Configuration { columns: 18em; column-gap: 2em; }
.Configuration span { flex: 1 1 4em; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr));
  gap: .8em; }
.curves img { width: 100%; display: block; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4; padding: .7em;
  margin: .3em 0 1em; }
"""


@dataclass(frozen=True)
class ReportConfig:
    """A page on a run, RUN_DIR/report.html and report.md, with samples of its checkpoints."""

    run_dir: str = ""
    """Folder of the run; empty: runs/PRESET."""
    data_dir: str = ""
    """Data folder; empty: the one that the run was trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the computation; auto: bf16 where the hardware has it."""
    prompt: tuple[str, ...] = ()
    """Texts to continue; empty: the beginnings of some held-out rows."""
    max_new_tokens: Count = 60
    """Tokens to add."""
    usd_per_hour: float = 0.0
    """Price of one GPU (of the machine, if it has none); 0: as train.py was told, if it ran on a
    GPU."""


STEP = "step tokens loss bpb lr norm time step_s tokens_per_s data_wait_ms tflops_full"
NUMBERS = {  # what tells a kind of line, by its name in it -> the numbers that are read of it
    "loss": STEP.split(),
    "val_bpb": ["step", "tokens", "val_bpb", "val_loss"],
    "full_val_bpb": ["step", "full_val_bpb", "full_val_loss", "val_rows"],
    "skipped": ["step", "tokens"],
    "text": ["step", "tokens"],  # a sample
}


def is_whole(line: dict) -> bool:
    """Whether a line of metrics.jsonl or samples.jsonl has all that a report reads of it."""
    if isinstance(start := line.get("start"), dict):
        return {"time", "command", "device", "on_gpu", "world_size", "data_dir"} <= start.keys()
    kind = next((kind for kind in NUMBERS if kind in line), None)
    return bool(kind) and all(isinstance(line.get(name), int | float) for name in NUMBERS[kind])


class Run:
    """What a run folder says. steps, validations: records of metrics.jsonl, in order."""

    def __init__(self, folder: str | Path):
        self.dir = Path(folder)
        if not (self.dir / "metrics.jsonl").exists():
            there = sorted(str(p.parent) for p in self.dir.parent.glob("*/metrics.jsonl"))
            others = f"there are {', '.join(there)}" if there else "train one first: train.py"
            raise UsageError(f"{self.dir} is not the folder of a run (no metrics.jsonl); {others}")
        records = read_jsonl(self.dir / "metrics.jsonl", is_whole)
        self.steps = [r for r in records if "loss" in r]
        self.validations = [r for r in records if "val_bpb" in r]
        self.whole_validation = next((r for r in records[::-1] if "full_val_bpb" in r), None)
        self.skipped = sum("skipped" in r for r in records)
        self.tokens = max((r["tokens"] for r in records if "tokens" in r), default=0)
        samples = read_jsonl(self.dir / "samples.jsonl", is_whole)
        self.samples = sorted(thinned(samples), key=lambda r: r["step"])
        self.config = read_json(self.dir / "config.json")
        self.status = {"state": "unknown"} | read_json(self.dir / "status.json")
        self.starts = [r["start"] for r in records if "start" in r]
        if self.starts:  # they say which weights it began from, on how much text it is scored
            self.config["init_from"] = self.starts[0].get("init_from")
            sizes = dict.fromkeys(start.get("eval_tokens") for start in self.starts)
            self.config["eval_tokens"] = ", then ".join(map(str, sizes))

    @property
    def is_running(self) -> bool:
        """As far as is known: a run that was killed could not say so."""
        return self.status["state"] == "running"

    @property
    def first_step(self) -> int:
        """1, unless it was begun from a checkpoint of another run."""
        return self.steps[0]["step"] if self.steps else 1

    def seconds_at(self, tokens: float) -> float:
        """Seconds of training up to `tokens`, without validation, saving, time between starts."""
        done = [0, *(r["tokens"] for r in self.steps)]
        return float(np.interp(tokens, done, [0, *accumulate(r["step_s"] for r in self.steps)]))

    def speed(self) -> float:
        """Median tokens per second, as the meter gave it; the first step compiles."""
        return statistics.median([r["tokens_per_s"] for r in self.steps[1:] or self.steps] or [0])

    def processes(self) -> list[dict]:
        """The starts that trained, each with `begin` and `end` (steps), `seconds`, and its pauses;
        [] for a run of a version that wrote none."""
        found = []
        for start, after in zip(self.starts, [*self.starts[1:], {}]):
            own = [r for r in self.steps if start["time"] <= r["time"] < after.get("time", np.inf)]
            # Lines of steps that were done again are gone: the next start knows how far it came.
            last = own[-1] if own else {"time": start["time"]}
            if after.get("last_time", 0) > last["time"]:
                last = last | {"time": after["last_time"], "step": after["last_step"]}
            if "step" in last:
                facts = {key: last.get(key, 0) for key in PAUSES}
                facts |= dict(begin=own[0]["step"] - 1 if own else None, end=last["step"])
                found.append(start | facts | {"seconds": last["time"] - start["time"]})
        return found

    def manifest(self) -> shards.Manifest | None:
        """Of the data that the run was trained on; None if it is gone or has changed."""
        folders = [start["data_dir"] for start in self.starts]
        for path in checkpoint.checkpoints(self.dir / "checkpoints"):
            with suppress(CheckpointError):
                folders.append(checkpoint.read_trainer(path)["data_dir"])
        for folder in dict.fromkeys(folders):
            with suppress(UsageError, DataError):
                manifest = shards.Manifest.load(folder)
                if manifest.fingerprint == self.config.get("data_fingerprint"):
                    return manifest
        return None


def thinned(samples: list[dict], most: int = 12) -> list[dict]:
    """The samples; of those that a run drew while it trained, one a step, the last and at most
    `most` in all, evenly spread."""
    live = [*{r["step"]: r for r in samples if r.get("live")}.values()]
    every = math.ceil(len(live) / most)
    return [r for r in samples if not r.get("live")] + live[::-1][:: max(every, 1)]


def read_json(path: Path) -> dict:
    """What a JSON file says; {} if it is not there or, with a word, damaged."""
    try:
        return disk.read_json(path) if path.exists() else {}
    except DataError as error:
        print(f"warning: {error}; the report goes without it")
        return {}


# ------------------------------------------------------------------------------------ the page


def write(run_dir: str | Path, usd_per_hour: float = 0.0) -> Path:
    """Write RUN_DIR/loss.png, report.md and report.html; returns the last one's path. usd_per_hour:
    of one GPU, or of a machine without one; 0: as the run was told, if it was on GPUs."""
    run = Run(run_dir)
    title = f"Run {run.dir.resolve().name}"
    for_page, loss_png = draw_curves(run)
    sections = {
        "Result": result(run, usd_per_hour),
        "Curves": [],
        "Loss by position": positions.rows(run.dir),
        "Starts": [describe(process) for process in run.processes()],
        "Data": data_facts(run),
        "Configuration": [(k, plain(v)) for k, v in run.config.items() if is_read(k, run.config)],
    }
    text = [f"# {title}"]
    page = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)}</title><style>{CSS}</style><h1>{escape(title)}</h1>",
    ]
    for name, rows in sections.items():
        if name == "Curves" and for_page:
            images = (base64.b64encode(png).decode() for png in for_page)
            tags = (f"<img alt='' src='data:image/png;base64,{image}'>" for image in images)
            page.append(f"<h2>{name}</h2><div class=curves>{''.join(tags)}</div>")
            text.append("The curves are in report.html.")
        elif rows:
            cells = (f"<b>{escape(str(a))}</b><span>{escape(str(b))}</span>" for a, b in rows)
            lines = (f"<div class=row>{c}</div>" for c in cells)
            page.append(f"<h2>{name}</h2><div class={name}>{''.join(lines)}</div>")
            text.append(f"## {name}\n\n" + "\n".join(f"- {a}: {b}" for a, b in rows))
    for i, r in enumerate(run.samples):
        when = f"step {r['step']:,}, {short(r['tokens'])} tokens: {r['prompt']!r}"
        page += [
            *([] if i else ["<h2>Samples</h2>"]),
            f"{escape(when)}<pre>{escape(r['text'])}</pre>",
        ]
        text += [*([] if i else ["## Samples"]), when]
        text.append("\n".join(f"    {line}" for line in r["text"].splitlines()))
    with disk.writable(run.dir, ELSEWHERE):
        disk.write_text(run.dir / "report.md", "\n\n".join(text) + "\n")
        disk.write_text(run.dir / "report.html", "\n".join(page) + "\n")
        if loss_png:
            with disk.replacing(run.dir / "loss.png") as file:
                file.write(loss_png)
    return run.dir / "report.html"


def is_read(name: str, options: dict) -> bool:
    """Whether the run reads an option: muon ignores `lr`, say."""
    other, choices, _ = READ_BY.get(name, ("", (None,), ""))
    return name not in HASHES and options.get(other) in choices


def plain(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def result(run: Run, usd_per_hour: float) -> list[tuple]:
    """How far the run came, what it reached, how fast, and what it cost: (name, text) each."""
    planned = run.config.get("steps")
    of = f" of {planned:,}" if planned else ""
    last = run.steps[-1] if run.steps else {"step": 0}
    skipped = f", {run.skipped} skipped" if run.skipped else ""
    goes_on = "; the run goes on, and writes this page again at each validation: reload it"
    rows = [
        ("state", ": ".join(filter(None, (run.status["state"], run.status.get("error"))))),
        ("written", time.strftime("%Y-%m-%d %H:%M:%S") + goes_on * run.is_running),
        ("steps", f"{last['step']:,}{of}{skipped}"),
        ("tokens", f"{run.tokens:,}"),
    ]
    by_bpb = sorted(run.validations, key=lambda r: r["val_bpb"])
    for name, r in zip(("validation", "best"), [*run.validations[-1:], *by_bpb[:1]]):
        figures = f"{r['val_bpb']:.4f} bits per byte, {r['val_loss']:.4f} nats per token"
        on = f", on {r['val_rows']:,} rows" if "val_rows" in r else ""
        rows.append((name, f"{figures}, at step {r['step']:,}{on}"))
    if r := run.whole_validation:
        figures = f"{r['full_val_bpb']:.4f} bits per byte, {r['full_val_loss']:.4f} nats per token"
        rows.append((f"on all {r['val_rows']:,} rows", f"{figures}, at step {r['step']:,}"))
    rows += curves.by_source(run)
    if not run.steps:
        return rows
    share = run.speed() / last["tokens_per_s"]  # of the last window's: all figures are medians
    full, causal = (share * last[f"tflops_{how}"] for how in ("full", "causal"))
    used = f"{full:.2f} TFLOP/s full, {causal:.2f} causal"
    if last.get("mfu_full") is not None:
        used = f"mfu {share * last['mfu_full']:.1%} full, {share * last['mfu_causal']:.1%} causal"
    training = duration(run.seconds_at(run.tokens))
    rows += [("speed", f"{short(run.speed())} tok/s, {used}"), *watch.rows_of(run)]
    rows.append(("training", training))
    if processes := run.processes():
        sums = {k: sum(p[k] for p in processes) for k in ("seconds", *PAUSES)}
        seconds, eval_s, save_s, report_s = (duration(total) for total in sums.values())
        parts = f"of which {eval_s} validation, {save_s} saving and {report_s} reporting"
        text = f"{seconds}, {parts}; includes set-up and repeated steps"
        rows += [("total time", text), *cost(processes, usd_per_hour)]
    return rows


def cost(processes: list[dict], usd_per_hour: float) -> list[tuple]:
    """What the starts cost, each at its own price; nothing where no price is known."""
    dollars, prices = 0.0, []
    for p in processes:
        price = usd_per_hour or (p["usd_per_hour"] if p["on_gpu"] else 0.0)
        n_gpus = p["world_size"] if p["on_gpu"] else 1  # without one, it is the machine's price
        dollars += p["seconds"] / 3600 * price * n_gpus
        prices.append(f"{n_gpus} x ${price:.2f}" if n_gpus > 1 else f"${price:.2f}")
    if not dollars:
        return []
    return [("cost", f"${dollars:,.2f} at {', '.join(dict.fromkeys(prices))} per hour")]


def describe(process: dict) -> tuple[str, str]:
    """A start: when; on what, which steps, how long, by which command."""
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(process["time"]))
    begin = "?" if process["begin"] is None else f"{process['begin']:,}"
    steps = f"step {begin} to {process['end']:,} in {duration(process['seconds'])}"
    on = f"{process['world_size']} x {process['device']}"
    return at, f"{on}, {steps}: {process['command']}"


def data_facts(run: Run) -> list[tuple]:
    """Sources, tokens and packing, and the hashes that say whether two runs saw the same."""
    rows = [("data", "the folder that the run was trained on is gone, or has changed")]
    if manifest := run.manifest():
        tree, rows = manifest.tree, [("folder", manifest.dir)]
        rows += [(f"source {s['name']}", s.get("spec", "")) for s in tree["sources"]]
        for split, by_source in tree["splits"].items():
            for name, facts in by_source.items():
                documents, size, tokens = (
                    facts.get(key, 0) for key in ("documents", "bytes", "tokens")
                )
                packing = facts.get("packing", {})
                text = (
                    f"{documents:,} documents, {size / 1e6:,.2f} MB, {tokens:,} tokens "
                    f"({size / max(1, tokens):.3f} bytes per token), {facts['rows']:,} rows; "
                    f"{packing.get('cuts', 0):,} documents cut, "
                    f"{packing.get('dropped', 0):,} tokens dropped"
                )
                rows.append((f"{split}, {name}", text))
        packing = tree.get("packing", {}).get("policy", "unknown")
        rows.append(("packing", f"{packing}, rows of {manifest.row_len:,} tokens"))
        rows += [(f"reading {name}", text) for name, text in watch.reading(tree)]
        made = tree.get("made", {})
        rows.append(("prepared", f"{made.get('at')}, commit {made.get('commit')}"))
    for key in HASHES:
        rows.append((key, run.config.get(key, "unknown")))
    for path in checkpoint.checkpoints(run.dir / "checkpoints")[:1]:
        with suppress(OSError):
            sha256 = disk.sha256_of(path / checkpoint.MANIFEST)
            rows.append((path.name, f"its MANIFEST.json has sha256 {sha256}"))
    return rows


PANELS = (  # title, unit, key of the training records, key of the validations, is it noisy?
    ("loss", "nats per token", "loss", "val_loss", True),
    ("bits per byte", "bits per byte", "bpb", "val_bpb", True),
    ("learning rate", "factor", "lr", None, False),
    ("gradient norm", "", "norm", None, True),
    ("speed", "tokens per second", "tokens_per_s", None, False),
    ("waiting for data", "ms per step", "data_wait_ms", None, False),
)


def draw_curves(run: Run) -> tuple[list[bytes], bytes]:
    """The PNGs of the page; and loss.png, the first two of them. None of them before the first
    step, or without matplotlib."""
    try:
        from matplotlib.figure import Figure  # no pyplot: works without a display
    except ImportError:
        print("report: no pictures, as matplotlib is not installed")
        return [], b""
    if not run.steps:
        return [], b""
    both = Figure(figsize=(10, 4), layout="constrained")
    for axes, panel in zip(both.subplots(1, 2), PANELS):
        draw_panel(axes, run, *panel)
    figures = [Figure(figsize=(4.6, 2.9), layout="constrained") for _ in PANELS]
    for figure, panel in zip(figures, PANELS):
        draw_panel(figure.subplots(), run, *panel)
    figures += curves.figures(run)
    return [png_of(figure) for figure in figures], png_of(both)


def draw_panel(axes, run: Run, title, unit, key, val_key, is_noisy) -> None:
    """Plot one quantity of the steps against the tokens trained on."""
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
    tidy(axes)
    mfu, speed = run.steps[-1].get("mfu_full"), run.steps[-1]["tokens_per_s"]
    if key == "tokens_per_s" and mfu and mfu < 1:  # else the peak was measured on a busy machine
        scale = axes.secondary_yaxis(
            "right", (lambda y: y * mfu / speed, lambda y: y * speed / mfu)
        )
        scale.set_ylabel("mfu, full convention")
        scale.tick_params(labelsize="small")


def smooth(values) -> list[float]:
    """Exponential moving average of the values, over about the last 20 (decay 0.95)."""
    sums = accumulate(values, lambda total, value: 0.95 * total + value)
    weights = accumulate([1.0] * len(values), lambda total, one: 0.95 * total + one)
    return [total / weight for total, weight in zip(sums, weights)]


def tidy(axes) -> None:
    """A light grid, and ticks like 1.5M."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_view_interval()[1] >= 2000:
            axis.set_major_formatter(lambda x, _: short(x))


def png_of(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    return buffer.getvalue()


# -------------------------------------------------------------------------------- several runs


def compare(folders: list[str]) -> str:
    """Draw compare.png beside the first run; returns the table and the path, to print."""
    if len(folders) < 2:
        raise UsageError(
            "compare needs the folders of two runs or more: python eval.py compare runs/a runs/b"
        )
    runs = [Run(folder) for folder in folders]
    for run in runs:
        if len(run.validations) < 2:
            raise UsageError(
                f"{run.dir} has no validation after its first step yet: let it run on, or compare "
                "other runs"
            )
    common, base = min(run.validations[-1]["tokens"] for run in runs), 0.0
    at = f"bpb at {short(common)}"
    rows = [("run", "tokens", at, "difference", "best until then", "tok/s", "training time")]
    for run in runs:
        known = [(r["tokens"], r["val_bpb"]) for r in run.validations]
        if known[0][0] > common:
            raise UsageError(
                f"{run.dir} begins at {short(known[0][0])} tokens, after another run has ended "
                f"({short(common)}); compare runs that overlap"
            )
        bpb = float(np.interp(common, *zip(*known)))  # a straight line between two validations
        base = base or bpb
        difference = round(bpb - base, 4) or 0.0  # not -0.0000
        best = min(bpb, *(value for tokens, value in known if tokens <= common))
        figures = f"{bpb:.4f}", f"{difference:+.4f}", f"{best:.4f}", short(run.speed())
        took = f"n/a, begins at step {run.first_step:,}"
        if run.first_step == 1:
            took = duration(run.seconds_at(common))
        rows.append((str(run.dir), short(run.tokens), *figures, took))
    by_source = curves.compare_sources(runs, common)
    lines = [*table(rows), "", *(table(by_source) + [""] if by_source else []), *differences(runs)]
    path = runs[0].dir.parent / "compare.png"
    if picture := draw_compared(runs, common):
        try:
            path.write_bytes(picture)
            lines.append(f"picture: {path}")
        except OSError as error:
            lines.append(f"picture: none, as {path} cannot be written ({error.strerror})")
    return "\n".join(lines)


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Its lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def differences(runs: list[Run]) -> list[str]:
    """Each field of the configuration that differs; then how far the figures can be trusted."""
    keys = {key: 0 for run in runs for key in run.config}
    values = {key: [plain(run.config.get(key)) or "none" for run in runs] for key in keys}
    differ = {key: found for key, found in values.items() if len(set(found)) > 1}
    lines = [f"{key}: {', '.join(found)}" for key, found in differ.items()]
    if unknown := [str(run.dir) for run in runs if not run.config]:
        return [f"no config.json in {', '.join(unknown)}: what else differs is not known"]
    advice = "trust a difference only if it is larger than that between two seeds"
    if "data_fingerprint" in differ:
        advice = "warning: the data differ, so the bits per byte are of different text"
    elif "eval_tokens" in differ or any("then" in size for size in values.get("eval_tokens", ())):
        advice = "warning: eval_tokens differ, so the bits per byte are of more or less text"
    elif not differ.keys() - {"seed"}:
        advice = "nothing differs but the seed: the difference above is noise"
    return [*lines, advice]


def draw_compared(runs: list[Run], common: int) -> bytes | None:
    """Validation bits per byte over tokens and over training time; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("compare: no picture, as matplotlib is not installed")
        return None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    is_long = max(run.seconds_at(run.tokens) for run in runs) > 2 * 3600
    for run in runs:
        # not the untrained model's value: it would squeeze the scale for all the others
        trained = [r for r in run.validations if r["tokens"]]
        tokens, bpb = zip(*((r["tokens"], r["val_bpb"]) for r in trained))
        style = dict(marker="o", markersize=3, linewidth=1.4, label=str(run.dir))
        by_tokens.plot(tokens, bpb, **style)
        if run.first_step == 1:
            seconds = map(run.seconds_at, tokens)
            by_time.plot([s / (3600 if is_long else 60) for s in seconds], bpb, **style)
    by_tokens.axvline(common, color="0.6", linewidth=0.8, linestyle=":")
    by_tokens.set(xlabel="tokens", ylabel="validation, bits per byte", xlim=(0, None))
    by_time.set(xlabel=f"{'hours' if is_long else 'minutes'} of training", xlim=(0, None))
    by_tokens.legend(frameon=False)
    for axes in (by_tokens, by_time):
        tidy(axes)
    return png_of(figure)


# ---------------------------------------------------------------------------------- the samples


def sample_and_write(config: ReportConfig, load_model: Callable) -> None:
    """`eval.py report`: sample from the checkpoints that have no samples yet; then write the page.
    load_model: EvalConfig -> (model, trainer.json)."""
    Run(config.run_dir)  # refuses a folder that is not a run's
    take_samples(config, load_model)
    positions.measure(config, load_model)
    print(write(config.run_dir, config.usd_per_hour))


def take_samples(config: ReportConfig, load_model: Callable) -> None:
    """Continue some texts with each checkpoint that has no samples yet: RUN_DIR/samples.jsonl."""
    file, root = Path(config.run_dir) / "samples.jsonl", Path(config.run_dir) / "checkpoints"
    where = dict(data_dir=config.data_dir, device=config.device, dtype=config.dtype)
    drawn = [r for r in read_jsonl(file, is_whole) if not r.get("live")]  # not while it trained
    sampled = {(r["step"], r["prompt"]) for r in drawn}
    for path in reversed(checkpoint.checkpoints(root)):
        done = {prompt for step, prompt in sampled if step == checkpoint.step_of(path)}
        if done.issuperset(config.prompt) and done:
            continue
        which = EvalConfig(run_dir=config.run_dir, checkpoint=str(path), **where)
        try:
            model, trainer = load_model(which)
            tokenizer = open_tokenizer(which, trainer)
            prompts = config.prompt or beginnings(open_data(which, trainer), tokenizer)
        except (UsageError, DataError, CheckpointError) as error:
            print(f"no samples of {path}: {error}")
            continue
        for prompt in [prompt for prompt in prompts if prompt not in done]:
            text = draw(model, tokenizer, prompt, config.max_new_tokens, is_tuned(trainer))
            record = dict(step=trainer["step"], tokens=trainer["tokens"], prompt=prompt, text=text)
            with disk.writable(file, ELSEWHERE), open(file, "a") as f:
                f.write(json.dumps(record) + "\n")


def draw(model, tokenizer, prompt: str, max_new_tokens: int, tuned: bool) -> str:
    """The prompt and how the model continues it, or answers it if it was tuned on conversations;
    with random numbers of its own."""
    import torch

    device, (ids, stop) = model.cos.device, prompt_ids(prompt, tokenizer, tuned)
    draws = dict(generator=torch.Generator(device).manual_seed(0), stop_id=stop)
    out = model.generate(torch.tensor([ids], device=device), max_new_tokens, **draws)  # (1, T + n)
    return prompt + "\n" * tuned + text_of(out[0, len(ids) :].tolist(), tokenizer, stop)


def update(run, step: int) -> str:
    """While a run trains, after the validation of a step: add a sample of the raw model to
    samples.jsonl, and write the page (at the end train.py does), unless pages would then take more
    than SHARE of the time. Returns what the model wrote, for the screen. run: train.py's."""
    folder, trained = run.log.run_dir, run.plan.tokens_before(step)
    if run.plan.sharded:  # a forward pass needs all ranks
        line = "no samples of sharded weights while it trains: python eval.py report draws them"
    else:
        tokenizer, prompt = Tokenizer.load(run.manifest.tokenizer_file()), run.preset.prompts[0]
        training = run.model.training
        text = draw(run.model.eval(), tokenizer, prompt, SAMPLE_TOKENS, bool(run.manifest.marks))
        run.model.train(training)
        record = dict(step=step, tokens=trained, prompt=prompt, text=text, live=True)
        with open(folder / "samples.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        line = f"it writes {text[:SAMPLE_SHOWN]!r}"
    start, (last, took) = time.monotonic(), pages.get(folder, (-math.inf, 0.0))
    if step < run.plan.steps and took <= SHARE * (start - last):
        write(folder)
        end = time.monotonic()
        pages[folder] = end, end - start if step else 0.0  # the first one has no curves
    return f"step {step:,} | {line}"


def beginnings(manifest: shards.Manifest, tokenizer) -> list[str]:
    """The first tokens of three held-out rows; of conversations, their first questions."""
    rows = [manifest.row("val", 0, i).tolist() for i in range(min(3, manifest.rows("val", 0)))]
    if not manifest.marks:
        return [text_of(row[:12], tokenizer, manifest.bos_id) for row in rows]
    user, _, end = manifest.marks
    asked = [row[row.index(user) + 1 :] for row in rows if user in row]
    return [
        text_of(takewhile(lambda i: i != end, ids), tokenizer, manifest.bos_id) for ids in asked
    ]


def text_of(ids: Iterable[int], tokenizer, without: int) -> str:
    """Of the ids that are not `without`."""
    return tokenizer.decode(i for i in ids if i != without)
