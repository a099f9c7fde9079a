"""How long a run takes and what it costs, before it runs: `python eval.py plan d12 --gpu 8xH100`.

Reads the preset and the table of cards in flops.py; no card is needed, and nothing is written.
`step_s` adds up what a step must do: matmuls, attention, and the memory traffic of all other
kernels, each at a rate that is assumed here. So the result is an estimate: near for wide models of
heads of 128, while two published runs of narrow ones took 1.2 and 1.5 times as long. A run prints
the truth. `train.py PRESET --plan` prints the page for this machine. Next: machinery/plan.py.
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
import optim
from config import GPTConfig, UsageError
from machinery import cli, plan, ranks
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
AROUND = 6  # depths on each side of where the formula looks that are planned
OTHER_MFU = {"cuda": 0.4, "mps": 0.3, "cpu": 0.2}  # full convention; a device not in the table


@dataclass(frozen=True)
class PlanConfig:
    """What to plan for."""

    gpu: str = ""
    """Card, instead of this machine: `H100`, `8xH200`, `4090`."""
    usd: float = 0.0
    """Dollars to spend: names the depth that makes the most of them."""

    def __post_init__(self):
        cfg.check_numbers(self)


@dataclass(frozen=True)
class PlanArgs(cli.TrainArgs):
    """Plan a run, and stop: parameters, tokens, memory, disk, hours and dollars. The first word is
    the preset (none: tiny); the options are those of train.py, and --gpu and --usd."""

    plan: PlanConfig


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
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        memory_bytes=int(0.99 * card.memory_gb * 2**30),  # a datasheet's GB, less 1% for the driver
        name=name,
    )


def main(argv: list[str]) -> int:
    """`eval.py plan [PRESET] [--gpu 8xH100] [--usd 50] [options of train.py]`: print the page."""
    print(page_of(argv))
    return 0


def page_of(argv: list[str]) -> str:
    """What `main` prints."""
    name, options = cli.first_word(argv)
    preset = cli.parse("eval.py plan", "train", [name])
    default = PlanArgs(preset.model, preset.train, preset.run, PlanConfig())
    asked = cli.read_options(default, options, f"eval.py plan {name}")
    preset = replace(preset, model=asked.model, train=asked.train, run=asked.run)
    here = (preset.run.device, preset.train.dtype)
    world = parse_gpus(asked.plan.gpu) if asked.plan.gpu else ranks.start(*here)
    return page(preset, world, asked.plan.usd)


def show(preset: cfg.Preset, world: ranks.World) -> int:
    """`train.py --plan`: print the page for this machine, once; returns the exit code."""
    text = page(preset, world)
    if world.is_first:
        print(text)
    return 0


def page(preset: cfg.Preset, world: ranks.World, usd: float = 0.0) -> str:
    """The plan with hours, dollars and, for a `dN`, the loss. usd: compare what it buys at other
    depths; 0: compare for what the run costs."""
    run = preset.run
    card, peak = flops.find_card(world.device_name), flops.find_peak(world, run.peak_tflops)
    on = f"on        {world.world_size} x {world.device_name}"
    if card and preset.train.dtype == "fp32":
        raise UsageError("--plan knows what cards do in bf16 only; leave --dtype fp32 out")
    is_dial = on_the_dial(preset)
    if usd and not (is_dial and card and run.usd_per_hour):
        example = "eval.py plan d12 --gpu H100 --usd 50 --usd_per_hour 3"
        raise UsageError(
            f"--usd {usd} compares depths on a card that has a price (--usd_per_hour "
            f"{run.usd_per_hour}), as in {example}"
        )
    if peak is None:
        why = "its peak is unknown; set --peak_tflops, or name a known card: eval.py plan --gpu"
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
    lines += [loss_line(own)] if is_dial else []
    lines += other_depths(preset, world, peak, own, usd) if is_dial and card else []
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
    tokens, full = decided.steps * decided.tokens_per_step, built(preset.model).flops_per_token()
    if card:
        speed = decided.tokens_per_step / step_s(decided, preset.model, card, peak)
    else:
        speed = OTHER_MFU[world.device.type] * peak * world.world_size / full
        speed *= 0.75 if decided.recompute else 1  # four passes, of which MFU counts three
    validation = FORWARD * validated(preset, decided.steps) / tokens
    return Estimate(decided, matmul_weights(preset.model), full, speed, validation, tokens)


def validated(preset: cfg.Preset, steps: int) -> float:
    """Tokens that a run scores: at each validation eval_tokens, or all that is held out if that is
    less, and at the end all. How much is held out is known if the preset says how much is
    prepared; else as much as eval_tokens is assumed."""
    run, text = preset.run, preset.data
    times = 2 + (steps - 1) // run.eval_every if run.eval_every else 2  # first and last step
    held_out, prepared = run.eval_tokens, text.tokens
    if prepared and prepared != "all" and text.val_fraction < 1:
        held_out = cli.count(prepared) * text.val_fraction / (1 - text.val_fraction)
    return times * min(run.eval_tokens, held_out) + held_out


@lru_cache(maxsize=128)
def built(c: GPTConfig) -> GPT:
    """The model without memory for its weights: it knows their number, and its FLOPs."""
    with torch.device("meta"):
        return GPT(c)


@lru_cache(maxsize=128)
def parameters(c: GPTConfig) -> dict[str, int]:
    """Weights by the way they are optimized."""
    return {k: sum(p.numel() for p in ps) for k, ps in built(c).param_groups().items()}


def saved_bytes(preset: cfg.Preset) -> int:
    """Of a checkpoint: weights and the optimizer's state."""
    sizes = parameters(preset.model)
    return optim.state_bytes(sizes, preset.train.optimizer) - 4 * sum(sizes.values())


