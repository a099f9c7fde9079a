"""The parts of a run, each from its configuration: data, folder, model, optimizers, compiled step.

Reads DATA_DIR; writes RUN_DIR/config.json and claims the folder. What is refused here is refused
before the first step. The names are in the order in which train.py calls them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import checkpoint
import config as cfg
import data
import durable
import flops
import metrics
import optim
import runtime
from model import GPT, GPTConfig
from plan import Plan


def open_data(preset: cfg.Preset) -> tuple[data.Manifest, GPTConfig]:
    """The prepared data, checked, and the model's configuration as the data completes it."""
    config, name = preset.train, preset.name
    manifest = data.Manifest.load(config.data_dir)
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
    if config.verify:
        manifest.verify()
    if config.stage:
        manifest = data.stage(manifest, config.stage)
    return manifest, replace(given, **found)


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
    now = identity(preset.train, model_config, manifest)
    path = run_dir / "config.json"
    if path.exists() and checkpoint.checkpoints(run_dir / "checkpoints"):
        before = json.loads(path.read_text())
        differ = [
            f"{k} is {before.get(k)!r} there and {now.get(k)!r} here"
            for k in sorted(before.keys() | now.keys())
            if before.get(k) != now.get(k)
        ]
        if differ:
            raise ValueError(
                f"{run_dir} holds a run with another configuration: {'; '.join(differ)}; "
                "give the same options to go on with it, or another --run_dir to start anew"
            )
    durable.write_text(path, json.dumps(now, indent=1) + "\n")
    return claim


def identity(config: cfg.TrainConfig, model_config: GPTConfig, manifest: data.Manifest) -> dict:
    """What makes this run this run: all that, if changed, would change the numbers."""
    fields = {k: v for k, v in asdict(config).items() if k not in cfg.FREE_FIELDS}
    facts = {
        "data_fingerprint": manifest.fingerprint,
        "tokenizer_sha256": manifest.tokenizer_sha256,
    }
    # through JSON, so that tuples and lists compare equal to what was read back
    return json.loads(json.dumps(fields | asdict(model_config) | facts))


def build_model(model_config: GPTConfig, world: runtime.World, plan: Plan, seed: int) -> GPT:
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
        fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=world.device)
    torch.manual_seed(seed)
    model.init_weights()
    return model


def build_optimizers(
    model: GPT, config: cfg.TrainConfig, world: runtime.World, sharded: bool
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
            compile=config.compile and world.device.type == "cuda",
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
    return optimizers


def compile_step(model: GPT, plan: Plan, world: runtime.World, log: metrics.Log):
    """Find what runs here: (callable model, micro-batch). Tries one forward and backward on random
    tokens: out of memory halves the micro-batch, a failing compiler falls back to eager; the
    printed line says which. Tokens per step stay what they are."""
    compiled = None if plan.compile and not plan.sharded else model
    micro_batch, T = plan.micro_batch, model.config.seq_len
    while True:
        problem = None
        try:
            if compiled is None:
                compiled = torch.compile(model, dynamic=False, fullgraph=True)
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(
                model.config.vocab_size, (micro_batch, T + 1), generator=generator
            ).to(world.device)
            compiled(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        except torch.OutOfMemoryError:
            problem = "memory"
        except Exception as error:  # the compiler's errors share no base class
            if compiled is model:
                if plan.sharded and plan.compile:
                    raise ValueError(
                        f"torch.compile does not work here ({type(error).__name__}: "
                        f"{str(error).strip().splitlines()[0]}); add --no_compile"
                    ) from error
                raise
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        model.zero_grad(set_to_none=True)
        problem = _any_rank(problem)
        if problem is None:
            return compiled, micro_batch
        if problem == "memory":
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
            if micro_batch == 1 or not plan.auto_micro_batch:
                raise ValueError(
                    f"out of memory with {micro_batch} rows of {T} tokens; try --micro_batch "
                    f"{max(1, micro_batch // 2)}, --parallel fsdp, or a smaller preset"
                )
            micro_batch = plan.smaller_micro_batch(micro_batch)
            log.say(f"out of memory: micro-batch halved to {micro_batch}")
        else:
            log.say(f"torch.compile does not work here, so eager it is: {problem}")
            compiled = model


def _any_rank(problem: str | None) -> str | None:
    """The first rank's problem, on all ranks, so that they decide alike."""
    if not dist.is_initialized():
        return problem
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((p for p in problems if p), None)


def find_peak(config: cfg.TrainConfig, world: runtime.World) -> float | None:
    """FLOP/s of one device: as given, by name, or (on a CPU, or when asked) a measured matmul."""
    if config.peak_tflops:
        return config.peak_tflops * 1e12
    if config.measure_peak or world.device.type == "cpu":
        return flops.measure_matmul(world.device, world.dtype, seconds=0.5)
    return flops.peak_flops(world.device_name)
