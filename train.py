"""Train a GPT: `python train.py [PRESET] [--option value ...]`, or `torchrun` for several ranks.

Reads DATA_DIR (from prepare_data.py); writes RUN_DIR. Run again, it resumes from the newest valid
checkpoint: bit for bit on a CPU with the same number of threads, up to rounding on a GPU (where the
order of summation is not fixed).

Read `take_steps` first: it is the optimization loop. `train` logs, saves and evaluates around it;
`finish` ends the run. `Run` (session.py) holds the parts, which are built there, and the counters;
`Step` has the numbers of one step. A rank is one process, with a GPU of its own if there are any;
in data parallel (ddp) each has a whole model and rows of its own, with FSDP each keeps a share of
every weight as well. Fault tolerance is in machinery/. Shapes: B rows per micro-batch, T positions.
Next: tokenizer.py, where the ids come from.
"""

import machinery.needs  # first: it says which packages are missing

import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

# Let the GPU's memory be extended in place, so that less is lost in gaps between tensors of many
# sizes. `import torch` reads it; what you have set, under its older name too, stays.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

import data
import optim
import session
from bits_per_byte import loss_and_bpb, score_text, sums_of
from machinery import checkpoint, cli, errors, folders, formats, screen
from machinery.log import start_of, write_report
from machinery.plan import with_steps
from session import Run


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
    """Open the run, take its steps, finish it."""
    with session.open_run(argv) as run:
        if run is None:  # --plan was printed, or the run is finished
            return 0
        run.log.begin(run.progress.step, eval_is_due(run), start_of(argv, run))
        if run.preset.run.profile:
            from instruments.run import profiler

            return profiler.run(run, take_steps(run), log_step)
        train(run)
        return finish(run)


# -------------------------------------------------------------------------------------- the loop


def train(run: Run) -> None:
    """Take the steps; log each one, save and evaluate when due."""
    if eval_is_due(run):
        evaluate(run)  # on resume too: a kill may have come between save and validation
    for step in take_steps(run):
        log_step(run, step)
        if save_is_due(run):
            save(run)  # before the validation: a kill during it then loses no step
        if eval_is_due(run) and not run.progress.stop:  # a signal leaves no time for it
            evaluate(run)


def take_steps(run: Run) -> Iterator[Step]:
    """Take one optimizer step after another, until the last one or a signal; yield the numbers of
    each.

    The loss of a step is the sum of the nats of its targets that count, over all micro-batches and
    all ranks, divided by how many count: in text all `tokens_per_step`, in conversations only those
    of answers. How many is known after the last micro-batch. So backward divides by
    `tokens_per_step`, and afterwards the gradients are multiplied by tokens_per_step / counted.
    """
    plan, world, config = run.plan, run.world, run.preset.train
    progress = run.progress
    is_fp16 = world.dtype == torch.float16
    progress.saved_at = time.monotonic()
    run.meter.start()
    # run.plan, as fit_to_minutes may change when the decay begins and ends
    while progress.step < run.plan.steps and not progress.stop:
        lr = optim.set_schedule(run.optimizers, progress.step, run.plan.steps, config)
        scale = progress.scale if is_fp16 else 1.0
        sums = defaultdict(float)
        for _ in range(plan.grad_accum):
            with record_function("data"):
                inputs, targets = run.loader.next_batch()  # (B, T) each
            torch.manual_seed(run.loader.random_seed())  # for what you add, such as dropout
            nats = run.step_model(inputs, targets, reduction="none")  # (B, T), 0 where ignored
            part = nats.sum() / plan.tokens_per_step  # what these rows add to the step's loss
            (part * scale).backward()  # adds to the gradients of the micro-batches before
            # For the loss: nats, counted (targets). For bits per byte: text_nats, bytes.
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
        totals, norm = agree(run, sums, norm)
        # What makes the gradients those of the mean loss: they were divided by tokens_per_step, not
        # by the targets that count, and in fp16 multiplied by the loss scale.
        factor = plan.tokens_per_step / max(totals["counted"], 1)
        factor /= scale
        measured = [totals.pop(name) for name in ("nats", "counted", "text_nats", "bytes")]
        loss, bpb = loss_and_bpb(*measured)
        if is_fp16:
            totals["scale"] = scale
        step = Step(
            number=progress.step + 1,
            lr=lr,
            loss=loss,
            bpb=bpb,
            norm=norm * factor,
            scale=scale,
            more=totals,  # what is left: yours, and the loss scale
        )
        if is_fp16:
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
        fit_to_minutes(run)
        yield step


