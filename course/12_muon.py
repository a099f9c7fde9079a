# %% [markdown]
# # 12. Muon by hand: a step that is equally long in every direction
#
# **Afterwards** you can write Muon's step with matrix products alone, say what it does to a
# gradient, and say which weights should not get it.
#
# **Question.** What does Muon do to a gradient that Adam does not?
#
# Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024); Bernstein
# and Newhouse, Old Optimizer, New Norm (2024); Amsel et al., The Polar Express (2025).
# Core file: `optim.py`, `orthogonalize` and `Muon`. Before: lesson 25. Next: lesson 25.
# Takes 40 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import numpy as np
import torch

from config import GPTConfig
from model import GPT
from optim import POLAR_EXPRESS, Muon, lr_at, orthogonalize

torch.set_num_threads(1)
lesson.begin(12, "Muon by hand")

# %% [markdown]
# ## A gradient, taken apart
# Any matrix G is a sum of simple ones: G = s1 u1 v1^T + s2 u2 v2^T + ..., where the directions u
# are orthogonal to each other, and the v too. This is its singular value decomposition (SVD). A
# layer of weights G would take the input direction v1 to the output direction u1 and make it s1
# times as long. (The root of the sum of all s squared is G's Frobenius norm: the root of the sum of
# all its numbers squared.) How different are the s of a real gradient? We train a byte model and
# look at its gradient before step 30: 2 layers, width 64, 512 bytes of Python a step.

# %%
T = 64
V = 256
text = torch.from_numpy(lesson.bytes_of_stdlib(2_000_000))
held_out, text = text[-200_000:], text[:-200_000]
probe = lesson.draw(held_out, T, 256, torch.Generator().manual_seed(99))


def train(kinds: tuple, rates: tuple, seed: int, steps: int = 100, stop: int = -1) -> GPT:
    """kinds, rates: of the matrices, the embedding, the head. stop: leave the gradients of that
    step in the model and return it."""
    torch.manual_seed(seed)
    shape = dict(n_layer=2, n_embd=64, n_head=2, n_kv_head=2, head_dim=32, mlp_hidden=256)
    model = GPT(GPTConfig(seq_len=T, vocab_size=V, **shape))
    model.init_weights()
    groups = model.param_groups()
    optimizers = []
    for name, kind, rate in zip(("matrix", "embedding", "head"), kinds, rates):
        adam = lambda p, lr: torch.optim.Adam(p, lr, betas=(0.9, 0.95), eps=1e-10)
        optimizers.append((Muon if kind == "muon" else adam)(groups[name], rate))
    gen = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        batch = lesson.draw(text, T, 8, gen)
        model(batch[:, :-1], batch[:, 1:]).backward()
        if step == stop:
            return model
        for optimizer, rate in zip(optimizers, rates):
            optimizer.param_groups[0]["lr"] = rate * lr_at(step, steps, "wsd", warmup=10)
            optimizer.step()
            optimizer.zero_grad()
    return model


TABLES = (0.1, 0.01)  # Adam's rates for the embedding and the head
early = train(("adam", "adam", "adam"), (2e-3, *TABLES), seed=0, stop=30)
weights = {"up": early.blocks[1].mlp.up.weight, "q": early.blocks[0].attn.q.weight}
weights |= {"v": early.blocks[1].attn.v.weight, "down": early.blocks[0].mlp.down.weight}
rows = []
for name, weight in weights.items():
    s = torch.linalg.svdvals(weight.grad.double())
    share = s.square().cumsum(0) / s.square().sum()
    half = 1 + int((share < 0.9).sum())
    rows.append((name, *weight.shape, (s[0] / s.median()).item(), half))
columns = ["weight", "rows", "columns", "s1 / median", "hold 90%"]
lesson.table(columns, rows, "Singular values of gradients; how many hold 90% of the squares")
steep = all(row[3] > 50 for row in rows)
lesson.holds(steep, "s1 is over 50 times the median in all four gradients")
lesson.holds(all(row[4] <= 8 for row in rows), "8 of 64 directions hold 90% of each gradient")

# %% [markdown]
# ## Which step is best, if no input may move by more than 1?
# A step D changes the output of its layer by D x. Let no x of length 1 have its output moved by
# more than 1: then D has no singular value above 1. Under that rule, which D lowers the loss
# most? To first order D gains the sum of G x D over all entries, which is
# s1 (u1^T D v1) + s2 (u2^T D v2) + ...; each bracket is at most 1, so the gain is at most
# s1 + s2 + ..., and the one step that reaches it has all brackets 1: **U V^T, the gradient with
# every singular value set to 1.** Plain descent and Adam's first step (the sign of each entry),
# shrunk until they obey the rule, gain less.

