"""The arithmetic of a run before it runs: steps, micro-batches, memory, disk, hours, dollars.

Reads the configuration and what the data and the machine say; writes nothing. Every decision that
the program takes for the user (`auto`) is taken here and printed, with its reason. Next: train.py.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import config as cfg
import flops
import optim
from machinery import cli
from machinery.errors import StorageError
from machinery.ranks import World
from machinery.shards import Manifest
from model import GPT, GPTConfig, attention_backend

TOKENS_PER_WEIGHT = 10.5  # of the blocks and the head: where the d* shapes train best per FLOP
MICRO_BATCH_TOKENS = {"cuda": 65_536, "mps": 8_192, "cpu": 8_192}  # a start for `auto`
EXPECTED_MFU = {"cuda": 0.40, "mps": 0.3, "cpu": 0.45}  # of the full convention, for --plan


@dataclass(frozen=True)
class Plan:
    """What `train` will do, decided."""

    steps: int
    tokens_per_step: int
    seq_len: int
    world_size: int
    micro_batch: int
    auto_micro_batch: bool
    ramp_steps: int
    parallel: str
    """none, ddp or fsdp"""
    compile: bool
    text: str = ""
    """What to print about it."""

    @property
    def sharded(self) -> bool:
        return self.parallel == "fsdp"

    def rows_at(self, step: int) -> int:
        """Rows of one step, over all ranks."""
        return round(self.tokens_per_step * optim.batch_at(step, self.ramp_steps)) // self.seq_len

    def rows_before(self, step: int) -> int:
        """Rows of all steps before this one."""
        ramp = min(step, self.ramp_steps)
        whole = (step - ramp) * (self.tokens_per_step // self.seq_len)
        return whole + sum(self.rows_at(s) for s in range(ramp))

    @property
    def rows(self) -> int:
        return self.rows_before(self.steps)

    def smaller_micro_batch(self, than: int) -> int:
        """At most half of it, and still dividing a rank's rows of every step."""
        per_rank = self.rows_at(0) // self.world_size
        return next(n for n in range(max(1, than // 2), 0, -1) if per_rank % n == 0)


def n_params(model_config: GPTConfig) -> dict[str, int]:
    """Parameters by kind, counted on the meta device."""
    with torch.device("meta"):
        model = GPT(model_config)
    return {kind: sum(p.numel() for p in ps) for kind, ps in model.param_groups().items()}


def state_bytes(params: dict[str, int], optimizer: str) -> int:
    """fp32 weights, gradients and optimizer state (Muon keeps one number per weight, AdamW two)."""
    total = sum(params.values())
    moments = 2 * total - (params["matrix"] if optimizer == "muon" else 0)
    return 4 * (2 * total + moments)


def steps_for(config: cfg.TrainConfig, params: dict[str, int]) -> int:
    """Steps as asked for, by tokens, or 10.5 tokens per weight of the blocks and the head."""
    if config.steps:
        return config.steps
    tokens = cli.count(config.tokens)
    if not tokens:
        tokens = TOKENS_PER_WEIGHT * (params["matrix"] + params["head"])
    return max(1, math.ceil(tokens / config.tokens_per_step))


def make_plan(config: cfg.TrainConfig, model: GPTConfig, manifest: Manifest, world: World) -> Plan:
    """Decide, check what can be checked before the first step, and say so."""
    params = n_params(model)
    steps = steps_for(config, params)
    state = state_bytes(params, config.optimizer)
    parallel, why = pick_parallel(config, world, state)
    smallest = round(config.tokens_per_step * optim.batch_at(0, config.ramp_steps))
    micro_batch = pick_micro_batch(config, model.seq_len, world, smallest)
    plan = Plan(
        steps=steps,
        tokens_per_step=config.tokens_per_step,
        seq_len=model.seq_len,
        world_size=world.world_size,
        micro_batch=micro_batch,
        auto_micro_batch=not config.micro_batch,
        ramp_steps=config.ramp_steps,
        parallel=parallel,
        compile=config.compile,
    )
    check_disk(config, state - 4 * sum(params.values()))
    if manifest.rows("val") < world.world_size:
        raise ValueError(
            f"{manifest.rows('val')} validation rows cannot be shared by {world.world_size} ranks; "
            "prepare data with a larger --val_fraction"
        )
    rows, have = plan.rows, manifest.rows("train")
    accum = config.tokens_per_step // (micro_batch * model.seq_len * world.world_size)
    lines = [
        f"model     {sum(params.values()):,} parameters, {model.n_layer} layers x {model.n_embd}, "
        f"vocabulary {model.vocab_size:,}; extras: {', '.join(model.extras) or 'none'}",
        f"data      {config.data_dir}: {manifest.tokens('train'):,} training tokens in rows of "
        f"{manifest.row_len:,}, fingerprint {manifest.fingerprint[:12]}, tokenizer "
        f"{manifest.tokenizer_sha256[:12]}",
        f"run       {steps:,} steps x {config.tokens_per_step:,} tokens = {rows * model.seq_len:,} "
        f"tokens, {rows / have:.2f} epochs",
        f"step      {micro_batch} rows x {model.seq_len:,} tokens x {accum} accumulated x "
        f"{world.world_size} rank{'s' * (world.world_size > 1)}",
        f"on        {world.device_name}, {str(world.dtype).removeprefix('torch.')}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, attention by "
        f"{attention_backend(model, world.device, world.dtype)}; {why}",
    ]
    if rows > 4 * have:
        lines.append(
            f"warning: {rows / have:.1f} epochs over the same text teach little after the fourth; "
            "prepare more text, or take fewer --steps"
        )
    return replace(plan, text="\n".join(lines))


def pick_parallel(config: cfg.TrainConfig, world: World, state: int) -> tuple[str, str]:
    """(none, ddp or fsdp; the reason)."""
    sizes = f"state needs {state / 1e9:.2f} GB, a rank has {world.memory_bytes / 1e9:.1f} GB"
    if world.world_size == 1:
        return "none", f"one rank: {sizes}"
    if config.parallel != "auto":
        return config.parallel, f"{config.parallel} as asked: {sizes}"
    choice = "ddp" if state < 0.5 * world.memory_bytes else "fsdp"
    return choice, f"{choice}: {sizes}, and half of it is for activations"


def pick_micro_batch(config: cfg.TrainConfig, seq_len: int, world: World, smallest: int) -> int:
    """Rows per forward pass: as asked, or the most that divide a step and fit the usual budget."""
    W, tokens = world.world_size, config.tokens_per_step
    unit = max(1, config.micro_batch) * seq_len * W
    for total in (smallest, tokens):
        if total % unit:
            ramp = "" if total == tokens else f" (the first of the ramp's steps takes {total})"
            unit_of_all = unit * (4 if ramp else 1)  # a quarter must be a multiple too
            good = max(1, round(tokens / unit_of_all)) * unit_of_all
            raise ValueError(
                f"tokens_per_step {tokens}{ramp} is not a multiple of {max(1, config.micro_batch)} "
                f"rows x {seq_len} tokens x {W} ranks = {unit}; try --tokens_per_step {good}"
            )
    if config.micro_batch:
        return config.micro_batch
    per_rank = smallest // (seq_len * W)
    budget = max(1, MICRO_BATCH_TOKENS[world.device.type] // seq_len)
    return max(n for n in range(1, min(per_rank, budget) + 1) if per_rank % n == 0)


def check_disk(config: cfg.TrainConfig, checkpoint_bytes: int) -> None:
    """Room for the checkpoints that are kept, and the one being written."""
    folder = Path(config.run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    free, need = shutil.disk_usage(folder).free, (config.keep + 1) * checkpoint_bytes
    if free < need:
        raise StorageError(
            f"{config.run_dir} has {free / 1e9:.1f} GB free, {config.keep + 1} checkpoints take "
            f"{need / 1e9:.1f} GB; free some space or choose another --run_dir"
        )


def describe(preset: cfg.Preset, world: World) -> str:
    """`--plan`: what the run would take. Estimates are called so."""
    config, model, device = preset.train, preset.model, world.device
    params = n_params(model)
    steps = steps_for(config, params)
    tokens = steps * config.tokens_per_step
    with torch.device("meta"):
        meta = GPT(model)
    full, causal = meta.flops_per_token(), meta.flops_per_token(causal=True)
    state = state_bytes(params, config.optimizer)
    saved = state - 4 * sum(params.values())
    rows = pick_micro_batch(config, model.seq_len, world, config.tokens_per_step)
    accum = config.tokens_per_step // (rows * model.seq_len)
    # what backward needs of a token, in bf16: about 10 vectors of the width and 3 of the MLP's
    # hidden width per layer, and the logits, their softmax and its gradient
    per_token = (
        2 * model.n_layer * (10 * model.n_embd + 3 * model.mlp_hidden) + 8 * model.vocab_size
    )
    activations = rows * model.seq_len * per_token
    name, mfu = world.device_name, EXPECTED_MFU[device.type]
    peak = flops.peak_flops(name)
    if config.peak_tflops:  # of the machine that somebody thinks of renting
        name, mfu, peak = "such a device", EXPECTED_MFU["cuda"], config.peak_tflops * 1e12
    elif device.type == "cpu":
        peak = flops.measure_matmul(device, world.dtype, seconds=0.5)
    if peak:
        hours = tokens * full / (mfu * peak) / 3600
        cost = f"${hours * config.usd_per_hour:,.2f} at ${config.usd_per_hour:.2f}/hour"
        time_line = (
            f"{hours:,.2f} hours on one rank of {name}, if it reaches "
            f"{mfu:.0%} of {peak / 1e12:.1f} TFLOP/s; {cost}"
        )
    else:
        time_line = f"n/a: the peak of {name} is unknown; give --peak_tflops"
    lines = [
        ("preset", preset.name),
        ("parameters", f"{sum(params.values()):,} ({params['matrix']:,} in matrices)"),
        ("FLOPs/token", f"{full:,} full convention, {causal:,} causal"),
        ("tokens", f"{tokens:,} = {steps:,} steps x {config.tokens_per_step:,}"),
        ("step", f"{rows} rows x {model.seq_len:,} tokens x {accum:g} (accumulated or ranks)"),
        ("memory", f"{state / 1e9:.2f} GB state + about {activations / 1e9:.2f} GB activations"),
        ("disk", f"{2 * tokens / 1e9:.2f} GB for one epoch of rows + {config.keep + 1} checkpoints "
                 f"of {saved / 1e9:.2f} GB"),
        ("time", time_line),
    ]  # fmt: skip
    return "\n".join(f"{key:<12}{value}" for key, value in lines)
