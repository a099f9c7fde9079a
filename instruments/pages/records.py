"""What a run left in its folder: its .jsonl files, config.json and status.json.

A run may have been killed in the middle of a line, resumed, or never validated. Next: report.py
makes the pages.
"""

import math
import statistics
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from config import UsageError
from machinery import formats, shards
from machinery.errors import DataError
from machinery.formats import (
    METRICS,
    Code,
    FullValidationLine,
    SampleLine,
    SkippedLine,
    Start,
    StartLine,
    Status,
    StepLine,
    ValidationLine,
    read_lines,
)
from machinery.output import say

# Of a start: what it decided, and the version of torch.
OF_A_START = ("micro_batch", "parallel", "compile", "recompute", "torch")


def plain(value: object) -> str:
    """For a screen or a picture: one line without control characters."""
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)


def read_json(path: Path, kind: Any, default: Any) -> Any:
    """A JSON file; the default if it is not there or, with a warning, if it is damaged."""
    try:
        return formats.read(path, kind) if path.exists() else default
    except DataError as error:
        say(f"warning: {error}; left out of the report")
        return default


# --------------------------------------------------------------------------------------- the run


class RunFolder:
    """What a run folder says. steps, validations: lines of metrics.jsonl, in order."""

    def __init__(self, folder: str | Path):
        self.dir = Path(folder)
        if not (self.dir / "metrics.jsonl").exists():
            runs = sorted(str(p.parent) for p in self.dir.parent.glob("*/metrics.jsonl"))
            others = f"there are {', '.join(runs)}" if runs else "train one first: python train.py"
            raise UsageError(f"{self.dir} is not the folder of a run (no metrics.jsonl); {others}")
        lines = read_lines(self.dir / "metrics.jsonl", METRICS)
        of = lambda kind: [line for line in lines if isinstance(line, kind)]
        self.steps: list[StepLine] = of(StepLine)
        self.validations: list[ValidationLine] = of(ValidationLine)
        whole = of(FullValidationLine)
        self.whole_validation = whole[-1] if whole else None
        self.skipped = len(of(SkippedLine))
        self.starts: list[Start] = [line.start for line in of(StartLine)]
        self.tokens = max((getattr(line, "tokens", 0) for line in lines), default=0)
        samples = read_lines(self.dir / "samples.jsonl", SampleLine)
        self.samples = sorted(thinned(samples), key=lambda sample: sample.step)
        self.config = read_json(self.dir / "config.json", dict[str, Any], {})
        status = read_json(self.dir / "status.json", Status, Status(state="unknown"))
        self.state = plain(status.state)
        self.error = plain(status.error or "")
        taken = [line.step for line in lines if isinstance(line, StepLine | SkippedLine)]
        # 1, unless it was begun from a checkpoint of another run
        self.first_step = min(taken, default=1)
        if self.config.get("minutes"):  # its steps follow from the speed of the machine
            self.config["steps"] = max(taken, default=0)
        if self.starts:  # the weights that it began from, and what each start may change
            self.config["init_from"] = self.starts[0].init_from
            for name in ("eval_tokens", *OF_A_START):
                values = [getattr(start, name) for start in self.starts]
                if name == "eval_tokens" or None not in values:  # an older version lacks them
                    self.config[name] = ", then ".join(map(str, dict.fromkeys(values)))

    def seconds_at(self, tokens: float) -> float:
        """Seconds of training up to `tokens`, without compiling, validation, saving, time between
        starts."""
        return float(np.interp(tokens, *self._clock))

    @cached_property
    def _clock(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps + 1,) each: tokens and seconds up to each step. The first step of a process, which
        compiles, counts as a median one."""
        tokens = np.array([0, *(line.tokens for line in self.steps)])
        seconds = np.array([line.step_s for line in self.steps])
        ended = [line.time for line in self.steps]
        firsts = {0, *np.searchsorted(ended, [start.time for start in self.starts])}
        seconds[sorted(firsts - {len(seconds)})] = self.median("step_s")
        return tokens, np.cumsum([0, *seconds])

    def trained(self) -> list[Start]:
        """The starts whose steps are in the run; those of others were redone."""
        return [process.start for process in self.processes() if process.own]

    @property
    def devices(self) -> list[str]:
        """On what it trained: "8 x NVIDIA H100 80GB HBM3"."""
        return [*dict.fromkeys(f"{s.world_size} x {s.device}" for s in self.trained())]

    @property
    def flops_per_token(self) -> int | None:
        """Of the model, in the full convention; None: not known, or changed on the way."""
        known = {start.flops_per_token for start in self.trained()}
        return known.pop() if len(known) == 1 else None

    @property
    def codes(self) -> list[Code]:
        """Of each start whose steps are in the run; [] if one of them is not known."""
        codes = [start.code for start in self.trained()]
        return [] if None in codes else codes

    def median(self, key: str) -> float:
        """The median of a figure over the steps, without the first, which compiles."""
        known = [getattr(line, key) for line in self.steps[1:] or self.steps]
        return statistics.median([x for x in known if x is not None] or [0])

    def processes(self) -> list["Process"]:
        """The starts that trained."""
        processes = []
        for start, after in zip(self.starts, [*self.starts[1:], None]):
            until = after.time if after else math.inf
            own = [line for line in self.steps if start.time <= line.time < until]
            last = own[-1] if own else None
            end = last.step if last else 0
            ended_at = last.time if last else start.time
            # Lines of steps that were redone are gone: the next start knows how far this one came.
            if after and (after.last_time or 0) > ended_at:
                end = after.last_step or 0
                ended_at = after.last_time
            if own or ended_at > start.time:
                processes.append(Process(start, own, end, ended_at - start.time))
        return processes

    def manifest(self) -> shards.Manifest | None:
        """The manifest of the run's training data; None if the data are gone or have changed."""
        for folder in dict.fromkeys(start.data_dir for start in self.starts):
            with suppress(ValueError, DataError, OSError):  # ValueError: no path at all
                manifest = shards.Manifest.load(folder)
                if manifest.fingerprint == self.config.get("data_fingerprint"):
                    return manifest
        return None


