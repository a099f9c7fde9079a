# %% [markdown]
# # 17. Order: which row comes at position p
#
# **Afterwards** you can shuffle a billion rows without keeping a list of them, shuffle them anew in
# each epoch, and say which row comes at any position of a run without replaying what came before.
# You can tell from the noise of a loss whether the rows were shuffled, and you know what a loader
# must save.
#
# **Question.** A run planned for more *steps* ran slower, with drops in speed that were sharper and
# came more often. What did its loader remember? Why should a seed belong to a position? And what
# does a batch see if documents were shuffled and rows were not?
#
# Source: *擴展的驚喜*, "謎題 #2 – 持續的輸送量下降", "謎題 #3 – 嘈雜的損失", "啟動,第二次嘗試";
# *Pré-Treino Eficiente de Modelos de Linguagem*, "Megatron Core User Guide" (.bin and .idx).
# Core file: `data.py`, from `Permutation` to `Order`. Before: lesson 11. Next: lesson 12.
# Takes 5 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import sysconfig
import tracemalloc
from hashlib import blake2b
from itertools import product
from math import isqrt
from pathlib import Path

import numpy as np

from data import Order, Permutation

BATCH = 512
ROW = 257  # bytes, where you look at a batch
lesson.begin(17, "order")

# %% [markdown]
# ## An index that grows with the run
# The loader of that run (`nanosets`) built its whole order in advance. It took one **epoch**
# (every row once, shuffled) and repeated it until there was a sample for every row of every step.
# For each sample it kept the number of the data set and the number of the row, 8 bytes each, in
# every process. So a run of a hundred times the steps remembers a hundred times as much. Megatron
# (NVIDIA's trainer) keeps 12 bytes a row: where the row begins (a document and an offset), and an
# entry of the shuffle. Here are three runs: 32,000 steps, 3.2 million, and 11 trillion tokens.


# %%
def nanosets(rows: int, samples: int, seed: int) -> np.ndarray:
    """-> int64 (2, samples): data set and row, for the whole run."""
    epoch = np.random.default_rng(seed).permutation(rows)
    return np.stack([np.zeros(samples, np.int64), np.resize(epoch, samples)])


tracemalloc.start()  # Python's count of the memory that it holds
order = Order([1_000_000_000, 50_000_000], [0.95, 0.05], seed=1)
for p in range(1000):
    order(p), order(10**12 + p)
held = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
runs = {"32K steps": 32_000 * BATCH, "3.2M steps": 3_200_000 * BATCH, "11T tokens": 11e12 / 4096}
kinds = {"nanosets": nanosets(1000, 1000, seed=1).nbytes / 1000, "Megatron": 12}  # bytes of a row
rows = [(name, *(size * n / 1e6 for n in runs.values())) for name, size in kinds.items()]
rows.append(("Order, of this project", *[held / 1e6] * 3))
lesson.table(["index", *runs], rows, "MB in each process; 512 rows of 4,096 tokens a step")
lesson.holds(
    held < 100_000, "asked 2,000 times, near 0 and near 10^12, Order holds less than 0.1 MB"
)

# %% [markdown]
# This is what the loader remembered. The table says how much, not how that slows a run down: we
# have not measured it. (If you look it up: the document swaps the headings of its two
# configurations, so the numbers under "Short run (32k steps)" are those of 3.2M steps.)
#
# ## A shuffle without a list
# `Order` is a function: you ask "which row comes at position p?", and it computes the answer from p
# alone. Drawing a row at random won't do: in n draws some rows come twice, and 37% never come. A
# shuffle is a **bijection**: every position gets one row, and no two positions get the same one.
# You can build one in four steps.
#
# **Step 1: a pair.** Lay the n positions out in a table of a lines and b columns. `divmod(x, b)`
# tells you where x is: in which line (`left`) and in which column (`right`).
#
# **Step 2: a round.** Compute a number from `right` with a hash (a function whose results look
# random, but are the same each time), and move `left` on by that number. This turns every column of
# the table, each by an amount of its own. No two cells can merge: `right` has not changed, so you
# could compute the same number again and turn back. A round is a bijection.
#
# **Step 3: more rounds,** taking turns: move `right` by a hash of `left`, then `left` by a hash of
# `right`, and so on. After enough rounds a position may end up anywhere. This is called a Feistel
# network.
#
# **Step 4: walk on.** The table may have a few more cells than n: a x b is n or a little more. If x
# lands on a cell that is not below n, shuffle that cell too, and go on until you land below n. No
# two walks end in the same cell: follow the walk backwards from there, and the first cell below n
# that you meet is where it began.


