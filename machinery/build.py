"""A run's model, from its plan: built, sharded, compiled, and in micro-batches that fit.

Each weight is allocated once, where it is used. What does not compile runs eager, what does not fit
runs in smaller micro-batches: both are found by a trial step, and said. The loop's other parts are
made here too: loader, meter, and when DDP exchanges gradients. Next: train.py, which calls these
functions from top to bottom.
"""

import contextlib
import gc
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import config as cfg
import data
import flops
import optim
from config import UsageError
from machinery import cache, checkpoint, cli, errors, folders, ranks
from machinery.log import Log
from machinery.plan import USABLE, Plan
from machinery.shards import Manifest
from model import GPT

OUT_OF_MEMORY = "out of memory"


def describe(
    asked: cfg.Preset, preset: cfg.Preset, plan: Plan, manifest: Manifest, world: ranks.World
) -> str:
    """The plan, this machine and the data, in lines to print."""
    dtype, threads = str(world.dtype).removeprefix("torch."), torch.get_num_threads()
    lines = [
        plan.text,
        f"on        {world.device_name}, {dtype}, torch {torch.__version__}, {threads} threads",
        folders.describe_data(asked, preset, plan, manifest),
        folders.warn_of_disk(plan, Path(preset.run.run_dir)),
    ]
    if old_cudnn(world):
        lines.append("warning: cuDNN is older than 9.15.1: pip install -U nvidia-cudnn-cu12")
    return "\n".join(filter(None, lines))


# ---------------------------------------------------------------------------------- the model


def old_cudnn(world: ranks.World) -> bool:
    """Whether cuDNN, whose attention is the fastest on Hopper, is too old for torch to prefer it:
    before 9.15.1, in wheels for CUDA 12, as it fails at some lengths."""
    on_hopper = (
        world.device.type == "cuda" and torch.cuda.get_device_capability(world.device)[0] == 9
    )
    return on_hopper and (torch.backends.cudnn.version() or 0) <= 91500


def attention_kernels(config: cfg.GPTConfig, world: ranks.World):
    """`with attention_kernels(...):` the kernels that torch may use for attention, best first."""
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if config.doc_mask:  # with a mask, the backward of cuDNN's can return NaN
        return sdpa_kernel(others)
    unwanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"  # torch's own switch
    if old_cudnn(world) and config.seq_len % 128 == 0 and not unwanted:  # these lengths are safe
        return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *others], set_priority=True)
    return contextlib.nullcontext()


def build_model(config: cfg.GPTConfig, plan: Plan, world: ranks.World, seed: int) -> GPT:
    """On `meta` first, so that each weight is allocated once, on its device; sharded, in part."""
    with torch.device("meta"):
        model = GPT(config, world.dtype, plan.recompute)
    if plan.sharded:
        shard(model, plan, world)
    try:
        model.to_empty(device=world.device)
        torch.manual_seed(seed)
        init_sharded(model) if plan.sharded else model.init_weights()
    except RuntimeError as error:
        if not errors.is_out_of_memory(error):
            raise
        remedy = "--parallel fsdp on several GPUs, or a smaller preset"
        raise UsageError(f"out of memory: the weights alone do not fit; try {remedy}") from None
    return model


def shard(model: GPT, plan: Plan, world: ranks.World) -> None:
    """Give each rank a part of every weight (FSDP2), and compile the parts of the model."""
    if plan.compile:
        # Block by block, since FSDP gathers weights in between, which cannot be traced. Torch
        # counts the recompiles of all blocks together: one per kind of block and micro-batch size.
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile(dynamic=False, fullgraph=True)
        # Eager, the loss would have temporaries larger than the model.
        model.cross_entropy = torch.compile(model.cross_entropy, dynamic=False, fullgraph=True)
    policy = MixedPrecisionPolicy(world.dtype, torch.float32, cast_forward_inputs=False)
    mesh = dist.init_device_mesh(world.device.type, (world.world_size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


@torch.no_grad()
def init_sharded(model: GPT) -> None:
    """The same weights as on one rank: every rank draws each weight whole, and keeps its part."""
    for name, p in model.named_parameters():
        whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        model.init_weight(name, whole)
        p.copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))
    model.init_tables()


def build_optimizers(model: GPT, preset: cfg.Preset, plan: Plan, world: ranks.World):
    how = dict(ns_dtype=world.dtype, divide=plan.parallel == "ddp")
    return optim.build(model.param_groups(), preset.train, preset.model.n_embd, **how)


def open_checkpoints(
    preset: cfg.Preset, plan: Plan, log: Log, mirror=None
) -> checkpoint.Checkpointer:
    folder, keep, every = log.run_dir / "checkpoints", preset.run.keep, preset.run.keep_every
    return checkpoint.Checkpointer(folder, keep, plan.keep_step, mirror, log.print, every)


