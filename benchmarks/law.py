"""The law L(N, D) = E + A N^-a + B D^-b, fitted.

`python benchmarks/law.py` prints the law of our runs on a CPU (SCALING.jsonl) and that of other
people's on GPUs (PUBLISHED.jsonl), and writes both to instruments/run/law.json, with which
`eval.py plan --here` and `eval.py plan d12 --gpu H100` predict. N: weights. D: tokens. L: bits
per byte (Hoffmann et al. 2022, approach 3). SCALING.md has the tables.
Needs requirements-scaling.txt.
"""

import json
import math
import statistics
import sys
from itertools import product

from at_root import ROOT
from config import UsageError, install
from machinery import cli, disk
from machinery.formats import read_lines

try:
    import numpy as np
    from scipy.optimize import least_squares
except ImportError as error:
    print(f"error: {error}; {install('requirements-scaling.txt')}", file=sys.stderr)
    sys.exit(2)

HERE = ROOT / "benchmarks"
SHORTEST = 2**19  # tokens: shorter runs have not learned to copy, and lie on another curve
LAW = ROOT / "instruments" / "run" / "law.json"


class Law:
    """Fitted to rows with weights, tokens and bpb, by least squares of the logarithms, in which an
    error above 1% counts less (soft L1). Rows of a `text` other than the first one's have a factor
    on the whole loss: another text is easier or harder by so much."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows
        self.texts = list(dict.fromkeys(row.get("text", "") for row in rows))
        N, D, bpb = (np.array([row[key] for row in rows]) for key in ("weights", "tokens", "bpb"))
        text = np.array([self.texts.index(row.get("text", "")) for row in rows])
        self.units = np.exp(np.log(N).mean()), np.exp(np.log(D).mean())
        level = float(np.exp(np.log(bpb).mean()))
        factors = [0.0] * (len(self.texts) - 1)
        bounds = [-12.0] * 5 + [-1.0] * len(factors), [2.0] * 5 + [1.0] * len(factors)

        def errors(p: np.ndarray) -> np.ndarray:
            return np.log(bpb) - self.log_loss(p, N, D, text)

        fits = []
        for E, a, b in product((0.1, 0.6), (0.2, 0.5), (0.2, 0.5)):  # where a fit begins
            start = np.log([E * level, 0.2 * level, a, 0.2 * level, b]).tolist() + factors
            options = dict(loss="soft_l1", f_scale=0.01, bounds=bounds)
            fits.append(least_squares(errors, start, **options))
        self.p = min(fits, key=lambda fit: fit.cost).x  # logarithms of E, A, a, B, b, the factors
        self.errors = errors(self.p)  # of each row, as a logarithm

    def log_loss(self, p, N, D, text=0):
        E, A, a, B, b, *factors = np.exp(p)
        n = N / self.units[0]
        d = D / self.units[1]
        return np.log((E + A * n**-a + B * d**-b) * np.array([1, *factors])[text])

    def constants(self) -> tuple:
        """E, A, a, B, b for N in weights and D in tokens."""
        E, A, a, B, b = np.exp(self.p)[:5]
        return E, A * self.units[0] ** a, a, B * self.units[1] ** b, b

    def __str__(self) -> str:
        E, A, a, B, b = self.constants()
        mean = statistics.fmean(abs(self.errors))
        worst = max(self.errors, key=abs)
        return (
            f"{len(self.rows)} runs: L = {E:.3f} + {A:.3g} N^-{a:.3f} + {B:.3g} D^-{b:.3f}, "
            f"off by {mean:.2%} in the mean, {worst:+.2%} at worst"
        )


def beyond(rows: list[dict]) -> float:
    """By how much the law is wrong at worst, as a share, of the longest run of each size when it is
    fitted to the shorter ones."""
    size = lambda row: (row.get("text", ""), row["weights"])
    longest = {size(row): row for row in sorted(rows, key=lambda row: row["tokens"])}
    short = [row for row in rows if row is not longest[size(row)]]
    law = Law(short)
    errors = []
    for row in map(longest.get, {size(row) for row in short}):
        text = law.texts.index(row.get("text", ""))
        guess = law.log_loss(law.p, row["weights"], row["tokens"], text)
        errors.append(abs(math.log(row["bpb"]) - guess))
    return float(max(errors))


def as_file(law: Law) -> dict:
    """What instruments/run/law.py reads: the constants for the last text."""
    tree = dict(zip("EAaBb", law.constants()), factor=float(np.exp(law.p[5])), runs=len(law.rows))
    for key in ("weights", "tokens"):
        tree[key] = [pick(row[key] for row in law.rows) for pick in (min, max)]
    return tree | dict(off=float(max(abs(law.errors))))


def both() -> dict[str, Law]:
    """The law of our runs, and that of other people's, by the text that they predict. The first
    joins two grids: `tiny` at other depths on its text, and narrower heads on a larger one. It
    counts the weights of the blocks alone, as their heads have vocabularies of 4,096 and 2,048."""
    texts = {"base": "stdlib+site", "tiny": "stdlib"}
    ours = []
    for row in read_lines(HERE / "SCALING.jsonl", dict):
        name, depth = row["name"], row["depth"]
        if row.get("seed") == 0 and row["data"] in ("scaling", "tiny") and name in texts:
            width = 64 * (depth + depth % 2 if name == "tiny" else depth)
            ours.append(row | dict(text=texts[name], weights=12 * depth * width**2))
    theirs = read_lines(HERE / "PUBLISHED.jsonl", dict)
    return {
        "stdlib": Law([r for r in ours if r["depth"] > 1 and r["tokens"] >= SHORTEST]),
        "ClimbMix": Law(theirs),
    }


def main(argv: list[str]) -> int:
    if argv:
        raise UsageError(f"law.py takes no {argv[0]}: it reads SCALING.jsonl and PUBLISHED.jsonl")
    laws = both()
    further = beyond(laws["stdlib"].rows)
    counts = {"stdlib": ["matrix"], "ClimbMix": ["matrix", "head"]}
    tree = {
        text: as_file(law) | dict(beyond=further, counts=counts[text]) for text, law in laws.items()
    }
    disk.write_text(LAW, json.dumps(tree, indent=1) + "\n")
    for text, law in laws.items():
        print(f"{text}, {law}")
    print(f"stdlib, the longest of each size by the rest: off by {further:.2%} at worst")
    return 0


if __name__ == "__main__":
    cli.run(main)