# %%
G = weights["up"].grad.double()
U, S, Vt = torch.linalg.svd(G, full_matrices=False)
candidates = {"gradient": G, "sign (Adam, step 0)": G.sign(), "U V^T (Muon)": U @ Vt}
rows = []
for name, D in candidates.items():
    D = D / torch.linalg.matrix_norm(D, 2)
    s = torch.linalg.svdvals(D)
    rows.append((name, ((G * D).sum() / S.sum()).item(), s.median().item(), s[-1].item()))
columns = ["step", "gain of the most possible", "median s", "least s"]
lesson.table(columns, rows, "Steps that move no output by more than 1 (the largest s is 1)")
gain = [row[1] for row in rows]
lesson.holds(max(gain[:2]) < 0.6, "gradient and sign gain less than 60% of what is possible")
lesson.holds(abs(gain[2] - 1) < 1e-9, "U V^T gains all of it")

# %% [markdown]
# ## U V^T without an SVD
# An SVD is slow on a GPU; matrix products are what it does best. Take p(x) = a x + b x^3 + c x^5
# and put a matrix in: X -> a X + b X X^T X + c (X X^T)^2 X. As U and V are orthogonal, they meet
# and cancel inside each product, so **U and V stay and each singular value s becomes p(s)**. Now
# choose p so that repeating it takes every s above 0 and up to 1 towards 1. The classical p (Newton
# and Schulz) is 1.5 x - 0.5 x^3: it enlarges a small s by 1.5 only. Polar Express takes another p
# each time, the best for what the last one left. It does not end at 1 but near it, which is enough
# for a step. First with single numbers instead of matrices:


# %%
def p(x, coefficients: tuple):
    a, b, c = coefficients
    return a * x + b * x**3 + c * x**5


start = np.array([1.0, 0.1, 0.01, 0.001])
ways = {"classical": [(1.5, -0.5, 0.0)] * 5, "Polar Express": POLAR_EXPRESS}
rows = []
after = {}
for name, iterations in ways.items():
    x = start
    for i, coefficients in enumerate(iterations):
        x = p(x, coefficients)
        rows += [(name, i + 1, *x)] if i in (0, 2, 4) else []
    after[name] = x
columns = ["polynomial", "iterations", *(f"from {x:g}" for x in start)]
lesson.table(columns, rows, "What becomes of a singular value")
classic, express = after.values()
within = abs(express - 1).max() < 0.15
lesson.holds(within, "5 iterations bring 1, 0.1, 0.01 and 0.001 to 1, within 15%")
lesson.holds(classic[2] < 0.1, "5 iterations of the classical p leave 0.01 below 0.1")


# %%
def by_products(G: torch.Tensor) -> torch.Tensor:
    """U V^T of G (rows, columns), roughly: three products an iteration."""
    X = G.T if G.size(0) > G.size(1) else G  # X X^T is then the smaller square
    X = X / (1.01 * X.norm())  # the root of the sum of s^2 is at least s1: now no s is above 1
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


expected = S / (1.01 * S.norm())
for coefficients in POLAR_EXPRESS:
    expected = p(expected, coefficients)
found = torch.diag(U.T @ by_products(G) @ Vt.T)  # the singular values, where U and V put them
apart = (found - expected).abs().max().item()
lesson.holds(apart < 1e-8, f"the matrix has the values that the numbers have, within {apart:.0e}")
project = orthogonalize(G[None].float())[0]
apart = (by_products(G) - project).abs().max().item()
lesson.holds(apart < 1e-4, "the project's orthogonalize gives the same matrix in fp32, to 1e-4")

# %% [markdown]
# ## The whole step
# Muon is momentum, then U V^T, then the rate. Two details: a matrix with more rows than columns
# (more outputs than inputs) takes steps sqrt(rows / columns) longer, so that the *typical* output
# moves by the rate; and momentum, an average of the gradients so far, is Nesterov's: it counts the
# newest gradient once more. The project evens out the rows' sizes as well (NorMuon); beta2 = 1
# keeps it from learning them, which leaves plain Muon.


# %%
def muon_step(W, G, average, lr: float, momentum: float) -> None:
    average += (1 - momentum) * (G - average)
    ahead = G + momentum * (average - G)
    W -= lr * max(1, W.size(0) / W.size(1)) ** 0.5 * by_products(ahead)


gen = torch.Generator().manual_seed(0)
worst = []
for shape in ((64, 64), (256, 64), (64, 256)):
    mine = torch.randn(shape, generator=gen)
    theirs = torch.nn.Parameter(mine.clone())
    average = torch.zeros(shape)
    optimizer = Muon([theirs], lr=0.02, momentum=0.95, beta2=1.0)
    for _ in range(4):
        theirs.grad = torch.randn(shape, generator=gen)
        muon_step(mine, theirs.grad.clone(), average, 0.02, 0.95)
        optimizer.step()
    worst.append((mine - theirs).abs().max().item())
lesson.holds(max(worst) < 1e-5, "4 steps on 3 shapes: the project's Muon, within 1e-5")

