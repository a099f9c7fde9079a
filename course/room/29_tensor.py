# %% [markdown]
# # 29. Tensor parallel: cutting a matrix
#
# **Question.** A layer's matrices can be cut along their columns or along their rows. Which cut
# needs which exchange?
#
# **Afterwards** you can cut a transformer layer over several ranks with two exchanges in the
# forward pass, and say why such a cut should end at the edge of a machine.
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Tensor (TP) Nos Blocos do
# Transformers", "Paralelismo de Sequência". Core file: `model.py`, `Block`.
# Before: lesson 28. Next: lesson 20. Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from config import PRESETS, GPTConfig
from model import Block, Context, attend, rms_norm

SHAPE = dict(n_layer=1, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, mlp_hidden=64)
CONFIG = GPTConfig(**SHAPE, mlp="swiglu", nope_every=1, qk_norm=False)
lesson.begin(29, "tensor parallel")
torch.set_num_threads(1)

# %% [markdown]
# ## Two matrices, four ways
# Take the pair of an MLP: y = f(x A) B, where A makes C channels into 4 C hidden ones, f works on
# each number alone, and B goes back to C. With A cut by *columns*, a rank has some of the hidden
# channels, whole. With A cut by *rows*, it sees some of the channels of x, and gets a part of every
# sum. Four ranks, and no processes yet: below, a list holds what each rank has, `joined` stands for
# an all-gather, `summed` for an all-reduce, and both count what a rank sends in a ring.

# %%
N = 4
sent = []
g = torch.Generator().manual_seed(0)
x, A, B = (torch.randn(n, m, generator=g) for n, m in ((16, 32), (32, 128), (128, 32)))
f = lambda h: h.relu().square()  # of model.py


def joined(parts):
    sent.append(parts[0].nbytes * (N - 1))
    return torch.cat(parts, 1)


