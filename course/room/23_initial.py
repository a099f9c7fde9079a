# %% [markdown]
# # 23. Initial values: a model that is nowhere, and one in parts
#
# **Question.** What does building a model on the device `meta` save, and what does it break? And
# when a matrix is cut over several ranks and each draws its part: from which random seed?
#
# **Afterwards** you can build a model that does not fit twice into memory, and find lost values;
# and seed one that is cut over ranks so that its parts differ, its copies agree, and the number of
# ranks does not matter.
#
# Sources: *nanobot pre-train*, "Meta张量初始化(节省显存)" (build on meta, initialize last);
# *擴展的驚喜*, "啟動,第二次嘗試" (a run whose tensor-parallel ranks all had one seed). Core files:
# `model.py`, `GPT.init_weights`; `machinery/build.py`, `build_model` and `init_sharded`.
# Before: lesson 22. Next: lesson 24. Takes 15 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import copy
import hashlib
import os
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from config import PRESETS, GPTConfig
from model import GPT

torch.set_num_threads(1)
WAYS = ("built, then copied", "built in place", "meta")
CONFIG = GPTConfig(
    n_layer=8, n_embd=512, n_head=4, n_kv_head=4, mlp_hidden=2048, vocab_size=14_464
)  # 40M parameters
D = 32  # channels of the layer that is cut
H = 64  # its hidden units
lesson.begin(23, "initial values")

# %% [markdown]
# ## Nothing, in the right shape
# A tensor on the device `meta` has a shape and a dtype, and no memory. One can build a model there,
# count its parameters, plan its sharding, and only then decide where it will live.

# %%
with torch.device("meta"):
    d24 = GPT(replace(PRESETS["d24"].model, extras=()))
count = sum(p.numel() for p in d24.parameters())
print(f"d24 on meta: {count:,} parameters; anywhere else, {4 * count / 1e9:.1f} GB")
lesson.holds(count == 780_140_544, "d24 has 780,140,544 parameters, counted on meta")

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
def memory() -> tuple[int, int]:
    """Bytes that this process holds now, and the most that it has ever held."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, which counts in bytes
        held = 1024 * int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())]))
        return held, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return tuple(1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))


class Draws(TorchDispatchMode):
    """Counts the random numbers that are drawn."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("uniform_", "normal_") and not args[0].is_meta:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def build(rank: int, world: int) -> tuple:
    """One of the WAYS -> bytes of the model, most bytes held, random numbers drawn, a hash."""
    for device in ("cpu", "meta"):  # what torch loads when first used is not the model's
        with Draws(), torch.device(device):
            copy.deepcopy(GPT(replace(CONFIG, n_layer=1, n_embd=64, vocab_size=64))).init_weights()
    base = memory()[0]
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
    peak = memory()[1] - base
    content = hashlib.sha256()
    for p in model.state_dict().values():
        content.update(p.numpy())
    return sum(p.nbytes for p in model.parameters()), peak, draws.count, content.hexdigest()


rows = []
hashes = set()
for way, found in zip(WAYS, lesson.ranks(len(WAYS), build, timeout_s=150)):
    size, peak, draws, content = found
    rows.append((way, peak / size, draws, 4 * draws / size))
    hashes.add(content)
columns = ["way", "peak / model", "random numbers", "per parameter"]
lesson.table(columns, rows, f"{size // 4:,} parameters, {size / 1e6:.0f} MB")
_, copies, draws, drawn = zip(*rows)
lesson.holds(copies[0] >= 1.9, "built, then copied: two copies in memory")
lesson.holds(max(copies[1:]) <= 1.1, "built in place or on meta: one copy in memory")
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
tensors = lambda: [*model.named_parameters(), *model.named_buffers()]
lost = [n for n, t in tensors() if t.isnan().all()]
model.init_weights()
left = [n for n, t in tensors() if t.isnan().any()]
lesson.holds("cos" in lost and "sin" in lost and not left, "init_weights fills the buffers as well")
lesson.holds(tied and pair[1].weight is not pair[0].weight, "to_empty unties a shared table")

