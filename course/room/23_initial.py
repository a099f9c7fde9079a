# %% [markdown]
# # 23. Initial values: a model that is nowhere, and one in parts
#
# **Question.** What do you save by building a model on the device `meta`, and what breaks? And when
# a matrix is cut into parts, and each process draws its own: from which random seed?
#
# **Afterwards** you can build a model that would not fit into memory twice, and find values that
# got lost on the way. You can also seed a model that is cut over several processes, so that its
# parts differ, its copies agree, and the number of processes does not matter.
#
# Sources: *nanobot pre-train*, "Meta张量初始化(节省显存)" (build on meta, initialize last);
# *擴展的驚喜*, "啟動,第二次嘗試" (a run whose tensor-parallel ranks all had one seed). Core files:
# `model.py`, `GPT.init_weights`; `machinery/build.py`, `build_model` and `init_sharded`.
# Before: lesson 8. Takes 15 seconds on two cores.

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
# A tensor on the device `meta` has a shape and a dtype, but no memory. You can build a model there,
# count its parameters, plan how to split it, and only then decide where it will live.

# %%
with torch.device("meta"):
    d24 = GPT(replace(PRESETS["d24"].model, extras=()))
count = sum(p.numel() for p in d24.parameters())
lesson.holds(count == 780_140_544, "d24 has 780,140,544 parameters on meta; elsewhere, 3.1 GB")

# %% [markdown]
# ## Three ways to a model
# Each way runs in a process of its own, which asks the system for the most memory it has ever held.
# `copy.deepcopy` plays the move to a device: the model is built in one place, then exists a second
# time where it will live. (With real GPUs the first copy is in the host's memory, and there are
# eight of them if eight processes on a machine build at once.)
#
# Torch gives each weight an initial value when it builds the module, and then `init_weights` gives
# it another. So count the random numbers, too.


# %%
def memory() -> tuple[int, int]:
    """Bytes that this process holds now, and the most it has ever held."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, which counts in bytes
        held = 1024 * int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())]))
        return held, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return tuple(1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))


class Draws(TorchDispatchMode):
    """Counts the random numbers drawn."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("uniform_", "normal_") and not args[0].is_meta:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def build(rank: int, world: int) -> tuple:
    """One of the WAYS -> bytes of the model, most bytes held, random numbers drawn, a hash."""
    with Draws():  # what torch loads on its first use is not the model's
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
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    return weights.nbytes, peak, draws.count, hashlib.sha256(weights).hexdigest()


rows = []
hashes = set()
for way, found in zip(WAYS, lesson.ranks(len(WAYS), build, timeout_s=150)):
    size, peak, draws, content = found
    rows.append((way, peak / size, 4 * draws / size))
    hashes.add(content)
columns = ["way", "peak / model", "random numbers per parameter"]
lesson.table(columns, rows, f"{size // 4:,} parameters, {size / 1e6:.0f} MB")
_, copies, drawn = zip(*rows)
lesson.holds(copies[0] >= 1.9, "built, then copied: two copies in memory")
lesson.holds(max(copies[1:]) <= 1.1, "built in place or on meta: one copy in memory")
twice = drawn[0] == drawn[1] > 2 * drawn[2]
lesson.holds(twice, "without meta, you draw more than twice as many random numbers")
lesson.holds(len(hashes) == 1, "all three ways end in the same model, bit for bit")

