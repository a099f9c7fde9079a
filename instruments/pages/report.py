"""A run on one page, and several runs in one picture: `python eval.py report`, `... compare A B`.

Reads what a run left in its folder (records.py) and the manifest of its data. `write` makes
RUN_DIR/loss.png and report.html, which needs no other file and no network; `compare` draws
compare.png and prints a table. train.py calls `update` at each validation, and `write` when a run
ends; eval.py calls the rest. Next: report.html, the template.
"""

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader

from config import Count, Dtype, UsageError
from instruments.pages import curves, positions
from instruments.pages.records import PAUSES, Run, is_sample, number, plain, slow_steps
from instruments.talk.sample import SampleConfig, continuations, find_prompts
from machinery import checkpoint, disk
from machinery.log import duration, read_jsonl, short
from machinery.trained import EvalConfig, is_tuned, open_tokenizer
from tokenizer import Tokenizer

SAMPLE_TOKENS, SAMPLE_SHOWN = 40, 72  # at a validation: tokens drawn, characters on the screen


@dataclass(frozen=True)
class ReportConfig:
    """A page on a run, RUN_DIR/report.html, with samples of its checkpoints."""

    run_dir: str = ""
    """Folder of the run; empty: runs/PRESET."""
    data_dir: str = ""
    """Data folder; empty: the one that the run was trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    dtype: Dtype = "auto"
    """Dtype of the computation; auto: bf16 where the hardware has it."""
    prompt: tuple[str, ...] = ()
    """Texts to continue; empty: the preset's own."""
    max_new_tokens: Count = 60
    """Tokens to add."""
    usd_per_hour: float = 0.0
    """Price of one GPU (of the machine, if it has none); 0: as train.py was told, if it ran on a
    GPU."""


# ------------------------------------------------------------------------------------ the page


def write(run_dir: str | Path, usd_per_hour: float = 0.0) -> Path:
    """Write RUN_DIR/loss.png and report.html; returns the path of the page. usd_per_hour: of one
    GPU, or of a machine without one; 0: as the run was told, if it was on GPUs."""
    run = Run(run_dir)
    pictures, loss_png = curves.draw_run(run)
    starts = table_of_starts(run, usd_per_hour)
    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html")
    html = page.render(
        title=f"Run {run.dir.resolve().name}",
        result=result(run, starts[-1]["cost"] if starts else ""),
        images=[base64.b64encode(png).decode() for png in pictures],
        positions=positions.rows(run.dir),
        starts=starts,
        data=data_facts(run),
        configuration=[(key, plain(value)) for key, value in run.config.items()],
        samples=run.samples,
        short=short,
    )
    disk.write_text(run.dir / "report.html", html + "\n")
    if loss_png:
        disk.write_bytes(run.dir / "loss.png", loss_png)
    return run.dir / "report.html"


def result(run: Run, cost: str) -> list[tuple[str, str]]:
    """How far the run came, what it reached, how fast, and what it cost: (name, text) each."""
    planned = run.config.get("steps")
    of = f" of {planned:,}" if number(planned) else ""
    last = run.steps[-1] if run.steps else {"step": 0}
    skipped = f", {run.skipped} skipped" if run.skipped else ""
    rows = [
        ("state", f"{run.state}: {run.error}" if run.error else run.state),
        ("written", time.strftime("%Y-%m-%d %H:%M:%S")),
        ("steps", f"{last['step']:,}{of}{skipped}"),
        ("tokens", f"{run.tokens:,}"),
    ]
    by_bpb = sorted(run.validations, key=lambda r: r["val_bpb"])
    for name, r in zip(("validation", "best"), [*run.validations[-1:], *by_bpb[:1]]):
        on = f", on {r['val_rows']:,} rows" if r.get("val_rows") else ""
        rows.append((name, figures(r, "val") + on))
    if r := run.whole_validation:
        rows.append((f"on all {r['val_rows']:,} rows", figures(r, "full_val")))
    rows += by_source(run)
    if not run.steps:
        return rows
    used = "{:.2f} TFLOP/s full, {:.2f} causal", "tflops_full", "tflops_causal"
    if last.get("mfu_full") is not None:
        used = "mfu {:.1%} full, {:.1%} causal", "mfu_full", "mfu_causal"
    speed = used[0].format(*map(run.median, used[1:]))
    rows.append(("speed", f"{short(run.median('tokens_per_s'))} tok/s, {speed}"))
    rows += slow_steps(run.processes())
    rows.append(("training", duration(run.seconds_at(run.tokens))))
    return rows + ([("cost", cost)] if cost else [])


