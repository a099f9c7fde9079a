# %% [markdown]
# # 1. Counting: what a prediction is, and how to say how good it is
#
# **Afterwards** you can predict text by counting, and measure any predictor in bits per byte.
#
# **Question.** How well can a program guess the next byte of a text, if all it does is count?
#
# Source: C. E. Shannon, Prediction and entropy of printed English (1951). Core file: `eval.py`,
# which measures the project's models in the same unit. Before: nothing but some Python. Next:
# lesson 2. Takes 5 seconds on two cores.

# %%
import json
import math
from collections import Counter  # a dictionary that counts

import lesson
import numpy as np  # arrays: many numbers at once

SMOOTH = 0.1
lesson.begin(1, "counting")

# %% [markdown]
# ## The text
# A file holds **bytes**: whole numbers from 0 to 255. In the files we read here, a byte is nearly
# always one character: 97 is "a", 32 is a space, 10 ends a line. Our **training text**, the text a
# program may learn from, is source code you already have: the first million bytes of Python's
# standard library.
#
# From the rest of the library, 64 pieces of 1,024 bytes are **held out**: nothing is learned from
# them. They are the exam, and a student who has seen the exam beforehand proves nothing. The pieces
# come from many files, because any single place might happen to be an easy one. Lessons 1, 2, 4 and
# 5 and your own trainer (`yours.py`) all take this one exam: guess each held-out byte from the
# bytes before it.
#
# Run the file, whole or one cell at a time (each `# %%` begins a cell), and read along. A line of
# output that begins with `holds:` is a claim, checked against what was measured just before it; if
# it were false, the lesson would stop there. Some lines do a lot to a whole array at once.
# [idioms.md](idioms.md) shows each of these idioms on a tiny example: look one up when it is new to
# you.

# %%
training, held = lesson.exam()  # arrays of whole numbers
before, actual = held[:-1], held[1:]  # before[i] is the byte just before actual[i]
start = held[:10].tolist()
print("the first held-out bytes:", start)
print("  as text:", bytes(start), f"and {len(actual):,} bytes to guess")

# %% [markdown]
# ## A prediction, and its loss
# A **prediction** is not one guess but 256 **probabilities**: for each byte, how likely it is to
# come next, as a share of 1. They sum to 1, so the more you put on one byte, the less you have for
# the rest. Then the byte comes, and only p matters, the probability you gave to *that* byte: the
# larger, the better. The **loss** of the prediction is
#
#     loss = -log2(p)        log2(p) is the power to which you raise 2 to get p
#
# log2(1/2) = -1 and log2(1/4) = -2: the loss counts how often you must halve 1 to reach p. It is 0
# when the program was certain and right, and there is no limit to how large it can get. Its unit is
# the **bit**, the answer to one yes-or-no question: eight such questions pick out one of 256
# equally likely bytes. The mean loss over all bytes of a text, in **bits per byte**, is the number
# this course is about.
#
# Why a **logarithm**, and not p itself? First, the probability of a whole text is the *product* of
# the probabilities of its bytes, and a logarithm turns that product into a sum. The product itself
# is too small for a computer, whose smallest number is about 2 to the power of -1074:


# %%
def bits(p: np.ndarray) -> float:
    """The mean loss, in bits per byte, if these probabilities were given to the bytes that came."""
    return -np.log2(p).mean()


uniform = np.full(len(actual), 1 / 256)  # no idea: each byte as likely as any other
product = np.prod(uniform)
print(f"product of {len(actual):,} probabilities: {product}; bits per byte: {bits(uniform)}")
lesson.holds(product == 0, "the computer rounds the product of 65,536 small probabilities to 0")

# %% [markdown]
# Second, a logarithm rewards the truth. Take a coin that shows heads 7 times in 10, and let
# programs claim that heads has probability 0.01, 0.02, ... 0.99. Score them by p itself, and the
# one that claims the most for heads wins. Score them by the logarithm, and the one that claims 0.7
# wins:

# %%
claims = np.linspace(0.01, 0.99, 99)
by_p = 0.7 * claims + 0.3 * (1 - claims)  # the mean p: heads come 7 times in 10, tails 3
by_log = 0.7 * -np.log2(claims) + 0.3 * -np.log2(1 - claims)
winners = claims[by_p.argmax()], claims[by_log.argmin()]
print(f"the best claim about a coin of 0.7: by p {winners[0]:.2f}, by -log2 p {winners[1]:.2f}")
lesson.holds(winners[0] > 0.98, "scored by p, the best claim is an exaggeration")
lesson.holds(abs(winners[1] - 0.7) < 1e-9, "scored by -log2 p, the best claim is the truth")

# %% [markdown]
# ## Count bytes, then pairs
# A program that knows nothing is **uniform**: it gives each byte 1/256, which costs 8 bits per
# byte. The next one gives each byte its share of the training text. This is called a **unigram**
# model: a **model** is anything that makes predictions, and "uni" says that this one counts single
# bytes.
#
# The third looks one byte back: after "q" it expects "u". For each of the 256 possible bytes
# before, it counts what came next, in a table with 256 rows and 256 columns. This is a **bigram**
# model: it counts pairs. Divide row a of the table by its sum, and you have the prediction after
# byte a.
#
# A pair that was never counted would get p = 0, and when it comes up in the exam, the loss is
# infinite. So we add a tenth to the count of every pair: this is called **smoothing**. Say "q" came
# 100 times, 97 of them before "u". Then after "q", p of "u" is 97.1 / (100 + 256 * 0.1), about
# 0.77, and p of a byte that never came there is 0.1 / 125.6, about 0.0008.

# %%
pairs = np.zeros((256, 256))
for a, b in zip(training[:-1].tolist(), training[1:].tolist()):
    pairs[a, b] += 1
single = np.bincount(training, minlength=256)  # how often each byte occurs
unigram = (single + SMOOTH) / (single + SMOOTH).sum()
bigram = (pairs + SMOOTH) / (pairs + SMOOTH).sum(1, keepdims=True)  # each row sums to 1
counted = pairs[before, actual]  # for each i: row before[i], column actual[i]
losses = {
    "uniform": bits(uniform),
    "one byte (unigram)": bits(unigram[actual]),
    "two bytes (bigram)": bits(bigram[before, actual]),
}
print(f"{(counted == 0).sum()} pairs of the exam were never counted")
lesson.table(["model", "bits per byte"], [*losses.items()], "held-out loss of three models")
eight, one, two = losses.values()
lesson.holds(counted.min() == 0, "without smoothing, some pair of the exam would have p = 0")
lesson.holds(
    eight > one + 2 and one > two + 0.5,
    "counting bytes saves over 2 of the 8 bits, pairs over half a bit more",
)

# %% [markdown]
# ## A sample
# A model that predicts can also write. Draw a byte at random, each with its probability, append it,
# predict again, draw again: this is **sampling**, and it shows what a model knows.
#
# A computer works out even its "random" numbers: it starts from one number that you choose, the
# **seed**, and computes all the others from it. The same seed gives the same numbers, so with the
# seed 1 below you see the same sample in every run. A different seed is a new roll of the dice.
# That is why, where luck plays a part, you will read what came out "with seeds 0, 1, 2": three runs
# that differ in nothing but their luck. How far apart they end tells you how much of a result is
# luck.

# %%
rng = np.random.default_rng(1)  # 1: the seed
alone = [int(rng.choice(256, p=unigram)) for _ in range(70)]
chain = [32]
for _ in range(140):
    chain.append(int(rng.choice(256, p=bigram[chain[-1]])))
for name, drawn in (("unigram", alone), ("bigram", chain)):
    shown = "".join(chr(b) if 32 <= b < 127 else " " for b in drawn)
    print(name, *[shown[i : i + 70] for i in range(0, len(shown), 70)], sep="\n  ")

# %% [markdown]
# ## Longer pasts
# The bytes a model looks at are its **context**. One byte of context saved a lot, so take two,
# three, four: for each context, count which byte followed. There are 256 x 256 = 65,536 contexts of
# two bytes, and 4 billion of four. Watch the loss on the training text itself, and the loss on the
# held-out text.


