"""Is a change worth it? Named changes against a base, with several seeds, at equal tokens.

    python benchmarks/ablate.py tiny --base="--steps 488 --tokens_per_step 4096" --seeds 0 1 2 \\
        --change "no key offset: --extras value_embeds" --change "slow: --lr_scale 0.5"

Each run is train.py in a process of its own, in a folder under --runs_dir. After a kill, the same
command goes on where it was. A run that succeeds becomes a line of benchmarks/ABLATIONS.jsonl, and
is not repeated; ABLATIONS.md shows these lines as tables. A run that fails costs its line and no
more. The rule of the verdict is in `verdict`.
"""

import hashlib
import json
import os
import re
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
import runs
from config import GPTConfig, UsageError
from machinery import cli, disk, folders, plan
from machinery.log import read_jsonl, short
from runs import ROOT, mean_and_sd, spread

MIN_SEEDS = 3  # two seeds say next to nothing about their standard deviation


@dataclass(frozen=True)
class AblateConfig:
    """What to compare, and how the runs are carried out."""

    base: str = ""
    """Options of train.py for every run, as in --base="--steps 488"; the folders and the seed are
    set here."""
    change: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A change to measure, as "NAME: OPTIONS OF TRAIN.PY"; once for each change."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each change and the base run once with each of these."""
    at_once: int = 0
    """Runs side by side, each on one thread of a CPU; 0: one, or one per GPU, the most there."""
    again: bool = False
    """Repeat the runs that are already in the table; the newer results count."""
    runs_dir: str = str(ROOT / "runs" / "ablate")
    """Folder for the runs' folders and logs."""
    results: str = str(ROOT / "benchmarks" / "ABLATIONS.md")
    """The tables; the lines that they are made of are beside it, in a .jsonl file."""

    def __post_init__(self):
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"--seeds {self.seeds}: give each seed once, and one at least")
        if self.at_once < 0:
            raise UsageError(f"--at_once {self.at_once} must be 0 or more")


@dataclass(frozen=True, eq=False)
class Case:
    """One run to be made: a change (or the base itself) with one seed."""

    command: list[str]
    run_dir: Path
    row: dict  # the line of its result, as far as it is known before the run
    after: None = None


def verdict(base: dict[int, float], change: dict[int, float]) -> tuple[float, float, str]:
    """Seed -> bits per byte, of the base and of a change: (mean and standard deviation of the
    difference in bits per byte, "better", "worse" or why neither).

    Paired by seed: d = change - base with the same seed, so with the same rows in the same order.
    A verdict needs |mean(d)| > 2 sd(d). sd is that of the differences themselves, not of their
    mean, as so few seeds do not show how far they can scatter: with three, a change that does
    nothing passes in 7% of cases (Student's t = 2 sqrt(3), 2 degrees of freedom), with five in 1%.
    """
    d = [change[seed] - base[seed] for seed in sorted(base.keys() & change.keys())]
    mean, sd = mean_and_sd(d)
    if len(d) < MIN_SEEDS:
        return mean, sd, f"no verdict: {len(d)} of {MIN_SEEDS} seeds"
    if abs(mean) > 2 * sd:
        return mean, sd, "better" if mean < 0 else "worse"
    return mean, sd, "within 2 sd"


# ---------------------------------------------------------------- what to run


def read_change(text: str) -> tuple[str, str]:
    """ "slow: --lr_scale 0.5" -> ("slow", "--lr_scale 0.5")."""
    name, _, options = (part.strip() for part in text.partition(":"))
    if not name or name == "base" or not options.startswith("--"):
        form = '"NAME: --OPTION VALUE ...", NAME not being base'
        raise UsageError(f'--change "{text}" is not {form}')
    return name, options


as_json = lambda tree: json.loads(json.dumps(tree))  # as from a file: tuples are lists


def read_recipe(argv: list[str]) -> tuple[dict, int, int]:
    """Arguments of train.py -> (all that decides the run's numbers but the seed, its tokens, those
    of a step); refuses what train.py would."""
    manifest, preset = folders.open_data(cli.parse("train.py", "train", argv), None)
    recipe = as_json(folders.identity(preset, manifest))
    recipe["extras"].sort()  # in any order, they make the same model
    recipe["eval_tokens"] = preset.run.eval_tokens
    recipe["init_from"], recipe["resume"] = preset.run.init_from, preset.run.resume
    del recipe["seed"]
    train = preset.train
    steps = plan.steps_for(train, runs.count_weights(preset.model))
    return recipe, steps * train.tokens_per_step, train.tokens_per_step


def make_cases(name: str, config: AblateConfig, rows: list[dict]) -> list[Case]:
    """Those without a row (with --again: all), seed by seed, the base first; UsageError for a
    change that cannot be compared with it."""
    changes = [("base", ""), *map(read_change, config.change)]
    if len(changes) == 1 or len(dict(changes)) < len(changes):
        raise UsageError('give one --change "NAME: OPTIONS" or more, each with a name of its own')
    common = dict(preset=name, base_options=config.base) | runs.made()
    first, cases, found = [name, *shlex.split(config.base)], [], list(map(key, rows))
    base, base_tokens, base_step = read_recipe(first)
    for change, options in changes:
        argv = [*first, *shlex.split(options)]
        recipe, tokens, step = read_recipe(argv)
        changed = {k: v for k, v in recipe.items() if v != base[k]}
        if change != "base" and not changed:
            raise UsageError(f'--change "{change}: {options}" leaves the base as it is')
        if abs(tokens - base_tokens) > max(step, base_step):
            why = f"{change!r} trains on {tokens:,} tokens, the base on {base_tokens:,}"
            raise UsageError(f"{why}; give both --steps for equal tokens")
        for seed in config.seeds:
            facts = dict(name=change, options=options, seed=seed, changed=changed, base=base)
            row = facts | common
            if (earlier := found.count(key(row))) and not config.again:
                print(f"{change}, seed {seed}: has been run")
                continue
            # always the same folder for the same run of the same code
            digest = hashlib.sha256(json.dumps([key(row), row["commit"], earlier]).encode())
            word = re.sub(r"[^A-Za-z0-9]+", "_", change)
            run_dir = Path(config.runs_dir) / f"{word}_{seed}_{digest.hexdigest()[:8]}"
            command = [sys.executable, str(ROOT / "train.py"), *argv, "--seed", str(seed)]
            cases.append(Case([*command, "--run_dir", str(run_dir)], run_dir, row))
    return sorted(cases, key=lambda case: config.seeds.index(case.row["seed"]))


