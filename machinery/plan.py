"""The arithmetic of a run before it runs: steps, micro-batches, memory, disk, hours, dollars.

Reads the configuration, and what the data and the machine say; writes nothing. Every decision that
the program takes (`auto`) is taken here and printed with its reason: a run prints the table and
goes on, `--plan` prints it and stops. Next: setup.py builds what was planned.
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
from machinery import cli, fused_loss
from machinery.errors import StorageError
from machinery.ranks import World
from machinery.shards import Manifest
from model import GPT, GPTConfig

TOKENS_PER_WEIGHT = 10.5  # of the blocks and the head: where the d* shapes train best per FLOP
MICRO_BATCH_TOKENS = {"cuda": 65_536, "mps": 8_192, "cpu": 8_192}  # where `auto` starts
EXPECTED_MFU = {"cuda": 0.40, "mps": 0.3, "cpu": 0.2}  # full convention; an assumption, no promise


@dataclass(frozen=True)
class Plan:
    """The decisions of a run."""

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
    fused_loss: bool
    """The loss is machinery/fused_loss.py's form of the one in model.py."""
    peak: float | None
    """FLOP/s of one device; None: unknown."""
    text: str
    """The table to print."""

    @property
    def sharded(self) -> bool:
        return self.parallel == "fsdp"

    @property
    def rows(self) -> int:
        return self.rows_before(self.steps)

    def rows_in_step(self, step: int) -> int:
        """Rows of one step, over all ranks."""
        return round(self.tokens_per_step * optim.batch_at(step, self.ramp_steps)) // self.seq_len

    def rows_before(self, step: int) -> int:
        """Rows of all steps before this one: the position in the data at which it begins."""
        ramp = min(step, self.ramp_steps)
        whole = (step - ramp) * (self.tokens_per_step // self.seq_len)
        return whole + sum(self.rows_in_step(s) for s in range(ramp))

    def smaller_micro_batch(self, than: int) -> int:
        """At most half of it, and still dividing a rank's rows of every step."""
        per_rank = self.rows_in_step(0) // self.world_size
        return next(n for n in range(max(1, than // 2), 0, -1) if per_rank % n == 0)


def make_plan(
    preset: cfg.Preset, model: GPTConfig, world: World, manifest: Manifest | None = None
) -> Plan:
    """Decide, and check before the first step whatever can be checked. manifest: None under
    `--plan`, which needs no data."""
    config, run, device = preset.train, preset.run, world.device
    with torch.device("meta"):
        meta = GPT(model)
    params = {kind: sum(p.numel() for p in ps) for kind, ps in meta.param_groups().items()}
    n_params, steps = sum(params.values()), steps_for(config, params)
    state = optim.state_bytes(params, config.optimizer)
    checkpoint = state - 4 * n_params  # gradients are not saved
    parallel, why = pick_parallel(run.parallel, world, state)
    smallest = round(config.tokens_per_step * optim.batch_at(0, config.ramp_steps))
    micro_batch = pick_micro_batch(config, run.micro_batch, model.seq_len, world, smallest)
    accum = config.tokens_per_step // (micro_batch * model.seq_len * world.world_size)
    fused, tokens = fused_loss.usable(model.logit_softcap), steps * config.tokens_per_step
    full, causal = meta.flops_per_token(), meta.flops_per_token(causal=True)
    peak, speed = find_peak(run, world), ""
    # Backward needs of a token, in bf16: about 10 vectors of the width and 3 of the MLP's hidden
    # width per layer; and the logits, their softmax and its gradient.
    of_a_token = 2 * model.n_layer * (10 * model.n_embd + 3 * model.mlp_hidden)
    activations = micro_batch * model.seq_len * (of_a_token + 8 * model.vocab_size)
    if peak:
        rented = run.peak_tflops and not manifest  # --plan for a device that one thinks of renting
        name, mfu = world.device_name, EXPECTED_MFU["cuda" if rented else device.type]
        hours = tokens * full / (mfu * peak * world.world_size) / 3600
        speed = (
            f"{hours:,.2f} hours on {'such a device' if rented else name}, if it reaches {mfu:.0%} "
            f"of {peak / 1e12:.1f} TFLOP/s; ${hours * run.usd_per_hour:,.2f} at "
            f"${run.usd_per_hour:.2f}/hour"
        )
    lines = [
        f"model     {n_params:,} parameters ({params['matrix']:,} in matrices), {model.n_layer} "
        f"layers x {model.n_embd}, vocabulary {model.vocab_size:,}; extras: "
        f"{', '.join(model.extras) or 'none'}",
        f"FLOPs     {full:,} per token in the full convention, {causal:,} in the causal one",
        f"run       {steps:,} steps x {config.tokens_per_step:,} tokens = {tokens:,} tokens",
        f"step      {micro_batch} rows x {model.seq_len:,} tokens x {accum} accumulated x "
        f"{world.world_size} rank{'s' * (world.world_size > 1)}",
        f"on        {world.device_name}, {str(world.dtype).removeprefix('torch.')}, torch "
        f"{torch.__version__}, {torch.get_num_threads()} threads; attention by "
        f"{attention_backend(model, device, world.dtype)}, loss by "
        f"{'machinery/fused_loss.py' if fused else 'model.py'}",
        f"memory    {why}; activations take about {activations / 1e9:.2f} GB",
        f"disk      {2 * tokens / 1e9:.2f} GB for one epoch of rows, {run.keep + 1} checkpoints of "
        f"{checkpoint / 1e9:.2f} GB",
        "time      " + (speed or f"n/a: no peak is known for {world.device_name}; --peak_tflops"),
    ]
    plan = Plan(
        steps=steps,
        tokens_per_step=config.tokens_per_step,
        seq_len=model.seq_len,
        world_size=world.world_size,
        micro_batch=micro_batch,
        auto_micro_batch=not run.micro_batch,
        ramp_steps=config.ramp_steps,
        parallel=parallel,
        compile=run.compile,
        fused_loss=fused,
        peak=peak,
        text="\n".join(lines),
    )
    if manifest:
        check_disk(run, checkpoint)
        return replace(plan, text=f"{plan.text}\n{check_data(run, plan, manifest)}")
    return plan


def check_data(run: cfg.RunConfig, plan: Plan, manifest: Manifest) -> str:
    """The plan's line about the data, with a warning if there is little of it."""
    if manifest.rows("val") < plan.world_size:
        raise ValueError(
            f"{manifest.rows('val')} validation rows cannot be shared by {plan.world_size} ranks; "
            "prepare data with a larger --val_fraction"
        )
    epochs = plan.rows / manifest.rows("train")
    text = (
        f"data      {run.data_dir}: {manifest.tokens('train'):,} training tokens in rows of "
        f"{manifest.row_len:,}, {epochs:.2f} epochs; fingerprint {manifest.fingerprint[:12]}, "
        f"tokenizer {manifest.tokenizer_sha256[:12]}"
    )
    if epochs > 4:
        text += (
            f"\nwarning: {epochs:.1f} epochs over the same text teach little after the fourth; "
            "prepare more text, or take fewer --steps"
        )
    return text


def steps_for(config: cfg.TrainConfig, params: dict[str, int]) -> int:
    """Steps as asked for, by tokens, or 10.5 tokens per weight of the blocks and the head."""
    if config.steps:
        return config.steps
    tokens = cli.count(config.tokens)
    if not tokens:
        tokens = TOKENS_PER_WEIGHT * (params["matrix"] + params["head"])
    return max(1, math.ceil(tokens / config.tokens_per_step))


def pick_parallel(asked: str, world: World, state: int) -> tuple[str, str]:
    """(none, ddp or fsdp; the reason)."""
    sizes = f"state needs {state / 1e9:.2f} GB, a rank has {world.memory_bytes / 1e9:.1f} GB"
    if world.world_size == 1:
        return "none", f"one rank: {sizes}"
    if asked != "auto":
        return asked, f"{asked} as asked: {sizes}"
    choice = "ddp" if state < 0.5 * world.memory_bytes else "fsdp"
    return choice, f"{choice}: {sizes}, half of it for activations"


def pick_micro_batch(
    config: cfg.TrainConfig, asked: int, seq_len: int, world: World, smallest: int
) -> int:
    """Rows per forward pass: as asked, or the most that divide a step and fit the usual budget."""
    W, tokens = world.world_size, config.tokens_per_step
    unit = max(1, asked) * seq_len * W
    for total in (smallest, tokens):
        if total % unit:
            ramp = "" if total == tokens else f" (the first of the ramp's steps takes {total})"
            unit_of_all = unit * (4 if ramp else 1)  # a quarter must be a multiple too
            good = max(1, round(tokens / unit_of_all)) * unit_of_all
            raise ValueError(
                f"tokens_per_step {tokens}{ramp} is not a multiple of {max(1, asked)} "
                f"rows x {seq_len} tokens x {W} ranks = {unit}; try --tokens_per_step {good}"
            )
    if asked:
        return asked
    per_rank = smallest // (seq_len * W)
    budget = max(1, MICRO_BATCH_TOKENS[world.device.type] // seq_len)
    return max(n for n in range(1, min(per_rank, budget) + 1) if per_rank % n == 0)


def check_disk(run: cfg.RunConfig, checkpoint_bytes: int) -> None:
    """Room for the checkpoints that are kept, and the one being written."""
    folder = Path(run.run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    free, need = shutil.disk_usage(folder).free, (run.keep + 1) * checkpoint_bytes
    if free < need:
        raise StorageError(
            f"{run.run_dir} has {free / 1e9:.1f} GB free, {run.keep + 1} checkpoints take "
            f"{need / 1e9:.1f} GB; free some space or choose another --run_dir"
        )


def find_peak(run: cfg.RunConfig, world: World) -> float | None:
    """FLOP/s of one device: as given, by its name, or (on a CPU) a matmul timed now."""
    if run.peak_tflops:
        return run.peak_tflops * 1e12
    if world.device.type == "cpu":
        return flops.measure_matmul(world.device, world.dtype, seconds=0.5)
    return flops.peak_flops(world.device_name)


def attention_backend(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that PyTorch picks for the attention of a training step here: cudnn_attention,
    flash_attention, efficient_attention or math."""
    T, gqa = config.seq_len, config.n_head != config.n_kv_head
    q = torch.empty(1, config.n_head, T, config.head_dim, device=device, dtype=dtype)
    k = q.requires_grad_()[:, : config.n_kv_head]
    mask = torch.ones(T, T, dtype=torch.bool, device=device) if config.doc_mask else None
    choice = torch._fused_sdp_choice(q, k, k, mask, is_causal=mask is None, enable_gqa=gqa)
    return torch.nn.attention.SDPBackend(choice).name.lower()