def summed(parts):
    sent.append(2 * parts[0].nbytes * (N - 1) // N)
    return torch.stack(parts).sum(0)


def first(cut):
    """-> x A, by rank: some of its channels, or (after the exchange) all of them."""
    if cut == "columns":
        return [x @ a for a in A.chunk(N, 1)]
    return [summed([c @ a for c, a in zip(x.chunk(N, 1), A.chunk(N))])] * N


def second(hidden, cut):
    """f(x A), by rank -> y."""
    if cut == "columns":
        h = hidden[0] if hidden[0].size(1) == 128 else joined(hidden)
        return joined([h @ b for b in B.chunk(N, 1)])
    if hidden[0].size(1) == 128:  # a rank needs its part only
        hidden = [h.chunk(N, 1)[rank] for rank, h in enumerate(hidden)]
    return summed([h @ b for h, b in zip(hidden, B.chunk(N))])


rows = []
want = f(x @ A) @ B
for one in ("columns", "rows"):
    for two in ("rows", "columns"):
        sent.clear()
        y = second([f(h) for h in first(one)], two)
        rows.append((one, two, len(sent), sum(sent), ((y - want).norm() / want.norm()).item()))
early = summed([f(c @ a) for c, a in zip(x.chunk(N, 1), A.chunk(N))]) @ B  # f before the sum
rows.append(("rows, f too early", "-", 1, None, ((early - want).norm() / want.norm()).item()))
columns = ["A cut by", "B cut by", "exchanges", "bytes", "relative error"]
lesson.table(columns, rows, "y = f(x A) B on four ranks, forward")
lesson.holds(max(row[4] for row in rows[:4]) < 1e-5, "all four cuts compute the same y")
one_sum = rows[0][2:4] == (1, 2 * x.nbytes * (N - 1) // N)
lesson.holds(one_sum, "columns, then rows: one exchange, an all-reduce as large as x")
lesson.holds(
    min(row[3] for row in rows[1:4]) > 2 * rows[0][3], "the other three send over twice as much"
)
lesson.holds(rows[4][4] > 0.1, "f of the parts of a sum is not f of the sum")

# %% [markdown]
# ## A whole layer
# So the first matrix of each pair is cut by columns (hidden channels, or whole heads with their
# queries, keys and values), the second by rows, and one all-reduce completes the sums. In the
# backward pass the roles turn: the gradient of the pair's input is a sum over the ranks, so there
# is an all-reduce at the entrance.
#
# Between the pairs, tensor parallelism (TP) repeats the norms on every rank. Sequence parallelism
# (SP) gives each rank a part of the positions there: the entrance gathers (all-gather), the exit
# sums and keeps a part (reduce-scatter).


# %%
LOG = []  # (exchange, bytes that a rank sends if it is done in a ring)


# x (T, ...): over the ranks, sum it, join the parts, or sum it and keep a part
def exchange(kind, x):
    world = dist.get_world_size()
    if kind == "all-reduce":
        y = x.clone()
        sent = 2 * x.nbytes * (world - 1) // world
        dist.all_reduce(y)
    elif kind == "all-gather":
        y = x.new_empty(len(x) * world, *x.shape[1:])
        sent = x.nbytes * (world - 1)
        dist.all_gather_into_tensor(y, x.contiguous())
    else:
        y = x.new_empty(len(x) // world, *x.shape[1:])
        sent = x.nbytes * (world - 1) // world
        dist.reduce_scatter_tensor(y, x.contiguous())
    LOG.append((kind, sent))
    return y


# an exchange in the forward pass, another in the backward pass; None: nothing
class Border(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind, backward_kind):
        ctx.kind = backward_kind
        return exchange(kind, x) if kind else x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return exchange(ctx.kind, g) if ctx.kind else g, None, None


BORDERS = {  # way -> entrance, exit
    "TP": ((None, "all-reduce"), ("all-reduce", None)),
    "TP + SP": (("all-gather", "reduce-scatter"), ("reduce-scatter", "all-gather")),
}


# one layer with the matrices of this rank: x (T, B, C), with SP (T / N, B, C) -> the same
def block(x, w, entrance, exit):
    h = Border.apply(rms_norm(x), *entrance)  # (T, B, C)
    q, k, v = (F.linear(h, w[n]).unflatten(2, (-1, CONFIG.head_dim)) for n in "qkv")
    y = attend(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), None)  # (B, H / N, T, D)
    x = x + Border.apply(F.linear(y.permute(2, 0, 1, 3).flatten(2), w["out"]), *exit)
    h = Border.apply(rms_norm(x), *entrance)
    hidden = F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"])  # (T, B, mlp_hidden / N)
    return x + Border.apply(F.linear(hidden, w["down"]), *exit)


# -> distances to the project's own Block, exchanges of forward and of both, values normed
def cut_layer(rank, world, way):
    torch.manual_seed(0)
    whole = Block(CONFIG, 0)
    x = torch.randn(16, 4, 32)  # (T, B, C)
    a = x.clone().requires_grad_()
    plain = Context(*[None] * 5)  # no rotation, no mask, no cache
    want = whole(a.transpose(0, 1), None, plain).transpose(0, 1)
    (want.square().sum() / 64).backward()
    split = {name.split(".")[-2]: p for name, p in whole.named_parameters()}
    part = lambda name, p: p.chunk(world, 1 if name in ("out", "down") else 0)[rank]
    w = {name: part(name, p.detach()).clone().requires_grad_() for name, p in split.items()}
    mine = (lambda t: t.chunk(world)[rank]) if way == "TP + SP" else lambda t: t
    b = mine(x).clone().requires_grad_()
    LOG.clear()
    y = block(b, w, *BORDERS[way])
    forward = list(LOG)
    (y.square().sum() / 64).backward()
    gradients = [(w[name].grad, part(name, p.grad)) for name, p in split.items()]
    far = lambda pairs: max((s - t).abs().max().item() for s, t in pairs)
    distances = far([(y, mine(want))]), far([(b.grad, mine(a.grad))]), far(gradients)
    return distances, forward, list(LOG), b.numel()


def both(rank, world):
    return {way: cut_layer(rank, world, way) for way in BORDERS}


# %%
ranks = lesson.ranks(2, both, timeout_s=150)
rows = []
whole = 16 * 4 * 32 * 4  # bytes of x
for way in BORDERS:
    worst = max(max(r[way][0]) for r in ranks)
    _, forward, log, normed = ranks[0][way]
    rows.append((way, worst, len(forward), len(log), sum(sent for _, sent in log), normed))
columns = ["way", "error", "forward", "with backward", "bytes", "values normed"]
lesson.table(columns, rows, "two ranks: distance to the whole layer (y, gradients), exchanges")
lesson.holds(rows[0][1] < 1e-5 and rows[1][1] < 1e-5, "cut in two, the layer is the same")
kinds = [kind for kind, _ in ranks[0]["TP"][1]]
lesson.holds(kinds == ["all-reduce"] * 2, "TP: two all-reduces in the forward pass of a layer")
lesson.holds(rows[0][3] == 4, "TP: two more in the backward pass")
lesson.holds(rows[0][4] == rows[1][4] == 4 * whole, "SP: twice as many exchanges, the same bytes")
lesson.holds(rows[1][5] * 2 == rows[0][5], "SP: each rank norms half of the values")

# %% [markdown]
# ## How far?
# Heads are not cut: the number of ranks must divide that of the query and of the key/value heads.
# The exchanges cannot hide behind other work, as the next matrix waits for them. A layer of width
# 8,192 with 4,096 tokens, 400 TFLOP/s, 450 GB/s between the 8 GPUs of a machine, 50 GB/s beyond
# (assumed figures):

# %%
sizes = {}
for name in ("biatron-345m", "smol-135m", "d12"):
    heads = math.gcd(PRESETS[name].model.n_head, PRESETS[name].model.n_kv_head)
    sizes[name] = [n for n in range(1, heads + 1) if heads % n == 0]
print("TP sizes that divide heads and kv heads:", *sizes.items(), sep="\n  ")
lesson.holds(list(sizes.values()) == [[1, 5], [1, 3], [1, 2, 3, 6]], "none of them can be cut in 8")

C = 8192
T = 4096
compute = lambda n: 6 * 12 * C * C * T / n / 400e12  # s: 12 C^2 weights, forward and backward
talk = lambda n, beta: 4 * 2 * (n - 1) / n * T * C * 2 / beta  # 4 all-reduces of bf16
tp = (1, 2, 4, 8, 16, 32)
ms = lambda s: 1000 * s
rows = [(n, ms(compute(n)), ms(talk(n, 450e9 if n <= 8 else 50e9))) for n in tp]
rows = [(*row, 100 * row[2] / (row[1] + row[2])) for row in rows]
lesson.table(["TP", "ms of matrices", "ms of exchanges", "% waiting"], rows, "one layer, one step")
lesson.arithmetic(rows[3][3] < 20 and rows[4][3] > 70, "8 ranks wait 14% of the time, 16 wait 76%")

# %%
fig = lesson.figure(7, 3)
ax = fig.subplots()
names = [str(n) for n in tp]
ax.bar(names, [row[1] for row in rows], color="steelblue")
ax.bar(names, [row[2] for row in rows], bottom=[row[1] for row in rows], color="crimson")
ax.bar_label(ax.containers[1], [f"{row[3]:.0f}%" for row in rows], color="crimson")
ax.axvline(3.5, color="gray", ls=":"), ax.text(3.6, 40, "more than one machine", color="gray")
ax.set(xlabel="ranks that share a layer", ylabel="ms per layer and step", ylim=(0, 60))
ax.set_title("time for matrices (blue) and exchanges (red)")
lesson.save(fig, "29_tensor")

# %% [markdown]
# ## Trap
# Add up too late, and nothing crashes: f(part) summed over the ranks has the right shape, and is
# another function (the last row of the first table). The same happens to a bias that every rank
# adds before the all-reduce: it counts N times. Compare with the whole layer, gradients included.
#
# ## Exercise
# `exercises/ex29.py`: the loss, with the vocabulary cut over the ranks. `python course/check.py 29`
