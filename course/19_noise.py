# %% [markdown]
# # 19. Noise: how large should a batch be
#
# **Question.** When does averaging more tokens stop helping, and what has the learning rate to do
# with it?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "An Empirical Model of Large-Batch
# Training" (the noise scale), "Dependência do tamanho do Modelo", "Temperatura", "Anotações
# detalhadas da Semana 1" (Llama's growing batch); *NfNN*, "4.3 Diferentes abordagens distribuídas".
# Core files: `instruments/noise_scale.py`, `optim.py`. Before: lesson 17. Next: lesson 18. Takes 30
# seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import numpy as np
import torch

from config import GPTConfig
from instruments.noise_scale import NoiseScale
from model import GPT
from optim import batch_at, lr_at

torch.set_num_threads(1)
lesson.begin(19, "noise")

# %% [markdown]
# ## A landscape that can be computed
# The loss is a bowl, 1/2 sum(h x^2). At x the true gradient is G = h x, but a batch of B samples
# shows g, which is G plus noise of covariance Sigma / B. A step of size e along g improves the loss
# by `e G.g - e^2/2 g.Hg`. On average, with B_noise = tr(H Sigma) / G.HG (McCandlish et al. 2018):
#
#     best step e(B)   = e_max / (1 + B_noise / B)      e_max = |G|^2 / G.HG
#     improvement d(B) = d_max / (1 + B_noise / B)      d_max = |G|^4 / (2 G.HG)
#
# **The same factor twice.** A batch of B_noise gets half of what an infinite one would, for half
# the step. Let us throw the dice and see.

# %%
rng, D = np.random.default_rng(0), 50
h, x, sigma = np.logspace(-1, 1, D), rng.normal(0, 1, D), 16 * rng.uniform(1, 5, D)
G = h * x
b_noise = (h * sigma**2).sum() / (h * G**2).sum()
e_max = (G**2).sum() / (h * G**2).sum()
d_max = (G**2).sum() ** 2 / (h * G**2).sum() / 2

quadratic = []
for B in (4, 16, 64, 256, 1024, 65_536):
    g = G + rng.normal(0, 1, (40_000, D)) * sigma / np.sqrt(B)  # (draws, D)
    slope, curvature = (g @ G).mean(), (g**2 @ h).mean()
    factor = 1 / (1 + b_noise / B)
    found = slope / curvature, slope**2 / (2 * curvature)
    quadratic.append((B, found[0], e_max * factor, found[1], d_max * factor))
columns = ["B", "best step found", "formula", "improvement found", "formula"]
lesson.table(columns, quadratic, f"B_noise = {b_noise:.0f} samples")
near = [abs(row[i] / row[i + 1] - 1) < 0.02 for row in quadratic for i in (1, 3)]
lesson.holds(all(near), "steps and improvements follow the formula within 2%")
formula = {row[0]: round(row[2], 4) for row in quadratic}
lesson.holds((formula[256], formula[65_536]) == (0.1039, 0.1261), "the step saturates at 0.1261")

# %% [markdown]
# ## A model that learns to read
# Nobody knows the H of a language model, so the usual measure leaves it out: B_simple =
# tr(Sigma) / |G|^2, the spread of the gradient over its length. It can be measured row by row. In
# training that is too slow: only the norms at two batch sizes are known there, the micro-batch's
# and the step's, and `NoiseScale` solves the two equations E|g_B|^2 = |G|^2 + tr(Sigma) / B.

# %%
T = 128
config = GPTConfig(
    seq_len=T,
    vocab_size=256,
    n_layer=2,
    n_embd=64,
    n_head=2,
    n_kv_head=2,
    head_dim=32,
    mlp_hidden=256,
)
text = torch.from_numpy(lesson.bytes_of_stdlib(1_000_000))


def draw(n: int, gen: torch.Generator, seq_len: int = T) -> torch.Tensor:
    at = torch.randint(0, len(text) - seq_len, (n,), generator=gen)
    return torch.stack([text[i : i + seq_len + 1] for i in at.tolist()])  # (n, seq_len + 1)


