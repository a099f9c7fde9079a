# %% [markdown]
# # 5. A GPT: what must be around attention so that it can be repeated
#
# **Afterwards** you can write a GPT from memory, say what each of its parts is for, and tell a
# model that learns from one that memorizes.
#
# **Question.** One attention looks back once. What does it take to look back several times, each
# time using what the last look has found?
#
# Source: A. Radford et al., Language models are unsupervised multitask learners (2019); K. He et
# al., Deep residual learning (2015). Core file: `model.py`. Before: lesson 4. Next: lesson 6.
# Takes 55 seconds on two cores.

# %%
import json
import math
import time

import judging
import lesson
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 64
ROWS = 8
STEPS = 800
DIGITS = "0123456789"
LOWER = "abcdefghijklmnopqrstuvwxyz"
UPPER = LOWER.upper()
torch.set_num_threads(1)
lesson.begin(5, "a GPT")

# %% [markdown]
# ## A stream that is added to
# Lesson 4 went from vectors to scores in one go. A GPT changes the vectors little by little: each
# of its parts reads a position's vector, works something out, and *adds* the result to the vector.
# So nothing that an earlier part wrote is lost, unless a later one takes it away. The vector that
# runs through all the parts is called the **residual stream**. Two kinds of parts alternate, and a
# pair of them is a **block** (or layer):
# - Attention fetches from other positions. It is lesson 4's, with one more matrix, `out`, that
#   mixes what the heads have found. Positions come in through `rotate` instead of a table: it turns
#   pairs of numbers of each query and key by an angle that grows with the position, so that the dot
#   product of the two depends on how far apart they are. Take it as given; lesson 8 derives it, and
#   calls `base` theta (the larger it is, the more slowly the pairs turn; 100 is enough for 64
#   positions).
# - The **MLP** (multi-layer perceptron) works on what is there, at each position separately: one
#   matrix makes the vector 4 times as wide, an **activation function** changes each of its numbers,
#   and a second matrix makes it as narrow as before. (The **width** of a vector is how many numbers
#   it has.) With nothing in between, two matrices could do no more than one. Our activation
#   function squares what is above 0: `relu(x)` is x, or 0 if x is negative.
#
# Each part reads the stream through a **norm**: the vector divided by the root of the mean of its
# squares, so that its numbers have size 1 on average, however much has been added before.


# %%
def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)  # rsqrt(y): 1 / sqrt(y)


def rotate(x: Tensor, base: float) -> Tensor:  # (..., T, D): borrowed from lesson 8
    T, D = x.shape[-2:]
    angle = torch.outer(torch.arange(T), base ** (-torch.arange(0, D, 2) / D))  # (T, D/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, base: float):
        super().__init__()
        self.heads = heads
        self.base = base
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width): B texts, T positions; H heads of D
        B, T, width = x.shape
        shape = (B, T, self.heads, width // self.heads)
        q = self.q(x).view(shape).transpose(1, 2)  # (B, H, T, D), like k and v
        k = self.k(x).view(shape).transpose(1, 2)
        v = self.v(x).view(shape).transpose(1, 2)
        q, k = rotate(q, self.base), rotate(k, self.base)
        scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5  # (B, H, T, T)
        ahead = ~torch.ones(T, T).tril().bool()
        weights = torch.softmax(scores.masked_fill(ahead, -math.inf), dim=-1)
        y = (weights @ v).transpose(1, 2).reshape(B, T, width)  # the heads side by side
        return self.out(y)


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, width: int, heads: int, base: float):
        super().__init__()
        self.attn = Attention(width, heads, base)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(norm(x))
        return x + self.mlp(norm(x))


