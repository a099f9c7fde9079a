"""What a run did: metrics.jsonl, starts.jsonl, status.json, the numbers of a step, how it ended.

Writes into the run's folder. `metrics.jsonl` has one JSON object per step or validation,
`starts.jsonl` one per start. A process of its own feeds wandb, so wandb can neither delay nor
stop a run. Next: train.py writes it, instruments/to_wandb.py follows it, instruments/report.py
draws loss.png and makes a page of it.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from machinery import checkpoint, cli, durable, errors
from machinery.errors import NonFiniteError


class LateNumbers:
    """Copies the numbers of one step to the host, which launches the next step meanwhile."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names
        self._pending: tuple | None = None

    def send(self, numbers: Tensor, note: dict) -> None:
        """Start to copy `numbers` (len(names),); `read` returns them, and `note`."""
        on_cuda = numbers.device.type == "cuda"
        host = torch.empty(len(self.names), pin_memory=on_cuda)
        host.copy_(numbers, non_blocking=on_cuda)
        copied = torch.cuda.current_stream().record_event() if on_cuda else None
        self._pending = (note, host, copied)

    def read(self) -> tuple[dict, dict[str, float]] | None:
        """Wait for the copy; returns (note, numbers by name), or None if nothing was sent."""
        if self._pending is None:
            return None
        (note, host, copied), self._pending = self._pending, None
        if copied:
            copied.synchronize()
        return note, dict(zip(self.names, host.tolist()))


class Log:
    """The files and the printed lines of a run; silent on all ranks but the first. wandb: `begin`
    starts a process that sends metrics.jsonl there."""

    def __init__(self, run_dir: Path, is_first: bool, wandb: bool = False):
        self.run_dir, self.is_first, self._wants_wandb = run_dir, is_first, wandb
        self.file = run_dir / "metrics.jsonl"
        self._wandb: subprocess.Popen | None = None
        self._start: dict = {}
        self._waiting: list[str] = []  # lines that a full disk did not take

    def print(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def write(self, record: dict) -> None:
        """Append one line to metrics.jsonl, and those before it that a full disk did not take."""
        if not self.is_first:
            return
        self._waiting.append(json.dumps(record) + "\n")
        self._flush()

    def _flush(self) -> None:
        """Append the waiting lines; if that fails, they wait for the next call."""
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with open(self.file, "a") as file:
                file.writelines(self._waiting)
            self._waiting = []
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.file, size)  # no half of a line stays
            if len(self._waiting) == 1:
                self.print(f"warning: {self.file}: {error.strerror}; its lines wait in memory")

    def start(self, argv: list[str], world, options) -> None:
        """Remember for `begin` where this process runs, and by which command."""
        self._start = dict(time=time.time(), command=shlex.join(["train.py", *argv]))
        self._start |= dict(device=world.device_name, on_gpu=world.device.type == "cuda")
        self._start |= dict(world_size=world.world_size, usd_per_hour=options.usd_per_hour)
        self._start |= dict(data_dir=options.data_dir)
        self._start |= dict(init_from=options.init_from, eval_tokens=options.eval_tokens)

    def report(self) -> str:
        """Write loss.png and report.html; returns the line to print. An error goes into that line
        too, since the run itself is complete."""
        if not self.is_first:
            return ""
        try:
            from instruments import report

            return f"report      {report.write(self.run_dir)}, and loss.png beside it"
        except Exception as error:
            return f"report      none: {type(error).__name__}: {error}"

    def begin(self, step: int, validates: bool = False) -> None:
        """Training begins after `step`; it `validates` first, or not. Append to starts.jsonl where
        this process runs and how far the one before it came. Drop the lines and samples that a
        resumed run will write again, update status.json, start wandb's process."""
        if not self.is_first:
            return
        records = read_jsonl(self.file)
        if steps := [r for r in records if "loss" in r]:
            self._start |= dict(last_step=steps[-1]["step"], last_time=steps[-1]["time"])
        starts = self.run_dir / "starts.jsonl"
        lines = [json.dumps(r) + "\n" for r in [*read_jsonl(starts), self._start]]
        durable.write_text(starts, "".join(lines))
        done = lambda r: step - 1 if validates and "val_bpb" in r else step
        keep = [json.dumps(r) + "\n" for r in records if r["step"] <= done(r)]
        durable.write_text(self.file, "".join(keep))
        samples = self.run_dir / "samples.jsonl"
        if records := read_jsonl(samples):
            keep = [json.dumps(r) + "\n" for r in records if r["step"] <= step]
            durable.write_text(samples, "".join(keep))
        self.status("running", from_step=step, process=os.getpid())
        if self._wants_wandb:
            program = cli.ROOT / "instruments" / "to_wandb.py"
            self._wandb = subprocess.Popen([sys.executable, program, self.run_dir, "--follow"])

    def status(self, state: str, **facts) -> None:
        """Replace status.json, which tells a scheduler or a person how the run is or ended."""
        if self.is_first:
            durable.write_json(self.run_dir / "status.json", {"state": state, **facts})

    def failed(self, step: int, error: str, code: int) -> None:
        with suppress(OSError):  # a full disk must not hide the error
            if not is_done(self.run_dir):  # a finished run stays done: the new command was wrong
                self.status("failed", step=step, error=error, exit_code=code)

    def close(self) -> None:
        """Write the lines that still wait. Wait 10 s for wandb's process, then end it."""
        if self._waiting:
            self._flush()
        if self._waiting:
            self.print(f"warning: {self.file}: its last {len(self._waiting)} lines are lost")
        if self._wandb:
            try:
                self._wandb.wait(10)
            except subprocess.TimeoutExpired:
                self._wandb.kill()
                self.print(
                    f"wandb is behind or does not answer; {self.file} has everything, and python "
                    f"instruments/to_wandb.py {self.run_dir} sends it again"
                )


