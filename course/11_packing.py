# %% [markdown]
# # 11. Packing: why one row holds three documents, and what gets lost on the way
#
# **Afterwards** you can fill rows with documents without losing any text, and say what a packing
# policy pads, cuts and throws away, and how much text you measured that on.
#
# **Question.** Documents have any length, but a model takes rows of exactly 2,049 tokens. How do
# you turn one into the other, and what does each way of doing it pad, cut or throw away?
#
# Sources: *nanobot pre-train*, "数据构造" (rows begin with BOS, no padding, best fit, crop the
# shortest); T. Brown et al., Language models are few-shot learners (2020), appendix B; A. Dubey et
# al., The Llama 3 herd of models (2024), section 3.2. Core file: `data.py`, `pack`. Before: lesson
# 10. Next: lesson 17, in the reading room, then 12. Takes 3 seconds on two cores.

# %%
from bisect import bisect_right, insort
from collections.abc import Iterator
from itertools import islice

import lesson  # first: it puts the project on the path
import numpy as np

from data import pack

ROW = 2049
BOS = 0
HELD = 1000
WIDTH = 768
lesson.begin(11, "packing")

# %% [markdown]
# ## Why one row may hold three documents
# So far the text was one long string, and you could cut pieces from it anywhere. Real text comes in
# **documents**: a page, a letter, a program. A batch is one array, so all its rows have the same
# length: here 2,048 tokens to read, and one more, because each position predicts the next.
#
# Say a document has 600 tokens. Put it in a row by itself, and 1,449 places are left, which you
# fill with a token that means nothing: **padding**. The model learns nothing there, yet you pay for
# computing all of it. So put more documents into the row, one after another. This is called
# **packing**. Here is a row of 13 tokens, one token per word, with three documents:
#
#     row      BOS   the   cat   sat   .     BOS   yes   .     BOS   once  there was   a
#
#     inputs   BOS   the   cat   sat   .     BOS   yes   .     BOS   once  there was
#     targets  the   cat   sat   .     BOS   yes   .     BOS   once  there was   a
#                                      1                 2                       3
#
# The targets are the row, shifted by one. At 1 and 2 the right answer is BOS: this is how the model
# learns where a document ends. At 3 is the last target, `a`; it is not an input, so nothing is
# predicted from it. The third document is cut here, and its rest goes into another row, behind a
# BOS of its own: `BOS king who had a horse .`
#
# Is this allowed? Three questions:
# - *How does the model know that a new text begins?* From a special token, BOS ("beginning of
#   sequence"), in front of each document. The model learns that what comes before a BOS says
#   nothing about what comes after it. When you use the model, your prompt begins with a BOS too.
# - *May a position look into the document before its own?* The mask of lesson 4 allows it, and
#   GPT-3 was trained that way. Llama 3 has a mask that forbids it; its authors saw little
#   difference, except when they trained on very long rows, where it was important. This project has
#   a switch for it, `doc_mask`, which is on for the models that chat; lesson 20 shows what such a
#   mask costs.
# - *What is wasted?* The scores between documents, which teach nothing. Take documents of 1,200,
#   800 and 49 tokens. With a width W and blocks as in lesson 5, each position costs 12 W W
#   multiplications for the matrices of a block (4 W W in attention, 8 W W in the MLP). Looking at
#   one position costs W more for the score and W for the average. On average a position looks at
#   half of the row, so it pays 2 W * 2,049 / 2 = W * 2,049 for looking. That is a share of
#   W * 2,049 / (12 W W + W * 2,049), and part of it is spent across documents:

