"""A run on one page, and several runs in one picture: `python eval.py report`, `... compare A B`.

Reads what a run left in its folder (run_folder.py) and the manifest of its data. `write` makes
RUN_DIR/report.html, which needs no other file and no network; `compare` draws compare_A+B.svg and
prints a table. train.py calls `update` at each validation, and `write` when a run
ends; eval.py calls the rest. Next: report.html, the template.
"""

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config import Local, UsageError
from instruments.pages import curves, multiplier
from instruments.pages.run_folder import RunFolder, one_line
from instruments.pages.template import filled
from instruments.talk.sample import SampleConfig, continuations, find_prompts
from machinery import code, disk, folders, trained
from machinery.output import say
from machinery.screen import duration, short
from tokenizer import Tokenizer

SAMPLE_TOKENS = 40  # drawn at a validation
SAMPLE_SHOWN = 72  # characters on the screen


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
    page = run.dir / "report.html"
    html = filled(
        "report.html",
        run=run,
        pictures=curves.draw_run(run),
        now=time.time(),
        date=lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)),
        one_line=one_line,
        short=short,
        duration=duration,
    )
    disk.write_text(page, html + "\n")
    return page


# -------------------------------------------------------------------------------- several runs


def compare(argv: list[str]) -> None:
    """`eval.py compare RUN RUN ...`: print what `compared` says; draw compare_RUN+RUN.svg beside
    the first run."""
    if len(argv) < 2:
        raise UsageError(
            f"compare needs two runs or more: eval.py compare {' '.join(argv) or 'tiny'} OTHER"
        )
    runs = [RunFolder(trained.folder_of(word)) for word in argv]
    common, met = common_point(runs)
    say(compared(runs, common))
    if not met:
        say(f"warning: not all have a validation at {short(common)}: read off between two")
    folder = runs[0].dir.parent
    words = "+".join(os.path.relpath(run.dir, folder) for run in runs)
    name = re.sub("[^A-Za-z0-9_.+-]", "_", words)[:100]
    if name != words:  # another comparison must not get the same name
        name += f"_{disk.sha256_of_tree(ascii(words))[:8]}"
    path = folder / f"compare_{name}.svg"
    disk.write_text(path, curves.draw_compared(runs, common))
    say(f"picture: {path}")


def compared(runs: list[RunFolder], common: int) -> str:
    """A table of the runs, which are compared after `common` tokens; how each of the others differs
    from the first, and what that is worth."""
    head = "run", "tokens", f"bpb at {short(common)}", "difference", "tok/s", "time until there"
    lines = multiplier.aligned([head, *(row(run, runs[0], common) for run in runs)])
    for run in runs[1:]:
        lines += ["", *pair(runs[0], run, common)]
    return "\n".join(lines)


def common_point(runs: list[RunFolder]) -> tuple[int, bool]:
    """The most tokens after which all runs have a validation, and True; where no two meet, the
    tokens of the run that ended first, and False."""
    for run in runs:
        if not (run.curve and run.steps):
            raise UsageError(
                f"{run.dir} has no validation after its first step yet: let it run on, or compare "
                "other runs"
            )
    known = [{tokens for tokens, _ in run.curve} for run in runs]
    met = set.intersection(*known)
    return max(met, default=min(map(max, known))), bool(met)


def row(run: RunFolder, base: RunFolder, common: int) -> tuple[str, ...]:
    """A row of the table; `base` is the first run."""
    bpb = bpb_at(run, common)
    difference = round(bpb - bpb_at(base, common), 4) or 0.0  # not -0.0000
    took = f"n/a, begins at step {run.first_step:,}"
    if run.first_step == 1:
        took = duration(run.seconds_at(common))
    return (
        one_line(run.dir),
        short(run.tokens),
        f"{bpb:.4f}",
        f"{difference:+.4f}",
        short(run.steps[-1].tokens_per_s),
        took,
    )


