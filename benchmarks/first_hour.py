"""The parts of first_hour.sh that need more than a command line.

    python benchmarks/first_hour.py environment          the machine, for the head of a report
    python benchmarks/first_hour.py resume d12 ...       is a killed run the run it would have been?
    python benchmarks/first_hour.py levers d12 ...       each lever between two runs without it

`resume` passes its options on to train.py. `levers` measures as throughput.py does, on random rows;
its table goes to --results.
"""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from machinery.log import read_jsonl
from runs import ROOT, device_name
from throughput import report, run_case

WORK = ROOT / "first_hour" / "work"
TRITON = {"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1"}
LEVERS = {  # name -> environment variables; none: micro_batch instead
    "Triton's matmuls where they are faster": TRITON,
    "the same, persistent with TMA": TRITON | {"ENABLE_PERSISTENT_TMA_MATMUL": "1"},
    "all rows of a step at once": {},
}


def environment() -> None:
    """Name and version of everything that a figure may depend on."""
    cuda = torch.cuda.is_available()
    gpu = torch.cuda.get_device_properties(0) if cuda else None
    disk, pages = shutil.disk_usage(ROOT), os.sysconf("SC_PHYS_PAGES")
    lines = {
        "GPU": f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB" if cuda else "none",
        "GPUs": torch.cuda.device_count(),
        "driver": _said("nvidia-smi --query-gpu=driver_version --format=csv,noheader"),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "Triton": _said(f"{sys.executable} -c 'import triton; print(triton.__version__)'"),
        "Python": sys.version.split()[0],
        "CPU": f"{device_name() if not cuda else _said('lscpu | grep Model.name')}; "
        f"{os.cpu_count()} cores, {os.sysconf('SC_PAGE_SIZE') * pages / 1e9:.0f} GB",
        "disk": f"{disk.free / 1e9:.0f} GB free",
        "commit": _said("git describe --always --dirty"),
    }
    for name, value in lines.items():
        print(f"{name:<18}{value}")
    print(_said("nvidia-smi"))


def _said(command: str) -> str:
    status, text = subprocess.getstatusoutput(f"cd '{ROOT}' && timeout 20 {command}")
    return "none" if status else text.strip()


def resume(preset: str, options: list[str]) -> int:
    """Train twice on the same data, once with a kill -9 in the middle, and compare the losses. On a
    CPU they must be equal; on a GPU sums come in no fixed order, so within 0.02 nats."""
    steps = 60 if torch.cuda.is_available() else 24
    save = ["--steps", str(steps), "--save_every", str(steps // 3), "--log_every", "6"]
    command = [sys.executable, "train.py", preset, *options, *save, "--eval_tokens", "16384"]
    whole, killed = WORK / "whole", WORK / "killed"
    subprocess.run([*command, "--run_dir", whole], cwd=ROOT, check=True)
    process = subprocess.Popen([*command, "--run_dir", killed], cwd=ROOT)
    while max(losses(killed), default=0) < steps // 2 and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"it ended with exit code {process.returncode} before it was killed")
    print(f"killed after step {max(losses(killed), default=0)}", flush=True)
    subprocess.run([*command, "--run_dir", killed], cwd=ROOT, check=True)
    one, two = losses(whole), losses(killed)
    largest = max(abs(one[s] - two.get(s, math.inf)) for s in range(1, steps + 1))
    print(f"final losses {one[steps]:.4f} and {two[steps]:.4f} nats per token")
    print(f"largest difference of a step: {largest:.2e}")
    return int(largest > 0.02 * torch.cuda.is_available())


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step; a resumed run repeats some, and the last one counts."""
    records = read_jsonl(run_dir / "metrics.jsonl")
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def levers(preset: str, tokens_per_step: int, steps: int, results: str) -> None:
    """Each lever between two runs without it, so that a slow drift of the clocks cancels."""
    cuda = torch.cuda.is_available()
    train = dict(tokens_per_step=tokens_per_step, compile=cuda, micro_batch=0 if cuda else 1)
    plain = dict(preset=preset, train=train, steps=steps, warmup=3)
    header, rows = ["lever", "rows", "tok/s", "gain", "memory"], []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # out of time: report what there is
    try:
        before = run_case(plain, timeout_s=300)
        print("without:", before, flush=True)
        if "error" in before:
            sys.exit(1)
        for name, variables in LEVERS.items():
            if not cuda and variables:
                print(f"{name}: skipped, needs a GPU", flush=True)
                continue
            all_rows = dict(micro_batch=before["micro_batch"] * before["grad_accum"])
            case = plain if variables else plain | dict(train=train | all_rows)
            with_it = run_case(case, timeout_s=240, **variables)
            after = run_case(plain, timeout_s=120)
            rows.append([name, *compare(before, with_it, after)])
            print(" | ".join(rows[-1]), flush=True)
            before = before if "error" in after else after
    finally:
        if rows:
            report(f"Levers, each between two runs of {preset} without it", header, rows, results)


def compare(before: dict, with_it: dict, after: dict) -> list[str]:
    if error := with_it.get("error") or after.get("error"):
        return ["", "", error[:70], ""]
    usual = (before["tokens_per_s"] + after["tokens_per_s"]) / 2
    return [
        f"{with_it['micro_batch']} x {with_it['grad_accum']}",
        f"{usual:,.0f} -> {with_it['tokens_per_s']:,.0f}",
        f"{with_it['tokens_per_s'] / usual - 1:+.1%}",
        f"{after['memory'] / 1e9:.1f} -> {with_it['memory'] / 1e9:.1f} GB",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["environment", "resume", "levers"])
    parser.add_argument("preset", nargs="?", default="tiny")
    parser.add_argument("--tokens_per_step", type=int, default=131_072)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--results", default="")
    if sys.argv[1:2] == ["resume"]:
        return resume(sys.argv[2], sys.argv[3:])
    args = parser.parse_args()
    if args.part == "environment":
        environment()
    else:
        levers(args.preset, args.tokens_per_step, args.steps, args.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
