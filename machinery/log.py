"""What a run did: metrics.jsonl, status.json, and the numbers of a step.

Writes into the run's folder. `metrics.jsonl` has one JSON object per step, validation or start;
status.json says how the run is or ended. A program of its own may follow metrics.jsonl (train.py
names it), and can neither delay nor stop a run. Next: train.py.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from machinery import cli, disk
from machinery.errors import DataError


class StepNumbers:
    """The numbers of one step, on their way from the device to the host."""

    def __init__(self, facts: dict, numbers: dict[str, Tensor]):
        """Start to copy `numbers`, () each; `facts` are known to the host already."""
        values = torch.stack(list(numbers.values()))
        on_cuda = values.device.type == "cuda"
        self._facts, self._names = facts, list(numbers)
        self._host = torch.empty(len(values), pin_memory=on_cuda)
        self._host.copy_(values, non_blocking=on_cuda)
        self._copied = torch.cuda.current_stream().record_event() if on_cuda else None

    def read(self) -> dict:
        """Wait for the copy; returns facts and numbers by name."""
        if self._copied:
            self._copied.synchronize()
        return self._facts | dict(zip(self._names, self._host.tolist()))


class Log:
    """The files and the printed lines of a run; silent on all ranks but the first. follower: a
    Python program and its arguments, which `begin` starts to send metrics.jsonl elsewhere."""

    def __init__(self, run_dir: Path, is_first: bool, follower: tuple[str, ...] = ()):
        self.run_dir, self.is_first, self.follower = run_dir, is_first, follower
        self.file = run_dir / "metrics.jsonl"
        self._process: subprocess.Popen | None = None
        self._waiting: list[str] = []  # lines that a full disk did not take
        self._status, self._noted, self._writing = {}, {}, threading.Lock()

    def print(self, text: str) -> None:
        if not self.is_first:
            return
        try:
            print(cli.public(text), flush=True)
        except OSError:  # the terminal, or what read this, is gone: that does not end a run
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def write(self, record: dict) -> None:
        """Append one line to metrics.jsonl, and those before it that a full disk did not take."""
        if self.is_first:
            self._waiting.append(line_of(record))
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

    def begin(self, step: int, validates: bool, start: dict) -> None:
        """Training begins after `step`; it `validates` first, or not. Drop the lines and samples
        that a resumed run will write again, append `start` with how far the process before it came,
        update status.json, start the follower."""
        if not self.is_first:
            return
        samples = self.run_dir / "samples.jsonl"
        for file in (self.file, samples):
            disk.make_way(file)
        records = read_jsonl(self.file)
        if steps := [r for r in records if "loss" in r]:
            start = start | dict(last_step=steps[-1]["step"], last_time=steps[-1].get("time"))

        def is_done(r: dict) -> bool:
            scored_again = validates and "val_bpb" in r or "full_val_bpb" in r
            return "start" in r or r["step"] < step or r["step"] == step and not scored_again

        _write_jsonl(self.file, [*filter(is_done, records), {"start": start}])
        if samples.exists():
            _write_jsonl(samples, [r for r in read_jsonl(samples) if r["step"] <= step])
        self.status("running", from_step=step, process=os.getpid())
        if self.follower:
            self._process = subprocess.Popen([sys.executable, *self.follower])

    def status(self, state: str, **facts) -> None:
        """Replace status.json, which tells a scheduler or a person how the run is or ended."""
        self._status = {"state": state, **facts}
        self.note()

    def note(self, **facts) -> None:
        """Add facts to status.json that stay whatever the state; any thread may."""
        if not self.is_first:
            return
        with self._writing:
            self._noted |= facts
            if self._status:
                disk.write_json(self.run_dir / "status.json", self._status | self._noted)

    @contextmanager
    def outcome(self, progress) -> Iterator[None]:
        """Around a whole run: write to status.json why it failed, and at which progress.step."""
        try:
            yield
        except KeyboardInterrupt:
            self.failed(progress.step, "interrupted", 130)
            raise
        except Exception as error:
            self.failed(progress.step, str(error)[:1000], cli.exit_code(error))
            raise
        finally:
            self.close()

    def failed(self, step: int, error: str, code: int) -> None:
        with suppress(OSError):  # a full disk must not hide the error
            if not is_done(self.run_dir):  # a finished run stays done: the new command was wrong
                self.status("failed", step=step, error=cli.public(error), exit_code=code)

    def close(self) -> None:
        """Write the lines that still wait. Wait 10 s for the follower, then end it."""
        if self._waiting:
            self._flush()
        if self._waiting:
            self.print(f"warning: {self.file}: its last {len(self._waiting)} lines are lost")
        if self._process:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                again = shlex.join(self.follower[:-1])
                self.print(
                    f"{Path(self.follower[0]).stem} is behind or does not answer; {self.file} has "
                    f"everything, and python {again} sends it again"
                )


def step_line(r: dict, steps: int, left_s: float, more: dict[str, float]) -> str:
    """A step's record, and more numbers by name -> the line on the screen."""
    if r["mfu_full"] is None:
        used = f"mfu n/a, {r['tflops_full']:.2f}/{r['tflops_causal']:.2f} TFLOP/s full/causal"
    else:
        used = f"mfu {r['mfu_full']:.1%} full {r['mfu_causal']:.1%} causal"
    others = "".join(f" | {name} {value:g}" for name, value in more.items())
    if "noise_scale_tokens" in r:
        scale = r["noise_scale_tokens"]
        known = "n/a" if scale is None else f"{max(scale, 0):,.0f} tokens"
        others += f" | noise scale {known}"
    return (
        f"step {r['step']:,}/{steps:,} | loss {r['loss']:.4f} | bpb {r['bpb']:.3f} | "
        f"lr {r['lr']:.3f} | |g| {r['norm']:.3f} | {r['dt_ms']:.0f} ms | "
        f"{short(r['tokens_per_s'])} tok/s | {used} | "
        f"data {r['data_wait_ms']:.1f} ms | {duration(left_s)} left{others}"
    )


