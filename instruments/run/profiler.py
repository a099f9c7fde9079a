"""Where a training step spends its time: the mechanism behind `train.py --profile`.

Runs a few steps under torch.profiler; the loop marks the regions "data" and "communication" with
`record_function`, and torch its optimizers' steps. Writes OUT/trace.json.gz (open it in
https://ui.perfetto.dev or chrome://tracing). Guarantees: the rows of `table()` add up to the time
of a step; each instant is counted once. On a GPU the rows split the device's timeline:
`communication` is the part that no computation hides, and in `idle` the device waits for the host.
On a CPU they split the main thread's. Next: train.py.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from config import LARGEST, UsageError
from machinery import disk

REGIONS = {"Optimizer.step": "optimizer", "communication": "communication", "data": "data wait"}
ROWS = ("matmul", "attention", "elementwise", "optimizer", "communication", "data wait", "idle")
# When several run at once, the time belongs to the first of these. An operator may contain others
# (attention its matmuls), so on a CPU this order also decides between outer and inner ones.
PRIORITY = ("optimizer", "attention", "matmul", "elementwise", "communication", "data wait")

# Patterns in the names of kernels (CUDA, ROCm) and operators (CPU), lower case; first hit wins.
NAMES = {
    "elementwise": "triton_(poi|red|per)",  # named after the operators that follow
    "communication": "nccl|rccl|c10d::|gloo:|all_?reduce|allgather",
    "attention": "scaled_dot_product|sdpa|cudnn|flash|fmha|attention|flex_|attn",
    "matmul": "gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|cijk_|_tem_fused"
    "|aten::(mm|bmm|addmm|baddbmm|linear)|mkldnn",
}

Span = tuple[float, float, str]  # start and end in microseconds, category


def classify(name: str) -> str:
    """Category of a kernel or operator by its name; elementwise if no other fits."""
    hits = (row for row, pattern in NAMES.items() if re.search(pattern, name.lower()))
    return next(hits, "elementwise")


def step_marks(events: list[dict]) -> list[dict]:
    """The events that each span one training step."""
    mine = [e for e in events if e.get("cat") == "user_annotation"]
    return [e for e in mine if e["name"].startswith("ProfilerStep")]


def to_spans(events: list[dict]) -> list[Span]:
    """Timeline of the device (of the main thread if there is no kernel) from a Chrome trace."""
    main = step_marks(events)[0]["tid"]
    events = [e for e in events if e.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # A region is drawn on the host, and again around the kernels it launched: not around those of a
    # region inside it, so that one around all optimizers would be empty there.
    drawn = "gpu_user_annotation" if kernels else "user_annotation"
    row_of = lambda e: REGIONS.get(e["name"].partition("#")[0])  # Optimizer.step#AdamW.step
    regions = [e for e in events if row_of(e) and e.get("cat") == drawn]
    ops = kernels or [e for e in events if e.get("cat") == "cpu_op" and e["tid"] == main]
    rows = []
    for e in ops:  # a region around the middle of an operator, on its thread or stream, owns it
        middle, mine = e["ts"] + e["dur"] / 2, [r for r in regions if r["tid"] == e["tid"]]
        around = (row_of(r) for r in mine if r["ts"] <= middle <= r["ts"] + r["dur"])
        rows.append((e, next(around, classify(e["name"]))))
    for e in events:
        waits = e["name"] == "data" and e.get("cat") == "user_annotation"
        if waits or (not kernels and (e in regions or e["name"].startswith("gloo:"))):
            rows.append((e, row_of(e) or "communication"))
    return [(e["ts"], e["ts"] + e["dur"], row) for e, row in rows]


def breakdown(spans: list[Span], start: float, end: float) -> dict[str, float]:
    """Microseconds of each row of the table between start and end; they add up to end - start."""
    edges = [(end, "idle", 0)]
    for a, b, category in spans:
        if a < end and b > start:
            edges += [(max(a, start), category, 1), (min(b, end), category, -1)]
    active, total, now = Counter(), dict.fromkeys(ROWS, 0.0), start
    for time, category, change in sorted(edges):
        row = next((row for row in PRIORITY if active[row]), "idle")
        total[row] += time - now
        active[category] += change
        now = time
    return total


class Profile(torch.profiler.profile):
    """`with Profile(out_dir, device) as profile:` records `steps` steps after `warmup`; call
    `profile.step()` after each step until it is `done`, then print `table()`."""

    def __init__(self, out_dir: Path, device: torch.device, warmup: int = 1, steps: int = 3):
        out_dir.mkdir(parents=True, exist_ok=True)
        self.trace = out_dir / "trace.json.gz"
        self.trace.unlink(missing_ok=True)  # torch would follow a link
        self.device, self.warmup, self.last = device, warmup, warmup + steps
        super().__init__(
            schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=steps, repeat=1),
            on_trace_ready=lambda _: self.export_chrome_trace(str(self.trace)),
            profile_memory=True,  # lesson 18 reads these events
        )

    @property
    def done(self) -> bool:
        """All the steps asked for are recorded."""
        return self.step_num >= self.last

    def step(self) -> None:
        """Call it after each optimizer step."""
        if self.step_num + 1 in (self.warmup, self.last):
            torch.get_device_module(self.device).synchronize()  # record whole steps
        super().step()

    def trace_events(self) -> list[dict]:
        """The events of the Chrome trace."""
        return json.loads(gzip.decompress(disk.read_bytes(self.trace, LARGEST)))["traceEvents"]

    def table(self) -> str:
        """One screen: milliseconds per step and share of each row, and a GPU's peak memory."""
        if self.step_num <= self.warmup:
            raise UsageError(f"{self.step_num} steps only warm up; try --steps {self.last}")
        events = self.trace_events()
        marks = step_marks(events)
        start, end = marks[0]["ts"], max(e["ts"] + e["dur"] for e in marks)
        n, total = len(marks), end - start
        lines = [f"where the time goes: mean of {n} steps, {total / n / 1e3:.1f} ms each"]
        for row, us in breakdown(to_spans(events), start, end).items():
            lines.append(f"  {row:<14}{us / n / 1e3:10.1f} ms {us / total:7.1%}")
        if self.device.type == "cuda":
            lines.append(f"peak memory {torch.cuda.max_memory_allocated() / 1e6:,.1f} MB allocated")
        return "\n".join([*lines, f"trace: {self.trace} (open it in https://ui.perfetto.dev)"])


def run(run, steps: Iterator[dict], log_step: Callable, progress) -> int:
    """`train.py --profile`: take a few of the `steps`, log them, print the table. Returns the exit
    code. run, progress: train.py's; steps yields the numbers of each, as floats by name."""
    world, log = run.world, run.log
    own = f"/rank_{world.rank}" if world.world_size > 1 else ""
    folder = disk.inside(log.run_dir, f"profile{own}")
    with Profile(folder, world.device) as profile:
        for numbers in steps:
            log_step(run, progress, numbers)
            profile.step()
            if profile.done:
                break
    log.status("profiled", step=progress.step, exit_code=0)
    if world.is_first:
        log.print(profile.table())
    return 0
