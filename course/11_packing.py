# %% [markdown]
# # 11. Packing: what becomes of the tokens between documents and rows
#
# **Afterwards** you can fill rows with documents so that no text is lost, and say of a packing
# policy what it pads, cuts and throws away, and on how much text that was measured.
#
# **Question.** Text comes in documents of any length, a model takes rows of exactly 2,049 tokens:
# what does each way of making rows of documents throw away, pad, or cut?
#
# Source: *nanobot pre-train*, "数据构造" (rows begin with BOS, no padding, best fit, crop the
# shortest). Core file: `data.py`, `pack`. Before: lesson 9. Next: lesson 17 (which row comes when).
# Takes 3 seconds on two cores.

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
lesson.begin(11, "packing")

# %% [markdown]
# ## The source's own example
# Each document begins with one extra token, BOS ("beginning of sequence"), which tells the model
# that a new text starts. Documents wait in a buffer. Say it holds four, of 500, 800, 1,200 and
# 2,500 tokens, BOS included. The longest that fits goes first (1,200), then the next (800), and 49
# places are left. No document fits there, so the shortest is cropped to 49, and **its other 451
# tokens are thrown away**.


# %%
def fill_row(held: list[int], row: int, waiting: Iterator[int]) -> list[tuple[int, int]]:
    """One row by the source's rule -> [(length of the document, tokens of it used)].

    held: lengths of at most HELD documents, ascending, refilled from `waiting`.
    """
    used = []
    space = row
    while space:
        for n in islice(waiting, HELD - len(held)):
            insort(held, n)
        if not held:
            break
        fitting = bisect_right(held, space)  # so many documents fit
        n = held.pop(fitting - 1 if fitting else 0)  # the longest of them, else the shortest of all
        used.append((n, min(n, space)))
        space -= used[-1][1]
    return used


held = [500, 800, 1200, 2500]
first = fill_row(held, ROW, iter([]))
print("row:", first, "| still held:", held)
example = first == [(1200, 1200), (800, 800), (500, 49)]
lesson.holds(example, "the source's example gives its row, and crops 500 tokens to 49")

# %% [markdown]
# And the 2,500? It fits in no row, and it is not the shortest as long as a shorter one is held: it
# stays, and so does every long document after it. Watch a buffer of 1,000 fill with them. The
# lengths are like the web's: half of the documents are below 600 tokens, a few are very long. All
# shares below depend on these lengths: with a median of 1,000, less is padding and more is lost.


# %%
def web_like(documents: int) -> list[int]:
    """Lengths in tokens, BOS included."""
    rng = np.random.default_rng(0)
    return np.maximum(2, rng.lognormal(np.log(600), 1.0, documents).astype(int)).tolist()


lengths = web_like(6000)
waiting = iter(lengths)
held = []
stuck = []
for _ in range(1500):
    fill_row(held, ROW, waiting)
    stuck.append(sum(n > ROW for n in held))
lesson.holds(stuck == sorted(stuck), "in 1,500 rows no document longer than a row left the buffer")
lesson.holds(stuck[-1] > HELD / 2, "after 1,500 rows they are more than half of the buffer")

# %% [markdown]
# ## Five policies on the same 6,000 documents
# A row per document, padded; all documents end to end, cut every 2,049 tokens; the source's rule;
# the same with long documents cut into rows first; and this project's: best fit that *keeps* the
# tail of a cut document, with 16,384 documents held.
#
# `lost` is the share of the text that reaches no full row. A document is cut where it goes on after
# a row's end, or is cropped there: `cuts` says how often, per 100 documents. Documents that are
# longer than a row must be cut. `BOS first` is the share of rows that begin with a BOS.


