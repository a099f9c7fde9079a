"""Did your change of the real files help? `python course/labs/judge.py 1 [--seeds 3] [--steps 300]`

The last commit (or --base REVISION) and your files, which you should not edit meanwhile, both train
a small `tiny` (2 layers, 300 steps of 2,048 tokens) with each seed, on the same rows in the same
order, and are scored on the same held-out text in bits per byte. The verdict is about the
difference: a change that does nothing, but draws other random numbers, is called a help or a harm
in 5% of cases. Beside it stands what `eval.py compare` says: how many times fewer tokens, FLOPs and
seconds your files need. For lab 5 each prepares its own text, with one tokenizer, and both are
scored on the held-out text of the last commit.

Your files first take a single step: if they fail there, nothing else is run. Takes about five
minutes on two cores. Exit codes: 0 it helped, 1 it did not, 2 nothing to judge.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from instruments.pages import multiplier
from instruments.pages.run_folder import RunFolder
from machinery import code

DATA = "--tokens 3M --vocab_size 1024 --row_len 257 --val_fraction 0.03"
TRAIN = (
    "--vocab_size 1024 --seq_len 256 --n_layer 2 --n_embd 128 --n_head 2 --n_kv_head 2 "
    "--head_dim 64 --mlp_hidden 512 --no_compile --device cpu --dtype fp32 "
    "--eval_tokens 20480 --log_every 0 --save_minutes 0"
)
LABS = {1: "a gate", 2: "a norm", 3: "a window", 4: "an optimizer", 5: "a data source"}
# The mean of n differences lies within this many standard errors of the true one in 95% of cases:
# Student's t with n - 1 degrees of freedom.
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


@dataclass(frozen=True)
class Verdict:
    mean: float  # of after - before, in bits per byte
    error: float  # half of its 95% interval
    word: str  # "helped", "harmed" or "no difference"


def verdict(before: list[float], after: list[float]) -> Verdict:
    """Bits per byte by seed -> is the difference larger than the seeds' noise?

    The two runs of a seed see the same rows, so their difference is less noisy than either.
    """
    d = [b - a for a, b in zip(before, after)]
    mean = statistics.mean(d)
    error = T95[len(d)] * statistics.stdev(d) / len(d) ** 0.5
    word = "no difference" if abs(mean) <= error else "helped" if mean < 0 else "harmed"
    return Verdict(mean, error, word)


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def clone_of(revision: str, folder: Path) -> Path:
    """The files of a commit; a run there knows that commit."""
    top = git("rev-parse", "--show-toplevel").strip()
    git("clone", "--quiet", "--shared", "--no-checkout", top, str(folder))
    git("-C", str(folder), "checkout", "--quiet", "--detach", git("rev-parse", revision).strip())
    tree = folder / git("rev-parse", "--show-prefix").strip()
    if not (tree / "machinery" / "code.py").exists():
        sys.exit(f"{revision} is older than machinery/code.py, by which a run knows its code")
    return tree


def run(tree: Path, program: str, *words) -> None:
    """Run a program of a copy; the end of what it said if it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    command = [sys.executable, program, *map(str, words)]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        whose = "your files" if tree == ROOT else "the files of the commit"
        said = (done.stdout + done.stderr)[-1500:]
        sys.exit(f"{program} of {whose} ended with code {done.returncode}:\n{said}")


def prepared(tree: Path, data: Path, options: list[str]) -> Path:
    run(tree, "prepare_data.py", "tiny", *options, "--data_dir", data, "--workers", 2)
    return data