def matmul_weights(c: GPTConfig) -> int:
    """Weights of the blocks and the head."""
    return parameters(c)["matrix"] + parameters(c)["head"]


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
    fitted = law()
    beyond = "extrapolated from" if run.weights > fitted["weights"] else "by"
    return (
        f"loss      a guess: {guess:.3f} bits per byte of {fitted['text']}, {low:.3f} to "
        f"{high:.3f}, {beyond}\n          {fitted['runs']} published nanochat runs of a slightly "
        "different recipe (benchmarks/SCALING.md)"
    )


def other_depths(
    preset: cfg.Preset, world, peak: float, own: Estimate, usd: float = 0.0
) -> list[str]:
    """What the same dollars, or `usd`, buy at other depths, and which is best."""
    per_hour = preset.run.usd_per_hour * max(1, world.world_size)
    hours = usd / per_hour if usd else own.hours

    flop = hours * 3600 * own.tokens_per_s * own.flops_per_token

    def at_this_speed(model: GPTConfig) -> float:
        """The loss if each depth did as many FLOPs in a second: it tells where to look."""
        return predict(matmul_weights(model), flop / built(model).flops_per_token())[0]

    dials = {depth: cfg.preset_of_depth(depth) for depth in range(4, 61, 2)}
    room = 0.5 * world.memory_bytes * world.world_size  # the rest is for gradients and activations
    fit = {n: d for n, d in dials.items() if saved_bytes(d) <= room}
    near = min(fit, key=lambda depth: at_this_speed(fit[depth].model), default=0)
    runs = {}
    for depth in [n for n in fit if abs(n - near) <= AROUND or n == preset.model.n_layer]:
        options = replace(preset.run, micro_batch=0)  # what fits one depth need not fit another
        run = estimate(replace(fit[depth], run=options), world, peak)
        tokens = int(hours * 3600 * run.tokens_per_s / (1 + run.validation))
        runs[depth] = replace(run, tokens=tokens), predict(run.weights, tokens)
    if not runs:
        return []
    lowest = min(guess for _, (guess, *_) in runs.values())
    best = min(depth for depth in runs if runs[depth][1][0] <= lowest + ALIKE)
    lines = [
        f"{f'${hours * per_hour:,.2f} buys':13} depth  tokens  per weight   hours  bits per byte"
    ]
    for depth, (run, (guess, low, high)) in runs.items():
        if abs(depth - best) <= 6 or depth == preset.model.n_layer:
            mark = f"  best (smallest within {ALIKE})" if depth == best else ""
            lines.append(
                f"{'':14}{f'd{depth}':>5}{short(run.tokens):>8}{run.tokens / run.weights:>12.1f}"
                f"{run.hours:>8,.2f}  {guess:.3f} ({low:.3f} to {high:.3f}){mark}"
            )
    tokens = f"{runs[best][0].tokens / 1e9:.3g}B"
    lines.append(
        f"{'':14}train.py d{best} --tokens {tokens}; prepare_data.py d{best} --tokens {tokens}"
    )
    return lines


def cost(hours: float, usd_per_hour: float, world: ranks.World) -> str:
    """Dollars. usd_per_hour is the price of one GPU, or of a machine without one."""
    n_gpus = world.world_size if world.device.type == "cuda" else 0
    of = {0: "the machine", 1: "the GPU"}.get(n_gpus, f"each of {n_gpus} GPUs")
    return f"${hours * usd_per_hour * max(1, n_gpus):,.2f} at ${usd_per_hour:.2f}/hour for {of}"


def step_s(decided: plan.Plan, c: GPTConfig, card: flops.Card, peak: float) -> float:
    """Seconds of a full-size step on one rank, without communication."""
    bandwidth, params = TRAFFIC * card.memory_tb_s * 1e12, sum(parameters(c).values())
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
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    layer = 18 * c.n_embd  # adding to the residual stream, and norm
    layer += (6 if c.qk_norm else 4) * (q + kv)  # rotation, and the norm of queries and keys
    layer += 4 * kv if "value_embeds" in c.extras else 0  # 8 in every other layer
    layer += 8 * kv if "key_offset" in c.extras else 0
    layer += (8 if c.mlp == "swiglu" else 5) * c.mlp_hidden
    return 2 * (c.n_layer * layer + 3 * c.padded_vocab)
