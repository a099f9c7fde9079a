# %% [markdown]
# # 4. Attention: what a query, a key and a value are for
#
# **Afterwards** you can build attention from an average, and say what each of its parts is for.
#
# **Question.** How can a model use the whole past, when no table has room for it?
#
# Source: A. Vaswani et al., Attention is all you need (2017). Core file: `model.py`. Before: lesson
# 3. Next: lesson 5. Takes 20 seconds on two cores. The lesson does a lot with whole arrays at once:
# [idioms.md](idioms.md) shows each of these idioms on a tiny example.

# %%
import json
import math

import lesson
import torch
import torch.nn.functional as F

SMOOTH = 0.1
WIDTH = 64
LENGTH = 64
ROWS = 8
STEPS = 800
torch.set_num_threads(1)
lesson.begin(4, "attention")

# %% [markdown]
# ## A dictionary that can be learned
# Python's `{"cat": 3, "dog": 7}` holds **keys** and **values**. Ask it with a **query**, "dog": it
# compares the query with the keys, and gives back the value whose key is equal. That is what we
# want from the past: "what came after the last opening quote?". But a gradient needs things that
# change gradually, and "equal" is yes or no. So let keys and queries be rows of numbers, called
# **vectors**, and let "equal" become "similar":
# 1. The **dot product** of query and key (multiply number by number, then add up) is large when the
#    two are alike: for (1, 2) and (1, 2) it is 1 * 1 + 2 * 2 = 5, for (1, 2) and (2, -1) it is 0.
#    This is the key's score.
# 2. Softmax turns the scores into **weights**: positive numbers that sum to 1. (The word is the
#    same as for the numbers that training changes, but these are computed anew for each query.)
# 3. The answer is the average of the values with these weights: a **weighted average**.
#
# Here is a dictionary with four keys, and we ask for the second. The query is that key times 0, 1,
# 3 or 10, so this number is the score of key 2 (the other scores are 0). Watch what a larger score
# does:

# %%
keys = torch.eye(4)  # four keys, one per row: each has a 1 at its own place, and 0 elsewhere
values = torch.tensor([3.0, 7.0, 1.0, 5.0])  # their mean is 4
rows = []
for times in (0, 1, 3, 10):
    query = times * keys[1]
    weights = torch.softmax(keys @ query, dim=0)  # keys @ query: four dot products
    rows.append((times, float(weights[1]), float(weights @ values)))
lesson.table(
    ["score of key 2", "weight of key 2", "answer"],
    rows,
    "asking for the second of the values 3, 7, 1, 5",
)
lesson.holds(abs(rows[0][2] - 4) < 1e-6, "when nothing matches, the answer is the plain average")
lesson.holds(
    abs(rows[-1][2] - 7) < 0.01, "a query that matches one key well gets the value of that key"
)

# %% [markdown]
# ## The average of the past
# Now to text. Give each byte a vector of 64 numbers, which will be learned: its **embedding**. The
# place of a byte in its text, counted from 0, is its **position**. To predict what follows position
# t, the simplest use of the past is to average the vectors at positions 0, 1, ... t. For all T
# positions of a text at once this is one matrix product; it is also our dictionary with nothing to
# match, where all scores are 0. One thing is missing. The whole text is in one matrix, and a
# position may not look at the bytes after it, since those are what it has to predict. So their
# scores are set to minus infinity, which softmax turns into a weight of 0: this is the **mask**.

# %%
x = torch.randn(5, 3)  # 5 positions, a vector of 3 numbers each
by_loop = torch.stack([x[: t + 1].mean(0) for t in range(5)])
mask = torch.ones(5, 5).tril().bool()  # tril keeps the lower triangle: True where one may look
scores = torch.zeros(5, 5)  # row: who asks; column: who is asked
scores[~mask] = -math.inf  # ~: not
weights = torch.softmax(scores, dim=-1)
print("weights, a row for each position:", weights, sep="\n")
same = torch.allclose(weights @ x, by_loop, atol=1e-6)
lesson.holds(same, "scores of 0, mask and softmax give the average of each position's past")

# %% [markdown]
# ## Each position makes its own query, key and value
# From its vector each position makes three more, with three matrices that are learned:
# - the **query** says what this position is looking for,
# - the **key** says how this position can be found,
# - the **value** is what it hands to a position that finds it.
#
# Position t gives position s (t itself, or one before it) a score: the dot product of t's query
# with s's key, divided by the square root of D, where D is how many numbers a query has. The values
# are averaged as above, and this is **attention**. (In the shapes below, the dots stand for several
# texts, or for whatever else is done side by side; `k.transpose(-2, -1)` has a key in each column.)


