# %% [markdown]
# # 8. Order: the loader at scale
#
# **Question.** A run that was planned for more *steps* had a lower throughput; another loader
# repaired that, and made the loss noisy; then a node died. Which row comes when, and why does a
# seed belong to a position?
#
# Source: *擴展的驚喜*, "謎題 #1 – 消失的輸送量", "謎題 #2 – 持續的輸送量下降",
# "謎題 #3 – 嘈雜的損失", "啟動,第二次嘗試"; *Pré-Treino Eficiente de Modelos de Linguagem*,
# "Megatron Core User Guide" (.bin and .idx). Core file: `data.py`, from `Permutation` to `Order`.
# Before: lesson 10. Next: lesson 12. Takes 10 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import sysconfig
import timeit
import tracemalloc
from pathlib import Path

import numpy as np

from data import Order, Permutation, Quota, pack
from tokenizer import Tokenizer

BATCH, BIG = 512, 10**12
rng = np.random.default_rng(0)
lesson.begin(8, "order")

# %% [markdown]
# ## Riddle 2: an index that grows with the number of steps
# The loader of the source built its whole order in advance: one epoch, shuffled, then repeated
# until there is a sample for every row of every step, with the number of the data set and the
# number of the sample beside each other. Sixteen bytes per sample, in every process.


# %%
def nanosets(samples_per_epoch: int, samples: int, seed: int) -> np.ndarray:
    """-> int64 (2, samples): data set and sample, for the whole run."""
    epoch = np.random.default_rng(seed).permutation(samples_per_epoch)
    return np.stack([np.zeros(samples, np.int64), np.resize(epoch, samples)])


