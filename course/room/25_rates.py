# %% [markdown]
# # 25. Noise and rates: how large a batch, and how large a step
#
# **Afterwards** you can say how many tokens a step should average over, and carry a learning rate
# that was tuned on a small model and a small batch to a wider model and a larger batch.
#
# **Question.** How many tokens should a step average over, and how does the best rate change with
# the batch and with the width?
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "An Empirical Model of Large-Batch
# Training" (the noise scale), "Temperatura" (rate over batch), "Anotações detalhadas da Semana 1"
# (Llama's growing batch). Core file: `optim.py`, the comment above `build`.
# Before: lessons 10 and 12. Next: lesson 26. Takes 50 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import sys

import numpy as np
import torch

from config import GPTConfig, TrainConfig
from data import order_of
from eval import load_model
from machinery.trained import EvalConfig, find_model
from model import GPT
from optim import build, orthogonalize, set_schedule

torch.set_num_threads(1)
lesson.begin(25, "noise and rates")

# %% [markdown]
# ## What a batch knows
# The gradient you want, G, is that of all texts. A batch of B tokens shows you g: G plus noise, and
# the variance of the noise falls as 1/B. On average |g|^2 is |G|^2 (1 + B0/B). Here B0, the **noise
# scale**, is tr(Sigma) / |G|^2. The numerator is the variance of one token's gradient (Sigma is its
# covariance; the trace adds up the variances of all weights), the denominator the squared length of
# what all tokens agree on. At B = B0, half of |g|^2 is noise.
#
# Let the loss bend by h in every direction. A step of size e along g lowers it by
# `e G.g - e^2/2 h |g|^2`: what the slope gives, less what the bend takes back. On average noise
# adds nothing to the first term, and makes the second larger. So the best e of SGD (plain descent)
# is 1 / (1 + B0/B) of the best one without noise, and the loss falls by the same share of what it
# could fall (McCandlish et al. 2018). If the bend H differs from direction to direction, the same
# sums give **B_noise = tr(H Sigma) / (G^T H G)** in place of B0. Nobody has the H of a large model.
# If it is equal in all directions it cancels, and our B0 is left; the paper calls it B_simple. (In
# the paper's runs the two rise together, and B_simple is mostly the larger.)
#
# Muon and Adam divide the length away: their step is the rate times g/|g|. Only |G| / |g| of that
# step, which is 1 / sqrt(1 + B0/B), points along G. Their best rate is therefore that share of the
# best one without noise, and the loss falls by the same share as in SGD. **Below B0, four times the
# batch wants four times the rate in SGD, and twice the rate in Muon and Adam.** Draw some gradients
# and see:

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
lesson.table(columns, rows, f"best rates and gains, as shares of those without noise; B0 = {NOISE}")
near = all(abs(row[i] / row[j] - 1) < 0.05 for row in rows for i, j in ((1, 3), (2, 3), (4, 5)))
lesson.holds(near, "best rates and gains follow their formulas within 5%")

# %% [markdown]
# ## The price of a batch
# Read the gain as a price list. To get as far as S steps without noise would, you need
# S (1 + B0/B) steps; and steps times B makes S (B + B0) tokens:
#
# | batch | steps, of the fewest possible | tokens, of the fewest possible |
# | --- | --- | --- |
# | far below B0 | B0 / B times | 1 time: half the batch, twice the steps, same price |
# | B0 | 2 times | 2 times |
# | far above | 1 time: twice the batch saves nothing | B / B0 times |
#
# Say a step of B tokens takes the time a + b B: `a` is what a step costs even when it is empty, `b`
# is for each token. Then the time of a run is in proportion to (1 + B0/B) (a + b B), which is
# lowest at
#
# **B = sqrt(B0 x a / b).** a / b is the batch at which half of the time is overhead.
#
# A larger batch costs more in tokens than it saves in overhead; with a smaller one it is the other
# way round. N devices that share a batch multiply a / b by N, so they want sqrt(N) times the batch.
# No batch far above B0 is worth its tokens, unless tokens are free.
#
# ## The noise of a model that learns to read
# Now take a byte model of one layer, at 512 bytes a step. All its rates are multiplied by one
# factor f, and those of the two tables (embedding and head) by width^-1/2 as well; you will soon
# see why; `build` in `optim.py` does that. Train it for 0 to 240 steps, take the gradients of 256
# rows one by one, and compare.

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
    rates = dict(lr_scale=f, matrix_lr=0.04, embedding_lr=0.03, head_lr=0.003)
    config = TrainConfig(**rates, warmup=8)  # tokens_per_step = rates_at: no factor for B
    optimizers = build(model.param_groups(), config, width)
    gen = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        batch = lesson.draw(text, T, rows, gen)
        model(batch[:, :-1], batch[:, 1:]).backward()
        set_schedule(optimizers, step, steps, config)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


