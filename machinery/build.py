"""Builds, shards and compiles a run's model as its plan says, with micro-batches that fit.

A trial step shows whether torch.compile works and memory suffices; if not, and nothing is sharded,
it runs eagerly or in smaller micro-batches, and the log says so. Loader and meter are made here.
Next: session.py, which calls these functions from top to bottom.
"""

import contextlib
import gc
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import config as cfg
import data
import flops
import optim
from config import UsageError
from machinery import checkpoint, code, disk, errors, folders, ranks, trained
from machinery.formats import Trainer
from machinery.log import Log, is_done
from machinery.plan import USABLE, Plan, micro_batch_for
from machinery.shards import Manifest
from model import GPT

OUT_OF_MEMORY = "out of memory"


def describe(asked: cfg.Preset, preset: cfg.Preset, plan: Plan, manifest, order, world) -> str:
    """The plan, this machine and the data, as lines to print. UsageError if weights and optimizer
    state do not fit into memory, StorageError if one checkpoint does not fit on the disk."""
    on = f"on        {world.device_name}, {str(world.dtype).removeprefix('torch.')}, "
    on += f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    needed = plan.save_bytes / (world.world_size if plan.sharded else 1)
    if needed > world.memory_bytes:
        raise UsageError(
            f"weights and optimizer take {needed / 1e9:.0f} GB, but a rank has "
            f"{world.memory_bytes / 1e9:.0f}: use a smaller preset, or more GPUs"
        )
    run_dir = Path(preset.run.run_dir)
    if not is_done(run_dir):
        disk.check_room(run_dir, plan.save_bytes, "choose another --run_dir")
    return "\n".join((plan.text, on, folders.describe_data(asked, preset, plan, manifest, order)))


# ---------------------------------------------------------------------------------- the model


def build_model(config: cfg.GPTConfig, plan: Plan, world: ranks.World, seed: int) -> GPT:
    """Build on `meta` first: each weight, or this rank's shard of it, is allocated just once."""
    if config.doc_mask:  # with a mask, the backward of cuDNN's attention can return NaN
        torch.backends.cuda.enable_cudnn_sdp(False)
    with torch.device("meta"):
        model = GPT(config, world.dtype, plan.recompute)
    if plan.sharded:
        shard(model, plan, world)
    model.to_empty(device=world.device)
    torch.manual_seed(seed)
    init_sharded(model) if plan.sharded else model.init_weights()
    return model


def shard(model: GPT, plan: Plan, world: ranks.World) -> None:
    """Shard every weight over the ranks (FSDP2), and compile the blocks and the loss. Backward sums
    the gradients over the ranks, which FSDP would average."""
    if plan.compile:
        # Block by block, since FSDP's gathering of weights in between cannot be traced. Torch
        # counts the recompiles of all blocks together: one per kind of block and micro-batch size.
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile(dynamic=False, fullgraph=True)
        # Run eagerly, the loss would need temporaries larger than the model.
        model.cross_entropy = torch.compile(model.cross_entropy, dynamic=False, fullgraph=True)
    policy = MixedPrecisionPolicy(world.dtype, torch.float32, cast_forward_inputs=False)
    mesh = dist.init_device_mesh(world.device.type, (world.world_size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def init_sharded(model: GPT) -> None:
    """The same weights as on one rank: each rank draws every full weight, and keeps its shard."""
    for name, p in model.named_parameters():
        whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        model.init_one(name, whole)
        p.copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None))
    model.init_tables()


def build_optimizers(model: GPT, preset: cfg.Preset, plan: Plan, world: ranks.World):
    return optim.build(
        model.param_groups(),
        preset.train,
        preset.model.n_embd,
        ns_dtype=world.dtype,
        divide=plan.parallel == "ddp",
    )


def open_checkpoints(preset: cfg.Preset, plan: Plan, log: Log, mirror) -> checkpoint.Checkpointer:
    run = preset.run
    return checkpoint.Checkpointer(
        log.run_dir / "checkpoints", run.keep, plan.keep_step, mirror, log.print, run.keep_every
    )


def load(
    checkpoints: checkpoint.Checkpointer,
    model: GPT,
    optimizers,
    preset,
    manifest: Manifest,
    foreign=None,
) -> Trainer | None:
    """Load model and optimizers from the checkpoint to resume from, and return its trainer.json. If
    there is none, load only weights, if given: another run's, or those of another program's model
    (hf/imported.py)."""
    options = preset.run
    state = checkpoints.resume(
        model,
        optimizers,
        None if options.resume == "auto" else Path(options.resume),
        partial(folders.check_same_run, folders.identity(preset, manifest)),
    )
    if state and state.dtype not in ("", str(model.compute_dtype)):
        checkpoints.log(
            f"warning: computed in {model.compute_dtype} from here on, in {state.dtype} before"
        )
    if state and state.code:
        differs = code.difference(state.code, code.of_process()[0])
        if differs:
            checkpoints.log(f"warning: {differs} from the code that trained it so far")
    if state and options.init_from:
        checkpoints.log(f"{options.init_from} is not read: the run has its own checkpoint")
    elif foreign:
        checkpoints.log(foreign.load_into(model, checkpoints.team))
    elif options.init_from:
        which = trained.EvalConfig(**trained.find_model(options.init_from))
        start = checkpoints.team.on_first(lambda: trained.find_checkpoint(which))
        other = checkpoint.read_trainer(start).identity
        remark = folders.check_weights_fit(str(start), other, preset, manifest)
        checkpoint.load_model(start, model, verified=not which.checkpoint)
        checkpoints.log(f"weights from {start}{remark}")
    return state


