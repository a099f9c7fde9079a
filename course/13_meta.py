# %% [markdown]
# # 13. Meta: a model that is nowhere
#
# **Question.** What does building a model on `meta` save, and what does it break?
#
# Source: *nanobot pre-train*, "Meta张量初始化(节省显存)" (build on meta, initialize last).
# Core files: `model.py`, `GPT.init_weights`; `machinery/build.py`, `build_model`. Before: lesson 12.
# Next: lesson 14. Takes 15 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import copy
import hashlib
import os
import resource
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from config import PRESETS, GPTConfig
from model import GPT

torch.set_num_threads(1)
WAYS = ("built, then copied", "built in place", "meta")
CONFIG = GPTConfig(
    n_layer=8, n_embd=512, n_head=4, n_kv_head=4, mlp_hidden=2048, vocab_size=14_464
)  # 40M parameters
lesson.begin(13, "meta")

# %% [markdown]
# ## Nothing, in the right shape
# A tensor on the device `meta` has a shape and a dtype, and no memory. One can build a model there,
# count its parameters, plan its sharding, and only then decide where it will live.


# %%
def memory() -> tuple[int, int]:
    """Bytes that this process holds now, and the most that it has ever held."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, which counts in bytes
        held = 1024 * int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())]))
        return held, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return tuple(1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))


with torch.device("meta"):
    GPT(CONFIG)  # torch loads what it needs for meta
    before = memory()[0]
    d24 = GPT(replace(PRESETS["d24"].model, extras=()))
grown, count = memory()[0] - before, sum(p.numel() for p in d24.parameters())
print(f"d24 on meta: {count:,} parameters, {4 * count / 1e9:.1f} GB; took {grown / 1e6:.1f} MB")
lesson.holds(count == 780_140_544 and grown < 50e6, "counted without being there")

# %% [markdown]
# ## Three ways to a model
# Each in a process of its own, which watches its memory. `copy.deepcopy` stands for the move to a
# device: the model is built in the host's memory, then exists again where it will live. (With real
# GPUs the first copy is in host memory: eight of them, if eight ranks of a machine do it at once.)
#
# Torch gives each weight an initial value when the module is built, and `init_weights` gives it
# another: count the random numbers.


# %%
class Draws(TorchDispatchMode):
    """Counts the random numbers that are drawn."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("uniform_", "normal_") and not args[0].is_meta:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def build(rank: int, world: int) -> dict:
    """One of the WAYS -> bytes over time, their peak, random numbers, a hash of the weights."""
    for device in ("cpu", "meta"):  # what torch loads when first used is not the model's
        with Draws(), torch.device(device):
            copy.deepcopy(GPT(replace(CONFIG, n_layer=1, n_embd=64, vocab_size=64))).init_weights()
    trace, done, base = [], threading.Event(), memory()[0]
    start = time.perf_counter()

    def watch() -> None:
        while not done.wait(0.005):
            trace.append((time.perf_counter() - start, memory()[0] - base))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with Draws() as draws:
        if WAYS[rank] == "meta":
            with torch.device("meta"):
                model = GPT(CONFIG)
            model.to_empty(device="cpu")
        else:
            model = GPT(CONFIG)
        if WAYS[rank] == "built, then copied":
            model = copy.deepcopy(model)
        torch.manual_seed(0)
        model.init_weights()
    seconds = time.perf_counter() - start
    peak = max(memory()[1] - base, *(held for _, held in trace))
    done.set()
    watcher.join()
    content, size = hashlib.sha256(), sum(p.nbytes for p in model.parameters())
    for p in model.state_dict().values():
        content.update(p.numpy())
    found = dict(trace=trace, peak=peak, draws=draws.count, seconds=seconds, size=size)
    return found | {"sha256": content.hexdigest()}