def moments(model: GPT, rows: torch.Tensor) -> tuple[float, float, int]:
    """Estimates of |G|^2, of one token's tr(Sigma), and of B0 in tokens, from the gradients of rows
    (n, T + 1)."""
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
    G_sq = mean_square - spread / n  # the mean has some noise, too
    trace = (rows.size(1) - 1) * spread
    return G_sq, trace, round(trace / G_sq)


columns = ["steps", "|G|^2", "tr(Sigma)", "B0, tokens"]
rows = []
for steps in (0, 20, 240):
    drawn = lesson.draw(text, T, 256, torch.Generator().manual_seed(5))
    rows.append((steps, *moments(train(64, 8, 2, 0, steps), drawn)))
lesson.table(columns, rows, "the noise scale of a byte model")
lesson.holds(rows[2][3] > 5 * rows[0][3], "after training, B0 is over 5 times as large as before")

# %% [markdown]
# Early on, all rows say the same thing ("spaces are frequent"). Later the model has learned that,
# and the rows disagree. This is why the batches of Llama and others grow. Read B0 as an order of
# magnitude: the formula takes the bend to be equal in all directions, and no language model's is.
# In a real run, nobody takes gradients row by row. There you know the norm at two sizes, that of
# the first micro-batch and that of the whole step: two equations for |G|^2 and tr(Sigma). The
# answer of one step is wild, so average both over many steps, and divide once.
#
# `python course/room/25_rates.py runs/tiny` also measures a run of yours, on 256 of its training
# rows. If |G|^2 comes out negative, it drowns in the noise: take more rows.

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
# SGD does not rest when it has arrived. The noise pushes the weights away, the slope brings them
# back, and they tremble around the minimum like a molecule. So the paper calls lr / (the largest lr
# that a batch of B allows) the **temperature** T. (It is not that of lesson 6.) In SGD the
# largest rate is in proportion to B as long as B is far below B0, and T is then in proportion to
# lr / B. A larger batch cools a run, and so does a smaller rate: the end of a schedule cools it on
# purpose.
#
# How far do the weights tremble? Take a single weight w with the loss w^2 / 2, and let the noise of
# a batch have the variance 1/B. A step leaves (1 - lr) w, less lr times the noise. At rest, the
# variance v of w stays as it is: v = (1 - lr)^2 v + lr^2 / B, so v = lr / ((2 - lr) B). There
# |G|^2 is v on average, and tr(Sigma) is 1. The noise scale is then 1 / v, about 2 B / lr: **B0 is
# in proportion to 1 / T.** It does not belong to the model alone, but also to the rate and the
# batch that trained it. Here are 4,000 runs of that weight for each of four pairs of rate and
# batch:

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
# Lines 1 and 2 have the same temperature; 3 is hotter than both and 4 is colder. This leads to the
# paper's advice: do not search for the schedule that cools best. Choose a temperature and measure
# B0, which tells you the batch that keeps it. (This is for SGD. Muon and Adam divide the length
# away, as above.)
#
# ## Width: how far does one step move an output?
# A rate that moves a layer's outputs too far spoils what the next layer has learned. So ask, for
# one step at rate 1: how long is the change of the output, compared with the input? Muon's step is
# an orthogonal matrix (lesson 12), which keeps lengths. Adam's first step is a matrix of +1 and -1
# (lesson 10). It moves the output of an unrelated input by sqrt(width), but the output of the input
# that made the gradient by width, because all products in that sum have the same sign.

