"""Train a GPT: `python train.py [PRESET] [--option value ...]`, or `torchrun` for several ranks.

Reads DATA_DIR (from prepare_data.py); writes RUN_DIR. Run again, it resumes from the newest valid
checkpoint: bit for bit on a CPU with the same number of threads, up to rounding on a GPU (where the
order of summation is not fixed).

Read `train` and `take_steps` first: they are the optimization loop. session.py has built the parts
of the run, and says what each is. A rank is one process, with a GPU of its own if there are any. In
data parallel (ddp), each has the whole model and rows of its own. With FSDP, each stores only its
shard of every weight, gradient and moment: torch gathers the whole weights of a layer just before
they are used. Fault tolerance is in machinery/. Shapes: B rows per micro-batch, T positions.
Next: tokenizer.py, where the ids come from.
"""

import machinery.needs  # first: it says which packages are missing

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator

# Let the GPU's memory be extended in place, so that less is lost in gaps between tensors of many
# sizes: unless you have said otherwise, under the old name or the new. `import torch` reads it.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

import data
import optim
import session
from bits_per_byte import loss_and_bpb, reads_future, score_text, sums_of
from machinery import cli, errors, folders, formats, screen
from machinery.formats import Step, StepLine, Trainer, counters_of
from machinery.log import start_of, with_own, write_report
from session import Run


def main(argv: list[str]) -> int:
    """Open the run, take its steps, finish it."""
    with session.open_run(argv) as run:
        if run is None:  # --plan was printed, or the run is finished
            return 0
        run.log.begin(run.progress.step, eval_is_due(run), start_of(argv, run))
        if run.options.profile:
            from instruments.run import profiler

            return profiler.run(run, take_steps(run), log_step)
        train(run)
        return finish(run)


# -------------------------------------------------------------------------------------- the loop

# The parts of a run (session.Run) that are used most:
#   preset    what was asked for: preset.train decides every loss; preset.run, which is `options`
#             here, where the run is and when it logs, validates and saves
#   plan      what follows from it: steps, tokens_per_step, micro_batch (B), grad_accum, ...
#   world     this process: its rank, its device, the dtype it computes in
#   model     the GPT; step_model and val_model have the same weights, and may be compiled
#   progress  how far the run has come


def train(run: Run) -> None:
    """Take the steps; log each one, save and evaluate when due."""
    if eval_is_due(run):
        evaluate(run)  # on resume too: a kill may have come between save and validation
    for step in take_steps(run):
        log_step(run, step)
        if save_is_due(run):
            save(run)  # before the validation: a kill during it then loses no step
        if eval_is_due(run):
            evaluate(run)


def take_steps(run: Run) -> Iterator[Step]:
    """Take one optimizer step after another, until the last one or a signal; yield the numbers of
    each."""
    progress = run.progress
    plan = run.plan
    clip = run.preset.train.grad_clip
    is_fp16 = run.world.dtype == torch.float16
    progress.saved_at = time.monotonic()  # from here on, save_minutes are counted
    run.meter.start()
    while progress.step < plan.steps and not progress.stop:
        lr = optim.set_schedule(run.optimizers, progress.step, plan.steps, run.preset.train)
        scale = progress.fp16_scale if is_fp16 else 1.0  # keeps small gradients above 0 in fp16
        sums, yours = add_gradients(run, scale)
        gradients = [p.grad for p in run.model.parameters()]
        # A sum, not a mean: each was divided by the tokens of all ranks. FSDP sums within backward.
        if plan.parallel == "ddp":
            optim.sum_over_ranks(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)  # ()
        if plan.sharded:  # DTensors, which know what other ranks hold
            norm = norm.full_tensor()  # of all ranks' shards together

        # Up to here the host has only queued work for the GPU. This is the one place where it waits
        # for results, and where a step is judged.
        totals = agree(run, sums, yours, norm)
        loss, bpb = loss_and_bpb(**{name: totals[name] for name in sums})
        more = {name: totals[name] for name in yours}
        if is_fp16:
            more["scale"] = scale
        # What makes the gradients those of the mean loss: backward has divided by tokens_per_step,
        # not by the targets that count (see add_gradients), and multiplied by the loss scale.
        factor = plan.tokens_per_step / max(totals["counted"], 1) / scale
        step = Step(
            step=progress.step + 1,
            tokens=(progress.step + 1) * plan.tokens_per_step,
            loss=loss,
            bpb=bpb,
            lr=lr,
            norm=totals["norm"] * factor,
            more=more,
        )
        if is_fp16:
            progress.fp16_scale, progress.fp16_good_steps = optim.next_scale(
                scale, progress.fp16_good_steps, step.overflow
            )
        if not step.bad:
            if 0 < clip < step.norm:
                factor *= clip / step.norm
            if factor != 1:
                torch._foreach_mul_(gradients, factor)
            for optimizer in run.optimizers:  # Muon and AdamW, each for its kinds of weights
                optimizer.step()
        run.model.zero_grad(set_to_none=True)
        del gradients  # else they stay in memory beside the next ones
        progress.step += 1
        yield step