def train(tree: Path, data: Path, folder: Path, seed: int, steps: int) -> None:
    often = max(1, steps // 8)
    options = [*shlex.split(TRAIN), "--steps", steps, "--seed", seed, "--eval_every", often]
    run(tree, "train.py", "tiny", *options, "--data_dir", data, "--run_dir", folder)


def score(base: Path, data: Path, folder: Path, lab: int) -> float:
    """-> bits per byte of the held-out text."""
    if lab != 5:
        return RunFolder(folder).whole_validation.full_val_bpb
    run(base, "eval.py", "loss", folder, "--data_dir", data, "--device", "cpu")  # the base's text
    return json.loads((folder / "eval.jsonl").read_text().splitlines()[-1])["val_bpb"]


def times_less(before: RunFolder, after: RunFolder) -> str:
    """How many times less `after` needs than `before`, in tokens, FLOPs and time."""
    end = before.validations[-1].tokens
    found = [multiplier.times_less(m, before, after, end) for m in multiplier.MEASURES]
    return "".join(f"{x:>8.2f}" if 0 < x < math.inf else "     n/a" for x in found)


def judge(lab: int, base: str, seeds: int, steps: int, at_once: int) -> Verdict | None:
    """None if the files were edited while the runs were made."""
    with tempfile.TemporaryDirectory(prefix="lab") as name:
        folder = Path(name)
        trees = {"before": clone_of(base, folder / "base"), "after": ROOT}
        data = dict.fromkeys(trees, prepared(trees["before"], folder / "data", shlex.split(DATA)))
        if lab == 5:
            options = [*shlex.split(DATA), "--tokenizer", folder / "data" / "tokenizer.json"]
            data["after"] = prepared(trees["after"], folder / "data_after", options)
        train(ROOT, data["after"], folder / "first", 0, 1)  # does it run at all?
        jobs = [(side, seed) for seed in range(seeds) for side in trees]
        began = time.monotonic()
        with ThreadPoolExecutor(at_once) as pool:
            made = [
                pool.submit(train, trees[s], data[s], folder / f"{s}{seed}", seed, steps)
                for s, seed in jobs
            ]
            for job in made:
                job.result()
        print(f"{2 * seeds} runs of {steps} steps in {time.monotonic() - began:.0f} s")
        places = {s: [folder / f"{s}{seed}" for seed in range(seeds)] for s in trees}
        runs = {s: [*map(RunFolder, places[s])] for s in trees}
        if any(run.codes != runs["after"][0].codes for run in runs["after"]):
            print("a file was edited while the runs were made; once more")
            return None
        codes = [runs[s][0].codes[-1] for s in trees]
        print(code.difference(*codes) or "no file that computes differs")
        scored = lambda place: score(trees["before"], data["before"], place, lab)
        before, after = ([*map(scored, places[s])] for s in trees)
        less = "" if lab == 5 else "  times less: tokens, FLOPs, time"
        print(f"seed  before   after    difference, bits per byte{less}")
        for seed, (a, b) in enumerate(zip(before, after)):
            factors = "" if lab == 5 else times_less(runs["before"][seed], runs["after"][seed])
            print(f"{seed:4}  {a:.4f}   {b:.4f}   {b - a:+.4f}                 {factors}")
    found = verdict(before, after)
    print(f"mean difference {found.mean:+.4f}, 95% interval +-{found.error:.4f}")
    say = {
        "helped": "it helped: fewer bits, and more than the seeds can explain",
        "harmed": "it harmed: more bits, and more than the seeds can explain",
        "no difference": "no difference that the seeds' noise does not explain",
    }[found.word]
    print(f"lab {lab}: {'no difference: all runs are equal' if before == after else say}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lab", type=int, choices=LABS, help=str(LABS))
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 11), metavar="2..10")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--at_once", type=int, default=2, help="runs side by side, a core each")
    options = parser.parse_args()
    changed = git("diff", "--stat", options.base, "--", "*.py", ":!course", ":!tests")
    if not changed:
        print(f"the files equal {options.base}: change something first, see lab{options.lab}.md")
        return 2
    print(changed, end="")
    found = judge(**vars(options))
    return int(found.word != "helped") if found else 2


if __name__ == "__main__":
    sys.exit(main())
