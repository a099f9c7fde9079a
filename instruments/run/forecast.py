"""How long a run takes, what it costs and, for a `dN`, which loss it may end with, before it runs:
`python eval.py plan d12 --gpu 8xH100`.

Reads the preset and the table of cards in flops.py; no card is needed, and nothing is written.
`step_s` adds up what a step must do: matmuls, attention, and the memory traffic of all other
kernels, each at a rate that is assumed here. So the result is an estimate: close for wide models of
heads of 128, while two published runs of narrow ones (docs/scaling.md) took 1.2 and 1.5 times as
long. A run prints its true speed. `train.py PRESET --plan`: the page for this machine. Next:
machinery/plan.py.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

import config as cfg
import flops
from config import GPTConfig, UsageError
from machinery import cli, folders, plan, ranks, shards
from machinery.output import say
from machinery.screen import short
from model import GPT

# Assumed, as shares of the datasheet's figures, for H100s. (tests/test_flops.py has a published
# speed that they come near.) Other cards may reach more of their peak, or less.
MATMUL = 0.756  # of the peak, by a matmul in bf16 of unlimited width
HALF_WIDTH = 204  # channels; a matmul of width C reaches C / (C + HALF_WIDTH) of that
NARROW = 0.9  # the factor for grouped queries, whose keys and values are narrow matrices
ATTENTION = {128: (0.50, 0.40), 64: (0.40, 0.30)}  # head_dim -> forward, backward
TRAFFIC = 0.79  # of the bandwidth, by the fused elementwise kernels
DEPTHS = range(4, 41, 2)  # what --usd compares
OTHER_MFU = {"cuda": 0.4, "mps": 0.3, "cpu": 0.2}  # full convention; a device not in the table
# What `benchmarks/law.py` found: E, A, a, B, b and the factor of the text.
LAW = json.loads(Path(__file__).with_name("law.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PlanConfig:
    """What to plan for."""

    gpu: str = ""
    """Card, instead of this machine: `H100`, `8xH200`, `4090`."""
    usd: float = 0.0
    """Dollars to spend: names the depth that makes the most of them."""

    def __post_init__(self):
        cfg.check_values(self)


@dataclass(frozen=True)
class PlanArgs(cli.TrainArgs):
    """Plan a run: size, hours, dollars. Takes the options of train.py, and --gpu and --usd."""

    plan: PlanConfig


def parse_gpus(asked: str) -> ranks.World:
    """ "8xH100" -> eight of them, which this machine need not have."""
    count, name = re.fullmatch(r"(?:(\d+)x)?(.*)", asked).groups()
    name = name if flops.find_card(name) else f"RTX {name}"
    card = flops.find_card(name)
    n = int(count or 1)
    if card is None or not n:
        raise UsageError(
            f"--gpu {asked} is not in the table; choose from {', '.join(flops.CARDS)}, or several: "
            "8xH100"
        )
    memory_bytes = int(0.99 * card.memory_gb * 2**30)  # a datasheet's GB, less 1% for the driver
    return ranks.World(0, n, 0, torch.device("cuda"), torch.bfloat16, memory_bytes, name)


def main(argv: list[str]) -> None:
    """`eval.py plan [PRESET] [--gpu 8xH100] [--usd 50] [options of train.py]`: print the page."""
    say(page_of(argv))


def page_of(argv: list[str]) -> str:
    """What `main` prints."""
    name, options = cli.first_word(argv)
    preset = cli.parse("eval.py plan", "train", [name])
    default = PlanArgs(preset.train, preset.run, preset.model, PlanConfig())
    asked = cli.read_options(default, options, f"eval.py plan {name}")
    preset = replace(preset, model=asked.model, train=asked.train, run=asked.run)
    here = (preset.run.device, preset.train.dtype)
    world = parse_gpus(asked.plan.gpu) if asked.plan.gpu else ranks.start(*here)
    return page(preset, world, asked.plan.usd)


def print_plan(preset: cfg.Preset, world: ranks.World) -> int:
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
    return 0


def page(preset: cfg.Preset, world: ranks.World, usd: float = 0.0) -> str:
    """The plan with hours, dollars and, for a `dN`, the loss; and what `usd`, if any, buys."""
    run = preset.run
    n_gpus = world.world_size if world.device.type == "cuda" else 0
    card = flops.find_card(world.device_name)
    peak = flops.find_peak(world, run.peak_tflops)
    price = run.usd_per_hour * n_gpus
    is_dial = on_the_dial(preset)
    if card and preset.train.dtype == "fp32":
        raise UsageError("--plan knows what cards do in 16 bits only; leave --dtype fp32 out")
    if usd and not (is_dial and card and price):
        raise UsageError(
            f"--usd {usd} compares depths, for a card that has a price: eval.py plan d12 --gpu "
            "H100 --usd 50 --usd_per_hour 3"
        )
    on = f"on        {world.world_size} x {world.device_name}"
    if peak is None:
        reason = "its peak is unknown; set --peak_tflops, or name a known card: eval.py plan --gpu"
        return f"{plan.make_plan(preset, world).text}\n{on}\ntime      n/a: {reason}"
    on += f", {world.memory_bytes / 1e9:.1f} GB, {peak / 1e12:,.2f} TFLOP/s"
    on += f", {card.memory_tb_s} TB/s" if card else ""
    own = estimate(preset, world, peak)
    full = built(preset.model).flops_per_token()
    mfu = flops.mfu(own.tokens_per_s, full, peak, world.world_size)
    exchange = ", exchanging gradients not counted" if world.world_size > 1 else ""
    cost = f"; ${own.hours * price:,.2f} at --usd_per_hour {run.usd_per_hour:.2f}" if n_gpus else ""
    lines = [
        own.plan.text,
        f"{on} each",
        f"speed     an estimate: {short(own.tokens_per_s)} tok/s, {mfu:.0%} MFU full{exchange}",
        f"time      an estimate: {own.hours:,.2f} hours without validation{cost}",
    ]
    if is_dial:
        tokens = own.plan.steps * own.plan.tokens_per_step
        guess = predict(matmul_weights(preset.model), tokens)
        lines.append(
            f"loss      a guess: {guess:.3f} bits per byte of {LAW['text']}, by the law of "
            f"{LAW['runs']} published runs (docs/scaling.md)"
        )
    lines += each_depth(preset.run, world, peak, usd, usd / price) if usd else []
    return "\n".join(lines)


class Estimate(NamedTuple):
    """The forecast of a run."""

    plan: plan.Plan
    tokens_per_s: float
    hours: float  # of training; validation, 0.9% more for d12, is not counted


def estimate(preset: cfg.Preset, world: ranks.World, peak: float) -> Estimate:
    """Speed and time of a run on a machine with this peak, in FLOP/s of one device."""
    decided = plan.make_plan(preset, world)
    card = flops.find_card(world.device_name)
    if card:
        speed = decided.tokens_per_step / step_s(decided, preset.model, card, peak)
    else:
        full = built(preset.model).flops_per_token()
        speed = OTHER_MFU[world.device.type] * peak * world.world_size / full
        speed *= 0.75 if decided.recompute else 1  # four passes, of which MFU counts three
    tokens = decided.steps * decided.tokens_per_step
    return Estimate(decided, speed, tokens / speed / 3600)


@cache
def built(c: GPTConfig) -> GPT:
    """The model without memory for its weights: it knows their number, and its FLOPs."""
    with torch.device("meta"):
        return GPT(c)


def matmul_weights(c: GPTConfig) -> int:
    """Weights of the blocks and the head."""
    groups = built(c).param_groups()
    return sum(p.numel() for p in [*groups["matrix"], *groups["head"]])


# ------------------------------------------------------------------------- the loss of a dN


def on_the_dial(preset: cfg.Preset) -> bool:
    """Whether the law applies: the depth dial's shape, text and vocabulary."""
    dial = cfg.preset_of_depth(preset.model.n_layer)
    return preset.data.source == dial.data.source and preset.model == dial.model


