# %% [markdown]
# # 17. Order: which row comes at position p
#
# **Afterwards** you can shuffle a billion rows without a list of them, anew in each epoch, and say
# which row comes at any position of a run without replaying what came before. You can tell from
# the noise of a loss whether rows were shuffled, and what a loader must save.
#
# **Question.** A run planned for more *steps* lost speed, in drops that were sharper and came more
# often. What did its loader remember? Why does a seed belong to a position? And what does a batch
# see if documents were shuffled and rows were not?
#
# Source: *擴展的驚喜*, "謎題 #2 – 持續的輸送量下降", "謎題 #3 – 嘈雜的損失", "啟動,第二次嘗試";
# *Pré-Treino Eficiente de Modelos de Linguagem*, "Megatron Core User Guide" (.bin and .idx).
# Core file: `data.py`, from `Permutation` to `Order`. Before: lesson 16; it builds on lesson 11.
# Next: lesson 18. Takes 5 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import sysconfig
import tracemalloc
from hashlib import blake2b
from math import isqrt
from pathlib import Path

import numpy as np

from data import Order, Permutation

BATCH = 512
ROW = 257  # bytes, where a batch is looked at
lesson.begin(17, "order")

# %% [markdown]
# ## An index that grows with the run
# The loader of the source (`nanosets`) built its whole order in advance: one epoch, that is, each
# row once, shuffled; then repeated until there was a sample for every row of every step. It kept
# the number of the data set and the number of the sample, 8 bytes each, in every process. Megatron
# keeps 12 bytes a row: where it begins (a document and an offset), and a shuffle of the rows.


# %%
def nanosets(rows: int, samples: int, seed: int) -> np.ndarray:
    """-> int64 (2, samples): data set and sample, for the whole run."""
    epoch = np.random.default_rng(seed).permutation(rows)
    return np.stack([np.zeros(samples, np.int64), np.resize(epoch, samples)])


SHORT = 32_000  # steps
index = nanosets(1_000_000, SHORT * BATCH, seed=1)
tracemalloc.start()
order = Order([1_000_000_000, 50_000_000], [0.95, 0.05], seed=1)
for p in range(1000):
    order(p), order(10**12 + p)
held = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
kinds = {"nanosets": 16, "Megatron": 12}  # bytes of a row
runs = {"32K steps": SHORT * BATCH, "3.2M steps": 3_200_000 * BATCH, "11T tokens": 11e12 / 4096}
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
#
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


rows = []
walks = [walk(x, 10, "seed 1", 4) for x in range(10)]
for x in range(10):
    pairs = rounds(x, 10, "seed 1", 4)
    rows.append((x, *(f"{left},{right}" for left, right in pairs), str(walks[x])))
columns = ["position", "pair", "left", "right", "left again", "right again", "cells, the row last"]
lesson.table(
    columns, rows, "ten rows in a table of 4 x 3 cells, the pair after each of four rounds"
)
lesson.holds(max(map(len, walks)) > 1, "a position that lands on cell 10 or 11 walks on")
bijection = all({walk(x, n, "k")[-1] for x in range(n)} == {*range(n)} for n in range(1, 60))
lesson.holds(bijection, "for each n from 1 to 59, n positions get the rows 0 to n - 1, all of them")

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


rows = [(str(c), *bias(lambda x, n, key, c=c: walk(x, n, key, c)[-1])) for c in (2, 4, 8)]
rows.append(("the project's 12", *bias(lambda x, n, key: Permutation(n, key)(x))))
lesson.table(["rounds", "worst count, % off", "chi-square, sd off"], rows, "7 rows, 4,000 keys")
off = [row[2] for row in rows]
lesson.holds(
    min(off[:2]) > 8, "after four rounds or fewer, some rows come at some places too often"
)
lesson.holds(max(abs(x) for x in off[2:]) < 4, "after eight, no bias is seen in 4,000 shuffles")

