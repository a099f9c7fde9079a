# %% [markdown]
# # 7. Packing: what becomes of the tokens between documents and rows
#
# **Question.** Text comes in documents of any length, a model eats rows of exactly 2,049 tokens:
# what does each way from one to the other throw away, pad, or cut?
#
# Source: *nanobot pre-train*, "数据构造" (rows begin with BOS, no padding, best fit, crop the
# shortest). Core file: `data.py`, `pack`. Before: lesson 6. Next: lesson 10 (the loader).
# Takes 3 seconds on two cores.

# %%
from collections.abc import Iterator
from itertools import islice

import lesson  # first: it puts the project on the path
import numpy as np

from data import pack

ROW, BOS, HELD = 2049, 0, 1000
lesson.begin(7, "packing")

# %% [markdown]
# ## The source's own example
# The buffer holds documents of 500, 800, 1,200 and 2,500 tokens, BOS included. The longest that
# fits goes first (1,200), then the next (800), and 49 places are left. No document fits there, so
# the shortest is cropped to 49, and **its other 451 tokens are thrown away**.


# %%
def fill_row(held: list[int], row: int, waiting: Iterator[int]) -> list[tuple[int, int]]:
    """One row by the source's rule -> [(length of the document, tokens of it used)].

    held: lengths of at most HELD documents, refilled from `waiting`; used ones are removed.
    """
    used, space = [], row
    while space:
        held += islice(waiting, HELD - len(held))
        if not held:
            break
        fitting = [n for n in held if n <= space]
        n = max(fitting) if fitting else min(held)
        held.remove(n)
        used.append((n, min(n, space)))
        space -= used[-1][1]
    return used


held = [500, 800, 1200, 2500]
first = fill_row(held, ROW, iter([]))
print("row:", first, "| still held:", held)
lesson.holds(first == [(1200, 1200), (800, 800), (500, 49)], "the row of the source's example")
lesson.holds(sum(n - used for n, used in first) == 451, "451 of 500 tokens are lost")

# %% [markdown]
# And the 2,500? It fits in no row, and it is not the shortest as long as a shorter one is held: it
# stays, and so does every long document after it. Watch a buffer of 1,000 fill with them. The
# lengths are like the web's: half of the documents are below 600 tokens, a few are very long.

# %%
rng = np.random.default_rng(0)
lengths = np.maximum(2, rng.lognormal(np.log(600), 1.0, 6000).astype(int)).tolist()  # with BOS
waiting, held, stuck = iter(lengths), [], []
for _ in range(1500):
    fill_row(held, ROW, waiting)
    stuck.append(sum(n > ROW for n in held))
lesson.holds(stuck == sorted(stuck), "no document longer than a row leaves the buffer")

# %% [markdown]
# ## Five policies on the same documents
# A row per document, padded; all documents end to end, cut every 2,049 tokens; the source's rule;
# the same with long documents cut into rows first; and this project's: best fit that *keeps* the
# tail of a cut document, with 16,384 documents held.
#
# `lost` counts text that reaches no full row, `cuts/row` documents that go on after a row's end, or
# are cropped there.


# %%
def concatenated(lengths: list[int]) -> tuple:
    starts = np.cumsum([0, *lengths])  # of the documents in the stream; the last is its end
    edges = np.arange(1, starts[-1] // ROW + 1) * ROW  # where rows end and the next begin
    clean = np.isin(edges, starts).mean()
    return len(edges), 0.0, 100 * (starts[-1] % ROW) / starts[-1], 1 - clean, 100 * clean


def cropped(lengths: list[int]) -> tuple:
    """The source's rule until the documents end; the last, partial row is dropped."""
    waiting, held, rows, kept, cuts = iter(lengths), [], 0, 0, 0
    while True:
        row = fill_row(held, ROW, waiting)
        if sum(used for _, used in row) < ROW:
            return rows, 0.0, 100 * (1 - kept / (sum(lengths) - len(lengths))), cuts / rows, 100.0
        rows, kept = rows + 1, kept + ROW - len(row)  # of the tokens, BOS do not count
        cuts += sum(used < n for n, used in row)


def best_fit(lengths: list[int]) -> tuple:
    tokens = rng.integers(1, 32_768, sum(lengths), dtype=np.uint16)
    cut = np.cumsum(lengths)
    packed = pack([tokens[end - n + 1 : end] for n, end in zip(lengths, cut)], ROW, BOS)
    rows = np.stack(list(packed))  # (rows, ROW)
    lost = 100 * (1 - np.count_nonzero(rows != BOS) / (sum(lengths) - len(lengths)))
    cuts = (packed.stats.cuts + packed.stats.splits) / len(rows)  # of short and of long documents
    return len(rows), 0.0, lost, cuts, 100 * np.mean(rows[:, 0] == BOS)


text = sum(lengths) - len(lengths)
padded = sum(-(-(n - 1) // (ROW - 1)) for n in lengths)  # a long document takes several rows
pieces = [min(ROW, n - i) for n in lengths for i in range(0, n - 1, ROW - 1)]
forced_cuts = len(pieces) - len(lengths)  # rows' ends within documents that are longer than a row
rows, _, lost, cuts, _ = cropped(pieces)
results = {
    "padded": (padded, 100 * (1 - text / (padded * (ROW - 1))), 0.0, forced_cuts / padded, 100.0),
    "end to end": concatenated(lengths),
    "source's rule": cropped(lengths),
    "the same, long ones cut first": (rows, 0.0, lost, cuts + forced_cuts / rows, 100.0),
    "best fit, tails kept": best_fit(lengths),
}
columns = ["policy", "rows", "padding %", "lost %", "cuts/row", "BOS first %"]
lesson.table(columns, [(name, *values) for name, values in results.items()])

rows, padding, lost, cuts, bos_first = zip(*results.values())
lesson.holds(padding[0] > 50, "a row per document is more than half padding")
lesson.holds(cuts[1] > 0.95 and bos_first[1] < 5, "end to end, nearly every row begins mid-text")
lesson.holds(round(lost[2], 1) == 20.0 and round(lost[3], 2) == 1.85, "source's rule: 20.0%, 1.85%")
lesson.holds(lost[2] > 10 * lost[3], "it loses documents that never fit, and hardly any tails")
lesson.holds(lost[4] < 0.1 and bos_first[4] == 100, "best fit loses nothing")
few = cuts[4] * rows[4] - forced_cuts < 0.01 * len(lengths)
lesson.holds(few, "and cuts few but the long ones")

# %%
fig = lesson.figure(8, 3.2)
left, right = fig.subplots(1, 2, width_ratios=[3, 2])
shares = [max(pair) for pair in zip(padding, lost)]
colors = ["silver"] + ["crimson"] * 4
bars = left.barh(list(results), shares, color=colors)
left.bar_label(bars, [f"{x:.1f}% {'padding' if i == 0 else 'lost'}" for i, x in enumerate(shares)])
left.set(xlim=(0, 95), xlabel="%", title="padding, or text lost"), left.invert_yaxis()
right.plot(stuck, color="crimson")
right.set(xlabel="rows made", ylim=(0, HELD), title="the source's buffer")
right.text(100, 820, f"too long for a row: {stuck[-1]}", color="crimson")
lesson.save(fig, "07_packing")

# %% [markdown]
# ## Trap
# A policy that is right on short documents may lose most of the long ones: on the Python standard
# library the source's rule loses 74% (`benchmarks/packing.py`). "100% token utilization" was said
# of the *row*; ask of the *text*: what share of it did the model get to see?
#
# ## Exercise
# `exercises/ex07.py`: pack lengths into rows and keep every tail. `python course/check.py 7`
