"""All units of a job, by the processes of this machine or the machines of a cluster.

`run_units` does the units that are not finished, as many at once as there are slots, until they
have the tokens wanted. So the same command, after a kill, does only what is missing. Next:
worker.py, one unit.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process

from config import DataConfig
from machinery import cli, disk, shards
from machinery.errors import DataError
from machinery.formats import Unit
from machinery.output import say
from preparation import sources
from preparation.job import Job, UnitId, task_of, units_of
from preparation.worker import finished, work


def executor_for(config: DataConfig):
    """`with executor_for(config) as (executor, slots)`: what runs units, and how many at once."""
    if config.cluster:
        from preparation import dask_cluster

        return dask_cluster.open_pool(config.cluster)
    return open_pool(config.workers or cli.cores())


@contextmanager
def open_pool(workers: int):
    """The same with processes of this machine."""
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker) as pool:
        try:
            yield pool, workers
        except BrokenProcessPool:
            raise DataError(
                "a process of the pool died (out of memory? fewer --workers need less); "
                f"{sources.AGAIN}"
            ) from None
        except BaseException:
            for process in active_children():
                process.terminate()
            raise


def start_worker() -> None:
    """In a process of the local pool: leave Ctrl-C to the parent, and end when the parent ends."""

    def end_with_parent() -> None:
        parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def run_units(job: Job, executor: Executor, slots: int) -> dict[UnitId, Unit]:
    """Do the unfinished units, `slots` at once; returns those that have the tokens wanted."""
    found = {unit: finished(job, unit) for unit in job.units}
    done = {unit: result for unit, result in found.items() if result}
    check_room(job, sum(result.tokens for result in done.values()))
    running = {}  # a future -> its unit
    said = time.monotonic()
    while True:
        while len(running) < slots and (unit := next_unit(job, done, running)):
            running[executor.submit(work, *task_of(job, unit))] = unit
        if not running:
            return {unit: done[unit] for unit in wanted_units(job, done)}
        if time.monotonic() > said + 30:
            said = time.monotonic()
            say(f"prepare   {len(done)} of {len(job.units)} units")
        ended, _ = wait(running, timeout=30, return_when=FIRST_COMPLETED)
        for future in ended:
            done[running.pop(future)] = future.result()


def wanted_units(job: Job, done: dict) -> Iterator[UnitId]:
    """The first units of each source that together have its share of the tokens wanted. A unit that
    is not done counts as the mean of those that are, or, if none is, as a 16th of the tokens."""
    for source, share in enumerate(job.shares):
        units = units_of(job, source)
        known = [done[unit].tokens for unit in units if unit in done] or [job.tokens / 16]
        guess = sum(known) / len(known)
        have = 0.0
        target = job.tokens * share / sum(job.shares) or float("inf")  # 0: all
        for unit in units:
            if have >= target:
                break
            yield unit
            have += done[unit].tokens if unit in done else guess  # at first 16 units will do


def next_unit(job: Job, done: dict, running: dict) -> UnitId | None:
    """The first unit wanted that is neither done nor running; None: there is no other."""
    busy = {*done, *running.values()}
    return next((unit for unit in wanted_units(job, done) if unit not in busy), None)


def check_room(job: Job, done_tokens: int) -> None:
    """StorageError before any work if the tokens wanted do not fit on the disk."""
    width = int(shards.dtype_for(job.config.vocab_size)[-1])  # bytes of a token
    tokens = job.tokens * 1.05  # a source ends with a whole unit
    if job.bytes is not None:  # at least 2.5 bytes of text per token
        tokens = min(tokens or float("inf"), job.bytes / 2.5)
    disk.check_room(
        job.folder, (tokens - done_tokens) * width, "choose another --data_dir or fewer --tokens"
    )