def figures(r: dict, kind: str) -> str:
    bpb, nats = r[f"{kind}_bpb"], r[f"{kind}_loss"]
    return f"{bpb:.4f} bits per byte, {nats:.4f} nats per token, at step {r['step']:,}"


def by_source(run: Run) -> list[tuple[str, str]]:
    """(name, text) of each source at the last validation, and on all rows if that is done; nothing
    for a single source, whose number is that of the whole."""
    last = run.validations[-1] if run.validations else {}
    now = last.get("val_bpb_by_source") or {}
    full = (run.whole_validation or {}).get("full_val_bpb_by_source") or {}
    rows = []
    for name in now if len(now) > 1 else ():
        text = f"{now[name]:.4f} bits per byte at step {last['step']:,}"
        text += f", {full[name]:.4f} on all rows" if name in full else ""
        rows.append((f"source {name}", text))
    return rows


def table_of_starts(run: Run, usd_per_hour: float) -> list[dict[str, str]]:
    """A row for each process that trained, and a row of sums: when, on what, which steps, its time
    with set-up and repeated steps, how much of that was no training, its price, its command."""
    processes, rows = run.processes(), []
    for p in processes:
        price = usd_per_hour or (p["on_gpu"] and p.get("usd_per_hour")) or 0.0
        n_gpus = p["world_size"] if p["on_gpu"] else 1  # without one, it is the machine's price
        p["usd"] = p["seconds"] / 3600 * price * n_gpus
        begin = "?" if p["begin"] is None else f"{p['begin']:,}"
        row = {
            "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(p["time"])),
            "on": f"{p['world_size']} x {p['device']}",
            "steps": f"{begin} to {p['end']:,}",
        }
        rows.append(row | times_and_cost(p) | {"command": p["command"]})
    if not rows:
        return []
    sums = {key: sum(p[key] for p in processes) for key in ("seconds", *PAUSES, "usd")}
    total = {"began": "all", "on": "", "steps": ""} | times_and_cost(sums)
    return [*rows, total | {"command": ""}]


def times_and_cost(p: dict) -> dict[str, str]:
    names = zip(("seconds", *PAUSES), ("time", "validation", "saving", "pages"))
    cost = f"${p['usd']:,.2f}" if p["usd"] else ""
    return {name: duration(p[key]) for key, name in names} | {"cost": cost}


def data_facts(run: Run) -> list[tuple[str, str]]:
    """Where the data is, its sources, and how much of each there is."""
    if not (manifest := run.manifest()):
        return [("data", "the folder that the run was trained on is gone, or has changed")]
    rows = [("folder", str(manifest.dir))]
    rows += [(f"source {s['name']}", plain(s.get("spec"))) for s in manifest.tree["sources"]]
    for split, name in product(("train", "val"), manifest.sources):
        facts = manifest.tree["splits"][split][name]
        sizes = [(key, facts.get(key)) for key in ("documents", "bytes", "tokens", "rows")]
        text = ", ".join(f"{size:,} {key}" for key, size in sizes if number(size))
        rows.append((f"{split}, {name}", text))
    return rows


# -------------------------------------------------------------------------------- several runs


def compare(argv: list[str]) -> int:
    """`eval.py compare RUN RUN ...`: draw compare.png beside the first run; print the table."""
    print(compared(argv))
    return 0