# %% [markdown]
# (For the exercise, the first two sections and this one are enough.)
#
# ## Epochs, sources, and why the seed belongs to a position
# Position p of a source is position `p % n` of epoch `p // n`. With the epoch in the key, each has
# a shuffle of its own; a repeated index plays the same rows in the same order. With the source in
# the key, so has each source; `Quota` deals the positions to the sources, such that each has had
# its share within one row at any time. A generator of random numbers has a *state*, which is right
# only if every step before was made. A key has none: seed and position say it all.


# %%
def played(n: int, seed: int, epochs: int = 1) -> np.ndarray:
    """The rows of one source, in the order in which they come."""
    order = Order([n], [1.0], seed)
    return np.array([order(p)[1] for p in range(epochs * n)])


n = 5000
repeated = nanosets(n, 2 * n, seed=1)[1].reshape(2, n)
ours = played(n, 1, 2).reshape(2, n)
same = [np.mean(two[0] == two[1]) for two in (repeated, ours)]
lesson.holds(same[0] == 1.0, "the repeated index gives epoch 2 in the order of epoch 1")
lesson.holds(same[1] < 0.01 and sorted(ours[1]) == list(range(n)), "Order shuffles epoch 2 anew")

# %% [markdown]
# ## What a batch sees
# The source's loss was noisy. Part of such noise is in the choice of the rows; to see that part
# alone, measure with a model that does not learn: lesson 1's table of pairs of bytes, counted in
# half of the files of the standard library. It gives each row of the other half a loss. The files
# come in shuffled order, end to end, and are cut into rows.
#
# If rows are drawn independently, the mean of B of them has 1 / sqrt(B) of their spread (standard
# deviation, sd). Rows of one file resemble each other, so a batch of neighbours is an opinion poll
# in one family. Between the two is the *shuffle buffer*: hold k rows, give out one at random, put
# the next of the stream in its place. It needs no random access, so loaders of streams have it.

