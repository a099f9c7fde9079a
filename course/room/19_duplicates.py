# %% [markdown]
# # 19. Duplicates: how a loss lies, and how to find copies that are not equal
#
# **Afterwards** you can remove copies from a training text, equal or nearly equal, without
# comparing every document with every other one, and say what they did to the loss.
#
# **Question.** Text collected from the web holds the same documents again and again. Some are
# slightly changed, and some of them you have held out for validation. What does that do to the
# loss, and how do you find a copy that is not equal?
#
# Sources: Broder 1997, On the resemblance and containment of documents (MinHash); Lee et al. 2022,
# Deduplicating Training Data Makes Language Models Better. Core file: `prepare_data.py` (it holds
# out by content hash). Before: lesson 1. Next: lesson 20. Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import itertools
import math
import random
import re
import sysconfig
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

HASHES = 125
BANDS = 25  # of 5 hashes
WORDS = 3  # in a shingle
ORDER = 6  # bytes of context
lesson.begin(19, "duplicates")

# %% [markdown]
# ## A text with copies, planted
# The documents are functions and classes of the standard library. You train on 240 of them, and 30
# of these come 12 more times, in four ways: as they are; reformatted (tabs for spaces, and lower
# case); with one word in twenty replaced; cut after two thirds. Half of the held-out documents are
# leaked into the training text, each in one of the four ways. We know which ones; the methods are
# not told.


# %%
def blocks() -> list[str]:
    """Definitions in the standard library, cut at empty lines, of 400 to 1,200 characters."""
    found = set()
    for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"):
        found.update(path.read_text(encoding="utf-8", errors="replace").split("\n\n\n"))
    return sorted(x for x in found if 400 < len(x) < 1200 and "def " in x)


