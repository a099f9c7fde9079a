"""Is a change worth it? Named changes against a base, with several seeds, at equal tokens.

    python benchmarks/ablate.py tiny --base "--steps 488 --tokens_per_step 4096" --seeds 0 1 2 \\
        --change "no key offset: --extras value_embeds" --change "slow: --lr_scale 0.5"

Each run is train.py in a process of its own, in a folder under --runs_dir. After a kill, the same
command goes on where it was. A run that succeeds becomes a line of benchmarks/ABLATIONS.jsonl, and
is not repeated; ABLATIONS.md shows these lines as tables. A run that fails costs its line and no
more. The rule of the verdict is in `verdict`.
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parent))
from throughput import ROOT, table

import config as cfg
import optim
import prepare_data
from config import GPTConfig, UsageError
from machinery import cli, disk, folders, plan
from machinery.log import read_jsonl, short
from model import GPT

MIN_SEEDS = 3  # two seeds say next to nothing about their standard deviation


@dataclass(frozen=True)
class AblateConfig:
    """What to compare, and how the runs are carried out."""

    base: str = ""
    """Options of train.py for every run, in one string; the folders and the seed are set here."""
    change: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A change to measure, as "NAME: OPTIONS OF TRAIN.PY"; once for each change."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each change and the base run once with each of these."""
    at_once: int = 0
    """Runs side by side; 0: one, or one per GPU. Never more than one per GPU."""
    threads: int = 1
    """Threads of each run on a CPU."""
    again: bool = False
    """Repeat the runs that are already in the table; the newer results count."""
    runs_dir: str = str(ROOT / "runs" / "ablate")
    """Folder for the runs' folders and logs."""
    results: str = str(ROOT / "benchmarks" / "ABLATIONS.md")
    """The tables; the lines that they are made of are beside it, in a .jsonl file."""

    def __post_init__(self):
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"--seeds {self.seeds}: give each seed once, and one at least")
        if self.at_once < 0 or self.threads < 1:
            raise UsageError(
                f"--at_once {self.at_once} must be 0 or more, --threads {self.threads} 1 or more"
            )


@dataclass(frozen=True)
class Case:
    """One run to be made: a change (or the base itself) with one seed."""

    argv: tuple[str, ...]
    """Arguments of train.py, all but the folder of the run."""
    recipe: dict
    """All that decides the run's numbers: `folders.identity`, and which validation is scored."""
    row: dict
    """The line of its result, as far as it is known before the run."""

    @property
    def name(self) -> str:
        return f"{self.row['name']}, seed {self.row['seed']}"


# ---------------------------------------------------------------- the statistics