def megatron(lengths: np.ndarray, row: int) -> np.ndarray:
    """Documents end to end, cut into rows -> int32 (rows, 2): the document and offset where each
    begins. The .idx file has the lengths; a shuffle of the rows takes 4 bytes more per sample."""
    ends = np.cumsum(lengths)
    at = np.arange(ends[-1] // row) * row
    document = np.searchsorted(ends, at, side="right")
    return np.stack([document, at - (ends - lengths)[document]], 1).astype(np.int32)


lengths = rng.integers(1, 400, 300)
stream = [(d, i) for d, n in enumerate(lengths) for i in range(n)]  # token by token
where = megatron(lengths, 128)
lesson.holds(
    where.tolist() == [list(stream[i * 128]) for i in range(len(where))], "Megatron's rows"
)

SHORT, LONG = 32_000, 3_200_000  # steps
index = nanosets(1_000_000, SHORT * BATCH, seed=1)
tracemalloc.start()
order = Order([1_000_000_000, 50_000_000], [0.95, 0.05], seed=1)
for p in range(2000):
    order(p), order(BIG + p)
held = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
kinds = [("nanosets", 16), ("Megatron, rows and shuffle", 12)]
rows = [
    (name, *(b * n * BATCH / 1e9 for n in (SHORT, LONG)), b * 11e12 / 4096 / 1e9)
    for name, b in kinds
]
rows.append(("Order", *[held / 1e9] * 3))
lesson.table(["GB in each process", "32K steps", "3.2M steps", "11T tokens of 4,096"], rows)

lesson.holds(index.nbytes == 16 * SHORT * BATCH == 262_144_000, "32K steps: 262 MB, built here")
lesson.holds(round(rows[0][2], 1) == 26.2 and round(rows[0][3]) == 43, "3.2M: 26.2 GB; 11T: 43 GB")
lesson.holds(held < 100_000, "Order, asked 4,000 times: below 0.0001 GB, however long the run is")
ask = lambda p: [order(p + i) for i in range(200)]
us = [5000 * min(timeit.repeat(lambda p=p: ask(p), number=1, repeat=9)) for p in (0, BIG)]
print(f"Order: {us[0]:.0f} us for a position near 0, {us[1]:.0f} us near 10^12")
lesson.holds(us[1] < 3 * us[0], "position 10^12 costs as much as position 0")
del index

# %% [markdown]
# ## A shuffle without a table
# `Permutation` computes one element of a shuffle: rounds of a keyed hash, each of which can be
# undone, so no two positions get the same row. How many rounds? Take seven rows and 4,000 keys, and
# count how often position x gets row y. Unbiased counts deviate by about one standard deviation.


# %%
def bias(rounds: int, n: int = 7, keys: int = 4000) -> tuple[int, float, float]:
    """-> rounds, largest deviation of a count in %, that of chi-square in standard deviations."""
    kind = type("Rounds", (Permutation,), dict(ROUNDS=rounds))
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[range(n), [kind(n, key)(x) for x in range(n)]] += 1
    even, free = keys / n, (n - 1) ** 2
    chi = ((counts - even) ** 2 / even).sum()
    return rounds, 100 * abs(counts / even - 1).max(), (chi - free) / (2 * free) ** 0.5


rows = [bias(rounds) for rounds in (2, 4, 6, Permutation.ROUNDS)]
lesson.table(["rounds", "worst count, % off", "chi-square, sd"], rows, "seven rows, 4,000 shuffles")
lesson.holds(rows[1][2] > 10 and abs(rows[-1][2]) < 4, "4 rounds are biased, the project's are not")
shuffle = Permutation(1009, 7)
lesson.holds(sorted(map(shuffle, range(1009))) == list(range(1009)), "every row once per epoch")
sources, dealt, off = [0.6, 0.3, 0.1], np.zeros(3), 0.0
quota = Quota(sources)
for p in range(3000):
    dealt[quota(p)[0]] += 1
    off = max(off, np.abs(dealt - (p + 1) * np.array(sources)).max())
lesson.holds(off < 1, "after any number of rows, each source has had its share within one row")

# %% [markdown]
# ## Epoch 2
# A repeated index plays the same rows in the same order. The source made a new seed for each epoch;
# here the epoch is a part of the key.

# %%
n = 5000
repeated = nanosets(n, 2 * n, seed=1)[1].reshape(2, n)
ours = np.array([Order([n], [1.0], 1)(p)[1] for p in range(2 * n)]).reshape(2, n)
same = [np.mean(two[0] == two[1]) for two in (repeated, ours)]
lesson.holds(same[0] == 1.0 and same[1] < 0.01, "nanosets: epoch 2 is epoch 1; Order: below 1%")
lesson.holds(sorted(ours[1]) == list(range(n)), "and each row comes once in it")

# %% [markdown]
# ## Riddle 3: documents were shuffled, rows were not
# Rows of one file resemble each other, so a batch of neighbours is an opinion poll in one family.
# As a ruler that does not learn, a bigram model of half of the standard library gives each row of
# the other half its loss. If rows are independent, a batch of B has 1 / sqrt(B) of their spread.

# %%
paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
tokenizer = Tokenizer.train(texts[::4], 2048)
docs, V = [tokenizer.encode_array(text).astype(np.int64) for text in texts], 2048
known, unknown = docs[::2], docs[1::2]
uni = np.bincount(np.concatenate(known), minlength=V) + 0.5
pairs = np.bincount(np.concatenate([d[:-1] * V + d[1:] for d in known]), minlength=V * V)
pairs = pairs.reshape(V, V) + 20 * uni / uni.sum()  # smoothed: 20 pseudocounts per token
surprise = np.log(pairs.sum(1, keepdims=True) / pairs)  # (V, V) nats: -log p(next | token)
packed = np.stack(list(pack(unknown, 257, tokenizer.bos_id, buffer=1)))  # in document order
loss = surprise[packed[:, :-1], packed[:, 1:]].mean(1)  # (rows,)
n = len(loss)
epochs = Order([n], [1.0], 17)
shuffled = [loss[[epochs(p)[1] for p in range(e * n, e * n + n)]] for e in range(8)]
batches = lambda rows, B: rows[: n // B * B].reshape(-1, B).mean(1)
spread = []
for B in (4, 8, 16, 32):
    by_epoch = [batches(rows, B).std() for rows in shuffled]
    spread.append((B, batches(loss, B).std(), np.mean(by_epoch), loss.std() / B**0.5))
columns = ["rows a batch", "document order", "shuffled rows", "sd / sqrt(B)"]
lesson.table(columns, spread, f"spread of the batch loss in nats, {n:,} rows, sd {loss.std():.2f}")
lesson.holds(all(abs(b / c - 1) < 0.08 for _, _, b, c in spread), "shuffled: 1 / sqrt(B)")
lesson.holds(all(a > 1.5 * b for _, a, b, _ in spread), "document order: 1.5 times that, and more")
lesson.holds(
    spread[3][1] / spread[3][2] > 1.5 * spread[0][1] / spread[0][2], "worse, if B is large"
)

# %%
fig = lesson.figure(7.6, 3)
left, right = fig.subplots(1, 2, width_ratios=[3, 2])
left.plot(batches(loss, 32), color="crimson", lw=1, label="rows in document order")
left.plot(batches(shuffled[0], 32), color="tab:blue", lw=1.4, label="shuffled rows")
left.set(xlabel="step", ylabel="loss of a batch of 32", ylim=(3, 6.5)), left.legend()
steps = np.array([1e3, 1e7])
right.loglog(steps, 16 * steps * BATCH, color="crimson")
right.loglog(steps, [held] * 2, color="tab:blue")
right.plot([SHORT, LONG], [16 * SHORT * BATCH, 16 * LONG * BATCH], "o", color="crimson")
right.text(SHORT * 1.6, 1.1e8, "32K: 262 MB", color="crimson")
right.text(1.1e3, 3e10, "3.2M: 26 GB", color="crimson")
right.text(1.5e3, held * 1.7, "Order", color="tab:blue")
right.set(xlabel="steps of the run", ylabel="bytes of index in a process", ylim=(1e3, 1e12))
lesson.save(fig, "08_order")

# %% [markdown]
# ## A node is replaced
# In the middle of an epoch of 48,000 rows the run stops, and goes on with 6 ranks where it had 8.
# Which rows of the epoch come twice, and which never? It depends on what is saved.

# %%
n, done = 48_000, 24_000
rows = np.array([Order([n], [1.0], 3)(p)[1] for p in range(n)])


def buffered(stream: np.ndarray, size: int, stop: int) -> tuple[np.ndarray, int]:
    """A stream with a shuffle buffer, as WebDataset has -> rows given out, rows read so far."""
    buffer, out = list(stream[:size]), []
    while len(out) < stop:
        i = rng.integers(size)
        out.append(buffer[i])
        buffer[i] = stream[size + len(out) - 1]
    return np.array(out), size + stop


out, read = buffered(np.arange(n), 10_000, done)
steps = done // (8 * 4)  # of 8 ranks with 4 rows each; a rank's share of rows is rows[rank::world]
first = np.concatenate([rows[r::8][: steps * 4] for r in range(8)])
then = np.concatenate([rows[r::6][steps * 4 :] for r in range(6)])
ways = {
    "nothing: the index starts at 0": (rows[:done], rows),
    "place in the stream, not its buffer": (out, np.arange(read, n)),
    "steps of each rank": (first, then),
    "one position": (rows[:done], rows[done:]),
}
table = []
for name, (before, after) in ways.items():
    seen = np.bincount(np.concatenate([before, after]), minlength=n)
    table.append((name, int((seen > 1).sum()), int((seen == 0).sum())))
lesson.table(["what is saved", "rows twice", "rows never"], table)
lesson.holds(
    [row[1:] for row in table] == [(done, 0), (0, 10_000), (6000, 0), (0, 0)],
    "only a position survives a change of ranks",
)

# %% [markdown]
# ## Trap
# A log that labels itself. The source prints its two configurations as a diff, with the names on
# the wrong sides; believe the heading, and the index you look for is a hundred times too small.

# %%
heading = {
    "Short run (32k steps)": dict(train_steps=3_200_000, decay_from=2_560_000, decay=640_000),
    "Long run (3.2M steps)": dict(train_steps=32_000, decay_from=26_000, decay=6_000),
}
lines = [(name, *c.values(), 16 * BATCH * c["train_steps"] // 10**6) for name, c in heading.items()]
lesson.table(["heading", "train_steps", "decay from", "decay steps", "index, MB"], lines)
lesson.holds(
    all(c["decay_from"] + c["decay"] == c["train_steps"] for c in heading.values()),
    "the lines agree among themselves",
)
lesson.holds((lines[0][4], lines[1][4]) == (26_214, 262), "so the headings are swapped")

# %% [markdown]
# ## Exercise
# `exercises/ex08.py`: which row comes at position p? No table. `python course/check.py 8`