# %%
rng = np.random.default_rng(0)
files = [path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
known = np.frombuffer(b"".join(files[::2]), np.uint8).astype(np.int64)
pairs = np.bincount(known[:-1] * 256 + known[1:], minlength=256**2).reshape(256, 256) + 0.1
surprise = np.log2(pairs.sum(1, keepdims=True) / pairs)  # bits: -log2 p(next | byte)
text = b"".join(rng.permutation(np.array(files[1::2], object)))
rows = np.frombuffer(text[: len(text) // ROW * ROW], np.uint8).reshape(-1, ROW)
loss = surprise[rows[:, :-1], rows[:, 1:]].mean(1)  # (rows,)


def buffered(stream: np.ndarray, size: int) -> np.ndarray:
    """The stream as it comes out of a shuffle buffer."""
    held = list(stream[:size])
    out = []
    for row in stream[size:]:
        i = rng.integers(size)
        out.append(held[i])
        held[i] = row
    return np.array(out + list(rng.permutation(held)))


def means(stream: np.ndarray, batch: int) -> np.ndarray:
    return stream[: len(stream) // batch * batch].reshape(-1, batch).mean(1)


streams = {"documents": loss}
streams |= {f"buffer {k}": buffered(loss, k) for k in (64, 1024)}
streams["all rows"] = loss[played(len(loss), 1)]
spread = []
for B in (4, 16, 64):
    sds = [means(stream, B).std() for stream in streams.values()]
    spread.append((B, *sds, loss.std() / B**0.5))
lesson.table(
    ["rows a batch", *streams, "sd / sqrt(B)"],
    spread,
    f"sd of the batch loss, bits per byte, by what is shuffled; {len(loss):,} rows",
)
_, by_document, small, large, by_row, formula = np.array(spread).T
lesson.holds(abs(by_row / formula - 1).max() < 0.2, "all rows shuffled: sd / sqrt(B), within 20%")
poll = by_document[2] > 3 * formula[2]
lesson.holds(poll, "64 neighbouring rows are noisier than 7 independent ones")
falls = (by_document > small).all() and (small > large).all()
lesson.holds(falls, "the larger the buffer, the less noisy are the batches")

# %% [markdown]
# ## A node is replaced
# In the middle of an epoch of 48,000 rows a node dies. The run goes on from its last checkpoint
# with 6 ranks (processes, one a device) where it had 8. Which rows of the epoch come twice, and
# which never? It depends on what was saved. (If nothing was, the epoch starts again, and half of it
# comes twice.) A rank's share is every eighth row, or every sixth.

# %%
n = 48_000
done = 24_000
SIZE = 10_000
epoch = played(n, 3)
out = buffered(np.arange(n), SIZE)[:done]
read = np.arange(SIZE + done, n)  # by then the buffer has read so far, and died with what it held
first = np.concatenate([epoch[r::8][: done // 8] for r in range(8)])
then = np.concatenate([epoch[r::6][done // 8 :] for r in range(6)])
ways = {
    "the place in the stream, not the buffer": (out, read),
    "how many rows each rank had": (first, then),
    "one position": (epoch[:done], epoch[done:]),
}
table = []
for name, (before, after) in ways.items():
    times = np.bincount(np.concatenate([before, after]), minlength=n)
    table.append((name, int((times > 1).sum()), int((times == 0).sum())))
lesson.table(
    ["what is saved", "rows twice", "rows never"], table, "an epoch of 48,000, cut in half"
)
place, by_rank, position = (row[1:] for row in table)
lesson.holds(place == (0, SIZE), "when the buffer was not saved, its 10,000 rows never come")
lesson.holds(by_rank[0] > 0, "by the rows of each rank, six ranks repeat rows of the eight")
lesson.holds(position == (0, 0), "with the position saved, no row comes twice and none is lost")

# %% [markdown]
# The source repaired its run by shuffling all rows on the disk before training, with another seed
# for each epoch. A function of the position gives such an order too, on demand.

# %%
fig = lesson.figure(9, 5)
top, bottom = fig.subplots(2, 3)
for ax, count in zip(top, (1, 2, 8)):
    ax.plot([walk(x, 961, "figure", count)[-1] for x in range(961)], ".", ms=2)
    ax.set(title=f"rounds: {count}", xlabel="position", xticks=[0, 961], yticks=[0, 961])
top[0].set(ylabel="row")
B = 64
band = 3 * loss.std() / B**0.5  # gray: where 997 of 1,000 batches of independent rows would be
for ax, name in zip(bottom, ("documents", "buffer 64", "all rows")):
    ax.axhspan(loss.mean() - band, loss.mean() + band, color="gainsboro")
    ax.plot(means(streams[name], B), color="tab:blue" if name == "all rows" else "crimson")
    ax.set(title=f"shuffled: {name}", xlabel="step", ylim=(2.5, 5.8))
bottom[0].set(ylabel=f"bits per byte, batch of {B}")
lesson.save(fig, "17_order")

# %% [markdown]
# ## Trap
# A key is not a sum. Add the seed and the epoch, and seed 1 in its epoch 2 plays what seed 2 plays
# in epoch 1: two runs that should differ by chance alone share their order, shifted by an epoch.
# Write the parts side by side, with something between them ("1/11" is not "11/1").
#
# And noise that comes from the order looks like noise of the optimizer: a lower rate or a larger
# batch seems to be the cure. Compare with sd / sqrt(B) first. It needs no second run, only the loss
# of single rows.

# %%
runs = [(seed, source, e) for seed in range(5) for source in (0, 1) for e in range(6)]
kinds = {"seed + epoch + 1000 x source": lambda seed, source, e: seed + e + 1000 * source}
kinds["seed/source/epoch"] = lambda seed, source, e: f"{seed}/{source}/{e}"
play = lambda key: tuple(walk(x, 50, key)[-1] for x in range(50))
different = {name: len({play(key(*run)) for run in runs}) for name, key in kinds.items()}
lesson.table(["key", "different orders"], list(different.items()), "5 seeds, 2 sources, 6 epochs")
lesson.holds([*different.values()] == [20, 60], "60 epochs have 20 orders if the key is a sum")

# %% [markdown]
# ## Exercise
# `exercises/ex17.py`: the row at position p, from any number of sources, with a shuffle and keys of
# your own. `python course/check.py 17`
