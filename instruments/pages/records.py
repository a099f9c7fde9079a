"""What a run left in its folder: its .jsonl files, config.json and status.json.

A run may have been killed in the middle of a line, resumed, or never validated; it may also come
from a stranger. So the types of every record are checked here, once, by one table, and a record
that does not fit is left out. Next: report.py makes the pages.
"""

import math
import statistics
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import numpy as np

from config import LARGEST, UsageError
from machinery import disk, shards
from machinery.errors import DataError
from machinery.log import read_jsonl
from machinery.output import say

# ------------------------------------------------------------------------------------- the types


def number(x: object) -> bool:
    """A number that can be drawn and printed: no NaN, nothing infinite or huge."""
    return isinstance(x, int | float) and abs(x) <= LARGEST


TYPES = {  # of a field, whatever record it is in
    number: "step tokens loss bpb lr norm step_s data_wait_ms tflops_full tflops_causal mfu_full "
    "mfu_causal eval_s save_s report_s wait_s saving val_bpb val_loss val_rows full_val_bpb "
    "full_val_loss skipped last_step eval_tokens",
    lambda x: isinstance(x, str): "command device data_dir init_from prompt text",
    lambda x: number(x) and x > 0: "tokens_per_s world_size",
    lambda x: number(x) and 0 <= x < 2.5e11: "time last_time",  # since 1970; a year of four digits
    lambda x: isinstance(x, dict) and all(map(number, x.values())): "val_bpb_by_source "
    "full_val_bpb_by_source",
    lambda x: fits(x, "wait_s saving"): "watch",
    lambda x: fits(x, "command device data_dir time world_size"): "start",
}
CHECKS = {name: check for check, names in TYPES.items() for name in names.split()}
NEEDED = {  # the field that tells a kind of line in metrics.jsonl -> those that it must have
    "start": "start",
    "loss": "step tokens loss bpb lr norm step_s data_wait_ms tflops_full tflops_causal "
    "tokens_per_s time",
    "val_bpb": "step tokens val_bpb val_loss",
    "full_val_bpb": "step full_val_bpb full_val_loss val_rows",
    "skipped": "step tokens",
}


def fits(x: object, needed: str) -> bool:
    """Whether x is a dict that has the needed fields, and its other known fields are of their
    types, or None."""
    if not isinstance(x, dict) or any(x.get(name) is None for name in needed.split()):
        return False
    known = {name: check for name, check in CHECKS.items() if x.get(name) is not None}
    return all(check(x[name]) for name, check in known.items())


def is_record(line: dict) -> bool:
    """Whether a line of metrics.jsonl has all that a page shows of it."""
    kind = next((kind for kind in NEEDED if kind in line), None)
    return kind is not None and fits(line, NEEDED[kind])


def plain(value: object) -> str:
    """For a screen or a picture: one line without control characters."""
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)


def read_json(path: Path) -> dict:
    """The tree of a JSON file; {} if it is not there or, with a warning, if it is damaged."""
    try:
        return disk.read_json(path) if path.exists() else {}
    except DataError as error:
        say(f"warning: {error}; left out of the report")
        return {}


# --------------------------------------------------------------------------------------- the run


