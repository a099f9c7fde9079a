"""What the recipe is worth: its parts, its rates, and ideas that are not in it, on code and prose.

    bash benchmarks/prose.sh              once: the text of prose
    python benchmarks/recipe.py parts     key offset and previous-token head: both, either, neither
    python benchmarks/recipe.py ideas     what others have and this recipe does not
    python benchmarks/recipe.py stock     the shape that other programs know (config.in_stock_shape)
    python benchmarks/recipe.py rates     rates of the tables, and of all, as tokens grow
    python benchmarks/recipe.py           RECIPE.md again; runs nothing

Each run is one of scaling.py's, of depth 4, and a row of RECIPE.jsonl, with the loss of five
classes of held-out targets (eval.py loss --by copy). What a change costs is counted in tokens: how
many times as many it needs for what the base has.

The rule, written before the runs, with two seeds and two texts:
- A part stays if a run without it needs 1.05 times as many tokens or more at the last horizon, with
  each seed, on both texts. If that holds of targets after a new token, too, it does more than copy.
- An idea enters if a run with it needs 0.95 times as many or fewer at the last two horizons, with
  each seed, on both texts. One that fails once is out: its other runs need not be made.
- Anything else counts as no difference.
"""

import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import numpy as np

import runs
import scaling
from config import UsageError
from instruments.pages.multiplier import meet
from machinery import cli, disk
from machinery.formats import read_lines
from machinery.screen import short
from runs import ROOT
from scaling import Job, M, chain

ROWS = ROOT / "benchmarks" / "RECIPE.jsonl"
DEPTH = 4
HORIZONS = (M // 2, M, 2 * M, 4 * M)
SEEDS = (0, 1)
PREPARE = "tiny --vocab_size 2048 --row_len 257 --val_fraction"
TEXTS = {
    "data/code": f"{PREPARE} 0.02 --source stdlib",
    "data/prose": f"{PREPARE} 0.01 --source files:prose/*.txt --dedup exact",
}
ABOUT = """# What the recipe is worth

Made by `python benchmarks/recipe.py` from RECIPE.jsonl; the rule of the verdict is in that file.
Depth 4, width 256, rows of 257, a vocabulary of 2,048, steps of 2,048 tokens, decay over 65%. How
many times as many tokens as the base a run with the change has needed for the loss that it ends
with: a number for each seed that was run, 0 and then 1; n/a: the base's shortest run is better.

The rows of the stock shape were run on an H200, on the first 5M tokens of each text, beside a base
of their own; all others on two CPU threads, on the whole texts. The held-out texts differ too.
"""
CLASSES = {"all": slice(None), "copies": [0, 2], "not copies": [1, 3], "after a new token": [4]}
STOCK = "--mlp swiglu --mlp_hidden 704 --extras '' --logit_softcap 0"  # config.in_stock_shape
CHANGES = {  # by part; name: (an idea of tried.py, options of train.py)
    "parts": {
        "no previous-token head": ("no_previous_token_head", ""),
        "no key offset": ("", "--extras value_embeds"),
        "neither": ("no_previous_token_head", "--extras value_embeds"),
    },
    "ideas": {
        "residual and x0 scales": ("scales", ""),
        "backout": ("backout", ""),
        "smear": ("smear", ""),
        "MuonEq": ("muon_eq", ""),
        "Muon+": ("muon_plus", ""),
        "q and k x 1.2": ("qk_scale", ""),
        "mean of the last tenth of the steps": ("tail_average", ""),
    },
    "stock": {
        "stock shape": ("", STOCK),
        "stock shape, no previous-token head": ("no_previous_token_head", STOCK),
    },
    "rates": {
        "embedding rate 0.3": ("", "--embedding_lr 0.3"),
        "all rates x 0.5": ("", "--lr_scale 0.5"),
        "all rates x 2": ("", "--lr_scale 2"),
    },
}


def jobs_of(part: str) -> Iterator[Job]:
    for seed, data in product(SEEDS, TEXTS):
        for name, (idea, options) in ({"base": ("", "")} | CHANGES[part]).items():
            yield from chain(name, DEPTH, HORIZONS, idea, options, seed=seed, data=data)


def read_run(job: Job) -> dict:
    """scaling.py's row, and `classes`: nats and bytes of the held-out targets of each class."""
    kept = sorted(job.run_dir.glob("val_rows_*.npy"))
    if not kept:
        command = [sys.executable, "benchmarks/tried.py", job.idea or "none", "eval", "loss"]
        command += ["--run_dir", str(job.run_dir)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        kept = sorted(job.run_dir.glob("val_rows_*.npy"))
    sums = np.load(kept[-1]).sum(0)  # (classes, 4)
    return scaling.read_run(job) | dict(classes=sums[:, 2:].round(1).tolist())


def bits_per_byte(row: dict, classes) -> float:
    nats, size = np.array(row["classes"])[classes].sum(0)
    return nats / math.log(2) / size


def saved(tokens: int, changed: list[tuple[int, float]], base: list[tuple[int, float]]) -> float:
    """How many times fewer tokens the base needs for the loss of a change after `tokens`; (tokens,
    loss) each. 0 or infinity: outside of the runs."""
    usual, needed = meet(base, changed, tokens)
    return needed / usual if usual else math.inf


def needs(found: dict, fingerprint: str, name: str, tokens: int, classes) -> str:
    """How many times as many tokens as the base, a number for each seed; n/a: beyond the runs."""
    times = []
    for seed in SEEDS:
        of = [
            [(t, found.get((fingerprint, who, seed, t))) for t in HORIZONS]
            for who in (name, "base")
        ]
        curves = [[(t, bits_per_byte(row, classes)) for t, row in rows if row] for rows in of]
        if all(tokens in dict(curve) for curve in curves):
            times.append(saved(tokens, *curves))
    return ", ".join(f"{x:.2f}" if 0 < x < math.inf else "n/a" for x in times)


def render(rows: list[dict]) -> str:
    """RECIPE.md."""
    found = {(r["fingerprint"], r["name"], r["seed"], r["tokens"]): r for r in rows}
    # The text that a change was run on last; its rows on other texts are left out.
    prepared = {(r["data"], r["name"]): r["fingerprint"] for r in rows}
    names = [name for part in CHANGES.values() for name in part]
    ends = HORIZONS[1:]
    text = ABOUT
    for data, (of, classes) in product(("code", "prose"), CLASSES.items()):
        made = {name: prepared[data, name] for name in names if (data, name) in prepared}
        cells = [
            [name, *(needs(found, fingerprint, name, t, classes) for t in ends)]
            for name, fingerprint in made.items()
        ]
        header = [f"{data}: {of}", *(f"{short(t)} tokens" for t in ends)]
        text += f"\n{runs.table(header, cells)}\n" if made else ""
    return text


def main(argv: list[str]) -> int:
    if not set(argv) <= CHANGES.keys():
        raise UsageError(f"{' '.join(argv)!r}: give some of {', '.join(CHANGES)}, or nothing")
    for data, words in TEXTS.items() if argv else ():
        if not (ROOT / data / "manifest.json").exists():
            command = [sys.executable, "prepare_data.py", *words.split(), "--data_dir", data]
            subprocess.run(command, check=True, cwd=ROOT)
    jobs = dict.fromkeys(job for part in argv for job in jobs_of(part))  # each once
    failed = scaling.run(list(jobs), 2, ROWS, read_run)
    disk.write_text(ROOT / "benchmarks" / "RECIPE.md", render(read_lines(ROWS, dict)))
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
