# %% [markdown]
# # 36. Shuffle: documents, a buffer, or all rows
#
# **Afterwards** you can tell from the noise of a loss whether the rows of a run were shuffled, and
# say what a loader must save so that a restart repeats no row and skips none.
#
# **Question.** Documents were shuffled and rows were not. What does a batch see then, and what is
# left of each kind of shuffle when a node dies?
#
# Source: *擴展的驚喜*, "謎題 #3 – 嘈雜的損失", "啟動,第二次嘗試". Core file: `data.py`, `Order`.
# Before: lesson 17. Next: lesson 18 (the loader). Takes 5 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import sysconfig
from pathlib import Path

import numpy as np

from data import Order, pack
from tokenizer import Tokenizer

VOCAB = 2048
ROW = 257
SEEDS = 8
lesson.begin(36, "shuffle")

# %% [markdown]
# ## A ruler for rows
# The loss of a batch is noisy, and part of the noise is in the choice of the rows. To see only that
# part, measure with a model that does not learn: a table of how often each token follows each other
# token, counted in half of the standard library. It gives each row of the other half a loss, the
# mean of -log p(next token) in nats. Documents (files) are in a shuffled order; the rows of each
# follow one another, as they do where documents are written end to end.

# %%
paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
tokenizer = Tokenizer.train(texts[::4], VOCAB)
docs = [tokenizer.encode_array(text).astype(np.int64) for text in texts]
known, unknown = docs[::2], docs[1::2]
single = np.bincount(np.concatenate(known), minlength=VOCAB) + 0.5
pairs = np.concatenate([doc[:-1] * VOCAB + doc[1:] for doc in known])
pairs = np.bincount(pairs, minlength=VOCAB**2).reshape(VOCAB, VOCAB)
pairs = pairs + 20 * single / single.sum()  # as if each token had been seen 20 times more
surprise = np.log(pairs.sum(1, keepdims=True) / pairs)  # nats: -log p(next | token)
unknown = [unknown[i] for i in np.random.default_rng(0).permutation(len(unknown))]
rows = np.stack(list(pack(unknown, ROW, tokenizer.bos_id, buffer=1)))  # as the documents come
loss = surprise[rows[:, :-1], rows[:, 1:]].mean(1)  # (rows,)

# %% [markdown]
# ## What a batch sees
# If rows are drawn independently, the mean of B of them has 1 / sqrt(B) of their spread (standard
# deviation, sd). Rows of one file resemble each other, so a batch of neighbours is an opinion poll
# in one family. Between the two is the *shuffle buffer*: hold k rows, give out one at random, put
# the next of the stream in its place. It needs no random access, so loaders of streams have it.


# %%
def buffered(stream: np.ndarray, size: int, seed: int) -> np.ndarray:
    """The stream as it comes out of a shuffle buffer."""
    rng = np.random.default_rng(seed)
    held = list(stream[:size])
    out = []
    for row in stream[size:]:
        i = rng.integers(size)
        out.append(held[i])
        held[i] = row
    return np.array(out + list(rng.permutation(held)))


def shuffled(stream: np.ndarray, seed: int) -> np.ndarray:
    order = Order([len(stream)], [1.0], seed)
    return stream[[order(p)[1] for p in range(len(stream))]]


