"""Which run makes the most of a time, on this machine or on a card: its depth, batch and steps.

Two short runs of train.py are timed here, of a small model and of a larger one, on the prepared
text, on the device and the threads that a run would have, with whatever you have changed in the
code; a power law through the two gives other depths. Of a card that is elsewhere, a share of its
peak is assumed. Of all depths, the best is the one that in that time ends with the least loss by
the law of law.py. Next: forecast.py prints it.
"""

import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import optim
from config import TOKENS_PER_WEIGHT, GPTConfig, Preset, UsageError, find_preset, preset_of_depth
from flops import mfu
from instruments.pages.run_folder import RunFolder
from instruments.run import law
from machinery import code, folders, plan, ranks
from machinery.output import say

STEPS = 12  # of a run that is timed
TIMED = {"stdlib": (2, 4), "ClimbMix": (6, 12)}  # the law's text -> depths
DEPTHS = range(2, 41)  # one block cannot copy, and does not follow the law
FEWEST = 2**19  # tokens: what has seen fewer does not follow the law
LONG = 3e6  # tokens: from here on, a batch of tiny is larger
EPOCHS = 16  # the most that a text is read; more teaches nothing
MOST = 0.55  # of the peak: no program has used more of it


class Place(NamedTuple):
    """Where runs are to be made, and of what."""

    preset: Preset  # with rows and vocabulary as the data have them
    unique: float  # tokens of its text
    held_out: int  # rows for validation
    world: ranks.World  # all ranks of a run
    peak: float | None  # FLOP/s of one of their devices

    @property
    def text(self) -> str:
        """Whose law applies."""
        return "stdlib" if self.preset.name.startswith("tiny") else "ClimbMix"


# -------------------------------------------------------------------------- a run of some depth


def of_depth(preset: Preset, depth: int, tokens: float) -> Preset:
    """`preset` at another depth, for so many tokens. A dN is another dN. tiny takes the shape of
    one; its batch is four times as large from 3M tokens on, and again for each 16 times as many
    (benchmarks/RESULTS.md: with 4M and 16M, 8,192 are better than 2,048 and 32,768)."""
    old = preset.model
    on_dial = re.fullmatch(r"d\d+(-stock)?", preset.name)
    name = f"d{depth}{on_dial[1] or ''}" if on_dial else preset.name
    usual = find_preset(name)
    model = replace(usual.model, seq_len=old.seq_len, vocab_size=old.vocab_size)
    batch = usual.train.tokens_per_step
    if not on_dial:
        dial = preset_of_depth(depth).model
        shape = {key: getattr(dial, key) for key in ("n_layer", "n_embd", "n_head", "n_kv_head")}
        shape["mlp_hidden"] = model.mlp_hidden * dial.n_embd // model.n_embd
        model = replace(model, **shape)
        batch *= 4 ** max(0, math.floor(1 + math.log(tokens / LONG, 16)))
    batch = model.seq_len * max(1, round(batch / model.seq_len))
    train = replace(usual.train, tokens_per_step=batch, steps=max(1, int(tokens / batch)))
    run = replace(preset.run, micro_batch=0)  # what fits one depth need not fit another
    return replace(usual, name=name, model=model, train=train, run=run)


def words_of(preset: Preset) -> list[str]:
    """The words by which train.py knows it, but for what the data decide and for its folders."""
    usual = find_preset(preset.name)
    words = [preset.name]
    for before, now in ((usual.model, preset.model), (usual.train, preset.train)):
        for key, value in vars(now).items():
            if value != getattr(before, key) and key not in folders.OF_DATA:
                words += [f"--{key}", str(value)]
    return words


def command_of(place: Place, preset: Preset) -> list[str]:
    """The command that trains it on the data of `place`, after `python`, but for its run_dir."""
    n = place.world.world_size
    words = ["-m", "torch.distributed.run", f"--nproc_per_node={n}"] if n > 1 else []
    words += ["train.py", *words_of(preset), "--data_dir", preset.run.data_dir]
    device = preset.run.device
    return words if device == "auto" else [*words, "--device", device]


# ----------------------------------------------------------------------------- what is timed


class Timed(NamedTuple):
    """A run of STEPS steps."""

    flops: int  # of the model, per token
    rate: float  # FLOP/s of its steps, as `work` counts them
    start: float  # seconds of the run but for steps and validations
    row: float  # seconds of a row in a validation


def work(preset: Preset) -> int:
    """FLOPs of a step: the model's, and Muon's, whose share falls with the batch."""
    model = law.built(preset.model)
    of_muon = optim.orthogonalize_flops(model.param_groups()["matrix"])
    return preset.train.tokens_per_step * model.flops_per_token() + of_muon


def time_two(place: Place, minutes: float) -> list[Timed]:
    """A small model and a larger one, each in the batch that it would have in that time."""
    small, large = TIMED[place.text]
    first = time_run(place, small, 1e9)
    most = max(1, 60 * minutes - first.start) * first.rate  # FLOPs
    if most / first.flops < LONG:  # on a slow machine
        first = time_run(place, small, 1)
    flops = law.built(of_depth(place.preset, large, 1).model).flops_per_token()
    return [first, time_run(place, large, most / flops)]


