"""A run on one page, and several runs in one picture: `python eval.py report`, `... compare A B`.

Reads what a run left in its folder (records.py) and the manifest of its data. `write` makes
RUN_DIR/loss.png and report.html, which needs no other file and no network; `compare` draws
compare.png and prints a table. train.py calls `update` at each validation, and `write` when a run
ends; eval.py calls the rest. Next: report.html, the template.
"""

import base64
import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Literal

import numpy as np

from config import Count, UsageError
from instruments.pages import curves, positions, watch
from instruments.pages.records import PAUSES, Run, is_sample, number, plain
from machinery import checkpoint, disk, shards
from machinery.log import duration, read_jsonl, short
from machinery.trained import EvalConfig, is_tuned, open_data, open_tokenizer
from optim import READ_BY
from preparation.chat import prompt_ids
from tokenizer import Tokenizer

pages: dict[Path, tuple[float, float]] = {}  # run -> when its page was written, in what time (s)
SHARE = 1 / 20  # of the time that the pages of a running run may take
SAMPLE_TOKENS, SAMPLE_SHOWN = 40, 72  # at a validation: tokens drawn, characters on the screen
HASHES = ("data_fingerprint", "tokenizer_sha256")


@dataclass(frozen=True)
class ReportConfig:
    """A page on a run, RUN_DIR/report.html, with samples of its checkpoints."""

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


# ------------------------------------------------------------------------------------ the page


def write(run_dir: str | Path, usd_per_hour: float = 0.0) -> Path:
    """Write RUN_DIR/loss.png and report.html; returns the path of the page. usd_per_hour: of one
    GPU, or of a machine without one; 0: as the run was told, if it was on GPUs."""
    from jinja2 import Environment, FileSystemLoader

    run = Run(run_dir)
    pictures, loss_png = curves.draw_run(run)
    starts = table_of_starts(run, usd_per_hour)
    whens = (
        f"step {r['step']:,}, {short(r['tokens'])} tokens: {r['prompt']!r}" for r in run.samples
    )
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
        configuration=[(k, plain(v)) for k, v in run.config.items() if is_read(k, run.config)],
        samples=[{"when": when, "text": r["text"]} for when, r in zip(whens, run.samples)],
    )
    disk.write_text(run.dir / "report.html", html + "\n")
    if loss_png:
        disk.write_bytes(run.dir / "loss.png", loss_png)
    return run.dir / "report.html"


def is_read(name: str, options: dict) -> bool:
    """Whether the run reads an option: muon ignores `lr`, say."""
    chosen = options.get("optimizer"), options.get("schedule")
    by_some = set().union(*READ_BY.values())
    return name not in {*HASHES, *by_some} or any(name in READ_BY.get(c, ()) for c in chosen)


