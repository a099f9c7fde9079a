"""Train a GPT: `python train.py [PRESET] [--option value ...]`, or `torchrun` for several ranks.

Reads DATA_DIR (from prepare_data.py); writes RUN_DIR. Run again, it resumes from the newest valid
checkpoint: on a CPU bit for bit, on a GPU up to rounding (its sums have no fixed order).

One straight line: `main` parses, plans and builds; `take_steps` is the optimization; `train` logs,
saves and evaluates around it; `finish` ends the run. A `Run` holds the parts, `Progress` counts.
What makes a run robust is in machinery/. Shapes: B rows per micro-batch, T positions.
"""

import gc
import math
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read by the import
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

import config as cfg
import data
import flops
import optim
from machinery import build, checkpoint, cli, folders, mirror, ranks, trained
from machinery.errors import NonFiniteError
from machinery.log import Log, StepNumbers, duration, is_done, sources_line, start_of, step_line
from machinery.plan import Plan, make_plan
from machinery.shards import Manifest


@dataclass(frozen=True)
class Run:
    """The parts of a run, all of them ready."""

    preset: cfg.Preset  # completed by the data and the plan
    plan: Plan
    world: ranks.World
    manifest: Manifest
    log: Log
    signals: ranks.Signals
    noise: object  # instruments/noise_scale.py; None if it is not asked for
    model: torch.nn.Module  # saved and sampled from
    step_model: torch.nn.Module  # the same weights compiled, under DDP if it is used
    val_model: torch.nn.Module  # and for validation
    optimizers: list[torch.optim.Optimizer]
    checkpoints: checkpoint.Checkpointer
    loader: data.RowLoader
    meter: flops.Meter
    token_bytes: Tensor  # (V,): bytes of text per token id


@dataclass
class Progress:
    """How far the loop is. Position in the data and tokens follow from `step` and the plan."""

    step: int = 0  # optimizer steps taken
    best_bpb: float = math.inf
    skipped: int = 0  # steps with non-finite numbers, which changed no weights
    resumed_at: int = 0
    saved_step: int = -1
    saved_at: float = 0.0  # time.monotonic()
    started_at: float = field(default_factory=time.monotonic)
    # What the ranks agreed on in the newest step whose numbers have arrived:
    stop: int = 0  # the signal that ends the run
    save_now: bool = False  # the first rank's clock asks for a checkpoint


def main(argv: list[str]) -> int:
    """Parse, plan, build, train, finish. What must be closed joins the stack when it is made."""
    asked = typed = cli.parse("train.py", "train", argv)
    options, world, source = asked.run, ranks.start(asked.run.device, asked.train.dtype), None
    if options.init_from and trained.is_export(Path(options.init_from)):
        from hf import imported

        source = imported.Source(options.init_from)
        asked = source.complete(typed)
    if options.plan:
        from instruments import forecast

        return forecast.show(asked, world)
    manifest, preset = folders.open_data(asked, world)
    if source:
        source.check_data(manifest, preset)
    plan = make_plan(preset, world)
    # Nothing is left open: this is what the run is.
    preset = replace(preset, train=replace(preset.train, steps=plan.steps, tokens=""))
    wandb = (str(cli.ROOT / "instruments" / "to_wandb.py"), options.run_dir, "--follow")
    log = Log(Path(options.run_dir), world.is_first, wandb if options.wandb else ())
    progress, noise = Progress(), None
    about = build.describe(typed, preset, plan, manifest, world)
    with ExitStack() as stack:
        stack.enter_context(folders.claim(preset, manifest, world))
        copies = stack.enter_context(mirror.open_mirror(options, log))
        stack.enter_context(log.outcome(progress))
        log.print(about)
        stack.enter_context(build.attention_kernels(preset.model, world))
        model = build.build_model(preset.model, plan, world, preset.train.seed)
        optimizers = build.build_optimizers(model, preset, plan, world)
        checkpoints = build.open_checkpoints(preset, plan, log, copies)
        stack.callback(checkpoints.join)  # a save in flight ends first
        state = build.load(checkpoints, model, optimizers, preset, manifest, source)
        plan = resume(state, preset, plan, log, progress) if state else plan
        if progress.step >= plan.steps and is_done(log.run_dir):
            log.print(
                f"{log.run_dir} is finished ({progress.step:,} steps); nothing to do. Sample from "
                f"it: python eval.py sample --run_dir {quote(str(log.run_dir))}"
            )
            return 0
        signals = ranks.Signals()
        stack.enter_context(build.explain_out_of_memory(argv, lambda: plan, world, progress))
        step_model, val_model, plan = build.compile_step(model, optimizers, plan, world, log)
        loader = build.open_loader(manifest, preset, plan, world, progress.step)
        stack.callback(loader.close)
        meter = build.make_meter(model, world, options)
        if options.noise_scale_every:
            from instruments.noise_scale import NoiseScale

            noise = NoiseScale(options.noise_scale_every, marks=manifest.marks)
        token_bytes = torch.from_numpy(manifest.token_bytes()).to(world.device)
        parts = (model, step_model, val_model, optimizers, checkpoints, loader, meter, token_bytes)
        run = Run(preset, plan, world, manifest, log, signals, noise, *parts)
        log.begin(progress.step, eval_is_due(run, progress), start_of(argv, preset, world))
        gc.collect()
        gc.freeze()  # all of this lives on: the collector need not scan it again and again
        if options.profile:
            from instruments import profiler

            return profiler.run(run, take_steps(run, progress), log_step, progress)
        train(run, progress)
        return finish(run, progress)