@dataclass
class Process:
    """A start that trained."""

    start: Start
    own: list[StepLine]
    """Its steps; those that were redone later are gone."""
    end: int
    """The last of them, gone or not."""
    seconds: float
    """The last of its own steps says how many of these were validation, saving, the report."""


def slow_steps(processes: list[Process]) -> list[tuple[str, str]]:
    """(name, text) for the report: how many steps took over twice the median, and why; the longest
    wait for data. [] if none did. A step waited for data if the wait is at least half of what it
    took above the median. The first step of each process is left out, as it compiles."""
    steps = [line for process in processes for line in process.own[1:] if line.watch]
    if not steps:
        return []
    usual_s = statistics.median(line.step_s for line in steps)
    slow = [line for line in steps if line.step_s > 2 * usual_s]
    if not slow:
        return []
    waited = sum(line.watch.wait_s >= (line.step_s - usual_s) / 2 for line in slow)
    saving = sum(line.watch.saving for line in slow)
    text = f"{len(slow):,} of {len(steps):,} steps took over twice the median, {waited:,} of them "
    text += f"waiting for data, {saving:,} while saving"
    worst = max(steps, key=lambda line: line.watch.wait_s)
    longest = f"{worst.watch.wait_s:.2f} s, in step {worst.step:,}"
    return [("slow steps", text), ("longest wait for data", longest)]


def thinned(samples: list[SampleLine]) -> list[SampleLine]:
    """The last sample of each step, and at most 12 of them, evenly spread."""
    last = [*{sample.step: sample for sample in samples}.values()]
    return last[::-1][:: max(math.ceil(len(last) / 12), 1)]
