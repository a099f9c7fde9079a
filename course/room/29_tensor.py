# %% [markdown]
# # 29. A layer on many devices: cuts of a matrix, and experts
#
# **Question.** A layer's matrices can be cut along their columns or along their rows. Which cut
# needs which exchange? And if each device has whole MLPs of its own, and the tokens travel: what is
# lost when many of them want the same one?
#
# **Afterwards** you can cut a transformer layer over several ranks with two exchanges in the
# forward pass, send tokens to experts and back, and say what keeps the experts' load even.
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


x_A = [c @ a for c, a in zip(x.chunk(N, 1), A.chunk(N))]  # by rank, of a cut by rows: a sum


def first(cut):
    """-> x A, by rank: some of its channels, or (after the exchange) all of them."""
    if cut == "columns":
        return [x @ a for a in A.chunk(N, 1)]
    return [summed(x_A)] * N


def second(hidden, cut):
    """f(x A), by rank -> y."""
    if cut == "columns":
        h = hidden[0] if hidden[0].size(1) == 128 else joined(hidden)
        return joined([h @ b for b in B.chunk(N, 1)])
    if hidden[0].size(1) == 128:  # a rank needs its part only
        hidden = [h.chunk(N, 1)[rank] for rank, h in enumerate(hidden)]
    return summed([h @ b for h, b in zip(hidden, B.chunk(N))])


off = lambda y, want: ((y - want).norm() / want.norm()).item()
rows = []
want = f(x @ A) @ B
for one in ("columns", "rows"):
    for two in ("rows", "columns"):
        sent.clear()
        y = second([f(h) for h in first(one)], two)
        rows.append((one, two, len(sent), sum(sent), off(y, want)))
columns = ["A cut by", "B cut by", "exchanges", "bytes", "relative error"]
lesson.table(columns, rows, "y = f(x A) B on four ranks, forward")
lesson.holds(max(row[4] for row in rows) < 1e-5, "all four cuts compute the same y")
lesson.holds(rows[0][2] == 1, "columns, then rows: one exchange, an all-reduce as large as x")
less = min(row[3] for row in rows[1:]) > 2 * rows[0][3]
lesson.holds(less, "the other three send over twice as much")
early = summed([f(part) for part in x_A]) @ B
lesson.holds(off(early, want) > 0.1, "f of the parts of a sum, summed, is not f of the sum")

# %% [markdown]
# ## A whole layer
# So the first matrix of each pair is cut by columns (hidden channels, or whole heads with their
# queries, keys and values), the second by rows, and one all-reduce completes the sums. In the
# backward pass the roles turn: the gradient of the pair's input is a sum over the ranks, so there
# is an all-reduce at the entrance.
#
# This is *tensor parallelism* (TP). Between the pairs it repeats the norms on every rank. Sequence
# parallelism (SP) gives each rank a part of the positions there. Its entrance gathers (all-gather),
# its exit sums and keeps a part (reduce-scatter): twice as many exchanges, and the same bytes, as
# these two are the halves of an all-reduce.
#
# **How far?** Heads are not cut: the number of ranks must divide that of the query and of the
# key/value heads. And the exchanges cannot hide behind other work, as the next matrix waits for
# them. Take a layer of width 8,192, that is 12 x 8,192^2 weights, and 4,096 tokens, with 400
# TFLOP/s on a GPU, 450 GB/s between the 8 GPUs of a machine, and 50 GB/s beyond (assumed figures).
# Cut over 8 GPUs, its matrices take 6.2 ms of a step, its exchanges in bf16 1.0 ms. Cut over 16, in
# two machines, they take 3.1 and 10.1 ms. So such a cut ends at the edge of a machine.


# %%
LOG = []  # bytes that a rank sends in each exchange, if it is done in a ring


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


# one layer with the matrices of this rank: x (B, T, C) -> the same
def block(x, w):
    h = Border.apply(rms_norm(x), True)
    q, k, v = (F.linear(h, w[n]).unflatten(2, (-1, CONFIG.head_dim)) for n in "qkv")
    y = attend(*(t.transpose(1, 2) for t in (q, k, v)), None)  # (B, H / N, T, D)
    x = x + Border.apply(F.linear(y.transpose(1, 2).flatten(2), w["out"]), False)
    h = Border.apply(rms_norm(x), True)
    hidden = F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"])  # (B, T, mlp_hidden / N)
    return x + Border.apply(F.linear(hidden, w["down"]), False)


# -> largest distance to the project's own Block, bytes of each exchange, how many were forward
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
    return max(((s - t).norm() / t.norm()).item() for s, t in pairs), LOG, forward


# %% [markdown]
# ## Experts
# A *mixture of experts* has many MLPs in the place of one. For each token a router gives every
# expert a score (one matrix product). The two experts with the largest scores compute the token,
# and their outputs are added, weighted by a softmax over the two scores: the *gates*. So a model
# has the weights of eight MLPs and pays for two.
#
# With the experts on several ranks, a token's copies travel to its experts, and the results back.
# Each rank sends every other rank another number of rows: an *all-to-all*. The counts go first, so
# that the receiver knows how much will come.


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


