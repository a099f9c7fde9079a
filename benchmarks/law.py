"""The law L(N, D) = E + A N^-a + B D^-b, fitted.

`python benchmarks/law.py` prints the law of our runs on a CPU (SCALING.jsonl) and that of other
people's on GPUs (PUBLISHED.jsonl), and writes the second to instruments/run/law.json, with which
`eval.py plan d12 --gpu H100` predicts. N: weights of the blocks and the head. D: tokens. L: bits
per byte (Hoffmann et al. 2022, approach 3). SCALING.md has the tables. Needs
requirements-scaling.txt.
"""

import json
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
LAW = ROOT / "instruments" / "run" / "law.json"
SHORTEST = 2**19  # tokens: shorter runs have not learned to copy, and lie on another curve


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
        self.errors = errors(self.p)  # of each row

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


def newest(rows: list[dict]) -> list[dict]:
    """The rows of the machine that made the last one, each text as it was prepared last: others
    cannot be compared."""
    rows = [row for row in rows if row["machine"] == rows[-1]["machine"]]
    last = {row["data"]: row["fingerprint"] for row in rows if "fingerprint" in row}
    return [row for row in rows if row.get("fingerprint") in (None, last.get(row["data"]))]


def as_file(law: Law) -> dict:
    """What instruments/run/forecast.py reads: the constants for the second text."""
    tree = dict(text=law.texts[1], **dict(zip("EAaBb", law.constants())))
    tree |= dict(factor=float(np.exp(law.p[5])), runs=len(law.rows))
    largest = {key: max(row[key] for row in law.rows) for key in ("weights", "tokens")}
    return tree | largest


def main(argv: list[str]) -> int:
    if argv:
        raise UsageError(f"law.py takes no {argv[0]}: it reads SCALING.jsonl and PUBLISHED.jsonl")
    rows = newest(read_lines(HERE / "SCALING.jsonl", dict))
    grid = [r for r in rows if r["name"] == "base" and r["data"] == "scaling" and r["seed"] == 0]
    theirs = Law(read_lines(HERE / "PUBLISHED.jsonl", dict))
    disk.write_text(LAW, json.dumps(as_file(theirs)) + "\n")
    print(f"ours, {Law([row for row in grid if row['tokens'] >= SHORTEST])}")
    print(f"published, of {theirs.texts[1]}, {theirs}")
    return 0


if __name__ == "__main__":
    cli.run(main)
