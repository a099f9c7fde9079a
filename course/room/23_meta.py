# %% [markdown]
# # 23. Meta: a model that is nowhere
#
# **Afterwards** you can build a model that does not fit twice into memory, and find lost values.
#
# **Question.** What does building a model on the device `meta` save, and what does it break?
#
# Source: *nanobot pre-train*, "Meta张量初始化(节省显存)" (build on meta, initialize last).
# Core files: `model.py`, `GPT.init_weights`; `machinery/build.py`, `build_model`.
# Before: lesson 3. Next: lesson 20. Takes 15 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import copy
import hashlib
import os
import resource
import subprocess
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
lesson.begin(23, "meta")

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
grown = memory()[0] - before
count = sum(p.numel() for p in d24.parameters())
print(f"d24 on meta: {count:,} parameters, {4 * count / 1e9:.1f} GB; took {grown / 1e6:.1f} MB")
lesson.holds(count == 780_140_544, "d24 has 780,140,544 parameters, counted on meta")
lesson.holds(grown < 50e6, "d24 on meta takes less than 50 MB, where its weights take 3,121 MB")

# %% [markdown]
# ## Three ways to a model
# Each runs in a process of its own, which asks the system for the most memory that it ever held.
# `copy.deepcopy` stands for the move to a device: the model is built in the host's memory, then
# exists again where it will live. (With real GPUs the first copy is in host memory: eight of them,
# if eight ranks of a machine do it at once.)
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
    """One of the WAYS -> most bytes held, random numbers drawn, a hash of the weights."""
    for device in ("cpu", "meta"):  # what torch loads when first used is not the model's
        with Draws(), torch.device(device):
            copy.deepcopy(GPT(replace(CONFIG, n_layer=1, n_embd=64, vocab_size=64))).init_weights()
    base = memory()[0]
    start = time.perf_counter()
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
    peak = memory()[1] - base
    content = hashlib.sha256()
    size = sum(p.nbytes for p in model.parameters())
    for p in model.state_dict().values():
        content.update(p.numpy())
    found = dict(peak=peak, draws=draws.count, seconds=seconds, size=size)
    return found | {"sha256": content.hexdigest()}


built = dict(zip(WAYS, lesson.ranks(len(WAYS), build, timeout_s=150)))
size = built["meta"]["size"]
copies = {way: b["peak"] / size for way, b in built.items()}
rows = []
for way, b in built.items():
    rows.append((way, copies[way], b["draws"], 4 * b["draws"] / size, b["seconds"]))
columns = ["way", "peak / model", "random numbers", "per parameter", "seconds"]
lesson.table(columns, rows, f"{size // 4:,} parameters, {size / 1e6:.0f} MB")
lesson.holds(copies["built, then copied"] >= 1.9, "built, then copied: two copies in memory")
one = max(copies["built in place"], copies["meta"])
lesson.holds(one <= 1.1, "built in place or on meta: one copy in memory")
draws = [b["draws"] for b in built.values()]
hashes = {b["sha256"] for b in built.values()}
twice = draws[0] == draws[1] > 2 * draws[2]
lesson.holds(twice, "without meta, more than twice as many random numbers are drawn")
lesson.holds(len(hashes) == 1, "all three ways end in the same model, bit for bit")

# %% [markdown]
# So meta and building in place need the same memory; meta saves the first round of random numbers.
# Where it saves memory is where one cannot build in place: when the pieces of a model go to many
# devices, and no single one has room for the whole.
#
# ## What it breaks
# `to_empty` makes memory for every tensor and leaves it empty. So whatever got its value while the
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
# ## What a forgotten table costs
# Without that mode, memory fresh from the system is zero, and zero looks harmless. Rotary tables
# (cos and sin of each position, lesson 8) of zeros turn every query and key into 0: attention
# takes the plain mean of what came before. Train the same small model twice, with the tables filled
# and with the tables forgotten.

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
    model = GPT(SMALL)
    gen = torch.Generator().manual_seed(0)
    curve = []
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
columns = ["rotary tables", "first loss", "mean of the last 20"]
lesson.table(columns, rows, "120 steps on bytes of Python, nats per byte")
lesson.holds(rows[1][2] < rows[1][1] - 1, "with forgotten tables it learns, without an error")
lesson.holds(rows[0][2] + 0.03 < rows[1][2], "with forgotten tables it learns less")

# %%
fig = lesson.figure(8, 3)
left, right = fig.subplots(1, 2)
for y, (way, b) in enumerate(built.items()):
    drawn = b["draws"] / (size / 4)
    for x, number, color in ((0.2, copies[way], "tab:blue"), (-0.2, drawn, "tab:orange")):
        label = f"{number:.1f} {'copies in memory' if x > 0 else 'random numbers a weight'}"
        left.barh(y - x, number, 0.38, color=color)
        left.text(number + 0.05, y - x, label, va="center", fontsize=8)
left.set_yticks(range(3), list(built)), left.invert_yaxis()
left.set(xlim=(0, 5), title="what meta saves")
for (name, curve), color in zip(curves.items(), ("tab:blue", "crimson")):
    smooth = [sum(curve[i : i + 10]) / 10 for i in range(0, len(curve), 10)]
    right.plot(range(5, len(curve), 10), smooth, color=color, label=f"rotary tables {name}")
right.set(xlabel="step", ylabel="nats per byte", title="what a forgotten table costs")
right.legend()
lesson.save(fig, "23_meta")

# %% [markdown]
# ## Trap
# Nothing fails when a buffer is forgotten, and the loss falls: you would only wonder why your model
# is a little worse than others'. Buffers have no gradient, are not in `parameters()`, and, when
# registered with `persistent=False`, are not in a checkpoint. Build in deterministic mode once and
# look for NaN.
#
# ## Exercise
# `exercises/ex23.py`: bring any model from meta to a device. `python course/check.py 23`
