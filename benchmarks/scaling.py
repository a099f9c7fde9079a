"""What will another model reach? Runs of small models, to which a law is fitted.

    python benchmarks/scaling.py              a grid of sizes and tokens; 4: four runs at once
    python benchmarks/law.py                  the law; runs nothing

The runs are those that `eval.py plan --here` has to choose from: `tiny` at other depths, in batches
that grow with the tokens. Each is a process of train.py on one thread, and a row of SCALING.jsonl;
one that is there for this text is not repeated, and a run that was killed goes on where it was.
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

import runs
from at_root import ROOT
from config import Preset, UsageError, find_preset
from instruments.run import choice, law
from machinery import cli, disk
from machinery.formats import read_lines
from machinery.shards import Manifest

ROWS = ROOT / "benchmarks" / "SCALING.jsonl"
RUNS = "runs/scaling"
DATA = "data/tiny"
EVERY_RUN = (
    "--eval_every 0 --eval_tokens 8192 --save_minutes 5 --log_every 0 "
    "--peak_tflops 0.2"  # any value: else each run begins with measuring it
)
HORIZONS = {  # depth -> its numbers of tokens, as powers of 2 (20: 1M)
    2: range(20, 23),
    4: range(20, 22),
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
        return dict(name="tiny", depth=self.depth, tokens=self.tokens, seed=0, data=data)

    @property
    def preset(self) -> Preset:
        return choice.of_depth(replace(find_preset("tiny"), name="tiny"), self.depth, self.tokens)

    @property
    def run_dir(self) -> Path:
        return ROOT / RUNS / f"d{self.depth}_{self.tokens}"

    @property
    def log(self) -> Path:
        return self.run_dir.with_suffix(".log")

    @property
    def command(self) -> list[str]:
        words = choice.words_of(self.preset)
        folders = ["--data_dir", DATA, "--run_dir", str(self.run_dir)]
        return [sys.executable, "train.py", *words, *folders, *EVERY_RUN.split()]


def grid() -> list[Job]:
    """The longest runs first."""
    jobs = [Job(depth, 2**n) for depth, powers in HORIZONS.items() for n in powers]
    return sorted(jobs, key=lambda job: -job.tokens * job.depth**2)


# ---------------------------------------------------------------- the runs


def has_row(job: Job, rows: list[dict]) -> bool:
    """Whether it has a row of the same text."""
    mine = job.key | dict(fingerprint=Manifest.load(ROOT / DATA).fingerprint[:12])
    return any(mine.items() <= row.items() for row in rows)


def read_run(job: Job) -> dict:
    """The row of a finished run. weights: those of the blocks. seconds: of its steps."""
    records = read_lines(job.run_dir / "metrics.jsonl", dict)
    manifest = Manifest.load(ROOT / DATA)
    found = dict(seq_len=manifest.row_len - 1, vocab_size=manifest.vocab_size)
    model = replace(job.preset.model, **found)
    row = job.key | dict(
        weights=law.weights_of("stdlib", model),
        bpb=next(r["full_val_bpb"] for r in reversed(records) if "full_val_bpb" in r),
        seconds=round(sum(r.get("step_s", 0) for r in records), 1),
        fingerprint=manifest.fingerprint[:12],
    )
    return row | runs.made()


def make(job: Job, stop: threading.Event) -> bool:
    """Make a run and append its row. `stop` ends it with SIGTERM, so that it saves a checkpoint.
    Returns whether it was made."""
    if stop.is_set():
        return False
    env = os.environ | dict(OMP_NUM_THREADS="1")
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


def make_all(jobs: list[Job], at_once: int) -> bool:
    """Make so many runs at once. Whatever interrupts it also ends the runs."""
    stop = threading.Event()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            return all([*pool.map(lambda job: make(job, stop), jobs)])
        finally:
            stop.set()


def main(argv: list[str]) -> int:
    at_once = int(argv[0]) if argv and argv[0].isdecimal() else 2
    if argv not in ([], [str(at_once)]) or at_once < 1:
        raise UsageError(f"{' '.join(argv)!r}: give the number of runs at once, or nothing")
    if not (ROOT / DATA / "manifest.json").exists():
        command = [sys.executable, "prepare_data.py", "tiny", "--data_dir", DATA]
        subprocess.run(command, check=True, cwd=ROOT)
    rows = read_lines(ROWS, dict)
    jobs = [job for job in grid() if not has_row(job, rows)]
    print(f"{len(jobs)} runs to make, {at_once} at once", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    return 0 if make_all(jobs, at_once) else 1


if __name__ == "__main__":
    cli.run(main)