# %%
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masked=True) -> torch.Tensor:
    """q, k, v: (..., T, D), D numbers for each of T positions -> (..., T, D)."""
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / D**0.5  # (..., T, T); transpose: rows become columns
    if masked:
        ahead = ~torch.ones(T, T).tril().bool()
        scores = scores.masked_fill(ahead, -math.inf)  # a copy, -inf where `ahead` is True
    return torch.softmax(scores, dim=-1) @ v


# %% [markdown]
# Why the root of D? The dot product of two random vectors is a sum of D products, and those above 0
# and below 0 partly cancel. The typical **size** of such a sum, the root of the mean of its square,
# is the root of D: 8 for D = 64. And softmax makes a lot of that: e^8 is 2,981. Here are random
# queries and 64 random keys:

# %%
torch.manual_seed(0)
rows = []
for D in (4, 64, 1024):
    raw = torch.randn(1000, D) @ torch.randn(D, 64)  # (1000, 64): 1,000 queries ask 64 keys
    largest = [float(torch.softmax(s, dim=-1).amax(-1).mean()) for s in (raw, raw / D**0.5)]
    rows.append((D, float(raw.std()), *largest))
columns = ["D", "size of a score", "largest weight", "after dividing by root D"]
lesson.table(columns, rows, "random queries and keys: the weight of the best of 64 keys")
lesson.holds(
    rows[2][2] > 0.8 and rows[2][3] < 0.2, "after dividing, no key gets it all, however large D is"
)

# %% [markdown]
# Without the division, one key that happens to be the best gets nearly all the weight before
# anything is learned. And it keeps it. Nudge the score of a key with weight p, and its weight
# changes by p * (1 - p) times the nudge: 0.25 of it at p = 0.5, but only 0.01 of it at p = 0.99.
# Where softmax is that sure, the gradient of the scores is near 0.
#
# There is one thing attention cannot see: the order of the past. A weighted average is the same
# whichever part comes first, so "ab" and "ba" before this position look alike.

# %%
q, k, v = torch.randn(3, 6, 8).unbind()  # three times 6 positions, 8 numbers each
swapped = [1, 0, 2, 3, 4, 5]  # the first two change places
plain = attention(q, k, v)[-1]
other = attention(q, k[swapped], v[swapped])[-1]
lesson.holds(torch.allclose(plain, other, atol=1e-6), "without positions, the past has no order")

# %% [markdown]
# ## Positions
# So tell it the order. Give each of the 64 positions a vector too, also learned, and add it to the
# byte's vector before you make the query and the key. Now a position can ask for "the byte before
# mine": the query of position 7 learns to look like the key of position 6. Such a table has an end:
# there is no position 64. Today's models have no table: they turn the query and the key, two
# numbers at a time, by an angle that grows with the position. Lesson 5 borrows that, and lesson 8
# derives it.
#
# You need no loop to add one table (T, 64) to the vectors of B texts, (B, T, 64). Shapes are
# compared from the right, and where one has a 1 or nothing, it is repeated until it fits. This is
# the **broadcasting** of lesson 3's bias. A column and a row become a matrix:
#
#     [[10],   +   [1, 2, 3]   =   [[11, 12, 13],        (2, 1) + (3,) -> (2, 3)
#      [20]]                        [21, 22, 23]]

# %%
place = torch.randn(6, 8)  # a vector for each of six positions
plain = attention(q + place, k + place, v)[-1]
other = attention(q + place, k[swapped] + place, v[swapped])[-1]
lesson.holds(not torch.allclose(plain, other, atol=1e-3), "with positions, the past has an order")

# %% [markdown]
# ## Heads
# One softmax makes one average: a position that wants the byte before *and* the one before that
# gets a mixture of the two. So cut queries, keys and values of 64 numbers into four parts of 16,
# let each part attend on its own, and put the four answers side by side again. Each part is a
# **head**:
#
#     a query: 64 numbers     [0 ................................................ 63]
#                                   |             |             |             |
#     cut into four parts     [0 ...... 15] [16 ..... 31] [32 ..... 47] [48 ..... 63]
#                                   |             |             |             |
#     each attends alone         head 0        head 1        head 2        head 3
#                                   |             |             |             |
#     four answers of 16      [0 ...... 15] [16 ..... 31] [32 ..... 47] [48 ..... 63]
#                                   |             |             |             |
#     side by side again      [0 ................................................ 63]
#
# Keys and values are cut at the same places, and head 0 sees only the first 16 numbers of each.
# Four heads have as many learned numbers as one head of 64, and as many multiplications to do.
#
# Now measure all of it. The model keeps lesson 2's table of pairs, counted here, and *adds* to its
# scores what it has gathered from the past, through one more matrix, `head_out`, of 64 x 256. Each
# step of this lesson is a switch. Three of torch's words: a `Module` is a model or a part of one,
# and knows the weights in it; an `Embedding` is a table of vectors to look up; a `Linear` is a
# matrix product (here without `bias`, the constant it can add). Calling a model calls its
# `forward`, `super().__init__()` lets torch set the module up, and a name that ends in `_`, such as
# `copy_`, changes a tensor in place.