# --------------------------------------------------------------------------- the step that runs


def compile_step(
    model: GPT, optimizers: list, plan: Plan, world: ranks.World, log: Log
) -> tuple[nn.Module, nn.Module, Plan]:
    """Repeat a trial step until it runs: each time memory runs out, at least halve the micro-batch;
    without a compiler, run eagerly (sharded: UsageError). Returns the modules that training steps
    and validation call, and the plan with a micro-batch that fits."""
    on_gpu = world.device.type == "cuda"
    if on_gpu and plan.auto_micro_batch:
        torch.cuda.set_per_process_memory_fraction(USABLE)
    if plan.compile:
        log.print("compiling the step, which takes about a minute on a CPU ...")
    while True:
        step_model, problem = try_step(model, plan, validate=on_gpu)
        model.train().zero_grad(set_to_none=True)
        problem = world.team.any(problem)
        if problem is None:
            break
        torch.compiler.reset()  # graphs of another size would count as recompiles
        gc.collect()  # free what the failed step held
        if problem == OUT_OF_MEMORY:
            less = micro_batch_for(plan.rows_per_step, plan.world_size, plan.micro_batch // 2)
            plan = replace(plan, micro_batch=less)
            log.print(f"out of memory: micro-batch reduced to {plan.micro_batch}")
        elif plan.sharded:
            raise UsageError(f"torch.compile does not work here ({problem}); add --no_compile")
        else:
            log.print(f"no compiler works here, so the step runs eager: {problem}")
            plan = replace(plan, compile=False)
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if plan.compile and on_gpu:  # on a CPU it would never pay off
        optim.compile_steps(optimizers)
    # On a CPU, compiling validation costs as much time as it saves in a million tokens.
    return step_model, step_model if on_gpu else model, plan


def try_step(model: GPT, plan: Plan, validate: bool) -> tuple[nn.Module, str | None]:
    """Try validation, forward and backward on random tokens. Returns the module to call, and what
    failed, if anything. Raises errors of the model's own code, and running out of memory if the
    micro-batch cannot shrink: it is 1, was given, or FSDP was left in the middle of a step."""
    step_model = model
    try:
        shape = (plan.micro_batch, plan.seq_len + 1)
        tokens = torch.randint(model.config.vocab_size, shape, device=model.cos.device)
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:].contiguous()
        if plan.compile and not plan.sharded:  # sharded, its blocks are compiled already
            step_model = torch.compile(model, dynamic=False, fullgraph=True)
        if validate:  # as train.py's validate will
            with torch.no_grad():
                step_model.eval()(inputs, targets, reduction="none")
            step_model.train()
        # Twice if gradients are accumulated: memory peaks when new ones are added to the old.
        for _ in range(2 if plan.grad_accum > 1 else 1):
            step_model(inputs, targets, reduction="none").sum().backward()
    except Exception as error:
        is_memory = errors.is_out_of_memory(error)
        if is_memory and plan.auto_micro_batch and plan.micro_batch > 1 and not plan.sharded:
            return step_model, OUT_OF_MEMORY
        if is_memory or not isinstance(error, BackendCompilerFailed):
            if step_model is not model and not is_memory:
                model(inputs, targets)  # eagerly: a mistake in it gets Python's own traceback
            raise
        return step_model, errors.reason_of(error.inner_exception)
    return step_model, None


@contextlib.contextmanager
def explain_errors(argv: list[str], world: ranks.World, progress) -> Iterator[None]:
    """Turn running out of memory into a UsageError with the command that resumes, and a lost rank
    into a RankError."""
    try:
        yield
    except RuntimeError as error:
        when = f"step {progress.step:,}"
        lines = str(error).splitlines()
        if errors.is_lost_rank(error):
            raise errors.RankError(
                f"{when}: rank {world.rank} gets no answer from another rank: look at its output "
                f"({lines[-1][-200:]})"
            ) from None
        if not errors.is_out_of_memory(error):
            raise
        raise UsageError(
            f"{when}: out of memory ({lines[0]}); add a smaller --micro_batch, --recompute, "
            "--parallel fsdp on several GPUs, or take a smaller preset: train.py "
            f"{shlex.join(argv)}"
        ) from None


# ------------------------------------------------------------------------ the loop's other parts


def open_loader(
    manifest: Manifest, order: data.Order, plan: Plan, world: ranks.World, step: int
) -> data.RowLoader:
    """A loader of this rank's training rows, from step `step` on."""
    return data.RowLoader(
        manifest,
        order,
        plan.micro_batch,
        rank=world.rank,
        world_size=world.world_size,
        position=step * plan.rows_per_step,
        rows_per_step=plan.rows_per_step,
        device=world.device,
    )


def make_meter(model: GPT, world: ranks.World, options: cfg.RunConfig) -> flops.Meter:
    causal = model.flops_per_token(causal=True)
    peak = flops.find_peak(world, options.peak_tflops)
    return flops.Meter(model.flops_per_token(), causal, peak, world.world_size)
