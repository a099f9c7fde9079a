"""Where a training step spends its time and memory: the mechanism behind `train.py --profile`.

Reads:  a few steps under torch.profiler, in which the loop names three regions by
        `torch.profiler.record_function`: "data", "communication" and "optimizer".
Writes: OUT/trace.json.gz (open it in https://ui.perfetto.dev or chrome://tracing), OUT/memory.png.
Guarantees: the rows of `table()` add up to the time of a step; each instant is counted once.
On a GPU the device's own timeline is split, so `communication` is what computation does not hide
and `idle` is a device that waits for the host. On a CPU it is the main thread's. Next: train.py.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

REGIONS = {"optimizer": "optimizer", "communication": "communication", "data": "data wait"}
ROWS = ("matmul", "attention", "elementwise", "optimizer", "communication", "data wait", "idle")
# When several run at once, the time belongs to the first of these. An operator contains others
# (attention its matmuls), so on a CPU this order also decides between outer and inner.
PRIORITY = ("optimizer", "attention", "matmul", "elementwise", "communication", "data wait")

# Fragments of the names of kernels (CUDA, ROCm) and operators (CPU), lower case; first hit wins.
NAMES = {
    "elementwise": ("triton_poi", "triton_red", "triton_per"),  # named after what they follow
    "communication": ("nccl", "rccl", "c10d::", "gloo:", "allreduce", "all_reduce", "allgather"),
    "attention": (
        "scaled_dot_product", "sdpa", "cudnn", "flash", "fmha", "attention", "flex_", "attn",
    ),
    "matmul": (
        "gemm", "gemv", "cutlass", "cublas", "nvjet", "xmma", "wgmma", "cijk_", "_tem_fused",
        "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::linear", "mkldnn",
    ),
}  # fmt: skip

Span = tuple[float, float, str]  # start and end in microseconds, category


def classify(name: str) -> str:
    """Category of a kernel or operator by its name; what is nothing else is elementwise."""
    name = name.lower()
    hits = (row for row, parts in NAMES.items() if any(part in name for part in parts))
    return next(hits, "elementwise")


def to_spans(events: list[dict]) -> list[Span]:
    """Timeline of the device (of the main thread if no kernel was seen) from a Chrome trace."""
    events = [e for e in events if e.get("ph") == "X"]
    steps = [e for e in events if e["name"].startswith("ProfilerStep") and _is(e, "user")]
    thread = steps[0]["tid"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # The profiler draws each region twice: on the host, and around the kernels it launched.
    regions = [e for e in events if e["name"] in REGIONS and _is(e, "gpu_user" if kernels else "")]
    spans = [
        (e["ts"], e["ts"] + e["dur"], _region_of(e, regions) or classify(e["name"]))
        for e in kernels or [e for e in events if e.get("cat") == "cpu_op" and e["tid"] == thread]
    ]
    for e in events:
        host_data = e["name"] == "data" and _is(e, "user")
        if host_data or (not kernels and (e in regions or e["name"].startswith("gloo:"))):
            spans.append((e["ts"], e["ts"] + e["dur"], REGIONS.get(e["name"], "communication")))
    return spans


def _is(event: dict, kind: str) -> bool:
    return event.get("cat", "").startswith(kind) and event.get("cat", "").endswith("annotation")


def _region_of(event: dict, regions: list[dict]) -> str | None:
    """The named region around the middle of an event, on the same thread or stream."""
    middle = event["ts"] + event["dur"] / 2
    for r in regions:
        if r["tid"] == event["tid"] and r["ts"] <= middle <= r["ts"] + r["dur"]:
            return REGIONS[r["name"]]
    return None


def breakdown(spans: list[Span], start: float, end: float) -> dict[str, float]:
    """Microseconds of each row of the table between start and end; they add up to end - start."""
    edges = [(max(a, start), category, 1) for a, b, category in spans if a < end and b > start]
    edges += [(min(b, end), category, -1) for a, b, category in spans if a < end and b > start]
    edges.append((end, "idle", 0))
    active, total, now = Counter(), dict.fromkeys(ROWS, 0.0), start
    for time, category, change in sorted(edges):
        row = next((row for row in PRIORITY if active[row]), "idle")
        total[row] += time - now
        active[category] += change
        now = time
    return total


class Profile:
    """Handed out by `profile`: call `step()` after each optimizer step, then print `table()`."""

    def __init__(self, out_dir: Path, device: torch.device, warmup: int, steps: int):
        self.trace, self.image = out_dir / "trace.json.gz", out_dir / "memory.png"
        self.device, self.warmup, self.steps, self.n_steps = device, warmup, steps, 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self.trace)),
            profile_memory=True,
        )

    @property
    def done(self) -> bool:
        """All the steps asked for are on record."""
        return self.n_steps >= self.warmup + self.steps

    def step(self) -> None:
        """An optimizer step was launched."""
        self.n_steps += 1
        if self.n_steps in (self.warmup, self.warmup + self.steps):
            torch.get_device_module(self.device).synchronize()  # record whole steps
        self.profiler.step()

    def events(self) -> list[dict]:
        with gzip.open(self.trace, "rt") as file:
            return json.load(file)["traceEvents"]

    def table(self) -> str:
        """One screen: milliseconds per step and share of each row, and the peak of memory."""
        if self.n_steps <= self.warmup:
            raise ValueError(
                f"nothing was profiled in {self.n_steps} steps, {self.warmup} of them warm up; "
                f"try --steps {self.warmup + self.steps}"
            )
        events = self.events()
        marks = [e for e in events if e["name"].startswith("ProfilerStep") and _is(e, "user")]
        start, end = marks[0]["ts"], max(e["ts"] + e["dur"] for e in marks)
        n = len(marks)
        lines = [f"where the time goes: mean of {n} steps, {(end - start) / n / 1e3:.1f} ms each"]
        for row, us in breakdown(to_spans(events), start, end).items():
            lines.append(f"  {row:<14}{us / n / 1e3:10.1f} ms {us / (end - start):7.1%}")
        memory = self.memory(events)
        if memory:
            what = "allocated" if self.device.type != "cpu" else "allocated since the first step"
            lines.append(f"peak memory {max(b for _, b in memory) / 1e6:,.1f} MB {what}")
            lines.append(f"memory over time: {self.draw(memory, marks)}")
        return "\n".join([*lines, f"trace: {self.trace} (open it in https://ui.perfetto.dev)"])

    def memory(self, events: list[dict]) -> list[tuple[float, int]]:
        """(microseconds, bytes allocated on the device) at each allocation and release.

        The CPU's allocator counts from the first profiled step on, a GPU's from the beginning.
        """
        on_cpu = self.device.type == "cpu"
        return [
            (e["ts"], e["args"]["Total Allocated"])
            for e in events
            if e["name"] == "[memory]" and (e["args"]["Device Type"] == 0) == on_cpu
        ]

    def draw(self, memory: list[tuple[float, int]], marks: list[dict]) -> str:
        """Plot it, with a line where each step begins; returns the file, or why there is none."""
        try:
            from matplotlib.figure import Figure  # no pyplot: works without a display
        except ImportError:
            return "no picture, as matplotlib is not installed"
        start = marks[0]["ts"]
        axes = Figure(figsize=(9, 4), layout="constrained").subplots()
        axes.step([(t - start) / 1e3 for t, _ in memory], [b / 1e6 for _, b in memory],
                  where="post", linewidth=0.8)  # fmt: skip
        for mark in marks:
            axes.axvline((mark["ts"] - start) / 1e3, color="gray", linestyle=":")
        axes.set(xlabel="milliseconds (dotted: a step begins)", ylabel="MB allocated")
        axes.figure.savefig(self.image, dpi=120)
        return str(self.image)


@contextmanager
def profile(
    out_dir: Path | str, device: torch.device, warmup: int = 1, steps: int = 3
) -> Iterator[Profile]:
    """Record `steps` steps after `warmup`, in a loop that calls `.step()` at the end of each."""
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    recording = Profile(out_dir, device, warmup, steps)
    with recording.profiler:
        yield recording


def run(trainer) -> int:
    """`train.py --profile`: a few steps of a Trainer, then the table. Returns the exit code."""
    several = trainer.world.world_size > 1
    folder = trainer.run_dir / "profile" / (f"rank_{trainer.world.rank}" if several else "")
    trainer.meter.start()
    with profile(folder, trainer.world.device) as recording:
        while not recording.done and trainer.step < trainer.plan.steps:
            trainer.set_schedule()
            trainer.guard(trainer.accumulate())
            trainer.take_step()
            recording.step()
    trainer.drain()
    trainer.log.status("profiled", step=trainer.step, exit_code=0)
    if trainer.world.is_first:
        trainer.log.print(recording.table())
    return 0
