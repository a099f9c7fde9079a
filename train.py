"""Train a GPT: `python train.py [PRESET] [--option value ...]`, or `torchrun` for several ranks.

Reads DATA_DIR (from prepare_data.py); writes RUN_DIR. Run again, it resumes from the newest valid
checkpoint: bit for bit on a CPU with the same number of threads, up to rounding on a GPU (where the
order of summation is not fixed).

Read `take_steps` first: it is the optimization loop. `train` logs, saves and evaluates around it;
`main` parses, plans and builds what they need, and `finish` ends the run. `Run` holds the parts,
`Progress` the counters, `Step` the numbers of one step. A rank is one process, with one GPU of its
own; in data parallel (ddp) each has a whole model and rows of its own, with FSDP each keeps a share
of every weight as well. Fault tolerance is in machinery/. Shapes: B rows per micro-batch, T
positions. Next: tokenizer.py, where the ids come from.
"""

import gc
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType

# Let the GPU's memory be extended in place, so that less is lost in gaps between tensors of many
# sizes. `import torch` reads it; what you have set, under its older name too, stays.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

import config as cfg
import data
import flops
import optim
from bits_per_byte import loss_and_bpb, score_text, sums_of
from machinery import build, checkpoint, cli, folders, ranks, shards, trained
from machinery import log as logs
from machinery.errors import NonFiniteError
from machinery.log import Log, is_done, write_report
from machinery.plan import Plan, make_plan
from machinery.shards import Manifest


@dataclass(frozen=True)
class Run:
    """The parts of a run, built and ready to use."""

    preset: cfg.Preset  # filled in from the data and the plan
    plan: Plan
    world: ranks.World
    manifest: Manifest
    log: Log
    signals: ranks.Signals
    model: torch.nn.Module  # saved and sampled from
    step_model: torch.nn.Module  # the same weights, compiled
    val_model: torch.nn.Module  # the same weights, compiled only on a GPU
    optimizers: list[torch.optim.Optimizer]
    checkpoints: checkpoint.Checkpointer
    loader: data.RowLoader
    meter: flops.Meter
    token_bytes: Tensor  # (V,): bytes of text per token id
    report: ModuleType | None  # which writes report.html; None without instruments/


@dataclass
class Progress:
    """How far the run has come. Data position and token count follow from `step` and the plan."""

    step: int = 0  # optimizer steps taken
    best_bpb: float = math.inf
    skipped: int = 0  # steps with non-finite numbers, which changed no weights
    scale: float = optim.FIRST_SCALE  # the loss scale of fp16 (optim.next_scale)
    good_steps: int = 0  # steps without overflow since the scale changed
    resumed_at: int = 0
    saved_step: int = -1
    saved_at: float = 0.0  # time.monotonic()
    started_at: float = field(default_factory=time.monotonic)
    # What the ranks agreed on in the latest step:
    stop: int = 0  # the signal that ends the run
    save_now: bool = False  # by the first rank's clock, a checkpoint is due


@dataclass(frozen=True)
class Step:
    """The numbers of one optimizer step, over all its micro-batches and ranks."""

    number: int  # from 1 on
    lr: float  # the schedule's factor on every learning rate
    loss: float  # the mean cross-entropy, in nats (-ln p), of the targets that count
    bpb: float  # bits per byte of text
    norm: float  # of the loss's gradient, before clipping
    scale: float  # the loss scale of fp16; 1 in other dtypes
    more: dict[str, float]  # the sums that you add in take_steps; in fp16 also the loss scale

    @property
    def bad(self) -> bool:
        """Not finite: such a step changes no weight."""
        return not math.isfinite(self.loss + self.norm)

    @property
    def overflow(self) -> bool:
        """Bad only because the gradients, scaled, are too large for fp16: a smaller scale helps."""
        return self.bad and math.isfinite(self.loss) and self.scale > 1