def mean_and_sd(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (divisor n - 1). NaN where there are too few values."""
    mean = statistics.fmean(values) if values else math.nan
    known = len(values) > 1 and math.isfinite(mean)
    return mean, statistics.stdev(values) if known else math.nan


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
        raise UsageError(
            f'--change "{text}" is not "NAME: --OPTION VALUE ...", NAME not being base'
        )
    return name, options


def as_json(tree: dict) -> dict:
    """As it comes back from a file: tuples are lists."""
    return json.loads(json.dumps(tree))


def tokens_of(preset: cfg.Preset) -> int:
    """Tokens that a run trains on."""
    config = preset.train
    with torch.device("meta"):
        groups = GPT(preset.model).param_groups()
    steps = plan.steps_for(config, {k: sum(p.numel() for p in ps) for k, ps in groups.items()})
    batches = (optim.batch_at(step, config.ramp_steps) for step in range(steps))
    return sum(round(config.tokens_per_step * share) for share in batches)


def read_recipe(argv: list[str], dtype: str) -> tuple[dict, int, int]:
    """Arguments of train.py -> (recipe but for the seed, tokens, tokens of a step); refuses here
    what train.py would. dtype: what `auto` means on this machine."""
    preset = cli.parse("train.py", "train", argv)
    manifest, preset = folders.open_data(preset, None)
    recipe = as_json(folders.identity(preset, manifest))
    recipe["extras"].sort()  # in any order, they make the same model
    recipe["eval_tokens"] = preset.run.eval_tokens
    recipe["init_from"], recipe["resume"] = preset.run.init_from, preset.run.resume
    recipe["dtype"] = dtype if recipe["dtype"] == "auto" else recipe["dtype"]
    del recipe["seed"]  # the only thing in which the runs of a change differ
    return recipe, tokens_of(preset), preset.train.tokens_per_step


def find_device(argv: list[str]) -> tuple[str, str, bool]:
    """(name of the device, what dtype `auto` is there, whether it is a CUDA GPU). Asked in another
    process, as this one must leave the GPU's memory to the runs."""
    device = cli.parse("train.py", "train", argv).run.device
    code = (
        "import json, sys; from machinery import ranks; w = ranks.start(sys.argv[1])\n"
        "print(json.dumps([w.device_name, str(w.dtype), w.device.type == 'cuda']))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code, device],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if asked.returncode:
        raise UsageError(f"--device {device} does not work: {last_line(asked.stderr)}")
    name, dtype, is_cuda = json.loads(asked.stdout.splitlines()[-1])
    return name, "bf16" if dtype == "torch.bfloat16" else "fp32", is_cuda


def find_slots(config: AblateConfig, is_cuda: bool) -> list[dict[str, str]]:
    """The environment of each place where a run can be."""
    if not is_cuda:
        return [{"OMP_NUM_THREADS": str(config.threads)}] * max(1, config.at_once)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[: config.at_once or None]]


def make_cases(name: str, config: AblateConfig, device: str, dtype: str) -> list[Case]:
    """Seed by seed, the base first; UsageError for a change that cannot be compared with it."""
    changes = [("base", ""), *map(read_change, config.change)]
    if len(changes) == 1 or len(dict(changes)) < len(changes):
        raise UsageError('give one --change "NAME: OPTIONS" or more, each with a name of its own')
    common = dict(preset=name, base_options=config.base, device=device, torch=torch.__version__)
    common |= dict(commit=code_version(), date=datetime.date.today().isoformat())
    base, base_tokens, base_step = read_recipe([name, *shlex.split(config.base)], dtype)
    cases = []
    for change, options in changes:
        argv = [name, *shlex.split(config.base), *shlex.split(options)]
        recipe, tokens, step = read_recipe(argv, dtype)
        changed = {k: v for k, v in recipe.items() if v != base[k]}
        if change != "base" and not changed:
            raise UsageError(f'--change "{change}: {options}" leaves the base as it is')
        if abs(tokens - base_tokens) > max(step, base_step):
            raise UsageError(
                f"{change!r} trains on {tokens:,} tokens, the base on {base_tokens:,}; give both "
                "--steps for equal tokens"
            )
        for seed in config.seeds:
            facts = dict(name=change, options=options, seed=seed, changed=changed, base=base)
            seeded = (*argv, "--seed", str(seed))
            cases.append(Case(seeded, recipe | {"seed": seed}, facts | common))
    return sorted(cases, key=lambda case: config.seeds.index(case.row["seed"]))


def code_version() -> str:
    """The commit; if the code has been edited since, followed by + and a hash of the edits."""
    git = ["git", "-C", str(ROOT), "diff", "HEAD", "--", "*.py"]
    try:
        edits = subprocess.run(git, capture_output=True, check=False).stdout
    except OSError:  # there is no git
        edits = b""
    named = "+" + hashlib.sha256(edits).hexdigest()[:7] if edits else ""
    return prepare_data.commit()[:7] + named


# ---------------------------------------------------------------- what was run


def recipe_of(row: dict) -> dict:
    """The whole recipe of a line; a field that is newer than the line has its default."""
    defaults = as_json(asdict(cfg.TrainConfig()) | asdict(GPTConfig()))
    defaults |= dict(init_from="", resume="auto")
    return defaults | row["base"] | row["changed"] | {"seed": row["seed"]}


def comparison(row: dict) -> str:
    """What the lines of one table have in common."""
    base = recipe_of(row | {"changed": {}, "seed": 0})
    return json.dumps([row["preset"], row["device"], base], sort_keys=True)


def append(file: Path, row: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as stream:
        stream.write(json.dumps(row) + "\n")


def to_do(cases: list[Case], file: Path, again: bool) -> list[tuple[Case, int]]:
    """The cases still to run (those without a line, or all of them if `again`), each with the
    number of lines it has. A line found in another comparison only is copied into this one."""
    rows, left = read_jsonl(file, bool), []
    for case in cases:
        found = [
            r for r in rows if recipe_of(r) == case.recipe and r["device"] == case.row["device"]
        ]
        if again or not found:
            left.append((case, len(found)))
            continue
        newest = found[-1]
        print(f"{case.name}: has been run, {newest['date']} ({newest['val'][-1][1]:.4f} bpb)")
        if all(comparison(r) != comparison(case.row) for r in found):
            about = ("name", "options", "changed", "preset", "base_options", "base")
            append(file, newest | {key: case.row[key] for key in about})
    return left


# ---------------------------------------------------------------- the runs


def run_dir_of(case: Case, earlier: int, runs_dir: str) -> Path:
    """The run's folder: always the same one for the same run of the same code."""
    facts = json.dumps([case.recipe, case.row["device"], case.row["commit"], earlier])
    word = re.sub(r"\W+", "_", case.row["name"])
    digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
    return Path(runs_dir) / f"{word}_seed{case.row['seed']}_{digest}"


def run_cases(left: list[tuple[Case, int]], slots: list[dict], config: AblateConfig) -> int:
    """Run them, as many at once as there are slots; append each result. Returns how many failed."""
    waiting, free, failed = list(left), list(slots), 0
    running: list[tuple[Case, Path, dict, subprocess.Popen]] = []
    file = Path(config.results).with_suffix(".jsonl")
    try:
        while waiting or running:
            while waiting and free:
                case, earlier = waiting.pop(0)
                run_dir, slot = run_dir_of(case, earlier, config.runs_dir), free.pop(0)
                running.append((case, run_dir, slot, launch(case, run_dir, slot)))
            ended = [r for r in running if r[-1].poll() is not None]
            running = [r for r in running if r not in ended]
            for case, run_dir, slot, process in ended:
                free.append(slot)
                if process.returncode:
                    failed += 1
                    log = run_dir.with_suffix(".log")
                    why = last_line(log.read_text(errors="replace"))
                    print(
                        f"{case.name}: failed with exit code {process.returncode}: {why} ({log})",
                        flush=True,
                    )
                else:
                    row = case.row | read_result(run_dir) | {"at_once": len(slots)}
                    append(file, row)
                    tokens, bpb = row["val"][-1]
                    print(
                        f"{case.name}: {bpb:.4f} bpb after {short(tokens)} tokens, "
                        f"{short(row['tokens_per_s'])} tok/s",
                        flush=True,
                    )
            time.sleep(0.1)
    finally:  # stopped: train.py saves a checkpoint first
        for *_, process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for *_, process in running:
            process.wait()
    return failed


def launch(case: Case, run_dir: Path, slot: dict) -> subprocess.Popen:
    """Start train.py; if this run was begun before, it goes on from its newest checkpoint."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "train.py"), *case.argv, "--run_dir", str(run_dir)]
    with open(run_dir.with_suffix(".log"), "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **slot})


def read_result(run_dir: Path) -> dict:
    """All validations of a finished run, and its tokens per second (a median, see flops.Meter)."""
    records = read_jsonl(run_dir / "metrics.jsonl", bool)
    val = [[r["tokens"], r["val_bpb"]] for r in records if "val_bpb" in r]
    speed = [r["tokens_per_s"] for r in records if "tokens_per_s" in r]
    return dict(val=val, tokens_per_s=round(speed[-1], 1))


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:300]


# ---------------------------------------------------------------- the tables


def spread(mean: float, sd: float, sign: str = "") -> str:
    """A mean and its standard deviation; NaN is n/a."""
    return f"{mean:{sign}.4f} ± {sd:.4f}".replace("+nan", "nan").replace("nan", "n/a")


def render_comparison(rows: list[dict]) -> str:
    """The table of one comparison: its base, and each change against it."""
    by_change: dict[str, dict[int, dict]] = {}
    for row in sorted(rows, key=lambda r: r["name"] != "base"):  # stable: the base first
        by_change.setdefault(json.dumps(row["changed"]), {})[row["seed"]] = row  # the newest counts
    first = next(iter(by_change["{}"].values()), rows[0]) if "{}" in by_change else rows[0]
    ticks = [tokens for tokens, _ in first["val"][1:-1]]
    ticks = sorted({ticks[len(ticks) * i // 4] for i in (1, 2)}) if ticks else []
    nearest = lambda row, tokens: min(row["val"], key=lambda v: abs(v[0] - tokens))[1]
    base = {seed: row["val"][-1][1] for seed, row in by_change.get("{}", {}).items()}
    lines, notes = [], []
    for by_seed in by_change.values():
        runs = [by_seed[seed] for seed in sorted(by_seed)]
        bpb = {row["seed"]: row["val"][-1][1] for row in runs}
        mean, sd, word = verdict(base, bpb)
        name, is_base = runs[-1]["name"], not runs[-1]["changed"]
        lines.append(
            [
                name,
                " ".join(map(str, bpb)),
                *(f"{statistics.fmean(nearest(row, t) for row in runs):.4f}" for t in ticks),
                spread(*mean_and_sd(list(bpb.values()))),
                "" if is_base else spread(mean, sd, "+"),
                "" if is_base else word,
                f"{statistics.fmean(row['tokens_per_s'] for row in runs):,.0f}",
                " ".join(sorted({row["commit"] for row in runs})),
                max(row["date"] for row in runs),
            ]
        )
        if not is_base:
            notes.append(f"- {name}: `{runs[-1]['options']}`")
    header = [
        "change",
        "seeds",
        *(f"bpb at {short(t)}" for t in ticks),
        "bpb at the end",
        "difference",
        "verdict",
        "tok/s",
        "commit",
        "date",
    ]
    facts = recipe_of(first)
    title = f"## {first['preset']}, {first['device']}, {short(first['val'][-1][0])} tokens"
    about = (
        f'`ablate.py {first["preset"]} --base "{first["base_options"]}"`, torch '
        f"{' '.join(sorted({r['torch'] for r in rows}))}, {facts['dtype']}, data "
        f"{facts['data_fingerprint'][:12]}, {max(r['at_once'] for r in rows)} at once"
    )
    return "\n".join([title, "", about, "", table(header, lines), "", *notes, ""])


def render(rows: list[dict]) -> str:
    """ABLATIONS.md."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(comparison(row), []).append(row)
    text = (
        "# Ablations\n\nMade by benchmarks/ablate.py from the lines of the .jsonl file beside this "
        "one. Bits per byte (bpb)\nof the validation, mean and standard deviation over the seeds; "
        "the difference from the base is paired\nby seed, and gets a verdict above two of its "
        "standard deviations. Lines of different commits are\ncompared as they stand: run "
        "`--again` if the changes between them matter. Options are\nas they were typed; "
        "what `--lr_scale` multiplies has changed since (RESULTS.md).\n\n"
    )
    return text + "\n".join(map(render_comparison, groups.values()))


def join_values(argv: list[str]) -> list[str]:
    """["--base", "--steps 4"] -> ["--base=--steps 4"], or tyro takes the value for an option."""
    joined = []
    for word in argv:
        if joined and joined[-1] in ("--base", "--change"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def main(argv: list[str]) -> int:
    name, options = cli.first_word(argv)
    config = cli.read_options(AblateConfig(), join_values(options), f"ablate.py {name}")
    device, dtype, is_cuda = find_device([name, *shlex.split(config.base)])
    cases = make_cases(name, config, device, dtype)
    results = Path(config.results)
    file = results.with_suffix(".jsonl")
    for signum in (signal.SIGINT, signal.SIGTERM):  # the same way out: run_cases' `finally`
        signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
    left = to_do(cases, file, config.again)
    failed = run_cases(left, find_slots(config, is_cuda), config)
    if rows := read_jsonl(file, bool):
        disk.write_text(results, render(rows))
        mine = [row for row in rows if comparison(row) == comparison(cases[0].row)]
        print(f"\n{render_comparison(mine)}\n{results}" if mine else results)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