# %%
rows = []
widths = (64, 128, 256, 512)
gen = torch.Generator().manual_seed(0)
for n in widths:
    draws = []
    for _ in range(8):  # the mean of eight: one draw may be off by a fifth
        x = torch.randn(n, 1, generator=gen)
        error = torch.randn(n, generator=gen)
        others = torch.randn(n, 64, generator=gen)
        muon = orthogonalize(torch.randn(1, n, n, generator=gen))[0]
        adam = torch.outer(error, x[:, 0]).sign()  # one input: the gradient of W is error x^T
        moved = [(W @ y).norm() / y.norm() for W, y in ((muon, others), (adam, others), (adam, x))]
        draws.append([float(value) for value in moved])
    rows.append((n, *np.mean(draws, axis=0)))
columns = ["width", "Muon", "Adam, other inputs", "Adam, its own input"]
lesson.table(columns, rows, "length of the output's change / length of the input, at rate 1")
slope = np.polyfit(np.log(widths), np.log([row[1:] for row in rows]), 1)[0]
print(f"grows as width to the power {slope[0]:.2f}, {slope[1]:.2f}, {slope[2]:.2f}")
powers = abs(slope - (0, 0.5, 1)).max() < 0.1
lesson.holds(powers, "Muon moves outputs alike at any width; Adam as width^0.5 or width^1")

# %% [markdown]
# So Muon's rate needs no factor for the width. The tables (embedding and head) are trained by Adam,
# and what they read is partly aligned with the gradient's inputs and partly not. `optim.py` takes
# width^-1/2, which is right where it is not.
#
# ## Does it hold for models that learn to read?
# Try two widths at 512 tokens a step, and two batches at width 64. Train with several f, two seeds
# each, then put a parabola over log f through the lowest mean loss and its two neighbors: its
# lowest point is the best f. That is worth something only if the lowest loss is not at the edge.
# **At the edge of a grid you have found nothing but the direction to go on in.**

# %%
# (width, rows): a grid of f that has the best one inside
settings = {(32, 8): (0.5, 1, 2, 4), (128, 8): (1, 2, 4)}
settings |= {(64, 2): (0.5, 1, 2, 4), (64, 32): (1, 2, 4, 8)}


def lowest(grid: tuple, losses: np.ndarray) -> float:
    """The f of the lowest point, or the edge of the grid when the lowest loss is there."""
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
lesson.table(columns, rows, "where the best rates are: by the mean of two seeds, and by each seed")
wider = best[128, 8] / best[32, 8]
larger = best[64, 32] / best[64, 2]
print(f"4 times the width: best f x {wider:.2f}; 16 times the batch: x {larger:.2f}")
lesson.holds(0.5 < wider < 2, "4 times the width changes the best f by less than a factor of 2")
lesson.holds(1 < larger < 8, "16 times the batch wants a larger f, but nowhere near 16 times")

# %% [markdown]
# If B0 were far above both batches, the best rate would grow sqrt(16) = 4 times. It grows by less,
# as it would with a B0 of some hundreds of tokens. That is no contradiction: with one rate, a run
# of 80 steps passes through the noise scales of the table above, starting from the smallest. (For
# the project's `tiny`, at 256 and 384 channels, benchmarks/RESULTS.md compares the rule with half
# and twice its rates: at ten corners of width, batch and length it is never behind by over 0.4%.)

# %%
fig = lesson.figure()
ax = fig.subplots()
for (width, n), mean in curves.items():
    label = f"width {width}, {n * T:,} tokens"
    ax.semilogx(settings[width, n], mean - mean.min(), "o-", base=2, label=label)
ax.set(xlabel="factor f on all rates", ylabel="loss above its lowest, nats"), ax.legend()
lesson.save(fig, "25_rates")

# %% [markdown]
# ## Trap
# Try three rates for each of three batches, find that the largest is best each time, and report
# "the best rate does not depend on the batch": you have made a claim about your grid. With larger
# rates in it, others would win. Seeds decide as well: look at the last two columns of the table.
# For 16 times the batch the best rate grew 1.82 times (1.65 to 1.99 with six sets of seeds). You
# can safely say that it grows, and by far less than 16 times; you cannot state its exponent.
#
# ## Exercise
# `exercises/ex25.py`: the best rate from a grid of runs, or a refusal that says what to run next.
# `python course/check.py 25`