# %% [markdown]
# ## The whole model
# An embedding comes first, then the blocks, then one more norm and a matrix to 256 scores, the
# **head** (the word has two meanings; this head is at the end of the model). The table of pairs is
# gone: the embedding and the head together can do its work. This is a **GPT**, a generative
# pretrained **transformer**: it writes (generative), it is trained on plain text before anybody
# teaches it a task (pretrained), and models made of such blocks are called transformers.
#
# What remains are the **initial values**. The head begins near 0, so that all bytes are equally
# likely at first: 8 bits, no opinion. `out` and `down` begin at 0, so each block begins by adding
# nothing. The others are random, because numbers that are all equal would get equal gradients and
# stay equal. A sum of `width` random products has the size of one product times the root of `width`
# (lesson 4). So the numbers in a matrix get the size 1 / root of `width`: then vectors of numbers
# of size 1 come out of it with size 1 again. (`up` begins at 0.4 of that size, which was found by
# trial for the project's `model.py`; the full size trains too.) Torch has two kinds of random
# numbers: `normal` ones are spread around 0 with the typical size `std`, `uniform` ones lie
# anywhere between two bounds.


# %%
class GPT(nn.Module):
    def __init__(self, width=64, blocks=3, heads=4, base=100.0, block=Block):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(block(width, heads, base) for _ in range(blocks))
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.8)
        nn.init.normal_(self.head.weight, std=0.001)
        bound = (3 / width) ** 0.5  # between -bound and bound, the size is bound / sqrt(3)
        for b in self.blocks:
            for matrix in (b.attn.q, b.attn.k, b.attn.v):
                nn.init.uniform_(matrix.weight, -bound, bound)
            nn.init.uniform_(b.mlp.up.weight, -0.4 * bound, 0.4 * bound)
            nn.init.zeros_(b.attn.out.weight)
            nn.init.zeros_(b.mlp.down.weight)

    def forward(self, bytes_: Tensor) -> Tensor:  # (B, T) -> (B, T, 256), scores for the next byte
        x = self.embed(bytes_)
        for block in self.blocks:
            x = block(x)
        return self.head(norm(x))


def bits(model: nn.Module, pieces: Tensor) -> Tensor:  # pieces (B, T + 1)
    scores = model(pieces[:, :-1]).flatten(0, 1)
    return F.cross_entropy(scores, pieces[:, 1:].flatten()) / math.log(2)


@torch.no_grad()
def examined(model: nn.Module) -> float:
    return float(bits(model, exam))


# %% [markdown]
# Remember these 80 lines: `model.py`, this project's model, is the same with more options. Give it
# the options that make it this small, and the same weights, and it computes the same scores (a test
# in `tests/course/test_course.py` compares them).
#
# **The whole of inference.** A trained model needs nothing but this forward pass.
# `instruments/pages/gpt.js` has the forward pass of `model.py` once more, in plain JavaScript
# without any library, one position at a time. A page with the weights and these lines writes text
# in any browser (lesson 14 makes one). You can read the two files side by side.
#
# ## Before the first step
# You can judge initial values without any training. (If the head had size 1 instead of 0.001, the
# first loss would be about 32 bits: strong opinions about nothing.)

# %%
training, held = (torch.from_numpy(text) for text in lesson.exam())
starts = torch.arange(0, len(held) - 1, LENGTH)
exam = held[starts[:, None] + torch.arange(LENGTH + 1)]  # (1024, 65)
torch.manual_seed(0)
lesson.holds(abs(examined(GPT()) - 8) < 0.05, "before training, the loss is 8 bits: no opinion")

# %% [markdown]
# ## What the norm is for
# Give an MLP (here with no weights at 0) the same stream twice: once as it is, and once ten times
# as large, as a stream can become after many additions. How much does it add? Without the norm, a
# hundred times as much, because its activation function is a square. And the next block would
# square that.

# %%
torch.manual_seed(0)
mlp = MLP(64)
x = torch.randn(100, 64)
rows = [(k, mlp(norm(k * x)).norm().item(), mlp(k * x).norm().item()) for k in (1, 10)]
lesson.table(
    ["stream, times", "with norm", "without"], rows, "size of what an MLP adds (100 vectors)"
)
_, _, (some, more) = zip(*rows)
lesson.holds(more > 99 * some, "without the norm, 10 times the stream adds 100 times as much")

