"""How long a run takes and what it costs, before it runs: `train.py PRESET --plan [--gpu 8xH100]`.

Reads the preset and the table of cards in flops.py; no card is needed, and nothing is written.
`step_s` adds up what a step must do: matmuls, attention, and the memory traffic of all other
kernels, each at a rate that is assumed here. So the result is an estimate, and ten percent either
way would be no surprise. A run prints the truth. Next: machinery/plan.py.
"""

import re
from dataclasses import dataclass

import torch

import config as cfg
import flops
from config import GPTConfig, UsageError
from machinery import plan, ranks
from machinery.log import short
from model import GPT

# Assumed, as shares of the datasheet's figures, for H100s. (tests/test_flops.py has a published
# speed that they come near.) Other cards may reach more of their peak, or less.
MATMUL = 0.756  # of the peak, by a matmul in bf16 of unlimited width
HALF_WIDTH = 204  # channels; a matmul of width C reaches C / (C + HALF_WIDTH) of that
NARROW = 0.9  # the factor for grouped queries, whose keys and values are narrow matrices
ATTENTION = {128: (0.50, 0.40), 64: (0.40, 0.30)}  # head_dim -> forward, backward
TRAFFIC = 0.79  # of the bandwidth, by the fused elementwise kernels
FORWARD = 0.33  # time of a token in validation over that of one in training
OTHER_MFU = {"cuda": 0.4, "mps": 0.3, "cpu": 0.2}  # full convention; a device not in the table


@dataclass(frozen=True)
class NamedGPUs(ranks.World):
    """Cards that this machine need not have."""

    name: str

    @property
    def device_name(self) -> str:
        return self.name


def parse_gpus(asked: str) -> NamedGPUs:
    """ "8xH100" -> eight of them."""
    count, name = re.fullmatch(r"(?:(\d+)x)?(.*)", asked).groups()
    name = name if flops.find_card(name) else f"RTX {name}"
    card, n = flops.find_card(name), int(count or 1)
    if card is None or not n:
        raise UsageError(
            f"--gpu {asked} is not in the table; choose from {', '.join(flops.CARDS)}, or several: "
            "8xH100"
        )
    return NamedGPUs(
        rank=0,
        world_size=n,
        local_rank=0,
        local_world_size=n,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        memory_bytes=int(0.99 * card.memory_gb * 2**30),  # a datasheet's GB, less 1% for the driver
        name=name,
    )


def show(preset: cfg.Preset, world: ranks.World) -> int:
    """Print the page, once; returns the exit code."""
    text = page(preset, world)
    if world.is_first:
        print(text)
    return 0


def page(preset: cfg.Preset, world: ranks.World) -> str:
    """The plan with hours and dollars, on this machine or on `--gpu`."""
    run = preset.run
    world = parse_gpus(run.gpu) if run.gpu else world
    decided, card = plan.make_plan(preset, world), flops.find_card(world.device_name)
    with torch.device("meta"):
        meta = GPT(preset.model)
    tokens, full = decided.rows * decided.seq_len, meta.flops_per_token()
    on = f"on        {world.world_size} x {world.device_name}"
    if card and preset.train.dtype == "fp32":
        raise UsageError("--plan knows what cards do in bf16 only; leave --dtype fp32 out")
    peak = flops.find_peak(world, run.peak_tflops)
    if peak is None:
        why = "its peak is unknown; set --peak_tflops, or name a known card with --gpu"
        return f"{decided.text}\n{on}\ntime      n/a: {why}"
    on += f", {world.memory_bytes / 1e9:.1f} GB, {peak / 1e12:,.2f} TFLOP/s"
    if card:
        on += f", {card.memory_tb_s} TB/s"
        whole_steps = decided.rows / decided.rows_in_step(decided.ramp_steps)
        speed = tokens / (whole_steps * step_s(decided, meta, card, peak))
    else:
        speed = OTHER_MFU[world.device.type] * peak * world.world_size / full
        speed *= 0.75 if decided.recompute else 1  # four passes, of which MFU counts three
    validations = 2 + (decided.steps - 1) // run.eval_every if run.eval_every else 2
    hours = (tokens + FORWARD * validations * run.eval_tokens) / speed / 3600
    mfu = flops.mfu(speed, full, peak, world.world_size)
    exchange = ", exchanging gradients not counted" if world.world_size > 1 else ""
    lines = [
        decided.text,
        f"{on} each",
        f"speed     an estimate: {short(speed)} tok/s, {mfu:.0%} MFU full{exchange}",
        f"time      an estimate: {hours:,.2f} hours with validation; "
        f"{cost(hours, run.usd_per_hour, world)} (--usd_per_hour)",
    ]
    return "\n".join(lines)


def cost(hours: float, usd_per_hour: float, world: ranks.World) -> str:
    """Dollars. usd_per_hour is the price of one GPU, or of a machine without one."""
    n_gpus = world.world_size if world.device.type == "cuda" else 0
    of = {0: "the machine", 1: "the GPU"}.get(n_gpus, f"each of {n_gpus} GPUs")
    return f"${hours * usd_per_hour * max(1, n_gpus):,.2f} at ${usd_per_hour:.2f}/hour for {of}"


def step_s(decided: plan.Plan, meta: GPT, card: flops.Card, peak: float) -> float:
    """Seconds of a full-size step on one rank, without communication."""
    c, bandwidth = meta.config, TRAFFIC * card.memory_tb_s * 1e12
    tokens = decided.micro_batch * decided.seq_len
    params = sum(p.numel() for p in meta.parameters())
    attention = 2 * c.n_layer * c.n_head * c.head_dim * c.seq_len  # FLOPs of forward, per token
    matmul = meta.flops_per_token(causal=True) - 3 * attention
    matmul_rate = MATMUL * peak * c.n_embd / (c.n_embd + HALF_WIDTH)
    if c.n_kv_head < c.n_head:
        matmul_rate *= NARROW
    forward, backward = (share * peak for share in ATTENTION[128 if c.head_dim > 64 else 64])
    micro_batch_s = tokens * (matmul / matmul_rate + attention / forward)
    micro_batch_s += tokens * 2.5 * attention / backward  # 5 matmuls for the 2 of forward
    if decided.recompute:  # the forward pass once more, but for the head
        head = 6 * c.n_embd * c.padded_vocab
        again_s = (matmul - head) / 3 / matmul_rate + attention / forward
        micro_batch_s += tokens * (again_s + traffic(c) / 3 / bandwidth)
    # Adding a gradient moves 12 bytes, casting a matmul's weight and its gradient 12 more; a weight
    # in a matmul costs 6 FLOPs per token, so matmul / 6 is their number.
    micro_batch_s += (tokens * traffic(c) + 12 * params + 12 * matmul / 6) / bandwidth
    micro_batches_s = decided.grad_accum(decided.ramp_steps) * micro_batch_s
    return micro_batches_s + 40 * params / bandwidth  # optimizer: about 40 bytes/parameter


def traffic(c: GPTConfig) -> int:
    """Bytes per token that the compiled elementwise kernels read and write, forward and backward:
    counted in the generated code, in tensors of two bytes."""
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    layer = 18 * c.n_embd  # adding to the residual stream, and norm
    layer += (6 if c.qk_norm else 4) * (q + kv)  # rotation, and the norm of queries and keys
    layer += 4 * kv if "value_embeds" in c.extras else 0  # 8 in every other layer
    layer += 8 * kv if "key_offset" in c.extras else 0
    layer += (8 if c.mlp == "swiglu" else 5) * c.mlp_hidden
    return 2 * (c.n_layer * layer + 3 * c.padded_vocab)
