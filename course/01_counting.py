# %% [markdown]
# # 1. Counting: what a prediction is, and how to say how good it is
#
# **Afterwards** you can predict text by counting, and measure any predictor in bits per byte.
#
# **Question.** How well can a program guess the next byte of a text, if all it does is count?
#
# Source: C. E. Shannon, Prediction and entropy of printed English (1951). Core file: `eval.py`,
# which measures the project's models in the same unit. Before: nothing but some Python.
# Next: lesson 2. Takes 5 seconds on two cores.

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
# A file holds **bytes**: whole numbers from 0 to 255. In the files that we read here, a byte is
# nearly always one character: 97 is "a", 32 a space, 10 the end of a line. Our **training text**,
# from which programs may learn, is source code that you have already: the first million bytes of
# Python's standard library.
#
# From the rest of the library, 64 pieces of 1,024 bytes are **held out**: nothing is learned from
# them. They are the exam, and a student who has seen the exam proves nothing. They come from many
# files, since a single place could be an easy one by luck. Lessons 1, 2, 4 and 5 and your own
# trainer (`yours.py`) keep this one exam: for each held-out byte, guess it from the bytes before.
#
# Run the file, whole or cell by cell, and read on. A line of its output that begins with `holds:`
# is a claim, checked with what was measured just before; if it were false, the lesson would stop.
# Some lines do a lot with a whole array at once: [idioms.md](idioms.md) shows each such idiom on a
# tiny example. Look it up when you meet one that is new to you.

# %%
training, held = lesson.exam()  # arrays of whole numbers
before, actual = held[:-1], held[1:]  # before[i] is the byte just before actual[i]
start = held[:10].tolist()
print("the first held-out bytes:", start)
print("  as text:", bytes(start), f"and {len(actual):,} bytes to guess")

# %% [markdown]
# ## A prediction, and its loss
# A **prediction** is not one guess but 256 **probabilities**: for each byte, how likely it is to
# come next, as a share of 1. They sum to 1, so whoever puts more on one byte has less for the rest.
# Then the byte comes, and only the probability p that was given to *it* matters: the larger, the
# better. The **loss** of the prediction is
#
#     loss = -log2(p)        log2(p) is the power to which 2 must be raised to give p
#
# log2(1/2) = -1, log2(1/4) = -2: the loss counts how often 1 must be halved to reach p. It is 0 if
# the program was certain and right, and it has no upper end. Its unit is the **bit**, the answer to
# one yes-or-no question: 256 equally likely bytes are told apart by 8 such questions. The mean
# loss over all bytes of a text, in **bits per byte**, is the number that this course is about.
#
# Why a **logarithm**, and not simply p? First, the probability of a whole text is the *product* of
# those of its bytes, and a logarithm turns the product into a sum. The product itself is too small
# for a computer, whose smallest number is about 2 to the power of -1074:


# %%
def bits(p: np.ndarray) -> float:
    """The mean loss, in bits per byte, when the bytes that came had these probabilities."""
    return -np.log2(p).mean()


chances = np.full(len(actual), 1 / 256)  # no idea: each byte as likely as any other
product = np.prod(chances)
print(f"product of {len(actual):,} probabilities: {product}; bits per byte: {bits(chances)}")
lesson.holds(product == 0, "the product of 65,536 small probabilities is rounded to 0")

# %% [markdown]
# Second, a logarithm rewards the truth. Take a coin that shows heads 7 times in 10, and let
# programs claim that heads has probability 0.01, 0.02, ... 0.99. If p itself were the score, the
# winner would be whoever claims the most for heads. With the logarithm it is whoever claims 0.7:

# %%
claims = np.linspace(0.01, 0.99, 99)
by_p = 0.7 * claims + 0.3 * (1 - claims)  # mean p of what came: heads 7 times, tails 3 times in 10
by_log = 0.7 * -np.log2(claims) + 0.3 * -np.log2(1 - claims)
winners = claims[by_p.argmax()], claims[by_log.argmin()]
print(f"the best claim about a coin of 0.7: by p {winners[0]:.2f}, by -log2 p {winners[1]:.2f}")
lesson.holds(winners[0] > 0.98, "scored by p, it pays to exaggerate")
lesson.holds(abs(winners[1] - 0.7) < 1e-9, "scored by -log2 p, the best claim is the truth")

# %% [markdown]
# ## Count bytes, then pairs
# A program that knows nothing is **uniform**: 1/256 for each byte, 8 bits per byte. The next one
# gives each byte its share of the training text. This is called a **unigram** model: a **model** is
# anything that makes predictions; "uni" says that this one counts single bytes.
#
# The third looks at one byte of the past: after "q" it expects "u". For each of the 256 possible
# bytes before, it counts what came next: a table with 256 rows and 256 columns. This is a
# **bigram** model: it counts pairs. Row a of the table, divided by its sum, is the prediction after
# byte a.
#
# A pair that was never counted would get p = 0, and if it comes up in the exam, the loss is
# infinite. So we add a tenth to the count of every pair: this is called **smoothing**. Say that "q"
# came 100 times, 97 of them before "u". Then after "q", p of "u" is 97.1 / (100 + 256 * 0.1), about
# 0.77, and p of a byte that never came there is 0.1 / 125.6, about 0.0008.

# %%
pairs = np.zeros((256, 256))
for a, b in zip(training[:-1].tolist(), training[1:].tolist()):
    pairs[a, b] += 1