draw = random.Random(0)
clock = itertools.count()
edit = lambda word: "other" if next(clock) % 20 == 0 else word[0]
COPIES = [
    lambda text: text,
    lambda text: text.replace("    ", "\t").lower(),
    lambda text: re.sub(r"\w+", edit, text),
    lambda text: text[: len(text) * 2 // 3],
]
documents = draw.sample(blocks(), 304)
leaked, clean, unique = documents[:32], documents[32:64], documents[64:]
originals = [text for text in unique[:30] for _ in range(12)] + leaked
copies = [copy(text) for copy, text in zip(itertools.cycle(COPIES), originals)]
collected = unique + copies

# %% [markdown]
# ## How the loss lies
# You measure with a model that counts, as in lesson 1. It predicts a byte from the six bytes before
# it; where it has never seen those six, from five, and so on. It reads each text once, and like a
# large network it remembers what it has read. If it has counted a context six times, it trusts that
# context six times as much, even if all six come from copies of one document.


# %%
def count(texts: list[str]) -> dict[bytes, Counter]:
    """context of 0 to ORDER bytes -> how often each byte followed it."""
    seen = defaultdict(Counter)
    for text in texts:
        data = bytes(ORDER) + text.encode()
        for i in range(ORDER, len(data)):
            for k in range(ORDER + 1):
                seen[data[i - k : i]][data[i]] += 1
    return seen


def bits(seen: dict[bytes, Counter], texts: list[str]) -> float:
    """Bits per byte. A context's counts are mixed with the estimate from one byte less. That
    estimate's weight is the number of different bytes that followed (Witten and Bell 1991)."""
    costs = []
    for text in texts:
        data = bytes(ORDER) + text.encode()
        for i in range(ORDER, len(data)):
            p = 1 / 256
            for k in range(ORDER + 1):
                counts = seen.get(data[i - k : i])
                if counts is None:
                    break
                p = (counts[data[i]] + len(counts) * p) / (sum(counts.values()) + len(counts))
            costs.append(-math.log2(p))
    return sum(costs) / len(costs)


def examine(texts: list[str]) -> tuple:
    """-> documents, bytes, bits per byte of the leaked held-out texts, and of the clean ones."""
    seen = count(texts)
    return len(texts), sum(map(len, texts)), bits(seen, leaked), bits(seen, clean)


results = {"nothing planted": examine(unique), "as collected": examine(collected)}
truth, lie = (bits_of[2:] for bits_of in results.values())
print(f"leaked texts: {truth[0]:.3f} bits per byte, with the copies {lie[0]:.3f}")
print(f"clean texts: {truth[1]:.3f} bits per byte, with the copies {lie[1]:.3f}")
lesson.holds(lie[0] < truth[0] - 0.5, "on the leaked texts the copies seem to help, by 0.5 bits")
lesson.holds(lie[1] > truth[1] + 0.1, "on the clean ones they hurt, by more than 0.1 bits")

# %% [markdown]
# ## Finding a copy that is not equal
# A table of hashes finds texts that are equal. If you hash the *normalized* text (its words, in
# lower case), it also finds those with another layout. For the rest, cut a text into its
# **shingles**, all runs of three words, and call two texts near copies if they share many. Their
# **Jaccard similarity** is the number of shingles that both have, divided by the number that at
# least one of them has. For a whole web you cannot compare all pairs. Two ideas save you from it:
#
# 1. **MinHash**: give each shingle a random number, its hash. Of all shingles of the two texts,
#    each is equally likely to have the smallest. If it is one that both texts have, their smallest
#    values are equal; so the probability of that *is* the Jaccard similarity. With 125 hash
#    functions you get a signature of 125 numbers for each text. The share of equal numbers in two
#    signatures estimates the similarity. Its standard error is that of 125 coin flips, at most
#    0.045.
# 2. **Bands**: cut the signature into 25 bands of 5. Texts that agree in a whole band are
#    candidates, and you compare only these. At similarity s, a band agrees with probability s^5,
#    and at least one of the 25 with probability 1 - (1 - s^5)^25.


# %%
def shingles(text: str) -> set[int]:
    words = re.findall(r"\w+", text.lower())
    runs = [" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))]
    return {zlib.crc32(run.encode()) for run in runs}  # not hash(): it differs from run to run


rng = np.random.default_rng(0)
A, B = rng.integers(0, 2**63, (2, HASHES, 1), np.uint64) * np.uint64(2) + np.uint64(1)


def signature(items: set[int]) -> np.ndarray:
    """The smallest value of the items under each of HASHES functions: (HASHES,)."""
    x = np.array(sorted(items), np.uint64)
    return ((A * x + B) >> np.uint64(32)).min(1)  # the high bits of a product are well mixed


def candidates(signatures: np.ndarray) -> set[tuple[int, int]]:
    """Pairs (i, j), i < j, that agree in all values of at least one band."""
    pairs = set()
    for band in np.split(signatures, BANDS, axis=1):
        shelf = defaultdict(list)
        for i, values in enumerate(band):
            shelf[values.tobytes()].append(i)
        pairs |= {pair for same in shelf.values() for pair in itertools.combinations(same, 2)}
    return pairs


def meet(s: float, times: int = 200) -> float:
    """The share of pairs of sets with similarity s that meet in a band."""
    shared = round(200 * s / (1 + s))  # of the 100 items of each set
    met = 0
    for _ in range(times):
        items = rng.integers(0, 2**32, 200 - shared).tolist()
        both = np.stack([signature(set(items[:100])), signature(set(items[-100:]))])
        met += bool(candidates(both))
    return met / times


curve = lambda s: 1 - (1 - s**5) ** 25
levels = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
measured = [(s, meet(s), curve(s)) for s in levels]
columns = ["similarity", "meet", "formula"]
lesson.table(columns, measured, "200 pairs at each similarity, 25 bands of 5 hashes")
_, met, formula = np.array(measured).T
lesson.holds(abs(met - formula).max() < 0.12, "pairs meet in a band as often as the formula says")


# %%
def keep(texts: list[str], method: str) -> list[str]:
    """The texts that are not a copy of an earlier one; held-out texts count as earlier."""
    held = len(leaked + clean)
    texts = leaked + clean + texts
    if method == "MinHash":
        sets = [shingles(text) for text in texts]
        pairs = candidates(np.stack([signature(items) for items in sets]))
        tried.update(pairs)
        again = {j for i, j in pairs if len(sets[i] & sets[j]) >= len(sets[i] | sets[j]) / 2}
    else:
        seen = {text: i for i, text in reversed([*enumerate(texts)])}  # the first of each
        again = {i for i, text in enumerate(texts) if seen[text] != i}
    return [text for i, text in enumerate(texts) if i >= held and i not in again]


tried = set()
found = []
for method in ("equal", "MinHash"):
    left = keep(collected, method)
    results[f"after {method}"] = examine(left)
    gone = Counter(collected) - Counter(left)
    of_kind = [copies[i::4] for i in range(4)]
    shares = [100 * sum(gone[text] for text in {*some}) / len(some) for some in of_kind]
    found.append((method, *shares, sum(text not in left for text in unique)))
columns = ["method", "as is %", "format %", "words %", "cut %", "not planted"]
lesson.table(columns, found, f"removed, of {len(copies)} copies and {len(unique)} other documents")
n = len(leaked + clean + collected)
exact = found[0][1] == 100 and found[0][3] < 25
lesson.holds(exact, "comparing texts finds equal copies, and hardly any with replaced words")
lesson.holds(min(found[1][1:5]) > 80, "MinHash finds more than 80% of each kind of copy")
few = len(tried) < n * (n - 1) / 40
lesson.holds(few, f"MinHash compares fewer than one pair in twenty: {len(tried):,}")

# %% [markdown]
# ## The loss again
# MinHash also removed documents that nobody planted: the standard library repeats itself, and some
# held-out documents were in the training text in another form even before you planted any. So the
# row to compare the loss with is the last one, **nothing planted, and MinHash**.

# %%
results["only MinHash"] = examine(keep(unique, "MinHash"))
columns = ["training text", "documents", "bytes", "bits, leaked", "bits, clean"]
lesson.table(columns, [(name, *x) for name, x in results.items()], "bits per byte, held out")
equal, near, true = (bits_of[2:] for bits_of in [*results.values()][2:])
lesson.holds(equal[0] < true[0] - 0.3, "without equal copies, the loss on leaked texts still lies")
lesson.holds(abs(near[0] - true[0]) < 0.15, "after MinHash it is what it would be without a leak")
lesson.holds(
    abs(near[1] - true[1]) < 0.05, "after MinHash the loss on the clean texts is right too"
)

# %%
fig = lesson.figure(8, 3.2)
left, right = fig.subplots(1, 2, width_ratios=[2, 3])
grid = np.linspace(0, 1, 100)
left.plot(grid, curve(grid), "silver", levels, met, "o")
left.set(xlabel="Jaccard similarity s", ylabel="share that meets in a band")
left.set_title("dots: measured; line: 1 - (1 - s^5)^25", fontsize=8)
for shift, column, name in ((-0.2, 2, "leaked"), (0.2, 3, "clean")):
    values = [values[column] for values in results.values()]
    right.bar(np.arange(5) + shift, values, 0.4, label=f"held out, {name}")
right.set_xticks(range(5), [name.replace(" ", "\n") for name in results], fontsize=8)
right.set(ylabel="bits per byte", ylim=(0, 3.6))
right.legend(ncols=2)
lesson.save(fig, "19_duplicates")

# %% [markdown]
# ## Trap
# How do you choose what to hold out? If you draw each text at random, a text that occurs a hundred
# times almost certainly ends up in both parts. `prepare_data.py` decides by the hash of the
# content, so equal texts fall on the same side; but a copy with one word changed has another hash,
# and may fall on either. So remove copies *before* you hold anything out, and compare what is held
# out with what you train on. The first sign of a leak is a loss that is better than anybody
# expected: here it fell by about half, and nothing had been learned.
#
# ## Exercise
# `exercises/ex19.py`: copies of copies, in files, with a result that doesn't depend on their order.
# `python course/check.py 19`
