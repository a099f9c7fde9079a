# %% [markdown]
# # 10. Prefetch: who waits for whom
#
# **Question.** Does fetching the next batch *after* backward hide the loading? And when a thread
# fetches it: who says that the buffer is free?
#
# Source: *nanobot pre-train*, "数据预取(Pipeline优化)" (fetch while the GPU computes).
# Core file: `data.py`, `RowLoader`. Before: lesson 7. Next: lesson 8 (which row comes when).
# Takes 15 seconds on two cores, nearly all of them asleep.

# %%
import lesson  # first: it puts the project on the path
import math
import queue
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from data import RowLoader
from machinery.shards import Manifest, fingerprint, write_shards

LOAD, COMPUTE, STEPS = 0.010, 0.020, 15  # seconds, seconds, steps
now = time.perf_counter
lesson.begin(10, "prefetch")

# %% [markdown]
# ## A GPU in 15 lines
# A GPU does not run a call at once: a launch puts the work in a *queue* and returns, and the device
# takes it from there in order. That needs a thread and a queue. The CPU as a device is simpler: it
# does the work before the launch returns.


# %%
class Device:
    """Runs what is launched, in order, on a thread of its own: one CUDA stream."""

    def __init__(self) -> None:
        self.waiting, self.busy = queue.Queue(), []  # busy: (start, end) of each kernel
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, kernel) -> None:
        self.waiting.put(kernel)

    def synchronize(self) -> None:
        self.waiting.join()

    def _run(self) -> None:
        while True:
            kernel, start = self.waiting.get(), now()
            kernel()
            self.busy.append((start, now()))
            self.waiting.task_done()


class Cpu:
    def launch(self, kernel) -> None:
        kernel()

    def synchronize(self) -> None:
        pass


device = Device()
for _ in ("model(x)", "loss.backward()", "optimizer.step()"):
    device.launch(lambda: time.sleep(0.05))
queued = len(device.busy)
device.synchronize()  # what loss.item() does before it can tell you the number
lesson.holds((queued, len(device.busy)) == (0, 3), "launching waits for nothing, .item() for all")

# %% [markdown]
# ## Eight loops
# Loading takes L = 10 ms of the host, computing C = 20 ms of the device, and there are n = 15
# steps. If the two take turns, the run takes n(L + C) = 450 ms; if they overlap, L + nC = 310.
#
# The source moves `next(loader)` after `backward()`. Two more things may differ: whether the loop
# synchronizes in each step (one `.item()` for the log is enough), and whether a thread reads ahead.


# %%
def ahead_of(load, count: int):
    """-> a function that returns what a thread has loaded, up to two batches ahead."""
    ready = queue.Queue(2)
    reader = threading.Thread(target=lambda: [ready.put(load()) for _ in range(count)], daemon=True)
    reader.start()
    return ready.get


def run(device, order: str, sync: bool, thread: bool) -> tuple[float, list]:
    """-> milliseconds, and (start, end) of each load in seconds since the start."""
    begun, loads = now(), []

    def load() -> None:
        start = now()
        time.sleep(LOAD)
        loads.append((start - begun, now() - begun))

    next_batch = ahead_of(load, STEPS) if thread else load
    if order == "reordered":
        next_batch()
    for step in range(STEPS):
        if order == "naive":
            next_batch()
        device.launch(lambda: time.sleep(COMPUTE))  # forward, backward, optimizer
        if order == "reordered" and step < STEPS - 1:
            next_batch()
        if sync:
            device.synchronize()
    device.synchronize()
    return 1000 * (now() - begun), loads


ORDERS = ("naive", "reordered")
kinds = [(Device, o, s, t) for o in ORDERS for s in (True, False) for t in (False, True)]
kinds += [(Cpu, o, False, False) for o in ORDERS] + [(Cpu, "naive", False, True)]
turns, overlapped = 1000 * STEPS * (LOAD + COMPUTE), 1000 * (LOAD + STEPS * COMPUTE)
ms, rows = {}, []
for kind, *how in kinds:
    order, sync, thread = how
    serial = not thread and (kind is Cpu or (order == "naive" and sync))
    formula, best = turns if serial else overlapped, math.inf
    for _ in range(10):  # a busy machine oversleeps
        best = min(best, run(kind(), *how)[0]) if best > 1.08 * formula else best
    ms[(kind, *how)] = best
    words = [kind.__name__, order, "yes" if sync else "no", "yes" if thread else "no"]
    rows.append((*words, round(formula), round(best)))
columns = ["device", "order", "sync each step", "reader thread", "formula ms", "ms"]
lesson.table(columns, rows)

slow = ms.pop((Device, "naive", True, False))
cpu = [ms.pop((Cpu, order, False, False)) for order in ORDERS]
rest = list(ms.values())
lesson.holds(min(slow, *cpu) > 1.3 * max(rest), "one loop of eight takes turns: naive, with sync")
lesson.holds(max(rest) < 1.15 * min(rest), "the other seven overlap, whatever the order")
lesson.holds(min(slow, *cpu) >= turns and min(rest) >= overlapped, "none is below its formula")

# %% [markdown]
# So the new order is worth 30%, but only next to a synchronization and without a thread. A loop
# that never waits runs ahead of the device by itself, in any order. On a CPU only the thread helps.

