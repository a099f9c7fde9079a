# %% [markdown]
# # 40. Twins: one seed for all ranks
#
# **Question.** A matrix of weights is cut over several ranks, and each rank draws its own part.
# From which random seed?
#
# **Afterwards** you can seed a model that is cut over ranks so that its parts differ, its copies
# agree, and the number of ranks does not matter; and you can find twins in trained weights.
#
# Source: *擴展的驚喜*, "啟動,第二次嘗試" (a run whose tensor-parallel ranks all had one seed).
# Core file: `machinery/build.py`, `init_sharded`. Before: lesson 20. Next: lesson 30.
# Takes 9 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import torch
import torch.nn.functional as F

D = 32  # channels
H = 64  # hidden units of the whole layer
lesson.begin(40, "twins")
torch.set_num_threads(1)

# %% [markdown]
# ## Three ways to draw
# A layer has a matrix of 64 hidden units by 32 channels, cut by rows (a rank has some of the
# units), and a vector of 32 that every rank keeps a copy of. Each rank may take the same seed, or
# the seed plus its number; or it draws everything that there is, in one order, and keeps its part.


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
    whole, copies = joined(way, 0, 4)
    units = len(whole.unique(dim=0))
    alike = all(torch.equal(joined(way, 0, 1)[0], joined(way, 0, n)[0]) for n in (2, 4, 8))
    shared = sum(torch.equal(a, b) for a in whole.chunk(4) for b in joined(way, 1, 4)[0].chunk(4))
    agree = bool((copies == copies[0]).all())
    rows.append((way.__name__, units, *("yes" if x else "no" for x in (agree, alike)), shared))
columns = ["way", "different units", "copies agree", "same on 1 rank", "in seed 1 too"]
lesson.table(columns, rows, "64 units on 4 ranks, seed 0; parts that seed 1 has, too")
found = {row[0]: row[1:] for row in rows}
lesson.holds(found["same_seed"][0] == H // 4, "one seed: 4 ranks have 16 different units, not 64")
lesson.holds(found["seed_plus_rank"][1] == "no", "seed + rank: what should be copies differs")
lesson.holds(found["seed_plus_rank"][3] == 3, "seed + rank: seeds 0 and 1 share 3 parts of 4")
lesson.holds(found["whole_then_cut"] == (H, "yes", "yes", 0), "whole, then cut: right in all four")

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

# %% [markdown]
# ## How to find them
# In a trained model, look at the singular values: a matrix of 64 units with 32 pairs of twins has
# rank 32. So a check costs one line, and needs no second run to compare with.

# %%
with torch.no_grad():
    values = torch.linalg.svdvals(torch.cat([W, V], -1).flatten(1, 2))  # (9, 64)
twins, others = values[::3], values[1::3]
lesson.holds(twins[:, 31].min() > 0.1 and twins[:, 32].max() < 1e-4, "twins: 64 units have rank 32")
lesson.holds(others[:, 63].min() > 1e-3, "two seeds: all 64 singular values are above 0")

# %%
fig = lesson.figure(8, 3)
left, right = fig.subplots(1, 2)
colors = ("crimson", "seagreen", "gray")
for i, (way, color) in enumerate(zip(ways, colors)):
    for seed in range(3):
        label = way if seed == 0 else None
        left.semilogy(range(0, 1501, 100), [e[i, seed] for e in curve], color=color, label=label)
left.set(xlabel="step", ylabel="error / variance", title="three students each"), left.legend()
for i in (0, 1):
    right.plot(range(1, 65), values[i], color=colors[i], label=ways[i])
right.set(title="singular values of 64 units", xlabel="number", ylim=0), right.legend()
lesson.save(fig, "40_twins")

# %% [markdown]
# ## Trap
# Nothing warns you. A run with twins trains and its loss falls. These students end with 9.2 times
# the error (8.6 to 12.6 with four seeds); of its own two ranks the source says "not catastrophic".
# A comparison with a run on one rank shows it, if anybody makes one. Draw the whole matrix and cut
# it, as `init_sharded` does (machinery/build.py), and there is nothing to remember. That costs
# memory for one whole matrix at a time; the exercise does without.
#
# ## Exercise
# `exercises/ex40.py`: draw a part of a matrix, without the rest. `python course/check.py 40`
