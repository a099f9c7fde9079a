# %% [markdown]
# # 5. A GPT: what must be around attention so that it can be repeated
#
# **Afterwards** you can write a GPT from memory, say what each of its parts is for, and tell a
# model that learns from one that memorizes.
#
# **Question.** One attention looks back once. What does it take to look back several times, each
# time using what the time before has found?
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
torch.set_num_threads(1)
lesson.begin(5, "a GPT")

# %% [markdown]
# ## A stream that is added to
# Lesson 4 went from vectors to scores in one go. A GPT changes the vectors in small steps: it reads
# a position's vector, works something out, and *adds* the result to the vector. So nothing that an
# earlier step wrote is lost, unless a later one takes it away. The vector that runs through all
# steps is called the **residual stream**. Two kinds of steps alternate; a pair is a **block** (or
# layer):
# - attention, which fetches from other positions (lesson 4's, with one more matrix, `out`, that
#   mixes what the heads have found). Positions come in by `rotate` instead of a table: it turns
#   pairs of numbers of each query and key by an angle that grows with the position, so that the
#   dot product of the two depends on their distance. Take it as given; lesson 8 derives it;
# - the **MLP** (multi-layer perceptron), which works on what is there, at each position separately:
#   a matrix to a vector 4 times as wide, an **activation function**, a matrix back. (The **width**
#   of a vector is how many numbers it has.) With nothing in between, two matrices could do no more
#   than one. Ours squares what is above 0: `relu(x)` is x, or 0 if x is negative.
#
# Each step reads the stream through a **norm**: the vector divided by the root of the mean of its
# squares, so that its numbers have size 1 on average, however much was added before.


# %%
def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)  # rsqrt(y): 1 / sqrt(y)


def rotate(x: Tensor, base: float) -> Tensor:  # (..., T, D): lesson 8's, borrowed
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
        q = self.q(x).view(shape).transpose(1, 2)  # (B, H, T, D), and so k and v
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
# An embedding in front, blocks, and behind them one more norm and a matrix to 256 scores, the
# **head** (the word is used for two things; this one is at the end of the model). The table of
# pairs is gone: embedding and head together can do its work. This is a **GPT**, a generative
# pretrained **transformer**: it writes (generative), it is trained on plain text before anybody
# teaches it a task (pretrained), and transformer is the name for models made of such blocks.
#
# What remains are the **initial values**. The head begins near 0, so that all bytes are equally
# likely at first: 8 bits, no opinion. `out` and `down` begin at 0, so each block begins by adding
# nothing. The others are random: numbers that are all equal would get equal gradients and stay
# equal. Their size is chosen so that numbers of size 1 come out of the matrix with size 1: a sum of
# `width` random products is about the root of `width` in size, so we divide by that. (0.4 of it in
# the MLP, as in the project's `model.py`, which found it by trial; 1 trains too.) Of torch's random
# numbers, `normal` ones are spread around 0 with the typical size `std`, `uniform` ones lie
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
        bound = (3 / width) ** 0.5  # uniform between -b and b: numbers of size b / sqrt(3)
        for b in self.blocks:
            for matrix in (b.attn.q, b.attn.k, b.attn.v):
                nn.init.uniform_(matrix.weight, -bound, bound)
            nn.init.uniform_(b.mlp.up.weight, -0.4 * bound, 0.4 * bound)
            nn.init.zeros_(b.attn.out.weight)
            nn.init.zeros_(b.mlp.down.weight)

    def forward(self, bytes_: Tensor) -> Tensor:  # (B, T) -> (B, T, 256), scores of what comes next
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
# Remember these 80 lines: `model.py`, the model of this project, is the same with more options.
# With the options that make it this small, and the same weights, its scores are equal to these (a
# test in `tests/course/test_course.py` compares them).
#
# **The whole of inference.** A model that is trained needs nothing but this forward pass.
# `instruments/pages/gpt.js` is that of `model.py` once more, in plain JavaScript and without any
# library, one position at a time. A page with the weights and these lines writes in any browser
# (lesson 14 makes one). Read the two files side by side.
#
# ## Before the first step
# Initial values can be judged without any training. (With a head of size 1 instead of 0.001 the
# first loss is about 32 bits: strong opinions about nothing.)

