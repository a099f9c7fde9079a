"""How long a run takes, what it costs and which loss it may end with, before it runs.

    python eval.py plan d12 --gpu 8xH100               this run, on those cards
    python eval.py plan d12 --gpu H100 --usd 50        the run that makes the most of 50 dollars
    python eval.py plan --here --minutes 60            of an hour of this machine, which is timed
    python eval.py plan tiny --here --minutes 60 --save      as a line of docs/machines.md

Without --here no card is needed, and nothing is timed: that a run reaches SHARE of a card's peak is
an assumption; it prints its true speed itself. `train.py PRESET --plan`: the page for this machine.
Next: choice.py.
"""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

import config as cfg
import flops
from config import UsageError
from instruments.pages.run_folder import RunFolder
from instruments.run import choice, law
from machinery import cli, code, disk, folders, plan, ranks, shards
from machinery.log import is_done
from machinery.output import say
from machinery.screen import duration, short

SHARE = 0.48  # of a card's peak, full convention: d12 on an H100 (benchmarks/RESULTS.md)
TIMES = (5, 60, 480)  # minutes, if none are asked for
MACHINES = code.ROOT / "docs" / "machines.md"


@dataclass(frozen=True)
class PlanConfig:
    """What to plan for."""

    gpu: str = ""
    """Card, instead of this machine: `H100`, `8xH200` or `H200x8`, `4090`."""
    usd: float = 0.0
    """Dollars to spend: names the depth that makes the most of them."""
    here: bool = False
    """Time this machine, and name the depth of tiny or of a dN that makes the most of `minutes`."""
    minutes: Annotated[float | None, 1, 525_600] = None
    """How long the whole run may take; without it, three times are planned."""
    save: bool = False
    """Write what is planned to docs/machines.md; after the run, what came of it."""

    def __post_init__(self):
        cfg.check_values(self)


@dataclass(frozen=True)
class PlanArgs(cli.TrainArgs):
    """Plan a run: size, hours, dollars. Takes the options of train.py, and these."""

    plan: PlanConfig


def parse_gpus(asked: str) -> ranks.World:
    """ "8xH100", "H100 x8" or "8*H100" -> eight of them, which this machine need not have."""
    # No count has four digits: "RTX 4090" is a card.
    form = r"(?:(\d{1,3})[ x*:]+)?(.*?)(?:[ x*:]+(\d{1,3}))?"
    before, name, after = re.fullmatch(form, asked).groups("1")
    name = name if flops.find_card(name) else f"RTX {name}"
    card = flops.find_card(name)
    n = int(before) * int(after)
    if card is None or not n:
        raise UsageError(
            f"--gpu {asked} is not in the table; choose from {', '.join(flops.CARDS)}, or several: "
            "8xH100"
        )
    memory_bytes = int(0.99 * card.memory_gb * 2**30)  # a datasheet's GB, less 1% for the driver
    return ranks.World(0, n, 0, torch.device("cuda"), torch.bfloat16, memory_bytes, name)


def main(argv: list[str]) -> None:
    """`eval.py plan [PRESET] [options of train.py and PlanConfig]`: print the page."""
    say(page_of(argv))


def page_of(argv: list[str]) -> str:
    """What `main` prints."""
    name, options = cli.first_word(argv)
    preset = cli.parse("eval.py plan", "train", [name])
    default = PlanArgs(preset.train, preset.run, preset.model, PlanConfig())
    asked = cli.read_options(default, options, f"eval.py plan {name}")
    usual = preset
    preset = replace(preset, model=asked.model, train=asked.train, run=asked.run)
    if asked.plan.here:
        return here(preset, usual, asked.plan)
    if asked.plan.minutes or asked.plan.save:
        raise UsageError("--minutes and --save plan for this machine: add --here")
    gpu = asked.plan.gpu
    world = parse_gpus(gpu) if gpu else ranks.start(preset.run.device, preset.train.dtype)
    return page(preset, world, asked.plan.usd)


def print_plan(preset: cfg.Preset, world: ranks.World) -> None:
    """`train.py --plan`: print the page for this machine, and the data if it is here, once."""
    typed = preset
    data = ""
    folder = typed.run.data_dir
    is_far = typed.run.stage or shards.is_published(folder)
    if not is_far and Path(folder, "manifest.json").is_file():
        manifest, preset = folders.open_data(folder, typed)
        decided = plan.make_plan(preset, world)
        order = folders.training_order(preset, decided, manifest)
        data = "\n" + folders.describe_data(typed, preset, decided, manifest, order)
    text = page(preset, world) + data
    if world.is_first:
        say(text)


# ------------------------------------------------------------------------------- this run


