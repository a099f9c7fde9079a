# %% [markdown]
# # 20. Attention in pieces
#
# **Question.** Which part of attention's memory is quadratic in the length, and who removed it? And
# how is attention exact when no device holds all keys?
#
# **Afterwards** you can compute exact attention, forward and backward, and store no T x T matrix;
# and share out a long sequence over ranks so that none waits for another.
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Anotações detalhadas da Semana 1"
# (memory grows with the square of the sequence), "Paralelismo de Contexto", "Ring Attention";
# *擴展的驚喜*, "擴展的驚喜" (document masks). The algorithm: Dao 2023, "FlashAttention-2".
# Core file: `model.py`, `attend`. Before: lesson 19. Next: lesson 21.
# Takes 9 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from model import attend

H = 2  # heads
D = 64  # channels of a head
BLOCK = 128
T = 512  # of the ring
lesson.begin(20, "attention in pieces")
torch.set_num_threads(1)
torch.manual_seed(0)

# %% [markdown]
# ## Where the square is
# A query meets each key before it, and their product is a *score*. The softmax over the scores of
# one query makes weights that add up to 1, and its output is the mean of the values by these
# weights (lesson 4). Queries, keys and values are D numbers for each of T tokens and H heads.
# Scores and weights are not: **each of T queries meets T keys, so there are T x T for each head.**
# In the backward pass the product with v needs the weights again, so autograd keeps them.


# %%
def by_hand(q, k, v):
    """softmax(q k^T / sqrt(D)) v, causal: (B, H, T, D) each -> (B, H, T, D)."""
    future = torch.full((q.size(2), q.size(2)), -math.inf).triu(1)
    weights = F.softmax(q * D**-0.5 @ k.mT + future, -1)  # (B, H, T, T)
    return weights @ v


# %% [markdown]
# ## A mean, piece by piece
# A mean can be taken piece by piece, if one remembers how much weight each piece stands for. So
# take the keys a few at a time. For each query keep two things: the mean o of the values so far,
# and the log of the sum of exponentials so far (`lse`, *log-sum-exp*; a log, because exp(1000) is
# more than a float holds). Two sets of keys, each with its o and lse, together have
#
#     lse = log(exp(lse1) + exp(lse2)),    o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2
#
# The softmax of a library keeps the running maximum and sum in the place of lse, which is max +
# log(sum): the same in two numbers. What a query may see is decided by position, wherever the keys
# come from; so positions travel with them.


# %%
def scores_of(q, k, at, there):
    """q (..., t, D) at positions `at` (t,), k (..., u, D) at `there` (u,) -> (..., t, u)."""
    scores = q @ k.mT * q.size(-1) ** -0.5
    return scores.masked_fill(at[:, None] < there, -math.inf)


def piece(q, k, v, at, there):
    """-> the mean of these values alone (..., t, D), its lse (..., t)."""
    scores = scores_of(q, k, at, there)
    lse = scores.logsumexp(-1)
    safe = lse.masked_fill(lse == -math.inf, 0)  # a query that sees none of these keys: o = 0
    return (scores - safe[..., None]).exp() @ v, lse