def comparison(row: dict) -> str:
    """What the lines of one table have in common. A field that is newer than a line has its
    default."""
    defaults = as_json(asdict(cfg.TrainConfig()) | asdict(GPTConfig()))
    base = defaults | dict(init_from="", resume="auto") | row["base"]
    return json.dumps([row["preset"], row["machine"], base], sort_keys=True)


def key(row: dict) -> str:
    """What makes it this run."""
    return json.dumps([comparison(row), row["changed"], row["seed"]], sort_keys=True)


def find_slots(at_once: int, device: str) -> list[dict[str, str]]:
    """The environment of each place where a run can be."""
    if not torch.cuda.is_available() or device not in ("auto", "cuda"):
        return [{"OMP_NUM_THREADS": "1"}] * max(1, at_once)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[: at_once or None]]


def read_result(run_dir: Path) -> dict:
    """All validations of a finished run, and its tokens per second (a median, see flops.Meter)."""
    records = read_jsonl(run_dir / "metrics.jsonl", bool)
    val = [[r["tokens"], r["val_bpb"]] for r in records if "val_bpb" in r]
    speed = [r["tokens_per_s"] for r in records if "tokens_per_s" in r]
    return dict(val=val, bpb=val[-1][1], tokens_per_s=round(speed[-1], 1))


# ---------------------------------------------------------------- the tables


def render_comparison(rows: list[dict]) -> str:
    """The table of one comparison: its base, and each change against it."""
    by_change: dict[str, dict[int, dict]] = {}
    for row in sorted(rows, key=lambda r: r["name"] != "base"):  # stable: the base first
        by_change.setdefault(json.dumps(row["changed"]), {})[row["seed"]] = row  # the newest counts
    first = next(iter(by_change.get("{}", {}).values()), rows[0])
    base = {seed: row["val"][-1][1] for seed, row in by_change.get("{}", {}).items()}
    lines, notes = [], []
    for by_seed in by_change.values():
        made = [by_seed[seed] for seed in sorted(by_seed)]
        bpb = {row["seed"]: row["val"][-1][1] for row in made}
        mean, sd, word = verdict(base, bpb)
        against = [spread(mean, sd, "+"), word] if made[-1]["changed"] else ["", ""]
        speed = statistics.fmean(row["tokens_per_s"] for row in made)
        own = spread(*mean_and_sd(list(bpb.values())))
        lines.append([made[-1]["name"], " ".join(map(str, bpb)), own, *against, f"{speed:,.0f}"])
        lines[-1] += [" ".join(sorted({row["commit"] for row in made}))]
        lines[-1] += [max(row["date"] for row in made)]
        if made[-1]["changed"]:
            notes.append(f"- {made[-1]['name']}: `{made[-1]['options']}`")
    header = ["change", "seeds", "bits per byte", "difference", "verdict"]
    header += ["tok/s", "commit", "date"]
    tokens, data = short(first["val"][-1][0]), first["base"]["data_fingerprint"][:12]
    title = f"## {first['preset']}, {first['machine']}, {tokens} tokens"
    about = f'`ablate.py {first["preset"]} --base="{first["base_options"]}"`, data {data}, torch '
    about += " ".join(sorted({row["torch"] for row in rows}))
    return "\n".join([title, "", about, "", runs.table(header, lines), "", *notes, ""])


ABOUT = """# Ablations

Made by benchmarks/ablate.py from the lines of the .jsonl file beside this one. Bits per byte (bpb)
of the validation, mean and standard deviation over the seeds; the difference from the base is
paired by seed, and gets a verdict above two of its standard deviations. Lines of different commits
are compared as they stand: run `--again` if the changes between them matter. Options are as they
were typed; what `--lr_scale` multiplies has changed since (RESULTS.md).

"""


def render(rows: list[dict]) -> str:
    """ABLATIONS.md."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(comparison(row), []).append(row)
    return ABOUT + "\n".join(map(render_comparison, groups.values()))


def main(argv: list[str]) -> int:
    name, options = cli.first_word(argv)
    config = cli.read_options(AblateConfig(), options, f"ablate.py {name}")
    results = Path(config.results)
    file = results.with_suffix(".jsonl")
    cases = make_cases(name, config, read_jsonl(file, bool))
    device = cli.parse("train.py", "train", [name, *shlex.split(config.base)]).run.device
    slots = find_slots(config.at_once, device)
    read = lambda case: case.row | read_result(case.run_dir)
    failed = runs.side_by_side(cases, slots, file, read)
    if rows := read_jsonl(file, bool):
        disk.write_text(results, render(rows))
        print(f"\n{render_comparison([r for r in rows if comparison(r) == comparison(rows[-1])])}")
    print(results)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