def load(
    checkpoints: checkpoint.Checkpointer,
    model: GPT,
    optimizers: list,
    preset: cfg.Preset,
    manifest: Manifest,
    source=None,
) -> dict | None:
    """Fill model and optimizers from a checkpoint of this run, or the model from another's, or from
    a `source` (hf/imported.py); returns the former's record, if there is one."""
    options, own = preset.run, folders.identity(preset, manifest)
    path = None if options.resume == "auto" else Path(options.resume)
    state = checkpoints.resume(model, optimizers, path, partial(folders.check_same_run, own))
    if state and options.init_from:
        checkpoints.log(f"{options.init_from} is not read: the run has its own checkpoint")
    elif source:
        checkpoints.log(source.load_into(model))
    elif options.init_from:
        start, root = Path(options.init_from), Path(options.init_from, "checkpoints")
        if root.is_dir():  # of a run: its newest, the same on all ranks
            start = ranks.any_rank(checkpoint.latest_valid(root, log=checkpoints.log)) or start
        other = checkpoint.read_trainer(start).get("identity", {})
        remark = folders.check_weights_fit(str(start), other, preset, manifest)
        checkpoint.load_model(start, model)
        checkpoints.log(f"weights from {start}{remark}")
    return state


# --------------------------------------------------------------------------- the step that runs


def compile_step(
    model: GPT, optimizers: list, plan: Plan, world: ranks.World, log: Log
) -> tuple[nn.Module, nn.Module, Plan]:
    """(what the step runs, what validation runs, the plan with a micro-batch that fits)."""
    compiled, plan = find_what_runs(model, plan, world, log)
    on_gpu = world.device.type == "cuda"
    if plan.compile and on_gpu:  # a CPU would never regain that time
        optim.compile_steps(optimizers)
    # Compile it now, and see that it fits: where found_inf is 1, a step moves no weight.
    optim.step(optimizers, found_inf=torch.ones((), device=world.device))
    # On a CPU, compiling validation costs as much time as it saves in a million tokens.
    return wrap(compiled, plan), compiled if on_gpu else model, plan


def find_what_runs(model: GPT, plan: Plan, world: ranks.World, log: Log) -> tuple[nn.Module, Plan]:
    """Retry a trial step until it runs; returns (callable model, the plan that it fits). Out of
    memory at least halves the micro-batch, a failing compiler means eager; both are printed. Tokens
    per step stay the same."""
    on_gpu = world.device.type == "cuda"
    if plan.sharded:
        ranks.wait_at_most(ranks.SHARDED_S)
    if on_gpu and plan.auto_micro_batch:
        torch.cuda.set_per_process_memory_fraction(USABLE)
    if plan.compile:
        also = "and validation" if on_gpu or plan.sharded else "(validation stays eager)"
        log.print(f"compiling the step {also} ...")
    while True:
        step_model, problem = try_step(model, plan, world, validate=on_gpu)
        on_all = not ranks.any_rank(problem is None)  # no rank is without one
        problem = ranks.any_rank(problem)
        if problem is None:
            if on_gpu:
                torch.cuda.set_per_process_memory_fraction(1.0)
            return step_model, plan
        if problem == OUT_OF_MEMORY:
            plan = fewer_rows(model, plan, world, on_all)
            log.print(f"out of memory: micro-batch reduced to {plan.micro_batch}")
        elif plan.sharded:
            raise UsageError(f"torch.compile does not work here ({problem}); add --no_compile")
        else:
            log.print(f"torch.compile does not work here, so eager it is: {problem}")
            plan = replace(plan, compile=False)


