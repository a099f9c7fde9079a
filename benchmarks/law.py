"""The law L(N, D) = E + A N^-a + B D^-b: its fit and its intervals.

`python benchmarks/law.py` prints the law of our runs on a CPU (SCALING.jsonl) and that of other
people's on GPUs (PUBLISHED.jsonl), and writes the second to instruments/run/law.json, with which
`eval.py plan d12 --gpu H100` predicts. N: weights of the blocks and the head. D: tokens. L: bits
per byte (Hoffmann et al. 2022, approach 3). SCALING.md has the tables. Needs
requirements-scaling.txt.
"""

import json
import math
import statistics
import sys
from itertools import product

import runs
from config import UsageError, find_preset, install
from machinery import cli, disk
from machinery.formats import read_lines
from machinery.plan import steps_for
from runs import ROOT

try:
    import numpy as np
    from scipy.optimize import least_squares
except ImportError as error:
    print(f"error: {error}; {install('requirements-scaling.txt')}", file=sys.stderr)
    sys.exit(2)

HERE = ROOT / "benchmarks"
LAW = ROOT / "instruments" / "run" / "law.json"
SHORTEST = 2**19  # tokens: shorter runs have not learned to copy, and lie on another curve
DRAWS = 200  # of the bootstrap
SURE = (0.05, 0.95)  # the ends of an interval


def doublings(x: float, most: float) -> float:
    """How often `most` must be doubled to reach x; 0 if it need not be."""
    return max(0.0, math.log2(x / most))


def frontiers(rows: list[dict]) -> list[set[int]]:
    """Rows to predict from the others: those of the largest size, and of each size that has several
    runs the one with the most tokens."""
    by_size: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_size.setdefault(row["weights"], []).append(i)
    longest = {max(of, key=lambda i: rows[i]["tokens"]) for of in by_size.values() if len(of) > 1}
    return [set(by_size[max(by_size)]), longest]


