# %% [markdown]
# # 29. A layer on many devices: cutting matrices, and experts
#
# **Question.** You can cut a layer's matrices along their columns or along their rows. Which cut
# needs which exchange? And if each device holds whole MLPs of its own and the tokens travel to
# them, what do you lose when many tokens want the same one?
#
# **Afterwards** you can cut a transformer layer over several ranks with two exchanges in the
# forward pass, send tokens to experts and back, and say what keeps the experts evenly busy.
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Tensor (TP) Nos Blocos do
# Transformers", "Paralelismo de Sequência", "Paralelismo de Expert". Core file: `model.py`,
# `Block`, `MLP` (what an expert is). Before: lesson 28. Next: lesson 30.
# Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import torch
import torch.distributed as dist
import torch.nn.functional as F

from config import GPTConfig
from model import Block, Context, attend, rms_norm

SHAPE = dict(n_layer=1, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, mlp_hidden=64)
CONFIG = GPTConfig(**SHAPE, mlp="swiglu", nope_every=1, qk_norm=False)
E = 8  # experts
TOP = 2  # experts per token
C = 16  # channels of a token
TOKENS = 512
lesson.begin(29, "a layer on many devices")
torch.set_num_threads(1)

# %% [markdown]
# ## Two matrices, four ways
# Take the two matrices of an MLP: y = f(x A) B. A turns C channels into 4 C hidden ones, f works on
# each number by itself, and B turns them back into C. Cut A by *columns*, and each rank computes
# some of the hidden channels completely. Cut it by *rows*, and each rank reads only some channels
# of x, and gets a part of every sum. Here are four ranks, without processes for now: a list holds
# what each rank has, `joined` stands for an all-gather, `summed` for an all-reduce, and both count
# the bytes that one rank sends in a ring.

# %%
N = 4
sent = []
torch.manual_seed(0)
x = torch.randn(16, 32)
A = torch.randn(32, 128)
B = torch.randn(128, 32)
f = lambda h: h.relu().square()  # the one in model.py


def joined(parts):
    sent.append(parts[0].nbytes * (N - 1))
    return torch.cat(parts, 1)


