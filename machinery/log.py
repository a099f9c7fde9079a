"""What a run records: metrics.jsonl, status.json and, if instruments/ is there, its report.

`metrics.jsonl` has one JSON object per step, validation or start; status.json says whether the run
goes on, or how it ended. With --wandb, Weights & Biases gets the same objects; it can neither
stop a run nor delay its start and its end by more than WANDB_S each. Next: screen.py.
"""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from config import UsageError
from machinery import cli, code, disk, formats, ranks
from machinery.errors import DataError, reason_of
from machinery.formats import Stamp, Start, StartLine, Status
from machinery.output import json_of, public, say, tree_of

WANDB_S = 30.0  # how long it waits for its server, at the start and at the end of a run


class Log:
    """The files and the printed lines of a run; silent on all ranks but the first."""

    def __init__(self, run_dir: Path, is_first: bool, wandb: bool = False):
        self.run_dir = run_dir
        self.is_first = is_first
        self.wants_wandb = wandb
        self.file = run_dir / "metrics.jsonl"
        self.wandb = None
        self.printed_at = 0.0

    def print(self, text: str) -> None:
        if not self.is_first:
            return
        self.printed_at = time.monotonic()
        try:
            say(text, flush=True)
        except OSError:  # the terminal or the reader of a pipe is gone: the run goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def write(self, line) -> None:
        """Append a line, one of formats.METRICS, to metrics.jsonl (on a full disk it is lost), and
        send it to wandb."""
        if not self.is_first:
            return
        record = tree_of(line)
        record |= record.pop("more", {})
        try:
            disk.append(self.file, json_of(record) + "\n")
        except OSError as error:
            self.print(f"warning: {self.file}: {error.strerror}; a line is lost")
        if self.wandb and "step" in record:
            self._try_wandb(lambda: self.wandb.log(record, step=record["step"]))

    def begin(self, step: int, validates: bool, start: Start) -> None:
        """Training begins after `step`, with a validation if `validates`. Drop the lines and
        samples that a resumed run will write again, append `start`, update status.json."""
        if not self.is_first:
            return
        for file in (self.file, self.run_dir / "samples.jsonl"):
            lines = formats.lines_in(file, Stamp)
            if lines:
                disk.write_bytes(file, kept(lines, step, validates))
            elif os.path.lexists(file):  # it cannot be read today
                file.rename(file.with_name(f"{file.stem}_unread_{time.time_ns()}.jsonl"))
        self.write(StartLine(start=start))
        self.status("running", from_step=step, process=os.getpid())
        if self.wants_wandb:
            self._try_wandb(self._open_wandb)

    def status(self, state: str, **facts) -> None:
        """Replace status.json, which tells a scheduler or a person the state of the run."""
        if self.is_first:
            disk.write_json(self.run_dir / "status.json", Status(state=state, **facts))

    @contextmanager
    def outcome(self, progress) -> Iterator[None]:
        """Around a whole run: write to status.json why it failed, and at which progress.step."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            with suppress(OSError):  # a full disk must not hide the error
                if not is_done(self.run_dir):  # else the new command was wrong, not the run
                    code = cli.exit_code(error)
                    self.status(
                        "preempted" if code == 130 else "failed",
                        step=progress.step,
                        error=public(str(error) or "interrupted")[:1000],  # before a URL is cut
                        exit_code=code,
                    )
            raise
        finally:
            if self.wandb:
                self._try_wandb(self.wandb.finish)

    def _open_wandb(self) -> None:
        """Whether it sends anything, and where to, is decided by its own settings."""
        import wandb

        mode = wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False):  # else it would ask for a key
            mode = "offline"
        sys.argv = [*map(public, sys.argv)]  # it records the command
        self.wandb = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nano2049"),
            name=self.run_dir.name,
            dir=self.run_dir,
            mode=mode,
            settings=wandb.Settings(init_timeout=WANDB_S, finish_timeout=WANDB_S),
            config=disk.read_json(self.run_dir / "config.json"),
        )

    def _try_wandb(self, call: Callable) -> None:
        """What it raises does not stop a run, sys.exit included."""
        try:
            call()
        except (Exception, SystemExit) as error:
            self.print(f"wandb is off: {reason_of(error)}")
            self.wandb = None


def with_own(yours: dict, ours: dict):
    """`ours`, the numbers that train.py adds up over the ranks, and `yours`, which then stand
    beside the fields of metrics.jsonl: UsageError for one under a name that means something
    already, or which is not one number."""
    taken = {*ours, "scale"}.union(*map(formats.hints_of, get_args(formats.METRICS)))
    for name, x in yours.items():
        if name in taken or getattr(x, "ndim", 0) or not hasattr(x, "__float__"):
            raise UsageError(
                f"yours[{name!r}] is refused: it must be one number, as x.sum() is, under a name "
                f"that nothing else has; try my_{name}"
            )
    return ours | yours


def kept(lines: list[tuple], step: int, validates: bool) -> bytes:
    """Of these (line, Stamp), those that a run which goes on after `step` will not write again:
    each start, and what is up to `step`, but no validation that is repeated. validates: whether the
    run begins with one; it ends with one on all rows in any case."""
    found = []
    for line, entry in lines:
        again = entry.full_val_bpb if entry.val_bpb is None or not validates else True
        if entry.step < step or entry.step == step and again is None:
            found.append(line + b"\n")
    return b"".join(found)


def write_report(run, sample: bool = False) -> str:
    """Write report.html, and if asked, a sample of the model's text. Returns the line
    to print; it also reports an error, which must not end the run. run.report:
    instruments/pages/report.py; None on the other ranks, or as session.find_report has said."""
    if run.report is None:
        return "report      none"
    with run.meter.paused("report"):
        try:
            if sample:
                # cuDNN would plan each length anew
                with sdpa_kernel(SDPBackend.MATH):
                    return run.report.update(run, run.progress.step)
            return f"report      {run.report.write(run.log.run_dir)}"
        except Exception as error:
            return f"report      none: {reason_of(error)}"


def start_of(argv: list[str], run) -> Start:
    """On what this process runs, and by which command."""
    return Start(
        time=time.time(),
        # word by word: in a whole line, the @ of another word would seem to end a password
        command=shlex.join(["train.py", *map(public, argv)]),
        device=ranks.device_name(run.world),
        world_size=run.world.world_size,
        data_dir=run.options.data_dir,
        init_from=run.options.init_from,
        code=code.of_process()[0],
        flops_per_token=run.model.flops_per_token(),
        micro_batch=run.plan.micro_batch,
        parallel=run.plan.parallel,
        compile=run.plan.compile,
        recompute=run.plan.recompute,
        torch=torch.__version__,
    )


def is_done(run_dir: Path) -> bool:
    """Whether status.json says `done`: all steps, the last checkpoint and the last validation."""
    with suppress(DataError):  # it is missing or damaged
        return formats.read(run_dir / "status.json", Status).state == "done"
    return False
