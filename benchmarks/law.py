"""The law L(N, D) = E + A N^-a + B D^-b: its fit, its intervals, its picture and its tables.

`python benchmarks/law.py` writes SCALING.md and scaling.svg from the rows of SCALING.jsonl (our
runs on a CPU) and of PUBLISHED.jsonl (other people's on GPUs), and instruments/run/law.json, with
which `eval.py plan d12 --gpu H100` predicts. N: weights of the blocks and the head. D: tokens. L:
bits per byte (Hoffmann et al. 2022, approach 3). Needs requirements-scaling.txt.
"""

import json
import math
import statistics
import sys
import textwrap
from itertools import product

import runs
from config import UsageError, find_preset, install
from instruments.pages import picture
from machinery import cli, disk
from machinery.formats import read_lines
from machinery.log import short
from machinery.plan import steps_for
from runs import ROOT, table

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


def say(text: str) -> str:
    """A paragraph."""
    return textwrap.fill(text, 100) + "\n"


def section(title: str, about: str, header: list[str], cells: list[list[str]], *more: str) -> str:
    return "\n".join([f"## {title}\n", say(about), table(header, cells) + "\n", *more])


def shape_of(name: str) -> tuple[int, int]:
    """A preset's weights of blocks and head, and its tokens."""
    preset = find_preset(name)
    count = runs.count_weights(preset.model)
    steps = steps_for(preset.train, count)
    return count["matrix"] + count["head"], steps * preset.train.tokens_per_step


# ---------------------------------------------------------------- the sections of SCALING.md


def held_out(rows: list[dict], left_out: list[dict]) -> list[list[str]]:
    """What the law of the other rows says of those that were left out of it."""
    law = Law([row for row in rows if row not in left_out])
    lines = []
    for row in left_out:
        guess, low, high = law.predict(row["weights"], row["tokens"])
        inside = "yes" if low <= row["bpb"] <= high else "**no**"
        cells = f"{guess:.3f}", f"{low:.3f} to {high:.3f}", f"{row['bpb']:.3f}"
        name = f"depth {row['depth']}, {short(row['tokens'])} tokens"
        lines.append([name, *cells, f"{100 * (guess / row['bpb'] - 1):+.1f}%", inside])
    return lines


def our_law(rows: list[dict]) -> tuple[Law, str]:
    """The grid, the law, and what it predicts of rows that it has not seen."""
    horizons = sorted({row["tokens"] for row in rows})
    cells = []
    law = Law([row for row in rows if row["tokens"] >= SHORTEST])
    for depth in sorted({row["depth"] for row in rows}):
        of_depth = {row["tokens"]: row for row in rows if row["depth"] == depth}
        first = next(iter(of_depth.values()))
        losses = [f"{of_depth[t]['bpb']:.4f}" if t in of_depth else "" for t in horizons]
        counts = [f"{first[key] / 1e6:.2f}M" for key in ("weights", "parameters")]
        cells.append([str(depth), *counts, *losses])
    header = ["depth", "weights N", "all parameters", *map(short, horizons)]
    used = law.rows
    largest, longest = ([used[i] for i in sorted(left)] for left in frontiers(used))
    tests = {"the largest size": largest, "the longest horizon of each size": longest}
    columns = ["left out", "predicted", "90% of runs", "it came to", "off by", "inside"]
    worst = max(law.residuals, key=abs)
    seconds = sum(row["seconds"] for row in rows)
    text = section(
        "The law",
        "`python benchmarks/scaling.py`: bits per byte after so many tokens, "
        f"{seconds / 3600:.1f} core-hours of steps.",
        header,
        cells,
        f"Fitted to the {len(used)} runs of {short(SHORTEST)} tokens or more:\n",
        f"    {law}\n",
        say(
            f"Residuals: {statistics.fmean(abs(law.residuals)):.1%} in the mean, {worst:+.1%} at "
            "worst. The same, fitted without some of the runs, which it then predicts:"
        ),
    )
    for name, left in tests.items():
        text += f"\n### Without {name}\n\n{table(columns, held_out(used, left))}\n"
    return law, text