def summed(parts):
    sent.append(2 * parts[0].nbytes * (N - 1) // N)
    return torch.stack(parts).sum(0)


channels = [x @ a for a in A.chunk(N, 1)]  # A cut by columns: some of the channels on each rank
partial = [c @ a for c, a in zip(x.chunk(N, 1), A.chunk(N))]  # by rows: a part of every sum


def pair(one, two):
    """y, with A cut in the way `one` and B in the way `two`."""
    if one == "rows":
        hidden = f(summed(partial))
    elif two == "columns":
        hidden = f(joined(channels))
    else:  # no exchange: each rank already has the channels that its rows of B multiply
        hidden = f(torch.cat(channels, 1))
    if two == "columns":
        return joined([hidden @ b for b in B.chunk(N, 1)])
    return summed([h @ b for h, b in zip(hidden.chunk(N, 1), B.chunk(N))])


def off(y, want):
    return ((y - want).norm() / want.norm()).item()


rows = []
want = f(x @ A) @ B
for one in ("columns", "rows"):
    for two in ("rows", "columns"):
        sent.clear()
        y = pair(one, two)
        rows.append((one, two, len(sent), sum(sent), off(y, want)))
columns = ["A cut by", "B cut by", "exchanges", "bytes", "relative error"]
lesson.table(columns, rows, "y = f(x A) B on four ranks, forward")
lesson.holds(max(row[4] for row in rows) < 1e-5, "all four cuts compute the same y")
lesson.holds(rows[0][2] == 1, "columns, then rows: one exchange, an all-reduce as large as x")
less = min(row[3] for row in rows[1:]) > 2 * rows[0][3]
lesson.holds(less, "the other three send more than twice as much")
early = summed([f(part) for part in partial]) @ B
lesson.holds(off(early, want) > 0.1, "f of each part, summed, is not f of the sum")

# %% [markdown]
# ## A whole layer
# So you cut the first matrix of each pair by columns (hidden channels, or whole heads with their
# queries, keys and values) and the second by rows, and one all-reduce completes the sums. In the
# backward pass the roles swap: the gradient of the pair's input is a sum over the ranks, so the
# all-reduce happens at the entrance.
#
# This is *tensor parallelism* (TP). Between the pairs, every rank repeats the norms. *Sequence
# parallelism* (SP) gives each rank a share of the positions there instead. A pair's entrance then
# gathers them (all-gather), and its exit sums and keeps one share (reduce-scatter): twice as many
# exchanges, but the same bytes, because these two are the halves of an all-reduce.
#
# **How far can you go?** You cannot cut a head, so the number of ranks must divide both the number
# of query heads and that of key/value heads. And the exchanges cannot hide behind other work,
# because the next matrix waits for them. Take a layer of width 8,192 (12 x 8,192^2 weights) and
# 4,096 tokens, and assume 400 TFLOP/s on a GPU, 450 GB/s between the 8 GPUs of a machine, and
# 50 GB/s beyond it. Cut over 8 GPUs, the layer's matrices take 6.2 ms of a step, and its exchanges
# in bf16 1.0 ms. Cut over 16, in two machines, they take 3.1 and 10.1 ms. That is why such a cut
# stops at the edge of a machine.


# %%
LOG = []  # the bytes that this rank sends in each exchange, in a ring


def all_reduce(x):
    world = dist.get_world_size()
    LOG.append(2 * x.nbytes * (world - 1) // world)
    y = x.clone()
    dist.all_reduce(y)
    return y


# an all-reduce: at the exit of a pair in the forward pass, at its entrance in the backward pass
class Border(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, entrance):
        ctx.entrance = entrance
        return x.view_as(x) if entrance else all_reduce(x)

    @staticmethod
    def backward(ctx, g):
        return all_reduce(g) if ctx.entrance else g, None


# one layer, with this rank's share of the matrices: x (B, T, C) -> the same shape
def block(x, w):
    h = Border.apply(rms_norm(x), True)
    q, k, v = (F.linear(h, w[n]).unflatten(2, (-1, CONFIG.head_dim)) for n in "qkv")
    y = attend(*(t.transpose(1, 2) for t in (q, k, v)), None)  # (B, H / N, T, D)
    x = x + Border.apply(F.linear(y.transpose(1, 2).flatten(2), w["out"]), False)
    h = Border.apply(rms_norm(x), True)
    hidden = F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"])  # (B, T, mlp_hidden / N)
    return x + Border.apply(F.linear(hidden, w["down"]), False)


# -> largest distance from the project's own Block, bytes of each exchange, number of them forward
def cut_layer(rank, world):
    torch.manual_seed(0)
    whole = Block(CONFIG, 0)
    a = torch.randn(4, 16, 32, requires_grad=True)  # (B, T, C)
    b = a.detach().clone().requires_grad_()
    want = whole(a, None, Context(*[None] * 5))  # no rotation, no mask, no cache
    want.square().sum().backward()
    split = {name.split(".")[-2]: p for name, p in whole.named_parameters()}
    part = lambda name, p: p.chunk(world, 1 if name in ("out", "down") else 0)[rank]
    w = {name: part(name, p.detach()).clone().requires_grad_() for name, p in split.items()}
    y = block(b, w)
    forward = len(LOG)
    y.square().sum().backward()
    pairs = [(w[name].grad, part(name, p.grad)) for name, p in split.items()]
    pairs += [(y, want), (b.grad, a.grad)]
    return max(off(s, t) for s, t in pairs), LOG, forward


# %% [markdown]
# ## Experts
# A *mixture of experts* puts many MLPs in the place of one. For each token, a router gives every
# expert a score (one matrix product). The two experts with the largest scores process the token,
# and their outputs are added, weighted by a softmax over the two scores: the *gates*. The model has
# the weights of eight MLPs and pays for two.
#
# When the experts are spread over several ranks, copies of a token travel to its experts, and the
# results travel back. Each rank has a different number of rows for every other: an *all-to-all*.
# The counts go first, so that the receiver knows how many rows will come.


# %%
def gates(scores):
    """(tokens, E) -> weights of the TOP experts of each token, 0 for the others."""
    best = scores.topk(TOP, 1)
    return torch.zeros_like(scores).scatter(1, best.indices, best.values.softmax(1))


def expert(x, w1, w2):
    return F.relu(x @ w1) @ w2


def all_to_all(x, counts, arriving):
    y = x.new_empty(sum(arriving), *x.shape[1:])
    dist.all_to_all_single(y, x, arriving, counts)
    return y


def experts_on_ranks(x, g, w1, w2, rank, world):
    """x (t, C) and gates g (t, E) of this rank's tokens -> y (t, C), bytes sent. Of w1 and w2 it
    uses only its own experts' part."""
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
    return y, (sum(counts) - counts[rank] + sum(arriving) - arriving[rank]) * 4 * C


def layer():
    """-> tokens, weights of the experts, gates by name."""
    torch.manual_seed(0)
    x, w1, w2 = (torch.randn(*s, C) for s in ((TOKENS,), (E, C), (E, C)))
    router = torch.randn(C, E) / C**0.5
    return x, w1, w2, {"random": gates(x @ router), "skewed": gates((x + 0.5) @ router)}


def on_one(g):
    x, w1, w2, _ = layer()
    return sum(g[:, e, None] * expert(x, w1[e], w2[e]) for e in range(E))


def both(rank, world):
    x, w1, w2, routed = layer()
    mine = lambda rows: rows.chunk(world)[rank]
    here = {n: experts_on_ranks(mine(x), mine(g), w1, w2, rank, world) for n, g in routed.items()}
    return cut_layer(rank, world), here


# %%
ranks = lesson.ranks(2, both, timeout_s=150)
worst = max(cut[0] for cut, _ in ranks)
_, log, forward = ranks[0][0]
print(f"on two ranks: relative error {worst:.1g}; each sends {log} bytes")
lesson.holds(worst < 1e-4, "cut in two, the layer and all its gradients are the same")
lesson.holds(forward == 2 and len(log) == 4, "two all-reduces forward, two backward")

rows = []
for name, g in layer()[3].items():
    chosen = g > 0
    busy = (chosen.sum(0).max() * E / TOP / TOKENS).item()
    kept = chosen & (chosen.cumsum(0) <= 1.25 * TOP * TOKENS / E)  # first come, first served
    lost = 100 - 100 * (kept.sum() / chosen.sum()).item()
    right = on_one(g)
    y = torch.cat([here[name][0] for _, here in ranks])
    sent = sum(here[name][1] for _, here in ranks)
    rows.append((name, off(y, right), sent, busy, lost, off(on_one(g * kept), right)))
columns = ["routing", "error", "bytes", "busiest / mean", "dropped %", "error then"]
lesson.table(columns, rows, f"top {TOP} of {E} experts on 2 ranks, {TOKENS} tokens; capacity 1.25")
lesson.holds(max(row[1] for row in rows) < 1e-5, "experts on two ranks compute what one rank does")
lesson.holds(rows[1][5] > 0.05, "with skewed tokens, room for 1.25 of the mean spoils the output")

# %% [markdown]
# About half of the copies go to the other rank (on N ranks, (N - 1) / N), and each of these travels
# there and back.
#
# ## Room for how many?
# All ranks wait for the busiest expert, and its memory must hold everything that arrives. So you
# give each expert room for `capacity` times the mean load, and *drop* the copies beyond it: that
# token goes without this expert's contribution, and no error tells you. The last two columns show
# how many copies are dropped at capacity 1.25, and how far off the layer's output then is.
#
# Nothing keeps a router even: experts that get more tokens learn faster, and so get more still.
# There are two remedies. A *balancing loss* (Fedus et al. 2021) adds E times the sum over the
# experts of (share of the copies) x (mean probability), which is smallest when all are equal; but
# it pulls the router's weights away from the task. A *bias* on the scores (DeepSeek-V3, 2024) goes
# up a little for each expert below the mean and down for each above it; it decides which experts
# compute, and stays out of the gates.
#
# The tokens here come in 32 kinds, some far more frequent than others, like words.


# %%
def run(balanced, seed):
    """Train 8 experts -> at each step, the busiest expert's load over the mean."""
    torch.manual_seed(100 + seed)
    centers = torch.randn(32, C)
    maps = torch.randn(32, C, C) / C**0.5
    often = 1 / torch.arange(1, 33).float()  # Zipf's law
    w1 = torch.randn(E, C, 32) / C**0.5
    w2 = torch.randn(E, 32, C) / 32**0.5
    router = torch.randn(C, E) / C**0.5
    optimizer = torch.optim.Adam([w.requires_grad_() for w in (w1, w2, router)], lr=1e-2)
    bias = torch.zeros(E)
    busy = []
    for _ in range(300):
        kind = torch.multinomial(often, TOKENS, True)
        x = centers[kind] + 0.3 * torch.randn(TOKENS, C)
        scores = x @ router
        chosen = gates(scores.detach() + bias) > 0
        g = scores.masked_fill(~chosen, -torch.inf).softmax(1)
        y = torch.einsum("ne,end->nd", g, expert(x, w1, w2))
        optimizer.zero_grad()
        (y - torch.einsum("nc,ncd->nd", x, maps[kind])).square().mean().backward()
        optimizer.step()
        load = chosen.float().mean(0) * E / TOP
        if balanced:
            bias += 0.02 * (1 - load).sign()
        busy.append(load.max().item())
    return busy


HOW = ["nothing", "a bias"]
curves = torch.tensor([[run(how == "a bias", seed) for seed in range(3)] for how in HOW])
late = curves[:, :, -50:].mean(2).tolist()
columns = ["balanced by", "seed 0", "seed 1", "seed 2"]
rows = [(how, *means) for how, means in zip(HOW, late)]
lesson.table(columns, rows, "busiest expert / mean over the last 50 of 300 steps")
lesson.holds(min(late[0]) > 1.3, "left alone, the busiest expert has over 1.3 times the mean")
lesson.holds(max(late[1]) < 1.25, "with a bias, the busiest has less than 1.25 times the mean")

# %%
fig = lesson.figure(7, 3)
ax = fig.subplots()
for i, three in enumerate(curves.view(2, 3, 30, 10).mean(3)):
    lines = ax.plot(range(5, 300, 10), three.T, f"C{i}")
    lines[0].set_label(f"balanced by {HOW[i]}")
ax.axhline(1.25, color="gray", ls=":", label="a capacity of 1.25")
ax.legend(loc=(0.7, 0.6))
ax.set(xlabel="step", ylabel="busiest expert / mean")
lesson.save(fig, "29_tensor")

# %% [markdown]
# ## Trap
# Add up too late, and nothing crashes: f(part) summed over the ranks has the right shape, but it is
# another function (the last claim on two matrices). The same goes for a bias that every rank adds
# before the all-reduce: it counts N times. Compare with the whole layer, gradients included.
#
# A drop also depends on who else is in the batch: the same token is computed by two experts here
# and by one there. A model with a capacity therefore answers differently when its batches are put
# together differently, and evaluation, one document at a time, never sees the drops of training.
#
# ## Exercise
# `exercises/ex29.py`: the loss, with the vocabulary cut over the ranks. `python course/check.py 29`