# %%
row = (1200, 800, 49)
own = sum(n * (n + 1) // 2 for n in row)  # position i of a document looks at i + 1 positions of it
across = 1 - own / (ROW * (ROW + 1) // 2)
wasted = across * ROW / (12 * WIDTH + ROW)
print(f"of what a row looks at, {across:.0%} is in another document; of the work, {wasted:.0%}")
lesson.arithmetic(wasted < 0.1, "looking across documents wastes less than a tenth of the work")

# %% [markdown]
# Padding will turn out to waste more than half. So we pack. One problem remains: documents seldom
# fill a row exactly.
#
# ## Crop the shortest
# Here is a published rule for it. Documents wait in a buffer. Say it holds four, of 500, 800, 1,200
# and 2,500 tokens, BOS included. The longest that fits goes first (1,200), then the longest that
# fits what is left (800): this choice is called **best fit**. Now 49 places are left. No document
# fits there, so the shortest is cropped to 49, and **its other 451 tokens are thrown away**.


# %%
def fill_row(held: list[int], row: int, waiting: Iterator[int]) -> list[tuple[int, int]]:
    """One row by this rule -> [(length of the document, tokens of it used)].

    held: lengths of at most HELD documents, ascending, refilled from `waiting`.
    """
    used = []
    space = row
    while space:
        for n in islice(waiting, HELD - len(held)):
            insort(held, n)
        if not held:
            break
        fitting = bisect_right(held, space)  # this many documents fit
        n = held.pop(fitting - 1 if fitting else 0)  # the longest of them, else the shortest of all
        used.append((n, min(n, space)))
        space -= used[-1][1]
    return used


held = [500, 800, 1200, 2500]
first = fill_row(held, ROW, iter([]))
print("row:", first, "| still held:", held)
lesson.holds(
    first == [(1200, 1200), (800, 800), (500, 49)],
    "the rule's row is 1,200, 800, and 49 of the 500 tokens",
)

# %% [markdown]
# And the 2,500? It fits into no row, and it is not the shortest as long as the buffer holds a
# shorter one. So it stays until the shorter ones run out, and so does every long document after it.
# Watch the buffer fill up with them over 1,500 rows. The lengths resemble the web's: half of the
# documents have fewer than 600 tokens, and a few are very long. All shares below depend on these
# lengths: if the middle document had 1,000 tokens, less would be padding and more would be lost.


# %%
def web_like(documents: int) -> list[int]:
    """Lengths in tokens, BOS included."""
    rng = np.random.default_rng(0)
    return np.maximum(2, rng.lognormal(np.log(600), 1.0, documents).astype(int)).tolist()


lengths = web_like(6000)
waiting = iter(lengths)
held = []
for _ in range(1500):
    fill_row(held, ROW, waiting)
stuck = sum(n > ROW for n in held)
lesson.holds(stuck > HELD / 2, "more than half of the buffer are documents longer than a row")

# %% [markdown]
# ## Five policies on the same 6,000 documents
# 1. A row per document, padded (a longer document takes several rows).
# 2. All documents end to end, cut every 2,049 tokens.
# 3. Crop the shortest, as above.
# 4. The same, but documents longer than a row are first cut into rows.
# 5. This project's, `pack` in data.py: also best fit, but when a document is cut, its tail is
#    *kept* and packed like a document of its own. The buffer holds 16,384 documents.
#
# What the columns of the table say:
# - `lost %`: the share of the text that reaches no full row.
# - `cuts`: how often, per 100 documents, one goes on past the end of a row, or is cropped there.
#   Some of these cuts are needed, because a document is longer than a row.
# - `BOS first %`: the share of rows that begin with a BOS. The other rows begin in the middle of a
#   document, so their first tokens are predicted from nothing, although the model, when you use it,
#   always sees how a text began.


# %%
text = lambda lengths: sum(lengths) - len(lengths)  # tokens, without BOS
# cuts that are needed when each document begins a row: ends of rows inside documents, per 100
needed = lambda lengths: 100 * sum((n - 2) // (ROW - 1) for n in lengths) / len(lengths)


# Each policy: lengths -> rows, padding %, lost %, cuts, BOS first %
def padded(lengths: list[int]) -> tuple:
    # -(-a // b) is a / b, rounded up; each row of a document repeats its BOS
    rows = sum(-(-(n - 1) // (ROW - 1)) for n in lengths)
    return rows, 100 * (1 - text(lengths) / (rows * (ROW - 1))), 0.0, needed(lengths), 100.0


def end_to_end(lengths: list[int]) -> tuple:
    starts = np.cumsum([0, *lengths])  # of each document in the stream; then its end
    edges = np.arange(1, starts[-1] // ROW + 1) * ROW  # where a row ends and the next begins
    clean = np.isin(edges, starts)
    lost = 100 * (starts[-1] % ROW) / starts[-1]
    cuts = 100 * (~clean).sum() / len(lengths)
    return len(edges), 0.0, lost, cuts, 100 * clean.mean()


def cropped(lengths: list[int]) -> tuple:
    """Crop the shortest, until the documents end; the last, partial row is dropped."""
    waiting = iter(lengths)
    held = []
    rows = 0
    kept = 0
    cuts = 0
    while True:
        row = fill_row(held, ROW, waiting)
        if sum(used for _, used in row) < ROW:
            break
        rows += 1
        kept += ROW - len(row)  # a BOS is not text
        cuts += sum(used < n for n, used in row)
    return rows, 0.0, 100 * (1 - kept / text(lengths)), 100 * cuts / len(lengths), 100.0


def long_first(lengths: list[int]) -> tuple:
    """First full rows from the long documents, then crop the shortest among what is left."""
    pieces = [min(ROW, n - i) for n in lengths for i in range(0, n - 1, ROW - 1)]
    rows, _, lost, cuts, _ = cropped(pieces)
    return rows, 0.0, lost, needed(lengths) + cuts * len(pieces) / len(lengths), 100.0


def best_fit(lengths: list[int]) -> tuple:
    documents = [np.ones(n - 1, np.uint16) for n in lengths]  # what they say does not matter: ones
    packed = pack(documents, ROW, BOS)
    rows = np.stack(list(packed))  # (rows, ROW)
    lost = 100 * (1 - np.count_nonzero(rows) / text(lengths))  # BOS is 0
    cuts = 100 * (packed.stats.splits + packed.stats.cuts) / len(lengths)
    return len(rows), 0.0, lost, cuts, 100 * np.mean(rows[:, 0] == BOS)


policies = {
    "a row each, padded": padded,
    "end to end": end_to_end,
    "crop the shortest": cropped,
    "long ones cut first": long_first,
    "best fit, tails kept": best_fit,
}
results = {name: policy(lengths) for name, policy in policies.items()}
columns = ["policy", "rows", "padding %", "lost %", "cuts", "BOS first %"]
lesson.table(columns, [(name, *x) for name, x in results.items()], "6,000 documents, mean 983")

_, padding, lost, cuts, bos_first = zip(*results.values())
must = needed(lengths)
lesson.holds(padding[0] > 50, "with a row per document, more than half of the places are padding")
lesson.holds(bos_first[1] < 5, "end to end, nearly every row begins inside a document")
lesson.holds(lost[2] > 5 * lost[3] > 0, "cutting long ones first loses less than 1/5 as much")
lesson.holds(lost[4] < 0.1 and bos_first[4] == 100, "best fit loses less than one token in 1,000")
lesson.holds(must <= cuts[4] < 1.1 * must, "best fit makes under 10% more cuts than it must")
lesson.holds(cuts[1] > 2 * must, "end to end makes more than twice the cuts it must")

# %% [markdown]
# ## How much is lost depends on how much there is
# As long as the buffer of "crop the shortest" has room, long documents only wait in it. When all
# the others have run out, each long one gets a row, and everything beyond that first row is lost.
# In a larger sample, long documents fill the buffer first. Then it has room for one short document
# at a time, and whatever space is left at the end of a row, the next short document is cropped to
# it, unless it happens to fit. A small sample shows you none of this.

# %%
sizes = (2000, 6000, 12_000, 60_000, 240_000)
curve = []
for size in sizes:
    lengths = web_like(size)
    _, _, loss, _, _ = cropped(lengths)
    beyond = 100 * sum(max(0, n - ROW) for n in lengths) / text(lengths)
    curve.append((size, loss, beyond))
columns = ["documents", "lost %", "text beyond a first row %"]
lesson.table(columns, curve, "crop the shortest, a buffer of 1,000: what is lost")
_, losses, beyond = zip(*curve)
lesson.holds(losses[3] > 1.5 * losses[0], "60,000 lose over 1.5 times the share that 2,000 lose")
lesson.holds(losses[0] - beyond[0] < 5, "of 2,000, most of the loss is beyond a first row")

# %%
fig = lesson.figure(10, 3.2)
left, middle, right = fig.subplots(1, 3, width_ratios=[3, 2, 2])
bars = left.barh(list(results), np.add(padding, lost), color=["silver"] + ["crimson"] * 4)
left.bar_label(bars, fmt=" %.1f")
left.set(xlim=(0, 75), xlabel="% (gray: padding)", title="padding, or text lost")
middle.bar_label(middle.barh(list(results), cuts, color="tab:orange"), fmt=" %.0f")
middle.axvline(must, color="gray", ls="--")
middle.set(yticks=[], xlim=(0, 58), title="cuts (dashed: needed)", xlabel="per 100 documents")
left.invert_yaxis(), middle.invert_yaxis()
right.semilogx(sizes, losses, "o-", color="crimson")
right.semilogx(sizes, beyond, "--", color="gray")
right.text(1e4, 11, "text beyond\na first row", color="gray")
right.set(ylim=(0, 40), xlabel="documents", ylabel="lost %", title="crop the shortest")
lesson.save(fig, "11_packing")

# %% [markdown]
# ## Trap
# A policy that does well on short documents may lose most of the long ones: on the Python standard
# library, cropping the shortest loses 74% (benchmarks/RESULTS.md). Yet every place of its rows
# holds a token: "100% utilization" is a claim about the *row*. Ask about the *text*: what share of
# it did the model get to see? And ask it about the whole corpus: a buffer that is full after about
# 9,000 documents shows nothing on 2,000.
#
# ## Exercise
# `exercises/ex11.py`: pack lengths into rows and keep every tail. Your trainer makes its rows with
# it: no place is padding, and only 25 tokens are in no row. `python course/check.py 11`
