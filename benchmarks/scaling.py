"""What will a larger model reach? Runs of small models, to which a law is fitted.

    python benchmarks/scaling.py              a grid of sizes and tokens; 4: four runs at once
    python benchmarks/law.py                  the law; runs nothing

The runs are of train.py, each in a process of its own on one thread. Each row of SCALING.jsonl is a
run; one that is there for this machine and this text is not repeated, and after a kill the same
command goes on where it was. Before the decay of `wsd` nothing depends on the length of the run, so
the run of 1,024 steps resumes from the checkpoint that the run of 512 kept.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

import at_root  # noqa: F401
import optim
import runs
from config import UsageError
from machinery import cli
from machinery.formats import read_lines
from machinery.shards import Manifest
from model import GPT
from runs import ROOT

ROWS = ROOT / "benchmarks" / "SCALING.jsonl"
RUNS = "runs/scaling"
DATA = "data/scaling"
PREPARE = "tiny --source stdlib+site --vocab_size 2048 --row_len 257 --val_fraction 0.002"
EVERY_RUN = (
    "tiny --tokens_per_step 2048 --eval_every 0 --eval_tokens 8192 --save_minutes 0 --log_every 0 "
    "--peak_tflops 0.2"  # any value: else each run begins with measuring it
)
M = 2**20  # tokens
SIZES = {  # depth: the horizons of the law, in tokens
    2: (M // 4, M // 2, M, 2 * M, 4 * M, 8 * M),
    3: (M // 4, M // 2, M, 2 * M, 4 * M),
    4: (M // 4, M // 2, M, 2 * M),
    5: (M // 8, M // 4, M // 2, M),
    6: (M // 8, M // 4, M // 2, M),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str
    options: str  # of train.py, beside those that make the size
    depth: int
    tokens: int
    seed: int = 0
    data: str = DATA
    after: "Job | None" = None  # the shorter run that it goes on from

    @cached_property
    def argv(self) -> list[str]:
        """The preset and the options, all but the folder of the run."""
        width = 64 * self.depth  # the depth dial of config.py, with heads of 64
        facts = dict(seed=self.seed, data_dir=self.data, decay=0.65, n_layer=self.depth)
        facts |= dict(n_embd=width, mlp_hidden=4 * width, head_dim=64)
        facts |= dict(n_head=self.depth, n_kv_head=self.depth)
        words = [word for key, value in facts.items() for word in (f"--{key}", str(value))]
        given = [*shlex.split(EVERY_RUN), *words, *shlex.split(self.options)]
        steps = self.tokens // cli.parse("train.py", "train", given).train.tokens_per_step
        return [*given, "--steps", str(steps)]

    @cached_property
    def preset(self):
        return cli.parse("train.py", "train", self.argv)

    @property
    def key(self) -> dict:
        """What makes it this run, in its row."""
        facts = dict(name=self.name, depth=self.depth, tokens=self.tokens, seed=self.seed)
        return facts | dict(data=Path(self.data).name)

    @property
    def run_dir(self) -> Path:
        words = [self.name, f"d{self.depth}", Path(self.data).name, self.seed, self.tokens]
        return ROOT / RUNS / "_".join(map(str, words)).replace(" ", "_").replace(",", "")

    @property
    def branch(self) -> Path:
        """The checkpoint that a longer run goes on from."""
        step = optim.decay_begins(self.preset.train.steps, self.preset.train.decay)
        return self.run_dir / "checkpoints" / f"step_{step:08d}"

    @property
    def command(self) -> list[str]:
        given = [sys.executable, "train.py", *self.argv, "--run_dir", str(self.run_dir)]
        if self.after and self.after.branch.exists():  # else it starts from step 0
            given += ["--resume", str(self.after.branch)]
        return given


def grid() -> Iterator[Job]:
    """Runs of growing length at each size, each from where the one before began to decay."""
    for depth, horizons in reversed(SIZES.items()):  # the longest first, lest one run on alone
        job = None
        for tokens in horizons:
            job = Job("base", "", depth, tokens, after=job)
            yield job


# ---------------------------------------------------------------- the runs


def has_row(job: Job, rows: list[dict]) -> bool:
    """Whether it has a row from a machine like this one, with the same text."""
    fingerprint = Manifest.load(ROOT / job.data).fingerprint[:12]
    mine = job.key | dict(machine=runs.device_name(), fingerprint=fingerprint)
    return any(mine.items() <= row.items() for row in rows)


def read_run(job: Job) -> dict:
    """The row of a finished run. weights: those of the blocks and the head. seconds: of its own
    steps, from where it resumed."""
    records = read_lines(job.run_dir / "metrics.jsonl", dict)
    manifest = Manifest.load(ROOT / job.data)
    found = dict(seq_len=manifest.row_len - 1, vocab_size=manifest.vocab_size)
    model = replace(job.preset.model, **found)
    count = runs.count_weights(model)
    with torch.device("meta"):
        flops = GPT(model).flops_per_token() * job.tokens
    weights = count["matrix"] + count["head"]
    row = job.key | dict(flops=flops, weights=weights, parameters=sum(count.values()))
    row["bpb"] = next(r["full_val_bpb"] for r in reversed(records) if "full_val_bpb" in r)
    row["seconds"] = round(sum(r.get("step_s", 0) for r in records), 1)
    return row | dict(fingerprint=manifest.fingerprint[:12]) | runs.made()


def main(argv: list[str]) -> int:
    at_once = int(argv[0]) if argv and argv[0].isdecimal() else 2
    if argv not in ([], [str(at_once)]) or at_once < 1:
        raise UsageError(f"{' '.join(argv)!r}: give the number of runs at once, or nothing")
    if not (ROOT / DATA / "manifest.json").exists():
        command = [sys.executable, "prepare_data.py", *PREPARE.split(), "--data_dir", DATA]
        subprocess.run(command, check=True, cwd=ROOT)
    jobs = list(grid())
    rows = read_lines(ROWS, dict)
    waiting = [job for job in jobs if not has_row(job, rows)]
    print(f"{len(waiting)} of {len(jobs)} runs to make, {at_once} at once", flush=True)
    failed = runs.side_by_side(waiting, [{"OMP_NUM_THREADS": "1"}] * at_once, ROWS, read_run)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