def layer():
    """-> tokens, weights of the experts, gates by name."""
    r = torch.Generator().manual_seed(0)
    x, w1, w2 = (torch.randn(*s, C, generator=r) for s in ((TOKENS,), (E, C), (E, C)))
    router = torch.randn(C, E, generator=r) / C**0.5
    return x, w1, w2, {"random": gates(x @ router), "skewed": gates((x + 0.5) @ router)}


def on_one(g):
    x, w1, w2, _ = layer()
    return sum(g[:, e, None] * expert(x, w1[e], w2[e]) for e in range(E))


def both(rank, world):
    x, w1, w2, routed = layer()
    mine = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    here = {n: experts_on_ranks(x[mine], g[mine], w1, w2, rank, world) for n, g in routed.items()}
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
lesson.holds(max(row[1] for row in rows) < 1e-5, "experts on two ranks compute what one computes")
lesson.holds(rows[1][5] > 0.05, "skewed tokens: room for 1.25 of the mean spoils the output")

# %% [markdown]
# About half of the copies belong to the other rank (on N ranks it is (N - 1) / N of them), and each
# of these travels there and back.
#
# ## Room for so many
# All ranks wait for the busiest expert, and its memory must hold all that comes. So an expert gets
# room for `capacity` times the mean load, and copies beyond it are *dropped*: for that token, the
# expert's part of the sum is missing, and nobody says so. The last two columns show how many are
# dropped at capacity 1.25, and by how much the layer's output then differs.
#
# Nothing keeps a router even: experts that get more tokens learn faster, and so get more. Two
# remedies. A *balancing loss* (Fedus et al. 2021) adds E times the sum over the experts of (share
# of the copies) x (mean probability), which is least when all are equal; it pulls at the router's
# weights against the task. A *bias* on the scores (DeepSeek-V3, 2024) is raised a little for each
# expert below the mean and lowered above it; it decides who computes, and stays out of the gates.
#
# The tokens here are of 32 kinds, some far more frequent than others, like words.


# %%
def run(balanced, seed, steps=300):
    """Train 8 experts -> by step, the busiest expert's load over the mean."""
    r = torch.Generator().manual_seed(100 + seed)
    randn = lambda *shape, by=1: torch.randn(*shape, generator=r) / by**0.5
    centers = randn(32, C)
    maps = randn(32, C, C, by=C)
    often = 1 / torch.arange(1, 33).float()  # Zipf's law
    weights = [randn(E, C, 32, by=C), randn(E, 32, C, by=32), randn(C, E, by=C)]
    w1, w2, router = (w.requires_grad_() for w in weights)
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    bias = torch.zeros(E)
    busy = []
    for _ in range(steps):
        kind = torch.multinomial(often, TOKENS, True, generator=r)
        x = centers[kind] + 0.3 * randn(TOKENS, C)
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


curves = {(balanced, seed): run(balanced, seed) for balanced in (False, True) for seed in range(3)}
late = {key: sum(busy[-50:]) / 50 for key, busy in curves.items()}
alone, with_bias = ([late[balanced, seed] for seed in range(3)] for balanced in (False, True))
rows = [("nothing", *alone), ("a bias", *with_bias)]
columns = ["balanced by", "seed 0", "seed 1", "seed 2"]
lesson.table(columns, rows, "busiest expert / mean over the last 50 of 300 steps")
lesson.holds(min(alone) > 1.3, "left alone, the busiest expert has over 1.3 times the mean")
lesson.holds(max(with_bias) < 1.25, "with a bias, the busiest has less than 1.25 times the mean")

# %%
fig = lesson.figure(7, 3)
ax = fig.subplots()
for (balanced, seed), busy in curves.items():
    label = "with a bias" if balanced else "left alone"
    smooth = torch.tensor(busy).view(-1, 10).mean(1)
    ax.plot(range(5, 300, 10), smooth, f"C{balanced:d}", label=None if seed else label)
ax.axhline(1.25, color="gray", ls=":"), ax.legend(loc=(0.75, 0.56))
ax.set(xlabel="step", ylabel="busiest expert / mean", title="dotted: a capacity of 1.25")
lesson.save(fig, "29_tensor")

# %% [markdown]
# ## Trap
# Add up too late, and nothing crashes: f(part) summed over the ranks has the right shape, and is
# another function (the last claim on two matrices). The same happens to a bias that every rank adds
# before the all-reduce: it counts N times. Compare with the whole layer, gradients included.
#
# And a drop depends on who else is in the batch: the same token is computed by two experts here,
# and by one there. So a model with a capacity gives other answers when its batches are composed
# differently, and evaluation, one document at a time, does not see the drops that training had.
#
# ## Exercise
# `exercises/ex29.py`: the loss, with the vocabulary cut over the ranks. `python course/check.py 29`
