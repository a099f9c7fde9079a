# %% [markdown]
# # 12. Muon by hand: a step that is equally long in every direction
#
# **Afterwards** you can write Muon's step with nothing but matrix products, and say what it does to
# a gradient and which weights should not get it.
#
# **Question.** What does Muon do to a gradient that Adam does not?
#
# Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024); Bernstein
# and Newhouse, Old Optimizer, New Norm (2024); Amsel et al., The Polar Express (2025).
# Core file: `optim.py`, `orthogonalize` and `Muon`. Before: lessons 11 and 17.
# Next: lesson 13. Takes 45 seconds on two cores.

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
# Multiply every vector of length 1 by a matrix G, and their circle becomes an ellipse: G stretches
# some directions more than others. The **singular value decomposition (SVD)** of G writes this
# down: G = U S V^T. The columns of V are the inputs that become the axes of the ellipse. S holds
# the lengths of these half axes, s1 >= s2 >= ..., which are called the **singular values**. The
# columns of U are the directions of the axes. In U as in V, all columns have length 1 and are at
# right angles to each other. In short: G takes v1 to s1 u1, v2 to s2 u2, and so on.
#
# **Muon replaces every singular value by 1: its step is U V^T instead of G.** The ellipse becomes a
# circle again. It is turned the way G turns it, but no direction is longer than another:

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
lesson.table(["matrix", "length of v1", "length of v2"], lengths, "what v1 and v2 become")
lesson.holds(abs(lengths[1][1] - S[0]) < 1e-9, "G makes v1 s1 times as long")
lesson.holds(
    abs(np.array(lengths[2][1:]) - 1).max() < 1e-9, "U V^T leaves both as long as they were"
)

# %% [markdown]
# ## A real gradient is a thin ellipse
# How different are the singular values of a real gradient? Train a byte model (2 layers, width 64,
# 512 bytes of Python per step) and look at its gradients before step 30.

# %%
T = 64
TABLES = (0.1, 0.01)  # Adam's rates for the embedding and the head
text = torch.from_numpy(lesson.bytes_of_stdlib(2_000_000))
held_out, text = text[-200_000:], text[:-200_000]
probe = lesson.draw(held_out, T, 256, torch.Generator().manual_seed(99))


def train(kind: str, lr: float, seed: int, steps: int = 100, stop: int = -1) -> GPT:
    """kind, lr: of the matrices. stop: return the model before this step, with its gradients."""
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
            for group in optimizer.param_groups:  # Muon has one for each shape
                group["lr"] = rate * lr_at(step, steps, "wsd", warmup=10)
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
lesson.holds(
    all(row[1] > 20 for row in rows), "in all four gradients s1 is over 20 times the median"
)
lesson.holds(all(row[2] <= 12 for row in rows), "at most 12 of 64 directions hold 90% of each")

# %% [markdown]
# ## Which step is best, if no output may move by more than 1?
# Subtract a step D from the weights, and the layer's output moves by D x. Say that for every x of
# length 1 it may move by 1 at most: then no singular value of D is above 1. Which D lowers the loss
# most? If D is small, the loss falls by G times D, entry by entry, all added up (an entry of G says
# how much its weight counts): this is the **gain** of D. Now write G as s1 u1 v1^T + s2 u2 v2^T
# and so on. The entries of u1 v1^T times those of D add up to u1^T D v1, so
#
#     gain = s1 (u1^T D v1) + s2 (u2^T D v2) + ...
#
# D v1 has length 1 at most, so no bracket can be more than 1, and no step gains more than
# s1 + s2 + ... The step that makes every bracket 1 is **U V^T**. Compare it with plain descent (the
# gradient) and with Adam's first step (the sign of each entry), both shrunk until they obey the
# rule:

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
# With eleven seeds, the gradient gained 39% to 48% of it, and the sign 26% to 40%.
#
# ## U V^T without an SVD
# An SVD is slow on a GPU; what a GPU does best is matrix products. Take p(x) = a x + b x^3 + c x^5
# and put a matrix into it: X -> a X + b X X^T X + c (X X^T)^2 X. The columns of U have length 1 and
# are at right angles, so U^T U is the identity, and V^T V too. Inside each product they cancel:
#
#     X X^T X = (U S V^T) (V S U^T) (U S V^T) = U S^3 V^T, and likewise (X X^T)^2 X = U S^5 V^T
#
# **U and V stay, and each singular value s becomes p(s).** Now choose p so that repeating it pulls
# every s between 0 and 1 towards 1. The method used here, **Polar Express**, takes a different p
# each time, the best one for what the last one left. It ends near 1 rather than at 1, which is good
# enough for a step. First try it on single numbers instead of matrices:

