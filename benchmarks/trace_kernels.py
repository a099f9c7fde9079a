"""The kernels of a profile by the time they take, and where the device was idle.

    python train.py d12 --profile
    python benchmarks/trace_kernels.py runs/d12/profile/trace.json.gz

Reads the trace that --profile wrote on a GPU. The profiler slows the host down, so the gaps are
longer than in a run without it. Prints a table, and appends it to
benchmarks/RESULTS.md (--results "" for no file).
"""

import gzip
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import at_root  # noqa: F401
from runs import parser_of
from throughput import report

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LONG_GAP_US = 20


def read_events(trace: Path) -> tuple[list[dict], int]:
    """What ran on the device, by its start, and in how many steps. Times are in microseconds."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    on_device = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    marks = [e for e in events if e.get("cat") == "user_annotation"]
    return on_device, sum(e["name"].startswith("ProfilerStep") for e in marks)


def by_kernel(events: list[dict], steps: int) -> list[list[str]]:
    """Rows for the table, the kernel that takes the most time first."""
    times = defaultdict(list)
    for event in events:
        times[event["name"]].append(event["dur"])
    total = sum(event["dur"] for event in events)
    rows = []
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        spent = sum(each)
        row = [f"{spent / steps / 1e3:.2f}", f"{spent / total:.1%}", f"{len(each) / steps:.0f}"]
        rows.append([*row, f"{statistics.median(each):.0f}", name[:90]])
    return rows


def gaps(events: list[dict]) -> list[tuple[float, str]]:
    """(microseconds, the kernel after it) for each time in which the device had nothing to do."""
    found = []
    busy_until = events[0]["ts"]
    for event in events:
        if event["ts"] > busy_until:
            found.append((event["ts"] - busy_until, event["name"]))
        busy_until = max(busy_until, event["ts"] + event["dur"])
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rows", type=int, default=20)
    args = parser.parse_args()
    events, steps = read_events(args.trace)
    if not events or not steps:
        print(
            f"error: {args.trace} has no step of a GPU; record one there with train.py --profile",
            file=sys.stderr,
        )
        return 2
    idle = gaps(events)
    lost = sum(us for us, _ in idle) / steps / 1e3
    long = sum(us for us, _ in idle if us > LONG_GAP_US) / steps / 1e3
    title = (
        f"Kernels, {len(events) / steps:.0f} a step; idle {lost:.2f} ms a step, {long:.2f} of it "
    )
    title += f"in gaps over {LONG_GAP_US} us"
    header = ["ms a step", "share", "launches", "us each", "kernel"]
    report(title, header, by_kernel(events, steps)[: args.rows], args.results)
    if idle:
        longest = sorted(idle, reverse=True)[:6]
        rows = [[f"{us:.0f}", name[:90]] for us, name in longest]
        report("The longest gaps", ["us", "before this kernel"], rows, args.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
