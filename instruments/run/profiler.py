"""Where a training step spends its time: the mechanism behind `train.py --profile`.

Runs a few steps under torch.profiler, prints torch's table of what took the most time, and writes
RUN_DIR/profile/trace.json.gz (open it in https://ui.perfetto.dev or chrome://tracing). The regions
"data" and "communication", which train.py marks with `record_function`, and the optimizers' steps,
which torch marks, are the table's first rows. Next: train.py.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import torch

from config import UsageError
from machinery import disk

WARMUP = 1  # steps before those that are recorded
STEPS = 3
ROWS = 16  # of the table: the regions, then operators and kernels


def table(profile: torch.profiler.profile, on_gpu: bool) -> str:
    """The regions; then what took the most time by itself, of the GPU or else of the CPU. A row's
    times are sums over the recorded steps."""
    time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = profile.key_averages()
    rows.sort(key=lambda row: (row.is_user_annotation, getattr(row, time)), reverse=True)
    return rows.table(row_limit=ROWS, max_name_column_width=40)


def run(run, steps: Iterator, log_step: Callable) -> int:
    """`train.py --profile`: take a few of the `steps`, log them, print the table. Returns the exit
    code. run: session.Run; steps: of train.Step."""
    world = run.world
    log = run.log
    own = f"/rank_{world.rank}" if world.world_size > 1 else ""
    folder = disk.inside(log.run_dir, f"profile{own}")
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.json.gz"
    trace.unlink(missing_ok=True)  # torch would follow a link
    last = WARMUP + STEPS
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=WARMUP, active=STEPS, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(trace)),
    ) as profile:
        for step in islice(steps, last):
            log_step(run, step)
            if profile.step_num + 1 in (WARMUP, last):
                torch.get_device_module(world.device).synchronize()  # record whole steps
            profile.step()
    recorded = profile.step_num - WARMUP
    if recorded < 1:
        raise UsageError(f"{profile.step_num} steps only warm up; try --steps {last}")
    log.status("profiled", step=run.progress.step, exit_code=0)
    if world.is_first:
        rows = table(profile, world.device.type == "cuda")
        log.print(f"where the time goes, sums of {recorded} steps:\n{rows}")
        log.print(f"trace: {trace} (open it in https://ui.perfetto.dev)")
    return 0