def agree(run: Run, sums: dict[str, Tensor], norm: Tensor) -> tuple[dict[str, float], float]:
    """The sums of a step over the ranks, by name, and `norm`, which is the same on all of them
    already, as numbers. It sets progress.stop (the signal that a rank has received, or 0),
    progress.save_now (whether the first rank is to save) and progress.mean_s (the first rank's mean
    seconds of a step). One all-reduce, one copy to the host."""
    progress = run.progress
    minutes = (time.monotonic() - progress.saved_at) / 60
    save_now = 0 < run.preset.run.save_minutes < minutes and not run.checkpoints.busy
    save_now = save_now or run.checkpoints.error is not None  # so that all ranks raise it
    mean_s = progress.timed_s / max(progress.timed_steps, 1)
    flags = [run.signals.received == s for s in run.signals.STOP]
    flags += [run.world.is_first and x for x in (save_now, mean_s)]
    zero = torch.zeros_like(norm)  # adding a flag to it takes no blocking copy to the device
    total = torch.stack([zero + x for x in (*sums.values(), *flags)])
    if dist.is_initialized():
        with record_function("communication"):
            dist.all_reduce(total)
    *numbers, norm = torch.cat([total, norm[None]]).tolist()
    *flags, save_now, progress.mean_s = numbers[len(sums) :]
    asked = [s for s, flag in zip(run.signals.STOP, flags) if flag]
    progress.stop = asked[0] if asked else 0
    progress.save_now = save_now > 0
    return dict(zip(sums, numbers)), norm  # by name; the flags, at the end, have none


def fit_to_minutes(run: Run) -> None:
    """With --minutes: plan as many steps as fit, by the speed so far (of three steps or more),
    until the learning rate begins to fall. Nothing has depended on their number before; from there
    on it is fixed."""
    progress, plan, config = run.progress, run.plan, run.preset.train
    step = progress.step
    if not config.minutes or step > plan.keep_step or progress.timed_steps < 3:
        return
    fitting = round(60 * config.minutes / max(progress.mean_s, 1e-6))
    run.plan = plan = with_steps(plan, fitting, config.decay, step)
    if plan.keep_step == step:
        run.checkpoints.keep_step = step
        run.log.print(
            f"step {step:,}: the number of steps is fixed from here on: {plan.steps:,}, which take "
            f"{screen.duration(plan.steps * progress.mean_s)} of training"
        )


def log_step(run: Run, step: Step) -> None:
    """Log a step, or warn or raise if it was bad."""
    plan, options, log = run.plan, run.preset.run, run.log
    progress = run.progress
    step_s = run.meter.step(plan.tokens_per_step, data_wait_s=run.loader.pop_wait_s())
    if step.number > progress.resumed_at + 1:  # the first step of a process compiles
        progress.timed_s += step_s
        progress.timed_steps += 1
    tokens = step.number * plan.tokens_per_step
    if step.bad:
        skip_or_raise(run, step)
        line = formats.SkippedLine(step=step.number, tokens=tokens, skipped=progress.skipped)
        log.write(line, **step.more)
        return
    line = formats.StepLine(
        step=step.number,
        tokens=tokens,
        loss=step.loss,
        bpb=step.bpb,
        lr=step.lr,
        norm=step.norm,
        time=time.time(),
        step_s=step_s,
        **run.meter.summary(),
    )
    log.write(line, **step.more)
    long_silent = options.log_every and time.monotonic() - log.printed_at > 15  # seconds
    if step.number in (1, plan.steps) or is_due(step.number, options.log_every) or long_silent:
        left_s = screen.time_left_s(run, step.number)
        log.print(screen.step_line(line, plan.steps, left_s, step.more))


def skip_or_raise(run: Run, step: Step) -> None:
    """Count a step that changed no weights; NonFiniteError if that is one more than allowed. An
    overflow of fp16 does not count: the next step has a smaller loss scale."""
    progress = run.progress
    allowed = run.preset.run.skip_nonfinite
    text = f"step {step.number}: loss {step.loss}, gradient norm {step.norm}; no weight was changed"
    if step.overflow:
        run.log.print(f"{text}; the fp16 loss scale is now {progress.scale:g}")
        return
    progress.skipped += 1
    if progress.skipped > allowed:
        run.checkpoints.join()  # the newest checkpoint may not be published yet
        newest = checkpoint.latest_valid(run.log.run_dir / "checkpoints", log=run.log.print)
        raise errors.NonFiniteError(
            f"{text}. Last good checkpoint: {newest}; try a smaller learning rate, or "
            f"--skip_nonfinite {allowed + 10}"
        )
    run.log.print(f"warning: {text}; skipped ({progress.skipped} so far)")


# ------------------------------------------------------------------------ when something is due


def is_due(step: int, every: int) -> bool:
    """True every `every` steps; 0: never."""
    return every > 0 and step % every == 0