# -------------------------------------------------------------------------------------- the loop


def take_steps(run: Run, progress: Progress) -> Iterator[StepNumbers]:
    """One optimizer step after another, until the last or a signal. Yields each step's numbers,
    which may still be on their way: on a GPU the host is ahead of the device, and never waits."""
    plan, world, config, options = run.plan, run.world, run.preset.train, run.preset.run
    parameters = run.model.parameters  # to be called each time: FSDP swaps whole and sharded ones
    found_inf = torch.zeros((), device=world.device)  # 1: the optimizers skip the step
    progress.saved_at = time.monotonic()
    run.meter.start()
    while progress.step < plan.steps and not progress.stop:
        step = progress.step
        lr_factor = optim.set_schedule(run.optimizers, step, plan.steps, config)
        measures_noise = run.noise and run.noise.is_due(step)

        grad_accum, sums = plan.grad_accum(step), Counter()
        for k in range(grad_accum):
            with record_function("data"):
                inputs, targets = run.loader.next_batch()  # (B, T) each
            torch.manual_seed(run.loader.random_seed())  # for dropout, if there is any
            with build.exchange_gradients(run.step_model, last=k == grad_accum - 1):
                loss = run.step_model(inputs, targets) / grad_accum
                loss.backward()
            counted = targets != data.IGNORED
            n_bytes = (run.token_bytes[targets.clamp(min=0)] * counted).sum()
            # Added up by name over micro-batches and ranks; another sum here is logged and printed.
            sums.update(loss=loss.detach(), bytes=n_bytes, counted=counted.sum())
            if k == 0 and measures_noise:
                first_norm = optim.grad_norm(parameters()) * grad_accum

        norm = optim.grad_norm(parameters())
        bad = ~(sums["loss"].isfinite() & norm.isfinite())
        numbers = add_over_ranks(**sums, bad=bad, **requests(run, progress))
        if run.manifest.marks or not plan.all_count:
            # Each loss was a mean over all its targets, counted or not.
            in_all = grad_accum * world.world_size * targets.numel()
            scale = in_all / numbers["counted"].clamp(min=1)
            optim.scale_gradients(parameters(), scale)
            norm, numbers["loss"] = norm * scale, numbers["loss"] * scale
        if config.grad_clip:
            optim.scale_gradients(parameters(), (config.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        any_bad = (numbers["bad"] > 0).float()
        # Without --skip_nonfinite the flag stays up: the host stops one step late, and until then
        # no weight may move.
        found_inf = any_bad if options.skip_nonfinite else torch.maximum(found_inf, any_bad)
        with record_function("optimizer"):
            optim.step(run.optimizers, found_inf)  # and drop the gradients
        progress.step += 1

        numbers["norm"] = norm  # of all ranks already
        if measures_noise:
            numbers["first_norm"] = first_norm
        yield StepNumbers(dict(step=progress.step, lr=lr_factor), numbers)


def requests(run: Run, progress: Progress) -> dict[str, bool]:
    """What this rank asks the others for: to stop, to save."""
    flags = {s.name.lower(): run.signals.received == s for s in run.signals.STOP}
    flags |= dict(unsaved=run.checkpoints.error is not None)
    minutes, allowed = (time.monotonic() - progress.saved_at) / 60, run.preset.run.save_minutes
    overdue = run.world.is_first and 0 < allowed < minutes and not run.checkpoints.busy
    return flags | dict(overdue=overdue)


def add_over_ranks(**numbers: Tensor | bool) -> dict[str, Tensor]:
    """The numbers of a step, summed over the ranks by one all-reduce, without waiting for the
    device."""
    zero = torch.zeros_like(numbers["loss"])  # a flag added to it is no copy to wait for
    sums = torch.stack([zero + x for x in numbers.values()])
    if dist.is_initialized():
        with record_function("communication"):
            dist.all_reduce(sums)
    return dict(zip(numbers, sums.unbind()))


def train(run: Run, progress: Progress) -> None:
    """Take the steps; log each, save and evaluate now and then."""
    plan, options = run.plan, run.preset.run
    if eval_is_due(run, progress):
        evaluate(run, progress)  # perhaps again: a kill can come between a save and its validation
    unread: deque[StepNumbers] = deque()
    for numbers in take_steps(run, progress):
        unread.append(numbers)
        log_steps(run, progress, unread, keep=run.world.device.type == "cuda")
        by_steps = any(is_due(progress.step, n) for n in (options.save_every, options.keep_every))
        save_due = by_steps or progress.save_now or progress.step in (plan.keep_step, plan.steps)
        eval_due = eval_is_due(run, progress)
        if save_due or eval_due:
            log_steps(run, progress, unread)
        if save_due:
            save(run, progress)  # before the validation: a kill there costs nothing
        if eval_due and not progress.stop:  # a scheduler that stops a run does not wait
            evaluate(run, progress)
    log_steps(run, progress, unread)


def log_steps(run: Run, progress: Progress, unread: deque, keep: int = 0) -> None:
    """Log the steps whose numbers are still on their way, but for the last `keep`."""
    while len(unread) > keep:
        log_step(run, progress, unread.popleft().read())


def log_step(run: Run, progress: Progress, numbers: dict) -> None:
    """A finished step: obey what the ranks agreed on, refuse bad numbers, write the others down."""
    plan, options, log = run.plan, run.preset.run, run.log
    ranks.expect_answers()
    asked = [s for s in run.signals.STOP if numbers.pop(s.name.lower())]
    progress.stop, progress.save_now = (asked or [0])[0], numbers.pop("overdue") > 0
    if numbers.pop("unsaved"):
        run.checkpoints.join(raises=True)
    step, lr, norm = (numbers.pop(name) for name in ("step", "lr", "norm"))
    counted, n_bytes, bad = (numbers.pop(name) for name in ("counted", "bytes", "bad"))
    loss, first_norm = numbers.pop("loss") / plan.world_size, numbers.pop("first_norm", None)
    rows = plan.rows_in_step(step - 1)
    wait_s, saving = run.loader.pop_wait_s(), run.checkpoints.busy
    step_s = run.meter.step(rows * plan.seq_len, data_wait_s=wait_s)
    record = dict(step=step, tokens=plan.tokens_before(step))
    if bad:
        refuse_step(run, progress, step, f"loss {loss}, gradient norm {norm}")
        log.write(record | dict(skipped=progress.skipped))
        return
    record |= dict(loss=loss, bpb=loss * counted / math.log(2) / max(n_bytes, 1), lr=lr, norm=norm)
    record |= dict(time=time.time(), step_s=step_s) | run.meter.summary()
    record["watch"] = dict(saving=saving, wait_s=wait_s, **build.watch(run.loader))
    if first_norm is not None:
        first_rows = plan.rows_in_first(step - 1)
        scale = run.noise.measure(first_norm, norm, first_rows, rows, plan.seq_len)
        record["noise_scale_tokens"] = scale
    log.write(record | numbers)  # those that are left: yours
    if step in (1, plan.steps) or is_due(step, options.log_every):
        log.print(step_line(record, plan.steps, time_left_s(run, progress.step), numbers))


def refuse_step(run: Run, progress: Progress, step: int, numbers: str) -> None:
    """Count a step that changed no weights; NonFiniteError if that is one more than allowed."""
    plan, allowed = run.plan, run.preset.run.skip_nonfinite
    rows = run.loader.row_ids(plan.rows_before(step - 1), plan.rows_in_step(step - 1))
    named = ", ".join(rows[:4]) + (f", ... ({len(rows)} rows)" if len(rows) > 4 else "")
    text = f"step {step}: {numbers}; its weights were not changed; rows: {named}"
    progress.skipped += 1
    if progress.skipped > allowed:
        run.checkpoints.join()  # the newest checkpoint may not be published yet
        newest = checkpoint.latest_valid(run.log.run_dir / "checkpoints", log=run.log.print)
        raise NonFiniteError(
            f"{text}. Last good checkpoint: {newest}; try a smaller learning rate, or "
            f"--skip_nonfinite {allowed + 10}"
        )
    run.log.print(f"warning: {text}; skipped ({progress.skipped} so far)")


# ------------------------------------------------------------------------------- now and then


def is_due(step: int, every: int) -> bool:
    """Every so many steps; 0: never."""
    return every > 0 and step % every == 0


def eval_is_due(run: Run, progress: Progress) -> bool:
    """At the start too: a validation that fails should fail in the first minute."""
    step = progress.step
    return step in (0, run.plan.steps) or is_due(step, run.preset.run.eval_every)


def score(run: Run, rows: int) -> tuple[float, float, dict[str, float]]:
    """Nats per token and bits per byte of the first `rows` validation rows; and by source."""
    manifest, world, batch = run.manifest, run.world, run.plan.micro_batch
    batches = data.val_batches(manifest, batch, rows, world.rank, world.world_size, world.device)
    places = data.val_places(manifest, rows)[world.rank :: world.world_size]
    sources = [source for source, _ in places], manifest.sources
    with run.meter.paused("eval"):
        return flops.score_text(run.val_model, batches, run.token_bytes, batch, *sources)


def evaluate(run: Run, progress: Progress) -> None:
    """Bits per byte on the first validation rows; the best so far is saved and kept."""
    step, plan, of = progress.step, run.plan, run.manifest.rows("val")
    rows = min(max(run.preset.run.eval_tokens // plan.seq_len, plan.world_size), of)
    loss, bpb, by_source = score(run, rows)
    epochs = run.loader.order.epochs(plan.rows_before(step))  # so far, by source
    epochs = {name: round(n, 4) for name, n in zip(run.manifest.sources, epochs)}
    record = dict(step=step, tokens=plan.tokens_before(step), val_loss=loss, val_bpb=bpb)
    run.log.write(record | dict(val_bpb_by_source=by_source, val_rows=rows, epochs=epochs))
    is_best = bpb < progress.best_bpb
    read = ", ".join(f"{name} {n:.2f}" for name, n in epochs.items())
    run.log.print(
        f"step {step:,} | validation on {rows:,} of {of:,} rows: {loss:.4f} nats/token, "
        f"{bpb:.4f} bpb{sources_line(by_source)}{' (best)' if is_best else ''} | epochs {read}"
    )
    progress.best_bpb = min(progress.best_bpb, bpb)
    if is_best and step:
        if progress.saved_step != step:
            save(run, progress)
        run.checkpoints.mark_best(step)
    with run.meter.paused("report"):
        run.log.print(report(run.log, run, step))


def save(run: Run, progress: Progress, wait: bool = False) -> None:
    """A checkpoint of this step, written behind the training unless `wait`."""
    preset, plan, step = run.preset, run.plan, progress.step
    state = dict(
        step=step,
        best_bpb=progress.best_bpb,
        eval_tokens=preset.run.eval_tokens,
        skipped=progress.skipped,
        micro_batch=plan.micro_batch,
        tokens=plan.tokens_before(step),  # for people: computed from step
        identity=folders.identity(preset, run.manifest),
        model=asdict(preset.model),
        data_dir=cli.public(preset.run.data_dir),  # not the copy of --stage
    )
    with run.meter.paused("save"):
        run.checkpoints.save(step, run.model, run.optimizers, state, wait=wait)
    progress.saved_at, progress.saved_step, progress.save_now = time.monotonic(), step, False


def resume(state: dict, preset: cfg.Preset, plan: Plan, log: Log, progress: Progress) -> Plan:
    """Go on from a checkpoint's record; returns the plan with its micro-batch."""
    progress.step = progress.resumed_at = progress.saved_step = state["step"]
    progress.skipped = state["skipped"]
    if state.get("eval_tokens") == preset.run.eval_tokens:  # else it is of another text
        progress.best_bpb = state["best_bpb"]
    if plan.auto_micro_batch and state["world_size"] == plan.world_size:
        # sums in a different order would not give the same bits
        plan = replace(plan, micro_batch=state["micro_batch"])
    log.print(
        f"resumed at step {progress.step:,} ({plan.tokens_before(progress.step):,} tokens) with "
        f"micro-batches of {plan.micro_batch} rows"
    )
    return plan


def finish(run: Run, progress: Progress) -> int:
    """The last checkpoint and validation, the report, the next command. Returns the exit code."""
    log, step, stop = run.log, progress.step, progress.stop
    if progress.saved_step != step:
        save(run, progress, wait=True)
    run.checkpoints.finish()
    if stop:
        log.status("preempted", step=step, exit_code=128 + stop)
        report(log)
        name = signal.Signals(stop).name
        log.print(f"stopped by {name} after step {step:,}; the same command resumes")
        return 128 + stop
    rows, tokens = run.manifest.rows("val"), run.plan.tokens_before(step)
    loss, bpb, by_source = score(run, rows)
    record = dict(step=step, tokens=tokens, full_val_loss=loss, full_val_bpb=bpb, val_rows=rows)
    log.write(record | dict(full_val_bpb_by_source=by_source))
    log.status("done", step=step, exit_code=0)
    seconds = time.monotonic() - progress.started_at
    dollars = seconds / 3600 * run.preset.run.usd_per_hour * run.world.world_size
    cost = f" (${dollars:.2f})" if run.world.device.type == "cuda" else ""
    since = f" since step {progress.resumed_at:,}" if progress.resumed_at else ""
    lines = [
        f"done: {step:,} steps, {tokens:,} tokens, {duration(seconds)}{cost}{since}; validation on "
        f"all {rows:,} rows: {loss:.4f} nats/token, {bpb:.4f} bpb{sources_line(by_source)}",
        f"checkpoint  {log.run_dir / 'checkpoints' / f'step_{step:08d}'}",
        f"metrics     {log.file}",
        report(log),
        f"next        python eval.py {'chat' if run.manifest.marks else 'sample'} "
        f"--run_dir {quote(str(log.run_dir))}",
    ]
    log.print("\n".join(lines))
    return 0


def time_left_s(run: Run, step: int) -> float:
    every, plan = run.preset.run.eval_every, run.plan
    evals = math.ceil(plan.steps / every) - step // every if every else 1
    tokens_left = plan.tokens_before(plan.steps) - plan.tokens_before(step)
    return run.meter.eta_s(tokens_left, eval=evals, report=evals, save=1)


def report(log: Log, run: Run | None = None, step: int = 0) -> str:
    """Write loss.png and report.html; returns the line to print. A `run` that goes on also writes
    a sample. An error goes into that line too, since it is no fault of the run itself."""
    if not log.is_first:
        return ""
    try:
        from instruments import report

        if run:
            return report.update(run, step)
        return f"report      {report.write(log.run_dir)}, and loss.png beside it"
    except Exception as error:
        return f"report      none: {type(error).__name__}: {error}"


if __name__ == "__main__":
    cli.run(main)
