"""What will a larger model reach? Runs of small models, to which a law is fitted.

    python benchmarks/scaling.py              a grid of sizes and tokens; 4: four runs at once
    python benchmarks/law.py                  the law; runs nothing

The runs are of train.py, each in a process of its own on one thread. Each row of SCALING.jsonl is a
run; one that is there for this machine and this text is not repeated, and after a kill the same
command goes on where it was. Before the decay of `wsd` nothing depends on the length of the run, so
the run of 1,024 steps resumes from the checkpoint that the run of 512 kept.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import runs
from at_root import ROOT
from config import PRESETS, UsageError
from machinery import cli, disk
from machinery.formats import read_lines
from machinery.shards import Manifest
from model import GPT
from optim import decay_begins

ROWS = ROOT / "benchmarks" / "SCALING.jsonl"
RUNS = "runs/scaling"
DATA = "data/scaling"
PREPARE = "tiny --source stdlib+site --vocab_size 2048 --row_len 257 --val_fraction 0.002"
TOKENS_PER_STEP = 2048
DECAY = 0.65
EVERY_RUN = (
    f"tiny --tokens_per_step {TOKENS_PER_STEP} --decay {DECAY} --eval_every 0 --eval_tokens 8192 "
    "--save_minutes 0 --log_every 0 "
    "--peak_tflops 0.2"  # any value: else each run begins with measuring it
)
HORIZONS = {  # depth, the slowest first: its numbers of tokens, as powers of 2 (20: 1M)
    6: range(17, 21),
    5: range(17, 21),
    4: range(18, 22),
    3: range(18, 23),
    2: range(18, 24),
}


@dataclass(frozen=True)
class Job:
    """One run."""

    depth: int
    tokens: int

    @property
    def key(self) -> dict:
        """What makes it this run, in its row."""
        data = Path(DATA).name
        return dict(name="base", depth=self.depth, tokens=self.tokens, seed=0, data=data)

    @property
    def shape(self) -> dict[str, int]:
        """Fields of GPTConfig: the depth dial of config.py, with heads of 64."""
        width = 64 * self.depth
        heads = dict(n_head=self.depth, n_kv_head=self.depth, head_dim=64)
        return dict(n_layer=self.depth, n_embd=width, mlp_hidden=4 * width, **heads)

    @property
    def steps(self) -> int:
        return self.tokens // TOKENS_PER_STEP

    @property
    def run_dir(self) -> Path:
        return ROOT / RUNS / f"d{self.depth}_{self.tokens}"

    @property
    def log(self) -> Path:
        return self.run_dir.with_suffix(".log")

    @property
    def branch(self) -> Path:
        """The checkpoint that the run of twice as many tokens goes on from."""
        step = decay_begins(self.steps, DECAY)
        return self.run_dir / "checkpoints" / f"step_{step:08d}"

    @property
    def command(self) -> list[str]:
        facts = dict(self.shape, steps=self.steps, data_dir=DATA, run_dir=self.run_dir)
        words = [str(word) for key, value in facts.items() for word in (f"--{key}", value)]
        shorter = Job(self.depth, self.tokens // 2)
        if shorter.branch.exists():  # else it starts from step 0
            words += ["--resume", str(shorter.branch)]
        return [sys.executable, "train.py", *EVERY_RUN.split(), *words]


def grid() -> list[list[Job]]:
    """For each depth a chain: runs of growing length, each from where the one before began to
    decay."""
    return [[Job(depth, 2**n) for n in powers] for depth, powers in HORIZONS.items()]


# ---------------------------------------------------------------- the runs


def has_row(job: Job, rows: list[dict]) -> bool:
    """Whether it has a row from a machine like this one, with the same text."""
    fingerprint = Manifest.load(ROOT / DATA).fingerprint[:12]
    mine = job.key | dict(machine=runs.device_name(), fingerprint=fingerprint)
    return any(mine.items() <= row.items() for row in rows)


def read_run(job: Job) -> dict:
    """The row of a finished run. weights: those of the blocks and the head. seconds: of its own
    steps, from where it resumed."""
    records = read_lines(job.run_dir / "metrics.jsonl", dict)
    manifest = Manifest.load(ROOT / DATA)
    found = dict(seq_len=manifest.row_len - 1, vocab_size=manifest.vocab_size)
    model = replace(PRESETS["tiny"].model, **job.shape, **found)
    count = runs.count_weights(model)
    with torch.device("meta"):
        flops = GPT(model).flops_per_token() * job.tokens
    weights = count["matrix"] + count["head"]
    row = job.key | dict(flops=flops, weights=weights, parameters=sum(count.values()))
    row["bpb"] = next(r["full_val_bpb"] for r in reversed(records) if "full_val_bpb" in r)
    row["seconds"] = round(sum(r.get("step_s", 0) for r in records), 1)
    return row | dict(fingerprint=manifest.fingerprint[:12]) | runs.made()


def make(chain: list[Job], stop: threading.Event) -> bool:
    """Make one run after another and append the row of each, until one fails. `stop` ends it with
    SIGTERM, so that it saves a checkpoint. Returns whether all were made."""
    env = os.environ | dict(OMP_NUM_THREADS="1")
    for job in chain:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with (
            open(job.log, "a") as log,
            subprocess.Popen(job.command, stdout=log, stderr=log, env=env, cwd=ROOT) as process,
        ):
            while process.poll() is None:
                if stop.wait(0.1):
                    process.terminate()
                    break
        name = job.run_dir.name
        if process.returncode:
            said = f"exit code {process.returncode}: {runs.last_line(job.log)} ({job.log})"
            print(f"{name}: {said}", flush=True)
            return False
        row = read_run(job)
        disk.append(ROWS, json.dumps(row) + "\n")
        print(f"{name}: {row['bpb']:.4f} bpb", flush=True)
    return True


def make_all(chains: list[list[Job]], at_once: int) -> bool:
    """Make the runs of so many chains at once. Whatever interrupts it also ends the runs."""
    stop = threading.Event()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            return all([*pool.map(lambda chain: make(chain, stop), chains)])
        finally:
            stop.set()


def main(argv: list[str]) -> int:
    at_once = int(argv[0]) if argv and argv[0].isdecimal() else 2
    if argv not in ([], [str(at_once)]) or at_once < 1:
        raise UsageError(f"{' '.join(argv)!r}: give the number of runs at once, or nothing")
    if not (ROOT / DATA / "manifest.json").exists():
        command = [sys.executable, "prepare_data.py", *PREPARE.split(), "--data_dir", DATA]
        subprocess.run(command, check=True, cwd=ROOT)
    rows = read_lines(ROWS, dict)
    chains = [[job for job in chain if not has_row(job, rows)] for chain in grid()]
    print(f"{sum(map(len, chains))} runs to make, {at_once} at once", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    return 0 if make_all(chains, at_once) else 1


if __name__ == "__main__":
    cli.run(main)
