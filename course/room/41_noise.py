# %% [markdown]
# # 41. Noise: how large should a batch be
#
# **Afterwards** you can measure a run's noise scale, and from it and two times of your machine say
# which batch to take, and why not half and not twice as many tokens.
#
# **Question.** How many tokens should a step average?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "An Empirical Model of Large-Batch
# Training" (the noise scale), "Dependência do tamanho do Modelo", "Anotações detalhadas da Semana
# 1" (Llama's growing batch).
# Core file: `instruments/run/noise_scale.py`. Before: lesson 22. Next: lesson 12.
# Takes 25 seconds on two cores.

# %%
import time

import lesson  # first: it puts the project on the path
import numpy as np
import torch

from config import GPTConfig
from model import GPT
from optim import lr_at

torch.set_num_threads(1)
lesson.begin(41, "noise")

# %% [markdown]
# ## A landscape that can be computed
# Let the loss be a bowl, 1/2 sum(h x^2). At x its gradient is G = h x, but a batch of B samples
# shows g, which is G plus noise whose variance falls as 1/B. A step of size e along g lowers the
# loss by `e G.g - e^2/2 g.Hg`: the first term is what the slope gives, the second what the
# curvature takes back. Noise adds nothing to the first on average, and makes the second larger. The
# best step, and what it gains (McCandlish et al. 2018):
#
#     best step e(B) = e_max / (1 + B_noise / B)        gain d(B) = d_max / (1 + B_noise / B)
#
# with e_max and d_max those without noise, and B_noise = tr(H Sigma) / G.HG, where Sigma is the
# covariance of one sample's gradient. Let us throw the dice and see.

# %%
rng = np.random.default_rng(0)
D = 50
h = np.logspace(-1, 1, D)
x = rng.normal(0, 1, D)
sigma = 16 * rng.uniform(1, 5, D)
G = h * x
b_noise = (h * sigma**2).sum() / (h * G**2).sum()
e_max = (G**2).sum() / (h * G**2).sum()
d_max = (G**2).sum() ** 2 / (h * G**2).sum() / 2
rows = []
for B in (4, 16, 64, 256, 1024, 65_536):
    g = G + rng.normal(0, 1, (20_000, D)) * sigma / np.sqrt(B)  # (draws, D)
    slope = (g @ G).mean()
    curvature = (g**2 @ h).mean()
    share = 1 / (1 + b_noise / B)
    rows.append((B, slope / curvature, e_max * share, slope**2 / curvature / 2, d_max * share))
columns = ["samples B", "best step", "by formula", "gain", "gain by formula"]
lesson.table(columns, rows, f"A bowl with B_noise = {b_noise:.0f} samples")
near = [abs(row[i] / row[i + 1] - 1) < 0.02 for row in rows for i in (1, 3)]
lesson.holds(all(near), "best steps and gains follow the formulas within 2%")

# %% [markdown]
# Read the gain as a price list. To come as far as S steps without noise would, one needs
# S (1 + B_noise / B) steps, and steps times B is S (B + B_noise) samples. So
#
# | batch | steps, of the fewest possible | samples, of the fewest possible |
# | --- | --- | --- |
# | far below B_noise | B_noise / B times | 1 time: half the batch, twice the steps, same price |
# | B_noise | 2 times | 2 times |
# | far above | 1 time: twice the batch saves nothing | B / B_noise times |
#
# ## A model that learns to read
# Nobody knows the H of a language model, so one takes H as equal in all directions. What is left is
# B_simple = tr(Sigma) / |G|^2: the variance of one token's gradient, over the squared length of
# what all tokens agree on. A byte model learns for 240 steps; at five moments we take the gradients
# of 96 rows one by one and compare.

# %%
T = 64
text = torch.from_numpy(lesson.bytes_of_stdlib(1_000_000))


def draw(n: int, gen: torch.Generator) -> torch.Tensor:
    at = torch.randint(0, len(text) - T, (n,), generator=gen)
    return text[at[:, None] + torch.arange(T + 1)]  # (n, T + 1)


def gradient(model: GPT, rows: torch.Tensor) -> torch.Tensor:
    """Of the mean loss of rows: (parameters,)."""
    loss = model(rows[:, :-1], rows[:, 1:])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def moments(g: torch.Tensor) -> tuple[float, float]:
    """Gradients of single rows -> estimates of |G|^2 and of tr(Sigma) of one token."""
    mean = g.mean(0)
    spread = ((g - mean).square().sum() / (len(g) - 1)).item()  # tr(Sigma) of one row
    return mean.square().sum().item() - spread / len(g), T * spread  # the mean has noise as well


