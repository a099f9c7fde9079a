"""The parts of a run, each from its configuration: data, folder, model, compiled step.

Reads DATA_DIR; locks RUN_DIR and writes its config.json. A run that cannot work is refused here,
before its first step. train.py calls these functions from top to bottom. Next: train.py.
"""

import contextlib
import gc
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import config as cfg
import data
import optim
from machinery import checkpoint, cli, diary, durable, errors, fused, ranks, shards
from machinery.plan import USABLE, Plan
from model import GPT, GPTConfig

OUT_OF_MEMORY = "out of memory"


def open_data(preset: cfg.Preset, world: ranks.World) -> tuple[shards.Manifest, GPTConfig]:
    """The prepared data, checked, and the model's configuration completed by it."""
    config, options, given = preset.train, preset.run, preset.model
    default = cfg.PRESETS[preset.name].model
    manifest = shards.Manifest.load(options.data_dir, preset.name)
    manifest.check()
    seq_len = manifest.row_len - 1
    found = dict(vocab_size=manifest.vocab_size, seq_len=seq_len, bos_id=manifest.bos_id)
    for key, value in found.items():
        if (asked := getattr(given, key)) not in (getattr(default, key), value):
            raise ValueError(
                f"--{key} {asked} was asked for, but {options.data_dir} has {value}; leave it out, "
                "or prepare the data that way"
            )
    if not manifest.rows("train"):
        raise ValueError(
            f"{options.data_dir} has no training row of {seq_len + 1} tokens; prepare more text, "
            f"or shorter rows: python prepare_data.py {preset.name} --row_len {seq_len // 2 + 1}"
        )
    for mixture in (config.mixture, config.decay_mixture):
        data.mixture_weights(manifest, cli.weights(mixture))  # refuses an unknown source
    if options.stage:
        from instruments import stage

        manifest = stage.once_per_node(manifest, options.stage, world)
    return manifest, replace(given, **found)


def decided_by_data(asked: GPTConfig, model_config: GPTConfig) -> str:
    """A line on the fields where the data overruled the preset; empty if there are none."""
    before, now = asdict(asked), asdict(model_config)
    changed = [f"{key} {now[key]:,}, not {before[key]:,}" for key in now if now[key] != before[key]]
    return "\ndecided   by the data: " + ", ".join(changed) if changed else ""


def claim_run_dir(preset: cfg.Preset, model_config: GPTConfig, manifest, world):
    """Lock RUN_DIR and its mirror, refuse to resume a run of another configuration, return the
    locks to close."""
    run_dir, claims = Path(preset.run.run_dir), contextlib.ExitStack()
    if not world.is_first:
        return claims
    claims.enter_context(durable.lock(run_dir, "--run_dir"))
    if preset.run.mirror:
        claims.enter_context(durable.lock(Path(preset.run.mirror, run_dir.name), "--mirror"))
    for junk in filter(Path.is_file, run_dir.glob(".tmp-*")):
        junk.unlink()  # of a run that was killed while it wrote a small file
    now = identity(preset.train, model_config, manifest)
    path = run_dir / "config.json"
    if path.exists() and (saved := checkpoint.checkpoints(run_dir / "checkpoints")):
        check_same_run(run_dir, json.loads(path.read_text()), now, checkpoint.step_of(saved[0]))
    durable.write_json(path, now)
    return claims


def check_same_run(where: Path, before: dict, now: dict, step: int) -> None:
    """ValueError with the fields that differ if `where`, at `step`, belongs to another run (see
    identity). The number of steps may differ until either run's learning rate begins to fall."""
    before = asdict(cfg.TrainConfig()) | asdict(GPTConfig()) | before  # newer fields: default
    keys = sorted(before.keys() | now.keys())
    differ = [k for k in keys if json.dumps(before.get(k)) != json.dumps(now.get(k))]
    remedy = "give the same options to resume it, or another --run_dir to start a new run"
    if differ == ["steps"] and now["schedule"] == "wsd":
        shorter = min(before["steps"], now["steps"])
        if step <= (begins := optim.decay_begins(shorter, now["decay"])):
            return
        remedy = f"--resume a checkpoint up to step {begins} in another --run_dir, or {remedy}"
    if differ:
        fields = [f"{k} is {before.get(k)!r} there and {now.get(k)!r} here" for k in differ]
        raise ValueError(
            f"{where} belongs to a run with another configuration: {'; '.join(fields)}; {remedy} "
            "(--init_from starts one from these weights)"
        )


def identity(config: cfg.TrainConfig, model_config: GPTConfig, manifest: shards.Manifest) -> dict:
    """The facts that decide the numbers of a run: with one changed, it is another run."""
    facts = dict(data_fingerprint=manifest.fingerprint, tokenizer_sha256=manifest.tokenizer_sha256)
    return asdict(config) | asdict(model_config) | facts