def bpb_at(run: RunFolder, common: int) -> float:
    """Bits per byte after so many tokens; between two validations, if need be."""
    tokens, bpb = zip(*[(line.tokens, line.val_bpb) for line in run.validations])
    if tokens[0] > common:
        raise UsageError(
            f"{run.dir} begins at {short(tokens[0])} tokens, after another run has ended "
            f"({short(common)}); compare runs that overlap"
        )
    return float(np.interp(common, tokens, bpb))


def pair(base: RunFolder, other: RunFolder, common: int) -> list[str]:
    """How many times less one run needs than another, how they differ, and what that is worth."""
    differ = differences(base, other)
    warnings = [
        f"warning: {run.dir} reads the future, so its bits per byte mean nothing"
        for run in (base, other)
        if run.whole_validation and run.whole_validation.reads_future
    ]
    rows = {line.val_rows for run in (base, other) for line in run.validations} - {0}  # 0: unknown
    if "data_fingerprint" in differ or len(rows) > 1:
        warnings.append(
            f"warning: the data or eval_tokens of {base.dir} and {other.dir} differ, so the bits "
            "per byte are of different text"
        )
    if warnings:
        return [*differ.values(), *warnings]
    ours, theirs = (
        [bpb_at(run, common), *(line.loss for line in run.steps if line.tokens <= common)]
        for run in (base, other)
    )
    table = multiplier.table_of(base, other, common)
    if ours == theirs:
        same = f"{base.dir} and {other.dir}: equal to the last digit up to {short(common)} tokens"
        table = [same, *table] if differ else [same]  # what differs may cost FLOPs or time
    if not differ:
        advice = "no difference: options, seed, data and code are the same, but for rounding"
    elif differ.keys() == {"seed"}:
        advice = "no difference: only the seed differs, so all of it is noise"
    else:
        advice = (
            "trust a difference only if it is larger than that between two seeds: python "
            "benchmarks/referee.py judges by pairs of seeds at several sizes"
        )
    return [*table, *differ.values(), advice]


def differences(a: RunFolder, b: RunFolder) -> dict[str, str]:
    """name -> how two runs differ in this option, or in the code; {}: they do not."""
    ours = a.options()
    theirs = b.options()
    names = (ours | theirs).keys() - {"code"}
    differ = folders.differences(ours, theirs, names, f"in {a.dir}", f"in {b.dir}")
    unknown = [str(run.dir) for run in (a, b) if not run.codes or run.first_step > 1]
    found = {code.difference(x, y) for x in a.codes for y in b.codes} - {""}
    if unknown:
        differ["code"] = f"code: not that of all steps is known of {', '.join(unknown)}"
    elif found:
        differ["code"] = f"code: {'; '.join(sorted(found))} between {a.dir} and {b.dir}"
    return differ


# -------------------------------------------------------------------------------- while it trains


def update(run, step: int) -> str:
    """While a run trains, after the validation of a step: add a sample of the raw model to
    samples.jsonl, and if a tenth of the run has passed since the last page, write the next one (at
    the end train.py does). Returns what the model wrote, for the screen. run: train.py's."""
    if run.plan.sharded:  # a forward pass needs all ranks
        line = "no samples of sharded weights while it trains: python eval.py sample draws them"
    else:
        tokenizer = Tokenizer.load(run.manifest.tokenizer_file())
        prompt = find_prompts(run.preset.name, run.manifest)[0]
        tuned = bool(run.manifest.marks)
        run.model.eval()
        try:
            (said,) = continuations(
                run.model, tokenizer, [prompt], tuned, SampleConfig(max_new_tokens=SAMPLE_TOKENS)
            )
        finally:
            run.model.train()
        text = prompt + "\n" * tuned + said
        sample = dict(step=step, tokens=step * run.plan.tokens_per_step, prompt=prompt, text=text)
        # not json_of: a URL that the model wrote is no secret
        disk.append(run.log.run_dir / "samples.jsonl", json.dumps(sample) + "\n")
        line = f"it writes {text[:SAMPLE_SHOWN]!r}"
    # A page reads all that the run has logged: with each validation, a long run would pay more.
    if step < run.plan.steps <= 10 * (step - run.progress.page_step):
        run.progress.page_step = step
        write(run.log.run_dir)
    return f"step {step:,} | {line}"
