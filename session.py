"""Opens a run, that is, does all that comes before its first step; closes it however it ends.

`open_run` goes from the command line to a `Run`: the data, the plan, the folder, the model, its
checkpoints, the compiled step. `Run` holds these parts, `Progress` its counters. machinery/ does
the work; stores/ and hf/ are imported only if an option asks for them, instruments/ if it is there.
Next: config.py, the options.
"""

import gc
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch

import config as cfg
import data
import flops
from machinery import build, checkpoint, cli, folders, ranks, shards, trained
from machinery.formats import Counters, Trainer, counters_of
from machinery.log import Log, is_done
from machinery.plan import Plan, make_plan


@dataclass(kw_only=True)
class Progress(Counters):
    """How far the run has come: the counters that a checkpoint saves, and what is of this process
    alone."""

    resumed_at: int = 0  # the step of the checkpoint that it began from
    saved_step: int = -1
    saved_at: float = 0.0  # time.monotonic()
    page_step: float = -math.inf  # of the last report.html
    started_at: float = field(default_factory=time.perf_counter)
    # What the ranks agreed on in the latest step:
    stop: int = 0  # the signal that ends the run
    save_now: bool = False  # by the first rank's clock, a checkpoint is due


@dataclass
class Run:
    """The parts of a run, built and ready to use."""

    preset: cfg.Preset  # what was asked for, with what the data decide filled in
    plan: Plan  # what follows from it
    world: ranks.World  # this process: rank, device, dtype
    manifest: shards.Manifest  # of the data
    log: Log
    progress: Progress
    signals: ranks.Signals
    model: torch.nn.Module  # saved and sampled from
    step_model: torch.nn.Module  # the same weights, compiled unless plan.compile is off
    val_model: torch.nn.Module  # step_model on a GPU, else model
    optimizers: list[torch.optim.Optimizer]
    checkpoints: checkpoint.Checkpointer
    loader: data.RowLoader
    meter: flops.Meter
    token_bytes: torch.Tensor  # (V,): bytes of text per token id
    report: ModuleType | None  # writes report.html; the first rank's, if instruments/ is there

    @property
    def options(self) -> cfg.RunConfig:
        """Where and how the run is carried out; preset.train says what it is."""
        return self.preset.run


@contextmanager
def open_run(argv: list[str]) -> Iterator[Run | None]:
    """The run that a command line asks for, ready for its next step; None if there is nothing to
    do: --plan was printed, or the run is finished."""
    progress = Progress()
    typed = cli.parse("train.py", "train", argv)
    world = ranks.start(typed.run.device, typed.train.dtype)
    foreign, preset = begin_from(typed)
    if typed.run.plan:
        from instruments.run import forecast

        forecast.print_plan(preset, world)
        yield None
        return
    manifest, preset = folders.open_data(near_data(typed.run, world), preset)
    if foreign:
        foreign.check_data(manifest, preset)
    plan = make_plan(preset, world)
    # --tokens was another way to say --steps: from here on the latter alone is set.
    preset = replace(preset, train=replace(preset.train, steps=plan.steps, tokens=""))
    order = folders.training_order(preset, plan, manifest)
    about = build.describe(typed, preset, plan, manifest, order, world)
    log = Log(Path(preset.run.run_dir), world.is_first, preset.run.wandb)
    with (
        folders.lock_run(preset, world),
        open_mirror(preset.run.mirror, log) as mirror,  # its lease is given back last but one
        log.outcome(progress),  # status.json: how it ended, in the words of explain_errors
        build.explain_errors(argv, world, progress),
        ExitStack() as stack,
    ):
        log.print(about)
        model = build.build_model(preset.model, plan, world, preset.train.seed)
        optimizers = build.build_optimizers(model, preset, plan, world)
        checkpoints = build.open_checkpoints(preset, plan, log, mirror)
        stack.push(checkpoints.leave)  # at the exit: a save in flight ends
        trainer = build.load(checkpoints, model, optimizers, preset, manifest, foreign)
        folders.describe_run(preset, manifest, world)
        if trainer:
            plan = resume(trainer, preset, plan, log, progress)
        if progress.step >= plan.steps and world.team.on_first(lambda: is_done(log.run_dir)):
            log.print(
                f"{log.run_dir} is finished ({progress.step:,} steps); python eval.py sample "
                f"--run_dir {str(log.run_dir)!r} shows what it writes"
            )
            checkpoints.finish()  # a mirror gets the files it lacks
            yield None
            return
        signals = ranks.Signals()
        # The plan may change: a smaller micro-batch if memory runs out, eager if compiling fails.
        step_model, val_model, plan = build.compile_step(model, optimizers, plan, world, log)
        loader = build.open_loader(manifest, order, plan, world, progress.step)
        stack.callback(loader.close)
        run = Run(
            preset=preset,
            plan=plan,
            world=world,
            manifest=manifest,
            log=log,
            progress=progress,
            signals=signals,
            model=model,
            step_model=step_model,
            val_model=val_model,
            optimizers=optimizers,
            checkpoints=checkpoints,
            loader=loader,
            meter=build.make_meter(model, world, preset.run),
            token_bytes=torch.from_numpy(manifest.token_bytes()).to(world.device),
            report=find_report(log) if world.is_first else None,
        )
        progress.stop = world.team.any(signals.received) or 0  # compiling takes minutes
        gc.collect()
        gc.freeze()  # these objects live to the end: the collector need not keep scanning them
        yield run


def begin_from(typed: cfg.Preset):
    """The model of another program from which training begins, or None; and the preset, with that
    model's architecture."""
    word = typed.run.init_from
    if not word or not trained.is_export(Path(word)):
        return None, typed
    from hf import imported

    foreign = imported.ForeignModel(word)
    return foreign, foreign.complete(typed)


def near_data(options: cfg.RunConfig, world: ranks.World) -> str:
    """The folder of the data: --data_dir, or its copy on a disk of this machine."""
    if not options.stage and not shards.is_published(options.data_dir):
        return options.data_dir
    from stores import stage

    return stage.once_per_node(options.data_dir, options.stage, world)


def open_mirror(url: str, log: Log):
    """What gets copies of the checkpoints, as a context; None if nothing does, and on all ranks but
    the first."""
    if not (url and log.is_first):
        return nullcontext()
    from stores import mirror

    return mirror.Mirror(url, log)


def find_report(log: Log) -> ModuleType | None:
    """instruments/pages/report.py; None, with a line that says why, if instruments/ was deleted or
    a package cannot be imported. What is wrong in a file of ours is a traceback."""
    try:
        from instruments.pages import report

        return report
    except ImportError as error:
        if error.path and "-packages" not in error.path:  # it has no such name
            raise
        log.print(
            f"report      none: {error}; pip install -r requirements.txt, or git "
            "checkout instruments"
        )


def resume(trainer: Trainer, preset: cfg.Preset, plan: Plan, log: Log, progress: Progress) -> Plan:
    """Restore the progress from a checkpoint; returns the plan with its micro-batch."""
    vars(progress).update(counters_of(trainer))
    progress.resumed_at = progress.saved_step = trainer.step
    if trainer.eval_tokens != preset.run.eval_tokens:  # its score is of other rows
        progress.best_bpb = math.inf
    if plan.auto_micro_batch and trainer.world_size == plan.world_size:
        # another order of summation would not give the same bits
        plan = replace(plan, micro_batch=trainer.micro_batch)
    log.print(f"resumed at step {progress.step:,} with micro-batches of {plan.micro_batch} rows")
    return plan
