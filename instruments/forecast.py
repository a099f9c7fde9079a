"""How long a run takes and what it costs, before it runs: `train.py PRESET --plan [--gpu 8xH100]`.

Reads the preset and the table of cards in flops.py; no card is needed, and nothing is written.
`step_s` adds up what a step must do: matmuls, attention, and the memory traffic of all other
kernels, each at a rate that is assumed here. So the result is an estimate, and ten percent either
way would be no surprise. A run prints the truth. Next: machinery/plan.py.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
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
ALIKE = 0.001  # bits per byte: of two depths so near, the smaller one is cheaper to use
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
    """The plan with hours, dollars and, for a `dN`, the loss: on this machine or on `--gpu`."""
    run = preset.run
    world = parse_gpus(run.gpu) if run.gpu else world
    card, peak = flops.find_card(world.device_name), flops.find_peak(world, run.peak_tflops)
    on = f"on        {world.world_size} x {world.device_name}"
    if card and preset.train.dtype == "fp32":
        raise UsageError("--plan knows what cards do in bf16 only; leave --dtype fp32 out")
    if peak is None:
        why = "its peak is unknown; set --peak_tflops, or name a known card with --gpu"
        return f"{plan.make_plan(preset, world).text}\n{on}\ntime      n/a: {why}"
    on += f", {world.memory_bytes / 1e9:.1f} GB, {peak / 1e12:,.2f} TFLOP/s"
    on += f", {card.memory_tb_s} TB/s" if card else ""
    own = estimate(preset, world, peak)
    mfu = flops.mfu(own.tokens_per_s, own.flops_per_token, peak, world.world_size)
    exchange = ", exchanging gradients not counted" if world.world_size > 1 else ""
    lines = [
        own.plan.text,
        f"{on} each",
        f"speed     an estimate: {short(own.tokens_per_s)} tok/s, {mfu:.0%} MFU full{exchange}",
        f"time      an estimate: {own.hours:,.2f} hours with validation; "
        f"{cost(own.hours, run.usd_per_hour, world)} (--usd_per_hour)",
    ]
    dial = on_the_dial(preset)
    if run.usd and not (dial and card):
        example = "train.py d12 --plan --gpu H100 --usd 50"
        raise UsageError(f"--usd {run.usd} compares depths on a card, as in {example}")
    lines += [loss_line(own)] if dial else []
    lines += other_depths(preset, world, peak, own) if dial and card else []
    return "\n".join(lines)


@dataclass(frozen=True)
class Estimate:
    """A run before it is run."""

    plan: plan.Plan
    weights: int  # of the blocks and the head
    flops_per_token: int
    tokens_per_s: float
    validation: float  # its time, as a share of that of training
    tokens: int

    @property
    def hours(self) -> float:
        return self.tokens * (1 + self.validation) / self.tokens_per_s / 3600


def estimate(preset: cfg.Preset, world: ranks.World, peak: float) -> Estimate:
    """Speed and time of a run on a machine with this peak, in FLOP/s of one device."""
    decided, card = plan.make_plan(preset, world), flops.find_card(world.device_name)
    with torch.device("meta"):
        meta = GPT(preset.model)
    tokens, full, run = decided.rows * decided.seq_len, meta.flops_per_token(), preset.run
    groups = meta.param_groups()
    weights = sum(p.numel() for p in groups["matrix"] + groups["head"])
    if card:
        whole_steps = decided.rows / decided.rows_in_step(decided.ramp_steps)
        speed = tokens / (whole_steps * step_s(decided, meta, card, peak))
    else:
        speed = OTHER_MFU[world.device.type] * peak * world.world_size / full
        speed *= 0.75 if decided.recompute else 1  # four passes, of which MFU counts three
    validations = 2 + (decided.steps - 1) // run.eval_every if run.eval_every else 2
    validation = FORWARD * validations * run.eval_tokens / tokens
    return Estimate(decided, weights, full, speed, validation, tokens)


# ------------------------------------------------------------------------- the loss of a dN


def on_the_dial(preset: cfg.Preset) -> bool:
    """Whether the law speaks of it: the depth dial's shape, text and vocabulary."""
    dial = cfg.preset_of_depth(preset.model.n_layer)
    return preset.data.source == dial.data.source and preset.model == dial.model


@lru_cache(maxsize=1)
def law() -> dict:
    """What `benchmarks/scaling.py fit` found: E, A, a, B, b and the factor of the text; the largest
    weights and tokens of the runs; and draws of the six constants, each with an error."""
    return json.loads(Path(__file__).with_name("law.json").read_text(encoding="utf-8"))


def predict(weights: float, tokens: float) -> tuple[float, float, float]:
    """(bits per byte, the least, the most), as Law.predict of benchmarks/law.py says it."""
    found = law()
    beyond = weights / found["weights"], tokens / found["tokens"]
    far = sum(math.log2(max(1.0, times)) for times in beyond)  # doublings
    loss = lambda E, A, a, B, b, factor: factor * (E + A * weights**-a + B * tokens**-b)
    imagined = [loss(*six) * math.exp(error * max(1.0, far)) for *six, error in found["draws"]]
    low, high = np.quantile(imagined, (0.05, 0.95))
    return loss(*(found[name] for name in (*"EAaBb", "factor"))), low, high


def loss_line(run: Estimate) -> str:
    guess, low, high = predict(run.weights, run.tokens)
    found = law()
    beyond = "" if run.weights <= found["weights"] else ", and beyond their sizes"
    return (
        f"loss      a guess: {guess:.3f} bits per byte of {found['text']}, {low:.3f} to {high:.3f},"
        f" by {found['runs']} published\n          runs of nanochat, whose recipe is not quite this"
        f" one{beyond} (benchmarks/SCALING.md)"
    )


def other_depths(preset: cfg.Preset, world, peak: float, own: Estimate) -> list[str]:
    """What the same dollars, or those of --usd, buy at other depths, and which is best."""
    per_hour = preset.run.usd_per_hour * max(1, world.world_size)
    hours = preset.run.usd / per_hour if preset.run.usd else own.hours
    found = {}
    for depth in range(4, 61, 2):
        dial = cfg.preset_of_depth(depth)
        options = replace(preset.run, micro_batch=0)  # what fits one depth need not fit another
        run = estimate(replace(dial, run=options), world, peak)
        tokens = int(hours * 3600 * run.tokens_per_s / (1 + run.validation))
        if run.plan.save_bytes > 0.5 * world.memory_bytes * world.world_size:
            break  # weights, gradients, optimizer and activations would not fit
        found[depth] = replace(run, tokens=tokens), predict(run.weights, tokens)
    if not found:
        return []
    lowest = min(guess for _, (guess, *_) in found.values())
    best = min(depth for depth in found if found[depth][1][0] <= lowest + ALIKE)
    lines = [f"${hours * per_hour:,.2f} buys    depth  tokens  per weight   hours  bits per byte"]
    for depth, (run, (guess, low, high)) in found.items():
        if abs(depth - best) <= 6 or depth == preset.model.n_layer:
            mark = "  the smallest of the best" if depth == best else ""
            lines.append(
                f"{'':14}{f'd{depth}':>5}{short(run.tokens):>8}{run.tokens / run.weights:>12.1f}"
                f"{run.hours:>8,.2f}  {guess:.3f} ({low:.3f} to {high:.3f}){mark}"
            )
    tokens = f"{found[best][0].tokens / 1e9:.3g}B"
    lines.append(
        f"{'':14}train.py d{best} --tokens {tokens}; prepare_data.py d{best} --tokens {tokens}"
    )
    return lines


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
