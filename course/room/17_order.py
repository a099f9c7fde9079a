# %% [markdown]
# # 17. Order: which row comes at position p
#
# **Afterwards** you can shuffle a billion rows without a list of them, anew in each epoch, and say
# which row comes at any position of a run without replaying what came before.
#
# **Question.** A run planned for more *steps* lost speed, in drops that were sharper and came more
# often. What did its loader remember, and why does a seed belong to a position?
#
# Source: *擴展的驚喜*, "謎題 #2 – 持續的輸送量下降"; *Pré-Treino Eficiente de Modelos de
# Linguagem*, "Megatron Core User Guide" (.bin and .idx). Core file: `data.py`, from `Permutation`
# to `Order`. Before: lesson 11. Next: lesson 17 (what a batch sees). Takes 5 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import timeit
import tracemalloc
from hashlib import blake2b
from math import isqrt

import numpy as np

from data import Order, Permutation, Quota

BATCH = 512
BIG = 10**12
lesson.begin(17, "order")

# %% [markdown]
# ## An index that grows with the run
# The loader of the source (`nanosets`) built its whole order in advance: one epoch, that is, each
# row once, shuffled; then repeated until there was a sample for every row of every step. It kept
# the number of the data set and the number of the sample, 8 bytes each, in every process. Megatron
# keeps 12 bytes: where each row begins (a document and an offset), and a shuffle of the rows.


# %%
def nanosets(rows: int, samples: int, seed: int) -> np.ndarray:
    """-> int64 (2, samples): data set and sample, for the whole run."""
    epoch = np.random.default_rng(seed).permutation(rows)
    return np.stack([np.zeros(samples, np.int64), np.resize(epoch, samples)])


