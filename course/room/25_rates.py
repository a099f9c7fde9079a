# %% [markdown]
# # 25. Noise and rates: how large a batch, and how large a step
#
# **Afterwards** you can say how many tokens a step should average, and carry a learning rate that
# was tuned on a small model and a small batch to a wider model and a larger batch.
#
# **Question.** How many tokens should a step average, and how does the best rate change with the
# batch and with the width?
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "An Empirical Model of Large-Batch
# Training" (the noise scale), "Temperatura" (rate over batch), "Anotações detalhadas da Semana 1"
# (Llama's growing batch). Core file: `optim.py`, the comment above `build`. Before: lesson 24.
# Next: lesson 26. Takes 50 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import sys

import numpy as np
import torch

from config import GPTConfig
from data import order_of
from eval import load_model
from machinery.trained import EvalConfig, find_model
from model import GPT
from optim import Muon, lr_at, orthogonalize

torch.set_num_threads(1)
lesson.begin(25, "noise and rates")

# %% [markdown]
# ## What a batch knows
# The gradient that one wants, G, is that of all texts. A batch of B tokens shows g: G plus noise,
# whose variance falls as 1/B. On average |g|^2 is |G|^2 (1 + B0/B). Here B0, the **noise scale**,
# is tr(Sigma) / |G|^2: the variance of one token's gradient (Sigma is the covariance, its trace the
# sum of the variances of all weights), over the squared length of what all tokens agree on. With
# B = B0, half of |g|^2 is noise.
#
# Let the loss bend by h in every direction. A step of size e along g lowers it by
# `e G.g - e^2/2 h |g|^2`: what the slope gives, less what the bend takes back. Noise adds nothing
# to the first term on average, and makes the second larger. So the best e of SGD (plain descent) is
# 1 / (1 + B0/B) of the best without noise, and the loss falls by that share of what it could fall
# (McCandlish et al. 2018). If the bend H differs from direction to direction, the same sums give
# **B_noise = tr(H Sigma) / (G^T H G)** in the place of B0. Nobody has the H of a large model. If it
# bends alike in all directions, it cancels: what is left is our B0, which the paper calls B_simple.
# (In its runs the two rise together, and B_simple is mostly the larger.)
#
# Muon and Adam divide the length away: they step by the rate times g/|g|. The part of that step
# along G is only |G| / |g|, which is 1 / sqrt(1 + B0/B), and so is the best rate, over the best
# without noise. The loss falls by the same share as in SGD. **Below B0, four times the batch wants
# four times the rate in SGD, and twice the rate in Muon and Adam.** We draw gradients and see:

# %%
rng = np.random.default_rng(0)
D = 400
G = rng.normal(0, 1, D)
NOISE = 1000  # B0
rows = []
for B in (16, 64, 256, 1024, 4096, 65_536):
    g = G + rng.normal(0, 1, (4000, D)) * np.linalg.norm(G) * np.sqrt(NOISE / B / D)  # (draws, D)
    length = np.linalg.norm(g, axis=1)
    slope = (g @ G).mean()
    sgd = slope / (length**2).mean()  # with h = 1; without noise it is 1
    fixed = (g @ G / length).mean() / np.linalg.norm(G)
    share = 1 / (1 + NOISE / B)
    rows.append((B, sgd, slope * sgd / (G @ G), share, fixed, share**0.5))
columns = ["tokens B", "SGD", "gain", "1 / (1 + B0/B)", "fixed length", "its root"]
lesson.table(columns, rows, f"best rates, and gain of the best step; 1: no noise. B0 = {NOISE:,}")
near = all(abs(row[i] / row[j] - 1) < 0.05 for row in rows for i, j in ((1, 3), (2, 3), (4, 5)))
lesson.holds(near, "best rates and gains follow their formulas within 5%")