def build_model(model_config: GPTConfig, world: ranks.World, plan: Plan, seed: int) -> GPT:
    """On `meta` first, so that each weight is allocated once, on its device; sharded, in part."""
    with torch.device("meta"):
        model = GPT(model_config, compute_dtype=world.dtype)
    fused.install(model, plan.fused)
    if plan.sharded and plan.compile:
        # Block by block, since FSDP gathers weights in between, which cannot be traced. Torch
        # counts the recompiles of all blocks together: one per kind of block and micro-batch size.
        torch._dynamo.config.recompile_limit = 64
        for block in model.blocks:
            block.compile(dynamic=False, fullgraph=True)
        # Eager, the loss would have temporaries larger than the model.
        model.cross_entropy = torch.compile(model.cross_entropy, dynamic=False, fullgraph=True)
    if plan.sharded:
        policy = MixedPrecisionPolicy(world.dtype, torch.float32, cast_forward_inputs=False)
        mesh = dist.init_device_mesh(world.device.type, (world.world_size,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=world.device)
    torch.manual_seed(seed)
    model.init_weights()
    return model


def compile_step(model: GPT, plan: Plan, world: ranks.World, log: diary.Log):
    """Retry a trial step until it runs; returns (callable model, micro-batch). Out of memory at
    least halves the micro-batch, a failing compiler means eager; both are printed. Tokens per step
    stay the same."""
    micro_batch, compile = plan.micro_batch, plan.compile
    on_gpu = world.device.type == "cuda"
    if on_gpu and plan.auto_micro_batch:
        torch.cuda.set_per_process_memory_fraction(USABLE)
    if compile:
        also = "and validation" if on_gpu or plan.sharded else "(validation stays eager)"
        log.print(f"compiling the step {also} ...")
    while True:
        step_model, problem = _try_step(model, plan, world, micro_batch, compile, on_gpu)
        on_all = not ranks.any_rank(problem is None)
        problem = ranks.any_rank(problem)
        if problem is None:
            if on_gpu:
                torch.cuda.set_per_process_memory_fraction(1.0)
            return step_model, micro_batch
        if problem == OUT_OF_MEMORY:
            micro_batch = _fewer_rows(model, plan, world, micro_batch, on_all)
            log.print(f"out of memory: micro-batch reduced to {micro_batch}")
        elif plan.sharded:
            raise ValueError(f"torch.compile does not work here ({problem}); add --no_compile")
        else:
            log.print(f"torch.compile does not work here, so eager it is: {problem}")
            compile = False


def _try_step(
    model: GPT, plan: Plan, world: ranks.World, micro_batch: int, compile: bool, validate: bool
):
    """A step on random tokens, and a validation; returns the callable model, and what went wrong.
    No gradient is left."""
    T, problem, step_model = model.config.seq_len, None, model
    try:
        # As much memory as the buckets in which DDP will exchange the gradients.
        buckets = [torch.empty_like(p) for p in model.parameters() if plan.parallel == "ddp"]
        if compile and not plan.sharded:  # sharded, its blocks are compiled already
            step_model = torch.compile(model, dynamic=False, fullgraph=True)
        tokens = torch.randint(model.config.vocab_size, (micro_batch, T + 1), device=world.device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        accumulates = plan.rows_in_step(plan.ramp_steps) > micro_batch * world.world_size
        # run twice when accumulating: the peak comes when new gradients are added to old ones
        for _ in range(1 + accumulates):
            step_model(inputs, targets).backward()
        # Before the validation: that leaves FSDP's root unsharded, and this would miss its shards.
        model.zero_grad(set_to_none=True)
        if validate:  # as Trainer.evaluate will
            with torch.no_grad():
                step_model.eval()(inputs, targets, reduction="none")
        del buckets
    except Exception as error:  # the compiler's errors share no base class
        said = (str(error).strip() or "no message").splitlines()[0]
        problem = f"{type(error).__name__}: {said}"
        if errors.is_out_of_memory(error):
            problem = OUT_OF_MEMORY
        elif not compile:
            raise
    model.train().zero_grad(set_to_none=True)
    return step_model, problem


def _fewer_rows(model: GPT, plan: Plan, world: ranks.World, micro_batch: int, on_all: bool) -> int:
    """At most half of the micro-batch that did not fit, on all ranks or on some; ValueError if that
    cannot be tried."""
    if world.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    # An error in the middle of a step leaves FSDP's state there; torch 2.11 cannot reset it. And if
    # only some ranks failed, the others wait for exchanges that will never come.
    can_retry = not plan.sharded or on_all and hasattr(model, "reset_iter_state")
    if plan.sharded and can_retry:
        model.reset_iter_state()
    if micro_batch > 1 and plan.auto_micro_batch and can_retry:
        return plan.smaller_micro_batch(micro_batch)
    fewer = f"--micro_batch {plan.smaller_micro_batch(micro_batch)} or " if micro_batch > 1 else ""
    shard = "--parallel fsdp or " if plan.parallel == "ddp" else ""
    raise ValueError(
        f"out of memory with {micro_batch} rows of {model.config.seq_len} tokens; "
        f"try {fewer}{shard}a smaller preset"
    )
