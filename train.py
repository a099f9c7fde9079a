"""Train a GPT: `python train.py [PRESET] [--option value ...]`, or `torchrun` for several ranks.

Reads DATA_DIR (from prepare_data.py); writes RUN_DIR. Run again, it resumes from the newest valid
checkpoint: on a CPU bit for bit, on a GPU up to rounding (its sums have no fixed order).

Start at `train()`, near the end: each line of its loop is one method of `Trainer`. What makes a run
robust (checkpoints, agreement between ranks, fallbacks) is in machinery/. Shapes: B rows per
micro-batch, T positions.
"""

import contextlib
import gc
import math
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read by the import
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import config as cfg
import data
import flops
import optim
from eval import bits_per_byte
from machinery import checkpoint, cli, diary, ranks, setup
from machinery.plan import Plan, make_plan
from machinery.shards import Manifest

# The numbers of a step, summed over the ranks by one all-reduce. To print another one, add its name
# here, its value in `accumulate` or `guard`, and its place in `_log_step` and `step_line`.
NUMBERS = ("loss", "bytes", "bad", "sigint", "sigterm", "overdue")


class Trainer:
    """A run in progress; `step` optimizer steps are done.

    Each step: set_schedule, accumulate, guard, take_step. Now and then: evaluate, save. On a GPU
    the host is one step ahead of the device: it reads a step's numbers after launching the next
    one. `drain` waits for them, after which host and device agree."""

    def __init__(
        self, preset: cfg.Preset, world: ranks.World, plan: Plan, manifest: Manifest, log: diary.Log
    ):
        self.config, self.options = preset.train, preset.run
        self.world, self.plan, self.log, self.manifest = world, plan, log, manifest
        self.run_dir = Path(self.options.run_dir)
        self.token_bytes = torch.from_numpy(manifest.token_bytes()).to(world.device)
        self.step = self.resumed_at = self.skipped = 0
        self.best_bpb = math.inf
        # 1: the optimizers skip the step. (A flag of torch's, which GradScaler sets in fp16.)
        self.found_inf = torch.zeros((), device=world.device)
        self.late = diary.LateNumbers((*NUMBERS, "norm"))
        self.signal = 0  # signal received by this process (0: none)
        self.stop = 0  # signal agreed on by all ranks: stop after this step
        self.decay_begins = optim.decay_begins(plan.steps, self.config.decay)
        wsd = self.config.schedule == "wsd"
        self.keep_step = self.decay_begins if wsd else plan.steps  # see save_is_due
        self.started = time.monotonic()
        self.saved_step, self.save_is_overdue = -1, False
        self.checkpoints = self.loader = self.noise = None
        if self.options.noise_scale_every:
            from instruments.noise_scale import NoiseScale

            self.noise = NoiseScale(self.options.noise_scale_every)

    def build(self, model_config) -> None:
        """The model and its optimizers: initial values, or those of a checkpoint."""
        config, options, world, plan = self.config, self.options, self.world, self.plan
        self.identity = setup.identity(config, model_config, self.manifest)
        self.model = setup.build_model(model_config, world, plan, config.seed)
        groups, width = self.model.param_groups(), model_config.n_embd
        how = dict(ns_dtype=world.dtype, divide=plan.parallel == "ddp")
        self.optimizers = optim.build(groups, config, width, **how)
        mirror = Path(options.mirror) / self.run_dir.name if options.mirror else None
        self.checkpoints = checkpoint.Checkpointer(
            self.run_dir / "checkpoints",
            keep=options.keep,
            keep_step=self.keep_step,
            mirror=mirror,
            log=self.log.print,
        )
        path = None if options.resume == "auto" else Path(options.resume)
        same_run = lambda path, state: setup.check_same_run(
            path, state["identity"], self.identity, state["step"]
        )
        state = self.checkpoints.resume(self.model, self.optimizers, path, same_run)
        if state:
            self._resume(state)
        elif options.init_from:
            checkpoint.load_model(options.init_from, self.model)
            self.log.print(f"weights from {options.init_from}")

    def _resume(self, state: dict) -> None:
        self.step = self.resumed_at = self.saved_step = state["step"]
        self.skipped = state["skipped"]
        if state.get("eval_tokens") == self.options.eval_tokens:  # else it is of another text
            self.best_bpb = state["best_bpb"]
        same_ranks = state["world_size"] == self.world.world_size
        if self.plan.auto_micro_batch and same_ranks:
            # sums in a different order would not give the same bits
            self.plan = replace(self.plan, micro_batch=state["micro_batch"])
        self.log.print(
            f"resumed at step {self.step:,} ({self.tokens:,} tokens) with micro-batches of "
            f"{self.plan.micro_batch} rows"
        )
        if self.options.init_from:
            self.log.print(f"{self.options.init_from} is not read: the run has its own checkpoint")

    def get_ready(self) -> None:
        """Compile, wrap, open the data: a run that is already finished does not need this.

        `model` is the module itself, which is saved; `step_model` the same weights compiled, under
        DDP if it is used; `val_model` what validation runs."""
        config, world, plan = self.config, self.world, self.plan
        step_model, self.micro_batch = setup.compile_step(self.model, plan, world, self.log)
        # On a CPU, compiling validation costs as much time as it saves in a million tokens.
        self.val_model = step_model if world.device.type == "cuda" else self.model
        compiled = plan.compile and (plan.sharded or step_model is not self.model)
        if compiled and world.device.type == "cuda":  # a CPU would never regain that time
            optim.compile_steps(self.optimizers)
        if plan.parallel == "ddp":
            # Compiled before it is wrapped, the model stays one graph; DDP exchanges the gradients
            # after the whole backward pass.
            step_model = DistributedDataParallel(step_model, gradient_as_bucket_view=True)
            step_model.broadcast_buffers = False  # constants, the same on every rank
        self.step_model = step_model
        self.loader = data.RowLoader(
            self.manifest,
            seed=config.seed,
            micro_batch=self.micro_batch,
            rank=world.rank,
            world_size=world.world_size,
            position=self.position,
            weights=cli.weights(config.mixture),
            decay_weights=cli.weights(config.decay_mixture),
            decay_from=plan.rows_before(self.decay_begins),
            device=world.device,
        )
        full, causal = self.model.flops_per_token(), self.model.flops_per_token(causal=True)
        self.meter = flops.Meter(full, causal, plan.peak, world.world_size)
        self.log.begin(self.step, self.validation_is_due())
        self.saved_at = time.monotonic()  # so that compiling does not count
        gc.collect()
        gc.freeze()  # all of this lives on: the collector need not scan it again and again

    @property
    def position(self) -> int:
        """Rows consumed so far, by all ranks: the loader's whole state."""
        return self.plan.rows_before(self.step)

    @property
    def tokens(self) -> int:
        return self.position * self.plan.seq_len

    @property
    def grad_accum(self) -> int:
        """Micro-batches of the coming step on this rank."""
        return self.plan.rows_in_step(self.step) // (self.micro_batch * self.world.world_size)

    # ------------------------------------------------------------------ one step

    def set_schedule(self) -> None:
        """Learning rate, momentum and weight decay of this step."""
        self.lr_factor = optim.set_schedule(
            self.optimizers, self.step, self.plan.steps, self.config
        )

    def accumulate(self) -> dict[str, Tensor]:
        """Forward and backward over the rows of the step; returns this rank's mean loss in nats
        per token, and the bytes of text in its targets."""
        grad_accum, world_size, position = self.grad_accum, self.world.world_size, self.position
        loss_sum, n_bytes = torch.zeros(2, device=self.world.device)
        for k in range(grad_accum):
            with record_function("data"):
                inputs, targets = self.loader.next_batch()  # (B, T) each
            # Dropout, if there is any, draws by position: a resumed run draws the same.
            first_row = position + (k * world_size + self.world.rank) * self.micro_batch
            torch.manual_seed(data.mix64(data.mix64(self.config.seed) ^ first_row))
            with self._exchange_gradients(last=k == grad_accum - 1):
                loss = self.step_model(inputs, targets) / grad_accum
                loss.backward()
            loss_sum += loss.detach()
            n_bytes += self.token_bytes[targets].sum()
            if k == 0 and self.noise:
                averaged = self.plan.sharded or grad_accum == 1  # over the ranks, already
                rows = self.micro_batch * (world_size if averaged else 1)
                self.noise.first(self.step, self._grad_norm() * grad_accum, rows)
        return {"loss": loss_sum, "bytes": n_bytes}

    def _exchange_gradients(self, last: bool):
        """DDP exchanges gradients once a step, with the last micro-batch; FSDP every time, as it
        has no room for whole gradients."""
        if isinstance(self.step_model, DistributedDataParallel) and not last:
            return self.step_model.no_sync()
        return contextlib.nullcontext()

    def guard(self, numbers: dict[str, Tensor]) -> None:
        """Keep non-finite numbers out of the weights and give all ranks the same numbers, with one
        all-reduce and without waiting for the device."""
        norm = self._grad_norm()
        if self.config.grad_clip:
            scale = (self.config.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            for p in self.model.parameters():
                p.grad.mul_(scale)
        minutes = (time.monotonic() - self.saved_at) / 60
        is_overdue = self.world.is_first and 0 < self.options.save_minutes < minutes
        sigint, sigterm = self.signal == signal.SIGINT, self.signal == signal.SIGTERM
        flags = {"sigint": sigint, "sigterm": sigterm, "overdue": is_overdue}
        numbers["bad"] = (~(numbers["loss"].isfinite() & norm.isfinite())).float()
        for name, flag in flags.items():
            numbers[name] = torch.full_like(norm, float(flag))  # a fill: no copy to wait for
        sums = torch.stack([numbers[name] for name in NUMBERS])
        if self.world.world_size > 1:
            with record_function("communication"):
                dist.all_reduce(sums)
        bad = (sums[NUMBERS.index("bad")] > 0).float()
        # If skipping is not allowed, the flag stays up: the host notices one step late, and the
        # next step must not change the weights before that.
        self.found_inf = bad if self.options.skip_nonfinite else torch.maximum(self.found_inf, bad)
        for optimizer in self.optimizers:
            optimizer.found_inf = self.found_inf
        self.sums = torch.cat([sums, norm.reshape(1)])  # the norm is that of all ranks already

    def take_step(self) -> None:
        """Move the weights; then read the numbers of the step before."""
        with record_function("optimizer"):
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)
        rows = self.plan.rows_in_step(self.step)
        note = dict(step=self.step + 1, first_row=self.position, rows=rows, lr=self.lr_factor)
        if self.noise and self.noise.is_due(self.step):
            note["noise_scale"] = self.noise.whole(self.sums[-1], rows, self.plan.seq_len)
        self.step += 1
        self.drain()
        self.late.send(self.sums, note)
        if self.world.device.type == "cpu":
            self.drain()  # nothing runs behind the host: the step is complete

    def drain(self) -> None:
        """Read the step whose numbers are still on their way."""
        if arrived := self.late.read():
            ranks.expect_answers()
            self._log_step(*arrived)

    def _log_step(self, note: dict, numbers: dict[str, float]) -> None:
        """Numbers of a finished step: stop on bad ones, write the rest down."""
        tokens = note["rows"] * self.plan.seq_len
        loss = numbers["loss"] / self.world.world_size
        step_s = self.meter.step(tokens, data_wait_s=self.loader.pop_wait_s())
        asked = [s for s in (signal.SIGINT, signal.SIGTERM) if numbers[s.name.lower()]]
        self.stop = asked[0] if asked else 0
        self.save_is_overdue = bool(numbers["overdue"])
        record = dict(step=note["step"], tokens=note["first_row"] * self.plan.seq_len + tokens)
        if numbers["bad"]:
            diary.refuse_step(self, note, loss, numbers["norm"])
            self.log.write(record | dict(skipped=self.skipped))
            return
        bpb = loss * tokens / math.log(2) / max(numbers["bytes"], 1)
        record |= dict(loss=loss, bpb=bpb, lr=note["lr"], norm=numbers["norm"])
        record |= dict(time=time.time(), step_s=step_s) | self.meter.summary()
        if "noise_scale" in note:
            record["noise_scale_tokens"] = note["noise_scale"]
        self.log.write(record)
        if note["step"] in (1, self.plan.steps) or _is_due(note["step"], self.options.log_every):
            self.log.print(step_line(record, self.plan.steps, self._time_left_s()))

    def _grad_norm(self) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _time_left_s(self) -> float:
        every = self.options.eval_every
        evals = math.ceil(self.plan.steps / every) - self.step // every if every else 1
        tokens_left = (self.plan.rows - self.position) * self.plan.seq_len
        return self.meter.eta_s(tokens_left, eval=evals, save=1)

    # ------------------------------------------------------------------ now and then

    def validation_is_due(self) -> bool:
        """At the start too: a validation that fails should fail in the first minute."""
        return self.step in (0, self.plan.steps) or _is_due(self.step, self.options.eval_every)

    def evaluate(self) -> None:
        """Bits per byte on the validation rows; the best so far is saved and kept."""
        self.drain()
        world, rows = self.world, self.micro_batch
        max_rows = min(self.options.eval_tokens // self.plan.seq_len, self.manifest.rows("val"))
        max_rows = max(1, max_rows // world.world_size) * world.world_size  # as many on each rank
        batches = data.val_batches(
            self.manifest, rows, max_rows, world.rank, world.world_size, world.device
        )
        with self.meter.paused("eval"):
            loss, bpb = bits_per_byte(self.val_model, batches, self.token_bytes, rows)
        epochs = self.loader.order.epochs(self.position)  # so far, by source
        epochs = {name: round(n, 4) for name, n in zip(self.manifest.sources, epochs)}
        record = dict(step=self.step, tokens=self.tokens, val_loss=loss, val_bpb=bpb)
        self.log.write(record | dict(epochs=epochs))
        is_best = bpb < self.best_bpb
        read = ", ".join(f"{name} {n:.2f}" for name, n in epochs.items())
        self.log.print(
            f"step {self.step:,} | validation {loss:.4f} nats/token, {bpb:.4f} bpb"
            f"{' (best)' if is_best else ''} | epochs {read}"
        )
        if is_best:
            self.best_bpb = bpb
            if self.step:
                if self.saved_step != self.step:
                    self.save()
                self.checkpoints.mark_best(self.step)

    def save_is_due(self) -> bool:
        """By steps, by the first rank's clock, at the end, and where the learning rate begins to
        fall: from there, a run can become longer."""
        by_steps = _is_due(self.step, self.options.save_every)
        return by_steps or self.save_is_overdue or self.step in (self.keep_step, self.plan.steps)

    def save(self, wait: bool = False) -> None:
        self.drain()
        state = dict(
            step=self.step,
            best_bpb=self.best_bpb,
            eval_tokens=self.options.eval_tokens,
            skipped=self.skipped,
            micro_batch=self.micro_batch,
            tokens=self.tokens,  # for people: computed from step
            identity=self.identity,
            model=asdict(self.model.config),
            data_dir=self.options.data_dir,  # not the copy of --stage
        )
        with self.meter.paused("save"):
            self.checkpoints.save(self.step, self.model, self.optimizers, state, wait=wait)
        self.saved_at, self.saved_step, self.save_is_overdue = time.monotonic(), self.step, False


def train(run: Trainer) -> int:
    """Schedule, accumulate, guard, step, save, evaluate; until the last step or a signal."""
    if run.validation_is_due():
        run.evaluate()  # perhaps again: a kill can come between a save and its validation
    run.meter.start()
    while run.step < run.plan.steps and not run.stop:
        run.set_schedule()
        numbers = run.accumulate()
        run.guard(numbers)
        run.take_step()
        if run.save_is_due():
            run.save()  # before the validation: a kill there costs nothing
        if run.validation_is_due():
            run.evaluate()
    return finish(run)


def finish(run: Trainer) -> int:
    """The last checkpoint, the report, and the next command to type. Returns the exit code."""
    run.drain()
    if run.saved_step != run.step:
        run.save(wait=True)
    run.checkpoints.close()
    code = 128 + run.stop if run.stop else 0
    run.log.status("preempted" if run.stop else "done", step=run.step, exit_code=code)
    page = run.log.report()
    if run.stop:
        name = signal.Signals(run.stop).name
        run.log.print(f"stopped by {name} after step {run.step:,}; the same command resumes")
        return code
    seconds = time.monotonic() - run.started
    dollars = seconds / 3600 * run.options.usd_per_hour
    cost = f" (${dollars:.2f})" if run.world.device.type == "cuda" else ""
    since = f" since step {run.resumed_at:,}" if run.resumed_at else ""
    lines = [
        f"done: {run.step:,} steps, {run.tokens:,} tokens, {diary.duration(seconds)}{cost}{since}",
        f"checkpoint  {run.run_dir / 'checkpoints' / f'step_{run.step:08d}'}",
        f"metrics     {run.log.file}",
        page,
        f"next        python eval.py sample --run_dir {run.run_dir}",
    ]
    run.log.print("\n".join(lines))
    return 0


def step_line(r: dict, steps: int, left_s: float) -> str:
    """One step of `steps`, from its record in metrics.jsonl, for the screen:

    step 120/2,000 | loss 3.4120 | bpb 1.052 | lr 0.810 | |g| 0.930 | 512 ms | 1.02M tok/s | ...

    ms and tok/s are medians over the last steps, `data` a mean (see flops.Meter); bpb is the loss
    over the bytes of the step's own text (only validation leaves the special tokens out)."""
    if r["mfu_full"] is None:
        used = f"mfu n/a, {r['tflops_full']:.2f}/{r['tflops_causal']:.2f} TFLOP/s full/causal"
    else:
        used = f"mfu {r['mfu_full']:.1%} full {r['mfu_causal']:.1%} causal"
    noise = ""
    if "noise_scale_tokens" in r:
        scale = r["noise_scale_tokens"]
        noise = f" | noise scale {'n/a' if scale is None else f'{max(scale, 0):,.0f} tokens'}"
    return (
        f"step {r['step']:,}/{steps:,} | loss {r['loss']:.4f} | bpb {r['bpb']:.3f} | "
        f"lr {r['lr']:.3f} | |g| {r['norm']:.3f} | {r['dt_ms']:.0f} ms | "
        f"{diary.short(r['tokens_per_s'])} tok/s | {used} | "
        f"data {r['data_wait_ms']:.1f} ms | {diary.duration(left_s)} left{noise}"
    )


def _is_due(step: int, every: int) -> bool:
    """Every so many steps; 0: never."""
    return every > 0 and step % every == 0


def main(argv: list[str]) -> int:
    preset = cli.parse("train.py", "train", argv)
    world = ranks.start(preset.run.device, preset.train.dtype)
    if preset.run.plan:
        from instruments import forecast

        if world.is_first:
            print(forecast.page(preset, world))
        return 0
    manifest, model_config = setup.open_data(preset, world)
    plan = make_plan(preset, model_config, world, manifest)
    preset = replace(preset, train=replace(preset.train, steps=plan.steps, tokens=""))
    claim = setup.claim_run_dir(preset, model_config, manifest, world)
    log = diary.Log(Path(preset.run.run_dir), world.is_first, wandb=preset.run.wandb)
    log.print(plan.text + setup.decided_by_data(preset.model, model_config))
    run = Trainer(preset, world, plan, manifest, log)
    with claim, diary.outcome(run, argv):
        run.build(model_config)
        ranks.listen_to_signals(run)
        if run.step >= plan.steps and diary.is_done(run.run_dir):
            log.print(
                f"{run.run_dir} is finished ({run.step:,} steps); nothing to do. Sample from it: "
                f"python eval.py sample --run_dir {run.run_dir}"
            )
            return 0
        run.get_ready()
        if preset.run.profile:
            from instruments import profiler

            return profiler.run(run)
        return train(run)


if __name__ == "__main__":
    cli.run(main)