# %% [markdown]
# Meta and building in place need the same memory; meta only saves the first round of random
# numbers. It saves memory where you cannot build in place: when the pieces of a model go to many
# devices, and no single device has room for the whole.
#
# ## What it breaks
# `to_empty` makes memory for every tensor and leaves it empty. Everything that got its value while
# the module was built has now lost it: the weights, and also the **buffers**, which no optimizer
# knows about. And two modules that shared a table now have one each. In deterministic mode torch
# fills new memory with NaN, and then nothing you forgot can hide.

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
# `model.py` ties without a second table: its head *is* `embed.weight`, looked up whenever it is
# used.
#
# ## A matrix in parts: three ways to draw
# When no device has room for the whole model, several processes (called *ranks*) each make their
# own part of the empty memory and draw values for it. Take a layer with a matrix of 64 hidden units
# by 32 channels, cut by rows (each rank has some of the units), and a vector of 32 that every rank
# keeps a copy of. All ranks can use the same seed; or each adds its own number to the seed; or each
# draws everything there is, in the same order, and keeps its part.


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
    """-> the whole matrix, and the copies of the vector."""
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
lesson.table(columns, rows, "64 units on 4 ranks, seed 0; last, how many parts seed 1 has too")
same, plus, cut = (row[1:] for row in rows)
lesson.holds(same[0] == H // 4, "one seed: 4 ranks have 16 different units, not 64")
lesson.holds(plus[1] == "no", "seed + rank: what should be copies differs")
lesson.holds(plus[3] == 3, "seed + rank: seeds 0 and 1 share 3 parts of 4")
lesson.holds(cut == (H, "yes", "yes", 0), "whole, then cut: right in all four")

# %% [markdown]
# Two units with the same weights going in *and* coming out are **twins**: they compute the same
# thing, so they get the same gradient, so they stay the same. No training step can part them.
#
# Seed + rank is the usual remedy for whatever is cut, and the source's. It leaves you two things to
# remember. Copies need a seed of their own, the same on all ranks (and so does dropout, wherever
# activations are copies). And a second run with seed + 1, which you meant as a repetition, is made
# of nearly the same random numbers.
#
# ## What twins cost
# Nine students learn a network of 64 hidden units from its answers. Each has two shards of 32
# units: both drawn from one seed, or from two seeds, or one shard alone (the other is zero).


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
lesson.holds(error[0].min() > 5 * error[1].max(), "with twins the error is over 5 times as large")
alone = (error[0] / error[2] - 1).abs().max()
lesson.holds(alone < 0.3, "a layer of twins is about as good as half a layer")
with torch.no_grad():
    units = torch.cat([W, V], -1).flatten(1, 2)  # (9, 64, 64)
    ranks = torch.linalg.matrix_rank(units, atol=1e-3).view(3, 3).T  # (ways, seeds)
rank_64 = (ranks[0] == 32).all() and (ranks[1] == 64).all()
lesson.holds(rank_64, "64 units with twins have rank 32, those of two seeds rank 64")

# %% [markdown]
# This is also how you find twins in trained weights: a matrix of 64 units that are 32 pairs of
# twins has rank 32. The check costs one line, and you need no second run to compare with.

# %%
fig = lesson.figure()
ax = fig.subplots()
for i, way in enumerate(ways):
    ax.semilogy(range(0, 1501, 100), [e[i].mean() for e in curve], label=way)
ax.set(xlabel="step", ylabel="error / variance", title="mean error of three students"), ax.legend()
lesson.save(fig, "23_initial")

# %% [markdown]
# ## Trap
# Nothing fails when an initial value is wrong, and the loss still falls: you only wonder why your
# model is a little worse than everybody else's. Fresh memory from the system is often zero, and
# zero looks harmless. But rotary tables (the cos and sin of each position, lesson 8) of zeros turn
# every query and key into 0, and attention takes the plain mean of what came before. Buffers have
# no gradient, are not in `parameters()`, and, when registered with `persistent=False`, are not in a
# checkpoint either. Build in deterministic mode once, and look for NaN.
#
# Twins are just as quiet. These students end with 9.2 times the error (8.6 to 12.6 with four
# seeds); the source calls its own two ranks "not catastrophic". Draw the whole matrix and cut it,
# as `init_sharded` does (machinery/build.py), and there is nothing to remember. The price is memory
# for one whole matrix at a time. (You can avoid even that: give each block of numbers a generator
# seeded by the seed, the weight's name and the block's number. Each rank draws the blocks it has.)
#
# ## Exercise
# `exercises/ex23.py`: bring any model from meta to a device. `python course/check.py 23`
