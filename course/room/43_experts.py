# %% [markdown]
# # 43. Experts: a cut that the data decides
#
# **Question.** A mixture of experts has many MLPs, which lie on several ranks, and a router that
# sends each token to two of them. What travels, and what is lost when many tokens want the same?
#
# **Afterwards** you can send tokens to experts and back with all-to-all exchanges, count what they
# cost, and keep the load even.
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Expert". Core file:
# `model.py`, `MLP` (what an expert is). Before: lesson 30. Next: lesson 31.
# Takes 15 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import torch
import torch.distributed as dist
import torch.nn.functional as F

E = 8  # experts
TOP = 2  # experts per token
C = 16  # channels
TOKENS = 512
lesson.begin(43, "experts")
torch.set_num_threads(1)

# %% [markdown]
# ## A router
# For each token the router gives every expert a score (one matrix product). The two experts with
# the largest scores compute the token, and their outputs are added, weighted by a softmax over the
# two scores: the *gates*. So a model has the weights of eight MLPs and pays for two.


# %%
def gates(scores):
    """(tokens, E) -> weights of the TOP experts of each token, 0 for the others."""
    best = scores.topk(TOP, 1)
    return torch.zeros_like(scores).scatter(1, best.indices, best.values.softmax(1))


def expert(x, w1, w2):
    return F.relu(x @ w1) @ w2


# %% [markdown]
# ## There and back
# With the experts on several ranks, a token's copies travel to its experts, and the results back.
# Each rank sends every other rank another number of rows: an *all-to-all*. The counts go first, so
# that the receiver knows how much will come.


# %%
def all_to_all(x, counts, arriving):
    y = x.new_empty(sum(arriving), *x.shape[1:])
    dist.all_to_all_single(y, x, arriving, counts)
    return y


