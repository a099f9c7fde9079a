"""The arithmetic of a run before it runs: steps, micro-batches, memory, disk.

Reads the configuration, the data's manifest and the machine; writes no file. What the options leave
open is decided here and printed; only the micro-batch may still shrink in setup.py. `--plan` prints
the table, hours and dollars (instruments/forecast.py) and stops. Next: setup.py builds what is
planned here.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend

import config as cfg
import data
import flops
import optim
from machinery import checkpoint, cli, durable, fused
from machinery.ranks import World
from machinery.shards import Manifest, dtype_for
from model import GPT, GPTConfig

TOKENS_PER_WEIGHT = 10.5  # of the blocks and the head: where the d* shapes train best per FLOP
MICRO_BATCH_TOKENS = {"cuda": 65_536, "mps": 8_192, "cpu": 8_192}  # where `auto` starts
USABLE = 0.92  # of a GPU's memory; the rest is for fragments, NCCL's and cuDNN's buffers


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


@dataclass(frozen=True)
class Plan:
    """The decisions of a run."""

    steps: int
    tokens_per_step: int
    ramp_steps: int
    seq_len: int
    world_size: int
    micro_batch: int
    auto_micro_batch: bool
    parallel: str  # none, ddp or fsdp
    compile: bool
    fused: tuple[str, ...]  # parts of the model in the form of machinery/fused.py
    peak: float | None  # FLOP/s of one device; None: unknown
    text: str = ""  # the table to print

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
        """At most half of `than`, and a divisor of a rank's rows of every step."""
        return largest_divisor(self.rows_in_step(0) // self.world_size, max(1, than // 2))


def make_plan(
    preset: cfg.Preset, model: GPTConfig, world: World, manifest: Manifest | None = None
) -> Plan:
    """Decide, and check that the run can work. manifest: None under `--plan`, without data."""
    config, run, W = preset.train, preset.run, world.world_size
    with torch.device("meta"):
        meta = GPT(model)
    params = {kind: sum(p.numel() for p in ps) for kind, ps in meta.param_groups().items()}
    n_params, state = sum(params.values()), optim.state_bytes(params, config.optimizer)
    parallel, why = pick_parallel(run.parallel, world, state)
    per_token = flops.activation_bytes(model, world.dtype.itemsize)
    at_once = MICRO_BATCH_TOKENS[world.device.type]
    if world.device.type == "cuda":
        room = USABLE * world.memory_bytes - state / (W if parallel == "fsdp" else 1)
        room -= 4 * n_params * (parallel == "ddp")  # its buckets hold the gradients once more
        whole = params["embedding"] + params["head"]  # what FSDP gathers for all of a step
        room -= world.dtype.itemsize * whole * (parallel == "fsdp")
        at_once = min(at_once, room / per_token)
    plan = Plan(
        steps=steps_for(config, params),
        tokens_per_step=config.tokens_per_step,
        ramp_steps=config.ramp_steps,
        seq_len=model.seq_len,
        world_size=W,
        micro_batch=pick_micro_batch(config, run.micro_batch, model.seq_len, W, at_once),
        auto_micro_batch=not run.micro_batch,
        parallel=parallel,
        compile=run.compile,
        fused=fused.usable(model),
        peak=find_peak(run, world),
    )
    tokens, rows = plan.rows * plan.seq_len, plan.micro_batch
    accum = plan.tokens_per_step // (rows * model.seq_len * W)
    full, causal = meta.flops_per_token(), meta.flops_per_token(causal=True)
    one_save = state - 4 * n_params  # gradients are not saved
    saved = checkpoint.checkpoints(Path(run.run_dir, "checkpoints"))
    # The newest, the best, that before the decay, one being written, and the one resumed from.
    saves = run.keep + 3 + bool(saved)
    activations = rows * model.seq_len * per_token
    token_size = np.dtype(dtype_for(model.vocab_size)).itemsize
    rates = ""
    if config.optimizer == "muon":
        factor = optim.lr_batch_factor(plan.tokens_per_step)
        rates = f"; learning rates x {factor:.3f} for this batch"
    ramp = f" (fewer in the first {plan.ramp_steps:,})" if plan.ramp_steps else ""
    lines = [
        f"model     {n_params:,} parameters ({params['matrix']:,} in matrices), {model.n_layer} "
        f"layers x {model.n_embd}, vocabulary {model.vocab_size:,}; extras: "
        f"{', '.join(model.extras) or 'none'}",
        f"FLOPs     {full:,} per token in the full convention, {causal:,} in the causal one",
        f"run       {plan.steps:,} steps x {plan.tokens_per_step:,} tokens{ramp} "
        f"= {tokens:,} tokens",
        f"step      {rows} rows x {model.seq_len:,} tokens x {accum} accumulated x {W} "
        f"rank{'s' * (W > 1)}{rates}",
        f"memory    {why}; activations take about {activations / 1e9:.2f} GB",
        f"disk      {tokens * token_size / 1e9:.2f} GB of rows if none is repeated, "
        f"{saves} checkpoints of {one_save / 1e9:.2f} GB",
    ]
    if manifest:
        remark = prefer_cudnn(model, world.device)
        lines.append(
            f"on        {world.device_name}, {str(world.dtype).removeprefix('torch.')}, torch "
            f"{torch.__version__}, {torch.get_num_threads()} threads; attention by "
            f"{attention_backend(model, world.device, world.dtype)}"
            f"; {', '.join(plan.fused) or 'nothing'} by machinery/fused.py{remark}"
        )
        new = max(1, saves - len(saved))
        remedy = f"room for {new} checkpoints: free some space or choose another --run_dir"
        if not saved or checkpoint.step_of(saved[0]) < plan.steps:  # else finished, if it is valid
            durable.check_room(Path(run.run_dir), new * one_save, remedy)
        lines.append(check_data(preset, plan, manifest))
    return replace(plan, text="\n".join(lines))


def check_data(preset: cfg.Preset, plan: Plan, manifest: Manifest) -> str:
    """The plan's line about the data, and a warning if a run repeats a source too often."""
    train = preset.train
    if (rows := manifest.rows("val")) < plan.world_size:
        raise ValueError(
            f"{rows} validation rows cannot be shared by {plan.world_size} ranks; prepare data "
            "with a larger --val_fraction"
        )
    mixtures = cli.weights(train.mixture), cli.weights(train.decay_mixture)
    decay_from = plan.rows_before(optim.decay_begins(plan.steps, train.decay))
    order = data.order_of(manifest, "train", train.seed, *mixtures, decay_from)
    epochs, name = max(zip(order.epochs(plan.rows), manifest.sources))
    of = f" of {name}" if len(manifest.sources) > 1 else ""
    text = (
        f"data      {preset.run.data_dir}: {manifest.tokens('train'):,} training tokens in rows of "
        f"{manifest.row_len:,}, {epochs:.2f} epochs{of}; fingerprint {manifest.fingerprint[:12]}, "
        f"tokenizer {manifest.tokenizer_sha256[:12]}"
    )
    why = "but the same text teaches little after the fourth; prepare more, or lower --steps"
    return f"{text}\nwarning: {epochs:.1f} epochs{of}, {why}" if epochs > 4 else text


def steps_for(config: cfg.TrainConfig, params: dict[str, int]) -> int:
    """Steps as given, or for the tokens given, or for 10.5 tokens per weight of blocks and head."""
    tokens = cli.count(config.tokens) or TOKENS_PER_WEIGHT * (params["matrix"] + params["head"])
    ramp = config.ramp_steps
    less = sum(1 - optim.batch_at(step, ramp) for step in range(ramp))  # in units of full steps
    return config.steps or max(1, math.ceil(tokens / config.tokens_per_step + less))


def pick_parallel(asked: str, world: World, state: int) -> tuple[str, str]:
    """(none, ddp or fsdp; the reason)."""
    sizes = f"state needs {state / 1e9:.2f} GB, a rank has {world.memory_bytes / 1e9:.1f} GB"
    if world.world_size == 1:
        return "none", f"one rank: {sizes}"
    if asked != "auto":
        return asked, f"{asked} as asked: {sizes}"
    choice = "ddp" if state < 0.5 * world.memory_bytes else "fsdp"
    return choice, f"{choice}: {sizes}, half of it for activations"


def pick_micro_batch(config: cfg.TrainConfig, asked: int, seq_len: int, W: int, most: float) -> int:
    """Rows per forward pass: as asked, or the most that divide a step, up to `most` tokens."""
    tokens, rows = config.tokens_per_step, max(1, asked)
    share = round(1 / optim.batch_at(0, config.ramp_steps))  # 4: a ramp begins with a quarter
    unit = share * rows * seq_len * W
    if tokens % unit:
        ramp = f" (the first of the ramp's steps takes {tokens // share})" if share > 1 else ""
        good = max(1, round(tokens / unit)) * unit
        raise ValueError(
            f"tokens_per_step {tokens}{ramp} is not a multiple of {rows} rows x {seq_len} tokens x "
            f"{W} ranks = {unit // share}; try --tokens_per_step {good}"
        )
    return asked or largest_divisor(tokens // unit, max(1, int(most / seq_len)))


def find_peak(run: cfg.RunConfig, world: World) -> float | None:
    """FLOP/s of one device: as given, in bf16 by its name, or (on a CPU) a matmul timed now."""
    if run.peak_tflops:
        return run.peak_tflops * 1e12
    if world.device.type == "cpu":
        return flops.measure_matmul(world.device, world.dtype, seconds=0.5)
    return flops.peak_flops(world.device_name) if world.dtype == torch.bfloat16 else None


def prefer_cudnn(config: GPTConfig, device: torch.device) -> str:
    """Let torch use cuDNN's attention, the fastest on Hopper, where it is safe; returns a remark.

    Not with a mask: its backward can return NaN. Before cuDNN 9.15.1 (in wheels for CUDA 12) torch
    avoids it, as it fails at some lengths; here it is preferred if seq_len is a multiple of 128."""
    torch.backends.cuda.enable_cudnn_sdp(not config.doc_mask)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    unwanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"  # torch's own switch
    if not hopper or unwanted or (torch.backends.cudnn.version() or 0) > 91500:  # 9.15.0
        return ""
    if config.seq_len % 128 == 0 and not config.doc_mask:
        first = SDPBackend.CUDNN_ATTENTION.value
        order = sorted(torch._C._get_sdp_priority_order(), key=lambda backend: backend != first)
        torch._C._set_sdp_priority_order(order)
    return "; cuDNN is older than 9.15.1: pip install -U nvidia-cudnn-cu12"


def attention_backend(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that PyTorch picks for attention in training: flash_attention, math, ..."""
    T, gqa = config.seq_len, config.n_head != config.n_kv_head
    q = torch.empty(1, config.n_head, T, config.head_dim, device=device, dtype=dtype)
    k = q.requires_grad_()[:, : config.n_kv_head]
    mask = torch.ones(T, T, dtype=torch.bool, device=device) if config.doc_mask else None
    choice = torch._fused_sdp_choice(q, k, k, mask, is_causal=mask is None, enable_gqa=gqa)
    return SDPBackend(choice).name.lower()