@contextmanager
def outcome(run, argv: list[str]) -> Iterator[None]:
    """Around a whole run: write to status.json why it failed, and close what it holds. Out of
    memory becomes a ValueError with the command that resumes in smaller micro-batches."""
    try:
        run.log.start(argv, run.world, run.options)
        yield
    except KeyboardInterrupt:
        run.log.failed(run.step, "interrupted twice", 130)
        raise
    except Exception as error:
        if not (isinstance(error, RuntimeError) and errors.is_out_of_memory(error)):
            run.log.failed(run.step, str(error)[:1000], cli.exit_code(error))
            raise
        run.log.failed(run.step, "out of memory", 2)
        world, micro_batch = run.world, getattr(run, "micro_batch", run.plan.micro_batch)
        torchrun = f"torchrun --nproc_per_node={world.local_world_size}"
        program = torchrun if world.world_size > 1 else "python"
        if micro_batch == 1:
            raise ValueError(
                f"out of memory at step {run.step:,} with micro-batches of one row; try "
                "--parallel fsdp on several GPUs, or a smaller preset"
            ) from None
        # The last of two equal options wins, so one more at the end is enough.
        raise ValueError(
            f"out of memory at step {run.step:,} ({str(error).splitlines()[0]}); resume with: "
            f"{program} train.py {shlex.join(argv)} "
            f"--micro_batch {run.plan.smaller_micro_batch(micro_batch)}"
        ) from None
    finally:  # a save in flight ends first
        if run.checkpoints:
            run.checkpoints.join()
        if run.loader:
            run.loader.close()
        run.log.close()


def refuse_step(run, note: dict, loss: float, norm: float) -> None:
    """Count a step with non-finite numbers, which changed no weights, as skipped. NonFiniteError
    if that is one more than allowed."""
    rows = run.loader.row_ids(note["first_row"], note["rows"])
    named = ", ".join(rows[:4]) + (f", ... ({len(rows)} rows)" if len(rows) > 4 else "")
    numbers = f"loss {loss}, gradient norm {norm}; its weights were not changed"
    text = f"step {note['step']}: {numbers}; rows: {named}"
    run.skipped += 1
    allowed = run.options.skip_nonfinite
    if run.skipped > allowed:
        run.checkpoints.join()  # the newest checkpoint may not be published yet
        newest = checkpoint.latest_valid(run.run_dir / "checkpoints", log=run.log.print)
        other = "TORCH_CUDNN_SDPA_DEPRIORITIZED=1 (another attention), "
        raise NonFiniteError(
            f"{text}. Last good checkpoint: {newest}; try a smaller learning rate, "
            f"{other * (run.world.device.type == 'cuda')}or --skip_nonfinite {allowed + 10}"
        )
    run.log.print(f"warning: {text}; skipped ({run.skipped} so far)")


def short(x: float) -> str:
    """1_020_000 -> 1.02M"""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if x >= 0.9995 * size:  # 999,600 is 1M, not 1000K
            return f"{x / size:.3g}{unit}"
    return f"{x:.0f}"


def duration(seconds: float) -> str:
    """3725 -> 1h02m; 95 -> 1m35s"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"


def is_done(run_dir: Path) -> bool:
    """Whether status.json says `done`: all steps, the last validation and the last checkpoint."""
    path = run_dir / "status.json"
    return path.exists() and json.loads(path.read_text())["state"] == "done"


def read_jsonl(path: Path) -> list[dict]:
    """The records of a .jsonl file, skipping lines that are not JSON (a kill may cut one short); []
    if there is no such file."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records