# %%
class Past(torch.nn.Module):
    """Scores from the table of pairs, plus scores from the past."""

    def __init__(self, match=True, positions=True, heads=1, masked=True):
        super().__init__()
        self.match = match
        self.positions = positions
        self.heads = heads
        self.masked = masked
        self.pairs = torch.nn.Embedding(256, 256)
        self.embed = torch.nn.Embedding(256, WIDTH)
        self.place = torch.nn.Embedding(LENGTH, WIDTH)
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head_out = torch.nn.Linear(WIDTH, 256, bias=False)
        with torch.no_grad():
            self.pairs.weight.copy_(table)  # it begins as the one that lesson 1 counts
            self.head_out.weight.zero_()  # so the model begins as the table alone

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, 64) -> (B, heads, T, 64 / heads)"""
        B, T, width = x.shape
        return x.view(B, T, self.heads, width // self.heads).transpose(1, 2)

    def queries_and_keys(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.positions:
            x = x + self.place.weight[: x.shape[1]]
        q = self.split(self.q(x))
        k = self.split(self.k(x))
        return (q, k) if self.match else (0 * q, k)  # 0 * q: all scores are 0

    def forward(self, bytes_: torch.Tensor) -> torch.Tensor:
        """(B, T): B texts of T bytes -> scores (B, T, 256)"""
        x = self.embed(bytes_)
        q, k = self.queries_and_keys(x)
        y = attention(q, k, self.split(self.v(x)), self.masked)  # (B, heads, T, 64 / heads)
        y = y.transpose(1, 2).reshape(x.shape)  # the heads side by side again
        return self.pairs(bytes_) + self.head_out(y)


# %% [markdown]
# ## Training
# A batch is 8 pieces of 64 bytes, cut from the training text at random (a column of places where
# they start, plus the row 0, 1, 2, ...: broadcasting again); every position predicts the byte after
# it. Each model sees the same 800 batches. The learning rate grows over the first 20 steps, because
# Adam's first steps are the longest, and falls to 0 over the second half, so that the last batches
# leave little noise (lesson 10 measures both). `head_out` and the tables, whose rows are rarely
# met, get a larger rate.
#
# `cross_entropy` is torch's name for the mean of -log(p), with softmax included and the natural
# logarithm. `flatten` turns B texts of T positions into one long row of B * T predictions.


# %%
def bits(model, pieces: torch.Tensor) -> torch.Tensor:
    """The loss on pieces (B, T + 1) of text: bits per byte."""
    scores = model(pieces[:, :-1]).flatten(0, 1)
    return F.cross_entropy(scores, pieces[:, 1:].flatten()) / math.log(2)


def trained(seed: int = 0, **switches) -> tuple[Past, float, float]:
    """-> a trained model, its loss on the last batches, its loss on the held-out text."""
    torch.manual_seed(seed)
    model = Past(**switches)
    tables = [model.pairs.weight, model.embed.weight, model.place.weight, model.head_out.weight]
    others = [model.q.weight, model.k.weight, model.v.weight]
    groups = [{"params": tables, "lr": 0.01}, {"params": others, "lr": 0.003}]  # lr: learning rate
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))  # lesson 2's
    peaks = [group["lr"] for group in groups]
    shown = []
    for step in range(STEPS):
        factor = min(1.0, (step + 1) / 20, 2 * (1 - step / STEPS))
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = factor * peak
        starts = torch.randint(len(training) - LENGTH, (ROWS, 1))
        loss = bits(model, training[starts + torch.arange(LENGTH + 1)])  # (8, 1) + (65,) -> (8, 65)
        optimizer.zero_grad()  # else backward adds to the gradient of the step before
        loss.backward()
        optimizer.step()
        shown.append(loss.item())
    with torch.no_grad():
        return model, sum(shown[-50:]) / 50, float(bits(model, exam))


training, held = (torch.from_numpy(text) for text in lesson.exam())
starts = torch.arange(0, len(held) - 1, LENGTH)
exam = held[starts[:, None] + torch.arange(LENGTH + 1)]  # (1024, 65)
pairs = torch.bincount(256 * training[:-1] + training[1:], minlength=65_536).view(256, 256)
table = torch.log((pairs + SMOOTH) / (pairs + SMOOTH).sum(1, keepdim=True))  # lesson 1's

switches = {
    "+ average of the past": dict(match=False, positions=False),
    "+ queries and keys": dict(positions=False),
    "+ positions": dict(),
    "+ four heads": dict(heads=4),
}
losses = {}
for name, chosen in switches.items():
    model, learning, losses[name] = trained(**chosen)
alone = float(F.cross_entropy(table[held[:-1]], held[1:])) / math.log(2)
rows = [("table of pairs alone", alone), *losses.items()]
lesson.table(["model", "bits per byte"], rows, "held-out loss, one addition at a time")
ladder = [loss for _, loss in rows]
lesson.holds(
    all(a > b + 0.015 for a, b in zip(ladder, ladder[1:])),
    "each addition lowers the held-out loss by over 0.015 bits",
)

# %% [markdown]
# With other seeds each number moves by up to 0.02: that is most of what the first addition
# gains, and little of what the others gain. The last one is 3.146 (3.132 to 3.150 with four seeds).
#
# What do the four heads look at? Here is the weight each of them gives to the byte before its own,
# averaged over the held-out text where the past has 32 bytes or more. Nobody told them to look
# nearby; the loss did. Some look sharply, some broadly: four different mixtures arrive side by
# side, where one head would bring only one. The figure shows the sharpest of them at work: the more
# a square stands out, the larger the weight.

# %%
with torch.no_grad():
    q, k = model.queries_and_keys(model.embed(exam[:, :-1]))
    seen = attention(q, k, torch.eye(LENGTH))  # with these values, the answers are the weights
one_back = seen.diagonal(-1, dim1=-2, dim2=-1)  # (B, heads, T - 1)
one_back = one_back[..., 31:].mean((0, 2))  # (heads,)
print("weight of the byte before, for each head:", [round(w, 2) for w in one_back.tolist()])
lesson.holds(
    one_back.max() > 0.2, "one head gives the byte before over a fifth (an even share: 0.02)"
)

# %%
line = b"for k in keys:\n    print(k)"
with torch.no_grad():
    q, k = model.queries_and_keys(model.embed(torch.tensor([[*line]])))
    weights = attention(q, k, torch.eye(len(line)))[0]  # (4, T, T)
fig = lesson.figure(9, 5)
left, right = fig.subplots(1, 2, width_ratios=[2, 3])
left.plot(ladder, [f"{name}\n{loss:.2f}" for name, loss in rows], "o-", color="crimson")
left.set(xlabel="bits per byte, held out", title="one addition at a time")
left.invert_yaxis()
sharpest = max(weights, key=lambda head: float(head.square().mean()))
right.imshow(sharpest, cmap="Blues", vmin=0)
signs = [{10: "\\n", 32: "␣"}.get(b, chr(b)) for b in line]
right.set_xticks(range(len(line)), signs)
right.set_yticks(range(len(line)), signs)
right.set(ylabel="who asks", xlabel="who is asked", title="the sharpest head reads a line of code")
lesson.save(fig, "04_attention")
(lesson.OUT / "04_losses.json").write_text(json.dumps(losses))  # for a table in lesson 5

# %% [markdown]
# ## Trap
# Forget the mask, and training looks wonderful: each position finds its answer one place ahead.
# When the model is used, there is nothing ahead yet. The last position of a piece is in that
# situation already: the byte it must predict is not in the piece. Compare both models there, on all
# 1,024 pieces. (These are not the numbers of the table above: that is a mean over all 64 positions,
# and most of those have less context. Both training losses are also lower for another reason: the
# held-out text comes from other files, and is harder.)


# %%
@torch.no_grad()
def at_the_end(model) -> float:
    """Bits per byte of the last byte of each held-out piece."""
    scores = model(exam[:, :-1])[:, -1]  # (1024, 256): what the last position predicts
    return float(F.cross_entropy(scores, exam[:, -1])) / math.log(2)


cheat, shown, _ = trained(heads=4, masked=False)
rows = [("with a mask", learning, at_the_end(model)), ("without", shown, at_the_end(cheat))]
lesson.table(
    ["four heads", "in training", "in use"], rows, "bits per byte: last batches, last bytes"
)
lesson.holds(shown < 1.5, "without a mask, the training loss falls below 1.5 bits")
lesson.holds(rows[1][2] > rows[0][2] + 0.3, "in use, it is over 0.3 bits worse than with one")

# %% [markdown]
# ## Exercise
# `exercises/ex04.py`: attention with several heads, for any number of texts, keys and queries, and
# any mask. `python course/check.py 4`
