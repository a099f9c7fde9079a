"""A run on one page, and several runs in one picture: `python eval.py report`, `... compare A B`.

Reads what a run left in its folder (records.py) and the manifest of its data. `write` makes
RUN_DIR/report.html, which needs no other file and no network; `compare` draws compare.svg and
prints a table. train.py calls `update` at each validation, and `write` when a run
ends; eval.py calls the rest. Next: report.html, the template.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader

from config import GPTConfig, Local, TrainConfig, UsageError, find_preset
from instruments.pages import curves, multiplier
from instruments.pages.records import OF_A_START, RunFolder, plain, slow_steps
from instruments.talk.sample import SampleConfig, continuations, find_prompts
from machinery import cli, code, disk, trained
from machinery.formats import SampleLine
from machinery.log import duration, short
from machinery.output import brief, say
from tokenizer import Tokenizer

SAMPLE_TOKENS = 40  # drawn at a validation
SAMPLE_SHOWN = 72  # characters on the screen
FOLDER = FileSystemLoader(Path(__file__).parent)
TEMPLATES = Environment(loader=FOLDER, autoescape=True, trim_blocks=True, lstrip_blocks=True)


@dataclass(frozen=True)
class ReportConfig:
    """A page on a run, RUN_DIR/report.html."""

    run_dir: Local = ""
    """Folder of the run; empty: runs/PRESET."""


# ------------------------------------------------------------------------------------ the page


def rewrite(config: ReportConfig, load_model) -> None:
    """`eval.py report`: write the page anew, and print where it is."""
    say(write(config.run_dir))


def write(run_dir: str | Path) -> Path:
    """Write RUN_DIR/report.html; returns its path."""
    run = RunFolder(run_dir)
    processes = run.processes()
    preset, facts = configuration(run)
    html = TEMPLATES.get_template("report.html").render(
        title=f"Run {run.dir.resolve().name}",
        run=run,
        machines=run.devices,
        slow=slow_steps(processes),
        pictures=curves.draw_run(run),
        starts=processes,
        manifest=run.manifest(),
        plain=plain,
        preset=preset,
        configuration=facts,
        now=time.time(),
        date=lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)),
        short=short,
        duration=duration,
    )
    page = run.dir / "report.html"
    disk.write_text(page, html + "\n")
    return page


# Of config.json: of data and code, which the page tells beside them.
HASHES = ("data_fingerprint", "tokenizer_sha256", "revisions", "code")


def configuration(run: RunFolder) -> tuple[str, list[tuple[str, str]]]:
    """The preset that the run was begun with, if it is known; and (name, text) of what differs from
    it, or of all."""
    word = cli.first_word(run.starts[0].command.split()[1:])[0] if run.starts else ""
    preset = find_preset(word)
    parts = (preset.train, preset.model, preset.run) if preset else ()
    usual = {name: value for part in parts for name, value in asdict(part).items()}
    facts = []
    for key, value in run.config.items():
        if key not in HASHES and plain(value) != plain(usual.get(key)):
            facts.append((key, plain(value) or "none"))
    return word if preset else "", facts


# -------------------------------------------------------------------------------- several runs


def compare(argv: list[str]) -> int:
    """`eval.py compare RUN RUN ...`: draw compare.svg beside the first run; print the table."""
    say(compared(argv))
    return 0


def compared(words: list[str]) -> str:
    """The table, what else differs, and the path of the picture, which it draws."""
    if len(words) < 2:
        raise UsageError("compare needs two runs or more: python eval.py compare tiny runs/other")
    runs = [RunFolder(trained.folder_of(word)) for word in words]
    for run in runs:
        if not multiplier.curve_of(run):
            raise UsageError(
                f"{run.dir} has no validation after its first step yet: let it run on, or compare "
                "other runs"
            )
    common = max(
        set.intersection(*({line.tokens for line in run.validations} for run in runs)) | {0}
    )
    between = common <= 0
    if between:
        common = min(run.validations[-1].tokens for run in runs)
    whole = all(run.whole_validation for run in runs)
    last = "bpb of all rows" if whole else "last bpb"
    label = f"bpb at {short(common)}"
    rows = [("run", "tokens", last, label, "difference", "tok/s", "time until there")]
    differ, advice = differences(runs)
    base = None
    for run in runs:
        known = [(line.tokens, line.val_bpb) for line in run.validations]
        if known[0][0] > common:
            raise UsageError(
                f"{run.dir} begins at {short(known[0][0])} tokens, after another run has ended "
                f"({short(common)}); compare runs that overlap"
            )
        bpb = float(np.interp(common, *zip(*known)))  # between two validations, if need be
        if base is None:
            base = bpb
        took = f"n/a, begins at step {run.first_step:,}"
        if run.first_step == 1:
            took = duration(run.seconds_at(common))
        rows.append(
            (
                plain(run.dir),
                short(run.tokens),
                f"{run.whole_validation.full_val_bpb if whole else known[-1][1]:.4f}",
                f"{bpb:.4f}",
                # not -0.0000
                "n/a" if advice == OTHER_TEXT else f"{round(bpb - base, 4) or 0.0:+.4f}",
                short(run.median("tokens_per_s")),
                took,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for run in runs[1:]:
        pair = differences([runs[0], run])[1]
        if pair != OTHER_TEXT:
            noise = pair.startswith(ONLY_NOISE)
            lines += ["", *multiplier.table_of(runs[0], run, common, noise)]
    lines += ["", *differ, advice]
    if between:
        lines.append(f"warning: not all have a validation at {short(common)}: read off between two")
    path = runs[0].dir.parent / "compare.svg"
    try:
        disk.write_text(path, curves.draw_compared(runs, common))
        lines.append(f"picture: {path}")
    except OSError as error:
        lines.append(f"picture: none, as {path} cannot be written ({error.strerror})")
    return "\n".join(lines)


ONLY_NOISE = "no difference"
OTHER_TEXT = "warning: the data differ, so the bits per byte are of different text"


def differences(runs: list[RunFolder]) -> tuple[list[str], str]:
    """Each field of the configuration that differs, and the code; and how far the figures can be
    trusted."""
    unknown = [str(run.dir) for run in runs if not run.config]
    if unknown:
        return [], f"no config.json in {', '.join(unknown)}: what else differs is not known"
    differ = {}
    of_code = differences_of_code(runs)
    usual = asdict(TrainConfig()) | asdict(GPTConfig())  # of what an older run does not mention
    for key in dict.fromkeys(key for run in runs for key in run.config if key != "code"):
        found = [plain(run.config.get(key, usual.get(key))) or "none" for run in runs]
        is_known = key not in OF_A_START or all(key in run.config for run in runs)
        if len(set(found)) > 1 and is_known:
            differ[plain(key)] = found
    mixed = any("then" in plain(run.config.get("eval_tokens")) for run in runs)
    advice = "trust a difference only if it is larger than that between two seeds"
    if "data_fingerprint" in differ:
        advice = OTHER_TEXT
    elif mixed or "eval_tokens" in differ:
        advice = "warning: eval_tokens differ, so the bits per byte are of more or less text"
    elif not differ and not of_code:
        advice = (
            f"{ONLY_NOISE}: code, data, options and seed are the same, so all of it is rounding"
        )
    elif differ.keys() == {"seed"} and not of_code:
        advice = f"{ONLY_NOISE}: only the seed differs, so all of it is noise"
    lines = [brief(f"{key}: {', '.join(found)}") for key, found in differ.items()]
    return [*lines, *of_code], advice


def differences_of_code(runs: list[RunFolder]) -> list[str]:
    """Between the first run and each other, and within one that went on under other code."""
    unknown = [str(run.dir) for run in runs if not run.codes]
    if unknown:
        return [f"code: that of {', '.join(unknown)} is not known"]
    lines = []
    for run in runs:
        if run.first_step > 1:
            lines.append(f"code: {run.dir} goes on from another run's step {run.first_step - 1:,}")
        for before, after in zip(run.codes, run.codes[1:]):
            changed = code.difference(before, after, (run.dir, run.dir))
            if changed:
                lines.append(f"code: while {run.dir} trained, {changed}")
        other = code.difference(runs[0].codes[-1], run.codes[-1], (runs[0].dir, run.dir))
        if other:
            lines.append(f"code of {run.dir}: {other} from that of {runs[0].dir}")
    return lines


# -------------------------------------------------------------------------------- while it trains


def update(run, step: int) -> str:
    """While a run trains, after the validation of a step: add a sample of the raw model to
    samples.jsonl, and write the page (at the end train.py does). Returns what the model wrote, for
    the screen. run: train.py's."""
    folder = run.log.run_dir
    if run.plan.sharded:  # a forward pass needs all ranks
        line = "no samples of sharded weights while it trains: python eval.py sample draws them"
    else:
        tokenizer = Tokenizer.load(run.manifest.tokenizer_file())
        prompt = find_prompts((), run.preset.name, run.manifest)[0]
        tuned = bool(run.manifest.marks)
        config = SampleConfig(max_new_tokens=SAMPLE_TOKENS)
        was_training = run.model.training
        run.model.eval()
        try:
            texts, _ = continuations(run.model, tokenizer, [prompt], tuned, config)
        finally:
            run.model.train(was_training)
        text = prompt + "\n" * tuned + texts[0]
        tokens = step * run.plan.tokens_per_step
        sample = SampleLine(step=step, tokens=tokens, prompt=prompt, text=text)
        # not json_of: a URL that the model wrote is no secret
        disk.append(folder / "samples.jsonl", json.dumps(asdict(sample)) + "\n")
        line = f"it writes {text[:SAMPLE_SHOWN]!r}"
    if step < run.plan.steps:
        write(folder)
    return f"step {step:,} | {line}"