def time_run(place: Place, depth: int, tokens: float) -> Timed:
    """Train for STEPS steps, of the batch of a run of so many tokens, but at most one micro-batch;
    the compiler begins anew, as it will at another depth. UsageError if train.py fails."""
    limit = plan.MICRO_BATCH_TOKENS[place.world.device.type] * place.world.world_size
    preset = of_depth(place.preset, depth, tokens)
    seq_len = preset.model.seq_len
    batch = min(preset.train.tokens_per_step, max(seq_len, limit - limit % seq_len))
    preset = replace(preset, train=replace(preset.train, tokens_per_step=batch, steps=STEPS))
    say(f"timing {STEPS} steps at depth {depth} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        words = [*command_of(place, preset), "--run_dir", folder]
        how = dict(cwd=code.ROOT, capture_output=True, text=True)
        how["env"] = os.environ | dict(TORCHINDUCTOR_CACHE_DIR=str(Path(folder, "compiled")))
        begun = time.monotonic()
        ended = subprocess.run([sys.executable, *words], **how)
        if ended.returncode:
            raise UsageError(f"{shlex.join(words)} fails: {ended.stderr[-300:]}")
        run = RunFolder(folder)
    seconds = run.status.seconds
    rows = sum(line.val_rows for line in (*run.validations, run.whole_validation))
    return Timed(
        flops=law.built(preset.model).flops_per_token(),
        rate=work(preset) / run.steps[-1].dt_ms * 1e3,
        start=time.monotonic() - begun - seconds["steps"] - seconds["eval"],
        row=seconds["eval"] / rows,
    )


def between(timed: list[Timed], model: GPTConfig, what: str) -> float:
    """`what` of a model: by the power of the FLOPs per token that goes through both that were
    timed."""
    x, y = ([math.log(getattr(each, key)) for each in timed] for key in ("flops", what))
    slope = (y[1] - y[0]) / (x[1] - x[0])
    return math.exp(y[0] + slope * (math.log(law.built(model).flops_per_token()) - x[0]))


# -------------------------------------------------------------------------------- what is best


class Run(NamedTuple):
    """A run that ends in time."""

    preset: Preset
    plan: plan.Plan
    epochs: float  # how often it reads the text
    seconds: float  # of all of it
    tokens_per_s: float
    mfu: float | None
    loss: float  # bits per byte
    margin: float  # by which share of it the law may be wrong


def run_of(place: Place, timed: list[Timed], depth: int, seconds: float) -> Run | None:
    """The run of this depth that takes so long, or that reads the text EPOCHS times. None if that
    is too short for the law, if weights and optimizer take more than half the memory, or if there
    are more weights than so many readings of the text can train."""
    world = place.world
    tokens = most = EPOCHS * place.unique
    most_rate = MOST * world.world_size * (place.peak or math.inf)
    for _ in range(3):  # the batch follows from the tokens, and they from the seconds of a step
        preset = of_depth(place.preset, depth, tokens)
        model = preset.model
        row_s = between(timed, model, "row")
        some_s = row_s * min(preset.run.eval_tokens // model.seq_len, place.held_out)
        rest_s = between(timed, model, "start") + 2 * some_s + row_s * place.held_out
        step_s = work(preset) / min(between(timed, model, "rate"), most_rate)
        batch = preset.train.tokens_per_step
        tokens = min(most, (seconds - rest_s) / (step_s + some_s / preset.run.eval_every) * batch)
        if tokens < FEWEST:
            return None
    preset = of_depth(place.preset, depth, tokens)
    decided = plan.make_plan(preset, world)
    weights = law.weights_of(place.text, model)
    if decided.save_bytes > 0.5 * world.memory_bytes * world.world_size:
        return None
    if depth > DEPTHS[0] and weights * TOKENS_PER_WEIGHT > most:
        return None
    speed = batch / step_s
    return Run(
        preset=preset,
        plan=decided,
        epochs=tokens / place.unique,
        seconds=rest_s + decided.steps * (step_s + some_s / preset.run.eval_every),
        tokens_per_s=speed,
        mfu=mfu(speed, law.built(model).flops_per_token(), place.peak, world.world_size),
        loss=law.predict(place.text, weights, law.worth(tokens, place.unique)),
        margin=law.margin(place.text, weights, tokens),
    )


def best_run(place: Place, timed: list[Timed], minutes: float) -> Run:
    """The run of least loss among all depths. UsageError if no model can learn anything."""
    seconds = 60 * minutes
    found = [*takewhile(bool, (run_of(place, timed, depth, seconds) for depth in DEPTHS))]
    if not found:
        raise UsageError(f"{minutes:g} minutes are too few here to learn from {FEWEST:,} tokens")
    return min(found, key=lambda run: run.loss)