# %% [markdown]
# ## Is it worth it?
# Only the optimizer of the matrices changes; the tables (embedding and head) keep Adam. Each gets
# its own best rate from a grid; then three seeds. Loss on held-out text after 100 steps.


# %%
def held_out_loss(kinds: tuple, rates: tuple, seed: int) -> float:
    model = train(kinds, rates, seed)
    with torch.no_grad():
        return model(probe[:, :-1], probe[:, 1:]).item()


grids = {"adam": (2.5e-4, 1e-3, 4e-3), "muon": (0.01, 0.08, 0.64)}
rows = []
best = {}
for kind, grid in grids.items():
    at = {lr: held_out_loss((kind, "adam", "adam"), (lr, *TABLES), 0) for lr in grid}
    best[kind] = min(at, key=at.get)
    rows.append((kind, *(f"{lr:g}: {loss:.3f}" for lr, loss in at.items())))
lesson.table(["matrices by", "low", "middle", "high"], rows, "Rate: held-out loss, nats, seed 0")
inside = all(best[kind] == grid[1] for kind, grid in grids.items())
lesson.holds(inside, "both best rates lie inside their grids")

recipes = {kind: ((kind, "adam", "adam"), (best[kind], *TABLES)) for kind in grids}
recipes["muon, embedding too"] = ("muon", "muon", "adam"), (best["muon"], *TABLES)
loss = {name: [held_out_loss(*r, seed) for seed in range(3)] for name, r in recipes.items()}
rows = [(name, *values, np.mean(values), np.std(values, ddof=1)) for name, values in loss.items()]
columns = ["matrices by", "seed 0", "seed 1", "seed 2", "mean", "sd"]
lesson.table(columns, rows, "Held-out loss, nats, at the best rates")
gain = np.array(loss["adam"]) - np.array(loss["muon"])
lesson.holds(gain.mean() > 2 * gain.std(ddof=1), "Muon's gain over Adam is above 2 sd of 3 seeds")
swap = np.array(loss["muon, embedding too"]) - np.array(loss["muon"])
little = abs(swap).max() < 0.5 * gain.mean()
lesson.holds(little, "Muon for the embedding too changes less than half of that")

# %% [markdown]
# In the mean of three seeds Muon comes to 2.187 nats (2.147 to 2.228 with three sets of seeds),
# Adam to 2.394 (2.330 to 2.426).
#
# ## Why not for tables
# The bound "no input of length 1 may move the output by more than 1" is about inputs that mix all
# directions. A table's input is one token: it picks one row, and no other row matters. With 256
# bytes, each in every batch, that makes little difference, as the last line shows. A real
# vocabulary has thousands of rows, few columns, and mostly rare tokens. U V^T of a matrix of width
# C has rows whose squared lengths add up to C, so most rows get little. Here: 4,096 tokens, of
# which the k-th comes with weight 1/k, each occurrence with a gradient of its own.

# %%
C = 64
occurrences = 8192
p_token = 1 / np.arange(1, 4097)
tokens = np.random.default_rng(0).choice(4096, occurrences, p=p_token / p_token.sum())
shared = torch.randn(4096, C, generator=gen)  # what a token's gradients have in common
each = shared[tokens] + torch.randn(occurrences, C, generator=gen)
table = torch.zeros(4096, C).index_add_(0, torch.from_numpy(tokens), each)
count = torch.from_numpy(np.bincount(tokens, minlength=4096))
steps = {"gradient": table, "Adam, step 0": table.sign(), "Muon": orthogonalize(table[None])[0]}
rows = []
for name, step in steps.items():
    length = step.norm(dim=1)
    once = length[count == 1].mean().item()
    often = length[count >= 100].mean().item()
    rows.append((name, often / length.max().item(), once / length.max().item(), often / once))
columns = ["step", "100 times or more", "once", "ratio"]
lesson.table(columns, rows, "Length of a token's row, by how often it came (longest row: 1)")
lesson.holds(rows[2][3] > 10, "Muon moves frequent rows over 10 times as far as rare ones")
lesson.holds(abs(rows[1][3] - 1) < 1e-5, "Adam moves rare and frequent rows alike")

# %%
fig = lesson.figure(6, 3.2)
ax = fig.subplots()
for name, D in candidates.items():
    ax.plot(range(1, 65), torch.linalg.svdvals(D) / torch.linalg.matrix_norm(D, 2), label=name)
ax.set(yscale="log", xlabel="number of the singular value", title="a step's singular values")
ax.legend()
lesson.save(fig, "12_muon")

# %% [markdown]
# ## Trap
# U V^T has no size: a gradient a million times smaller takes the same step. So Muon must not see a
# gradient that is only rounding noise, and a rate tuned for Adam means nothing to it: Muon's rate
# is the distance by which an output moves, relative to its input.
#
# ## Exercise
# `exercises/ex12.py`: U V^T by products, and Muon's step, which your trainer takes with it.
# `python course/check.py 12`