def megatron(lengths: np.ndarray, row: int) -> np.ndarray:
    """Documents end to end, cut into rows -> int32 (rows, 2): the document and offset where each
    begins."""
    ends = np.cumsum(lengths)
    at = np.arange(ends[-1] // row) * row
    document = np.searchsorted(ends, at, side="right")
    return np.stack([document, at - (ends - lengths)[document]], 1).astype(np.int32)


SHORT = 32_000  # steps
LONG = 3_200_000  # steps
index = nanosets(1_000_000, SHORT * BATCH, seed=1)
per_sample = index.nbytes / (SHORT * BATCH)
lengths = np.random.default_rng(0).integers(1, 400, 300)
begins = megatron(lengths, 128)
stream = [[d, i] for d, n in enumerate(lengths) for i in range(n)]  # token by token
found = begins.tolist() == stream[::128][: len(begins)]
lesson.holds(found, "Megatron's index says where each 128th token of the documents is")
tracemalloc.start()
order = Order([1_000_000_000, 50_000_000], [0.95, 0.05], seed=1)
for p in range(1000):
    order(p), order(BIG + p)
held = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
kinds = {"nanosets": per_sample, "Megatron": begins.nbytes / len(begins) + 4}
runs = {"32K steps": SHORT * BATCH, "3.2M steps": LONG * BATCH, "11T tokens": 11e12 / 4096}
rows = [(name, *(size * n / 1e6 for n in runs.values())) for name, size in kinds.items()]
rows.append(("Order, of this project", *[held / 1e6] * 3))
lesson.table(["index", *runs], rows, "MB in each process; 512 rows of 4,096 tokens a step")
lesson.holds(index.nbytes == 262_144_000, "the index of 32K steps, built here, has 262 MB")
lesson.holds(
    held < 100_000, "asked 2,000 times, near 0 and near 10^12, Order holds less than 0.1 MB"
)
del index

# %% [markdown]
# The document prints what differs between its two configurations, with the headings swapped: under
# "Short run (32k steps)" stand the numbers of 3.2M steps. Each adds up by itself, so nothing warns.

# %%
printed = {"Short run (32k steps)": (2_560_000, 640_000, 3_200_000)}  # decay from, decay, steps
printed |= {"Long run (3.2M steps)": (26_000, 6_000, 32_000)}
adds_up = all(begin + decay == steps for begin, decay, steps in printed.values())
lesson.arithmetic(adds_up, "in both configurations, decay ends exactly at the last step")


# %% [markdown]
# ## A shuffle without a list
# `Order` answers the question "which row comes at position p?" as a function does: it computes the
# answer from p. Drawing a row at random will not do: in n draws, some rows come twice, and 37% not
# at all. A shuffle is a *bijection*: each position gets one row, and no two positions the same.
#
# **Step 1: a pair.** Write the position as a place in a table of a x b cells: `divmod(x, b)` gives
# a row of the table (`left`) and a column (`right`).
#
# **Step 2: a round.** Move `left` by a number that is computed from `right` with a hash: a function
# that looks random, and gives the same number each time. So each column of the table is turned by
# an amount of its own. `right` is still there, so you can compute the amount again and turn back:
# no two cells have merged, so the round is a bijection.
#
# **Step 3: more rounds,** in turn: `right` by a hash of `left`, `left` by a hash of `right`. After
# enough rounds a position may end anywhere. This is a Feistel network.
#
# **Step 4: walk on.** A table of a x b cells that has at least n may have more. If x lands on a
# cell that is not below n, shuffle that cell, until it lands below n. No two walks end in one cell,
# since the network is a bijection: follow it backwards and you find where the walk came from.


# %%
def turn(key: str, i: int, half: int) -> int:
    """A number that looks random, from a key, the number of the round, and one half of a pair."""
    return int.from_bytes(blake2b(f"{key}/{i}/{half}".encode(), digest_size=8).digest(), "big")


def rounds(x: int, n: int, key: str, count: int) -> list[tuple[int, int]]:
    """A cell -> its pair at first and after each round."""
    b = isqrt(n)
    a = -(-n // b)  # a * b is n or a little more
    pairs = [divmod(x, b)]
    for i in range(count):
        left, right = pairs[-1]
        if i % 2 == 0:
            left = (left + turn(key, i, right)) % a
        else:
            right = (right + turn(key, i, left)) % b
        pairs.append((left, right))
    return pairs


def walk(x: int, n: int, key: str, count: int = 8) -> list[int]:
    """A position -> the cells it lands on; the last one, below n, is its row."""
    cells = []
    b = isqrt(n)
    while not cells or cells[-1] >= n:
        left, right = rounds(cells[-1] if cells else x, n, key, count)[-1]
        cells.append(left * b + right)
    return cells


def shuffled(x: int, n: int, key: str) -> int:
    return walk(x, n, key)[-1]


rows = []
walks = [walk(x, 10, "seed 1", 4) for x in range(10)]
for x in range(10):
    pairs = rounds(x, 10, "seed 1", 4)
    rows.append((x, *(f"{left},{right}" for left, right in pairs), str(walks[x])))
columns = ["position", "pair", "left", "right", "left again", "right again", "cells, the row last"]
lesson.table(
    columns, rows, "ten rows in a table of 4 x 3 cells, the pair after each of four rounds"
)
lesson.holds(sorted(w[-1] for w in walks) == list(range(10)), "each of the ten rows comes once")
lesson.holds(max(map(len, walks)) > 1, "a position that lands on cell 10 or 11 walks on")
bijection = all({shuffled(x, n, "k") for x in range(n)} == {*range(n)} for n in range(1, 60))
lesson.holds(bijection, "for each n from 1 to 59, n positions get the rows 0 to n - 1, all of them")
drawn = {turn("drawn", 0, x) % 5000 for x in range(5000)}
lesson.holds(0.35 < 1 - len(drawn) / 5000 < 0.39, "of 5,000 rows drawn 5,000 times, 37% never come")

# %% [markdown]
# How many rounds? Take seven rows and 4,000 keys, and count how often each position gets each row.
# Even fair counts deviate by chance, but their chi-square stays within a few standard deviations
# (sd) of its mean. (It is the sum of squared deviations, each over the expected count, times 6/7
# here: seven positions never share a row.) The project takes 12 rounds; it hashes the key once, and
# turns by a cheaper function of it (`mix64`).


# %%
def bias(shuffle, n: int = 7, keys: int = 4000) -> tuple[float, float]:
    """-> largest deviation of a count in %, that of chi-square in standard deviations."""
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[range(n), [shuffle(x, n, key) for x in range(n)]] += 1
    even = keys / n
    free = (n - 1) ** 2
    chi = ((counts - even) ** 2 / even).sum() * (n - 1) / n
    return 100 * abs(counts / even - 1).max(), (chi - free) / (2 * free) ** 0.5


COUNTS = (1, 2, 4, 8)
rows = [(str(c), *bias(lambda x, n, key, c=c: walk(x, n, key, c)[-1])) for c in COUNTS]
rows.append(("the project's 12", *bias(lambda x, n, key: Permutation(n, key)(x))))
lesson.table(["rounds", "worst count, % off", "chi-square, sd off"], rows, "7 rows, 4,000 keys")
off = [row[2] for row in rows]
lesson.holds(
    min(off[:3]) > 8, "after four rounds or fewer, some rows come at some places too often"
)
lesson.holds(max(abs(x) for x in off[3:]) < 4, "after eight, no bias is seen in 4,000 shuffles")

# %% [markdown]
# ## Epochs, sources, and why the seed belongs to a position
# Position p of a source is position `p % n` of epoch `p // n`. With the epoch in the key, each has
# a shuffle of its own; a repeated index plays the same rows in the same order. With the source in
# the key, so has each source; `Quota` deals the positions to the sources. A generator of random
# numbers has a *state*, which is right only if every step before was made. A key has none: seed and
# position say it all. Save p, and the run goes on, on any number of machines.

# %%
n = 5000
repeated = nanosets(n, 2 * n, seed=1)[1].reshape(2, n)
ours = np.array([Order([n], [1.0], 1)(p)[1] for p in range(2 * n)]).reshape(2, n)
same = [np.mean(two[0] == two[1]) for two in (repeated, ours)]
lesson.holds(same[0] == 1.0, "the repeated index gives epoch 2 in the order of epoch 1")
lesson.holds(same[1] < 0.01 and sorted(ours[1]) == list(range(n)), "Order shuffles epoch 2 anew")
sources = np.array([0.6, 0.3, 0.1])
dealt = np.zeros(3)
most = 0.0
quota = Quota(sources)
for p in range(3000):
    dealt[quota(p)[0]] += 1
    most = max(most, np.abs(dealt - (p + 1) * sources).max())
lesson.holds(most < 1, "after any number of rows, each source has had its share within one row")
ask = lambda p: [order(p + i) for i in range(200)]
us = [5000 * min(timeit.repeat(lambda p=p: ask(p), number=1, repeat=9)) for p in (0, BIG)]
print(f"Order: {us[0]:.0f} us for a position near 0, {us[1]:.0f} us near 10^12")
lesson.timed(us[1] < 3 * us[0], "position 10^12 costs about as much as position 0")

# %%
fig = lesson.figure(10, 2.8)
left, *panels = fig.subplots(1, 4, width_ratios=[3, 2, 2, 2])
steps = np.array([1e3, 1e7])
left.loglog(steps, 16 * steps * BATCH, color="crimson")
left.plot([SHORT, LONG], [16 * SHORT * BATCH, 16 * LONG * BATCH], "o", color="crimson")
left.text(SHORT * 1.7, 1.1e8, "32K: 262 MB", color="crimson")
left.text(1.1e3, 3e10, "3.2M: 26 GB", color="crimson")
left.loglog(steps, [held] * 2, color="tab:blue")
left.text(1.5e3, held * 1.7, "Order", color="tab:blue")
left.set(xlabel="steps of the run", ylabel="bytes of index in a process", ylim=(1e3, 1e12))
for ax, count in zip(panels, (1, 2, 8)):
    ax.plot([walk(x, 961, "figure", count)[-1] for x in range(961)], ".", ms=2)
    ax.set(title=f"rounds: {count}", xlabel="position", xticks=[0, 961], yticks=[0, 961])
panels[0].set(ylabel="row")
lesson.save(fig, "17_order")

# %% [markdown]
# ## Trap
# A key is not a sum. Add the seed and the epoch, and seed 1 in its epoch 2 plays what seed 2 plays
# in epoch 1: two runs that should differ by chance alone share their order, shifted by an epoch.
# Write the parts side by side, with something between them ("1/11" is not "11/1").

# %%
runs = [(seed, source, e) for seed in range(5) for source in (0, 1) for e in range(6)]
kinds = {"seed + epoch + 1000 x source": lambda seed, source, e: seed + e + 1000 * source}
kinds["seed/source/epoch"] = lambda seed, source, e: f"{seed}/{source}/{e}"
play = lambda key: tuple(shuffled(x, 50, key) for x in range(50))
different = {name: len({play(key(*run)) for run in runs}) for name, key in kinds.items()}
lesson.table(["key", "different orders"], list(different.items()), "5 seeds, 2 sources, 6 epochs")
lesson.holds([*different.values()] == [20, 60], "60 epochs have 20 orders if the key is a sum")

# %% [markdown]
# ## Exercise
# `exercises/ex17.py`: the row at position p, from any number of sources, with a shuffle and keys of
# your own. `python course/check.py 17`
