"""The arithmetic before a run: steps, micro-batches, memory, disk.

Pure functions make a `Plan` from the configuration and the machine's figures; they open no file and
touch no device. What the options leave open is decided here; build.py returns a new Plan if it has
to shrink the micro-batch, or to run without the compiler. `--plan` adds hours and dollars
(instruments/run/forecast.py). Next: build.py builds what is planned here.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

import config as cfg
import optim
from config import UsageError
from machinery import cli
from machinery.ranks import World
from machinery.shards import dtype_for
from model import GPT

MICRO_BATCH_TOKENS = {"cuda": 131_072, "mps": 8_192, "cpu": 8_192}  # limits for --micro_batch 0
USABLE = 0.92  # of a GPU's memory; the rest is for fragmentation and the buffers of NCCL and cuDNN


@dataclass(frozen=True)
class Plan:
    """The decisions of a run."""

    steps: int
    tokens_per_step: int
    seq_len: int
    world_size: int
    micro_batch: int
    auto_micro_batch: bool
    parallel: str  # none, ddp or fsdp
    compile: bool
    recompute: bool  # activation checkpointing: backward computes the blocks' activations again
    decay_begins: int  # steps before wsd lowers the learning rate, and decay_mixture applies
    keep_step: int  # its checkpoint is kept: from there, the run can be extended
    save_bytes: int  # of one checkpoint
    text: str = ""  # the table to print

    sharded = property(lambda self: self.parallel == "fsdp")

    @property
    def rows_per_step(self) -> int:
        """Rows of one step, over all ranks."""
        return self.tokens_per_step // self.seq_len

    @property
    def grad_accum(self) -> int:
        """Micro-batches of a step on each rank; the last may be padded with rows that do not
        count."""
        return math.ceil(self.rows_per_step / (self.micro_batch * self.world_size))


def make_plan(preset: cfg.Preset, world: World) -> Plan:
    """Decide what the options leave open, and check that the numbers fit together."""
    config = preset.train
    run = preset.run
    model = preset.model
    W = world.world_size
    with torch.device("meta"):
        meta = GPT(model)
    params = {kind: sum(p.numel() for p in ps) for kind, ps in meta.param_groups().items()}
    state = optim.state_bytes(params, config.optimizer)
    parallel = pick_parallel(run.parallel, world, state)
    rows = rows_of_step(preset)  # refuses a step that is no whole rows
    per_token = activation_bytes(model, world.dtype.itemsize, run.recompute)
    limit = MICRO_BATCH_TOKENS[world.device.type]
    if world.device.type == "cuda":
        limit = min(limit, room_for_activations(model, world, params, state, parallel) / per_token)
    most = max(1, int(limit / model.seq_len))
    steps = steps_for(config, params)
    begins = optim.decay_begins(steps, config.decay)
    plan = Plan(
        steps=steps,
        tokens_per_step=config.tokens_per_step,
        seq_len=model.seq_len,
        world_size=W,
        micro_batch=run.micro_batch or micro_batch_for(rows, W, most, parallel == "fsdp"),
        auto_micro_batch=not run.micro_batch,
        parallel=parallel,
        compile=run.compile,
        recompute=run.recompute,
        decay_begins=begins,
        keep_step=begins if config.schedule == "wsd" else steps,
        save_bytes=state - 4 * sum(params.values()),  # gradients are not saved
    )
    needed = plan.micro_batch * model.seq_len * per_token / 1e9
    memory = f"{parallel if W > 1 else 'one rank'}: state needs {state / 1e9:.2f} GB, activations "
    memory += f"about {needed:.2f} GB, a rank has {world.memory_bytes / 1e9:.1f} GB"
    return replace(plan, text=table(plan, preset, meta, params, memory))


def rows_of_step(preset: cfg.Preset) -> int:
    """Rows of a step, over all ranks. UsageError unless they are whole."""
    tokens = preset.train.tokens_per_step
    seq_len = preset.model.seq_len
    rows, rest = divmod(tokens, seq_len)
    if rest:
        raise UsageError(
            f"tokens_per_step {tokens} is not a multiple of a row of {seq_len} tokens; try "
            f"--tokens_per_step {(rows + 1) * seq_len}"
        )
    return rows


def activation_bytes(config, itemsize: int = 2, recompute: bool = False) -> int:
    """GPU memory per token at the peak of a compiled step, in addition to weights, gradients and
    optimizer: what each layer keeps for backward, and the logits.

    recompute: a layer keeps only its inputs, and backward recomputes one layer at a time. An
    estimate; tests compare it with what the compiler decides to keep."""
    q = config.n_head * config.head_dim
    kv = config.n_kv_head * config.head_dim
    layer = 4 * config.n_embd  # the input of attention and of the MLP, before the norm and after it
    # queries, keys, values, and what attention returns; queries and keys before their norm
    layer += (2 + config.qk_norm) * (q + kv)
    values = kv // 2 if "value_embeds" in config.extras else 0  # one in every other layer
    layer += 2 * values  # as looked up, and times their gate
    # ReLU squared keeps the ReLU and the square; SwiGLU keeps gate, up and their product
    layer += config.mlp_hidden * (3 if config.mlp == "swiglu" else 2)
    # around the embedding and the last norm; the logits, whose gradient takes their place
    once = 4 * config.n_embd + config.padded_vocab
    kept = config.n_embd + values if recompute else layer
    return itemsize * (config.n_layer * kept + recompute * layer + once)


def room_for_activations(model, world: World, params, state: int, parallel: str) -> float:
    """Bytes of a GPU's memory that are left for the activations that backward needs."""
    room = USABLE * world.memory_bytes - state / (world.world_size if parallel == "fsdp" else 1)
    if parallel == "fsdp":  # the step holds the full tables, and Muon all matrices of one shape
        room -= world.dtype.itemsize * (params["embedding"] + params["head"])
        room -= 8 * model.n_layer * model.mlp_hidden * model.n_embd
    return room