def row_gradients(model: GPT, rows: torch.Tensor) -> torch.Tensor:
    """-> (rows, parameters): the gradient of each row's mean loss."""
    params, out = list(model.parameters()), []
    for row in rows:
        g = torch.autograd.grad(model(row[None, :-1], row[None, 1:]), params)
        out.append(torch.cat([p.flatten() for p in g]))
    return torch.stack(out)


def moments(g: torch.Tensor) -> tuple[float, float]:
    """Gradients of rows of T tokens -> unbiased estimates: |G|^2, tr(Sigma) of one token."""
    mean = g.mean(0)
    spread = ((g - mean).square().sum() / (len(g) - 1)).item()  # tr(Sigma) of one row
    return mean.square().sum().item() - spread / len(g), T * spread


def train(model: GPT, steps: int, rows: int, lr: float, seed: int, seq_len: int = T):
    """A generator: yields the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    gen = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * lr_at(step, steps, "wsd", warmup=max(1, steps // 12))
        batch = draw(rows, gen, seq_len)
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


torch.manual_seed(0)
model = GPT(config)
model.init_weights()
probe = draw(128, torch.Generator().manual_seed(1))
run, rows = train(model, 240, 8, 3e-3, seed=2), []
for step in range(241):
    if step in (0, 20, 60, 120, 240):
        g = row_gradients(model, probe)
        G_sq, trace = moments(g)
        noise = NoiseScale()
        noise.update(g.square().sum(1).mean().item(), g.mean(0).square().sum().item(), T, 128 * T)
        assert abs(noise.grad_sq / G_sq - 1) < 1e-2 and abs(noise.trace / trace - 1) < 1e-3
        rows.append((step, G_sq, trace, round(trace / G_sq), round(noise.tokens)))
    next(run, None)
columns = ["step", "|G|^2", "tr(Sigma)", "tr / |G|^2", "by NoiseScale"]
lesson.table(columns, rows, "B_simple in tokens, from 128 rows")
measured = [row[3] for row in rows]
near = [abs(a / b - 1) < 0.01 for *_, a, b in rows]
lesson.holds(
    all(near), "norms of single rows and of all: NoiseScale agrees with the rows themselves"
)
lesson.holds(min(measured[2:]) >= 5 * measured[0], "from step 60 on at least 5 times the first")
share = [batch_at(step, 100) for step in (0, 49, 50, 99, 100)]
lesson.holds(share == [0.25, 0.25, 0.5, 0.5, 1.0], "so batch_at begins with a quarter of the batch")

# %% [markdown]
# Early, all rows say the same ("spaces are frequent"), and a few hundred tokens are as good as a
# million. Later the common part is learned, G is short, and the rows disagree. Hence the growing
# batches of Llama and others.
#
# ## More tasks, more noise?
# The source asks. A mixture's covariance is what each task has of its own, plus how far the tasks'
# gradients lie apart: tr(Sigma_mix) = sum w_i tr(Sigma_i) + sum w_i |G_i - G|^2. So it is not the
# number of tasks that counts. The second task here is the same text, or text read backwards.


# %%
def spread(g: torch.Tensor) -> float:
    return (g - g.mean(0)).square().sum(1).mean().item()


python, rows = g[:64], []
for name, other in (("the same", g[64:]), ("backwards", row_gradients(model, probe[64:].flip(1)))):
    both = torch.cat([python, other])
    within = (spread(python) + spread(other)) / 2
    between = (
        sum((task.mean(0) - both.mean(0)).square().sum().item() for task in (python, other)) / 2
    )
    rows.append((name, within, between, within + between, spread(both)))
    assert abs((within + between) / spread(both) - 1) < 1e-5
lesson.table(
    ["second task", "of each", "between", "sum", "of the mixture"], rows, "tr(Sigma), rows"
)
lesson.holds(rows[1][2] > 3 * rows[0][2], "the distance of the tasks makes the noise")

# %% [markdown]
# ## Temperature
# SGD near a minimum does not rest, it trembles, with a variance of about lr / (2 B) times the
# noise: the source's *temperature*. Double both and nothing changes; change one and it does. Here
# 4,000 runs of y = w x with x = +-1, noise of variance 1, and the variance of w after 200 steps.


# %%
def trembling(lr: float, B: int) -> float:
    w = np.zeros(4000)  # the true w is 0
    for _ in range(200):
        w -= lr * (w - rng.normal(0, 1, (4000, B)).mean(1))
    return w.var()


cases = [(0.025, 8), (0.05, 16), (0.1, 32), (0.1, 8), (0.025, 32)]
rows = [(lr, B, lr / B, trembling(lr, B), lr / B / (2 - lr)) for lr, B in cases]
lesson.table(["lr", "B", "lr / B", "variance of w", "lr / (B (2 - lr))"], rows)
var = [row[3] for row in rows]
lesson.holds(max(var[:3]) < 1.1 * min(var[:3]), "with lr / B kept the variance is the same")
lesson.holds(var[3] > 3 * var[0] > 9 * var[4], "with lr or B alone changed, it is not")

# %% [markdown]
# Is that a rule for language models? Nine runs of the byte model, each over 49,152 tokens. A larger
# batch makes fewer steps of them, and each may be longer.

# %%
grid = {}
for n in (4, 16, 64):
    for lr in (1e-3, 4e-3, 1.6e-2):
        torch.manual_seed(0)
        model = GPT(config)
        model.init_weights()
        for _ in train(model, 768 // n, n, lr, seed=2, seq_len=64):
            pass
        with torch.no_grad():
            grid[n, lr] = model(probe[:, :64], probe[:, 1:65]).item()
rates = sorted({lr for _, lr in grid})
rows = [(n, 768 // n, *(grid[n, lr] for lr in rates)) for n in (4, 16, 64)]
lesson.table(
    ["rows a step", "steps", *(f"lr {lr}" for lr in rates)], rows, "loss after 49,152 tokens"
)
best = [min(rates, key=lambda lr: grid[n, lr]) for n in (4, 16, 64)]
lesson.holds(best == sorted(best), f"the best rate does not fall as the batch grows: {best}")

# %%
fig = lesson.figure(8, 3.2)
left, right = fig.subplots(1, 2)
B = np.logspace(0, 4, 200)
left.plot(B, 1 / (1 + b_noise / B), color="tab:blue")
left.plot(B, 1 / (1 + B / b_noise), color="tab:orange")
sizes, gains = zip(*((row[0], row[3] / d_max) for row in quadratic[:-1]))
left.plot(sizes, gains, "o", color="tab:blue", label="of a step")
left.plot(
    sizes,
    [b_noise * d / n for n, d in zip(sizes, gains)],
    "o",
    color="tab:orange",
    label="of a sample",
)
left.axvline(b_noise, color="gray", ls=":")
left.text(1.15 * b_noise, 0.02, "B_noise", color="gray")
left.set(
    xscale="log", xlabel="samples in the batch B", ylabel="share of the best", title="the yield"
)
left.legend(loc="center right")
right.plot([0, 20, 60, 120, 240], measured, "o-", color="tab:blue")
right.set(yscale="log", xlabel="training step", title="B_simple of the byte model, tokens")
lesson.save(fig, "19_noise")

# %% [markdown]
# ## Trap
# One step's estimate is wild. With 2 rows against 16, as in training, |G|^2 may even come out
# negative, and a mean of ratios has no meaning. Average both terms first; divide once.

# %%
rows, running = [], NoiseScale(decay=1.0)
for i, group in enumerate(g.split(16)):
    norms = [part.mean(0).square().sum().item() for part in (group[:2], group)]
    one = NoiseScale()
    for noise in (one, running):
        noise.update(*norms, 2 * T, 16 * T)
    rows.append((i, one.grad_sq, one.trace, one.trace / one.grad_sq, running.tokens))
columns = ["step", "|G|^2", "tr(Sigma)", "its ratio", "ratio of the means so far"]
lesson.table(columns, rows, f"tokens; all rows together say {measured[-1]:,}")
ratios = [abs(row[3]) for row in rows]
lesson.holds(max(ratios) > 10 * min(ratios), "single steps differ by more than a factor of ten")

# %% [markdown]
# Eight steps are few, too: `train.py --noise_scale_every N` averages about its last 20 estimates,
# which come from 20 N steps.
#
# ## Exercise
# `exercises/ex19.py`: the noise scale in tokens, from the norms of many steps.
# `python course/check.py 19`