# %% [markdown]
# ## What the stream and the MLP are for
# Take one part away, train for 200 steps, and see. Without the addition, each part replaces the
# vector. (Then parts that begin at 0 would pass nothing on, so for this model `out` and `down`
# begin with the random numbers that torch gives to any Linear.)
#
# Two thirds of a block's numbers are in its MLP: `up` and `down` have 4 x 64 x 64 each, and the
# four matrices of attention have 64 x 64 each. So a model without MLPs has a third of the numbers.
# The last row makes the comparison fair: it spends the numbers of the MLPs on six more attentions.


# %%
class Replaces(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(norm(self.attn(norm(x))))


class NoMLP(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(norm(x))


class NoAttention(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(norm(x))


def trained(model: nn.Module, steps: int, text: Tensor) -> list[float]:
    """Train as in lesson 4 -> the loss of each step. 0.004 is the best of 0.002, 0.004, 0.008."""
    tables = [model.embed.weight, model.head.weight]
    others = model.blocks.parameters()
    groups = [{"params": tables, "lr": 0.03}, {"params": others, "lr": 0.004}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    peaks = [group["lr"] for group in groups]
    curve = []
    for step in range(steps):
        factor = min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = factor * peak
        starts = torch.randint(len(text) - LENGTH, (ROWS, 1))
        loss = bits(model, text[starts + torch.arange(LENGTH + 1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


rows = []
for name, blocks, block in (
    ("three blocks, as above", 3, Block),
    ("three that replace", 3, Replaces),
    ("three MLPs", 3, NoAttention),
    ("three attentions", 3, NoMLP),
    ("nine attentions", 9, NoMLP),
):
    torch.manual_seed(0)
    model = GPT(blocks=blocks, block=block)
    if block is Replaces:
        for b in model.blocks:
            b.attn.out.reset_parameters()
            b.mlp.down.reset_parameters()
    began = time.process_time()
    trained(model, 200, training)
    rows.append((name, time.process_time() - began, examined(model)))
lesson.table(["model", "seconds", "held out"], rows, "200 steps, bits per byte")
_, (quick, *_, slow), (full, replaced, alone, without, more) = zip(*rows)
lesson.holds(replaced > full + 0.5, "without the addition, three blocks learn far less")
lesson.holds(
    alone > full + 0.3, "MLPs alone see only the last byte, and lose all that attention brings"
)
lesson.holds(without > full + 0.03, "attentions alone lose something too, but little")
lesson.holds(
    more < without - 0.015, "six more attentions, with the MLPs' share of numbers, help as well"
)
lesson.timed(slow > 1.2 * quick, "but they take over 1.2 times as long")

# %% [markdown]
# So attention brings the past, and nothing else can. More numbers help too, in attentions as much
# as in MLPs: with six seeds, nine attentions came out between 0.04 bits better and 0.04 worse than
# three blocks, which have as many numbers. But an MLP is the cheap place to put them: each of its
# numbers costs one multiplication for each position, and that is all. An attention also compares
# all positions with each other, once more for each layer. Nothing here shows that an MLP learns
# what attention cannot. In large models, where people have looked for it, MLPs hold much of what
# the model knows about words (M. Geva et al., Transformer feed-forward layers are key-value
# memories, 2021).
#
# ## From 8 bits to a GPT
# Now one block, then three, on as many batches as lesson 4's models saw: 800 of 512 bytes. One
# table shows everything added since the first lesson (a row is missing until you have run the
# lesson it comes from):

# %%
ladder = {}
for path in sorted(lesson.OUT.glob("0[1-4]_losses.json")):
    ladder |= json.loads(path.read_text())
for name, blocks in (("+ stream, norm, MLP: one block", 1), ("three blocks: a GPT", 3)):
    torch.manual_seed(0)
    model = GPT(blocks=blocks)
    begun = model.embed.weight.detach().clone()
    trained(model, STEPS, training)
    ladder[name] = examined(model)
lesson.table(["model", "bits per byte"], [*ladder.items()], "held-out loss, lessons 1 to 5")
gpt = ladder[name]
walk = [loss for name, loss in ladder.items() if name != "one matrix, learned"]  # the bigram again
falls = all(a > b + 0.015 for a, b in zip(walk, walk[1:]))
lesson.holds(falls, "each addition in lessons 1 to 5 lowers the held-out loss")

# %% [markdown]
# ## What the embedding has learned
# The vectors of the embedding began as random numbers, and nobody told the GPT which bytes are
# digits or vowels. Has it noticed? Two bytes that can stand in the same places should be read
# alike, so their vectors should have moved together. Measure the mean distance between two digits,
# and divide it by the mean distance from a digit to a letter; then the same for vowels and
# consonants. A 1 means that the kind makes no difference.


# %%
def apart(vectors: Tensor, kind: str, others: str) -> float:
    """Mean distance between two of a kind, divided by that from these to the others."""
    ours, theirs = (vectors[[*signs.encode()]] for signs in (kind, others))
    return float(torch.pdist(ours).mean() / torch.cdist(ours, theirs).mean())


ended = model.embed.weight.detach()
kinds = {
    "digits, letters": (DIGITS, LOWER + UPPER),
    "vowels, consonants": ("aeiou", "bcdfghjklmnpqrstvwxyz"),
}
rows = [(name, apart(begun, *two), apart(ended, *two)) for name, two in kinds.items()]
lesson.table(
    ["kinds", "before training", "after"], rows, "distance within the first kind / to the second"
)
moved = all(after < before - 0.05 for _, before, after in rows)
lesson.holds(moved, "digits have moved towards digits, and vowels towards vowels")

# %% [markdown]
# The figure draws these vectors as points: digits in red, small letters in blue, capitals in green,
# brackets in black. Nobody can see 64 dimensions, so `svd` finds the two directions in which the
# points differ the most, called the first two **principal components**, and the figure shows the
# points from there. It is like a shadow on a wall: two that are near each other in the shadow may
# be far apart in the other 62 directions. Look for the digits first, then for the vowels: scattered
# before training, gathered after it.
#
# ## Learning or memorizing
# The same with one block, on the first 16,384 bytes only. A batch is 512 bytes, so 32 steps are one
# pass over them, called an **epoch**. The training loss is the mean of the last 20 steps.

# %%
rows = []
for steps in (32, 64, 128, 512):
    torch.manual_seed(0)
    model = GPT(blocks=1)
    curve = trained(model, steps, training[:16_384])
    rows.append((steps, steps // 32, sum(curve[-20:]) / 20, examined(model)))
lesson.table(
    ["steps", "epochs", "training", "held out"], rows, "one block, 16,384 bytes: bits per byte"
)
steps, _, remembered, unknown = zip(*rows)
falls = all(a > b for a, b in zip(remembered, remembered[1:]))
lesson.holds(falls, "the training loss falls each time with more epochs")
lesson.holds(unknown[-1] > min(unknown) + 0.3, "the held-out loss falls, then rises again")

# %% [markdown]
# This is **overfitting**: the model gets better at its training text by remembering it, and worse
# at everything else. You have seen it before, as the gray line in lesson 1's figure. The cures are
# more text, fewer epochs, a smaller model. The GPT of three blocks is far from it: it has read
# 409,600 bytes of a million, hardly any of them twice.
#
# ## The line to get under
# Compare a new model with the best simple one, not with the worst. The table of pairs is not the
# best that counting can do: exercise 1 takes contexts of up to six bytes, and leans on the shorter
# one where a context is rare. Here is its reference, on the same exam. (Its alpha, 64, is the best
# of 16, 32, 64, 128 and 256: tune the simple model as carefully as the new one, or the comparison
# is worth nothing.)

# %%
count = judging.load(lesson.COURSE / "solutions/ex01.py").bits_per_byte
learned, asked = (bytes(x.tolist()) for x in (training, held[1:]))
best = count(learned, asked, 6, 64.0)
print(f"counting, six bytes of context: {best:.3f} bits per byte; this GPT: {gpt:.3f}")
lesson.holds(best < gpt - 0.1, "counting is better than this GPT by over a tenth of a bit")

# %% [markdown]
# ## How far is this from a real model?
# What you have written is what the large ones are (lesson 34 lists the differences, and reads the
# weights of one that people download). What they have more of is learned numbers (**parameters**,
# as the field calls them), text and money: Llama 3.1 8B has 44,000 times as many parameters, and
# has read 37 million times as many tokens. All rows but the first are rounded, and the dollars are
# for H100s at 3 dollars an hour. Our tokens are bytes; a token of the others is three to five bytes
# (lesson 9).
#
#     model                  parameters  tokens it has read   about dollars
#     this GPT                  180,224             409,600               -
#     tiny                    7,300,000           2,000,000               -
#     d12                   286,000,000       1,200,000,000               2
#     GPT-2 124M, remade    124,000,000      10,000,000,000              20
#     SmolLM2-135M          135,000,000   2,000,000,000,000           7,000
#     Llama 3.1 8B        8,000,000,000  15,000,000,000,000       4,400,000
#
# - `tiny` and `d12` are this project's: README.md, docs/scaling.md. `d12`'s dollars pay for 36
#   minutes, at its measured speed.
# - GPT-2's smallest size is from 2019, and its text was never counted in tokens. These figures are
#   those of its best-known remake, Andrej Karpathy's llm.c (discussion 481 on GitHub, 2024).
# - SmolLM2 and Llama 3.1: the tokens, and the 1.46 million hours that Llama's dollars pay for, come
#   from their model cards. SmolLM2's dollars are our estimate for its shape (docs/scaling.md: about
#   $180 for 50B tokens).

# %%
lesson.holds(
    sum(w.numel() for w in GPT().parameters()) == 180_224, "this GPT has 180,224 parameters"
)

# %%
fig = lesson.figure(8.5, 8)
(left, right), maps = fig.subplots(2, 2, height_ratios=[3, 4])
ladder["counting (exercise 1)"] = best
bars = left.barh([*ladder], [*ladder.values()], color="crimson")
left.bar_label(bars, fmt="%.2f")
left.set(xlim=(0, 9.5), xlabel="bits per byte, held out", title="lessons 1 to 5")
left.invert_yaxis()
right.plot(steps, remembered, "o-", color="silver", label="training text")
right.plot(steps, unknown, "o-", color="crimson", label="held-out text")
right.set(xlabel="steps on 16,384 bytes", ylim=(0, None), title="overfitting")
right.legend()
signs = DIGITS + LOWER + UPPER + "()[]{}"
colors = ["crimson"] * 10 + ["steelblue"] * 26 + ["seagreen"] * 26 + ["black"] * 6
for panel, vectors, when in zip(maps, (begun, ended), ("before", "after")):
    chosen = vectors[[*signs.encode()]]
    u, s, _ = torch.linalg.svd(chosen - chosen.mean(0), full_matrices=False)
    points = u[:, :2] * s[:2]  # (68, 2)
    panel.scatter(*points.T, s=0)  # the texts alone would not set the axes
    for sign, point, color in zip(signs, points, colors):
        panel.text(*point, sign, color=color, ha="center", va="center")
    panel.set(title=f"the embedding, {when} training", xticks=[], yticks=[])
lesson.save(fig, "05_block")

# %% [markdown]
# ## Trap
# A low loss is not magic, and a long name is not an argument. This GPT has read less than half of
# the text, byte by byte, and loses to a dictionary. The lessons to come bring what it lacks: more
# steps (7), a tokenizer (9), a rate that falls as it should (10), rows that lose nothing (11), Muon
# (12). Your own trainer gets under the line when all of that is yours: `python course/yours.py`.
#
# ## Exercise
# `exercises/ex05.py`: initial values and the whole model, as functions of a dict of weights, for
# your own trainer. It is this lesson in another form, so close the lesson before you begin. In your
# trainer the GPT has no positions until lesson 8, so it stands at 3.26 bits per byte there. `python
# course/check.py 5`
