"""The parts of a run, each from its configuration: data, folder, model, optimizers, compiled step.

Reads DATA_DIR; writes RUN_DIR/config.json and claims the folder. What is refused here is refused
before the first step. The names are in the order in which train.py calls them.
"""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import config as cfg
import data
import flops
import optim
from machinery import checkpoint, cli, diary, durable, ranks, shards
from machinery.plan import Plan
from model import GPT, GPTConfig

OUT_OF_MEMORY = "out of memory"


def open_data(preset: cfg.Preset, world: ranks.World) -> tuple[shards.Manifest, GPTConfig]:
    """The prepared data, checked, and the model's configuration as the data completes it."""
    config, name = preset.train, preset.name
    manifest = shards.Manifest.load(config.data_dir, name)
    manifest.check()
    default, given = cfg.PRESETS[name].model, preset.model
    found = {
        "vocab_size": manifest.vocab_size,
        "seq_len": manifest.row_len - 1,
        "bos_id": manifest.bos_id,
    }
    for key, value in found.items():
        if getattr(given, key) not in (getattr(default, key), value):
            raise ValueError(
                f"--{key} {getattr(given, key)} was asked for, but {config.data_dir} has {value}; "
                f"leave it out, or prepare the data that way"
            )
    if not manifest.rows("train"):
        raise ValueError(
            f"{config.data_dir} has no training row of {manifest.row_len} tokens; prepare more "
            "text, or shorter rows: python prepare_data.py "
            f"{name} --row_len {(manifest.row_len - 1) // 2 + 1}"
        )
    for mixture in (config.mixture, config.decay_mixture):
        data.mixture_weights(manifest, cli.weights(mixture))  # refuses an unknown source, now
    if config.verify:
        ranks.once_per_node(world, manifest.verify)
    if config.stage:
        ranks.once_per_node(world, lambda: shards.stage(manifest, config.stage))
        manifest = shards.Manifest.load(shards.staged(manifest, config.stage))
    return manifest, replace(given, **found)


def taken_from_data(asked: GPTConfig, model_config: GPTConfig) -> str:
    """One line on what the data decided against the preset; empty if it is as the preset says."""
    before, now = asdict(asked), asdict(model_config)
    changed = [f"{key} {now[key]:,}, not {before[key]:,}" for key in now if now[key] != before[key]]
    return "decided   by the data: " + ", ".join(changed) if changed else ""


def claim_run_dir(preset: cfg.Preset, model_config: GPTConfig, manifest, world) -> object:
    """Lock RUN_DIR, and refuse to go on with a run that was started under another configuration."""
    run_dir = Path(preset.train.run_dir)
    if not world.first:
        return None
    try:
        claim = durable.lock(run_dir)
    except OSError as error:
        raise ValueError(
            f"{run_dir} cannot be written ({error.strerror}); choose another --run_dir"
        ) from None
    for junk in run_dir.glob(".tmp-*"):
        junk.unlink()  # of a run that was killed while it wrote a small file
    now = identity(preset.train, model_config, manifest)
    path = run_dir / "config.json"
    if path.exists() and checkpoint.checkpoints(run_dir / "checkpoints"):
        check_same_run(run_dir, json.loads(path.read_text()), now)
    durable.write_text(path, json.dumps(now, indent=1) + "\n")
    return claim


def check_same_run(where: Path, before: dict, now: dict) -> None:
    """ValueError with the fields that differ if `where` belongs to another run (see identity)."""
    differ = [
        f"{k} is {before.get(k)!r} there and {now.get(k)!r} here"
        for k in sorted(before.keys() | now.keys())
        if before.get(k) != now.get(k)
    ]
    if differ:
        raise ValueError(
            f"{where} is of a run with another configuration: {'; '.join(differ)}; "
            "give the same options to go on with it, or another --run_dir to start anew"
        )


def identity(config: cfg.TrainConfig, model_config: GPTConfig, manifest: shards.Manifest) -> dict:
    """What makes this run this run: all that, if changed, would change the numbers."""
    fields = {k: v for k, v in asdict(config).items() if k not in cfg.FREE_FIELDS}
    facts = {
        "data_fingerprint": manifest.fingerprint,
        "tokenizer_sha256": manifest.tokenizer_sha256,
    }
    # through JSON, so that tuples and lists compare equal to what was read back
    return json.loads(json.dumps(fields | asdict(model_config) | facts))


def build_model(model_config: GPTConfig, world: ranks.World, plan: Plan, seed: int) -> GPT:
    """On `meta` first, so that a weight exists once, on its device, and (sharded) only its part."""
    with torch.device("meta"):
        model = GPT(model_config, compute_dtype=world.dtype)
    if plan.sharded:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if world.dtype != torch.float32:
            policy = MixedPrecisionPolicy(world.dtype, torch.float32, cast_forward_inputs=False)
        mesh = dist.init_device_mesh(world.device.type, (world.world_size,))
        for block in model.blocks:
            if plan.compile:  # block by block: gathering its weights in between is not traced
                block.compile(dynamic=False, fullgraph=True)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        if plan.compile:
            # the loss has a graph of its own, or its temporaries would be larger than the model
            model.cross_entropy = torch.compile(model.cross_entropy, dynamic=False, fullgraph=True)
            # all blocks count together: each kind, for each number of rows that is tried
            torch._dynamo.config.recompile_limit = 64
        fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=world.device)
    torch.manual_seed(seed)
    model.init_weights()
    return model