# %%
training, held = (torch.from_numpy(text) for text in lesson.exam())
starts = torch.arange(0, len(held) - 1, LENGTH)
exam = held[starts[:, None] + torch.arange(LENGTH + 1)]  # (1024, 65)
torch.manual_seed(0)
lesson.holds(abs(examined(GPT()) - 8) < 0.05, "before training, the loss is 8 bits: no opinion")

# %% [markdown]
# ## What the norm is for
# Give an MLP (here with no weights at 0) the same stream, once as it is, once ten times as large,
# as a stream may become after many additions. How much does it add? Without the norm, a hundred
# times as much: its activation function is a square. And the next block would square that.

# %%
torch.manual_seed(0)
mlp = MLP(64)
x = torch.randn(100, 64)
rows = [(k, mlp(norm(k * x)).norm().item(), mlp(k * x).norm().item()) for k in (1, 10)]
columns = ["stream, times", "added, with norm", "added, without"]
lesson.table(columns, rows, "size of what an MLP adds (100 vectors)")
_, _, (some, more) = zip(*rows)
lesson.holds(more > 99 * some, "without the norm, 10 times the stream adds 100 times as much")

# %% [markdown]
# ## What the stream and the MLP are for
# Take one part away, train for 200 steps, and see. Without the addition, each step replaces the
# vector. (Where nothing is added, steps that begin at 0 would pass nothing on, so there `out` and
# `down` begin with the random numbers that torch gives to any Linear.)
#
# Two thirds of the numbers of a block are in its MLP: `up` and `down` have 4 x 64 x 64 each, the
# four matrices of attention 64 x 64 each. So a model without MLPs has a third of the numbers. The
# last row is a fair opponent: what the MLPs had is spent on six more attentions.


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
    seconds = time.process_time() - began
    rows.append((name, seconds, examined(model)))
lesson.table(["model", "seconds", "held out"], rows, "200 steps, bits per byte")
_, (quick, *_, slow), (full, replaced, alone, without, more) = zip(*rows)
lesson.holds(replaced > full + 0.5, "without the addition, three blocks learn far less")
lesson.holds(alone > full + 0.3, "MLPs alone see one byte of the past: they lose everything else")
lesson.holds(without > full + 0.03, "attentions alone lose too, but little")
lesson.holds(more < without - 0.015, "six more attentions, with the MLPs' numbers, help as well")
lesson.timed(slow > 1.2 * quick, "but they take over 1.2 times as long")

# %% [markdown]
# So attention brings the past, and nothing else can. And numbers help wherever they are: with six
# seeds, nine attentions were between 0.04 bits better than three blocks and 0.04 worse. An MLP is
# the cheap place to put them: each of its numbers costs a multiplication for each position, and
# that is all. An attention also compares all positions with each other, one more time for each
# layer. Nothing here shows that an MLP learns what attention cannot; in large models, where it has
# been looked for, MLPs hold much of what the model knows about words (M. Geva et al., Transformer
# feed-forward layers are key-value memories, 2021).
#
# ## From 8 bits to a GPT
# Now one block, then three, on as many batches as lesson 4's models saw, 800 of 512 bytes. One
# table for all that was added since the first lesson (a row that is missing appears when you have
# run the lesson that it is from):

# %%
ladder = {}
for path in sorted(lesson.OUT.glob("0[1-4]_losses.json")):
    ladder |= json.loads(path.read_text())
for name, blocks in (("+ stream, norm, MLP: one block", 1), ("three blocks: a GPT", 3)):
    torch.manual_seed(0)
    model = GPT(blocks=blocks)
    trained(model, STEPS, training)
    ladder[name] = examined(model)
lesson.table(["model", "bits per byte"], [*ladder.items()], "held-out loss, lessons 1 to 5")
gpt = ladder[name]
walk = [loss for name, loss in ladder.items() if name != "one matrix, learned"]  # = the bigram's
falls = all(a > b + 0.015 for a, b in zip(walk, walk[1:]))
lesson.holds(falls, "each addition of lessons 1 to 5 lowers the held-out loss")

# %% [markdown]
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
columns = ["steps", "epochs", "training", "held out"]
lesson.table(columns, rows, "one block, 16,384 bytes of text: bits per byte")
steps, _, remembered, unknown = zip(*rows)
falls = all(a > b for a, b in zip(remembered, remembered[1:]))
lesson.holds(falls, "the training loss falls with each doubling of the epochs")
lesson.holds(unknown[-1] > min(unknown) + 0.3, "the held-out loss falls, then rises again")