def result(run: Run, cost: str) -> list[tuple[str, str]]:
    """How far the run came, what it reached, how fast, and what it cost: (name, text) each."""
    planned = run.config.get("steps")
    of = f" of {planned:,}" if number(planned) else ""
    last = run.steps[-1] if run.steps else {"step": 0}
    skipped = f", {run.skipped} skipped" if run.skipped else ""
    is_running = run.state == "running"  # as far as is known: a killed run could not say so
    goes_on = "; still running: this page is rewritten at each validation"
    rows = [
        ("state", f"{run.state}: {run.error}" if run.error else run.state),
        ("written", time.strftime("%Y-%m-%d %H:%M:%S") + goes_on * is_running),
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
    share = run.speed() / last["tokens_per_s"]  # of the last window's: all figures are medians
    used = f"{share * last['tflops_full']:.2f} TFLOP/s full, "
    used += f"{share * last['tflops_causal']:.2f} causal"
    if last.get("mfu_full") is not None:
        used = f"mfu {share * last['mfu_full']:.1%} full, "
        used += f"{share * (last.get('mfu_causal') or 0):.1%} causal"
    rows.append(("speed", f"{short(run.speed())} tok/s, {used}"))
    rows += watch.rows_of([process["own"] for process in run.processes()])
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
    processes, rows, dollars = run.processes(), [], 0.0
    for p in processes:
        price = usd_per_hour or (p.get("usd_per_hour") or 0.0 if p["on_gpu"] else 0.0)
        n_gpus = p["world_size"] if p["on_gpu"] else 1  # without one, it is the machine's price
        usd = p["seconds"] / 3600 * price * n_gpus
        dollars += usd
        rate = f"{n_gpus} x ${price:.2f}" if n_gpus > 1 else f"${price:.2f}"
        begin = "?" if p["begin"] is None else f"{p['begin']:,}"
        rows.append(
            {
                "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(p["time"])),
                "on": f"{p['world_size']} x {p['device']}",
                "steps": f"{begin} to {p['end']:,}",
                **times_of(p),
                "cost": f"${usd:,.2f} at {rate} per hour" if usd else "",
                "command": p["command"],
            }
        )
    if not rows:
        return []
    sums = {key: sum(p[key] for p in processes) for key in ("seconds", *PAUSES)}
    total = {"began": "all", "on": "", "steps": "", **times_of(sums)}
    return [*rows, total | {"cost": f"${dollars:,.2f}" if dollars else "", "command": ""}]


def times_of(process: dict) -> dict[str, str]:
    names = zip(("seconds", *PAUSES), ("time", "validation", "saving", "pages"))
    return {name: duration(process[key]) for key, name in names}


def data_facts(run: Run) -> list[tuple[str, str]]:
    """Sources, tokens and packing, and the hashes that say whether two runs saw the same."""
    rows = [("data", "the folder that the run was trained on is gone, or has changed")]
    if manifest := run.manifest():
        tree, rows = manifest.tree, [("folder", str(manifest.dir))]
        rows += [(f"source {s['name']}", s.get("spec", "")) for s in tree["sources"]]
        for split, name in product(("train", "val"), manifest.sources):
            facts = tree["splits"][split][name]
            sizes = [facts.get(key) for key in ("documents", "bytes", "tokens", "rows")]
            if not all(map(number, sizes)):
                continue
            documents, n_bytes, tokens, n_rows = sizes
            text = f"{documents:,} documents, {n_bytes / 1e6:,.2f} MB, {tokens:,} tokens "
            text += f"({n_bytes / max(1, tokens):.3f} bytes per token), {n_rows:,} rows"
            packing = dict_of(facts, "packing")
            cuts, dropped = (packing.get(key, 0) for key in ("cuts", "dropped"))
            rows.append(
                (f"{split}, {name}", f"{text}; {cuts} documents cut, {dropped} tokens dropped")
            )
        policy, made = dict_of(tree, "packing").get("policy", "unknown"), dict_of(tree, "made")
        rows.append(("packing", f"{policy}, rows of {manifest.row_len:,} tokens"))
        rows.append(("prepared", f"{made.get('at')}, commit {made.get('commit')}"))
    rows += [(key, plain(run.config.get(key, "unknown"))) for key in HASHES]
    for path in checkpoint.checkpoints(run.dir / "checkpoints")[:1]:
        with suppress(OSError):
            sha256 = disk.sha256_of(path / checkpoint.MANIFEST)
            rows.append((path.name, f"its MANIFEST.json has sha256 {sha256}"))
    return rows


def dict_of(tree: dict, key: str) -> dict:
    return tree[key] if isinstance(tree.get(key), dict) else {}


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
        figures = f"{bpb:.4f}", f"{difference:+.4f}", f"{best:.4f}", short(run.speed())
        took = f"n/a, begins at step {run.first_step:,}"
        if run.first_step == 1:
            took = duration(run.seconds_at(common))
        rows.append((plain(run.dir), short(run.tokens), *figures, took))
    lines = [*table(rows), "", *differences(runs)]
    path = runs[0].dir.parent / "compare.png"
    if picture := curves.draw_compared(runs, common):
        try:
            disk.write_bytes(path, picture)
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
    Run(config.run_dir)  # refuses a folder that is not a run's
    take_samples(config, load_model)
    positions.measure(config, load_model)
    print(write(config.run_dir, config.usd_per_hour))


def take_samples(config: ReportConfig, load_model: Callable) -> None:
    """Continue some texts with each checkpoint that has no samples yet: RUN_DIR/samples.jsonl."""
    run_dir = Path(config.run_dir)
    samples = read_jsonl(run_dir / "samples.jsonl", is_sample)
    by_hand = [r for r in samples if not r.get("live")]  # not while it trained
    for path in reversed(checkpoint.checkpoints(run_dir / "checkpoints")):
        done = {r["prompt"] for r in by_hand if r["step"] == checkpoint.step_of(path)}
        if done.issuperset(config.prompt) and done:
            continue
        where = dict(data_dir=config.data_dir, device=config.device, dtype=config.dtype)
        which = EvalConfig(run_dir=config.run_dir, checkpoint=str(path), **where)
        try:
            model, trainer = load_model(which)
            tokenizer = open_tokenizer(which, trainer)
            prompts = config.prompt or beginnings(open_data(which, trainer), tokenizer)
        except positions.NO_MODEL as error:
            print(f"no samples of {path}: {error}")
            continue
        for prompt in [prompt for prompt in prompts if prompt not in done]:
            text = draw(model, tokenizer, prompt, config.max_new_tokens, is_tuned(trainer))
            record(run_dir, trainer["step"], trainer["tokens"], prompt, text)


def record(run_dir: Path, step: int, tokens: int, prompt: str, text: str, **more) -> None:
    line = {"step": step, "tokens": tokens, "prompt": prompt, "text": text, **more}
    disk.append(run_dir / "samples.jsonl", json.dumps(line) + "\n")


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
    folder = run.log.run_dir
    if run.plan.sharded:  # a forward pass needs all ranks
        line = "no samples of sharded weights while it trains: python eval.py report draws them"
    else:
        tokenizer, prompt = Tokenizer.load(run.manifest.tokenizer_file()), run.preset.prompts[0]
        training = run.model.training
        text = draw(run.model.eval(), tokenizer, prompt, SAMPLE_TOKENS, bool(run.manifest.marks))
        run.model.train(training)
        record(folder, step, step * run.plan.tokens_per_step, prompt, text, live=True)
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