def sources_line(bpb: dict[str, float]) -> str:
    """{"web": 1.1, "code": 0.9} -> ' (web 1.1000, code 0.9000)'; of one source, ''."""
    return f" ({', '.join(f'{k} {v:.4f}' for k, v in bpb.items())})" if len(bpb) > 1 else ""


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


def start_of(argv: list[str], preset, world) -> dict:
    """What metrics.jsonl says of this process: where it runs, and by which command."""
    options = ("usd_per_hour", "data_dir", "init_from", "eval_tokens")
    return dict(
        time=time.time(),
        command=shlex.join(["train.py", *argv]),
        device=world.device_name,
        on_gpu=world.device.type == "cuda",
        world_size=world.world_size,
        **{name: getattr(preset.run, name) for name in options},
    )


def is_done(run_dir: Path) -> bool:
    """Whether status.json says `done`: all steps, the last validation and the last checkpoint."""
    with suppress(DataError):  # none there, or damaged
        return disk.read_json(run_dir / "status.json").get("state") == "done"
    return False


def is_step_or_start(line: dict) -> bool:
    return isinstance(line.get("step"), int) or isinstance(line.get("start"), dict)


def read_jsonl(path: Path, is_record: Callable[[dict], bool] = is_step_or_start) -> list[dict]:
    """The records of a .jsonl file; [] if there is none. Lines that are no records are counted and
    left out: a kill may cut one short, a disk may spoil one."""
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        print(f"warning: {path} cannot be read ({error.strerror})")
        return []
    records = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and is_record(record):
                records.append(record)
    if skipped := len(lines) - len(records):
        print(f"warning: {path}: {skipped} of {len(lines)} lines are damaged and left out")
    return records


def line_of(record: dict) -> str:
    """A line of a .jsonl file, without secrets. JSON has no NaN and no infinity: they become
    null."""

    def clean(x):
        if isinstance(x, dict):
            return {key: clean(value) for key, value in x.items()}
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return cli.public(json.dumps(clean(record))) + "\n"


def _write_jsonl(path: Path, records: list[dict]) -> None:
    disk.write_text(path, "".join(map(line_of, records)))