def means(stream: np.ndarray, batch: int) -> np.ndarray:
    return stream[: len(stream) // batch * batch].reshape(-1, batch).mean(1)


kinds = {"documents": lambda seed: loss}
kinds |= {f"buffer {k}": lambda seed, k=k: buffered(loss, k, seed) for k in (64, 1024)}
kinds["all rows"] = lambda seed: shuffled(loss, seed)
streams = {name: [stream(seed) for seed in range(SEEDS)] for name, stream in kinds.items()}
spread = []
for B in (4, 8, 16, 32):
    sds = [np.mean([means(s, B).std() for s in streams[name]]) for name in kinds]
    spread.append((B, *sds, loss.std() / B**0.5))
title = f"sd of the batch loss in nats, by what is shuffled; {len(loss):,} rows"
lesson.table(["rows a batch", *kinds, "sd / sqrt(B)"], spread, title)
_, by_document, small, large, by_row, formula = np.array(spread).T
off = np.abs(by_row / formula - 1).max()
lesson.holds(off < 0.08, "with all rows shuffled, the sd is sd / sqrt(B) within 8%")
worse = by_document / formula
lesson.holds((np.diff(worse) > 0).all(), "by document, the excess over sd/sqrt(B) grows with B")
lesson.holds(worse[3] > 2.5, "32 neighbouring rows are noisier than 6 independent ones")
falls = (by_document > small).all() and (small > large).all()
lesson.holds(falls, "the larger the buffer, the less noisy are the batches")
lesson.holds(small[3] > 1.5 * formula[3], "64 rows are far from a shuffle for batches of 32")

# %%
fig = lesson.figure(9, 3)
axes = fig.subplots(1, 3, sharey=True)
B = 32
outside = {}
for ax, name in zip(axes, ("documents", "buffer 64", "all rows")):
    # three standard deviations of the mean of B independent rows
    curve = means(streams[name][0], B)
    band = 3 * loss.std() / B**0.5
    outside[name] = np.mean(np.abs(curve - loss.mean()) > band)
    ax.axhspan(loss.mean() - band, loss.mean() + band, color="gainsboro")
    ax.plot(curve, color="tab:blue" if name == "all rows" else "crimson")
    ax.set(title=f"shuffled: {name}", xlabel="step")
axes[0].set(ylabel=f"loss of a batch of {B}")
lesson.save(fig, "36_shuffle")  # gray: where 997 of 1,000 steps would be
lesson.holds(outside["documents"] > 0.2, "documents shuffled: over 20% of the steps leave the band")
lesson.holds(outside["all rows"] < 0.04, "all rows shuffled: fewer than 4% of them do")

# %% [markdown]
# ## A node is replaced
# In the middle of an epoch of 48,000 rows a node dies. The run goes on from its last checkpoint
# with 6 ranks (processes, one a device) where it had 8. Which rows of the epoch come twice, and
# which never? It depends on what was saved. A rank's share is every eighth row, or every sixth.

# %%
n = 48_000
done = 24_000
SIZE = 10_000
epoch = shuffled(np.arange(n), 3)
out = buffered(np.arange(n), SIZE, 3)[:done]
read = np.arange(SIZE + done, n)  # by then the buffer has read so far, and died with what it held
steps = done // (8 * 4)  # of 8 ranks with 4 rows each
first = np.concatenate([epoch[r::8][: steps * 4] for r in range(8)])
then = np.concatenate([epoch[r::6][steps * 4 :] for r in range(6)])
ways = {
    "nothing: it starts again": (epoch[:done], epoch),
    "the place in the stream, not the buffer": (out, read),
    "how many steps each rank made": (first, then),
    "one position": (epoch[:done], epoch[done:]),
}
table = []
for name, (before, after) in ways.items():
    times = np.bincount(np.concatenate([before, after]), minlength=n)
    table.append((name, int((times > 1).sum()), int((times == 0).sum())))
columns = ["what is saved", "rows twice", "rows never"]
lesson.table(columns, table, "an epoch of 48,000, cut in half")
nothing, place, by_rank, position = (row[1:] for row in table)
lesson.holds(nothing == (done, 0), "with nothing saved, all 24,000 rows so far come twice")
lesson.holds(place == (0, SIZE), "when the buffer was not saved, its 10,000 rows never come")
lesson.holds(by_rank[0] > 0, "by the steps of each rank, six ranks repeat rows of the eight")
lesson.holds(position == (0, 0), "with the position saved, no row comes twice and none is lost")

# %% [markdown]
# The source repaired its run by shuffling all rows on the disk before training, with another seed
# for each epoch. A function of the position (lesson 17) gives such an order too, on demand.
#
# ## Trap
# Noise that comes from the order looks like noise of the optimizer, and a lower rate or a larger
# batch seems to be the cure. Compare with sd / sqrt(B) first: it needs no second run, only the loss
# of single rows. And a buffer that is lost is silent: nothing in the loss shows the rows that never
# came. The run of lesson 18's source was started or continued 75 times.

# %%
lost = 74 * SIZE * 2049
lesson.arithmetic(lost == 1_516_260_000, "74 restarts, 10,000 rows of 2,049: 1.5 billion tokens")

# %% [markdown]
# ## Exercise
# `exercises/ex36.py`: a shuffle buffer that goes on after a stop as if there had been none, and
# saves no row. `python course/check.py 36`