def main(argv: list[str]) -> int:
    """Parse, plan, build, train, finish. Whatever must be closed goes on `stack` once made."""
    typed = cli.parse("train.py", "train", argv)
    preset = typed  # the model, the data and the plan fill in the rest
    options = typed.run
    world = ranks.start(options.device, typed.train.dtype)
    foreign = None  # the model of another program that training begins from
    if options.init_from and trained.is_export(Path(options.init_from)):
        from hf import imported

        foreign = imported.ForeignModel(options.init_from)
        preset = foreign.complete(typed)
    if options.plan:
        from instruments.run import forecast

        return forecast.show(preset, world)
    folder = options.data_dir
    if options.stage or shards.is_published(folder):
        from stores import stage

        folder = stage.once_per_node(folder, options.stage, world)
    manifest, preset = folders.open_data(folder, preset)
    if foreign:
        foreign.check_data(manifest, preset)
    plan = make_plan(preset, world)
    # --tokens was another way to say --steps: from here on the latter alone is set.
    preset = replace(preset, train=replace(preset.train, steps=plan.steps, tokens=""))
    log = Log(Path(options.run_dir), world.is_first, options.wandb)
    progress = Progress()
    order = folders.training_order(preset, plan, manifest)
    about = build.describe(typed, preset, plan, manifest, order, world)
    with ExitStack() as stack:
        stack.enter_context(folders.lock_run(preset, manifest, world))
        mirror = None  # gets copies of the checkpoints
        if options.mirror:
            from stores import mirror as mirrors

            mirror = stack.enter_context(mirrors.open_mirror(options, log))
        stack.enter_context(log.outcome(progress))
        log.print(about)
        stack.enter_context(build.explain_errors(argv, world, progress))
        model = build.build_model(preset.model, plan, world, preset.train.seed)
        optimizers = build.build_optimizers(model, preset, plan, world)
        checkpoints = build.open_checkpoints(preset, plan, log, mirror)
        stack.push(checkpoints.leave)  # a save in flight ends first
        state = build.load(checkpoints, model, optimizers, preset, manifest, foreign)
        if state:
            plan = resume(state, preset, plan, log, progress)
        if progress.step >= plan.steps and world.team.on_first(lambda: is_done(log.run_dir)):
            log.print(
                f"{log.run_dir} is finished ({progress.step:,} steps); python eval.py sample "
                f"--run_dir {str(log.run_dir)!r} shows what it writes"
            )
            checkpoints.finish()  # a mirror gets the files it lacks
            return 0
        signals = ranks.Signals()
        # The plan changes if a micro-batch does not fit in memory: it is made smaller.
        step_model, val_model, plan = build.compile_step(model, optimizers, plan, world, log)
        loader = build.open_loader(manifest, order, plan, world, progress.step)
        stack.callback(loader.close)
        run = Run(
            preset=preset,
            plan=plan,
            world=world,
            manifest=manifest,
            log=log,
            signals=signals,
            model=model,
            step_model=step_model,
            val_model=val_model,
            optimizers=optimizers,
            checkpoints=checkpoints,
            loader=loader,
            meter=build.make_meter(model, world, options),
            token_bytes=torch.from_numpy(manifest.token_bytes()).to(world.device),
            report=find_report() if world.is_first else None,
        )
        log.begin(progress.step, eval_is_due(run, progress), logs.start_of(argv, preset, world))
        gc.collect()
        gc.freeze()  # these objects live to the end: the collector need not keep scanning them
        if options.profile:
            from instruments.run import profiler

            return profiler.run(run, take_steps(run, progress), log_step, progress)
        train(run, progress)
        return finish(run, progress)


def find_report() -> ModuleType | None:
    """The instrument that draws the run, unless it was deleted."""
    try:
        from instruments.pages import report
    except ImportError:
        return None
    return report


# -------------------------------------------------------------------------------------- the loop


def train(run: Run, progress: Progress) -> None:
    """Take the steps; log each one, save and evaluate when due."""
    if eval_is_due(run, progress):
        evaluate(run, progress)  # on resume too: a kill may have come between save and validation
    for step in take_steps(run, progress):
        log_step(run, progress, step)
        if save_is_due(run, progress):
            save(run, progress)  # before the validation: a kill during it then loses no step
        if eval_is_due(run, progress) and not progress.stop:  # a signal leaves no time for it
            evaluate(run, progress)