# %%
def turn(key: str, i: int, half: int) -> int:
    """A number that looks random, from a key, the number of the round, and one half of a pair.

    blake2b is a hash function of Python's library; here it gives 8 bytes.
    """
    return int.from_bytes(blake2b(f"{key}/{i}/{half}".encode(), digest_size=8).digest(), "big")


def rounds(x: int, n: int, key: str, count: int) -> list[tuple[int, int]]:
    """A cell -> its pair at first and after each round."""
    b = isqrt(n)
    a = -(-n // b)  # n / b, rounded up
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
for x in range(10):
    pairs = rounds(x, 10, "seed 1", 4)
    cells = walk(x, 10, "seed 1", 4)
    rows.append((x, *(f"{left},{right}" for left, right in pairs), str(cells)))
columns = ["position", "pair", "left", "right", "left again", "right again", "cells, the row last"]
lesson.table(
    columns, rows, "ten rows in a table of 4 x 3 cells, the pair after each of four rounds"
)
lesson.holds(
    all({walk(x, n, "k")[-1] for x in range(n)} == {*range(n)} for n in range(1, 60)),
    "for each n from 1 to 59, n positions get the rows 0 to n - 1, all of them",
)

# %% [markdown]
# How many rounds are enough? Take seven rows, shuffle them with 4,000 keys, and count how often
# each position gets each row. If the shuffle is fair, the 49 counts differ only by chance, and it
# is very rare that one of them is 4 standard deviations (sd) off. The project takes 12 rounds. To
# save time, it hashes the key once, and turns by a cheaper function of that hash (`mix64`).


# %%
def bias(shuffle, n: int = 7, keys: int = 4000) -> float:
    """-> how far off the worst count is, in standard deviations."""
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[range(n), [shuffle(x, n, key) for x in range(n)]] += 1
    even = keys / n
    return abs(counts - even).max() / (even * (1 - 1 / n)) ** 0.5


rows = [(str(c), bias(lambda x, n, key, c=c: walk(x, n, key, c)[-1])) for c in (2, 4, 8)]
rows.append(("the project's 12", bias(lambda x, n, key: Permutation(n, key)(x))))
lesson.table(["rounds", "worst count, sd off"], rows, "7 rows, 4,000 keys")
off = [row[1] for row in rows]
lesson.holds(
    min(off[:2]) > 4, "after four rounds or fewer, some rows come at some places too often"
)
lesson.holds(max(off[2:]) < 4, "after eight, no bias is seen in 4,000 shuffles")

# %% [markdown]
# ## Epochs, sources, and why the seed belongs to a position
# Position p of a single source is position `p % n` of epoch `p // n`. Put the epoch into the key,
# and every epoch has a shuffle of its own (the index above repeats the same order). Put
# the source into the key too, and no two sources share a shuffle.
#
# With several sources, you first deal the positions out, by the sources' weights. Give each
# position to the source that is furthest behind its share. If A has weight 2 and B has 1, the deal
# goes A B A, A B A, and so on: after every sum(weights) = 3 positions, each source has had exactly
# its share, and the deal starts again. So you never need to deal from 0: `divmod(p, sum(weights))`
# tells you how many whole deals came before p, and where in a deal p is. (The project's `Quota`
# finds the source faster, and then a source may be off by nearly two rows if there are many.)
#
# A generator of random numbers has a *state*, and the state is right only if every earlier step was
# taken. A key has no state: seed and position say it all.
#
# (You can do the exercise now. The rest of the lesson shows what a good order is worth.)


# %%
def played(n: int, seed: int, epochs: int = 1) -> np.ndarray:
    """The rows of one source, in the order in which they come."""
    order = Order([n], [1.0], seed)
    return np.array([order(p)[1] for p in range(epochs * n)])


n = 5000
first, second = played(n, 1, 2).reshape(2, n)
lesson.holds(
    (first == second).mean() < 0.01 and sorted(second) == list(range(n)),
    "Order gives all rows again in epoch 2, in another order",
)

# %% [markdown]
# ## What a batch sees
# The loss of the document's run was noisy, and some of that noise comes from the choice of the
# rows. To see that part alone, measure with a model that does not learn: lesson 1's table of pairs
# of bytes, counted in half of the files of the standard library. It gives each row of the other
# half a loss. Those files come in shuffled order, end to end, and are cut into rows.
#
# If you draw rows independently, the mean of B of them has 1 / sqrt(B) of their standard deviation.
# But rows of one file resemble each other, so a batch of neighbors is like an opinion poll of one
# family. Between the two is the **shuffle buffer**: hold k rows, give out one of them at random,
# and put the next row of the stream in its place. Loaders of streams use it because it reads the
# rows in the order in which they lie on the disk.

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
lesson.holds(
    by_document[2] > 3 * formula[2], "64 neighboring rows are noisier than 7 independent ones"
)
lesson.holds(
    (by_document > small).all() and (small > large).all(),
    "the larger the buffer, the less noisy the batches are",
)

# %% [markdown]
# ## A node is replaced
# In the middle of an epoch of 48,000 rows a node dies. The run goes on from its last checkpoint,
# now with 6 ranks (processes, one for each device) where it had 8: a rank's share was every eighth
# row, and is now every sixth. Which rows of the epoch come twice, and which never come? That
# depends on what was saved. (If nothing was, the epoch starts again, and half of it comes twice.)

# %%
n = 48_000
done = 24_000
SIZE = 10_000
epoch = played(n, 3)
out = buffered(np.arange(n), SIZE)[:done]
read = np.arange(SIZE + done, n)  # the buffer had read up to here, and died with what it held
first = np.concatenate([epoch[r::8][: done // 8] for r in range(8)])
then = np.concatenate([epoch[r::6][done // 8 :] for r in range(6)])
ways = {
    "the place in the stream, not the buffer": (out, read),
    "how many rows each rank had": (first, then),
    "one position": (epoch[:done], epoch[done:]),
}
table = []
for name, parts in ways.items():
    times = np.bincount(np.concatenate(parts), minlength=n)
    table.append((name, int((times > 1).sum()), int((times == 0).sum())))
lesson.table(
    ["what is saved", "rows twice", "rows never"], table, "an epoch of 48,000, cut in half"
)
place, by_rank, position = (row[1:] for row in table)
lesson.holds(place == (0, SIZE), "if the buffer is not saved, the 10,000 rows in it never come")
lesson.holds(by_rank[0] > 0, "with a count for each rank, six ranks repeat rows of the eight")
lesson.holds(position == (0, 0), "with the position saved, no row comes twice and none is lost")

# %% [markdown]
# The document's authors repaired their run by shuffling all rows on the disk before training, with
# another seed for each epoch. A function of the position gives you such an order without the disk.
#
# (In the figure, one round and two look alike: the table is 31 x 31, and the second round moves
# each point by less than 31 of 961.)

# %%
fig = lesson.figure(9, 5)
top, bottom = fig.subplots(2, 3)
for ax, count in zip(top, (1, 2, 8)):
    ax.plot([walk(x, 961, "figure", count)[-1] for x in range(961)], ".", ms=2)
    ax.set(title=f"rounds: {count}", xlabel="position")
top[0].set(ylabel="row")
B = 64
band = 3 * loss.std() / B**0.5  # gray: where 997 of 1,000 batches of independent rows would be
for ax, name in zip(bottom, ("documents", "buffer 64", "all rows")):
    ax.axhspan(loss.mean() - band, loss.mean() + band, color="gainsboro")
    ax.plot(means(streams[name], B), color="crimson")
    ax.set(title=f"shuffled: {name}", xlabel="step", ylim=(2.5, 5.8))
bottom[0].set(ylabel=f"bits per byte, batch of {B}")
lesson.save(fig, "17_order")

# %% [markdown]
# ## Trap
# Do not add up the parts of a key. If you add seed and epoch, then seed 1 has in epoch 2 the order
# that seed 2 has in epoch 1: two runs that should differ by chance share their orders, one epoch
# apart.
# Write the parts side by side, with something between them ("1/11" is not "11/1").
#
# And noise that comes from the order looks like noise of the optimizer, so you may be tempted to
# lower the rate or enlarge the batch. Compare the noise with sd / sqrt(B) first: that takes no
# second run, only the losses of single rows.

# %%
runs = list(product(range(5), range(2), range(6)))  # seed, source, epoch


def orders(key) -> int:
    """How many different orders the runs have."""
    return len({tuple(walk(x, 50, key(*run))[-1] for x in range(50)) for run in runs})


summed = orders(lambda seed, source, epoch: seed + epoch + 1000 * source)
apart = orders(lambda seed, source, epoch: f"{seed}/{source}/{epoch}")
lesson.holds((summed, apart) == (20, 60), "60 epochs have 20 orders if the key is a sum, else 60")

# %% [markdown]
# ## Exercise
# `exercises/ex17.py`: the row at position p, from any number of sources, with a shuffle and keys of
# your own. Try small sizes too: a table with a single column can only turn as a whole, and isqrt(3)
# is 1. `python course/check.py 17`
