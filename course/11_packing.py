# %% [markdown]
# # 11. Packing: why one row holds three documents, and what is lost on the way
#
# **Afterwards** you can fill rows with documents so that no text is lost, and say of a packing
# policy what it pads, cuts and throws away, and on how much text that was measured.
#
# **Question.** Text comes in documents of any length, a model takes rows of exactly 2,049 tokens.
# How does one become the other, and what does each way pad, cut or throw away?
#
# Sources: *nanobot pre-train*, "数据构造" (rows begin with BOS, no padding, best fit, crop the
# shortest); T. Brown et al., Language models are few-shot learners (2020), appendix B; A. Dubey et
# al., The Llama 3 herd of models (2024), section 3.2. Core file: `data.py`, `pack`. Before: lesson
# 10. Next: lesson 12. Takes 3 seconds on two cores.

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
# So far the text was one long string, and pieces were cut from it anywhere. Real text comes in
# **documents**: a page, a letter, a program. A batch is one array, so all its rows have the same
# length: here 2,048 tokens to read, and one more, since each position predicts the next.
#
# Say that a document has 600 tokens. Alone in a row, it leaves 1,449 places, which are filled with
# a token that means nothing: **padding**. Nothing is learned there, but all of it is computed. So
# put more documents into the row, one after the other; this is called **packing**:
#
#     BOS the cat sat . BOS there was once a king who had a horse . BOS yes .
#
# Is this allowed? Three questions:
# - *How does the model know that a new text begins?* By a token of its own, BOS ("beginning of
#   sequence"), in front of each document. The model learns that what stands before a BOS says
#   nothing of what comes after it. When the model is used, the prompt begins with a BOS too.
# - *May a position look into the document before its own?* The mask of lesson 4 lets it. GPT-3 was
#   trained so. Llama 3 has a mask that forbids it; its authors saw little difference, but for
#   training on very long rows they found it important. This project has a switch for it,
#   `doc_mask`, which is on for the models that chat; lesson 20 shows what such a mask costs.
# - *What is wasted?* The scores between documents, which teach nothing. Take documents of 1,200,
#   800 and 49 tokens. With a width W and blocks as in lesson 5, a position takes 12 W W
#   multiplications for the matrices of a block (4 W W in attention, 8 W W in the MLP). For each
#   position that it looks at, it takes W for the score and W for the average; these are half of the
#   row, on average. So the scores are W * 2,049 of 12 W W + W * 2,049.

# %%
row = (1200, 800, 49)
own = sum(n * (n + 1) // 2 for n in row)  # position i of a document looks at i + 1 positions of it
across = 1 - own / (ROW * (ROW + 1) // 2)
wasted = across * ROW / (12 * WIDTH + ROW)
print(f"of what a row looks at, {across:.0%} is in another document; of the work, {wasted:.0%}")
lesson.arithmetic(wasted < 0.1, "looking across documents wastes less than a tenth of the work")

# %% [markdown]
# Padding will turn out to waste more than half. So rows are packed. One problem is left: documents
# seldom fill a row exactly.
#
# ## Crop the shortest
# Here is a published rule for it. Documents wait in a buffer. Say it holds four, of 500, 800, 1,200
# and 2,500 tokens, BOS included. The longest that fits goes first (1,200), then the next (800), and
# 49 places are left. No document fits there, so the shortest is cropped to 49, and **its other 451
# tokens are thrown away**.


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
        fitting = bisect_right(held, space)  # so many documents fit
        n = held.pop(fitting - 1 if fitting else 0)  # the longest of them, else the shortest of all
        used.append((n, min(n, space)))
        space -= used[-1][1]
    return used


held = [500, 800, 1200, 2500]
first = fill_row(held, ROW, iter([]))
print("row:", first, "| still held:", held)
example = first == [(1200, 1200), (800, 800), (500, 49)]
lesson.holds(example, "the rule's row is 1,200, 800, and 49 of the 500 tokens")

# %% [markdown]
# And the 2,500? It fits in no row, and it is not the shortest as long as a shorter one is held: it
# stays, and so does every long document after it. Let a buffer of 1,000 fill with them, for 1,500
# rows. The lengths are like the web's: half of the documents are below 600 tokens, a few are very
# long. All shares below depend on these lengths: if half of them were below 1,000, less would be
# padding and more would be lost.


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
lesson.holds(stuck > HELD / 2, "documents longer than a row are more than half of the buffer")

# %% [markdown]
# ## Five policies on the same 6,000 documents
# 1. A row per document, padded (a longer one takes several).
# 2. All documents end to end, cut every 2,049 tokens.
# 3. Crop the shortest, as above.
# 4. The same, with documents that are longer than a row cut into rows first.
# 5. This project's, `pack` in data.py: best fit, too, but the tail of a document that is cut is
#    *kept*, and packed like a document of its own. 16,384 documents are held.
#
# `lost` is the share of the text that reaches no full row. A document is cut where it goes on after
# a row's end, or is cropped there: `cuts` says how often, per 100 documents. Documents that are
# longer than a row must be cut. `BOS first` is the share of rows that begin with a BOS. The others
# begin in the middle of a document: their first tokens are predicted from nothing, though the model
# that is used always sees how a text began.


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
        rows = rows + 1
        kept = kept + ROW - len(row)  # of the tokens, BOS do not count
        cuts += sum(used < n for n, used in row)
    return rows, 0.0, 100 * (1 - kept / text(lengths)), 100 * cuts / len(lengths), 100.0


def long_first(lengths: list[int]) -> tuple:
    """Full rows of the long documents first, then crop the shortest of what is left of them."""
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
policies = {"a row each, padded": padded, "end to end": end_to_end, "crop the shortest": cropped}
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
# As long as its buffer has room, the rule of cropping the shortest loses the ends of long
# documents, all beyond their first row. When long ones have filled the buffer, it holds one short
# document at a time: whatever space is left at a row's end, the next short one is cropped to it,
# unless it happens to fit. A small sample shows nothing of that.

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
lesson.holds(
    losses[4] > losses[3] > losses[2], "from 12,000 on, more documents lose a larger share"
)
lesson.holds(losses[0] - beyond[0] < 5, "of 2,000, most of what is lost is beyond a first row")

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
right.set(ylim=(0, 40), xlabel="documents", ylabel="lost %", title="crop the shortest")
lesson.save(fig, "11_packing")

# %% [markdown]
# ## Trap
# A policy that is right on short documents may lose most of the long ones: on the Python standard
# library, cropping the shortest loses 74% (benchmarks/RESULTS.md). "100% token utilization" was
# said of the *row*; ask of the *text*: what share of it did the model get to see? And ask it of the
# whole corpus: a buffer that is full after about 9,000 documents shows nothing on 2,000.
#
# ## Exercise
# `exercises/ex11.py`: pack lengths into rows and keep every tail. It makes your trainer's rows:
# no place is padding, and 25 tokens are in no row. `python course/check.py 11`