def predictions(ours: Law, theirs: Law) -> str:
    """What the laws say of d12, d20 and d24; theirs for the text of the presets, as in `--plan`."""
    same = theirs.texts[1]  # the text of the presets, and the architecture that they began from
    alone = Law([row for row in theirs.rows if row["text"] == same])
    cells = []
    for name in ("d12", "d20", "d24"):
        N, D = shape_of(name)
        figures = ours.predict(N, D), theirs.predict(N, D, 1), alone.predict(N, D)
        figures = ["{:.3f} ({:.3f} to {:.3f})".format(*x) for x in figures]
        cells.append([name, short(N), short(D), *figures])
    header = ["preset", "weights", "tokens", "our law", "the published runs'"]
    header.append(f"of the {len(alone.rows)} on {same} alone")
    counts = [f"{theirs.text.tolist().count(i)} on {text}" for i, text in enumerate(theirs.texts)]
    worst = max(theirs.residuals, key=abs)
    return section(
        "What they say of the presets",
        "**Ours is an extrapolation over three orders of magnitude in the tokens, and of another "
        "text (Python code) with another vocabulary: do not believe its figures.** The other is "
        f"fitted to published runs of nanochat ({', '.join(counts)}; PUBLISHED.jsonl names the "
        "source of each). Only the latter are of the architecture that the presets began from; "
        "the last column is fitted to them alone: seven sizes, two of which have several horizons, "
        "so its ranges are too narrow. The recipe differs, and no run of ours says by how much at "
        "that size. `--plan` prints the second.",
        header,
        cells,
        f"    {theirs}\n",
        say(
            f"Residuals: {statistics.fmean(abs(theirs.residuals)):.2%} in the mean, {worst:+.2%} "
            f"at worst. The loss on {theirs.texts[1]} is {np.exp(theirs.p[5]):.3f} times that on "
            f"{theirs.texts[0]}."
        ),
    )


def best_size(law: Law, flops: float) -> tuple[float, float]:
    """(N, D) of the lowest loss for 6 N D = flops, by the law."""
    N = np.geomspace(law.N.min() / 30, law.N.max() * 30, 2000)
    losses = law.log_loss(law.p, N, flops / 6 / N)
    best = int(np.argmin(losses))
    return N[best], flops / 6 / N[best]


def optimum(ours: Law, theirs: Law) -> str:
    """Tokens per weight at the lowest loss for the FLOPs."""
    cells = []
    published = [("the published runs'", theirs, flops) for flops in (1e18, 1e19, 1e20)]
    for name, law, flops in [("ours", ours, 1e13), ("ours", ours, 1e14), *published]:
        N, D = best_size(law, flops)
        cells.append([name, f"{flops:.0e}", short(N), short(D), f"{D / N:.1f}"])
    return section(
        "Tokens per weight",
        "Where the law is lowest for the same 6 N D (attention not counted). `dN` has 10.5.",
        ["law", "FLOPs = 6 N D", "weights", "tokens", "tokens per weight"],
        cells,
    )


# ---------------------------------------------------------------- the picture