def merge(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    return o1 * (lse1 - lse).exp()[..., None] + o2 * (lse2 - lse).exp()[..., None], lse


q = torch.ones(1, 1)  # one query, four keys, D = 1: the keys are the scores
k = torch.tensor([1.0, 3, 2, 0])[:, None]
v = torch.tensor([10.0, 20, 30, 40])[:, None]
at = torch.arange(4)
parts = [piece(q, k[i], v[i], at[3:], at[i]) for i in (slice(0, 2), slice(2, 4))]
parts.append(merge(*parts[0], *parts[1]))
lse = parts[2][1]
rows = []
for name, (mean, own) in zip(("keys 0, 1", "keys 2, 3", "merged"), parts):
    rows.append((name, mean.item(), own.item(), (own - lse).exp().item()))
columns = ["keys", "mean of values", "lse", "share of the weight"]
lesson.table(columns, rows, "scores 1, 3 and 2, 0; values 10, 20 and 30, 40")
at_once = k.softmax(0).mT @ v
lesson.holds(abs(parts[2][0] - at_once) < 1e-5, "merged, it is the mean of all four at once")

# %% [markdown]
# ## Pieces on one device: flash attention
# Forward takes one block of keys after the other, and forgets its scores. Backward needs the
# weights, which nobody kept. It computes the scores again, block by block: exp(score - lse) is the
# weight. More work, less memory.
#
# What does it compute? A query's output is o = sum of w_j v_j. So v_j gets w_j do, and the weight
# w_j gets do . v_j, where do is the gradient of o. A score raised by a little raises its own weight
# by w_j (1 - w_j) of that and lowers each other one by w_i w_j: the score gets w_j (dw_j - mean),
# with the mean of all dw_i under the weights. That mean is sum of w_i do . v_i = do . o: no other
# block is needed for it.
#
# (A `torch.autograd.Function` is a forward and a backward written by hand. `ctx` carries from one
# to the other what `save_for_backward` keeps.)


# %%
class Flash(torch.autograd.Function):
    """Flash.apply(q, k, v): (..., T, D) each, causal -> (..., T, D)."""

    @staticmethod
    def forward(ctx, q, k, v):
        blocks = torch.arange(q.size(-2)).split(BLOCK)
        done = []
        for i, at in enumerate(blocks):
            mine = q[..., at, :]
            so_far = piece(mine, k[..., at, :], v[..., at, :], at, at)
            for there in blocks[:i]:  # those after it are in the future
                so_far = merge(*so_far, *piece(mine, k[..., there, :], v[..., there, :], at, there))
            done.append(so_far)
        o = torch.cat([o for o, _ in done], -2)
        lse = torch.cat([lse for _, lse in done], -1)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        mean = (do * o).sum(-1)
        blocks = torch.arange(q.size(-2)).split(BLOCK)
        for i, at in enumerate(blocks):
            for there in blocks[: i + 1]:
                scores = scores_of(q[..., at, :], k[..., there, :], at, there)
                weights = (scores - lse[..., at].unsqueeze(-1)).exp()
                dv[..., there, :] += weights.mT @ do[..., at, :]
                d_weights = do[..., at, :] @ v[..., there, :].mT
                d_scores = weights * (d_weights - mean[..., at].unsqueeze(-1)) * D**-0.5
                dq[..., at, :] += d_scores @ k[..., there, :]
                dk[..., there, :] += d_scores.mT @ q[..., at, :]
        return dq, dk, dv


def random_qkv(T):
    return [torch.randn(1, H, T, D, requires_grad=True) for _ in range(3)]


kernel = lambda q, k, v: attend(q, k, v, None)  # PyTorch's, as the project calls it
ways = {"by hand": by_hand, "PyTorch's kernel": kernel, "Flash": Flash.apply}
inputs = random_qkv(300)  # the last block is not full
outputs = [fn(*inputs) for fn in ways.values()]
g = torch.randn_like(outputs[0])
gradients = [torch.autograd.grad(o, inputs, g) for o in outputs]
far = max((o - outputs[0]).abs().max().item() for o in outputs)
far_g = max((a - b).abs().max().item() for row in gradients for a, b in zip(row, gradients[0]))
lesson.holds(far < 1e-5, "by hand, the kernel and Flash give the same output, to 1e-5")
lesson.holds(far_g < 1e-5, "by hand, the kernel and Flash give the same gradients")


# %%
def saved_bytes(fn, *inputs) -> int:
    """Bytes that fn stores for its backward pass, its inputs aside."""
    stored = {}

    def pack(t):
        storage = t.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()  # a tensor stored twice counts once
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = fn(*inputs)  # noqa: F841, alive until the bytes are counted
    return sum(stored.values()) - sum(t.nbytes for t in inputs if t.data_ptr() in stored)


lengths = [128, 256, 512, 1024, 2048]
rows = []
for n in lengths:
    inputs = random_qkv(n)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    stored = [saved_bytes(fn, *inputs) for fn in ways.values()]
    rows.append((n, *stored, saved_bytes(attend, *inputs, mask)))
names = [*ways, "kernel, dense mask"]
lesson.table(["T", *names], rows, "bytes stored for the backward pass, 2 heads of 64")
square = all(row[1] == 4 * H * (row[0] ** 2 + row[0] * D) for row in rows)
lesson.holds(square, "by hand: 4 H (T^2 + T D) bytes, the weights and the scaled q")
line = all(row[2] == row[3] == 4 * H * (row[0] * D + row[0]) for row in rows)
lesson.holds(line, "kernel and Flash: 4 H (T D + T) bytes, the output and lse")
dense = all(row[4] == row[2] + 4 * row[0] ** 2 for row in rows)
lesson.holds(dense, "a mask of True and False is stored as T x T floats")


def flops(fn) -> int:
    with FlopCounterMode(display=False) as counter:
        fn(*random_qkv(2048))
    return counter.get_total_flops()


half = flops(Flash.apply) / flops(by_hand)
lesson.holds(0.5 < half < 0.54, "Flash skips the half of the blocks that is future")

# %% [markdown]
# "Attention's memory grows with the square of the length" is true of scores that are *stored*: at
# T = 2,048 they take 32 times the bytes that the kernel keeps. Of attention itself only the *work*
# is quadratic. But the square comes back unnoticed with a dense mask (17 times), as one writes it
# to keep the texts of a packed row apart (lesson 11); with a bias for every pair; or when somebody
# asks for the weights.
#
# ## Pieces on many devices: a ring
# The positions of a sequence that fits on no device lie on several ranks. Queries stay. Keys and
# values go round: each rank works with those that it has, passes them to the next rank, and
# receives those of the rank before. After world - 1 turns it has seen all, and never held more than
# one rank's. The loop is that of `Flash`, with blocks that arrive.
#
# Position t sees t + 1 keys. If each rank has a *block* of consecutive positions, the last rank has
# nearly twice the mean work, and the others wait for it. A *zigzag* cuts the sequence into 2 P runs
# and gives rank r an early run, r, and a late one, 2 P - 1 - r.


# %%
def pass_on(x):
    """Send x to the next rank, receive as much from the one before."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    arrived = torch.empty_like(x)
    sending = dist.isend(x.contiguous(), (rank + 1) % world)
    dist.recv(arrived, (rank - 1) % world)
    sending.wait()
    return arrived


def ring(q, k, v, at, world):
    """q, k, v (H, t, D) at the positions `at` -> o, how many scores were needed, keys held."""
    there = at
    so_far = piece(q, k, v, at, there)
    needed = (at[:, None] >= there).sum().item()
    held = len(there)
    for _ in range(world - 1):
        k, v, there = pass_on(k), pass_on(v), pass_on(there)
        so_far = merge(*so_far, *piece(q, k, v, at, there))
        needed += (at[:, None] >= there).sum().item()
        held = max(held, len(there))
    return so_far[0], needed, held


def blocks(T, P):
    return torch.arange(T).chunk(P)


def zigzag(T, P):
    runs = torch.arange(T).chunk(2 * P)
    return [torch.cat([runs[r], runs[2 * P - 1 - r]]) for r in range(P)]


def both(rank, world):
    q, k, v = torch.randn(3, H, T, D, generator=torch.Generator().manual_seed(1))
    want = attend(q[None], k[None], v[None], None)[0]
    out = {}
    for cut in (blocks, zigzag):
        at = cut(T, world)[rank]
        o, *counts = ring(q[:, at], k[:, at], v[:, at], at, world)
        out[cut.__name__] = (o - want[:, at]).abs().max().item(), *counts
    return out


# %%
P = 4
ranks = lesson.ranks(P, both, timeout_s=150)
rows_of_ring = []
for name in ranks[0]:
    error, needed, held = zip(*(r[name] for r in ranks))
    rows_of_ring.append((name, max(error), *needed, max(held)))
columns = ["ring", "error", *(f"rank {r}" for r in range(P)), "keys held"]
lesson.table(columns, rows_of_ring, f"scores needed by rank, keys held at a time; {T} positions")
in_blocks, in_zigzag = (row[2:6] for row in rows_of_ring)
error = max(row[1] for row in rows_of_ring)
lesson.holds(error < 1e-5, "both rings equal attention on one device, to 1e-5")
held = {row[6] for row in rows_of_ring}
lesson.holds(held == {T // P}, "a rank holds 1 / P of the keys at a time")
late = in_blocks[-1] * P / sum(in_blocks)
lesson.holds(abs(late - 2 + 1 / P) < 0.01, "blocks: the last rank has 2 - 1/P times the mean work")
lesson.holds(len({*in_zigzag}) == 1, "zigzag: every rank has the same number of scores")

# %%
fig = lesson.figure(9, 3.2)
ax, *pictures = fig.subplots(1, 3, width_ratios=[3, 2, 2])
for i, color in ((1, "crimson"), (2, "steelblue"), (4, "darkorange")):  # Flash is as the kernel
    y = [row[i] / 1e6 for row in rows]
    ax.loglog(lengths, y, "o-", color=color)
    ax.text(2300, y[-1], f"{names[i - 1]}, {y[-1]:.0f} MB", color=color, va="center", fontsize=8)
ax.set(xlim=(110, 25000), ylim=(0.05, 80), title="stored for the backward pass")
ax.set(xlabel="length T", ylabel="MB")
ax.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=7), ax.minorticks_off()
ax.set_yticks([0.1, 1, 10], ["0.1", "1", "10"]), ax.grid()
for ax, cut in zip(pictures, (blocks, zigzag)):
    owner = torch.empty(128)
    for r, positions in enumerate(cut(128, P)):
        owner[positions] = r
    picture = owner[:, None].masked_fill(torch.ones(128, 128).triu(1) > 0, math.nan)
    ax.imshow(picture, cmap="Set2", vmin=0, vmax=7, interpolation="nearest")
    percent = " ".join(f"{(p + 1).sum() / 82.56:.0f}" for p in cut(128, P))  # of 128 x 129 / 2
    ax.set(title=f"{cut.__name__}: {percent} %", xlabel="key", xticks=[], yticks=[])
pictures[0].set_ylabel("query, colored by rank")
lesson.save(fig, "20_pieces")

# %% [markdown]
# ## Trap
# After a block of keys in which a query sees nothing, all its scores are -inf, and
# exp(-inf - (-inf)) is NaN. It appears in no test whose ranks hold interleaved positions, and in
# every run whose ranks hold blocks. `piece` takes 0 for the missing maximum; and the *first* piece
# must be that of a query's own block, or `merge` adds up two sets of nothing.

# %%
q, k, v = torch.randn(3, H, 4, D)
later = at + 4  # all keys are in the future
naive = scores_of(q, k, at, later).softmax(-1) @ v
lesson.holds(naive.isnan().all().item(), "softmax over no key at all is NaN")
o, lse = piece(q, k, v, at, later)
lesson.holds(not o.any().item(), "piece gives 0 for queries without keys")
lesson.holds(merge(o, lse, o, lse)[0].isnan().all().item(), "two such pieces merge into NaN")

# %% [markdown]
# ## Exercise
# `exercises/ex20.py`: a merge that gives no NaN, whatever is masked. `python course/check.py 20`