def save_is_due(run: Run) -> bool:
    """Whether to save now: every save_every and keep_every steps, after save_minutes (see `agree`),
    after the last step, and at the plan's keep_step, the last before the learning rate falls: a
    longer run can begin from there."""
    step = run.progress.step
    options = run.preset.run
    by_steps = is_due(step, options.save_every) or is_due(step, options.keep_every)
    return by_steps or run.progress.save_now or step in (run.plan.keep_step, run.plan.steps)


def eval_is_due(run: Run) -> bool:
    """Whether to validate now: every eval_every steps, at the end, and at the start, since a
    validation that fails should fail in the first minute."""
    step = run.progress.step
    return step in (0, run.plan.steps) or is_due(step, run.preset.run.eval_every)


def validate(run: Run, step: int, rows: int, prefix: str = "") -> tuple[float, str]:
    """Score the first `rows` validation rows and log the figures, their names prefixed with
    `prefix`, which is "full_" for all rows; returns bits per byte and the text to print."""
    manifest, world, plan = run.manifest, run.world, run.plan
    batches = data.val_batches(
        manifest, plan.micro_batch, rows, world.rank, world.world_size, world.device
    )
    with run.meter.paused("eval"):
        loss, bpb, by_source = score_text(
            run.val_model, batches, run.token_bytes, plan.micro_batch, manifest.sources
        )
    epochs = run.loader.order.epochs(step * plan.rows_per_step)  # so far, by source
    kind = formats.FullValidationLine if prefix else formats.ValidationLine
    figures = dict(val_loss=loss, val_bpb=bpb, val_bpb_by_source=by_source)
    line = kind(
        step=step,
        tokens=step * plan.tokens_per_step,
        val_rows=rows,
        epochs={name: round(n, 4) for name, n in zip(manifest.sources, epochs)},
        **{prefix + name: figure for name, figure in figures.items()},
    )
    run.log.write(line)
    return bpb, (
        f"validation on {rows:,} of {manifest.rows('val'):,} rows: {loss:.4f} nats/token, "
        f"{bpb:.4f} bpb{screen.sources_line(by_source)}"
    )


def evaluate(run: Run) -> None:
    """Score the first `eval_tokens` validation targets; save and keep the best model so far."""
    progress = run.progress
    step = progress.step
    rows = max(run.preset.run.eval_tokens // run.plan.seq_len, run.plan.world_size)
    bpb, text = validate(run, step, min(rows, run.manifest.rows("val")))
    is_best = bpb < progress.best_bpb
    run.log.print(f"step {step:,} | {text}{' (best)' if is_best else ''}")
    progress.best_bpb = min(progress.best_bpb, bpb)
    if is_best and step:
        if progress.saved_step != step:
            save(run)
        run.checkpoints.mark_best(step)  # when its save has ended
    with run.meter.paused("report"):
        run.log.print(write_report(run, sample=True))


def save(run: Run, wait: bool = False) -> None:
    """Checkpoint this step: written in the background, unless `wait`."""
    preset = run.preset
    plan = run.plan
    progress = run.progress
    step = progress.step
    trainer = formats.Trainer(
        step=step,
        best_bpb=progress.best_bpb,
        eval_tokens=preset.run.eval_tokens,
        skipped=progress.skipped,
        fp16_scale=progress.scale,
        fp16_good_steps=progress.good_steps,
        steps=plan.steps,
        timed_s=progress.timed_s,
        timed_steps=progress.timed_steps,
        micro_batch=plan.micro_batch,
        tokens=step * plan.tokens_per_step,  # for human readers: `step` determines it
        identity=folders.identity(preset, run.manifest),
        model=preset.model,
        world_size=plan.world_size,
        data_dir=preset.run.data_dir,  # as typed, not the local copy
        dtype=str(run.world.dtype),
    )
    with run.meter.paused("save"):
        run.checkpoints.save(trainer, run.model, run.optimizers, wait=wait)
    progress.saved_at = time.monotonic()
    progress.saved_step = step
    progress.save_now = False


def finish(run: Run) -> int:
    """The last checkpoint and the report; after the last step, the full validation as well. Returns
    the exit code: 0, or 128 + the signal that ended the run."""
    log = run.log
    step = run.progress.step
    stop = run.progress.stop
    if run.progress.saved_step != step:
        save(run, wait=True)
    run.checkpoints.join(raises=True)
    if stop:
        log.status("preempted", step=step, exit_code=128 + stop)
        write_report(run)
        run.checkpoints.finish()  # the mirror gets the last files
        log.print(
            f"stopped by {signal.Signals(stop).name} after step {step:,}; the same command resumes"
        )
        return 128 + stop
    _, text = validate(run, step, run.manifest.rows("val"), prefix="full_")
    log.status("done", step=step, exit_code=0)
    log.print(screen.done_text(run, text, write_report(run)))
    run.checkpoints.finish()
    return 0


if __name__ == "__main__":
    cli.run(main)
