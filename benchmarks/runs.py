"""Runs of train.py side by side, each with a row in a .jsonl file.

`side_by_side` makes the runs. The rest is what the benchmarks say about them: which code and which
machine it was, tables.
"""

import argparse
import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from at_root import ROOT
from config import GPTConfig
from machinery import disk
from machinery.ranks import cpu_name
from model import GPT


def side_by_side(jobs: list, slots: list[dict[str, str]], file: Path, row_of: Callable) -> int:
    """Make the runs, one at a time in each slot (variables of its environment), and append
    row_of(job), which has `bpb`, to `file` for each that succeeds; returns how many did not.

    A job has a `command`, its `run_dir`, and `after`: the job that it goes on from, or None. A run
    that was begun before goes on from its newest checkpoint. SIGINT and SIGTERM end the runs with
    SIGTERM, so that each saves one."""

    def stop(signum: int, frame) -> None:
        sys.exit(128 + signum)

    waiting = list(jobs)
    free = list(slots)
    running = {}
    failed = set()
    file.parent.mkdir(parents=True, exist_ok=True)
    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        while waiting or running:
            blocked = {*waiting, *running, *failed}
            ready = [job for job in waiting if job.after not in blocked]
            if not running and not ready:  # the others go on from a run that failed
                break
            for job, slot in zip(ready, list(free)):
                waiting.remove(job)
                free.remove(slot)
                running[job] = slot, launch(job, slot)
            ended = [job for job, (_, process) in running.items() if process.poll() is not None]
            for job in ended:
                slot, process = running.pop(job)
                free.append(slot)
                if process.returncode:
                    failed.add(job)
                    print(
                        f"{job.run_dir.name}: failed with exit code {process.returncode}: "
                        f"{last_line(log_of(job))} ({log_of(job)})",
                        flush=True,
                    )
                else:
                    row = row_of(job)
                    disk.append(file, json.dumps(row) + "\n")
                    print(f"{job.run_dir.name}: {row['bpb']:.4f} bpb", flush=True)
            time.sleep(0.1)
        return len(failed) + len(waiting)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def launch(job, slot: dict[str, str]) -> subprocess.Popen:
    job.run_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(log_of(job), "a") as log:
        env = {**os.environ, **slot}
        return subprocess.Popen(job.command, stdout=log, stderr=log, env=env, cwd=ROOT)


def log_of(job) -> Path:
    return job.run_dir.with_name(f"{job.run_dir.name}.log")


def last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1][:300]


# ---------------------------------------------------------------- what made a row


def made() -> dict[str, str]:
    """Code, machine and date, for a row."""
    today = datetime.date.today().isoformat()
    return dict(commit=COMMIT, torch=torch.__version__, machine=device_name(), date=today)


def code_version() -> str:
    """The commit; if the code has been edited since, followed by + and a hash of the edits."""

    def git(*words: str) -> bytes:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, check=False).stdout

    try:
        commit = git("rev-parse", "HEAD").decode()[:7]
        edits = git("diff", "HEAD", "--", "*.py")
    except OSError:  # there is no git
        return "unknown"
    return (commit or "unknown") + (f"+{hashlib.sha256(edits).hexdigest()[:7]}" if edits else "")


def device_name() -> str:
    """The GPU; or the processor, with the threads that torch takes."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


COMMIT = code_version()  # at the start of the program


def count_weights(config: GPTConfig) -> dict[str, int]:
    """Weights of a model by kind, as GPT.param_groups has them."""
    with torch.device("meta"):
        groups = GPT(config).param_groups()
    return {kind: sum(p.numel() for p in params) for kind, params in groups.items()}


def timed(work: Callable) -> float:
    """Seconds that work() takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---------------------------------------------------------------- how it is shown


def parser_of(about: str) -> argparse.ArgumentParser:
    """Of a program whose docstring this is, and whose tables go to a file. The option that names
    it is there already."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--results", default=str(ROOT / "benchmarks" / "RESULTS.md"))
    return parser


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table that also reads well on a screen."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * w for w in widths], *rows]
    padded = [map(str.ljust, line, widths) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