single = np.bincount(training, minlength=256)  # how often each byte occurs
unigram = (single + SMOOTH) / (single + SMOOTH).sum()
bigram = (pairs + SMOOTH) / (pairs + SMOOTH).sum(1, keepdims=True)  # each row sums to 1
sums = np.maximum(pairs.sum(1, keepdims=True), 1)  # a byte that never came has no row: all 0
with np.errstate(divide="ignore"):  # log2(0) is minus infinity
    raw = bits((pairs / sums)[before, actual])  # for each i: row before[i], column actual[i]
losses = {
    "uniform": bits(chances),
    "one byte (unigram)": bits(unigram[actual]),
    "two bytes (bigram)": bits(bigram[before, actual]),
}
print("bigram without smoothing:", raw)
lesson.table(["model", "bits per byte"], [*losses.items()], "held-out loss of three models")
eight, one, two = losses.values()
lesson.holds(raw == np.inf, "one pair that was never counted makes the raw table's loss infinite")
falls = eight > one + 2 and one > two + 0.5
lesson.holds(falls, "counting bytes saves over 2 bits of 8, pairs over half a bit more")

# %% [markdown]
# ## A sample
# A model that predicts can also write. Draw a byte at random, each with its probability, append it,
# predict again, draw again: this is **sampling**. It shows what a model knows:

# %%
rng = np.random.default_rng(1)  # random numbers, but the same in each run
alone = [int(rng.choice(256, p=unigram)) for _ in range(70)]
chain = [32]
for _ in range(140):
    chain.append(int(rng.choice(256, p=bigram[chain[-1]])))
for name, drawn in (("unigram", alone), ("bigram", chain)):
    shown = "".join(chr(b) if 32 <= b < 127 else " " for b in drawn)
    print(name, *[shown[i : i + 70] for i in range(0, len(shown), 70)], sep="\n  ")

# %% [markdown]
# ## Longer pasts
# The bytes that a model looks at are its **context**. One byte of context saved much, so take two,
# three, four: count for each context which byte followed. There are 256 x 256 = 65,536 contexts of
# two bytes, 4 billion of four. Watch both losses.


# %%
def count(text: bytes, k: int) -> tuple[Counter, Counter]:
    """How often each stretch of k bytes comes before another byte, and how often before which."""
    contexts = Counter()
    followed = Counter()
    for i in range(len(text) - k):
        contexts[text[i : i + k]] += 1
        followed[text[i : i + k + 1]] += 1
    return contexts, followed


def examined(exam: bytes, k: int, smooth: float, places: range) -> tuple[float, float]:
    """Bits per byte at these places of `exam`, each guessed from the k bytes before it; and the
    share of contexts that never occur in the training text, in percent."""
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
    remembered, _ = examined(learned, k, 0, some)  # all of it was counted: nothing to smooth
    bits_held, unseen = examined(exam, k, SMOOTH, range(k, len(exam)))
    rows.append((k, remembered, bits_held, unseen))
columns = ["bytes of context", "training text", "held-out text", "contexts never seen, %"]
lesson.table(columns, rows, "bits per byte when longer contexts are counted")
_, known, unknown, unseen = zip(*rows)  # the columns of the table
lesson.holds(abs(unknown[0] - two) < 1e-9, "with one byte of context, this is the bigram model")
lesson.holds(unseen[-1] > 10 and unseen[0] < 1, "over a tenth of contexts of six bytes are new")
memorized = all(a > b + 0.1 for a, b in zip(known, known[1:]))
lesson.holds(memorized, "on the training text, each byte more of context lowers the loss")
best = int(np.argmin(unknown))
lesson.holds(
    best < 4 and unknown[-1] > unknown[best] + 0.5, "held out, six bytes are worse than fewer"
)

# %% [markdown]
# A count knows nothing of "almost the same": what followed `self.nam` tells it nothing about
# `self.val`. So the longer the contexts, the more of them are new. In the next lesson this table is
# not counted but *learned*; from lesson 4 on, contexts that are alike share what is learned.

# %%
fig = lesson.figure(9, 4.2)
left, right = fig.subplots(1, 2)
often = np.argsort(-single)[:18]  # the most frequent bytes
names = [{10: "\\n", 32: "␣"}.get(int(b), chr(b)) for b in often]
left.imshow(bigram[often][:, often] ** 0.5, cmap="Blues")  # rows, then columns
left.set_xticks(range(18), names)
left.set_yticks(range(18), names)
left.set(xlabel="next byte (␣: a space)", ylabel="byte before", title="18 of 256; darker: likelier")
right.plot(range(1, 7), known, "o-", color="silver", label="training text")
right.plot(range(1, 7), unknown, "o-", color="crimson", label="held-out text")
right.set(
    xlabel="bytes of context", ylabel="bits per byte", ylim=(0, None), title="longer contexts"
)
right.legend()
lesson.save(fig, "01_counting")
if falls:  # lesson 5 shows what lessons 1 to 5 have reached
    (lesson.OUT / "01_losses.json").write_text(json.dumps(losses))

# %% [markdown]
# ## Trap
# Look at the gray line: on the text that was counted, a longer context seems better, because the
# table has *memorized* what came next. A loss on the training text says how much a model remembers;
# only held-out text says what it has learned. Whoever reports a loss must say on which text.
#
# ## Exercise
# `exercises/ex01.py`: where a context was never seen, fall back on the shorter one. Then long
# contexts are worth having: the loss that this reaches on the exam is the line that a model has to
# get under, and the models of lessons 2 to 5 do not. `python course/check.py 1`