def try_step(
    model: GPT, plan: Plan, world: ranks.World, validate: bool
) -> tuple[nn.Module, str | None]:
    """A validation and the gradients of random tokens; returns the callable model, and what went
    wrong, in which case no gradient is left."""
    T, problem, step_model = model.config.seq_len, None, model
    try:
        if plan.compile and not plan.sharded:  # sharded, its blocks are compiled already
            step_model = torch.compile(model, dynamic=False, fullgraph=True)
        shape = (plan.micro_batch, T + 1)
        tokens = torch.randint(model.config.vocab_size, shape, device=world.device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if validate:  # as train.py's evaluate will
            with torch.no_grad():
                step_model.eval()(inputs, targets, reduction="none")
            step_model.train()
        # Twice where new gradients meet old ones, or DDP's buckets: then memory is at its peak.
        for _ in range(2 if plan.grad_accum(plan.ramp_steps) > 1 or plan.parallel == "ddp" else 1):
            step_model(inputs, targets).backward()
    except Exception as error:  # the compiler's errors share no base class
        said = (str(error).strip() or "no message").splitlines()[0]
        problem = f"{type(error).__name__}: {said}"
        model.train().zero_grad(set_to_none=True)
        if errors.is_out_of_memory(error):
            problem = OUT_OF_MEMORY
        elif not plan.compile:
            raise
    return step_model, problem


def fewer_rows(model: GPT, plan: Plan, world: ranks.World, on_all: bool) -> Plan:
    """The plan with at most half of the micro-batch, which did not fit on all ranks or on some;
    UsageError if that cannot be tried."""
    if world.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    # An error in the middle of a step leaves FSDP's state there; torch 2.11 cannot reset it. And if
    # only some ranks failed, the others wait for exchanges that will never come.
    can_retry = not plan.sharded or on_all and hasattr(model, "reset_iter_state")
    if plan.sharded and can_retry:
        model.reset_iter_state()
    less = plan.with_less_memory()
    if plan.micro_batch > 1 and plan.auto_micro_batch and can_retry:
        return less
    fewer = f"--micro_batch {less.micro_batch} or " if plan.micro_batch > 1 else ""
    shard = "--parallel fsdp or " if plan.parallel == "ddp" else ""
    raise UsageError(
        f"out of memory with {plan.micro_batch} rows of {model.config.seq_len} tokens; "
        f"try {fewer}{'' if plan.recompute else '--recompute or '}{shard}a smaller preset"
    )


@contextlib.contextmanager
def explain_out_of_memory(
    argv: list[str], plan_now: Callable[[], Plan], world: ranks.World, progress
) -> Iterator[None]:
    """Out of memory becomes a UsageError with the command that resumes in smaller micro-batches; a
    rank that has gone, a RankError."""
    try:
        yield
    except RuntimeError as error:
        if errors.is_lost_rank(error):
            raise errors.RankError(
                f"step {progress.step:,}: rank {world.rank} gets no answer from another, which has "
                f"ended or hangs: look at its output ({str(error).splitlines()[0][-200:]})"
            ) from None
        if not errors.is_out_of_memory(error):
            raise
        at, plan = f"out of memory at step {progress.step:,}", plan_now()
        if plan.micro_batch == 1:
            remedy = "try --recompute, --parallel fsdp on several GPUs, or a smaller preset"
            raise UsageError(f"{at} with micro-batches of one row; {remedy}") from None
        torchrun = f"torchrun --nproc_per_node={world.local_world_size}"
        program = torchrun if world.world_size > 1 else "python"
        # The last of two equal options wins, so one more at the end is enough.
        raise UsageError(
            f"{at} ({str(error).splitlines()[0]}); resume with: {program} train.py "
            f"{shlex.join(argv)} --micro_batch {plan.with_less_memory().micro_batch}"
        ) from None


def wrap(step_model: nn.Module, plan: Plan) -> nn.Module:
    """Under DDP, if it is used. Compiled before it is wrapped, the model stays one graph; DDP
    exchanges the gradients after the whole backward pass."""
    if plan.parallel != "ddp":
        return step_model
    step_model = DistributedDataParallel(step_model, gradient_as_bucket_view=True)
    step_model.broadcast_buffers = False  # constants, the same on every rank
    return step_model


def exchange_gradients(step_model: nn.Module, last: bool):
    """DDP exchanges gradients once a step, with the last micro-batch; FSDP every time, as it has no
    room for whole gradients."""
    if isinstance(step_model, DistributedDataParallel) and not last:
        return step_model.no_sync()
    return contextlib.nullcontext()


# ------------------------------------------------------------------------ the loop's other parts


def open_loader(
    manifest: Manifest, preset: cfg.Preset, plan: Plan, world: ranks.World, step: int
) -> data.RowLoader:
    """The rows from `step` on."""
    config = preset.train
    kind = cache.Loader if isinstance(manifest, cache.CachedManifest) else data.RowLoader
    return kind(
        manifest,
        seed=config.seed,
        micro_batch=plan.micro_batch,
        rank=world.rank,
        world_size=world.world_size,
        position=plan.rows_before(step),
        rows_of_steps=map(plan.rows_in_step, count(step)),
        weights=cli.weights(config.mixture),
        decay_weights=cli.weights(config.decay_mixture),
        decay_from=plan.rows_before(plan.decay_begins),
        device=world.device,
    )


def watch(loader) -> dict:
    """What may have slowed a step down: the longest wait since the last pop_wait_s, and for which
    rows, unless it was short; the megabytes read, in how many seconds."""
    longest, first = max(loader.waits, default=(0.0, 0))
    rows = loader.row_ids(first, loader.micro_batch) if longest > 0.01 else []
    read_s, read_mb = (sum(read[k] for read in loader.reads) for k in (0, 1))
    return dict(longest_wait_s=longest, rows=rows, read_s=read_s, read_mb=read_mb / 1e6)


def make_meter(model: GPT, world: ranks.World, options: cfg.RunConfig) -> flops.Meter:
    full, causal = model.flops_per_token(), model.flops_per_token(causal=True)
    peak = flops.find_peak(world, options.peak_tflops)
    return flops.Meter(full, causal, peak, world.world_size)