# %%
def padded(lengths: list[int]) -> tuple:
    rows = sum(-(-(n - 1) // (ROW - 1)) for n in lengths)  # each of its rows repeats the BOS
    return rows, 100 * (1 - text(lengths) / (rows * (ROW - 1))), 0.0, needed(lengths), 100.0


def end_to_end(lengths: list[int]) -> tuple:
    starts = np.cumsum([0, *lengths])  # of the documents in the stream; the last is its end
    edges = np.arange(1, starts[-1] // ROW + 1) * ROW  # where a row ends and the next begins
    clean = np.isin(edges, starts)
    lost = 100 * (starts[-1] % ROW) / starts[-1]
    cuts = 100 * (~clean).sum() / len(lengths)
    return len(edges), 0.0, lost, cuts, 100 * clean.mean()


def cropped(lengths: list[int]) -> tuple:
    """The source's rule until the documents end; the last, partial row is dropped."""
    waiting = iter(lengths)
    held = []
    rows = 0
    kept = 0
    cuts = 0
    while True:
        row = fill_row(held, ROW, waiting)
        if sum(used for _, used in row) < ROW:
            break
        rows = rows + 1
        kept = kept + ROW - len(row)  # of the tokens, BOS do not count
        cuts += sum(used < n for n, used in row)
    return rows, 0.0, 100 * (1 - kept / text(lengths)), 100 * cuts / len(lengths), 100.0


def long_first(lengths: list[int]) -> tuple:
    """Full rows of the long documents first, then the source's rule for what is left of them."""
    pieces = [min(ROW, n - i) for n in lengths for i in range(0, n - 1, ROW - 1)]
    rows, _, lost, cuts, _ = cropped(pieces)
    return rows, 0.0, lost, needed(lengths) + cuts * len(pieces) / len(lengths), 100.0


def best_fit(lengths: list[int]) -> tuple:
    tokens = np.random.default_rng(1).integers(1, 32_768, sum(lengths), dtype=np.uint16)
    ends = np.cumsum(lengths)
    packed = pack([tokens[end - n + 1 : end] for n, end in zip(lengths, ends)], ROW, BOS)
    rows = np.stack(list(packed))  # (rows, ROW)
    lost = 100 * (1 - np.count_nonzero(rows != BOS) / text(lengths))
    cuts = 100 * (packed.stats.splits + packed.stats.cuts) / len(lengths)
    return len(rows), 0.0, lost, cuts, 100 * np.mean(rows[:, 0] == BOS)


text = lambda lengths: sum(lengths) - len(lengths)  # tokens, without BOS
# ends of rows within documents, if each begins a row, per 100 documents
needed = lambda lengths: 100 * sum((n - 2) // (ROW - 1) for n in lengths) / len(lengths)
policies = {"a row each, padded": padded, "end to end": end_to_end, "source's rule": cropped}
policies |= {"long ones cut first": long_first, "best fit, tails kept": best_fit}
results = {name: policy(lengths) for name, policy in policies.items()}
columns = ["policy", "rows", "padding %", "lost %", "cuts", "BOS first %"]
lesson.table(columns, [(name, *x) for name, x in results.items()], "6,000 documents, mean 983")

_, padding, lost, cuts, bos_first = zip(*results.values())
must = needed(lengths)
lesson.holds(padding[0] > 50, "with a row per document, more than half of the places are padding")
lesson.holds(bos_first[1] < 5, "end to end, nearly every row begins within a document")
lesson.holds(lost[2] > 5 * lost[3] > 0, "if long ones are cut first, less than 1/5 as much is lost")
lesson.holds(lost[4] < 0.1 and bos_first[4] == 100, "best fit loses less than one token in 1,000")
lesson.holds(must <= cuts[4] < 1.1 * must, "best fit makes under 10% more cuts than it must")
lesson.holds(cuts[1] > 2 * must, "end to end makes more than twice the cuts that must be made")

# %% [markdown]
# ## How much is lost depends on how much there is
# As long as the buffer has room, the source's rule loses the ends of long documents, all beyond
# their first row. When long ones have filled the buffer, it holds one short document at a time:
# whatever space is left at a row's end, the next short one is cropped to it, unless it happens to
# fit. A small sample shows nothing of that.

# %%
sizes = (2000, 6000, 12_000, 60_000, 240_000)
curve = []
for size in sizes:
    lengths = web_like(size)
    _, _, loss, cut, _ = cropped(lengths)
    beyond = 100 * sum(max(0, n - ROW) for n in lengths) / text(lengths)
    curve.append((size, loss, beyond, loss - beyond, cut))
columns = ["documents", "lost %", "beyond a first row %", "other text %", "cuts"]
lesson.table(columns, curve, "the source's rule, a buffer of 1,000: what is lost")
_, losses, beyond, other, _ = zip(*curve)
lesson.holds(losses[3] > 1.5 * losses[0], "60,000 lose over 1.5 times the share that 2,000 lose")
lesson.holds(
    losses[4] > losses[3] > losses[2], "from 12,000 on, more documents lose a larger share"
)
lesson.holds(abs(other[0]) < 5, "of 2,000, what is lost is nearly all beyond a first row")

# %%
fig = lesson.figure(10, 3.2)
left, middle, right = fig.subplots(1, 3, width_ratios=[3, 2, 2])
shares = [max(pair) for pair in zip(padding, lost)]
bars = left.barh(list(results), shares, color=["silver"] + ["crimson"] * 4)
left.bar_label(bars, [f" {x:.1f}% {'padding' if i == 0 else 'lost'}" for i, x in enumerate(shares)])
left.set(xlim=(0, 95), xlabel="%", title="padding, or text lost")
middle.bar_label(middle.barh(list(results), cuts, color="tab:orange"), fmt=" %.0f")
middle.axvline(must, color="gray", ls="--")
middle.set(yticks=[], xlim=(0, 58), title="cuts (dashed: needed)", xlabel="per 100 documents")
left.invert_yaxis(), middle.invert_yaxis()
right.semilogx(sizes, losses, "o-", color="crimson")
right.semilogx(sizes, beyond, "--", color="gray")
right.text(1e4, 11, "text beyond\na first row", color="gray")
right.set(ylim=(0, 40), xlabel="documents", ylabel="lost %", title="the source's rule")
lesson.save(fig, "11_packing")

# %% [markdown]
# ## Trap
# A policy that is right on short documents may lose most of the long ones: on the Python standard
# library the source's rule loses 74% (benchmarks/RESULTS.md). "100% token utilization" was said
# of the *row*; ask of the *text*: what share of it did the model get to see? And ask it of the
# whole corpus: a buffer that is full after about 9,000 documents shows nothing on 2,000.
#
# ## Exercise
# `exercises/ex11.py`: pack lengths into rows and keep every tail. It makes your trainer's rows:
# no place is padding, and 25 tokens are in no row. `python course/check.py 11`