def take_steps(run: Run, progress: Progress) -> Iterator[Step]:
    """Take one optimizer step after another, until the last one or a signal; yield the numbers of
    each.

    The loss of a step is the sum of the nats of its targets that count, over all micro-batches and
    all ranks, divided by how many count: in text all `tokens_per_step`, in conversations only those
    of answers. How many is known after the last micro-batch. So backward divides by
    `tokens_per_step`, and afterwards the gradients are multiplied by tokens_per_step / counted.
    """
    plan, world, config = run.plan, run.world, run.preset.train
    is_fp16 = world.dtype == torch.float16
    progress.saved_at = time.monotonic()
    run.meter.start()
    while progress.step < plan.steps and not progress.stop:
        lr = optim.set_schedule(run.optimizers, progress.step, plan.steps, config)
        scale = progress.scale if is_fp16 else 1.0
        sums = defaultdict(float)
        for _ in range(plan.grad_accum):
            with record_function("data"):
                inputs, targets = run.loader.next_batch()  # (B, T) each
            torch.manual_seed(run.loader.random_seed())  # for what you add, such as dropout
            nats = run.step_model(inputs, targets, reduction="none")  # (B, T), 0 where ignored
            part = nats.sum() / plan.tokens_per_step  # what these rows add to the step's loss
            (part * scale).backward()  # adds to the gradients of the micro-batches before
            # For the loss and bits per byte: nats, targets that count, nats and bytes of text.
            for name, row_sums in sums_of(nats.detach(), targets, run.token_bytes).items():
                sums[name] += row_sums.sum()
            # Your own number: sums["yours"] += ... is added up over the ranks, logged and printed.

        gradients = [p.grad for p in run.model.parameters()]  # sharded: each rank has its part
        if plan.parallel == "ddp":  # FSDP sums them within backward
            optim.sum_over_ranks(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        if plan.sharded:
            norm = norm.full_tensor()  # (), of all ranks' parts

        # The one place where the host waits for the device, and where a step is judged.
        totals, norm = agree(run, progress, sums, norm)
        # What makes the gradients those of the mean loss: they were divided by tokens_per_step, not
        # by the targets that count, and in fp16 multiplied by the loss scale.
        factor = plan.tokens_per_step / max(totals["counted"], 1)
        factor /= scale
        measured = [totals.pop(name) for name in ("nats", "counted", "text_nats", "bytes")]
        loss, bpb = loss_and_bpb(*measured)
        step = Step(
            number=progress.step + 1,
            lr=lr,
            loss=loss,
            bpb=bpb,
            norm=norm * factor,
            scale=scale,
            more=totals,  # what is left: yours
        )
        if is_fp16:
            step.more["scale"] = scale
            after = optim.next_scale(scale, progress.good_steps, step.overflow)
            progress.scale, progress.good_steps = after
        if not step.bad:
            if 0 < config.grad_clip < step.norm:
                factor *= config.grad_clip / step.norm
            if factor != 1:
                torch._foreach_mul_(gradients, factor)
            for optimizer in run.optimizers:
                optimizer.step()
        run.model.zero_grad(set_to_none=True)
        del gradients  # else they stay in memory beside the next ones
        progress.step += 1
        yield step


def agree(
    run: Run, progress: Progress, sums: dict[str, Tensor], norm: Tensor
) -> tuple[dict[str, float], float]:
    """Sum a step's numbers over the ranks; `norm` is the same on all of them already. Set
    progress.stop and progress.save_now if one rank was asked to stop, or the first is to save. It
    takes one all-reduce and one copy to the host."""
    minutes = (time.monotonic() - progress.saved_at) / 60
    save_now = 0 < run.preset.run.save_minutes < minutes and not run.checkpoints.busy
    save_now = save_now or run.checkpoints.error is not None  # so that all ranks raise it
    flags = [run.signals.received == s for s in run.signals.STOP]
    flags.append(run.world.is_first and save_now)
    zero = torch.zeros_like(norm)  # adding a flag to it takes no blocking copy to the device
    total = torch.stack([zero + x for x in (*sums.values(), *flags)])
    if dist.is_initialized():
        with record_function("communication"):
            dist.all_reduce(total)
    *numbers, norm = torch.cat([total, norm[None]]).tolist()
    flags = numbers[len(sums) :]
    asked = [s for s, flag in zip(run.signals.STOP, flags) if flag]
    progress.stop = asked[0] if asked else 0
    progress.save_now = flags[-1] > 0
    return dict(zip(sums, numbers)), norm  # by name; the flags, at the end, have none


def log_step(run: Run, progress: Progress, step: Step) -> None:
    """Log a step, or warn or raise if it was bad."""
    plan, options, log = run.plan, run.preset.run, run.log
    wait_s = run.loader.pop_wait_s()
    step_s = run.meter.step(plan.tokens_per_step, data_wait_s=wait_s)
    record = dict(step=step.number, tokens=step.number * plan.tokens_per_step)
    if step.bad:
        skip_or_raise(run, progress, step)
        log.write(record | dict(skipped=progress.skipped) | step.more)
        return
    record |= dict(loss=step.loss, bpb=step.bpb, lr=step.lr, norm=step.norm)
    record |= dict(time=time.time(), step_s=step_s) | run.meter.summary()
    # The report reads from `watch` what may have slowed a step down.
    record |= dict(watch=dict(saving=run.checkpoints.busy, wait_s=wait_s))
    log.write(record | step.more)
    long_silent = options.log_every and time.monotonic() - log.printed_at > 15  # seconds
    if step.number in (1, plan.steps) or is_due(step.number, options.log_every) or long_silent:
        left_s = logs.time_left_s(run, step.number)
        log.print(logs.step_line(record, plan.steps, left_s, step.more))


def skip_or_raise(run: Run, progress: Progress, step: Step) -> None:
    """Count a step that changed no weights; NonFiniteError if that is one more than allowed. An
    overflow of fp16 does not count: the next step has a smaller loss scale."""
    allowed = run.preset.run.skip_nonfinite
    text = f"step {step.number}: loss {step.loss}, gradient norm {step.norm}; no weight was changed"
    if step.overflow:
        run.log.print(f"{text}; the fp16 loss scale is now {progress.scale:g}")
        return
    progress.skipped += 1
    if progress.skipped > allowed:
        run.checkpoints.join()  # the newest checkpoint may not be published yet
        newest = checkpoint.latest_valid(run.log.run_dir / "checkpoints", log=run.log.print)
        raise NonFiniteError(
            f"{text}. Last good checkpoint: {newest}; try a smaller learning rate, or "
            f"--skip_nonfinite {allowed + 10}"
        )
    run.log.print(f"warning: {text}; skipped ({progress.skipped} so far)")


# ------------------------------------------------------------------------ when something is due


def is_due(step: int, every: int) -> bool:
    """True every `every` steps; 0: never."""
    return every > 0 and step % every == 0


def save_is_due(run: Run, progress: Progress) -> bool:
    """Every save_every and keep_every steps, when save_minutes have passed (`agree` finds out),
    after the last step, and at the plan's keep_step, the last before the learning rate falls: a
    longer run can begin from there."""
    step = progress.step
    options = run.preset.run
    by_steps = is_due(step, options.save_every) or is_due(step, options.keep_every)
    return by_steps or progress.save_now or step in (run.plan.keep_step, run.plan.steps)


def eval_is_due(run: Run, progress: Progress) -> bool:
    """At the start too: a validation that fails should fail in the first minute."""
    step = progress.step
    return step in (0, run.plan.steps) or is_due(step, run.preset.run.eval_every)


def validate(run: Run, step: int, rows: int, prefix: str = "") -> tuple[float, str]:
    """Score the first `rows` validation rows and log the figures, their names prefixed with
    `prefix`; returns bits per byte and the text to print."""
    manifest, world, plan = run.manifest, run.world, run.plan
    batches = data.val_batches(
        manifest, plan.micro_batch, rows, world.rank, world.world_size, world.device
    )
    with run.meter.paused("eval"):
        loss, bpb, by_source = score_text(
            run.val_model, batches, run.token_bytes, plan.micro_batch, manifest.sources
        )
    epochs = run.loader.order.epochs(step * plan.rows_per_step)  # so far, by source
    figures = dict(val_loss=loss, val_bpb=bpb, val_bpb_by_source=by_source)
    record = dict(step=step, tokens=step * plan.tokens_per_step, val_rows=rows)
    record["epochs"] = {name: round(n, 4) for name, n in zip(manifest.sources, epochs)}
    run.log.write(record | {prefix + name: figure for name, figure in figures.items()})
    return bpb, (
        f"validation on {rows:,} of {manifest.rows('val'):,} rows: {loss:.4f} nats/token, "
        f"{bpb:.4f} bpb{logs.sources_line(by_source)}"
    )


def evaluate(run: Run, progress: Progress) -> None:
    """Score the first `eval_tokens` validation targets; save and keep the best model so far."""
    step = progress.step
    plan = run.plan
    rows = max(run.preset.run.eval_tokens // plan.seq_len, plan.world_size)
    bpb, text = validate(run, step, min(rows, run.manifest.rows("val")))
    is_best = bpb < progress.best_bpb
    run.log.print(f"step {step:,} | {text}{' (best)' if is_best else ''}")
    progress.best_bpb = min(progress.best_bpb, bpb)
    if is_best and step:
        if progress.saved_step != step:
            save(run, progress)
        run.checkpoints.mark_best(step)  # once it is saved
    with run.meter.paused("report"):
        run.log.print(write_report(run.log, run.report, run, step))


def save(run: Run, progress: Progress, wait: bool = False) -> None:
    """Checkpoint this step: written in the background, unless `wait`. The Checkpointer adds the
    world size."""
    preset = run.preset
    plan = run.plan
    step = progress.step
    state = dict(
        step=step,
        best_bpb=progress.best_bpb,
        eval_tokens=preset.run.eval_tokens,
        skipped=progress.skipped,
        fp16_scale=progress.scale,
        fp16_good_steps=progress.good_steps,
        micro_batch=plan.micro_batch,
        tokens=step * plan.tokens_per_step,  # for human readers: `step` determines it
        identity=folders.identity(preset, run.manifest),
        model=asdict(preset.model),
        data_dir=preset.run.data_dir,  # as typed, not the local copy
        dtype=str(run.world.dtype),
    )
    with run.meter.paused("save"):
        run.checkpoints.save(step, run.model, run.optimizers, state, wait=wait)
    progress.saved_at = time.monotonic()
    progress.saved_step = step
    progress.save_now = False


def resume(state: dict, preset: cfg.Preset, plan: Plan, log: Log, progress: Progress) -> Plan:
    """Restore the progress from a checkpoint's state; returns the plan with its micro-batch."""
    progress.step = progress.resumed_at = progress.saved_step = state["step"]
    progress.skipped = state["skipped"]
    progress.scale = min(max(1.0, state["fp16_scale"]), optim.LARGEST_SCALE)
    progress.good_steps = state["fp16_good_steps"]
    if state["eval_tokens"] == preset.run.eval_tokens:  # else its score is of other rows
        progress.best_bpb = state["best_bpb"]
    if plan.auto_micro_batch and state["world_size"] == plan.world_size:
        # another order of summation would not give the same bits
        plan = replace(plan, micro_batch=state["micro_batch"])
    log.print(f"resumed at step {progress.step:,} with micro-batches of {plan.micro_batch} rows")
    return plan


def finish(run: Run, progress: Progress) -> int:
    """The last checkpoint, the full validation, the report. Returns the exit code."""
    log = run.log
    step = progress.step
    stop = progress.stop
    if progress.saved_step != step:
        save(run, progress, wait=True)
    run.checkpoints.join(raises=True)
    if stop:
        log.status("preempted", step=step, exit_code=128 + stop)
        write_report(log, run.report)
        run.checkpoints.finish()  # the mirror gets the last files
        log.print(
            f"stopped by {signal.Signals(stop).name} after step {step:,}; the same command resumes"
        )
        return 128 + stop
    _, text = validate(run, step, run.manifest.rows("val"), prefix="full_")
    log.status("done", step=step, exit_code=0)
    log.print(logs.done_text(run, progress, text, write_report(log, run.report)))
    run.checkpoints.finish()
    return 0


if __name__ == "__main__":
    cli.run(main)
