# %% [markdown]
# # 3. Attention: what a query, a key and a value are for
#
# **Afterwards** you can build attention from an average, and say what each of its parts is for.
#
# **Question.** How can a model use the whole past, when no table has room for it?
#
# Source: A. Vaswani et al., Attention is all you need (2017); J. Su et al., RoFormer (2021). Core
# file: `model.py`. Before: lesson 2. Next: lesson 4. Takes 15 seconds on two cores.

# %%
import json
import math

import lesson
import torch
import torch.nn.functional as F

TRAIN, HELD, SMOOTH = 1_000_000, 65_537, 0.1
WIDTH, LENGTH, ROWS, STEPS, BASE = 64, 64, 8, 800, 100.0
torch.set_num_threads(1)
lesson.begin(3, "attention")

# %% [markdown]
# ## A dictionary that can be learned
# Python's `{"cat": 3, "dog": 7}` holds **keys** and **values**; ask it with a **query**, "dog", and
# it compares the query with the keys and gives back the value whose key is equal. This is what we
# want from the past: "what came after the last opening quote?". But a gradient needs things that
# change gradually, and "equal" is yes or no. So let keys and queries be rows of numbers, called
# **vectors**, and let "equal" become "similar":
# 1. The **dot product** of query and key (multiply number by number, sum up) is large if the two
#    are alike. It is the score of this key.
# 2. Softmax makes of the scores **weights**: positive, with the sum 1. (The same word as for the
#    numbers that training changes; these here are computed anew for each query.)
# 3. The answer is the average of the values with these weights: a **weighted average**.
#
# A dictionary with four keys, asked for its second. Watch what larger scores do:

# %%
keys = torch.eye(4)  # four keys, one per row: a 1 at a place of its own, else 0
values = torch.tensor([3.0, 7.0, 1.0, 5.0])  # their mean is 4
rows = []
for times in (0, 1, 3, 10):
    query = times * keys[1]
    weights = torch.softmax(keys @ query, dim=0)  # keys @ query: four dot products
    rows.append((times, float(weights[1]), float(weights @ values)))
columns = ["query: key 2 times", "weight of key 2", "answer"]
lesson.table(columns, rows, "asking for the second of the values 3, 7, 1, 5")
lesson.holds(abs(rows[0][2] - 4) < 1e-6, "if nothing matches, the answer is the plain average")
lesson.holds(abs(rows[-1][2] - 7) < 0.01, "a query that matches one key well gets its value")

# %% [markdown]
# ## The average of the past
# Now to text. Give each byte a vector of 64 numbers, to be learned: its **embedding**. The place of
# a byte in its text, counted from 0, is its **position**. To predict what follows position t, the
# simplest use of the past is the average of the vectors at positions 0, 1, ... t. For all T
# positions of a text at once this is a matrix product, and it is also the dictionary with nothing
# to match: all scores 0. One thing must be added. The whole text is in one matrix, and a position
# may not look at the bytes after it, which it is supposed to predict. So their scores are set to
# minus infinity, of which softmax makes a weight of 0: this is the **mask**.

# %%
x = torch.randn(5, 3)  # 5 positions, a vector of 3 numbers each
by_loop = torch.stack([x[: t + 1].mean(0) for t in range(5)])
mask = torch.ones(5, 5).tril().bool()  # tril: keep the lower triangle. True where one may look
scores = torch.zeros(5, 5).masked_fill(~mask, -math.inf)  # row: who asks; column: who is asked
weights = torch.softmax(scores, dim=-1)
print("weights, a row for each position:", weights, sep="\n")
same = torch.allclose(weights @ x, by_loop, atol=1e-6)
lesson.holds(same, "zero scores, mask and softmax give the average of each position's past")

# %% [markdown]
# ## Queries, keys and values of one's own
# Each position makes three vectors out of its own one, by three matrices that are learned:
# - the **query** says what this position is looking for,
# - the **key** says what this position can be found by,
# - the **value** is what it hands over to whoever finds it.
#
# The score of position t for a position s before it is the dot product of t's query with s's key.
# It is divided by the square root of D, which is how many numbers a vector has: a sum of D random
# products is about that large, and with large scores from the start, one position would get all
# the weight.
#
# This is **attention**. One thing it cannot do: it does not know the order of the past. A weighted
# average is the same whichever comes first, so "ab" and "ba" before this position look alike. (In
# the shapes below, the dots stand for several texts, or whatever else is done side by side.)


# %%
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masked=True) -> torch.Tensor:
    """q, k, v: (..., T, D), D numbers for each of T positions -> (..., T, D)."""
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / D**0.5  # (..., T, T); transpose: rows become columns
    if masked:
        scores = scores.masked_fill(~torch.ones(T, T).tril().bool(), -math.inf)
    return torch.softmax(scores, dim=-1) @ v


