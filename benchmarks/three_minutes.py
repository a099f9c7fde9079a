"""What does a model know after three minutes of training on this CPU?

    python benchmarks/three_minutes.py [--seconds 180] [--seeds 0]

Each variant of `tiny` first takes some steps to time one; then it trains for as many as fit in
--seconds, with its whole schedule. Compiling and validating do not count. Two runs of one thread
each go side by side.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from throughput import ROOT, report

# Tied, clipped, with a longer warmup: AdamW's best form here of those tried (RESULTS.md).
ADAMW = "--optimizer adamw --tie_embeddings --grad_clip 1 --warmup 40 --lr"
VARIANTS = {
    "the default": "",
    "AdamW, 4e-3": f"{ADAMW} 4e-3",
    "AdamW, 8e-3": f"{ADAMW} 8e-3",
    "AdamW, 1.6e-2": f"{ADAMW} 1.6e-2",
    "the default, eager": "--no-compile",
    "the default, eager, fp32": "--no-compile --dtype fp32",
}


def train(options: str, steps: int, seed: int, folder: Path) -> list[dict]:
    """The records of metrics.jsonl of a run in a process of its own."""
    run = f"{options} --steps {steps} --seed {seed} --eval_every 0 --save_minutes 0"
    subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "tiny", *run.split(), "--run_dir", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measure(options: str, seconds: float, seed: int, probe: int = 60) -> tuple[float, int, float]:
    """(seconds of a step, steps, bits per byte at the end)."""
    with tempfile.TemporaryDirectory() as folder:
        records = train(options, probe, seed, Path(folder) / "probe")
        times = [r["step_s"] for r in records if "step_s" in r]
        step_s = statistics.mean(times[probe // 2 :])  # the first compiles
        steps = max(1, round(seconds / step_s))
        records = train(options, steps, seed, Path(folder) / "run")
    return step_s, steps, [r["val_bpb"] for r in records if "val_bpb" in r][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--at_once", type=int, default=2, help="runs, of one thread each")
    parser.add_argument("--results", default=str(ROOT / "benchmarks" / "RESULTS.md"))
    args = parser.parse_args()
    cases = [(name, seed) for seed in args.seeds for name in VARIANTS]
    found = {name: [] for name in VARIANTS}
    with ThreadPoolExecutor(args.at_once) as pool:
        run = lambda case: measure(VARIANTS[case[0]], args.seconds, case[1])
        for (name, seed), result in zip(cases, pool.map(run, cases)):
            found[name].append(result)
            print(f"{name}, seed {seed}: {result[2]:.4f} bpb after {result[1]} steps", flush=True)
    rows = []
    for name, results in found.items():
        step_s, steps, bpb = zip(*results)
        spread = f" ± {statistics.stdev(bpb):.3f}" if len(bpb) > 1 else ""
        mean = statistics.fmean(bpb)
        ms = f"{1e3 * statistics.fmean(step_s):.0f}"
        rows.append([name, VARIANTS[name] or "-", ms, f"{statistics.fmean(steps):,.0f}"])
        rows[-1].append(f"{mean:.3f}{spread}")
    header = ["variant", "options", "ms/step", "steps", "bits per byte"]
    report(f"{args.seconds:.0f} seconds of training", header, rows, args.results)


if __name__ == "__main__":
    main()