def add_gradients(run: Run, scale: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Forward and backward of this rank's micro-batches, whose gradients add up in `p.grad`.
    Returns two kinds of sums over their targets, () each: the arguments of `loss_and_bpb` (nats,
    counted, text_nats, bytes), and your own numbers. scale: multiplies the gradients.

    The loss of a step is the mean over its targets that count, on all ranks: of text all
    `tokens_per_step` do, of conversations those of answers. How many is not known before the last
    micro-batch. So each is divided by `tokens_per_step`, and take_steps multiplies the gradients by
    tokens_per_step / counted.
    """
    sums = defaultdict(float)
    yours = defaultdict(float)
    for _ in range(run.plan.grad_accum):
        with record_function("data"):  # its name in the table of --profile
            inputs, targets = run.loader.next_batch()  # (B, T) each
        # For what you add, such as dropout: a run that resumes draws the same numbers.
        torch.manual_seed(run.loader.random_seed())
        nats = run.step_model(inputs, targets, reduction="none")  # (B, T), 0 where ignored
        part = nats.sum() / run.plan.tokens_per_step  # of the step's loss
        (part * scale).backward()
        for name, of_rows in sums_of(nats.detach(), targets, run.token_bytes).items():
            sums[name] += of_rows.sum()
        # Your own number: yours["name"] += ... is added up over the ranks, logged and printed.
    return sums, yours


def agree(run: Run, sums: dict, yours: dict, norm: Tensor) -> dict[str, float]:
    """`sums` and `yours` (see add_gradients) added up over all ranks, and `norm`, by name, as
    numbers of Python: one all-reduce, one copy to the host. With them travels what all ranks must
    know at the same step: it sets progress.stop (the signal that one of them has received, or 0)
    and progress.save_now."""
    progress = run.progress
    minutes = (time.monotonic() - progress.saved_at) / 60
    save_now = 0 < run.options.save_minutes < minutes and not run.checkpoints.busy
    # After three failed saves in a row, all ranks save at the same step, which raises the error.
    save_now = save_now or run.checkpoints.error is not None
    from_first = {"norm": norm, "save_now": save_now}
    if not run.world.is_first:
        from_first = dict.fromkeys(from_first, 0.0)  # so that the sum is the first rank's value
    signals = {f"signal {s}": run.signals.received == s for s in run.signals.STOP}
    numbers = with_own(yours, sums | from_first | signals)
    # Added to a tensor that is on the device, a number travels with the command to add; a tensor
    # made of numbers would be copied there, for which the host waits.
    zero = torch.zeros_like(norm)
    summed = torch.stack([zero + number for number in numbers.values()])
    if dist.is_initialized():
        with record_function("communication"):
            dist.all_reduce(summed)
    totals = dict(zip(numbers, summed.tolist()))
    progress.stop = next((s for s in run.signals.STOP if totals[f"signal {s}"]), 0)
    progress.save_now = totals["save_now"] > 0
    return totals


def log_step(run: Run, step: Step) -> None:
    """Write a step to metrics.jsonl, and print its line when due; warn or raise if it was bad."""
    log = run.log
    every = run.options.log_every
    n = step.step
    step_s = run.meter.step(run.plan.tokens_per_step, data_wait_s=run.loader.pop_wait_s())
    took = dict(time=time.time(), step_s=step_s)
    if step.bad:
        skip_or_raise(run, step)
        log.write(
            formats.SkippedLine(
                step=n, tokens=step.tokens, skipped=run.progress.skipped, more=step.more, **took
            )
        )
        return
    line = StepLine(**vars(step), **took, **run.meter.summary())
    log.write(line)
    long_silent = every and time.monotonic() - log.printed_at > 15  # seconds
    if n in (1, run.plan.steps) or is_due(n, every) or long_silent:
        log.print(step_line(line, run.plan.steps, screen.time_left_s(run, n)))


def step_line(r: StepLine, steps: int, left_s: float) -> str:
    """The line on the screen."""
    if r.mfu_full is None:
        used = f"mfu n/a, {r.tflops_full:.2f}/{r.tflops_causal:.2f} TFLOP/s full/causal"
    else:
        used = f"mfu {r.mfu_full:.1%} full {r.mfu_causal:.1%} causal"
    others = "".join(f" | {name} {value:g}" for name, value in r.more.items())
    return (
        f"step {r.step:,}/{steps:,} | loss {r.loss:.4f} | bpb {r.bpb:.3f} | lr {r.lr:.3f} | "
        f"|g| {r.norm:.3f} | {r.dt_ms:.0f} ms | {screen.short(r.tokens_per_s)} tok/s | {used} | "
        f"data {r.data_wait_ms:.1f} ms | {screen.duration(left_s)} left{others}"
    )


def skip_or_raise(run: Run, step: Step) -> None:
    """Count a step that changed no weights; NonFiniteError if that is one more than allowed. An
    overflow of fp16 does not count: the next step has a smaller loss scale."""
    progress = run.progress
    allowed = run.options.skip_nonfinite
    text = f"step {step.step}: loss {step.loss}, gradient norm {step.norm}; no weight was changed"
    if step.overflow:
        run.log.print(f"{text}; the fp16 loss scale is now {progress.fp16_scale:g}")
        return
    progress.skipped += 1
    if progress.skipped > allowed:
        raise errors.NonFiniteError(
            f"{text}. The checkpoints in {run.checkpoints.root} are good; try a smaller learning "
            f"rate, or --skip_nonfinite {allowed + 10}"
        )
    run.log.print(f"warning: {text}; skipped ({progress.skipped} so far)")


# ------------------------------------------------------------------------ when something is due


def is_due(step: int, every: int) -> bool:
    """True every `every` steps; 0: never."""
    return every > 0 and step % every == 0


def save_is_due(run: Run) -> bool:
    """Whether to save now: every save_every and keep_every steps, after save_minutes (see `agree`),
    after the last step, and at the plan's keep_step, the last before the learning rate falls: from
    there, a longer run can go on as if it had been planned so."""
    step = run.progress.step
    options = run.options
    if is_due(step, options.save_every) or is_due(step, options.keep_every):
        return True
    return run.progress.save_now or step in (run.plan.keep_step, run.plan.steps)


def eval_is_due(run: Run) -> bool:
    """Whether to validate now: every eval_every steps, at the end, and at the start, since a
    validation that fails should fail in the first minute. A signal leaves no time for it."""
    if run.progress.stop:
        return False
    step = run.progress.step
    return step in (0, run.plan.steps) or is_due(step, run.options.eval_every)


def validate(run: Run, rows: int, whole: bool = False) -> tuple[float, str]:
    """Score the first `rows` validation rows and log the figures; returns bits per byte and the
    text to print. whole: those are all rows, and the names in the log begin with full_."""
    manifest, world, plan = run.manifest, run.world, run.plan
    step = run.progress.step
    batches = data.val_batches(
        manifest, plan.micro_batch, rows, world.rank, world.world_size, world.device
    )
    kind = formats.ValidationLine
    with run.meter.paused("eval"):
        loss, bpb, by_source = score_text(
            run.val_model, batches, run.token_bytes, plan.micro_batch, manifest.sources
        )
        figures = dict(val_loss=loss, val_bpb=bpb, val_bpb_by_source=by_source)
        if whole:
            kind = formats.FullValidationLine
            figures = {f"full_{name}": figure for name, figure in figures.items()}
            with torch.compiler.set_stance("force_eager"):  # compiled blocks know another shape
                figures["reads_future"] = reads_future(run.model.eval(), run.log.print)
    run.log.write(kind(step=step, tokens=step * plan.tokens_per_step, val_rows=rows, **figures))
    return bpb, (
        f"validation on {rows:,} of {manifest.rows('val'):,} rows: {loss:.4f} nats/token, "
        f"{bpb:.4f} bpb{screen.sources_line(by_source)}"
    )


def evaluate(run: Run) -> None:
    """Score the first `eval_tokens` validation targets; save and keep the best model so far."""
    progress = run.progress
    rows = max(run.options.eval_tokens // run.plan.seq_len, run.plan.world_size)  # one a rank
    bpb, text = validate(run, min(rows, run.manifest.rows("val")))
    is_best = bpb < progress.best_bpb
    run.log.print(f"step {progress.step:,} | {text}{' (best)' if is_best else ''}")
    if is_best:
        progress.best_bpb = bpb
        if progress.step:
            save(run)
            run.checkpoints.mark_best(progress.step)  # when its save has ended
    if run.report:
        run.log.print(write_report(run, sample=True))


def save(run: Run) -> None:
    """Checkpoint this step, unless that is done; it is written in the background. trainer.json,
    beside the tensors, says what else a run needs to resume, and of which run it is."""
    progress = run.progress
    plan = run.plan
    if progress.saved_step == progress.step:
        return
    trainer = Trainer(
        **counters_of(progress),
        eval_tokens=run.options.eval_tokens,
        steps=plan.steps,
        micro_batch=plan.micro_batch,
        tokens=progress.step * plan.tokens_per_step,  # for human readers: `step` determines it
        identity=folders.identity(run.preset, run.manifest),
        model=run.preset.model,
        world_size=plan.world_size,
        data_dir=run.options.data_dir,  # as typed: it may be a URL, copied to a local disk
        dtype=str(run.world.dtype),
    )
    with run.meter.paused("save"):
        run.checkpoints.save(trainer, run.model, run.optimizers)
    progress.saved_at = time.monotonic()
    progress.saved_step = progress.step
    progress.save_now = False


def finish(run: Run) -> int:
    """The last checkpoint and the report; after the last step, the full validation as well. Returns
    the exit code: 0, or 128 + the signal that ended the run."""
    log = run.log
    step = run.progress.step
    stop = run.progress.stop
    code = stop and 128 + stop
    save(run)
    with run.meter.paused("save"):
        run.checkpoints.join(raises=True)
    if stop:
        state = "preempted"
        text = (
            f"stopped by {signal.Signals(stop).name} after step {step:,}; the same command resumes"
        )
    else:
        state = "done"
        _, text = validate(run, run.manifest.rows("val"), whole=True)
    log.status(state, step=step, exit_code=code)  # the report shows it
    report = write_report(run)
    seconds = run.meter.seconds(run.progress.started_at)
    log.status(state, step=step, exit_code=code, seconds=seconds)
    run.checkpoints.finish()  # with --mirror, the store gets the last files
    log.print(text if stop else screen.done_text(run, text, report, seconds))
    return code


if __name__ == "__main__":
    cli.run(main)