def experts_on_ranks(x, g, w1, w2, rank, world):
    """x (t, C) and gates g (t, E) of this rank's tokens; w1, w2 of its own experts are used."""
    e, t = g.T.nonzero(as_tuple=True)  # a copy of token t for expert e, sorted by expert
    here = E // world  # experts on a rank
    counts = (e // here).bincount(minlength=world)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    counts, arriving = counts.tolist(), arriving.tolist()
    guests = all_to_all(x[t], counts, arriving)
    wants = all_to_all(e, counts, arriving)
    done = torch.zeros_like(guests)
    for i in range(rank * here, (rank + 1) * here):
        done[wants == i] = expert(guests[wants == i], w1[i], w2[i])
    back = all_to_all(done, arriving, counts)
    y = torch.zeros_like(x).index_add(0, t, g[t, e, None] * back)
    return y, (sum(counts) - counts[rank] + sum(arriving) - arriving[rank]) * 4 * C  # sent


def routings():
    """-> tokens, weights, scores by name."""
    r = torch.Generator().manual_seed(0)
    x, w1, w2 = (torch.randn(*s, C, generator=r) for s in ((TOKENS,), (E, C), (E, C)))
    router = torch.randn(C, E, generator=r) / C**0.5
    t = torch.arange(TOKENS)[:, None]
    even = -((torch.arange(E) - t) % E).float()  # token t goes to experts t and t + 1, modulo E
    return x, w1, w2, {"even": even, "random": x @ router, "skewed": (x + 0.5) @ router}


def both(rank, world):
    x, w1, w2, scores = routings()
    out = {}
    mine = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    for name, s in scores.items():
        g = gates(s)
        dense = sum(g[:, e, None] * expert(x, w1[e], w2[e]) for e in range(E))
        y, sent = experts_on_ranks(x[mine], g[mine], w1, w2, rank, world)
        out[name] = ((y - dense[mine]).norm() / dense[mine].norm()).item(), sent
    return out


first, second = lesson.ranks(2, both, timeout_s=150)
rows = []
for name, scores in routings()[3].items():
    load = (gates(scores) > 0).sum(0).double()
    dropped = [100 * (load - c * load.mean()).clamp(0).sum() / load.sum() for c in (1, 1.25)]
    errors, sent = zip(first[name], second[name])
    busy = (load.max() / load.mean()).item()
    rows.append((name, max(errors), sum(sent), busy, *(x.item() for x in dropped)))
columns = ["routing", "error", "bytes", "busiest / mean", "dropped % at 1", "at 1.25"]
lesson.table(columns, rows, f"top {TOP} of {E} experts on 2 ranks, {TOKENS} tokens")
off = max(row[1] for row in rows)
lesson.holds(off < 1e-5, "experts on two ranks compute what one rank computes")
half = 2 * TOP * TOKENS * C * 4 // 2
lesson.holds(rows[0][2] == half, "even routing: 2 x copies x C x 4 bytes x (N - 1) / N")
lesson.holds(rows[0][3:] == (1, 0, 0), "even routing: no expert has more than the mean")
lesson.holds(rows[2][3] > 1.3, "skewed tokens: the busiest expert has over 1.3 times the mean")

# %% [markdown]
# ## Room for so many
# All ranks wait for the busiest expert, and its memory must hold all that comes. So an expert gets
# room for `capacity` times the mean load, and copies beyond it are *dropped*: for that token, the
# expert's part of the sum is missing, and nobody says so.
#
# Nothing keeps a router even: experts that get more tokens learn faster, and so get more. Two
# remedies. A *balancing loss* (Fedus et al. 2021) adds E times the sum over the experts of (share
# of the copies) x (mean probability), which is least when all are equal; it pulls at the router's
# weights against the task. A *bias* on the scores (DeepSeek-V3, 2024) is raised a little for each
# expert below the mean and lowered above it; it decides who computes, and stays out of the gates.
#
# The tokens here are of 32 kinds, some far more frequent than others, like words.


# %%
def run(balance, seed, steps=400):
    """Train 8 experts -> shares of the copies by step (steps, E), error at capacity None, 1.25."""
    r = torch.Generator().manual_seed(100 + seed)
    randn = lambda *shape, by=1: torch.randn(*shape, generator=r) / by**0.5
    centers = randn(32, C)
    maps = randn(32, C, C, by=C)
    often = 1 / torch.arange(1, 33).float()  # Zipf's law
    w1 = randn(E, C, 32, by=C)
    w2 = randn(E, 32, C, by=32)
    router = randn(C, E, by=C)
    optimizer = torch.optim.Adam([w.requires_grad_() for w in (w1, w2, router)], lr=1e-2)
    bias = torch.zeros(E)
    shares = []

    def step(capacity=None):
        kind = torch.multinomial(often, TOKENS, True, generator=r)
        x = centers[kind] + 0.3 * randn(TOKENS, C)
        scores = x @ router
        chosen = gates(scores.detach() + bias) > 0
        g = scores.masked_fill(~chosen, -torch.inf).softmax(1)
        if capacity:  # first come, first served
            g = g * (chosen.cumsum(0) <= capacity * TOP * TOKENS / E)
        y = torch.einsum("ne,end->nd", g, expert(x, w1, w2))
        error = (y - torch.einsum("nc,ncd->nd", x, maps[kind])).square().mean()
        return error, chosen.float().mean(0) / TOP, scores.softmax(1).mean(0)

    for _ in range(steps):
        error, share, probability = step()
        loss = error + (0.05 * E * (share * probability).sum() if balance == "loss" else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if balance == "bias":
            bias += 0.02 * (1 / E - share).sign()
        shares.append(share)
    with torch.no_grad():
        errors = [sum(step(c)[0].item() for _ in range(20)) / 20 for c in (None, 1.25)]
    return torch.stack(shares), errors


rows = []
curves = {}
for balance in ("nothing", "loss", "bias"):
    runs = [run(balance, seed) for seed in range(3)]
    curves[balance] = runs[2][0]
    late = torch.stack([shares[-50:].mean(0) for shares, _ in runs])  # (3, E)
    busy = (late.max(1).values * E).tolist()
    drop = 100 * (late - 1.25 / E).clamp(0).sum(1).mean().item()
    errors = [sum(e[i] for _, e in runs) / 3 for i in (0, 1)]
    rows.append((balance, *busy, drop, *errors))
columns = ["balanced by", *(f"seed {s}" for s in range(3)), "dropped %", "error", "with drops"]
lesson.table(columns, rows, "busiest expert / mean for three seeds; drops at capacity 1.25")
nothing, loss, bias = rows
lesson.holds(min(nothing[1:4]) > 1.3, "left alone, the busiest expert has over 1.3 times the mean")
lesson.holds(max(bias[1:4]) < 1.15, "with a bias, the busiest has less than 1.15 times the mean")
less = loss[4] < nothing[4] / 2 and bias[4] < 0.1
lesson.holds(less, "both remedies drop less than half as much")
lesson.holds(nothing[6] > 1.5 * nothing[5], "dropped copies: over 1.5 times the error, left alone")

# %%
fig = lesson.figure(8, 3)
for ax, (balance, shares) in zip(fig.subplots(1, 3, sharey=True), curves.items()):
    ax.stackplot(range(5, 400, 10), 100 * shares.view(40, 10, E).mean(1).T, lw=0)
    for line in range(1, 8):
        ax.axhline(100 * line / E, color="white", lw=0.5, ls=":")
    ax.set(title=f"balanced by {balance}", xlabel="step", ylim=(0, 100), xlim=(5, 395))
fig.axes[0].set_ylabel("% of the copies, by expert")
lesson.save(fig, "43_experts")

# %% [markdown]
# ## Trap
# A drop depends on who else is in the batch: the same token is computed by two experts here, and by
# one there. So a model with a capacity gives other answers when its batches are composed
# differently, and evaluation, one document at a time, does not see the drops that training had.
#
# ## Exercise
# `exercises/ex43.py`: places in the experts' buffers, and who is dropped.
# `python course/check.py 43`