# %% [markdown]
# This is **overfitting**: the model gets better at its training text by remembering it, and worse
# at everything else. It is the gray line of lesson 1's figure, again. The cures are more text,
# fewer epochs, a smaller model. The GPT of three blocks is far from it: it has read 409,600
# bytes of a million, hardly any of them twice.
#
# ## The line to get under
# A new model is compared with the best simple one, not with the worst. The table of pairs is not
# the best that counting can do. Exercise 1 takes contexts of up to six bytes, and where one is rare
# leans on the shorter one. Here is its reference, on the same exam. (Its alpha, 64, is the best of
# 16, 32, 64, 128 and 256: the simple model must be tuned as carefully as the new one, or the
# comparison is worth nothing.)

# %%
count = judging.load(lesson.COURSE / "solutions/ex01.py").bits_per_byte
learned, asked = (bytes(x.tolist()) for x in (training, held[1:]))
best = count(learned, asked, 6, 64.0)
print(f"counting, six bytes of context: {best:.3f} bits per byte; this GPT: {gpt:.3f}")
lesson.holds(best < gpt - 0.1, "counting is better than this GPT by over a tenth of a bit")

# %% [markdown]
# ## How far is this from a real model?
# What you have written is what the large ones are (lesson 34 has the differences, and reads the
# weights of one). What they have more of is numbers, text and money: Llama 3.1 8B has 44,000 times
# as many numbers, and has read 37 million times as many tokens. All but the first row is
# rounded, the dollars are for H100s at 3 dollars an hour, and a token of the others is three to
# five bytes (lesson 9); ours is one.
# - `tiny` and `d12` are this project's: README.md, docs/scaling.md. `d12`'s 36 minutes follow from
#   its measured speed.
# - GPT-2's smallest size is of 2019; its text was never counted in tokens. These are the figures of
#   its best-known remake, Andrej Karpathy's llm.c (discussion 481 on GitHub, 2024).
# - SmolLM2 and Llama 3.1: tokens, and Llama's 1.46 million hours, are of their model cards.
#   SmolLM2's dollars are our estimate for its shape (docs/scaling.md: about $180 for 50B tokens).

# %%
models = [
    ("this GPT", sum(w.numel() for w in GPT().parameters()), STEPS * ROWS * LENGTH, None),
    ("tiny", 7_300_000, 2_000_000, None),
    ("d12", 286_000_000, 1_200_000_000, 2),
    ("GPT-2 124M, remade", 124_000_000, 10_000_000_000, 20),
    ("SmolLM2-135M", 135_000_000, 2_000_000_000_000, 7_000),
    ("Llama 3.1 8B", 8_000_000_000, 15_000_000_000_000, 4_400_000),
]
columns = ["model", "parameters", "tokens it has read", "about dollars"]
lesson.table(columns, models, "parameters is what the field calls the numbers that are learned")

# %%
fig = lesson.figure(8.5, 3.8)
left, right = fig.subplots(1, 2)
bars = left.barh([*ladder], [*ladder.values()], color="crimson")
left.bar_label(bars, [f"{bits:.2f}" for bits in ladder.values()])
left.axvline(best, color="black", linestyle="--")
left.text(best + 0.03, len(ladder) - 0.4, "counting, exercise 1", va="top", fontsize=8)
left.set(xlim=(2, 5.2), ylim=(len(ladder), -0.6), title="lessons 1 to 5")
left.set_xlabel("bits per byte, held out (from 2)")
right.plot(steps, remembered, "o-", color="silver", label="training text")
right.plot(steps, unknown, "o-", color="crimson", label="held-out text")
right.set(xscale="log", xlabel="steps on 16,384 bytes", ylim=(0, None), title="overfitting")
right.set_xticks(steps, steps), right.minorticks_off(), right.legend()
lesson.save(fig, "05_block")

# %% [markdown]
# ## Trap
# A low loss is not magic, and a long name is no argument. This GPT has read less than half of the
# text, byte by byte, and loses to a dictionary. What it lacks is in the lessons to come: more steps
# (7), a tokenizer (9), a rate that falls as it should (10), rows that lose nothing (11), Muon (12).
# Your own trainer gets under the line when all of that is yours: `python course/yours.py`.
#
# ## Exercise
# `exercises/ex05.py`: initial values and the whole model, as functions of a dict of weights, for
# your own trainer. It is this lesson in another form, so close the lesson before you begin.
# `python course/check.py 5`
