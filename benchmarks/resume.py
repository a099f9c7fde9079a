"""Is a killed run the run that it would have been? On this machine, with this preset:

    python benchmarks/resume.py d12 --data_dir data/d12 --tokens_per_step 131072

Trains into a temporary folder, with the options given: killed (SIGKILL) some steps after a
checkpoint, run again, and stopped by SIGTERM when it has taken those steps a second time. Their
losses must be the same: equal on a CPU; within 0.02 nats on a GPU, which sums in no fixed order.
Prints a line, and appends it to benchmarks/RESULTS.md (--results "" for no file).
"""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from at_root import ROOT
from machinery.formats import read_lines
from runs import device_name, parser_of

STOPPED = 143  # the exit code of a run that SIGTERM has ended


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step; of a step that was taken twice, the second time."""
    lines = read_lines(run_dir / "metrics.jsonl", dict)
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def start(command: list[str], log: Path, ready: Callable[[], bool]) -> subprocess.Popen:
    """Start a run; returns when ready() is true."""
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    try:
        while not ready():
            if process.poll() is not None:
                raise RuntimeError(f"it ended with exit code {process.returncode}")
            time.sleep(0.05)
    except BaseException:  # out of time, perhaps
        process.kill()
        process.wait()
        print(log.read_text(errors="replace")[-2000:], flush=True)
        raise
    return process


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("preset", nargs="?", default="tiny")
    parser.add_argument("--save_every", type=int, default=40, help="steps")
    parser.add_argument("--dir", type=Path, help="for the temporary folder: the disk to write to")
    args, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # so that the folder is removed
    every = args.save_every
    tolerance = 0.02 if torch.cuda.is_available() else 0.0
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        run_dir = Path(folder, "run")
        logs = [Path(folder, f"{n}.txt") for n in (1, 2)]
        command = [sys.executable, "train.py", args.preset, *options, "--run_dir", str(run_dir)]
        command += ["--save_every", str(every), "--save_minutes", "0"]
        command += ["--steps", "100000", "--eval_every", "0", "--eval_tokens", "8192"]
        newest = lambda: max(losses(run_dir), default=0)
        saved = r"saved .+ in (\S+) s, training paused (\S+) s"
        pauses = lambda: re.search(saved, logs[0].read_text())
        between = lambda: 2 <= newest() % every <= every // 2  # steps that no checkpoint holds
        process = start(command, logs[0], lambda: pauses() and between())
        process.kill()
        process.wait()
        before = losses(run_dir)
        killed_at = max(before)
        print(f"killed after step {killed_at}", flush=True)
        resumed = lambda: re.search(r"resumed at step ([\d,]+)", logs[1].read_text())
        process = start(command, logs[1], lambda: resumed() and newest() >= killed_at + 5)
        process.terminate()
        code = process.wait()
        resumed_at = int(resumed()[1].replace(",", ""))
        after = losses(run_dir)
        saved_s, paused_s = pauses().groups()
    twice = [step for step in before if step > resumed_at]
    largest = max((abs(before[step] - after[step]) for step in twice), default=float("nan"))
    text = f"Killed after step {killed_at}, resumed at step {resumed_at}; {len(twice)} steps taken "
    text += f"twice differ by at most {largest:.1e} nats ({tolerance:g} allowed). The first save "
    text += f"took {saved_s} s, and stopped training for {paused_s} s. SIGTERM: exit code "
    text += f"{code} ({STOPPED} expected)."
    print(text)
    if args.results:
        with open(args.results, "a") as file:
            file.write(f"\n## Kill and resume, {args.preset}: {device_name()}\n\n{text}\n")
    return int(not largest <= tolerance or code != STOPPED)


if __name__ == "__main__":
    sys.exit(main())