# %% [markdown]
# ## The price of a batch
# Read the gain as a price list. To come as far as S steps without noise would, one needs
# S (1 + B0/B) steps, and steps times B is S (B + B0) tokens. So
#
# | batch | steps, of the fewest possible | tokens, of the fewest possible |
# | --- | --- | --- |
# | far below B0 | B0 / B times | 1 time: half the batch, twice the steps, same price |
# | B0 | 2 times | 2 times |
# | far above | 1 time: twice the batch saves nothing | B / B0 times |
#
# Let a step of B tokens take the time a + b B: `a` for what a step costs even when it is empty, `b`
# for each token. The time of a run is in proportion to (1 + B0/B) (a + b B), and its lowest point
# is at
#
# **B = sqrt(B0 x a / b).** a / b is the batch at which half of the time is overhead.
#
# A larger batch costs more in tokens than it saves in overhead, a smaller one the other way round.
# N devices that share a batch multiply a / b by N, so they want sqrt(N) times the batch. No batch
# far above B0 is worth its tokens, unless they are free.
#
# ## The noise of a model that learns to read
# A byte model of one layer and 512 bytes a step. All its rates come from one factor f: Muon 0.04 f,
# embedding 0.1 f, head 0.01 f, these two times (width / 64)^-1/2: later we ask why. We train it for
# 0 to 240 steps, take the gradients of 256 rows one by one, and compare.

# %%
T = 64
text = torch.from_numpy(lesson.bytes_of_stdlib(2_000_000))
held_out, text = text[-200_000:], text[:-200_000]
probe = lesson.draw(held_out, T, 256, torch.Generator().manual_seed(99))


