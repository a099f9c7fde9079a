"""The work of referee.py, by the files of the commit with which the ledger began.

Makes the runs (trials.py), says what they say (instruments/pages/rule.py), keeps the ledger and
writes its page (referee.html).
"""

import json
import re
import secrets
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FileSystemLoader

import at_root  # noqa: F401
import held_out
import runs
from config import Count, Local, Size, UsageError, check_values
from instruments.pages import picture, rule
from machinery import cli, disk
from machinery.formats import read_lines
from machinery.output import say
from machinery.screen import short
from machinery.shards import Manifest
from referee import copy_of, git
from runs import ROOT
from trials import Bench, Refused, Version, runs_of

MEASURES = ("tokens", "FLOPs", "seconds")
PREPARE = "tiny --vocab_size 1024 --row_len 257 --val_fraction 0.03"
# Options that are no ideas; another seed is luck.
FIXED = (
    "seed steps tokens epochs tokens_per_step seq_len vocab_size data_dir run_dir name resume "
    "init_from eval_every eval_tokens save_every save_minutes keep_every plan"
)
ODD = 1.1  # the largest factor by which a version may overrate itself, beside the base
COPIED = 0.05  # of the held-out text may stand in training rows, beyond what usually does
TOO_GOOD = 4.0  # times less
LARGEST_DIFF = 200_000  # characters


@dataclass(frozen=True)
class RefereeConfig:
    """Judge a change of the code, or options of train.py that stand after `--`."""

    base: str = "HEAD"
    """The commit that it is compared with."""
    depths: tuple[Size, ...] = (2, 3, 4)
    """Layers of each size, two or more; the two largest decide."""
    tokens_per_weight: float = 0.2
    """The budget: training tokens per weight of the blocks and the head."""
    by: Literal["tokens", "FLOPs", "seconds"] = "tokens"
    """What is to be saved. Seconds are of the CPU, unless there is a GPU."""
    seeds: Count = 2
    """Runs of each version at each size."""
    at_once: Count = 2
    """Runs side by side."""
    minutes: Count = 30
    """The longest that a run may take."""
    data: Local = ""
    """A prepared folder; empty: the standard library is prepared. Read when the ledger begins."""
    rows: Local = ""
    """A data folder with training rows for the change alone, in the tokens of FOLDER/text."""
    final: bool = False
    """Against the commit with which the ledger began, on the sealed text, with new seeds."""
    folder: Local = "runs/referee"
    """The ledger, the texts and the runs; another folder is another ledger."""
    project: Local = ""
    """The files to judge: referee.py gives them."""

    def __post_init__(self):
        check_values(self)
        if self.seeds < 2 or len({*self.depths}) < max(2, len(self.depths)):
            raise UsageError("a verdict needs two seeds or more, and two different depths or more")


