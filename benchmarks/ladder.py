"""Is an idea more than luck? Two versions of the code, side by side at several sizes.

    python benchmarks/ladder.py                        the last commit, and the files as they are
    python benchmarks/ladder.py --before ../other      another folder or commit, and these files
    python benchmarks/ladder.py --name slow -- --lr_scale 0.5      an idea that is an option

Each size (dN: N layers, 64 N wide) is trained with each seed, by both versions, on the same rows:
on `tokens_per_weight` tokens per weight of the blocks and the head, and on half of them. What the
second version is worth is told as in `eval.py compare`: how many times less it needs than the
first, in tokens, FLOPs and training time, for the worse of their two losses at the end of the
longer runs. After a kill, or for another idea, the same command makes only the runs that are
missing: a run belongs to the files that it was trained with. Do not edit them meanwhile.

The rule: an idea helps if at the two largest sizes, with each seed, it needs less by a larger
factor than any between two seeds of one version, which is luck; it harms if it needs more in the
same way. Anything else counts as no difference.

On two idle CPU cores the default takes three to four hours, `--depths 2 3 4 --tokens_per_weight
0.2` half an hour. On a GPU the presets themselves are run:
`--depths 8 12 16 --tokens_per_weight 10.5 --data data/d16 --at_once 1`.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from pathlib import Path

import torch

import runs
from config import Count, Size, UsageError, check_values
from instruments.pages.multiplier import meet
from instruments.pages.run_folder import RunFolder
from machinery import cli, disk
from machinery.formats import read_lines
from machinery.output import say
from machinery.screen import short
from machinery.shards import Manifest
from runs import ROOT
from scaling import Job

FOLDER = ROOT / "runs" / "ladder"
ROWS = FOLDER / "rows.jsonl"
PREPARE = "tiny --source stdlib --vocab_size 1024 --row_len 257 --val_fraction 0.004"
ON_A_GPU = "--eval_every 0 --save_minutes 0 --log_every 0"
MEASURES = ("tokens", "FLOPs", "seconds")


@dataclass(frozen=True)
class LadderConfig:
    """Two versions of the code at several sizes."""

    before: str = "HEAD"
    """The first version: a folder, or a commit of this repository."""
    name: str = "after"
    """Of the second version, the files here, in its folders: one name for each idea."""
    depths: tuple[Size, ...] = (4, 6, 8)
    """Layers of each size."""
    tokens_per_weight: float = 0.1
    """Training tokens per weight of the blocks and the head."""
    seeds: Count = 2
    """Runs of each version at each size."""
    at_once: Count = 2
    """Runs side by side."""
    data: str = "data/ladder"
    """The rows; prepared from the standard library if they are not there."""

    def __post_init__(self):
        check_values(self)
        if self.seeds < 2 or len({*self.depths}) < max(2, len(self.depths)):
            raise UsageError("the ladder needs two seeds or more, and two different depths or more")
        if self.name == "before":
            raise UsageError("--name before is the first version's; give the second another name")


@dataclass(frozen=True)
class Rung(Job):
    """One run of one version."""

    tree: Path = ROOT  # its code
    on_gpu: bool = False

    @cached_property
    def argv(self) -> list[str]:
        if not self.on_gpu:
            return super().argv
        facts = f"d{self.depth} {ON_A_GPU} --seed {self.seed}"
        given = [*facts.split(), "--data_dir", self.data, *shlex.split(self.options)]
        steps = self.tokens // cli.parse("train.py", "train", given).train.tokens_per_step
        return [*given, "--steps", str(steps)]

    @property
    def run_dir(self) -> Path:
        return FOLDER / f"{self.name}_d{self.depth}_seed{self.seed}_{self.tokens}"

    @property
    def command(self) -> list[str]:
        python, _, *rest = super().command
        return [python, str(self.tree / "train.py"), *rest]

    def is_of_now(self, files: dict[str, str]) -> bool:
        """Whether its tree still has these files, name -> sha256."""
        paths = {self.tree / name: sha256 for name, sha256 in files.items()}
        return all(p.is_file() and disk.has_sha256(p.resolve(), sha) for p, sha in paths.items())


def tree_of(word: str) -> Path:
    """The folder of a version: itself, or a clone of this repository at that commit."""
    if Path(word, "train.py").is_file():
        return Path(word).resolve()
    git = ["git", "-C", str(ROOT)]
    said = lambda *words: subprocess.run(
        [*git, *words], capture_output=True, text=True
    ).stdout.strip()
    commit = said("rev-parse", "--quiet", "--verify", f"{word}^{{commit}}")
    if not commit:
        raise UsageError(f"--before {word} is neither a folder with train.py nor a commit")
    clone = FOLDER / f"tree_{commit[:12]}"
    if not clone.exists():
        with disk.new_folder(clone) as new:
            top = said("rev-parse", "--show-toplevel")
            subprocess.run([*git, "clone", "--quiet", "--shared", top, str(new)], check=True)
            subprocess.run(["git", "-C", str(new), "checkout", "--quiet", commit], check=True)
    return clone / said("rev-parse", "--show-prefix")


def tokens_of(depth: int, config: LadderConfig, data: str, on_gpu: bool) -> tuple[int, int]:
    """The two horizons of a size, in tokens."""
    preset = Rung("", "", depth, 1 << 20, data=data, on_gpu=on_gpu).preset
    model = replace(preset.model, vocab_size=Manifest.load(data).vocab_size)
    weights = runs.count_weights(model)
    most = config.tokens_per_weight * (weights["matrix"] + weights["head"])
    half = max(1, round(most / 2 / preset.train.tokens_per_step)) * preset.train.tokens_per_step
    return half, 2 * half


def rungs(config: LadderConfig, before: Path, options: str, on_gpu: bool) -> Iterator[Rung]:
    """The largest first, and both versions beside each other: then their speeds can be compared.
    options: of train.py, for the second version."""
    data = str(Path(config.data).resolve())
    versions = {"before": (before, ""), config.name: (ROOT, options)}
    for depth in sorted(config.depths, reverse=True):
        horizons = tokens_of(depth, config, data, on_gpu)
        for seed in range(config.seeds):
            shorter = dict.fromkeys(versions)
            for tokens, (name, (tree, given)) in product(horizons, versions.items()):
                after = shorter[name]
                rung = Rung(name, given, depth, tokens, seed, data, after, tree, on_gpu)
                shorter[name] = rung
                yield rung


def read_rung(job: Rung) -> dict:
    """The row of a finished run. seconds: of all its tokens, at its median speed."""
    run = RunFolder(job.run_dir)
    steps = job.tokens / (run.steps[-1].tokens / run.steps[-1].step)
    row = job.key | dict(options=job.options, bpb=run.whole_validation.full_val_bpb)
    row |= dict(FLOPs=job.tokens * run.flops_per_token, seconds=steps * run.usual_s)
    row["minutes"] = sum(each.own[-1].time - each.start.time for each in run.processes()) / 60
    row["files"] = run.codes[-1].files
    return row | dict(fingerprint=fingerprint(job)) | runs.made()


def fingerprint(job: Rung) -> str:
    return Manifest.load(job.data).fingerprint[:12]


def row_of(job: Rung, rows: list[dict]) -> dict | None:
    """Its row, of this machine, this text and the files that its tree has now."""
    own = job.key | dict(machine=runs.device_name(), fingerprint=fingerprint(job))
    own["options"] = job.options
    found = [row for row in rows if own.items() <= row.items() and job.is_of_now(row["files"])]
    return found[-1] if found else None


def make(jobs: list[Rung], at_once: int) -> int:
    """Make the runs that are missing; returns how many failed."""
    rows = read_lines(ROWS, dict)
    missing = [job for job in jobs if row_of(job, rows) is None]
    say(f"{len(missing)} of {len(jobs)} runs to make, {at_once} at once", flush=True)
    for job in jobs:  # also a shorter one that has its row: a longer one may go on from it
        if (job.run_dir / "metrics.jsonl").exists():
            codes = RunFolder(job.run_dir).codes
            if not (codes and job.is_of_now(codes[-1].files)):  # of files that are gone
                shutil.rmtree(job.run_dir)
    slots = [{} if jobs[0].on_gpu else {"OMP_NUM_THREADS": "1"}] * at_once
    return runs.side_by_side(missing, slots, ROWS, read_rung)


def less(measure: str, base: list[dict], other: list[dict]) -> tuple[float, str]:
    """How many times less `other` needs than `base`; and whether that is a bound, as it needs less
    than its shorter run (">"), or `base` does ("<"). Rows of both horizons each."""
    curves = [[(row["tokens"], row["bpb"]) for row in rows] for rows in (base, other)]
    at = meet(*curves, base[-1]["tokens"])
    bound = "" if all(at) else "<" if at[1] else ">"
    tokens = [n or rows[0]["tokens"] for n, rows in zip(at, (base, other))]
    costs = [n * rows[-1][measure] / rows[-1]["tokens"] for n, rows in zip(tokens, (base, other))]
    return costs[0] / costs[1], bound


@dataclass(frozen=True)
class Measured:
    """One size by one measure."""

    factors: list[tuple[float, str]]  # for each seed, how many times less the second version needs
    luck: float  # the largest factor between two seeds of one version

    @property
    def word(self) -> str:
        if all(factor > self.luck and bound != "<" for factor, bound in self.factors):
            return "helps"
        harms = all(factor < 1 / self.luck and bound != ">" for factor, bound in self.factors)
        return "harms" if harms else ""


def measure(name: str, before: list[list[dict]], after: list[list[dict]]) -> Measured:
    """before, after: for each seed, the rows of both horizons."""
    pairs = [pair for version in (before, after) for pair in combinations(version, 2)]
    between = [less(name, *pair)[0] for pair in pairs]
    luck = max(max(factor, 1 / factor) for factor in between)
    return Measured([less(name, a, b) for a, b in zip(before, after)], luck)


def verdict(largest: list[Measured]) -> str:
    """By the rule, from the two largest sizes."""
    words = {size.word for size in largest}
    return f"it {words.pop()}" if len(words) == 1 and words != {""} else "no difference"


def page(config: LadderConfig, jobs: list[Rung], rows: list[dict]) -> str:
    """The table of all sizes, and the verdict by each measure."""
    found = {}
    for job in jobs:
        key = (job.depth, job.name == config.name, job.seed)
        found.setdefault(key, []).append(row_of(job, rows))
    header = ["size", "trained on", "bits per byte before", f"of {config.name}", *MEASURES]
    cells = []
    by_measure = {name: [] for name in MEASURES}
    for depth in sorted(config.depths):
        versions = [[found[depth, v, seed] for seed in range(config.seeds)] for v in (False, True)]
        ends = [", ".join(f"{rows[-1]['bpb']:.4f}" for rows in version) for version in versions]
        line = [f"d{depth}", short(versions[0][0][-1]["tokens"]), *ends]
        for name in MEASURES:
            size = measure(name, *versions)
            by_measure[name].append(size)
            factors = [f"{bound}{factor:.2f}" for factor, bound in size.factors]
            line.append(f"{', '.join(factors)} ({size.luck:.2f})")
        cells.append(line)
    minutes = sum(row["minutes"] for rows in found.values() for row in rows)
    lines = [
        runs.table(header, cells),
        f"tokens, FLOPs, seconds: how many times less {config.name} needs, with each seed (luck: "
        "the largest factor between two seeds of one version)",
        f"{len(jobs)} runs, which took {minutes:.0f} minutes in all",
    ]
    lines += [f"by {name}: {verdict(sizes[-2:])}" for name, sizes in by_measure.items()]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    config = cli.read_options(LadderConfig(), argv[:end], "benchmarks/ladder.py")
    before = tree_of(config.before)
    if not (before / "machinery" / "code.py").exists():
        raise UsageError(
            f"--before {config.before} is older than machinery/code.py, by which a run "
            "knows its code; choose a later one"
        )
    if not Path(config.data, "manifest.json").exists():
        command = [sys.executable, "prepare_data.py", *PREPARE.split(), "--data_dir"]
        subprocess.run([*command, str(Path(config.data).resolve())], check=True, cwd=ROOT)
    options = shlex.join(argv[end + 1 :])
    jobs = list(rungs(config, before, options, torch.cuda.is_available()))
    failed = make(jobs, config.at_once)
    rows = read_lines(ROWS, dict)
    if failed or None in (row_of(job, rows) for job in jobs):
        say("no table: a run has failed, or a file was edited meanwhile; the same command goes on")
        return 1
    say(page(config, jobs, rows))
    return 0


if __name__ == "__main__":
    cli.run(main)