# %%
x = start = np.array([1.0, 0.1, 0.01, 0.001])
rows = []
for i, (a, b, c) in enumerate(POLAR_EXPRESS):
    x = a * x + b * x**3 + c * x**5
    rows.append((i + 1, *x))
lesson.table(["iterations", *(f"from {s:g}" for s in start)], rows, "What s becomes")
lesson.holds(abs(x - 1).max() < 0.15, "5 iterations bring 1, 0.1, 0.01 and 0.001 to 1, within 15%")


# %%
def by_products(G: torch.Tensor) -> torch.Tensor:
    """U V^T of G (rows, columns), roughly: three products an iteration."""
    X = G.T if G.size(0) > G.size(1) else G  # so X X^T is the smaller of the two squares
    X = X / (1.01 * X.norm())  # the norm is the root of the sum of all s^2: now no s is above 1
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


apart = (by_products(G) - orthogonalize(G[None].float())[0]).abs().max().item()
lesson.holds(apart < 1e-4, "the project's orthogonalize gives the same matrix in fp32, to 1e-4")

# %% [markdown]
# ## The whole step
# Muon is momentum, then U V^T, then the rate. **Momentum** is an average of the gradients so
# far: at each step it moves, say, 5% of the way to the newest gradient. Muon uses Nesterov's
# kind: it starts at the newest gradient and goes 95% of the way to that average, so the newest one
# counts once more.
#
# And a matrix with more rows than columns (more outputs than inputs) takes a longer step. Take an
# input whose numbers are about 1 in size: its length is sqrt(columns). U V^T keeps this length, but
# spreads it over more numbers, so each output moves by about sqrt(columns / rows). A step
# sqrt(rows / columns) times as long makes it 1 again, times the rate. (With fewer rows than columns
# it is about 1 already.) You write this step in the exercise. The project's Muon also evens out the
# sizes of the rows, an addition called NorMuon.
#
# ## Is it worth it?
# Change only the optimizer of the matrices; the tables (the embedding, and the head, which also has
# a row for each token) keep Adam. Give each optimizer three rates, far apart, and three seeds. The
# loss on held-out text after 100 steps:

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
lesson.holds(better, "each at its best rate, Muon wins with every seed, by over 0.05 nats")

# %% [markdown]
# Averaged over three seeds, Muon comes to 2.214 nats (2.154 to 2.248 with four sets of seeds), and
# Adam to 2.394 (2.330 to 2.426).
#
# ## Why not for tables
# The bound of 1 on how far an output may move is about inputs that mix all directions. The input of
# a table is one token: it picks one row, and no other row matters. A vocabulary has thousands of
# rows, few columns, and mostly rare tokens. The columns of U V^T have length 1, so with width C the
# squared lengths of all rows add up to C. Thousands of rows have to share that, and the frequent
# tokens, whose gradients are long, get most of it. Adam's first step moves rare and frequent rows
# alike. So the embedding and the head keep Adam.
#
# ## Trap
# U V^T forgets how large the gradient was: make the gradient a million times smaller, and Muon
# takes the same step. So never give it a gradient that is only rounding noise. And a rate tuned for
# Adam means nothing to it: Muon's rate says how far an output moves, relative to its input.
#
# ## Exercise
# `exercises/ex12.py`: U V^T from matrix products, and the step of Muon, which your trainer then
# takes. `python course/check.py 12`