shape = dict(n_layer=2, n_embd=64, n_head=2, n_kv_head=2, head_dim=32, mlp_hidden=256)
torch.manual_seed(0)
model = GPT(GPTConfig(seq_len=T, vocab_size=256, **shape))
model.init_weights()
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
gen = torch.Generator().manual_seed(1)
rows = []
logged = []
for step in range(241):
    if step in (0, 10, 30, 90, 240):
        per_row = torch.stack([gradient(model, row[None]) for row in draw(96, gen)])
        G_sq, trace = moments(per_row)
        rows.append((step, G_sq, trace, round(trace / G_sq)))
    optimizer.param_groups[0]["lr"] = 3e-3 * lr_at(step, 240, "wsd", warmup=20)
    # Two micro-batches, of 2 rows and of 14.
    first = draw(2, gen)
    rest = draw(14, gen)
    parts = gradient(model, first), gradient(model, rest)
    whole = (2 * parts[0] + 14 * parts[1]) / 16
    logged.append((parts[0].square().sum().item(), whole.square().sum().item()))
    at = 0
    for p in model.parameters():
        p.grad = whole[at : at + p.numel()].view_as(p)
        at = at + p.numel()
    optimizer.step()
columns = ["step", "|G|^2", "tr(Sigma)", "tokens"]
lesson.table(columns, rows, "B_simple = tr(Sigma) / |G|^2, from 96 rows")
measured = {row[0]: row[3] for row in rows}
late = measured[240]
lesson.holds(late > 5 * measured[0], "B_simple is over 5 times as large after training as before")

# %% [markdown]
# Early, all rows say the same ("spaces are frequent"). Later that is learned, and they disagree: at
# step 240 B_simple is 6,621 tokens (6,621 to 11,694 with three seeds). Hence the growing batches of
# Llama and others. The same goes for the size: larger models "seem to have more noise", notes the
# source, though no size is in the formula. They may have learned more of what rows agree on: with
# widths of 16, 32 and 64, 240 steps at a constant rate came to 2.60, 2.36 and 2.06 nats, and to a
# B_simple of 378, 1,985 and 1,955 tokens (one seed each: no law).
#
# ## Does it predict what a step gains?
# That was a ratio of two numbers of a gradient. What we want to know is what a step along g gains.
# The slope along g is the same on average for every batch, as the mean of g is G. The curvature
# g.Hg is where the noise comes in: it should be c (1 + B_noise / B). We measure it on the trained
# model, with the loss of 128 other rows at three points of the line along g. The gain of the best
# step is then slope^2 / (2 curvature).

# %%
batches = {512: 1, 64: 8, 16: 16, 4: 24, 1: 48}  # rows -> draws
drawn = {n: [gradient(model, draw(n, gen)) for _ in range(k)] for n, k in batches.items() if k > 1}
drawn[512] = [torch.stack(drawn[64]).mean(0)]
params = [p.detach().clone() for p in model.parameters()]
judge = draw(128, gen)


@torch.no_grad()
def loss_after(g: torch.Tensor, e: float) -> float:
    at = 0
    for p, start in zip(model.parameters(), params):
        p.copy_(start - e * g[at : at + p.numel()].view_as(p))
        at += p.numel()
    return model(judge[:, :-1], judge[:, 1:]).item()


def line(g: torch.Tensor) -> tuple[float, float]:
    """Slope and curvature of the loss along g."""
    e = 0.03 / g.norm().item()  # short enough for a bowl, long enough for fp32
    low = loss_after(g, -e)
    high = loss_after(g, e)
    return (low - high) / (2 * e), (low + high - 2 * here) / e**2


here = loss_after(drawn[512][0], 0.0)
slope = line(drawn[512][0])[0]
curvature = np.array([np.mean([line(g)[1] for g in drawn[n]]) for n in batches])
B = T * np.array(list(batches))  # tokens
candidates = np.logspace(1, 6, 1001)
miss = [np.log(curvature / (1 + noise / B)).std() for noise in candidates]
by_gain = candidates[np.argmin(miss)]
c = np.exp(np.log(curvature / (1 + by_gain / B)).mean())
gain = slope**2 / (2 * curvature)
rows = list(zip(B.tolist(), curvature, c * (1 + by_gain / B), gain))
columns = ["tokens B", "curvature", "c (1 + B_noise / B)", "gain of the best step, nats"]
lesson.table(columns, rows, f"Steps from the trained model; B_noise = {by_gain:,.0f} fits best")
near = np.abs(np.log(curvature / (c * (1 + by_gain / B)))).max()
lesson.holds(near < 0.5, "from 64 to 32,768 tokens the curvature follows the formula within 65%")
same = 1 / 4 < by_gain / late < 4
lesson.holds(same, "B_simple is within a factor of 4 of the B_noise of the gains")