def compared(folders: list[str]) -> str:
    """The table, what else differs, and the path of the picture, which it draws."""
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
        figures = f"{bpb:.4f}", f"{difference:+.4f}", f"{best:.4f}"
        speed = short(run.median("tokens_per_s"))
        took = f"n/a, begins at step {run.first_step:,}"
        if run.first_step == 1:
            took = duration(run.seconds_at(common))
        rows.append((plain(run.dir), short(run.tokens), *figures, speed, took))
    lines = [*table(rows), "", *differences(runs)]
    path = runs[0].dir.parent / "compare.png"
    try:
        disk.write_bytes(path, curves.draw_compared(runs, common))
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


# ---------------------------------------------------------------------------------- the samples


def sample_and_write(config: ReportConfig, load_model: Callable) -> None:
    """`eval.py report`: sample from the checkpoints that have no samples yet; then write the page.
    load_model: EvalConfig -> (model, trainer.json)."""
    run = Run(config.run_dir)  # refuses a folder that is not a run's
    paths = checkpoint.checkpoints(run.dir / "checkpoints")  # the newest first
    where = dict(data_dir=config.data_dir, device=config.device, dtype=config.dtype)
    models = [EvalConfig(config.run_dir, str(path), **where) for path in paths]
    prompts = find_prompts(config.prompt, run.dir.resolve().name)
    for which in reversed(models):
        take_samples(which, load_model, prompts, config.max_new_tokens)
    if models:
        positions.measure(models[0], load_model)
    print(write(config.run_dir, config.usd_per_hour))


def take_samples(config: EvalConfig, load_model: Callable, prompts: tuple[str, ...], n: int):
    """Continue those prompts that a checkpoint has not continued yet, by n tokens each."""
    run_dir, step = Path(config.run_dir), checkpoint.step_of(Path(config.checkpoint))
    samples = read_jsonl(run_dir / "samples.jsonl", is_sample)
    done = {r["prompt"] for r in samples if r["step"] == step and not r.get("live")}
    if not (missing := [prompt for prompt in prompts if prompt not in done]):
        return
    try:
        model, trainer = load_model(config)
        tokenizer = open_tokenizer(config, trainer)
    except positions.NO_MODEL as error:
        print(f"no samples of {config.checkpoint}: {error}")
        return
    for prompt in missing:
        text = draw(model, tokenizer, prompt, n, is_tuned(trainer))
        record(run_dir, step, trainer["tokens"], prompt, text)


def record(run_dir: Path, step: int, tokens: int, prompt: str, text: str, **more) -> None:
    line = {"step": step, "tokens": tokens, "prompt": prompt, "text": text, **more}
    disk.append(run_dir / "samples.jsonl", json.dumps(line) + "\n")


def draw(model, tokenizer, prompt: str, max_new_tokens: int, tuned: bool) -> str:
    config = SampleConfig(max_new_tokens=max_new_tokens)
    return continuations(model, tokenizer, prompt, tuned, config)[0][0]


def update(run, step: int) -> str:
    """While a run trains, after the validation of a step: add a sample of the raw model to
    samples.jsonl, and write the page (at the end train.py does). Returns what the model wrote, for
    the screen. run: train.py's."""
    folder = run.log.run_dir
    if run.plan.sharded:  # a forward pass needs all ranks
        line = "no samples of sharded weights while it trains: python eval.py report draws them"
    else:
        tokenizer, prompt = Tokenizer.load(run.manifest.tokenizer_file()), run.preset.prompts[0]
        text = draw(run.model, tokenizer, prompt, SAMPLE_TOKENS, bool(run.manifest.marks))
        record(folder, step, step * run.plan.tokens_per_step, prompt, text, live=True)
        line = f"it writes {text[:SAMPLE_SHOWN]!r}"
    if step < run.plan.steps:
        write(folder)
    return f"step {step:,} | {line}"