# %% [markdown]
# `model.py` ties by having no second table: the head *is* `embed.weight`, looked up when used.
#
# ## A matrix in parts: three ways to draw
# When no device has room for the whole, each rank makes its part of the empty memory and draws the
# values for it. A layer has a matrix of 64 hidden units by 32 channels, cut by rows (a rank has
# some of the units), and a vector of 32 that every rank keeps a copy of. Each rank may take the
# same seed, or the seed plus its number; or it draws everything that there is, in one order, and
# keeps its part.


# %%
def generator(seed):
    return torch.Generator().manual_seed(seed)


def same_seed(seed, rank, world):
    g = generator(seed)
    return torch.randn(H // world, D, generator=g), torch.randn(D, generator=g)


def seed_plus_rank(seed, rank, world):
    return same_seed(seed + rank, rank, world)


def whole_then_cut(seed, rank, world):
    g = generator(seed)
    return torch.randn(H, D, generator=g).chunk(world)[rank], torch.randn(D, generator=g)


def joined(way, seed, world):
    """-> the whole matrix, the copies of the vector."""
    parts, copies = zip(*(way(seed, rank, world) for rank in range(world)))
    return torch.cat(parts), torch.stack(copies)


rows = []
for way in (same_seed, seed_plus_rank, whole_then_cut):
    whole, vectors = joined(way, 0, 4)
    units = len(whole.unique(dim=0))
    alike = all(torch.equal(joined(way, 0, 1)[0], joined(way, 0, n)[0]) for n in (2, 4, 8))
    shared = sum(torch.equal(a, b) for a in whole.chunk(4) for b in joined(way, 1, 4)[0].chunk(4))
    agree = bool((vectors == vectors[0]).all())
    rows.append((way.__name__, units, *("yes" if x else "no" for x in (agree, alike)), shared))
columns = ["way", "different units", "copies agree", "same on 1 rank", "in seed 1 too"]
lesson.table(columns, rows, "64 units on 4 ranks, seed 0; parts that seed 1 has, too")
same, plus, cut = (row[1:] for row in rows)
lesson.holds(same[0] == H // 4, "one seed: 4 ranks have 16 different units, not 64")
lesson.holds(plus[1] == "no", "seed + rank: what should be copies differs")
lesson.holds(plus[3] == 3, "seed + rank: seeds 0 and 1 share 3 parts of 4")
lesson.holds(cut == (H, "yes", "yes", 0), "whole, then cut: right in all four")

# %% [markdown]
# Units with the same weights into them *and* out of them are **twins**: they compute the same, so
# they get the same gradient, so they stay the same. No step of training can part them.
#
# Seed + rank is the usual remedy for what is cut, and the source's. It leaves two things to
# remember: copies need a seed of their own, which is the same on all ranks (and so does dropout,
# where activations are copies). And a second run with seed + 1, meant as a repetition, is made of
# nearly the same random numbers.
#
# ## What twins cost
# Nine students learn a net of 64 hidden units from its answers. Each has two shards of 32 units:
# both drawn from one seed, from two seeds, or one shard alone (the other is zero).


# %%
def draw(seed, h=32, d=32):
    g = generator(seed)
    return torch.randn(h, d, generator=g) / d**0.5, torch.randn(d, h, generator=g).T / h**0.5


nothing = torch.zeros(2, 32, 32)
pairs = [(draw(s), b) for s in (1, 2, 3) for b in (draw(s), draw(s + 1000), nothing)]
W, V = (torch.stack([torch.stack([a[i], b[i]]) for a, b in pairs]).requires_grad_() for i in (0, 1))
net = lambda x, W, V: (F.relu(x @ W.mT) @ V).sum(-3)  # (..., 2, 32, 32) -> (..., batch, 32)
teacher = [t.unflatten(0, (2, 32)) for t in draw(0, h=H)]
optimizer = torch.optim.Adam([W, V], lr=3e-3)
g = generator(5)
curve = []
test = torch.randn(4096, 32, generator=g)
want = net(test, *teacher)
for step in range(1501):
    if step % 100 == 0:
        with torch.no_grad():
            off = (net(test, W, V) - want).square().mean((-1, -2)) / want.square().mean()
        curve.append(off.view(3, 3).T)  # (ways, seeds)
    x = torch.randn(256, 32, generator=g)
    loss = (net(x, W, V) - net(x, *teacher)).square().mean((-1, -2)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
error = curve[-1]
ways = ("one seed", "two seeds", "one shard alone")
rows = [(way, *error[i].tolist()) for i, way in enumerate(ways)]
columns = ["two shards of 32", "student 1", "student 2", "student 3"]
lesson.table(columns, rows, "error after 1,500 steps / variance of the answers")
print(f"one seed instead of two: {error[0].mean() / error[1].mean():.1f} times the error")
lesson.holds(torch.equal(W[::3, 0], W[::3, 1]), "1,500 steps later the twins have the same bits")
lesson.holds(error[0].min() > 5 * error[1].max(), "twins cost more than 5 times the error")
alone = (error[0] / error[2] - 1).abs().max()
lesson.holds(alone < 0.3, "with twins, the layer is about as good as half of it")
with torch.no_grad():
    units = torch.cat([W, V], -1).flatten(1, 2)  # (9, 64, 64)
    ranks = torch.linalg.matrix_rank(units, atol=1e-3).view(3, 3).T  # (ways, seeds)
rank_64 = (ranks[0] == 32).all() and (ranks[1] == 64).all()
lesson.holds(rank_64, "64 units with twins have rank 32, those of two seeds rank 64")

# %% [markdown]
# That is how to find twins in trained weights: a matrix of 64 units with 32 pairs of them has rank
# 32. A check costs one line, and needs no second run to compare with.

# %%
fig = lesson.figure(8, 3)
left, right = fig.subplots(1, 2)
for y in range(3):
    for x, number, color in ((0.2, copies[y], "tab:blue"), (-0.2, drawn[y], "tab:orange")):
        label = f"{number:.1f} {'copies in memory' if x > 0 else 'random numbers a weight'}"
        left.barh(y - x, number, 0.38, color=color)
        left.text(number + 0.05, y - x, label, va="center", fontsize=8)
left.set_yticks(range(3), WAYS), left.invert_yaxis()
left.set(xlim=(0, 5), title="what meta saves")
for i, (way, color) in enumerate(zip(ways, ("crimson", "seagreen", "gray"))):
    for seed in range(3):
        label = way if seed == 0 else None
        right.semilogy(range(0, 1501, 100), [e[i, seed] for e in curve], color=color, label=label)
right.set(xlabel="step", ylabel="error / variance", title="what twins cost"), right.legend()
lesson.save(fig, "23_initial")

# %% [markdown]
# ## Trap
# Nothing fails when an initial value is wrong, and the loss falls: you would only wonder why your
# model is a little worse than others'. Memory fresh from the system is often zero, and zero looks
# harmless: rotary tables (cos and sin of each position, lesson 8) of zeros turn every query and key
# into 0, and attention takes the plain mean of what came before. Buffers have no gradient, are not
# in `parameters()`, and, when registered with `persistent=False`, are not in a checkpoint. Build in
# deterministic mode once and look for NaN.
#
# Twins are as quiet. These students end with 9.2 times the error (8.6 to 12.6 with four seeds); of
# its own two ranks the source says "not catastrophic". Draw the whole matrix and cut it, as
# `init_sharded` does (machinery/build.py), and there is nothing to remember. That costs memory for
# one whole matrix at a time. (A generator for each block of numbers, seeded by the seed, the
# weight's name and the block's number, does without: a rank draws the blocks that it has.)
#
# ## Exercise
# `exercises/ex23.py`: bring any model from meta to a device. `python course/check.py 23`
