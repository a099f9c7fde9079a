"""What a run did: metrics.jsonl, status.json, loss.png, the numbers of a step, how it ended.

Writes into the run's folder. `metrics.jsonl` (one JSON object per step or validation) is the truth:
everything else can be drawn from it. wandb is fed by a process of its own that follows this file,
so it can neither ask, nor wait, nor stop a run. Next: train.py writes it, instruments/to_wandb.py
follows it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from machinery import checkpoint, cli, durable
from machinery.errors import NonFiniteError

WANDB_GRACE_S = 10.0  # that a finished run waits for wandb


class LateNumbers:
    """The numbers of one step on their way from the device to the host, which does not wait."""

    def __init__(self, names: tuple[str, ...]):
        """names: of the numbers, in the order in which `send` gets them."""
        self.names = names
        self._pending: tuple | None = None

    def send(self, numbers: Tensor, note: dict) -> None:
        """Start copying numbers (len(names),); `note` travels along."""
        on_gpu = numbers.device.type == "cuda"
        host = torch.empty(len(self.names), pin_memory=on_gpu)
        host.copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event() if on_gpu else None
        if copied:
            copied.record()
        self._pending = (note, host, copied)

    def read(self) -> tuple[dict, dict[str, float]] | None:
        """(note, numbers by name) once they have arrived; None if none are on their way."""
        if self._pending is None:
            return None
        (note, host, copied), self._pending = self._pending, None
        if copied:
            copied.synchronize()
        return note, dict(zip(self.names, host.tolist()))


class Log:
    """The run's diary. On ranks other than the first, every method does nothing."""

    def __init__(self, run_dir: Path, is_first: bool, wandb: bool = False):
        """wandb: start the process that follows metrics.jsonl, in `begin`."""
        self.run_dir, self.is_first, self._wants_wandb = run_dir, is_first, wandb
        self.file = run_dir / "metrics.jsonl"
        self._wandb: subprocess.Popen | None = None

    def print(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def write(self, record: dict) -> None:
        """Append one line to metrics.jsonl."""
        if not self.is_first:
            return
        with open(self.file, "a") as file:
            file.write(json.dumps(record) + "\n")

    def begin(self, step: int, validated_again: bool = False) -> None:
        """Training begins after `step`: drop the lines that a resumed run writes again, say so in
        status.json, let wandb follow."""
        if not self.is_first:
            return
        if self.file.exists():
            keep = [
                r
                for r in read_jsonl(self.file)
                if r["step"] < step
                or (r["step"] == step and not (validated_again and "val_bpb" in r))
            ]
            durable.write_text(self.file, "".join(json.dumps(r) + "\n" for r in keep))
        self.status("running", from_step=step, process=os.getpid())
        if self._wants_wandb:
            program = Path(__file__).parent.parent / "instruments" / "to_wandb.py"
            self._wandb = subprocess.Popen([sys.executable, program, self.run_dir, "--follow"])

    def status(self, state: str, **facts) -> None:
        """Replace status.json: what a scheduler, or a person, wants to know of a run that ended."""
        if self.is_first:
            text = json.dumps({"state": state, **facts}, indent=1) + "\n"
            durable.write_text(self.run_dir / "status.json", text)

    def plot(self) -> Path | None:
        """Draw loss.png; None if matplotlib is not installed or nothing was logged."""
        return plot_loss(self.file, self.run_dir / "loss.png") if self.is_first else None

    def close(self) -> None:
        """Give wandb a moment to catch up."""
        if self._wandb:
            try:
                self._wandb.wait(WANDB_GRACE_S)
            except subprocess.TimeoutExpired:
                self._wandb.kill()
                print(
                    f"wandb is behind or does not answer; {self.file} has everything, and python "
                    f"instruments/to_wandb.py {self.run_dir} sends it again",
                    flush=True,
                )


@contextmanager
def outcome(run, argv: list[str]) -> Iterator[None]:
    """Around a whole run: write to status.json why it failed, and close what it holds. Out of
    memory becomes a ValueError with the command that resumes in smaller micro-batches."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        run.log.status("failed", step=run.step, error="out of memory", exit_code=2)
        # the last of two equal options wins, so the command can simply be made longer
        micro_batch = getattr(run, "micro_batch", run.plan.micro_batch)
        smaller = run.plan.smaller_micro_batch(micro_batch)
        ranks_here = os.environ.get("LOCAL_WORLD_SIZE", 1)
        several = run.world.world_size > 1
        launcher = f"torchrun --nproc_per_node={ranks_here}" if several else "python"
        raise ValueError(
            f"out of memory at step {run.step:,} ({str(error).splitlines()[0]}); resume with: "
            f"{launcher} train.py {shlex.join(argv)} --micro_batch {smaller}"
        ) from None
    except Exception as error:
        code = cli.exit_code(error)
        run.log.status("failed", step=run.step, error=str(error)[:1000], exit_code=code)
        raise
    finally:  # whatever happened: let a save in flight end, stop the threads
        if run.checkpoints:
            run.checkpoints.join()
        if run.loader:
            run.loader.close()
        run.log.close()


def refuse_step(run, note: dict, loss: float, norm: float) -> None:
    """A step with non-finite numbers did not happen: skip it, or raise NonFiniteError."""
    rows = run.loader.row_ids(note["first_row"], note["rows"])
    named = ", ".join(rows[:4]) + (f", ... ({len(rows)} rows)" if len(rows) > 4 else "")
    text = (
        f"step {note['step']}: loss {loss}, gradient norm {norm}; its weights were not changed; "
        f"rows: {named}"
    )
    run.skipped += 1
    allowed = run.options.skip_nonfinite
    if run.skipped > allowed:
        run.checkpoints.join()  # the newest may be on its way
        newest = checkpoint.latest_valid(run.run_dir / "checkpoints", log=run.log.print)
        raise NonFiniteError(
            f"{text}. Last good checkpoint: {newest}; try a smaller learning rate, or "
            f"--skip_nonfinite {allowed + 10}"
        )
    run.log.print(f"warning: {text}; skipped ({run.skipped} so far)")


def short(x: float) -> str:
    """1_020_000 -> 1.02M"""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if x >= size:
            return f"{x / size:.3g}{unit}"
    return f"{x:.0f}"


def duration(seconds: float) -> str:
    """3725 -> 1h02m; 95 -> 1m35s"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"


def is_done(run_dir: Path) -> bool:
    """Whether status.json says that the run came to its end, last validation and picture."""
    path = run_dir / "status.json"
    return path.exists() and json.loads(path.read_text())["state"] == "done"


def read_jsonl(path: Path) -> list[dict]:
    """The records of metrics.jsonl; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def plot_loss(jsonl: Path, image: Path) -> Path | None:
    """Training loss (smoothed) over tokens on the left, validation bits per byte on the right."""
    try:
        from matplotlib.figure import Figure  # no pyplot: works without a display
    except ImportError:
        return None
    records = read_jsonl(jsonl) if jsonl.exists() else []
    train = [(r["tokens"], r["loss"]) for r in records if "loss" in r]
    val = [(r["tokens"], r["val_bpb"]) for r in records if "val_bpb" in r]
    if not train and not val:
        return None
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    if train:
        tokens, losses = zip(*train, strict=True)
        smooth, total, weight = [], 0.0, 0.0  # a decaying mean, over what there is so far
        for loss in losses:
            total, weight = 0.95 * total + loss, 0.95 * weight + 1
            smooth.append(total / weight)
        left.plot(tokens, losses, color="0.8", linewidth=0.6)
        left.plot(tokens, smooth, linewidth=1.5)
    left.set(xlabel="training tokens", ylabel="training loss, nats per token", ylim=(0, None))
    if val:
        right.plot(*zip(*val, strict=True), marker="o", markersize=3)
        right.annotate(f"{val[-1][1]:.3f}", val[-1], xytext=(-4, 8), textcoords="offset points",
                       ha="right")  # fmt: skip
    right.set(xlabel="training tokens", ylabel="validation, bits per byte")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(image, dpi=120)
    return image