# %%
fig = lesson.figure(8, 3)
for ax, order in zip(fig.subplots(1, 2, sharex=True, sharey=True), ORDERS):
    device, begun = Device(), now()
    total, loads = run(device, order, True, False)
    busy = [(start - begun, end - begun) for start, end in device.busy]
    for y, spans, color in ((1, loads, "tab:orange"), (0, busy, "tab:blue")):
        bars = [(1000 * start, 1000 * (end - start)) for start, end in spans[:5]]
        ax.broken_barh(bars, (y - 0.35, 0.7), color=color, edgecolor="white")
        for i, (left, width) in enumerate(bars):
            ax.text(left + width / 2, y, i, ha="center", va="center", color="white")
    ax.set_yticks([1, 0], ["host loads", "device computes"])
    names = {"naive": "load, launch, then wait", "reordered": "launch, load the next, then wait"}
    ax.set(title=f"{names[order]}: {total:.0f} ms", xlabel="ms (five of 15 steps)")
lesson.save(fig, "10_prefetch")

# %% [markdown]
# ## The race
# The copy to the GPU is launched as well (`non_blocking=True`), so it happens *later*. If the next
# batch is loaded into the same pinned buffer before that, the device reads the wrong batch: no
# error, no NaN, rows trained on twice and others never. More buffers only make it rarer. An event,
# set when the copy is done, tells the loader when it may write.


# %%
def race(slots: int, events: bool, batches: int = 12) -> int:
    """Wrong batches on a device whose copies take 20 ms, behind a ring of buffers."""
    device, ring, arrived = Device(), [np.zeros(4, int) for _ in range(slots)], []
    free = [threading.Event() for _ in ring]
    for event in free:
        event.set()
    for batch in range(batches):
        slot = batch % slots
        if events:
            free[slot].wait()
            free[slot].clear()
        ring[slot][:] = batch  # load

        def copy(slot=slot) -> None:
            time.sleep(COMPUTE)
            arrived.append(ring[slot].copy())
            free[slot].set()

        device.launch(copy)
    device.synchronize()
    return sum((a != batch).any() for batch, a in enumerate(arrived))


wrong = {(slots, events): int(race(slots, events)) for slots in (1, 4) for events in (False, True)}
rows = [(slots, "yes" if events else "no", n) for (slots, events), n in wrong.items()]
lesson.table(["buffers", "events", "wrong batches of 12"], rows)
lesson.holds([wrong[1, False], wrong[4, False]] == [11, 8], "without events all but the last few")
lesson.holds(wrong[1, True] == wrong[4, True] == 0, "with events none, even with one buffer")

# %% [markdown]
# ## The real loader
# `RowLoader` has both, the thread and the events (on a GPU). Its `pop_wait_s` is what the step line
# prints as `data`: the time that the loop waited for rows. Here each row takes 1 ms to read.

# %%
folder = tempfile.TemporaryDirectory()
written = (np.arange(i, i + 65) % 256 for i in range(256))
shards = write_shards(written, Path(folder.name), "train", "<u2")
tokenizer = {"vocab_size": 256, "bos_id": 0, "sha256": ""}
splits = {"train": {"text": {"rows": 256, "shards": shards}}, "val": {"text": {"shards": []}}}
tree = {"row_len": 65, "dtype": "<u2", "tokenizer": tokenizer, "splits": splits}
tree["sources"] = [{"name": "text"}]


class SlowDisk(Manifest):
    def row(self, split: str, source: int, row: int) -> np.ndarray:
        time.sleep(0.001)
        return super().row(split, source, row)


def consume(ring: int, step_s: float) -> tuple[torch.Tensor, float]:
    """-> 20 batches of 8 rows, milliseconds of waiting per batch."""
    manifest = SlowDisk(folder.name, tree | {"fingerprint": fingerprint(tree)})
    loader = RowLoader(manifest, seed=0, micro_batch=8, prefetch=ring)
    batches = [loader.next_batch()[0]]
    loader.pop_wait_s()  # nobody reads ahead of the first batch
    for _ in range(19):
        time.sleep(step_s)
        batches.append(loader.next_batch()[0])
    waited = loader.pop_wait_s()
    loader.close()
    return torch.stack(batches), 1000 * waited / 19


results = {(ring, step): consume(ring, step / 1000) for ring in (2, 8) for step in (2, 40)}
rows = [(ring, step, waited) for (ring, step), (_, waited) in results.items()]
lesson.table(["buffers", "step ms", "waits ms per batch"], rows)
batches = [batch for batch, _ in results.values()]
lesson.holds(all(torch.equal(batches[0], b) for b in batches), "the ring changes no batch")
slow_disk, hidden = ([results[ring, step][1] for ring in (2, 8)] for step in (2, 40))
lesson.holds(min(slow_disk) > 4 * max(hidden), "only a step shorter than the reading waits")

# %% [markdown]
# ## Trap
# It is often said that `model(x)` and `optimizer.step()` make the CPU wait for the GPU. They queue,
# and only the *device* keeps their order. What waits is whatever must know a number: `.item()`,
# `.cpu()`, `print(loss)`, `synchronize()`. One of them in each step made the
# naive loop 45% longer.
#
# And one comparison can silently disable a fast path: `torch.device("cuda") == "cuda"` is False.

# %%
lesson.holds(torch.device("cuda") != "cuda" == torch.device("cuda").type, "ask for .type")

# %% [markdown]
# ## Exercise
# `exercises/ex10.py`: a ring of buffers that overwrites nothing in flight, and waits for no more
# than it must. `python course/check.py 10`