built = dict(zip(WAYS, lesson.ranks(len(WAYS), build, timeout_s=150)))
size = built["meta"]["size"]
copies = {way: b["peak"] / size for way, b in built.items()}
rows = [
    (way, copies[way], b["draws"], b["draws"] / (size / 4), b["seconds"])
    for way, b in built.items()
]
columns = ["way", "peak / model", "random numbers", "per parameter", "seconds"]
lesson.table(columns, rows, f"{size // 4:,} parameters, {size / 1e6:.0f} MB")
lesson.holds(copies["built, then copied"] >= 1.9, "two copies, if it is built elsewhere")
lesson.holds(max(copies["built in place"], copies["meta"]) <= 1.1, "one copy, if it is not")
draws = [b["draws"] for b in built.values()]
lesson.holds(draws[0] == draws[1] > 1.5 * draws[2], "on meta no random number is drawn in vain")
lesson.holds(len({b["sha256"] for b in built.values()}) == 1, "the same model, bit for bit")

# %%
fig = lesson.figure(7, 3)
ax = fig.subplots()
for (way, b), color in zip(built.items(), ("crimson", "tab:orange", "tab:blue")):
    seconds, held = zip(*b["trace"])
    ax.plot(seconds, [x / size for x in held], color=color, label=way)
ax.set(xlabel="seconds", ylabel="memory / size of the model", ylim=(0, None))
ax.legend()
lesson.save(fig, "13_meta")

# %% [markdown]
# ## What it breaks
# `to_empty` makes memory for every tensor and puts nothing in. So whatever got its value while the
# module was built has lost it: weights, but **buffers** too, which no optimizer knows. And two
# modules that shared a table have one each. In deterministic mode torch fills new memory with NaN,
# and nothing forgotten can hide.

# %%
torch.use_deterministic_algorithms(True)
with torch.device("meta"):
    model = GPT(replace(CONFIG, n_layer=1))
    pair = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    pair[1].weight = pair[0].weight
tied = pair[1].weight is pair[0].weight
model.to_empty(device="cpu"), pair.to_empty(device="cpu")
torch.use_deterministic_algorithms(False)
lost = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.isnan().all()]
model.init_weights()
left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.isnan().any()]
lesson.holds("cos" in lost and "sin" in lost and not left, "init_weights fills the buffers as well")
lesson.holds(tied and pair[1].weight is not pair[0].weight, "to_empty unties a shared table")

# %% [markdown]
# `model.py` ties by having no second table: the head *is* `embed.weight`, looked up when used.
#
# ## Trap
# Without that mode, memory fresh from the system is zero, and zero looks harmless. Rotary tables of
# zeros turn every query and key into 0: attention takes the plain mean of what came before. Nothing
# fails, the loss falls; it only falls less.

# %%
SMALL = replace(
    CONFIG,
    n_layer=2,
    n_embd=64,
    n_head=2,
    n_kv_head=2,
    head_dim=32,
    mlp_hidden=256,
    vocab_size=256,
    seq_len=64,
)
text = torch.from_numpy(lesson.bytes_of_stdlib(500_000))


def losses(forgotten: bool, steps: int = 120) -> list[float]:
    model, gen, curve = GPT(SMALL), torch.Generator().manual_seed(0), []
    torch.manual_seed(0)
    model.init_weights()
    if forgotten:
        model.cos.zero_(), model.sin.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(steps):
        at = torch.randint(0, len(text) - 65, (8,), generator=gen).tolist()
        batch = torch.stack([text[i : i + 65] for i in at])
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


curves = {"filled": losses(False), "forgotten": losses(True)}
rows = [(name, c[0], sum(c[-20:]) / 20) for name, c in curves.items()]
lesson.table(["rotary tables", "first loss", "mean of the last 20"], rows)
lesson.holds(
    rows[0][2] + 0.03 < rows[1][2] < rows[1][1] - 1, "it learns, but worse, and without an error"
)

# %% [markdown]
# ## Exercise
# `exercises/ex13.py`: bring any model from meta to a device. `python course/check.py 13`