def page(preset: cfg.Preset, world: ranks.World, usd: float = 0.0) -> str:
    """The plan with hours, dollars and, for a `dN`, the loss; or of the run that `usd` buys."""
    card = flops.find_card(world.device_name)
    price = preset.run.usd_per_hour * world.world_size
    if card and preset.train.dtype == "fp32":
        raise UsageError("--plan knows what cards do in 16 bits only; leave --dtype fp32 out")
    if usd and not (on_the_dial(preset) and card and price):
        raise UsageError(
            f"--usd {usd} compares depths, for a card that has a price: eval.py plan d12 --gpu "
            "H100 --usd 50 --usd_per_hour 3"
        )
    on = f"on        {world.world_size} x {world.device_name}"
    if card is None:
        return (
            f"{plan.make_plan(preset, world).text}\n{on}\n"
            "time      n/a: it is no card of the table; python eval.py plan --here times it"
        )
    peak = flops.find_peak(world, preset.run.peak_tflops)
    if usd:
        place = choice.Place(preset, cfg.LARGEST, 0, world, peak)
        timed = [choice.Timed(n, SHARE * peak * world.world_size, 1, 1) for n in (1, 2)]
        preset = choice.best_run(place, timed, 60 * usd / price).preset
    full = law.built(preset.model).flops_per_token()
    share = SHARE * (0.75 if preset.run.recompute else 1)  # of four passes, MFU counts three
    speed = share * peak * world.world_size / full
    decided = plan.make_plan(preset, world)
    tokens = decided.steps * decided.tokens_per_step
    hours = tokens / speed / 3600
    lines = [
        decided.text,
        f"{on}, {peak / 1e12:,.2f} TFLOP/s each",
        f"speed     an estimate: {short(speed)} tok/s, at {share:.0%} MFU full",
        f"time      an estimate: {hours:,.2f} hours without validation; ${hours * price:,.2f} at "
        f"--usd_per_hour {preset.run.usd_per_hour:.2f}",
    ]
    if on_the_dial(preset):
        guess = law.predict("ClimbMix", law.weights_of("ClimbMix", preset.model), tokens)
        lines.append(
            f"loss      a guess: {guess:.3f} bits per byte of ClimbMix, by the law of "
            f"{law.LAWS['ClimbMix']['runs']} published runs (docs/scaling.md)"
        )
    if usd:
        words = f"{preset.name} --tokens {tokens / 1e9:.3g}B"
        lines.append(
            f"best      python prepare_data.py {words} && torchrun --nproc_per_node="
            f"{world.world_size} train.py {words}"
        )
    return "\n".join(lines)


def on_the_dial(preset: cfg.Preset) -> bool:
    """Whether the law applies: the depth dial's shape, text and vocabulary."""
    dial = cfg.preset_of_depth(preset.model.n_layer)
    return preset.data.source == dial.data.source and preset.model == dial.model


# ------------------------------------------------------------------------------- the best one here


def here(preset: cfg.Preset, usual: cfg.Preset, asked: PlanConfig) -> str:
    """The best run for this machine and its data: in a line, and as a command."""
    name = preset.name
    if not re.fullmatch(r"(tiny|d\d+)(-stock)?", name):
        raise UsageError(f"--here chooses the depth of tiny or of a dN, not of {name}")
    run = replace(usual.run, data_dir=preset.run.data_dir, device=preset.run.device)
    if preset != replace(usual, run=run) or asked.gpu or asked.usd:
        raise UsageError(
            "--here takes no other options than --minutes, --save, --data_dir, --device"
        )
    if asked.save and not asked.minutes:
        raise UsageError("--save needs --minutes: which of the three runs?")
    folder = f"runs/{name}_{{:g}}m".format
    if asked.save and is_done(Path(folder(asked.minutes))):
        return save_result(RunFolder(folder(asked.minutes)))
    world = ranks.start(preset.run.device)
    if world.device.type == "cuda":
        world = replace(world, world_size=torch.cuda.device_count())
    manifest, preset = folders.open_data(preset.run.data_dir, preset)
    place = choice.Place(
        preset, manifest.tokens("train"), manifest.rows("val"), world, flops.find_peak(world)
    )
    times = [asked.minutes] if asked.minutes else TIMES
    timed = choice.time_two(place, max(times))
    lines = []
    for minutes in times:
        run = choice.best_run(place, timed, minutes)
        command = shlex.join([*choice.command_of(place, run.preset), "--run_dir", folder(minutes)])
        planned = f"{summary(run)} of text like {place.text}"
        lines += [run.plan.text] if asked.minutes else []
        lines += [f"{duration(60 * minutes)}: {planned}", f"  python {command}"]
        if asked.save:
            save(ranks.device_name(world), command, planned=planned)
    return "\n".join(lines)


def summary(run: choice.Run) -> str:
    """What is expected of a run."""
    low, high = (run.loss * (1 + sign * run.margin) for sign in (-1, 1))
    train = run.preset.train
    return (
        f"depth {run.preset.model.n_layer}, {short(train.steps * train.tokens_per_step)} tokens in "
        f"steps of {train.tokens_per_step:,}, {run.epochs:.1f} times the text, "
        f"{short(run.tokens_per_s)} tok/s, {run.mfu or 0:.0%} MFU full, {duration(run.seconds)}, "
        f"{low:.2f} to {high:.2f} bits per byte"
    )


def save_result(run: RunFolder) -> str:
    """A run that has ended, as its line."""
    start = run.starts[-1]
    bpb = run.whole_validation.full_val_bpb
    found = f"{bpb:.3f} bits per byte after {duration(sum(run.status.seconds.values()))}"
    return save(start.device, start.command, found=f"{found}, commit {start.code.commit}")


def save(device: str, command: str, planned: str = "-", found: str = "-") -> str:
    """Add a line to docs/machines.md, or what was found to the line of the command."""
    key = f"| {device} | `{command[command.index('train.py') :]}` | "
    lines = disk.read_text(MACHINES).splitlines()
    for old in [line for line in lines if line.startswith(key)]:
        lines.remove(old)
        if planned == "-":
            planned, *_ = old.removeprefix(key).split(" | ")
    lines.append(f"{key}{planned} | {found} |")
    disk.write_text(MACHINES, "\n".join([*lines, ""]))
    return lines[-1]
