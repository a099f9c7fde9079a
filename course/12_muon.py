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
# Core file: `optim.py`, `orthogonalize` and `Muon`. Before: lesson 11. Next: lesson 13.
# Takes 45 seconds on two cores.

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
# ## A picture first: circle, ellipse, circle
# Multiply every vector of length 1 by a matrix G, and the circle of these vectors becomes an
# ellipse: G stretches some directions more than others. The **singular value decomposition (SVD)**
# of G writes this down: G = U S V^T, where the columns of V are the inputs that become the axes of
# the ellipse, S has the lengths of these half axes, s1 >= s2 >= ... (the *singular values*), and
# the columns of U are their directions. Both the columns of U and those of V have length 1 and are
# at right angles to each other. In short: G takes v1 to s1 u1, v2 to s2 u2, and so on.
#
# **Muon puts a 1 in the place of every singular value: it takes the step U V^T and not G.** The
# ellipse is a circle again. It is turned as G turns it, but no direction is longer than another:

# %%
G = np.array([[0.9, -0.1], [1.4, 0.7]])
U, S, Vt = np.linalg.svd(G)
angle = np.linspace(0, 2 * np.pi, 100)
circle = np.stack([np.cos(angle), np.sin(angle)])  # (2, 100)
pictures = {"inputs": np.eye(2), "G: a gradient": G, "U V^T: Muon's step": U @ Vt}
fig = lesson.figure(8, 3)
lengths = []
for ax, (name, M) in zip(fig.subplots(1, 3), pictures.items()):
    ax.plot(*(M @ circle), color="silver")
    for v, color, label in zip(Vt, ("crimson", "tab:blue"), ("v1", "v2")):
        ax.quiver(*(M @ v), color=color, angles="xy", scale_units="xy", scale=1, label=label)
    ax.legend(loc="upper left")
    lengths.append((name, *np.linalg.norm(M @ Vt.T, axis=0)))
    ax.set(title=name, aspect="equal", xlim=(-2, 2), ylim=(-2, 2))
lesson.save(fig, "12_muon")
lesson.table(["matrix", "length of v1", "length of v2"], lengths, "what becomes of v1 and v2")
lesson.holds(abs(lengths[1][1] - S[0]) < 1e-9, "G makes v1 s1 times as long")
kept = abs(np.array(lengths[2][1:]) - 1).max()
lesson.holds(kept < 1e-9, "U V^T leaves both as long as they were")

# %% [markdown]
# ## A real gradient is a thin ellipse
# How different are the s of a real gradient? We train a byte model (2 layers, width 64, 512 bytes
# of Python a step) and look at its gradients before step 30.

# %%
T = 64
TABLES = (0.1, 0.01)  # Adam's rates for the embedding and the head
text = torch.from_numpy(lesson.bytes_of_stdlib(2_000_000))
held_out, text = text[-200_000:], text[:-200_000]
probe = lesson.draw(held_out, T, 256, torch.Generator().manual_seed(99))


def train(kind: str, lr: float, seed: int, steps: int = 100, stop: int = -1) -> GPT:
    """kind, lr: of the matrices. stop: leave that step's gradients in the model and return it."""
    torch.manual_seed(seed)
    shape = dict(n_layer=2, n_embd=64, n_head=2, n_kv_head=2, head_dim=32, mlp_hidden=256)
    model = GPT(GPTConfig(seq_len=T, vocab_size=256, **shape))
    model.init_weights()
    optimizers = []
    for name, rate in zip(("matrix", "embedding", "head"), (lr, *TABLES)):
        weights = model.param_groups()[name]
        if name == "matrix" and kind == "muon":
            optimizer = Muon(weights, rate)
        else:
            optimizer = torch.optim.Adam(weights, rate, betas=(0.9, 0.95), eps=1e-10)
        optimizers.append((optimizer, rate))
    gen = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        batch = lesson.draw(text, T, 8, gen)
        model(batch[:, :-1], batch[:, 1:]).backward()
        if step == stop:
            return model
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = rate * lr_at(step, steps, "wsd", warmup=10)
            optimizer.step()
            optimizer.zero_grad()
    return model


early = train("adam", 2e-3, seed=0, stop=30)
first, second = early.blocks
weights = dict(up=second.mlp.up, q=first.attn.q, v=second.attn.v, down=first.mlp.down)
rows = []
for name, layer in weights.items():
    s = torch.linalg.svdvals(layer.weight.grad.double())
    share = s.square().cumsum(0) / s.square().sum()
    rows.append((name, (s[0] / s.median()).item(), 1 + int((share < 0.9).sum())))
columns = ["weight", "s1 / median", "hold 90%"]
lesson.table(columns, rows, "Singular values of gradients; how many hold 90% of their squares")
thin = all(row[1] > 20 for row in rows)
lesson.holds(thin, "in all four gradients s1 is over 20 times the median")
lesson.holds(all(row[2] <= 12 for row in rows), "at most 12 of 64 directions hold 90% of each")

# %% [markdown]
# ## Which step is best, if no input may move by more than 1?
# A step D changes the output of its layer by D x. Let no x of length 1 have its output moved by
# more than 1: then D has no singular value above 1. Which D lowers the loss most? For a small step,
# what D gains is the sum of G times D over all entries, and that is s1 (u1^T D v1) +
# s2 (u2^T D v2) + ... Each bracket is at most 1, so the gain is at most s1 + s2 + ..., and the step
# with all brackets 1 is **U V^T**. Compare plain descent (the gradient) and Adam's first step (the
# sign of each entry), both shrunk until they obey the rule:

# %%
G = weights["up"].weight.grad.double()
U, S, Vt = torch.linalg.svd(G, full_matrices=False)
rows = []
for name, D in {"gradient": G, "sign (Adam, step 0)": G.sign(), "U V^T (Muon)": U @ Vt}.items():
    D = D / torch.linalg.matrix_norm(D, 2)
    rows.append((name, ((G * D).sum() / S.sum()).item(), torch.linalg.svdvals(D).median().item()))
columns = ["step", "share of the largest gain", "median s"]
lesson.table(columns, rows, "Steps that move no output by more than 1 (the largest s is 1)")
lesson.holds(max(rows[0][1], rows[1][1]) < 0.8, "gradient and sign gain less than 80% of it")
lesson.holds(abs(rows[2][1] - 1) < 1e-9, "U V^T gains all of it")

# %% [markdown]
# With eleven seeds the gradient gained 39% to 48% of it, the sign 26% to 40%.
#
# ## U V^T without an SVD
# An SVD is slow on a GPU; matrix products are what it does best. Take p(x) = a x + b x^3 + c x^5
# and put a matrix in: X -> a X + b X X^T X + c (X X^T)^2 X. As the columns of U and of V are at
# right angles, they cancel inside each product, so **U and V stay and each singular value s becomes
# p(s)**. Now choose p so that repeating it takes every s above 0 and up to 1 towards 1. Polar
# Express takes another p each time, the best for what the last one left. It does not end at 1 but
# near it, which is enough for a step. First with single numbers instead of matrices:

# %%
x = start = np.array([1.0, 0.1, 0.01, 0.001])
rows = []
for i, (a, b, c) in enumerate(POLAR_EXPRESS):
    x = a * x + b * x**3 + c * x**5
    rows.append((i + 1, *x))
lesson.table(["iterations", *(f"from {s:g}" for s in start)], rows, "What becomes of s")
within = abs(x - 1).max() < 0.15
lesson.holds(within, "5 iterations bring 1, 0.1, 0.01 and 0.001 to 1, within 15%")


# %%
def by_products(G: torch.Tensor) -> torch.Tensor:
    """U V^T of G (rows, columns), roughly: three products an iteration."""
    X = G.T if G.size(0) > G.size(1) else G  # X X^T is then the smaller square
    X = X / (1.01 * X.norm())  # this norm is the root of the sum of all s^2: now no s is above 1
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


apart = (by_products(G) - orthogonalize(G[None].float())[0]).abs().max().item()
lesson.holds(apart < 1e-4, "the project's orthogonalize gives the same matrix in fp32, to 1e-4")

# %% [markdown]
# ## The whole step
# Muon is momentum, then U V^T, then the rate. **Momentum** is an average of the gradients so far:
# each step it moves towards the newest one by a share, say 5%. Muon's is Nesterov's, which counts
# the newest gradient once more. And a matrix with more rows than columns (more outputs than inputs)
# takes steps sqrt(rows / columns) longer, so that the *typical* output moves by the rate. You write
# this step in the exercise. The project's Muon evens out the rows' sizes as well (NorMuon).
#
# ## Is it worth it?
# Only the optimizer of the matrices changes; the tables (embedding and head) keep Adam. Each gets
# three rates, far apart, and three seeds. Loss on held-out text after 100 steps:

# %%
grids = {"adam": (2.5e-4, 1e-3, 4e-3), "muon": (0.01, 0.08, 0.64)}
rows = []
for kind, grid in grids.items():
    for lr in grid:
        loss = []
        for seed in range(3):
            model = train(kind, lr, seed)
            with torch.no_grad():
                loss.append(model(probe[:, :-1], probe[:, 1:]).item())
        rows.append((kind, lr, *loss, np.mean(loss), np.std(loss, ddof=1)))
columns = ["matrices by", "rate", "seed 0", "seed 1", "seed 2", "mean", "sd"]
lesson.table(columns, rows, "Held-out loss, nats")
adam, muon = (min(rows[i : i + 3], key=lambda row: row[5]) for i in (0, 3))
print(f"at the best rate, in the mean: Adam {adam[5]:.3f}, Muon {muon[5]:.3f} nats")
better = all(b < a - 0.05 for a, b in zip(adam[2:5], muon[2:5]))
lesson.holds(better, "each at its best rate, Muon is better with every seed, by over 0.05 nats")

# %% [markdown]
# In the mean of three seeds Muon comes to 2.187 nats (2.147 to 2.228 with four sets of seeds),
# Adam to 2.394 (2.330 to 2.426).
#
# ## Why not for tables
# The bound "no input of length 1 may move the output by more than 1" is about inputs that mix all
# directions. A table's input is one token: it picks one row, and no other row matters. A vocabulary
# has thousands of rows, few columns, and mostly rare tokens. The columns of U V^T have length 1, so
# with width C the squared lengths of all rows add up to C: there is not enough for thousands of
# rows, and the frequent tokens, whose gradients are long, get most of it. Adam's first step moves
# rare and frequent rows alike. So embedding and head keep Adam.
#
# ## Trap
# U V^T has no size: a gradient a million times smaller takes the same step. So Muon must not see a
# gradient that is only rounding noise, and a rate tuned for Adam means nothing to it: Muon's rate
# is the distance by which an output moves, relative to its input.
#
# ## Exercise
# `exercises/ex12.py`: U V^T by products, and Muon's step, which your trainer takes with it.
# `python course/check.py 12`