def main(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    config = cli.read_options(RefereeConfig(), argv[:end], "benchmarks/referee.py")
    options = shlex.join(argv[end + 1 :])
    check_options(argv[end + 1 :])
    folder = Path(config.folder).resolve()
    with disk.lock(folder, "--folder"):
        ledger = read_lines(folder / "tries.jsonl", dict)
        began = ledger[0] if ledger else begin(folder, config)
        line = judge(config, options, folder, began)
        page = write_page(folder)
    sizes = line.get("sizes")
    if sizes:
        say(runs.table([*sizes[0]], [[*size.values()] for size in sizes]))
        say("times less: with each seed; in brackets luck, between two seeds of one version")
    say("\n".join([*line["said"], f"verdict: {line['state']} (all tries: {page})"]))
    return int(line["state"] != "helps")


def check_options(words: list[str]) -> None:
    """UsageError for options that are no ideas."""
    given = [word[2:].partition("=")[0].replace("-", "_") for word in words]
    for name in FIXED.split():
        if name in given:
            raise UsageError(f"--{name} is no idea: the referee gives both versions the same")


def tree_of_files(project: Path) -> str:
    """The files as they are, as git keeps them. Nothing is staged or committed by this."""
    stashed = git(project, "-c", "user.name=me", "-c", "user.email=me", "stash", "create")
    return git(project, "rev-parse", f"{stashed or 'HEAD'}^{{tree}}")


# ------------------------------------------------------------------------------------- the ledger


def begin(folder: Path, config: RefereeConfig) -> dict:
    """The first line of the ledger, once the texts are there: what judges, and by which text."""
    whole = Path(config.data or folder / "whole")
    if not config.data and not (whole / "manifest.json").exists():
        command = [sys.executable, "prepare_data.py", *PREPARE.split(), "--data_dir", str(whole)]
        subprocess.run(command, check=True, cwd=ROOT)
    held_out.divide(Manifest.load(whole), folder)
    began = dict(judge=git(Path(config.project), "rev-parse", "HEAD"))
    began["files"] = {name: disk.sha256_of(folder / name) for name in held_out.FILES}
    began["secret"] = secrets.randbits(32)
    disk.append(folder / "tries.jsonl", json.dumps(began) + "\n")
    return began


def judge(config: RefereeConfig, options: str, folder: Path, began: dict) -> dict:
    """The line of a try in the ledger. Another is written when it begins, lest one that looks bad
    be stopped and forgotten."""
    project = Path(config.project)
    held_out.check(folder, began["files"])
    new = git(project, "ls-files", "--others", "--exclude-standard", "*.py")
    if new:
        raise UsageError(f"git does not know {new.splitlines()[0]}: git add it, or move it away")
    trees = [git(project, "rev-parse", began["judge"] if config.final else config.base)]
    trees.append(tree_of_files(project))
    text = str(folder / "text")
    base = Version("base", copy_of(project, trees[0], folder), "", text)
    change = Version("change", copy_of(project, trees[1], folder), options, text)
    if config.rows:
        change = replace(change, data=str(Path(config.rows).resolve()))
    if base.key == change.key:
        raise UsageError("your files compute what the commit does: change something first")
    names = ("depths", "tokens_per_weight", "by", "seeds", "rows", "final")
    facts = {name: getattr(config, name) for name in names} | dict(options=options)
    line = {"try": disk.sha256_of_tree([facts, base.key, change.key])[:12]} | facts
    # Not git's diff, which may be told what to hide.
    compared = ["diff", "-ruaN", base.tree.name, change.tree.name]
    diff = subprocess.run(compared, cwd=folder, capture_output=True).stdout.decode(errors="replace")
    if len(diff) > LARGEST_DIFF:
        raise UsageError(f"the diff has {len(diff):,} characters, more than anybody reads")
    line |= dict(trees=trees, files=re.findall(r"^diff -ruaN \S+ \w+/(.*)", diff, re.MULTILINE))
    write = lambda **more: disk.append(
        folder / "tries.jsonl", json.dumps(line | more | dict(time=time.time())) + "\n"
    )
    write(state="begun", said=[], diff=diff)
    try:
        bench = Bench(folder, began["secret"], config.at_once, config.minutes)
        check_rows(base, change, folder)
        line |= verdict(config, base, change, bench)
    except Refused as reason:
        line |= dict(state="refused", said=[f"it {reason}"])
    if tree_of_files(project) != trees[1]:
        line["said"].append("your files were edited meanwhile: this is of the files as they were")
    write()
    return line


def check_rows(base: Version, change: Version, folder: Path) -> None:
    """Refused if the change has training rows of its own that hold the held-out text."""
    usual, own = (Manifest.load(version.data) for version in (base, change))
    if own.fingerprint == usual.fingerprint:
        return
    own.verify()
    if (own.tokenizer_sha256, own.row_len) != (usual.tokenizer_sha256, usual.row_len):
        raise UsageError(
            f"{own.dir} was prepared otherwise: give prepare_data.py --row_len {usual.row_len} "
            f"--tokenizer {usual.tokenizer_file()}"
        )
    before, now = (held_out.copied(folder, manifest) for manifest in (usual, own))
    if now > before + COPIED:
        raise Refused(f"trains on held-out text: {now:.0%} of it stands in its training rows")


# ------------------------------------------------------------------------------------ the verdict


def verdict(config: RefereeConfig, base: Version, change: Version, bench: Bench) -> dict:
    """Make the runs, and say what they say."""
    text = "sealed" if config.final else "scored"
    first = config.seeds if config.final else 0
    runs_by = {}  # (depth, version) -> for each seed, the shorter and the longer run
    for depth, version in product(sorted(config.depths), (change, base)):
        runs_by[depth, version] = [
            runs_of(version, depth, seed, text, config.tokens_per_weight)
            for seed in range(first, first + config.seeds)
        ]
    every = [run for by_seed in runs_by.values() for pair in by_seed for run in pair]
    # First one that may fail; then the longest.
    bench.make_all([*dict.fromkeys([every[0], *reversed(every)])])
    sizes = []
    measured = {name: [] for name in MEASURES}
    for depth in sorted(config.depths):
        rows = [
            [[*map(bench.row_of, pair)] for pair in runs_by[depth, version]]
            for version in (base, change)
        ]
        if not config.rows:  # which have held-out rows of their own
            check_measure(*rows)
        size = {"size": f"d{depth}", "trained on": short(rows[0][0][-1]["tokens"])}
        for name, of in zip(("base", "change"), rows):
            size[name] = ", ".join(f"{pair[-1]['bpb']:.4f}" for pair in of)
        for name, found in measured.items():
            found.append(rule.measure(name, *rows))
            size[f"times less {name}"] = str(found[-1])
        sizes.append(size)
    words = {name: rule.verdict(found) for name, found in measured.items()}
    said = [f"by {name}: {word}" for name, word in words.items()]
    largest = measured[config.by][-1]
    factors = [factor for factor, _ in largest.factors]
    if max(factors) > TOO_GOOD:
        said.append("that is a lot: read the diff before you believe it")
    if not all(bench.row_of(run)["confined"] for run in every):
        said.append("not confined, as this system has no Landlock: read the diff")
    return dict(state=words[config.by], said=said, sizes=sizes, factors=factors, luck=largest.luck)


def check_measure(base: list[list[dict]], change: list[list[dict]]) -> None:
    """Refused if the change says of its own held-out rows what our figures make unlikely."""
    for ours, theirs in zip(sum(base, []), sum(change, [])):
        odd = (theirs["own"] / theirs["bpb"]) / (ours["own"] / ours["bpb"])
        if not 1 / ODD < odd < ODD:
            raise Refused(
                f"measures otherwise: by its own validation it has {theirs['own']:.4f} bits per "
                f"byte, by ours {theirs['bpb']:.4f}; the base {ours['own']:.4f} and "
                f"{ours['bpb']:.4f}"
            )


# --------------------------------------------------------------------------------------- the page


def write_page(folder: Path) -> Path:
    """page.html: all tries of the ledger, in order."""
    lines = read_lines(folder / "tries.jsonl", dict)[1:]
    tries = {}
    for line in lines:  # that it began, perhaps twice, and how it ended
        tries[line["try"]] = tries.get(line["try"], {}) | line
    tries = [*tries.values()]
    opened = sum(line["final"] and line["state"] == "begun" for line in lines)
    chance = rule.chance(min(line["seeds"] for line in tries))
    places = FileSystemLoader([ROOT / "benchmarks", ROOT / "instruments" / "pages"])
    template = Environment(loader=places, autoescape=True).get_template("referee.html")
    page = folder / "page.html"
    disk.write_text(page, template.render(
        tries=tries, opened=opened, found=chance * len(tries),
        any_found=1 - (1 - chance) ** len(tries), picture=drawn(tries), time=time,
    ))  # fmt: skip
    return page


def drawn(tries: list[dict]) -> str:
    """How many times less each try needed at its largest size, beside luck."""
    figure = picture.figure(6, 2.8)
    axes = figure.subplots()
    axes.grid(axis="y")
    for n, line in enumerate(tries, 1):
        if "factors" in line:
            axes.bar(n, line["luck"] - 1 / line["luck"], 0.8, 1 / line["luck"], color="lightgray")
            color = dict(helps="green", harms="red").get(line["state"], "gray")
            axes.plot([n] * len(line["factors"]), line["factors"], "o", color=color)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xlabel="try", title="how many times less it needs; gray: luck")
    return picture.svg(figure, "the tries, in order")


if __name__ == "__main__":
    cli.run(main)
