"""What a run did: metrics.jsonl, status.json, and the lines on the screen.

`metrics.jsonl` has one JSON object per step, validation or start; status.json says whether the run
goes on, or how it ended. With --wandb, Weights & Biases gets the same records; it can neither
stop a run nor delay its start and its end by more than WANDB_S each. Next: train.py.
"""

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from machinery import cli, code, disk, formats
from machinery.errors import DataError, reason_of
from machinery.formats import Stamp, Start, StartLine, Status, StepLine
from machinery.output import json_of, public, say
from machinery.plan import UNKNOWN

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
        record = formats.tree_of(line)
        record |= record.pop("more", {})
        try:
            disk.append(self.file, json_of(record) + "\n")
        except OSError as error:
            self.print(f"warning: {self.file}: {error.strerror}; a line is lost")
        if self.wandb and "step" in record:
            self._try_wandb(lambda: self.wandb.log(record, step=record["step"]))

    def begin(self, step: int, validates: bool, start: Start) -> None:
        """Training begins after `step`, with a validation if `validates`. Drop the records and
        samples that a resumed run will write again, append `start`, update status.json."""
        if not self.is_first:
            return
        lines = formats.lines_in(self.file, Stamp | StartLine)
        if not lines and os.path.lexists(self.file):  # unreadable: kept
            self.file.rename(self.file.with_name("metrics_unread.jsonl"))

        def stays(r: Stamp | StartLine) -> bool:
            if isinstance(r, StartLine):
                return True
            is_again = validates and r.val_bpb is not None or r.full_val_bpb is not None
            return r.step < step or r.step == step and not is_again

        kept_of = lambda lines: b"".join(line + b"\n" for line, r in lines if stays(r))
        began = json_of(formats.tree_of(StartLine(start=start)))
        disk.write_bytes(self.file, kept_of(lines) + began.encode() + b"\n")
        samples = self.run_dir / "samples.jsonl"
        if samples.exists():
            disk.write_bytes(samples, kept_of(formats.lines_in(samples, Stamp)))
        self.status("running", from_step=step, process=os.getpid())
        if self.wants_wandb:
            self._try_wandb(self._open_wandb)

    def status(self, state: str, **facts) -> None:
        """Replace status.json, which tells a scheduler or a person the state of the run."""
        if self.is_first:
            tree = formats.tree_of(Status(state=state, **facts))
            disk.write_json(self.run_dir / "status.json", tree)

    @contextmanager
    def outcome(self, progress) -> Iterator[None]:
        """Around a whole run: write to status.json why it failed, and at which progress.step."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            reason = public(str(error) or "interrupted")[:1000]  # before a URL is cut
            with suppress(OSError):  # a full disk must not hide the error
                if not is_done(self.run_dir):  # else the new command was wrong, not the run
                    code = cli.exit_code(error)
                    state = "preempted" if code == 130 else "failed"
                    self.status(state, step=progress.step, error=reason, exit_code=code)
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
            self.print(f"wandb is off: {type(error).__name__}: {error}")
            self.wandb = None


def write_report(run, sample: bool = False) -> str:
    """Write report.html, and if asked, a sample of the model's text. Returns the line
    to print; it also reports an error, which must not end the run. run.report:
    instruments/pages/report.py; None on the other ranks, or if it cannot be imported."""
    if run.report is None:
        return "report      none: instruments/ cannot be imported"
    try:
        if sample:
            kernels = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
            with sdpa_kernel([*kernels]):  # cuDNN would plan each length anew
                return run.report.update(run, run.progress.step)
        return f"report      {run.report.write(run.log.run_dir)}"
    except Exception as error:
        return f"report      none: {reason_of(error)}"


def time_left_s(run, step: int) -> float:
    """Seconds from `step` to the end of a run, with its validations and its last save."""
    every, plan = run.preset.run.eval_every, run.plan
    if plan.steps == UNKNOWN:
        return 60 * run.preset.train.minutes
    evals = math.ceil(plan.steps / every) - step // every if every else 1
    tokens_left = (plan.steps - step) * plan.tokens_per_step
    return run.meter.eta_s(tokens_left, eval=evals, report=evals, save=1)


def step_line(r: StepLine, steps: int, left_s: float) -> str:
    """The line on the screen."""
    if r.mfu_full is None:
        used = f"mfu n/a, {r.tflops_full:.2f}/{r.tflops_causal:.2f} TFLOP/s full/causal"
    else:
        used = f"mfu {r.mfu_full:.1%} full {r.mfu_causal:.1%} causal"
    of = f"{steps:,}" if steps < UNKNOWN else "?"
    others = "".join(f" | {name} {value:g}" for name, value in r.more.items())
    return (
        f"step {r.step:,}/{of} | loss {r.loss:.4f} | bpb {r.bpb:.3f} | lr {r.lr:.3f} | "
        f"|g| {r.norm:.3f} | {r.dt_ms:.0f} ms | {short(r.tokens_per_s)} tok/s | {used} | "
        f"data {r.data_wait_ms:.1f} ms | {duration(left_s)} left{others}"
    )


def done_text(run, validation: str, report: str) -> str:
    """The last lines of a run: its time, where its files are, the next command."""
    log = run.log
    progress = run.progress
    step = progress.step
    seconds = time.monotonic() - progress.started_at
    since = f" since step {progress.resumed_at:,}" if progress.resumed_at else ""
    return (
        f"done: {step:,} steps, {step * run.plan.tokens_per_step:,} tokens, "
        f"{duration(seconds)}{since}; {validation}\n"
        f"checkpoint  {log.run_dir / 'checkpoints' / f'step_{step:08d}'}\n"
        f"metrics     {log.file}\n{report}\n"
        f"next        python eval.py {'chat' if run.manifest.marks else 'sample'} "
        f"--run_dir {shlex.quote(str(log.run_dir))}"
    )


def sources_line(bpb: dict[str, float]) -> str:
    """{"web": 1.1, "code": 0.9} -> ' (web 1.1000, code 0.9000)'; '' if there is one source."""
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


def start_of(argv: list[str], run) -> Start:
    """On what this process runs, and by which command."""
    options = run.preset.run
    world = run.world
    return Start(
        time=time.time(),
        # word by word: in a whole line, the @ of another word would seem to end a password
        command=shlex.join(["train.py", *map(public, argv)]),
        device=device_name(world),
        world_size=world.world_size,
        data_dir=options.data_dir,
        init_from=options.init_from,
        code=code.of_process()[0],
        flops_per_token=run.model.flops_per_token(),
        micro_batch=run.plan.micro_batch,
        parallel=run.plan.parallel,
        compile=run.plan.compile,
        recompute=run.plan.recompute,
        torch=torch.__version__,
    )


def device_name(world) -> str:
    """The GPU; or the processor, with the threads that torch takes."""
    if world.device.type != "cpu":
        return world.device_name
    n = torch.get_num_threads()
    return f"{cpu_name()}, {n} thread{'s' * (n > 1)}"


def cpu_name() -> str:
    """The processor's model name, where /proc/cpuinfo has it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", disk.read_text(info)) if info.exists() else []
    return names[0] if names else "CPU"


def is_done(run_dir: Path) -> bool:
    """Whether status.json says `done`: all steps, the last checkpoint and the last validation."""
    with suppress(DataError):  # it is missing or damaged
        return formats.read(run_dir / "status.json", Status).state == "done"
    return False