# %% [markdown]
# By these gains B_noise is 16,982 tokens (2,455 to 16,982 with three seeds): one run tells it only
# within a factor of seven, of which the root below leaves 2.6.
#
# ## So which batch?
# Let a step of B tokens take the time a + b B: `a` for what a step costs even when it is empty, `b`
# for each token. The price list then gives the time of a run, in proportion to
# (1 + B_noise / B) (a + b B), and its lowest point is at
#
# **B = sqrt(B_noise x a / b).** a / b is the batch at which half of the time is overhead.
#
# A larger batch costs more in tokens than it saves in overhead, a smaller one the other way round.
# N devices that share a batch multiply a / b by N, so they want sqrt(N) times the batch. And no
# batch far above B_noise is worth its tokens, unless they are free.


# %%
def seconds(n: int) -> float:
    """Of the processor, for a step of n rows: the least of five."""
    times = []
    for _ in range(5):
        rows = draw(n, gen)
        start = time.process_time()
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        times.append(time.process_time() - start)
    return min(times)


few = seconds(1)
more = seconds(17)
b = (more - few) / (16 * T)
a = max(few - b * T, 0.1 * few)


def take(name: str, half: float) -> tuple:
    best = (by_gain * half) ** 0.5
    return name, round(half), round(best), 1 + by_gain / best, 1 + best / by_gain


print(f"here a step takes {1e3 * a:.1f} ms, and {1e6 * b:.0f} us a token")
machines = (("this one", a / b), ("overhead of 256 tokens", 256), ("8 of those", 2048))
columns = ["machine", "a / b", "take B", "steps / fewest", "tokens / fewest"]
lesson.table(columns, [take(*m) for m in machines], "The batch to take for this model, in tokens")
speed = gain / (256 + B)  # nats per time, where a is 256 b
found = int(B[speed.argmax()])
wanted = take("", 256)[2]
print(f"of the five batches, {found:,} tokens gain most per time; the formula says {wanted:,}")
close = found / 4 <= wanted <= 4 * found
lesson.holds(close, "the measured gains choose a batch within a factor of 4 of the formula's")
lesson.holds(speed.argmax() not in (0, 4), "neither the smallest nor the largest batch is the best")

# %%
fig = lesson.figure(8, 3.2)
left, right = fig.subplots(1, 2)
x = np.logspace(np.log10(B.min()) - 0.2, np.log10(B.max()) + 0.2, 200)
left.plot(x, 1 / (1 + by_gain / x), color="tab:blue", label="gain of a step")
left.plot(x, 1 / (1 + x / by_gain), color="tab:orange", label="gain of a token")
left.plot(B, c / curvature, "o", color="tab:blue")
left.plot(B, by_gain / B * c / curvature, "o", color="tab:orange")
left.axvline(by_gain, color="gray", ls=":")
left.text(1.1 * by_gain, 0.02, "B_noise", color="gray")
left.set(xscale="log", xlabel="tokens in the batch", ylabel="share of the best", title="the yield")
left.legend(loc="center left")
right.plot(list(measured), list(measured.values()), "o-", color="tab:blue")
right.set(yscale="log", xlabel="training step", title="B_simple of the byte model, tokens")
lesson.save(fig, "41_noise")

# %% [markdown]
# ## Trap
# In training nobody takes gradients row by row. But the norms at two batch sizes are known there,
# the first micro-batch's and the whole step's, and E|g_B|^2 = |G|^2 + tr(Sigma) / B gives two
# equations. One step's answer is wild: |G|^2 may even come out negative, and a mean of ratios has
# no meaning. So average both terms first, and divide once. Where a step has far fewer
# tokens than B_noise, as at the end of this run, even the average of 60 steps may drown.

# %%
rows = []
single = {}
for start in (60, 180):
    small_sq, big_sq = np.array(logged[start : start + 60]).T  # (60,) each
    grad_sq = (16 * big_sq - 2 * small_sq) / 14  # |G|^2
    trace = (small_sq - big_sq) / (1 / (2 * T) - 1 / (16 * T))  # tr(Sigma)
    single[start] = trace / grad_sq
    together = trace.mean() / grad_sq.mean() if grad_sq.mean() > 0 else None
    low = min(single[start])
    high = max(single[start])
    rows.append((f"{start} to {start + 60}", round(low), round(high), together))
columns = ["steps", "least ratio", "largest ratio", "means divided once"]
lesson.table(columns, rows, "Noise scale from the norms of 2 rows and of 16, tokens")
spread = np.abs(single[60])
lesson.holds(max(spread) > 10 * min(spread), "single steps differ by more than a factor of ten")
averaged = rows[0][3] or 0.0
near = measured[90] / 4 < averaged < 4 * measured[90]
lesson.holds(near, "60 steps together: within a factor of 4 of what 96 rows say at step 90")

# %% [markdown]
# `eval.py noise MODEL` measures it at a checkpoint, by `estimate`: many gradients of one size.
#
# ## Exercise
# `exercises/ex41.py`: the noise scale from the norms of many steps, and the batch to take.
# `python course/check.py 41`