class RunFolder:
    """What a run folder says. steps, validations: records of metrics.jsonl, in order."""

    def __init__(self, folder: str | Path):
        self.dir = Path(folder)
        if not (self.dir / "metrics.jsonl").exists():
            runs = sorted(str(p.parent) for p in self.dir.parent.glob("*/metrics.jsonl"))
            others = f"there are {', '.join(runs)}" if runs else "train one first: train.py"
            raise UsageError(f"{self.dir} is not the folder of a run (no metrics.jsonl); {others}")
        records = read_jsonl(self.dir / "metrics.jsonl", is_record)
        self.steps = [r for r in records if "loss" in r]
        self.validations = [r for r in records if "val_bpb" in r]
        self.whole_validation = next((r for r in records[::-1] if "full_val_bpb" in r), None)
        self.skipped = sum("skipped" in r for r in records)
        self.tokens = max((r.get("tokens") or 0 for r in records), default=0)
        is_sample = lambda line: fits(line, "step tokens prompt text")
        samples = read_jsonl(self.dir / "samples.jsonl", is_sample)
        self.samples = sorted(thinned(samples), key=lambda r: r["step"])
        self.config = read_json(self.dir / "config.json")
        status = read_json(self.dir / "status.json")
        self.state = plain(status.get("state", "unknown"))
        self.error = plain(status.get("error") or "")
        self.starts = [r["start"] for r in records if "start" in r]
        if self.starts:  # the weights that it began from, and on how much text it is scored
            self.config["init_from"] = self.starts[0].get("init_from")
            sizes = dict.fromkeys(start.get("eval_tokens") for start in self.starts)
            self.config["eval_tokens"] = ", then ".join(map(str, sizes))

    @property
    def first_step(self) -> int:
        """1, unless it was begun from a checkpoint of another run."""
        return self.steps[0]["step"] if self.steps else 1

    def seconds_at(self, tokens: float) -> float:
        """Seconds of training up to `tokens`, without validation, saving, time between starts."""
        done = [0, *(r["tokens"] for r in self.steps)]
        return float(np.interp(tokens, done, [0, *accumulate(r["step_s"] for r in self.steps)]))

    def median(self, key: str) -> float:
        """The median of a figure over the steps, without the first, which compiles."""
        known = [r[key] for r in self.steps[1:] or self.steps if r.get(key) is not None]
        return statistics.median(known or [0])

    def processes(self) -> list[dict]:
        """The starts that trained, each with its `own` steps, `begin` and `end` (steps; begin may
        be None), `seconds`, and how many of these were no training: eval_s, save_s, report_s."""
        processes = []
        for start, after in zip(self.starts, [*self.starts[1:], {}]):
            end = after.get("time", math.inf)
            own = [r for r in self.steps if start["time"] <= r["time"] < end]
            # Lines of steps that were redone are gone: the next start knows how far this one came.
            last = own[-1] if own else {"time": start["time"]}
            if (after.get("last_time") or 0) > last["time"]:
                last = last | {"time": after["last_time"], "step": after.get("last_step") or 0}
            if "step" in last:
                facts = dict(
                    own=own,
                    begin=own[0]["step"] - 1 if own else None,
                    end=last["step"],
                    seconds=last["time"] - start["time"],
                )
                processes.append(start | {key: last.get(key) or 0 for key in PAUSES} | facts)
        return processes

    def manifest(self) -> shards.Manifest | None:
        """The manifest of the run's training data; None if the data are gone or have changed."""
        for folder in dict.fromkeys(start["data_dir"] for start in self.starts):
            with suppress(ValueError, DataError, OSError):  # ValueError: no path at all
                manifest = shards.Manifest.load(folder)
                if manifest.fingerprint == self.config.get("data_fingerprint"):
                    return manifest
        return None


PAUSES = ("eval_s", "save_s", "report_s")


def slow_steps(processes: list[dict]) -> list[tuple[str, str]]:
    """(name, text) for the report: how many steps took over twice the median, and why; the longest
    wait for data. [] if none did. A step waited for data if the wait is at least half of what it
    took above the median. The first step of each process is left out, as it compiles."""
    steps = [r for process in processes for r in process["own"][1:] if r.get("watch")]
    if not steps:
        return []
    usual_s = statistics.median(r["step_s"] for r in steps)
    slow = [r for r in steps if r["step_s"] > 2 * usual_s]
    if not slow:
        return []
    waited = sum(r["watch"]["wait_s"] >= (r["step_s"] - usual_s) / 2 for r in slow)
    saving = sum(bool(r["watch"]["saving"]) for r in slow)
    text = f"{len(slow):,} of {len(steps):,} steps took over twice the median, {waited:,} of them "
    text += f"waiting for data, {saving:,} while saving"
    worst = max(steps, key=lambda r: r["watch"]["wait_s"])
    longest = f"{worst['watch']['wait_s']:.2f} s, in step {worst['step']:,}"
    return [("slow steps", text), ("longest wait for data", longest)]


def thinned(samples: list[dict], most: int = 12) -> list[dict]:
    """The last sample of each step, and at most `most` of them, evenly spread."""
    last = [*{r["step"]: r for r in samples}.values()]
    return last[::-1][:: max(math.ceil(len(last) / most), 1)]