def draw(rows: list[dict], law: Law) -> str:
    """An SVG. Left: loss against FLOPs, a line per size. Right: loss against size, a line per
    budget."""
    fig = picture.figure(9, 4.4)
    left, right = fig.subplots(1, 2, sharey=True)
    for depth in sorted({row["depth"] for row in rows}):
        runs = sorted((r["flops"], r["bpb"]) for r in rows if r["depth"] == depth)
        (line,) = left.plot(*zip(*runs), "o-", ms=4, label=f"depth {depth}")
        fitted = sorted((r["flops"], r) for r in law.rows if r["depth"] == depth)
        guesses = [law.predict(r["weights"], r["tokens"])[0] for _, r in fitted]
        left.plot([f for f, _ in fitted], guesses, "--", lw=1, color=line.get_color())
    left.set(xscale="log", yscale="log", xlabel="FLOPs (dashed: the law)", title="bits per byte")
    N = np.geomspace(law.N.min() / 4, law.N.max() * 2)
    for budget, color in {5e12: "C5", 1e13: "C6", 2e13: "C8", 4e13: "C9"}.items():
        losses = np.exp(law.log_loss(law.p, N, budget / 6 / N))
        right.plot(N, losses, lw=1, color=color, label=f"{budget:.0e}")
        for size in sorted(set(law.N)):  # between its runs, on a line in logarithms
            runs = sorted((6 * n * d, x) for n, d, x in zip(law.N, law.D, law.losses) if n == size)
            flops, logs = zip(*runs)
            if flops[0] <= budget <= flops[-1]:
                loss = np.exp(np.interp(np.log(budget), np.log(flops), logs))
                right.plot([size], [loss], "o", ms=5, color=color)
        best, tokens = best_size(law, budget)
        right.plot([best], [law.predict(best, tokens)[0]], "k*", ms=8)
    right.set(xscale="log", ylim=(1, 2.4), title="for C FLOPs (star: the law's best)")
    right.set_xlabel("weights N, at D = C / 6N tokens")
    for axes in (left, right):
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid()
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, handlelength=1)
    return picture.svg(fig, "loss against FLOPs, and against size at equal FLOPs")


def newest(rows: list[dict]) -> list[dict]:
    """The rows of the machine that made the last one, each text as it was prepared last: others
    cannot be compared."""
    rows = [row for row in rows if row["machine"] == rows[-1]["machine"]]
    last = {row["data"]: row["fingerprint"] for row in rows if "fingerprint" in row}
    return [row for row in rows if row.get("fingerprint") in (None, last.get(row["data"]))]


def as_file(law: Law) -> dict:
    """Of the second text: the constants, which instruments/run/forecast.py reads, and `draws` of
    them, each with an error."""
    tree = dict(text=law.texts[1], **dict(zip("EAaBb", law.constants())))
    tree |= dict(factor=float(np.exp(law.p[5])), runs=len(law.rows))
    tree |= dict(weights=int(law.N.max()), tokens=int(law.D.max()))
    draws = [[*law.constants(p), np.exp(p[5]), e] for p, e in zip(law.draws, law.chance)]
    return tree | dict(draws=[[float(f"{x:.6g}") for x in draw] for draw in draws])


def main(argv: list[str]) -> int:
    if argv:
        raise UsageError(f"law.py takes no {argv[0]}: it reads SCALING.jsonl and PUBLISHED.jsonl")
    rows = newest(read_lines(HERE / "SCALING.jsonl", dict))
    grid = [r for r in rows if r["name"] == "base" and r["data"] == "scaling" and r["seed"] == 0]
    ours, text = our_law(grid)
    theirs = Law(read_lines(HERE / "PUBLISHED.jsonl", dict))
    disk.write_text(LAW, json.dumps(as_file(theirs)) + "\n")
    about = sorted({(r["machine"], r["torch"], r["fingerprint"]) for r in grid})
    sections = [
        "# What a larger model will reach\n",
        say(
            "Made by `python benchmarks/law.py` from SCALING.jsonl and PUBLISHED.jsonl. The models "
            "have the shape of `d2` to `d6` with heads of 64, rows of 257, a vocabulary of 2,048, "
            "and the text of stdlib+site; steps of 2,048 tokens with the rates of `tiny`, decay "
            f"over 65%. One thread each. {'; '.join(', '.join(x) for x in about)}."
        ),
        text,
        "![loss against FLOPs, and against size at equal FLOPs](scaling.svg)\n",
        predictions(ours, theirs),
        optimum(ours, theirs),
    ]
    text = "\n".join(filter(None, sections))
    disk.write_text(HERE / "SCALING.md", text)
    disk.write_text(HERE / "scaling.svg", draw(grid, ours))
    print(text)
    return 0


if __name__ == "__main__":
    cli.run(main)