def build_optimizers(
    model: GPT, config: cfg.TrainConfig, world: ranks.World, sharded: bool
) -> list[torch.optim.Optimizer]:
    """Muon and AdamW, or AdamW alone. `base_lr` is what the schedule multiplies."""
    groups = model.param_groups()
    if config.optimizer == "adamw":
        matrices = groups["matrix"] + groups["embedding"] + groups["head"]
        recipe = [(matrices, config.lr, (0.9, 0.95), config.weight_decay)]
        recipe += [(groups["scalar"], config.lr, (0.9, 0.95), 0.0)]
        eps, optimizers = 1e-8, []
    else:
        width = (model.config.n_embd / 768) ** -0.5
        recipe = [
            (groups["embedding"], config.embedding_lr * width, (0.8, 0.995), 0.001),
            (groups["head"], config.head_lr * width, (0.8, 0.96), 0.01),
            (groups["scalar"], config.scalar_lr, (0.8, 0.95), 0.0),
        ]
        recipe = [(ps, lr * config.lr_scale, betas, wd) for ps, lr, betas, wd in recipe]
        eps = 1e-10
        muon = optim.Muon(
            groups["matrix"],
            lr=config.matrix_lr * config.lr_scale,
            weight_decay=config.weight_decay,
            ns_dtype=world.dtype,
            divide=world.world_size > 1 and not sharded,
        )
        optimizers = [muon]
    adamw = [
        dict(params=params, lr=lr, betas=betas, weight_decay=wd)
        for params, lr, betas, wd in recipe
        if params
    ]
    optimizers.append(optim.adamw(adamw, eps=eps))
    for group in (g for o in optimizers for g in o.param_groups):
        group["base_lr"], group["base_weight_decay"] = group["lr"], group["weight_decay"]
    optim.create_state(model, optimizers)
    return optimizers


def compile_step(model: GPT, plan: Plan, world: ranks.World, log: diary.Log):
    """Find what runs here: (callable model, micro-batch). Out of memory halves the micro-batch, a
    failing compiler falls back to eager; the printed line says which. Tokens per step stay what
    they are."""
    micro_batch, compile = plan.micro_batch, plan.compile
    if compile:
        log.say("compiling ...")
    while True:
        step_model, problem = _try_step(model, plan, world, micro_batch, compile)
        problem = _any_rank(problem)
        if problem is None:
            return step_model, micro_batch
        if problem == OUT_OF_MEMORY:
            micro_batch = _fewer_rows(model, plan, world, micro_batch)
            log.say(f"out of memory: micro-batch halved to {micro_batch}")
        elif plan.sharded:
            raise ValueError(f"torch.compile does not work here ({problem}); add --no_compile")
        else:
            log.say(f"torch.compile does not work here, so eager it is: {problem}")
            compile = False


def _try_step(model: GPT, plan: Plan, world: ranks.World, micro_batch: int, compile: bool):
    """Forward and backward on random tokens; returns the callable model, and what went wrong."""
    T, problem, step_model = model.config.seq_len, None, model
    try:
        if compile and not plan.sharded:  # sharded, its blocks are compiled already
            step_model = torch.compile(model, dynamic=False, fullgraph=True)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (micro_batch, T + 1), generator=generator)
        tokens = tokens.to(world.device)
        accumulates = plan.rows_at(plan.ramp_steps) > micro_batch * world.world_size
        for _ in range(1 + accumulates):  # the second makes gradients beside those of the first
            step_model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
    except Exception as error:  # the compiler's errors share no base class
        if _is_out_of_memory(error):
            problem = OUT_OF_MEMORY
        elif not compile:
            raise
        else:
            said = (str(error).strip() or "no message").splitlines()[0]
            problem = f"{type(error).__name__}: {said}"
    model.zero_grad(set_to_none=True)
    return step_model, problem


def _fewer_rows(model: GPT, plan: Plan, world: ranks.World, micro_batch: int) -> int:
    """At most half of the micro-batch that did not fit; ValueError if it is not ours to choose."""
    if world.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    # an error in the middle leaves FSDP in the middle; torch 2.11 has no way to put it right
    can_retry = not plan.sharded or hasattr(model, "reset_iter_state")
    if plan.sharded and can_retry:
        model.reset_iter_state()
    if micro_batch > 1 and plan.auto_micro_batch and can_retry:
        return plan.smaller_micro_batch(micro_batch)
    ways = ["a smaller preset"]
    if world.world_size > 1 and not plan.sharded:
        ways.insert(0, "--parallel fsdp")
    if micro_batch > 1:
        ways.insert(0, f"--micro_batch {plan.smaller_micro_batch(micro_batch)}")
    raise ValueError(
        f"out of memory with {micro_batch} rows of {model.config.seq_len} tokens; try "
        f"{' or '.join(ways)}"
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Also where a library words it in its own way: the compiler, the driver."""
    text = str(error).lower()
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text
        or "outofmemoryerror" in text
    )


def _any_rank(problem: str | None) -> str | None:
    """The first rank's problem, on all ranks, so that they decide alike."""
    if not dist.is_initialized():
        return problem
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((p for p in problems if p), None)


def find_peak(config: cfg.TrainConfig, world: ranks.World) -> float | None:
    """FLOP/s of one device: as given, by name, or (on a CPU, or when asked) a measured matmul."""
    if config.peak_tflops:
        return config.peak_tflops * 1e12
    if config.measure_peak or world.device.type == "cpu":
        return flops.measure_matmul(world.device, world.dtype, seconds=0.5)
    return flops.peak_flops(world.device_name)