class Law:
    """Fitted to rows with weights, tokens and bpb. Rows of a `text` other than the first one's have
    a factor on the whole loss: another text is easier or harder by so much.

    The interval of a prediction comes from `draws` fits to rows drawn with replacement, each with
    an error from the law's own record, with a random sign: how far off it was when fitted without
    the largest size, or without the longest run of each size, and asked for those. Residuals
    alone make intervals far too narrow, as a law bends a little everywhere. Beyond the rows, an
    error grows with the number of doublings.
    """

    def __init__(self, rows: list[dict], draws: int = DRAWS) -> None:
        self.rows = rows
        self.texts = list(dict.fromkeys(row.get("text", "") for row in rows))
        self.N, self.D = (np.array([row[key] for row in rows]) for key in ("weights", "tokens"))
        self.units = np.exp(np.log(self.N).mean()), np.exp(np.log(self.D).mean())
        self.text = np.array([self.texts.index(row.get("text", "")) for row in rows])
        self.losses = np.log([row["bpb"] for row in rows])
        everything = np.arange(len(rows))
        self.p = self._fit(everything, starts=True)
        self.residuals = self.losses - self.log_loss(self.p, self.N, self.D, self.text)
        if draws:
            rng = np.random.default_rng(0)
            n = len(rows)
            self.record = np.concatenate([self._errors_without(left) for left in frontiers(rows)])
            self.draws = [self._fit(rng.integers(n, size=n)) for _ in range(draws)]
            self.chance = rng.choice([-1, 1], draws) * rng.choice(self.record, draws)

    def _errors_without(self, left: set[int]) -> np.ndarray:
        """What a law of the other rows is off by for these; the residuals if too few are left."""
        others = np.array([i for i in range(len(self.rows)) if i not in left])
        if len(others) <= len(self.p) or not left:
            return self.residuals
        p = self._fit(others)
        of = np.array(sorted(left))
        return self.losses[of] - self.log_loss(p, self.N[of], self.D[of], self.text[of])

    def log_loss(self, p, N, D, text=0):
        E, A, a, B, b, *factors = np.exp(p)
        n = N / self.units[0]
        d = D / self.units[1]
        return np.log((E + A * n**-a + B * d**-b) * np.array([1, *factors])[text])

    def _fit(self, rows: np.ndarray, starts: bool = False) -> np.ndarray:
        """Least squares of the logarithms; an error above 1% counts less (soft L1)."""
        N, D, text, losses = (x[rows] for x in (self.N, self.D, self.text, self.losses))
        errors = lambda p: self.log_loss(p, N, D, text) - losses
        more = [0.0] * (len(self.texts) - 1)
        level = float(np.exp(losses.mean()))
        first = [] if starts else [self.p]
        for E, a, b in product((0.1, 0.6), (0.2, 0.5), (0.2, 0.5)) if starts else ():
            first.append(np.log([E * level, 0.2 * level, a, 0.2 * level, b]).tolist() + more)
        bounds = [-12.0] * 5 + [-1.0] * len(more), [2.0] * 5 + [1.0] * len(more)
        options = dict(loss="soft_l1", f_scale=0.01, bounds=bounds)
        return min((least_squares(errors, p, **options) for p in first), key=lambda r: r.cost).x

    def predict(self, N: float, D: float, text: int = 0) -> tuple[float, float, float]:
        """(bits per byte, the least, the most): what 90% of runs should lie between."""
        far = doublings(N, self.N.max()) + doublings(D, self.D.max())
        errors = self.chance * max(1.0, far)
        imagined = [self.log_loss(p, N, D, text) + e for p, e in zip(self.draws, errors)]
        low, high = np.quantile(imagined, SURE)
        return tuple(np.exp([self.log_loss(self.p, N, D, text), low, high]))

    def constants(self, p=None) -> tuple:
        """E, A, a, B, b for N in weights and D in tokens."""
        E, A, a, B, b = np.exp(self.p if p is None else p)[:5]
        return E, A * self.units[0] ** a, a, B * self.units[1] ** b, b

    def __str__(self) -> str:
        E, A, a, B, b = self.constants()
        ranges = np.quantile([self.constants(p) for p in self.draws], SURE, axis=0)
        (el, _, al, _, bl), (eh, _, ah, _, bh) = ranges
        return (
            f"L = {E:.3f} + {A:.3g} N^-{a:.3f} + {B:.3g} D^-{b:.3f}   (E {el:.2f} to {eh:.2f}, "
            f"a {al:.2f} to {ah:.2f}, b {bl:.2f} to {bh:.2f})"
        )


def shape_of(name: str) -> tuple[int, int]:
    """A preset's weights of blocks and head, and its tokens."""
    preset = find_preset(name)
    count = runs.count_weights(preset.model)
    steps = steps_for(preset.train, count)
    return count["matrix"] + count["head"], steps * preset.train.tokens_per_step


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
    return tree | dict(weights=int(law.N.max()), tokens=int(law.D.max()))


def describe(name: str, law: Law) -> str:
    """The law, how far off it is, and what it says of the presets."""
    lines = [f"{name}, {len(law.rows)} runs", f"  {law}"]
    for errors, of in ((law.residuals, "runs"), (law.record, "runs that it had not seen")):
        mean = statistics.fmean(abs(errors))
        worst = max(errors, key=abs)
        lines.append(f"  off by {mean:.2%} in the mean, {worst:+.2%} at worst, for its {of}")
    for preset in ("d12", "d20", "d24"):
        guess, low, high = law.predict(*shape_of(preset), text=len(law.texts) - 1)
        lines.append(f"  {preset}: {guess:.3f} ({low:.3f} to {high:.3f})")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    if argv:
        raise UsageError(f"law.py takes no {argv[0]}: it reads SCALING.jsonl and PUBLISHED.jsonl")
    rows = newest(read_lines(HERE / "SCALING.jsonl", dict))
    grid = [r for r in rows if r["name"] == "base" and r["data"] == "scaling" and r["seed"] == 0]
    theirs = Law(read_lines(HERE / "PUBLISHED.jsonl", dict))
    disk.write_text(LAW, json.dumps(as_file(theirs)) + "\n")
    print(describe("ours", Law([row for row in grid if row["tokens"] >= SHORTEST])))
    print(describe(f"published, of {theirs.texts[1]}", theirs))
    return 0


if __name__ == "__main__":
    cli.run(main)