def train(width: int, rows: int, f: float, seed: int, steps: int = 80) -> GPT:
    heads = dict(n_head=width // 32, n_kv_head=width // 32, head_dim=32)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(T, 256, n_layer=1, n_embd=width, mlp_hidden=4 * width, **heads))
    model.init_weights()
    groups = model.param_groups()
    table = f * (width / 64) ** -0.5
    adam = dict(betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    optimizers = [
        (0.04 * f, Muon(groups["matrix"])),
        (0.1 * table, torch.optim.AdamW(groups["embedding"], **adam)),
        (0.01 * table, torch.optim.AdamW(groups["head"], **adam)),
    ]
    gen = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        batch = lesson.draw(text, T, rows, gen)
        model(batch[:, :-1], batch[:, 1:]).backward()
        for lr, optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr * lr_at(step, steps, "wsd", warmup=8)
            optimizer.step()
            optimizer.zero_grad()
    return model


def moments(model: GPT, rows: torch.Tensor) -> tuple[float, float, int]:
    """Estimates of |G|^2, of tr(Sigma) of one token, and of B0, in tokens, from the gradients of
    rows (n, T + 1)."""
    n = len(rows)
    total = torch.zeros(())
    squares = 0.0
    for row in rows:
        loss = model(row[None, :-1], row[None, 1:])
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        g = torch.cat([part.flatten() for part in gradient]).double().cpu()
        total = total + g
        squares += float(g.square().sum())
    mean_square = float((total / n).square().sum())
    spread = (squares - n * mean_square) / (n - 1)  # tr(Sigma) of one row
    G_sq = mean_square - spread / n  # the mean has noise as well
    trace = (rows.size(1) - 1) * spread
    return G_sq, trace, round(trace / G_sq)


columns = ["steps", "|G|^2", "tr(Sigma)", "B0, tokens"]
rows = []
for steps in (0, 20, 240):
    drawn = lesson.draw(text, T, 256, torch.Generator().manual_seed(5))
    rows.append((steps, *moments(train(64, 8, 2, 0, steps), drawn)))
lesson.table(columns, rows, "the noise scale of a byte model")
lesson.holds(rows[2][3] > 5 * rows[0][3], "B0 is over 5 times as large after training as before")

# %% [markdown]
# Early, all rows say the same ("spaces are frequent"). Later that is learned, and they disagree.
# Hence the growing batches of Llama and others. Take B0 for an order of magnitude: the formula has
# the bend equal in all directions, which no language model's is. And in a run nobody takes
# gradients row by row. There one knows the norms at two sizes, of the first micro-batch and of the
# whole step: two equations for |G|^2 and tr(Sigma). One step's answer is wild; so average each over
# many steps, and divide once.
#
# `python course/room/25_rates.py runs/tiny` measures a run of yours as well, on 256 of its training
# rows. If |G|^2 comes out negative, the noise drowns it: take more rows.

# %%
for word in [] if "ipykernel" in sys.modules else sys.argv[1:]:
    run = load_model(EvalConfig(**find_model(word), dtype="fp32"))
    place_of = order_of(run.data)
    drawn = np.stack([run.data.row("train", *place_of(i)) for i in range(256)]).astype(np.int64)
    found = moments(run.model, torch.from_numpy(drawn).to(run.model.cos.device))
    rows = [(run.provenance.step, *found)]
    lesson.table(columns, rows, f"the noise scale of {run.run_dir.name}")

# %% [markdown]
# ## Temperature
# SGD that has arrived does not rest. Noise pushes the weights away, the slope brings them back, and
# they tremble around the minimum like a molecule. So the paper calls the rate over the largest rate
# that a batch of B allows, lr / (largest lr), the **temperature** T. (That of lesson 6 is another.)
# In SGD the largest is in proportion to B while B is far below B0: then T is in proportion to
# lr / B. A larger batch cools a run, and so does a smaller rate: the end of a schedule cools it on
# purpose.
#
# How far do they tremble? Take one weight w, whose loss is w^2 / 2, and the noise of a batch, of
# variance 1/B. A step leaves (1 - lr) w, less lr times the noise. At rest the variance v of w stays
# as it is: v = (1 - lr)^2 v + lr^2 / B, so v = lr / ((2 - lr) B). There |G|^2 is v on average and
# tr(Sigma) is 1. So the noise scale is 1 / v, about 2 B / lr: **B0 is in proportion to 1 / T.** It
# is not the model's alone: it is also that of the rate and the batch with which it was trained.
# 4,000 runs of that weight with each of four pairs of rate and batch:

# %%
lr, B = np.array([(0.025, 8), (0.1, 32), (0.1, 8), (0.025, 32)]).T
w = np.zeros((4000, 4))
for _ in range(200):
    w -= lr * (w + rng.normal(0, B**-0.5, w.shape))
noise = 1 / w.var(0)
at_rest = (2 - lr) * B / lr
rows = [*zip(lr, B, lr / B, noise, at_rest)]
lesson.table(["lr", "B", "lr / B", "B0", "(2 - lr) B / lr"], rows, "the noise scale at rest")
lesson.holds(abs(noise / at_rest - 1).max() < 0.15, "at rest, B0 is (2 - lr) B / lr within 15%")

# %% [markdown]
# Lines 1 and 2 have the same temperature; 3 is hotter and 4 colder than both. Hence the paper's
# advice: do not look for the schedule that cools best, but choose a temperature, and measure B0:
# it says which batch keeps it. (For SGD. Muon and Adam divide the length away, as above.)
#
# ## Width: by how much does one step move an output?
# A rate that moves the outputs of a layer too far spoils what the next layer has learned. So ask,
# for one step at rate 1: how long is the change of the output, over the length of the input? Muon's
# step is an orthogonal matrix (lesson 12), which keeps lengths. Adam's first step is a matrix of +1
# and -1 (lesson 10). It moves the output of an unrelated input by sqrt(width), but that of the
# input that made the gradient by width, as there all products in a sum have the same sign.

# %%
rows = []
widths = (64, 128, 256, 512)
gen = torch.Generator().manual_seed(0)
for n in widths:
    draws = []
    for _ in range(8):  # a mean of eight: one draw may be off by a fifth
        x = torch.randn(n, 1, generator=gen)
        error = torch.randn(n, generator=gen)
        others = torch.randn(n, 64, generator=gen)
        muon = orthogonalize(torch.randn(1, n, n, generator=gen))[0]
        adam = torch.outer(error, x[:, 0]).sign()  # one input: the gradient of W is error x^T
        moved = [(W @ y).norm() / y.norm() for W, y in ((muon, others), (adam, others), (adam, x))]
        draws.append([float(value) for value in moved])
    rows.append((n, *np.mean(draws, axis=0)))
columns = ["width", "Muon", "Adam, other inputs", "Adam, its own input"]
lesson.table(columns, rows, "length of the output's change, over the input's, at rate 1")
slope = np.polyfit(np.log(widths), np.log([row[1:] for row in rows]), 1)[0]
print(f"grows as width to the power {slope[0]:.2f}, {slope[1]:.2f}, {slope[2]:.2f}")
powers = abs(slope - (0, 0.5, 1)).max() < 0.1
lesson.holds(powers, "Muon's step moves outputs alike at any width, Adam's by root or width")

# %% [markdown]
# So Muon's rate needs no factor for the width. The tables (embedding, head) have Adam, and what
# they read is partly aligned, partly not: `optim.py` takes width^-1/2, which is right for inputs
# that are unrelated to the gradient's.
#
# ## Does it hold for models that learn to read?
# Two widths at 512 tokens a step, and two batches at width 64. We train with several f, two seeds
# each, and put a parabola through the lowest mean loss and its neighbours, over log f. Its lowest
# point is the best f. That is worth something only if the lowest loss is not at the edge: **at the
# edge of a grid nothing has been found but the direction in which to go on.**

# %%
# (width, rows): the grid of f, so that the best is inside
settings = {(32, 8): (0.5, 1, 2, 4), (128, 8): (1, 2, 4)}
settings |= {(64, 2): (0.5, 1, 2, 4), (64, 32): (1, 2, 4, 8)}


def lowest(grid: tuple, losses: np.ndarray) -> float:
    """The f of the lowest point, or the edge of the grid if the lowest loss is there."""
    i = int(losses.argmin())
    if i in (0, len(grid) - 1):
        return float(grid[i])
    a, b, _ = np.polyfit(np.log2(grid[i - 1 : i + 2]), losses[i - 1 : i + 2], 2)
    return 2 ** (-b / (2 * a))


def examined(model: GPT) -> float:
    with torch.no_grad():
        return model(probe[:, :-1], probe[:, 1:]).item()


rows = []
best = {}
curves = {}
for (width, n), grid in settings.items():
    losses = np.array([[examined(train(width, n, f, s)) for f in grid] for s in (0, 1)])
    mean = curves[width, n] = losses.mean(0)
    best[width, n] = lowest(grid, mean)
    found = ", ".join(f"{f:g}: {y:.2f}" for f, y in zip(grid, mean))
    rows.append((width, n * T, found, best[width, n], *(lowest(grid, y) for y in losses)))
columns = ["width", "tokens", "f: held-out loss, nats", "best f", "seed 0", "seed 1"]
lesson.table(columns, rows, "where the best rates are: by the mean of two seeds, and by each")
wider = best[128, 8] / best[32, 8]
larger = best[64, 32] / best[64, 2]
print(f"4 times the width: best f x {wider:.2f}; 16 times the batch: x {larger:.2f}")
lesson.holds(0.5 < wider < 2, "4 times the width changes the best f by less than a factor of 2")
lesson.holds(1 < larger < 8, "16 times the batch wants a larger f, but far from 16 times")

# %% [markdown]
# If B0 were far above both batches, the best rate would grow sqrt(16) = 4 times. It grows by less,
# as it would with a B0 of some hundreds of tokens. That is no contradiction: a run of 80 steps
# passes through all the noise scales of the table above, from the smallest on, with one rate.
# (For the project's `tiny`, of 256 and 384 channels, benchmarks/RESULTS.md has the rule with half
# and twice its rates: at ten corners of width, batch and length it is never behind by over 0.4%.)

# %%
fig = lesson.figure(8, 3.2)
axes = fig.subplots(1, 2, sharey=True)
for (width, n), grid in settings.items():
    axis = axes[int(n == 8)]
    label = f"width {width}" if n == 8 else f"{n * T:,} tokens"
    above = curves[width, n] - curves[width, n].min()
    axis.plot(grid, above, "o-", label=label)
for axis, title in zip(axes, ("width 64, two batches", "512 tokens, two widths")):
    axis.set(xlabel="factor f on all rates", title=title)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.legend()
axes[0].set(ylabel="loss above its least, nats")
lesson.save(fig, "25_rates")

# %% [markdown]
# ## Trap
# Try three rates for each of three batches, find the largest rate best each time, and report that
# "the best rate does not depend on the batch": that is a claim about the grid. With larger rates in
# it, others would win. And seeds decide as well: see the two last columns of the table. For 16
# times the batch the best rate grew 2.03 times (1.69 to 2.35 with six sets of seeds). That it
# grows, and by far less than 16 times, is safe to say; its exponent is not.
#
# ## Exercise
# `exercises/ex25.py`: the best rate from a grid of runs, or a refusal that says what to run next.
# `python course/check.py 25`