torch.manual_seed(0)
q, k, v = torch.randn(3, 6, 8).unbind()  # three times 6 positions, 8 numbers each
swapped = [1, 0, 2, 3, 4, 5]  # the first two change places
plain, other = attention(q, k, v)[-1], attention(q, k[swapped], v[swapped])[-1]
lesson.holds(torch.allclose(plain, other, atol=1e-6), "without positions, the past has no order")

# %% [markdown]
# ## Positions
# Take two numbers of a vector as an arrow in the plane. Turn the query's arrow by an angle for each
# position in the text, and the key's arrow by the same angle for each of its positions. The dot
# product of two arrows depends on their lengths and the angle between them, and that angle now
# contains the *distance* of the two positions, wherever they stand. With a fast angle for one pair
# of numbers and slower ones for others, a query can ask for "the byte before mine", or "something
# about ten bytes ago". This is called **RoPE**, rotary position embedding.


# %%
def rotate(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of (..., T, D) by their positions first, first + 1, ...
    Pair i turns by BASE ** (-2i / D) per position: 1 for the first, about 1 / BASE for the last."""
    T, D = x.shape[-2:]
    speed = BASE ** (-torch.arange(0, D, 2) / D)  # D/2 of them, in radians per position
    angle = torch.outer(torch.arange(first, first + T), speed)  # (T, D/2)
    a, b = x.chunk(2, dim=-1)  # the first and the second half of each vector
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


places = ((5, 3), (905, 903), (5, 0))  # of one query and one key
near, moved, far = (float((rotate(q[:1], a) * rotate(k[:1], b)).sum()) for a, b in places)
print(f"scores at distance 2: {near:.4f}, 900 further on: {moved:.4f}; at distance 5: {far:.4f}")
lesson.holds(abs(near - moved) < 1e-3 < abs(near - far), "rotated, scores depend on the distance")
plain = attention(rotate(q), rotate(k), v)[-1]
other = attention(rotate(q), rotate(k[swapped]), v[swapped])[-1]
lesson.holds(not torch.allclose(plain, other, atol=1e-3), "with positions, the past has an order")

# %% [markdown]
# ## Heads
# One set of weights can look at one thing at a time: the byte before, or the last opening bracket.
# So cut queries, keys and values of 64 numbers into four times 16, let each part attend on its own,
# and put the four answers side by side again. Each part is a **head**. It costs the same.
#
# Now measure all of it. The model keeps the table of pairs of lesson 2, counted here, and *adds* to
# its scores what it gathered from the past, through one more matrix, `head_out`, of 64 x 256. Each
# step of this lesson is a switch. Three of torch's words: a `Module` is a model or a part of one,
# and knows the weights in it; an `Embedding` is a table of vectors to look up; a `Linear` is a
# matrix product (without the constant, `bias`, that it could add).


# %%
class Past(torch.nn.Module):
    """Scores from the table of pairs, plus scores from the past."""

    def __init__(self, match=True, positions=True, heads=1, masked=True):
        super().__init__()
        self.match, self.positions, self.heads, self.masked = match, positions, heads, masked
        self.pairs = torch.nn.Embedding.from_pretrained(table.clone(), freeze=False)
        self.embed = torch.nn.Embedding(256, WIDTH)
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head_out = torch.nn.Linear(WIDTH, 256, bias=False)
        torch.nn.init.zeros_(self.head_out.weight)  # so it begins as the table alone

    def split(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, 64) -> (B, heads, T, 64 / heads)
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # unflatten: cut the last one

    def forward(self, bytes_: torch.Tensor) -> torch.Tensor:
        """(B, T): B texts of T bytes -> scores (B, T, 256)"""
        x = self.embed(bytes_)
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        q = q * self.match  # False counts as 0: all scores are 0
        if self.positions:
            q, k = rotate(q), rotate(k)
        y = attention(q, k, v, self.masked)
        return self.pairs(bytes_) + self.head_out(y.transpose(1, 2).flatten(-2))


# %% [markdown]
# ## Training
# A batch is 8 pieces of 64 bytes, cut from the training text at random; every position predicts the
# byte after it. Each model sees the same 800 batches. The learning rate grows over the first 20
# steps, as the first gradients are the wildest, and goes to 0 over the second half, so that the
# last batches leave no noise. Tables get a larger one: a batch meets each of their rows rarely.
#
# `cross_entropy` is torch's name for the mean of -log(p), with softmax included and the natural
# logarithm. `flatten` makes one long row of B * T predictions out of B texts of T positions.


# %%
def bits(model, pieces: torch.Tensor) -> torch.Tensor:
    """The loss on pieces (B, T + 1) of text: bits per byte."""
    scores = model(pieces[:, :-1]).flatten(0, 1)
    return F.cross_entropy(scores, pieces[:, 1:].flatten()) / math.log(2)


def trained(seed: int = 0, **switches) -> tuple[Past, float, float]:
    """-> a trained model, its loss on the last batches, and on the held-out text."""
    torch.manual_seed(seed)
    model = Past(**switches)
    tables = [model.pairs.weight, model.embed.weight, model.head_out.weight]
    others = [model.q.weight, model.k.weight, model.v.weight]
    groups = [{"params": tables, "lr": 0.01}, {"params": others, "lr": 0.003}]  # lr: learning rate
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))  # lesson 2's
    rate = lambda step: min(1.0, (step + 1) / 20, 2 * (1 - step / STEPS))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    shown = []
    for _ in range(STEPS):
        starts = torch.randint(TRAIN - LENGTH, (ROWS, 1))
        loss = bits(model, training[starts + torch.arange(LENGTH + 1)])
        optimizer.zero_grad()  # else backward adds to the gradient of the step before
        loss.backward()
        optimizer.step()
        schedule.step()
        shown.append(loss.item())
    with torch.no_grad():
        return model, sum(shown[-50:]) / 50, float(bits(model, exam))


text = torch.from_numpy(lesson.bytes_of_stdlib(TRAIN + HELD))
training, held = text[:TRAIN], text[TRAIN:]
exam = held[torch.arange(0, HELD - 1, LENGTH)[:, None] + torch.arange(LENGTH + 1)]  # (1024, 65)
pairs = torch.zeros(256, 256)
pairs.index_put_((training[:-1], training[1:]), torch.tensor(1.0), accumulate=True)
table = torch.log((pairs + SMOOTH) / (pairs + SMOOTH).sum(1, keepdim=True))  # lesson 1's

switches = {
    "+ the average of the past": dict(match=False, positions=False),
    "+ queries and keys": dict(positions=False),
    "+ positions": dict(),
    "+ four heads": dict(heads=4),
}
losses = {}
for name, chosen in switches.items():
    model, _, losses[name] = trained(**chosen)
alone = float(F.cross_entropy(table[held[:-1]], held[1:])) / math.log(2)
rows = [("the table of pairs alone", alone), *losses.items()]
lesson.table(["the table", "bits per byte"], rows, "held-out loss, one addition at a time")
ladder = [loss for _, loss in rows]
falls = all(a > b + 0.015 for a, b in zip(ladder, ladder[1:]))
lesson.holds(falls, "each addition lowers the held-out loss by over 0.015 bits")
lesson.holds(ladder[2] > ladder[3] + 0.1, "positions are worth over a tenth of a bit")
lesson.holds(ladder[3] > ladder[4] + 0.08, "four narrow heads are better than a wide one")

# %% [markdown]
# What do the four heads look at? For each, the weight it gives to the byte at each distance back,
# averaged over the held-out text, where the past has 32 bytes or more. Nobody told them to look
# nearby; the loss did. (A plain average gives four bytes of 33 or more an eighth at most.)

# %%
with torch.no_grad():
    x = model.embed(exam[:, :-1])
    q, k = rotate(model.split(model.q(x))), rotate(model.split(model.k(x)))
    seen = attention(q, k, torch.eye(LENGTH))  # with these values, the answers are the weights
back = [seen.diagonal(-d, dim1=-2, dim2=-1)[..., 32 - d :].mean((0, 2)) for d in range(16)]
look = torch.stack(back)  # (16 distances, 4 heads)
recent = look[:4].sum(0)  # of each head, for the last four bytes
print("share of the last four bytes, by head:", *(f"{share:.0%}" for share in recent.tolist()))
lesson.holds(float(recent.min()) > 0.25, "each head gives the last four bytes over a quarter")

# %%
fig = lesson.figure(8, 3.2)
left, right = fig.subplots(1, 2, width_ratios=[3, 2])
bars = left.barh([name for name, _ in rows], ladder, color=["silver"] + ["crimson"] * 4)
left.bar_label(bars, [f"{loss:.2f}" for loss in ladder])
left.set(xlim=(0, 4), xlabel="bits per byte, held out", title="the past"), left.invert_yaxis()
right.plot(look)
right.set(xlabel="bytes back", ylabel="mean weight", title="what four heads look at")
lesson.save(fig, "03_attention")
if falls:  # lesson 4 shows the losses of all four lessons
    (lesson.OUT / "03_losses.json").write_text(json.dumps(losses))

# %% [markdown]
# ## Trap
# Forget the mask, and training looks wonderful: each position finds its answer one place ahead.
# Then let the model predict, when there is nothing ahead yet, and look at each piece's last byte:

# %%
cheat, shown, _ = trained(heads=4, masked=False)
with torch.no_grad():
    scores = cheat(exam[:, :-1])[:, -1]  # (1024, 256): after the last position there is nothing
    real = float(F.cross_entropy(scores, exam[:, -1])) / math.log(2)
print(f"without a mask: {shown:.2f} bits in training, {real:.2f} in use (with: {ladder[-1]:.2f})")
lesson.holds(shown < 1.5, "without a mask, the training loss falls below 1.5 bits")
lesson.holds(real > ladder[-1] + 0.3, "in use, the model without a mask is worse than with one")

# %% [markdown]
# ## Exercise
# `exercises/ex03.py`: attention with several heads, for any number of texts, keys and queries, and
# any mask. `python course/check.py 3`
