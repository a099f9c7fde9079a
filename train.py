"""Train a GPT: `python train.py [PRESET] [--option value ...]`, or `torchrun` for several ranks.

Reads  DATA_DIR (from prepare_data.py). Writes RUN_DIR/{config.json, metrics.jsonl, loss.png,
status.json, checkpoints/}. Run again, it goes on from the newest valid checkpoint: on a CPU to the
same bits, on a GPU within the rounding of sums that come in no fixed order.
The story is the loop in `train()`, near the end: it tells a `Trainer`, which is most of this file,
what to do when. `main()` sets up; what it calls is in build.py and plan.py.

Shapes: B rows per micro-batch, T positions. Next: checkpoint.py, eval.py.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import shlex
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import config as cfg
import data
import flops
import optim
from instruments import profiler
from instruments.noise_scale import NoiseScale
from machinery import checkpoint, cli, diary, errors, ranks, setup
from machinery.plan import describe, make_plan

EVAL_BATCH_TOKENS = 16_384  # at most: eager, a batch takes several times the memory

# ---------------------------------------------------------------------------------- the run


class Trainer:
    """A run in progress: `step` optimizer steps are done, `position` rows are consumed.

    Of the coming step: set_schedule, accumulate, guard, take_step, in this order. Now and then:
    evaluate, save. On a GPU the host is a step ahead of the device, and reads a step's numbers
    when the next one is launched; `drain` waits for them."""

    def __init__(self, preset, model_config, manifest, world, plan, log):
        self.config: cfg.TrainConfig = preset.train
        self.world, self.plan, self.log, self.manifest = world, plan, log, manifest
        self.run_dir = Path(self.config.run_dir)
        self.identity = setup.identity(self.config, model_config, manifest)
        self.model = setup.build_model(model_config, world, plan, self.config.seed)
        self.optimizers = setup.build_optimizers(self.model, self.config, world, plan.sharded)
        self.token_bytes = torch.from_numpy(manifest.token_bytes()).to(world.device)
        self.noise = NoiseScale()
        self.step = self.position = self.tokens = self.skipped = 0
        self.best_bpb = math.inf
        self.saved_step, self.saved_at = -1, time.monotonic()  # of the last checkpoint
        self.signal = 0  # that this process has got
        self.stop = 0  # signal that all ranks know of
        self.pending: dict | None = None  # the last step, until its numbers are read
        self.lr_factor = 0.0
        self.found_inf = torch.zeros((), device=world.device)
        self.n_bytes = torch.zeros((), device=world.device)  # of text in the step's targets
        self.report = torch.zeros(6, device=world.device)  # what guard() finds, see there
        self.checkpoints = checkpoint.Checkpointer(
            self.run_dir / "checkpoints",
            keep=self.config.keep,
            mirror=Path(self.config.mirror) / self.run_dir.name if self.config.mirror else None,
            log=log.say,
        )
        self.loader: data.RowLoader | None = None
        self.meter: flops.Meter | None = None
        self._restore()

    def get_ready(self) -> None:
        """Compile, wrap, open the data: what a run that is already finished does not need."""
        world, plan = self.world, self.plan
        step_model, self.micro_batch = setup.compile_step(self.model, plan, world, self.log)
        compiler_works = plan.compile and (plan.sharded or step_model is not self.model)
        if compiler_works and world.device.type == "cuda":  # a CPU would never get that time back
            for optimizer in self.optimizers:
                if isinstance(optimizer, optim.Muon):
                    optimizer.compile()
        if plan.parallel == "ddp":
            # compiled before it is wrapped, it stays one graph, whose gradients all come at its
            # end: their exchange does not overlap with it
            step_model = DistributedDataParallel(step_model, gradient_as_bucket_view=True)
        self.step_model = step_model
        self.log.rewind(self.step, self.validation_is_due())
        self.loader = self._open_loader()
        peak = setup.find_peak(self.config, world)
        self.meter = flops.Meter(
            self.model.flops_per_token(),
            self.model.flops_per_token(causal=True),
            peak,
            world.world_size,
        )

    def _restore(self) -> None:
        """From this run's newest checkpoint, or from --init_from, or from the initial values."""
        config = self.config
        path = None if config.resume == "auto" else config.resume

        def same_run(path: Path, trainer: dict) -> None:
            setup.check_same_run(path, trainer["identity"], self.identity)

        state = self.checkpoints.resume(self.model, self.optimizers, path, same_run)
        if state is None:
            if config.init_from:
                checkpoint.load_model(config.init_from, self.model)
                self.log.say(f"weights from {config.init_from}")
            return
        self.step, self.position, self.tokens = state["step"], state["position"], state["tokens"]
        self.best_bpb, self.skipped = state["best_bpb"], state["skipped"]
        self.saved_step = self.step
        if self.plan.auto_micro_batch and state["world_size"] == self.world.world_size:
            # what was found then: sums in another order would not give the same bits
            self.plan = replace(self.plan, micro_batch=state["micro_batch"])
        self.log.say(f"resumed at step {self.step:,} ({self.tokens:,} tokens)")

    def _open_loader(self) -> data.RowLoader:
        config, plan = self.config, self.plan
        decay_step = round((1 - config.decay) * plan.steps)
        return data.RowLoader(
            self.manifest,
            seed=config.seed,
            micro_batch=self.micro_batch,
            rank=self.world.rank,
            world_size=self.world.world_size,
            position=self.position,
            weights=cli.weights(config.mixture),
            decay_weights=cli.weights(config.decay_mixture),
            decay_from=plan.rows_before(decay_step),
            device=self.world.device,
            verify=not config.verify,
        )

    # ------------------------------------------------------------------ one step

    def set_schedule(self) -> None:
        """Learning rate, momentum and weight decay of this step."""
        c, steps = self.config, self.plan.steps
        factor = optim.lr_at(self.step, steps, c.schedule, c.warmup, c.decay, c.final_lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
                if isinstance(optimizer, optim.Muon):
                    group["momentum"] = optim.momentum_at(self.step, steps, c.decay)
                    group["weight_decay"] = group["base_weight_decay"] * optim.weight_decay_at(
                        self.step, steps
                    )
        self.lr_factor = factor

    def accumulate(self) -> Tensor:
        """Forward and backward over the step's rows; returns the mean loss of this rank's, 0-D."""
        grad_accum = self.grad_accum
        total = torch.zeros((), device=self.world.device)
        self.n_bytes = torch.zeros_like(total)
        for k in range(grad_accum):
            with record_function("data"):
                inputs, targets = self.loader.next_batch()  # (B, T) each
            # a model's randomness is a function of (seed, position), as its rows are
            first_row = self.position + (k * self.world.world_size + self.world.rank) * len(inputs)
            torch.manual_seed(data.mix(data.mix(self.config.seed) ^ first_row))
            last = k == grad_accum - 1
            is_ddp = isinstance(self.step_model, DistributedDataParallel)
            # DDP exchanges gradients once a step, with the last micro-batch; FSDP each time, as it
            # has no room for whole gradients
            quiet = self.step_model.no_sync() if is_ddp and not last else contextlib.nullcontext()
            with quiet:
                loss = self.step_model(inputs, targets) / grad_accum
                loss.backward()
            total += loss.detach()
            self.n_bytes += self.token_bytes[targets].sum()
            if k == 0 and self._noise_step():
                self.first_grad_sq = self._grad_norm() ** 2 * grad_accum**2
        return total

    def guard(self, loss: Tensor) -> None:
        """Let no non-finite number into the weights, and let all ranks know all, in one all-reduce
        and without waiting for the device: the optimizers skip the step if `found_inf` is 1."""
        norm = self._grad_norm()
        if self.config.grad_clip:
            scale = (self.config.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            for p in self.model.parameters():
                p.grad.mul_(scale)
        bad = ~(loss.isfinite() & norm.isfinite())
        told = [float(self.signal == s) for s in (signal.SIGINT, signal.SIGTERM)]
        told = [torch.full((), x, device=loss.device) for x in told]  # a fill, no copy to wait for
        report = torch.stack([loss, self.n_bytes, bad.float(), *told])  # (5,)
        if self.world.world_size > 1:
            with record_function("communication"):
                dist.all_reduce(report)
        bad = (report[2] > 0).float()
        # Without leave to skip, the first bad step is the last: no later step may be taken either.
        self.found_inf = bad if self.config.skip_nonfinite else torch.maximum(self.found_inf, bad)
        for optimizer in self.optimizers:
            optimizer.found_inf = self.found_inf
        self.report = torch.cat([report, norm.reshape(1)])  # (6,): the norm is that of all ranks

    def take_step(self) -> None:
        """Move the weights, and note what the step was until its numbers can be read."""
        with record_function("optimizer"):
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)
        before, self.pending = self.pending, self._note_step()
        if before:
            self._read(before)
        if self.world.device.type == "cpu":
            self.drain()  # nothing runs behind the host here: the step is complete

    def _note_step(self) -> dict:
        """Start copying the step's numbers to the host, without waiting for them."""
        host = torch.empty(6, pin_memory=self.world.device.type == "cuda")
        host.copy_(self.report, non_blocking=True)
        copied = None
        if self.world.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        rows = self.plan.rows_at(self.step)
        tokens = rows * self.model.config.seq_len
        note = dict(host=host, copied=copied, tokens=tokens, first_row=self.position, rows=rows)
        if self._noise_step():
            note["noise"] = self._noise_update(tokens)
        self.step += 1
        self.position += rows
        self.tokens += tokens
        note |= dict(step=self.step, seen=self.tokens, lr=self.lr_factor)
        return note

    def drain(self) -> None:
        """Read the step that is still pending: after this, host and device agree."""
        note, self.pending = self.pending, None
        if note:
            self._read(note)

    def _read(self, note: dict) -> None:
        """Numbers of a finished step: stop on bad ones, write the rest down."""
        if note["copied"]:
            note["copied"].synchronize()
        loss, n_bytes, bad, sigint, sigterm, norm = note["host"].tolist()
        loss /= self.world.world_size
        step_s = self.meter.step(note["tokens"], data_wait_s=self.loader.pop_wait_s())
        self.stop = signal.SIGINT if sigint else signal.SIGTERM if sigterm else 0
        if bad:
            self._refuse(note, loss, norm)
            self.log.write(dict(step=note["step"], tokens=note["seen"], skipped=self.skipped))
            return
        speed = self.meter.summary()
        bpb = loss * note["tokens"] / math.log(2) / max(n_bytes, 1)
        record = dict(step=note["step"], tokens=note["seen"], loss=loss, bpb=bpb, lr=note["lr"])
        record |= dict(norm=norm, time=time.time(), step_s=step_s)
        record |= {k: v for k, v in speed.items() if k != "tokens_per_s_mean"}
        if "noise" in note:
            record["noise_scale_tokens"] = note["noise"]
        self.log.write(record)
        if _is_due(note["step"], self.config.log_every) or note["step"] in (1, self.plan.steps):
            left_s, noise = self._time_left_s(), str(self.noise) if "noise" in note else ""
            self.log.say(diary.step_line(record, self.plan.steps, left_s, noise))

    def _refuse(self, note: dict, loss: float, norm: float) -> None:
        """A step with non-finite numbers did not happen: skip it, or stop here."""
        rows = self.loader.row_ids(note["first_row"], note["rows"])
        named = ", ".join(rows[:4]) + (f", ... ({len(rows)} rows)" if len(rows) > 4 else "")
        text = (
            f"step {note['step']}: loss {loss}, gradient norm {norm}; its weights were not "
            f"changed; rows: {named}"
        )
        self.skipped += 1
        if self.skipped > self.config.skip_nonfinite:
            self.checkpoints.join()  # the newest may be on its way
            newest = checkpoint.latest_valid(self.run_dir / "checkpoints", log=self.log.say)
            raise errors.NonFiniteError(
                f"{text}. Last good checkpoint: {newest}; try a smaller learning rate, or "
                f"--skip_nonfinite {self.config.skip_nonfinite + 10}"
            )
        self.log.say(f"warning: {text}; skipped ({self.skipped} so far)")

    def _time_left_s(self) -> float:
        tokens_left = (self.plan.rows - self.position) * self.model.config.seq_len
        every = self.config.eval_every
        evals = (self.plan.steps - self.step) // every + 1 if every else 1
        return self.meter.eta_s(tokens_left, eval=evals, save=1)

    @property
    def grad_accum(self) -> int:
        """Micro-batches of the coming step on this rank."""
        return self.plan.rows_at(self.step) // (self.micro_batch * self.world.world_size)

    def _grad_norm(self) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _noise_step(self) -> bool:
        return _is_due(self.step, self.config.noise_scale_every)

    def _noise_update(self, tokens: int) -> float | None:
        """Gradient of the first micro-batch against that of the whole step (a host sync)."""
        small = self.micro_batch * self.model.config.seq_len
        if self.plan.sharded or self.grad_accum == 1:
            small *= self.world.world_size  # this gradient was averaged over the ranks already
        small_sq, big_sq = self.first_grad_sq.item(), self.report[-1].item() ** 2
        if math.isfinite(small_sq + big_sq):  # a skipped step must not spoil the average
            self.noise.update(small_sq, big_sq, small, tokens)
        return self.noise.tokens

    # ------------------------------------------------------------------ now and then

    def evaluate(self) -> None:
        """Bits per byte on the validation rows, with the model itself, not the compiled one. A
        better one than ever is saved, and kept."""
        self.drain()
        T = self.model.config.seq_len
        rows = min(self.micro_batch, max(1, EVAL_BATCH_TOKENS // T))
        batches = data.val_batches(
            self.manifest, rows, max(self.world.world_size, self.config.eval_tokens // T),
            self.world.rank, self.world.world_size, self.world.device,
        )  # fmt: skip
        with self.meter.paused("eval"):
            loss, bpb = diary.bits_per_byte(self.model, batches, self.token_bytes)
        epochs = self.loader.order.epochs(self.position)  # so far, by source
        epochs = dict(zip(self.manifest.sources, (round(n, 4) for n in epochs), strict=True))
        record = dict(step=self.step, tokens=self.tokens, val_loss=loss, val_bpb=bpb)
        self.log.write(record | dict(epochs=epochs))
        best = " (best)" if bpb < self.best_bpb else ""
        self.log.say(
            f"step {self.step:,} | validation {loss:.4f} nats/token, {bpb:.4f} bpb{best} | epochs "
            + ", ".join(f"{name} {n:.2f}" for name, n in epochs.items())
        )
        if bpb < self.best_bpb:
            self.best_bpb = bpb
            if self.step:
                if self.saved_step != self.step:
                    self.save()
                self.checkpoints.mark_best(self.step)

    def save(self, wait: bool = False) -> None:
        self.drain()
        state = dict(
            step=self.step, position=self.position, tokens=self.tokens, best_bpb=self.best_bpb,
            skipped=self.skipped, identity=self.identity, micro_batch=self.micro_batch,
            config=asdict(self.config), model=asdict(self.model.config),
        )  # fmt: skip
        with self.meter.paused("save"):
            self.checkpoints.save(self.step, self.model, self.optimizers, state, wait=wait)
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def validation_is_due(self) -> bool:
        """At the start too: a validation that fails should do so in the first minute."""
        return self.step in (0, self.plan.steps) or _is_due(self.step, self.config.eval_every)

    def save_is_due(self) -> bool:
        """By steps or by the clock; the first rank's clock, as the ranks must agree."""
        if _is_due(self.step, self.config.save_every):
            return True
        if not self.config.save_minutes:
            return False
        late = time.monotonic() - self.saved_at > 60 * self.config.save_minutes
        if self.world.world_size == 1:
            return late
        if self.step % 10:
            return False
        told = torch.tensor([float(late)], device=self.world.device)
        dist.broadcast(told, src=0)
        return bool(told.item())


def train(run: Trainer) -> int:
    """Schedule, accumulate, guard, step, log, evaluate, save; until the last step or a signal."""
    config, plan = run.config, run.plan
    run.log.status("running", from_step=run.step, process=os.getpid())
    recording = contextlib.ExitStack()
    profile = None
    if config.profile:
        several = run.world.world_size > 1
        folder = run.run_dir / "profile" / (f"rank_{run.world.rank}" if several else "")
        profile = recording.enter_context(profiler.profile(folder, run.world.device))
    first_step, run.saved_at = run.step, time.monotonic()
    if run.validation_is_due():
        run.evaluate()  # resumed: the kill may have come between this checkpoint and its validation
    run.meter.start()
    while run.step < plan.steps and not run.stop:
        run.set_schedule()
        loss = run.accumulate()
        run.guard(loss)
        run.take_step()
        if run.step == first_step + 1:
            gc.collect()
            gc.freeze()  # what was built so far stays: no need to search it again and again
        if profile:
            profile.step()
            if profile.done:
                break
        if run.save_is_due() or run.step == plan.steps:
            run.save()  # before the validation: a kill there costs nothing
        if run.validation_is_due():
            run.evaluate()
    recording.close()
    run.drain()
    if profile:
        run.log.status("profiled", step=run.step, exit_code=0)
        if run.world.first:
            run.log.say(profile.table())
        return 0
    return finish(run)


def finish(run: Trainer) -> int:
    """The last checkpoint, the picture, and what to do next. Returns the exit code."""
    if run.saved_step != run.step:
        run.save(wait=True)
    run.checkpoints.close()
    image = run.log.plot()
    code = 128 + run.stop if run.stop else 0
    run.log.status("preempted" if run.stop else "done", step=run.step, exit_code=code)
    if run.stop:
        run.log.say(f"stopped by {signal.Signals(run.stop).name} after step {run.step:,}; "
                    "the same command goes on from here")  # fmt: skip
        return code
    seconds = run.meter.clock() - run.started
    dollars = seconds / 3600 * run.config.usd_per_hour
    cost = f" (${dollars:.2f})" if run.world.device.type == "cuda" else ""
    run.log.say(
        f"done: {run.step:,} steps, {run.tokens:,} tokens, {diary.duration(seconds)}{cost}\n"
        f"checkpoint  {run.run_dir / 'checkpoints' / f'step_{run.step:08d}'}\n"
        f"metrics     {run.log.file}\n" + (f"picture     {image}\n" if image else "") +
        f"next        python eval.py sample --run_dir {run.run_dir}"
    )  # fmt: skip
    return 0


def listen_to_signals(run: Trainer) -> None:
    """SIGTERM and SIGINT set a flag that the next step's all-reduce carries to all ranks."""

    def on_signal(signum, frame):
        if run.signal == signal.SIGINT and signum == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice
        run.signal = signum

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)


def _is_due(step: int, every: int) -> bool:
    """Every so many steps; 0: never."""
    return every > 0 and step % every == 0


def main(argv: list[str]) -> int:
    started = time.perf_counter()
    preset = cli.parse("train.py", "train", argv)
    config = preset.train
    world = ranks.join(config.device, config.dtype)
    if config.plan:
        if world.first:
            print(describe(preset, world))
        return 0
    manifest, model_config = setup.open_data(preset, world)
    plan = make_plan(config, model_config, manifest, world)
    claim = setup.claim_run_dir(preset, model_config, manifest, world)
    everything = asdict(config) | setup.identity(config, model_config, manifest)
    log = diary.Log(Path(config.run_dir), world.first, everything if config.wandb else None)
    log.say(plan.text)
    if decided := setup.taken_from_data(preset.model, model_config):
        log.say(decided)
    run = None
    try:
        run = Trainer(preset, model_config, manifest, world, plan, log)
        run.started = started
        listen_to_signals(run)
        if run.step >= plan.steps and diary.is_done(run.run_dir):
            log.say(f"{run.run_dir} is finished ({run.step:,} steps); nothing to do. Sample from "
                    f"it: python eval.py sample --run_dir {run.run_dir}")  # fmt: skip
            return 0
        run.get_ready()
        return train(run)
    except torch.OutOfMemoryError as error:
        # the last of two equal options wins, so the command can simply be made longer
        smaller = plan.smaller_micro_batch(getattr(run, "micro_batch", plan.micro_batch))
        step = run.step if run else 0
        ranks_here = os.environ.get("LOCAL_WORLD_SIZE", 1)
        launcher = "python" if world.world_size == 1 else f"torchrun --nproc_per_node={ranks_here}"
        log.status("failed", step=step, error="out of memory", exit_code=2)
        raise ValueError(
            f"out of memory at step {step:,} ({str(error).splitlines()[0]}); go on with: "
            f"{launcher} train.py {shlex.join(argv)} --micro_batch {smaller}"
        ) from None
    except Exception as error:
        log.status("failed", step=run.step if run else 0, error=str(error)[:1000],
                   exit_code=cli.exit_code(error))  # fmt: skip
        raise
    finally:
        if run:
            run.checkpoints.join()  # a save in flight may end, whatever happened
        if run and run.loader:
            run.loader.close()
        log.close()
        del claim


if __name__ == "__main__":
    cli.run(main)