def table(plan: Plan, preset: cfg.Preset, meta: GPT, params, memory: str) -> str:
    """The decisions, as lines to print."""
    config, model, every = preset.train, preset.model, preset.run.keep_every
    W = plan.world_size
    tokens = plan.steps * plan.tokens_per_step
    spare = plan.grad_accum * plan.micro_batch * W - plan.rows_per_step
    token_size = np.dtype(dtype_for(model.vocab_size)).itemsize
    filled = f" ({spare} rows to fill the last do not count)" if spare else ""
    # the newest, the best, the one before the decay, one being written, those of --keep_every
    saves = preset.run.keep + 3 + (plan.steps // every if every else 0)
    factor = optim.lr_batch_factor(config.tokens_per_step, config.rates_at)
    rates = f"; learning rates x {factor:.3f} for this batch" if config.optimizer == "muon" else ""
    return "\n".join(
        [
            f"model     {sum(params.values()):,} parameters ({params['matrix']:,} in matrices), "
            f"{model.n_layer} layers x {model.n_embd}, vocabulary {model.vocab_size:,}; extras: "
            f"{', '.join(model.extras) or 'none'}",
            f"FLOPs     {meta.flops_per_token():,} per token in the full convention, "
            f"{meta.flops_per_token(causal=True):,} in the causal one",
            f"run       {plan.steps:,} steps x {plan.tokens_per_step:,} tokens = {tokens:,} tokens",
            f"step      {plan.micro_batch} rows x {model.seq_len:,} tokens x {plan.grad_accum} "
            f"accumulated x {W} rank{'s' * (W > 1)}{filled}{rates}",
            f"memory    {memory}",
            f"disk      {tokens * token_size / 1e9:.2f} GB of rows if none is repeated, "
            f"{saves} checkpoints of {plan.save_bytes / 1e9:.2f} GB",
        ]
    )


def steps_for(config: cfg.TrainConfig, params: dict[str, int]) -> int:
    """--steps, or what --tokens needs, or 10.5 tokens per weight of the blocks and the head."""
    if config.epochs:
        raise UsageError(f"--epochs {config.epochs:g} needs the data here; plan with --tokens")
    tokens = cli.count(config.tokens) or cfg.TOKENS_PER_WEIGHT * (params["matrix"] + params["head"])
    return config.steps or math.ceil(tokens / config.tokens_per_step)


def pick_parallel(asked: str, world: World, state: int) -> str:
    """none, ddp or fsdp; auto shards (fsdp) unless the state takes less than half the memory."""
    if world.world_size == 1:
        return "none"
    if asked != "auto":
        return asked
    return "ddp" if state < 0.5 * world.memory_bytes else "fsdp"


def micro_batch_for(rows: int, world_size: int, most: int, sharded: bool = False) -> int:
    """Rows of a micro-batch, at most `most`: the largest divisor of a rank's share, which needs no
    padding; or, if at least twice as large, the least size for the fewest micro-batches. One more
    micro-batch costs about as much as half a row: gradients are added up, weights are cast. It
    costs more if sharded, as it gathers the weights: then 1.5 times as large is enough."""
    share = math.ceil(rows / world_size)
    filled = math.ceil(share / math.ceil(share / most))
    even = 0
    if rows % world_size == 0:
        even = next(d for d in range(min(share, most), 0, -1) if share % d == 0)
    return filled if filled >= (1.5 if sharded else 2) * even else even
