"""What a run left in its folder: its .jsonl files, config.json and status.json.

A run may have been killed in the middle of a line, resumed, or never validated. Next: report.py
makes the pages.
"""

from bisect import bisect
from contextlib import suppress
from functools import cached_property
from itertools import groupby
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
from machinery.trained import remedy_for

Curve = list[tuple[float, float]]  # (tokens, bits per byte) of validations
# What a start decided, and the version of torch; None: an older one has not recorded it.
OF_A_START = ("micro_batch", "parallel", "compile", "recompute", "torch")


def one_line(value: object) -> str:
    """For a screen or a picture: one line without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


# --------------------------------------------------------------------------------------- the run


class RunFolder:
    """What a run folder says. steps, validations: lines of metrics.jsonl, in order."""

    def __init__(self, folder: str | Path):
        self.dir = Path(folder)
        file = self.dir / "metrics.jsonl"
        if not file.exists():
            remedy = remedy_for(str(folder))
            raise UsageError(f"{self.dir} is not the folder of a run (no metrics.jsonl); {remedy}")
        lines = read_lines(file, METRICS)
        of = lambda kind: [line for line in lines if isinstance(line, kind)]
        self.steps = of(StepLine)
        self.validations = of(ValidationLine)
        self.whole_validation = [None, *of(FullValidationLine)][-1]
        self.skipped = len(of(SkippedLine))
        self.starts = [line.start for line in of(StartLine)]
        self._begun = [start.time for start in self.starts]
        self.tokens = max((getattr(line, "tokens", 0) for line in lines), default=0)
        samples = read_lines(self.dir / "samples.jsonl", SampleLine)
        self.samples = [*{line.step: line for line in samples}.values()]  # the last of a step
        self.config = formats.read(self.dir / "config.json", dict[str, Any])
        self.status = formats.read(self.dir / "status.json", Status)
        self.taken = of(StepLine | SkippedLine)
        steps = [line.step for line in self.taken]
        # 1, unless it was begun from a checkpoint of another run
        self.first_step = min(steps, default=1)
        self.last_step = max(steps, default=0)

    def options(self) -> dict[str, Any]:
        """What decides its numbers and its speed: config.json, and lists of what its starts
        decided."""
        decided = {
            name: [*dict.fromkeys(getattr(start, name) for start in self.trained())]
            for name in OF_A_START
        }
        # a process that resumes reads no other weights
        decided["init_from"] = [start.init_from for start in self.starts[:1]]
        return self.config | decided

    @property
    def curve(self) -> Curve:
        """(tokens, bits per byte) of its validations, but for that of the untrained model."""
        return [(line.tokens, line.val_bpb) for line in self.validations if line.tokens > 0]

    def seconds_at(self, tokens: float) -> float:
        """Seconds of training up to `tokens`, without compiling, validation, saving, time between
        starts."""
        return float(np.interp(tokens, *self._clock))

    @cached_property
    def _clock(self) -> tuple:
        """(steps + 1,) each: tokens and seconds up to each step. The first step of a process, which
        compiles, counts as a median one."""
        tokens = [0, *(line.tokens for line in self.taken)]
        is_first = np.diff([*map(self._start_of, self.taken)], prepend=-1) > 0
        usual = np.median([line.step_s for line in self.steps] or [0])
        seconds = np.where(is_first, usual, [line.step_s for line in self.taken])
        return tokens, np.cumsum([0, *seconds])

    def trained(self) -> list[Start]:
        """The starts whose steps are in the run."""
        return [start for start, _ in self.processes()]

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
        """Of the starts whose steps are in the run, the newest last; [] if one of them is not
        known."""
        codes = [start.code for start in self.trained()]
        return [] if None in codes else codes

    def processes(self) -> list[tuple[Start, list[StepLine]]]:
        """The starts whose steps are in the run, and these; those of others were redone. The last
        step says how many of the seconds until then were validation, saving, the report."""
        groups = groupby(self.steps, self._start_of)
        return [(self.starts[n - 1], [*own]) for n, own in groups if n]

    def _start_of(self, line) -> int:
        """In which start a step was taken: 1, 2, ...; 0: in none that is known."""
        return bisect(self._begun, line.time)

    def manifest(self) -> shards.Manifest | None:
        """The manifest of the run's training data; None if the data are gone or have changed."""
        with suppress(IndexError, ValueError, DataError, OSError):  # no start, not even a path, ...
            manifest = shards.Manifest.load(self.starts[-1].data_dir)
            if manifest.fingerprint == self.config.get("data_fingerprint"):
                return manifest
        return None