# %%
def count(text: bytes, k: int) -> tuple[Counter, Counter]:
    """-> how often each context of k bytes occurs; how often each with the byte after it."""
    contexts = Counter()
    followed = Counter()
    for i in range(len(text) - k):
        contexts[text[i : i + k]] += 1
        followed[text[i : i + k + 1]] += 1
    return contexts, followed


def examined(exam: bytes, k: int, smooth: float, places: range) -> tuple[float, float]:
    """Bits per byte at these places of `exam`, each guessed from the k bytes before it; and what
    percentage of the contexts never occurs in the training text."""
    loss = 0.0
    unseen = 0
    for i in places:
        context = exam[i - k : i]
        p = (followed[exam[i - k : i + 1]] + smooth) / (contexts[context] + 256 * smooth)
        loss -= math.log2(p)
        unseen += contexts[context] == 0
    return loss / len(places), 100 * unseen / len(places)


learned, exam = (bytes(text.tolist()) for text in (training, held))
rows = []
for k in range(1, 7):
    contexts, followed = count(learned, k)
    some = range(k, len(learned), 16)  # every 16th place is enough
    remembered, _ = examined(learned, k, 0, some)  # all was counted: no p is 0
    bits_held, unseen = examined(exam, k, SMOOTH, range(k, len(exam)))
    rows.append((k, remembered, bits_held, unseen))
lesson.table(
    ["bytes of context", "training text", "held-out text", "contexts never seen, %"],
    rows,
    "bits per byte when longer contexts are counted (one byte: the bigram model)",
)
_, known, unknown, unseen = zip(*rows)  # the columns of the table
lesson.holds(unseen[-1] > 10 and unseen[0] < 1, "over a tenth of the contexts of six bytes are new")
memorized = all(a > b + 0.1 for a, b in zip(known, known[1:]))
lesson.holds(memorized, "on the training text, each extra byte of context lowers the loss")
best = int(np.argmin(unknown))
lesson.holds(
    best < 4 and unknown[-1] > unknown[best] + 0.5,
    "on held-out text, six bytes do worse than fewer",
)

# %% [markdown]
# A count has no idea of "almost the same": what followed `self.nam` tells it nothing about
# `self.val`. So the longer the contexts, the more of them are new. In the next lesson this table is
# *learned* instead of counted; from lesson 4 on, contexts that are alike share what is learned.
#
# On the left of the figure, the more a square stands out, the likelier the pair. The colors show
# the square root of p, so that small probabilities can be seen too.

# %%
fig = lesson.figure(9, 4.2)
left, right = fig.subplots(1, 2)
often = np.argsort(-single)[:18]  # the most frequent bytes
names = [{10: "\\n", 32: "␣"}.get(int(b), chr(b)) for b in often]
left.imshow(bigram[often][:, often] ** 0.5, cmap="Blues")  # rows, then columns
left.set_xticks(range(18), names)
left.set_yticks(range(18), names)
left.set(xlabel="next byte (␣: a space)", ylabel="byte before", title="the 18 most frequent bytes")
right.plot(range(1, 7), known, "o-", color="silver", label="training text")
right.plot(range(1, 7), unknown, "o-", color="crimson", label="held-out text")
right.set(
    xlabel="bytes of context", ylabel="bits per byte", ylim=(0, None), title="longer contexts"
)
right.legend()
lesson.save(fig, "01_counting")
(lesson.OUT / "01_losses.json").write_text(json.dumps(losses))  # for a table in lesson 5

# %% [markdown]
# ## Trap
# Look at the gray line: on the text that was counted, a longer context seems better, because the
# table has *memorized* what came next. A loss on the training text tells you how much a model
# remembers; only held-out text tells you what it has learned. When you report a loss, say which
# text it was measured on.
#
# ## Exercise
# `exercises/ex01.py`: let each context lean on the one that is a byte shorter, the more so the
# rarer it is. That makes long contexts worth having. The loss you reach this way on the exam is the
# line a model has to get under, and the models of lessons 2 to 5 do not. `python course/check.py 1`