def predict(weights: float, tokens: float) -> float:
    """Bits per byte."""
    E, A, a, B, b = map(LAW.get, "EAaBb")
    return LAW["factor"] * (E + A * weights**-a + B * tokens**-b)


def each_depth(run: cfg.RunConfig, world, peak: float, usd: float, hours: float) -> list[str]:
    """What the dollars (as hours) buy at each depth whose state fits in memory; and the best."""
    options = replace(run, micro_batch=0)  # what fits one depth need not fit another
    room = 0.5 * world.memory_bytes * world.world_size  # the rest is for gradients and activations
    lines = [f"${usd:,.2f} buys  depth  tokens  per weight  bits per byte"]
    found = []
    for depth in DEPTHS:
        preset = replace(cfg.preset_of_depth(depth), run=options)
        own = estimate(preset, world, peak)
        weights = matmul_weights(preset.model)
        if own.plan.save_bytes > room:
            break
        tokens = 1 + int(own.tokens_per_s * 3600 * hours)
        loss = predict(weights, tokens)
        found.append((loss, f"d{depth} --tokens {tokens / 1e9:.3g}B"))
        lines.append(f"{f'd{depth}':>17}{short(tokens):>8}{tokens / weights:>12.1f}  {loss:.3f}")
    _, best = min(found)
    train = f"torchrun --nproc_per_node={world.world_size} train.py {best}"
    return [*lines, f"best: python prepare_data.py {best} && {train}"]


def step_s(decided: plan.Plan, c: GPTConfig, card: flops.Card, peak: float) -> float:
    """Seconds of a full-size step on one rank, without communication."""
    bandwidth = TRAFFIC * card.memory_tb_s * 1e12
    params = sum(p.numel() for p in built(c).parameters())
    tokens = decided.micro_batch * decided.seq_len
    attention = 2 * c.n_layer * c.n_head * c.head_dim * c.seq_len  # FLOPs of forward, per token
    matmul = built(c).flops_per_token(causal=True) - 3 * attention
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
    micro_batches_s = decided.grad_accum * micro_batch_s
    return micro_batches_s + 40 * params / bandwidth  # optimizer: about 40 bytes/parameter


def traffic(c: GPTConfig) -> int:
    """Bytes per token that the compiled elementwise kernels read and write, forward and backward:
    counted in the generated code, in tensors of two bytes."""
    q = c.n_head * c.head_dim
    kv = c.n_kv_head * c.head_dim
    layer = 18 * c.n_embd  # adding to the residual stream, and norm
    layer += (6 if c.qk_norm else 4) * (q + kv)  # rotation, and the norm of queries and keys
    layer += 4 * kv if "value_embeds" in c.extras else 0  # 8 in every other layer
    layer += 8 * kv if "key_offset" in c.extras else 0
    layer += (8 if c.mlp == "swiglu" else 5) * c.mlp_hidden
    return 2 * (c.n_layer * layer + 3 * c.padded_vocab)
