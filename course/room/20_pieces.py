# %% [markdown]
# # 20. Attention in pieces
#
# **Question.** Which part of attention's memory is quadratic in the length, and how do you get rid
# of it? And how can attention be exact when no device holds all the keys?
#
# **Afterwards** you can compute exact attention, forward and backward, without storing a T x T
# matrix, and share out a long sequence over ranks so that none waits for another.
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Anotações detalhadas da Semana 1"
# (memory grows with the square of the sequence), "Paralelismo de Contexto", "Ring Attention";
# *擴展的驚喜*, "擴展的驚喜" (document masks). The algorithm: Dao 2023, "FlashAttention-2".
# Core file: `model.py`, `attend`. Before: lessons 4 and 11. Next: lesson 21.
# Takes 9 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

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
# A query meets its own key and every key before it, and their product is a **score**. The softmax
# turns the scores of one query into weights that add up to 1, and the query's output is the mean of
# the values under these weights (lesson 4). Queries, keys and values are D numbers for each of T
# tokens and H heads. Scores and weights are more: **each of T queries meets T keys, so there are T
# x T of them for each head.** Autograd keeps the weights, because the backward pass of the product
# with v needs them again.


# %%
def by_hand(q, k, v):
    """softmax(q k^T / sqrt(D)) v, causal: (B, H, T, D) each -> (B, H, T, D)."""
    future = torch.full((q.size(2), q.size(2)), -math.inf).triu(1)
    weights = F.softmax(q * D**-0.5 @ k.mT + future, -1)  # (B, H, T, T)
    return weights @ v


# %% [markdown]
# ## A mean, piece by piece
# You can take a mean piece by piece, if you remember how much weight each piece stands for. So take
# the keys a few at a time. For each query keep two things: the mean o of the values so far, and the
# log of the sum of exponentials so far (`lse`, **log-sum-exp**; you keep the log because exp(1000)
# is more than a float can hold). Two sets of keys, each with its o and lse, together have
#
#     lse = log(exp(lse1) + exp(lse2)),    o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2
#
# (A library's kernel keeps the running maximum and sum instead. That is the same in two numbers,
# because lse = max + log(sum).) Position alone decides what a query may see, wherever the keys come
# from; so the keys' positions travel with them.


# %%
def scores_of(q, k, at, there):
    """q (..., t, D) at positions `at` (t,), k (..., u, D) at `there` (u,) -> (..., t, u)."""
    scores = q @ k.mT * q.size(-1) ** -0.5
    return scores.masked_fill(at[:, None] < there, -math.inf)


def piece(q, k, v, at, there):
    """-> the mean of these values alone (..., t, D), and its lse (..., t)."""
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
mean, lse = parts[2]
rows = []
for name, (o, own) in zip(("keys 0, 1", "keys 2, 3", "merged"), parts):
    rows.append((name, o.item(), own.item(), (own - lse).exp().item()))
columns = ["keys", "mean of values", "lse", "share of the weight"]
lesson.table(columns, rows, "scores 1, 3 and 2, 0; values 10, 20 and 30, 40")
lesson.holds(abs(mean - k.softmax(0).mT @ v) < 1e-5, "merged, it is the mean of all four at once")

# %% [markdown]
# ## Pieces on one device: flash attention
# Forward takes one block of keys after another, and forgets the scores of each. Backward needs the
# weights, and nobody kept them; so it computes the scores again, block by block, and exp(score -
# lse) is the weight. That is more work for less memory.
#
# What are the gradients? A query's output is o, the sum of w_j v_j. Write do for the gradient of o.
# Then the gradient of v_j is w_j do, and that of the weight w_j is dw_j = do . v_j. If you raise
# the score j a little, its own weight rises by w_j (1 - w_j) times as much, and every other weight
# w_i falls by w_i w_j times as much. So the gradient of the score is w_j (dw_j - mean), where mean
# is the mean of all dw_i under the weights. That mean is the sum of w_i (do . v_i), or do . o, so
# you need no other block for it.
#
# (A `torch.autograd.Function` is a forward and a backward written by hand. What `save_for_backward`
# keeps, `ctx` carries from one to the other.)


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
            for there in blocks[:i]:  # half of the work: the blocks after it are in the future
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
g = torch.randn(1, H, 300, D)
results = []
for fn in ways.values():
    o = fn(*inputs)
    results.append([o, *torch.autograd.grad(o, inputs, g)])
far = max((a - b).abs().max() for row in results for a, b in zip(row, results[0]))
lesson.holds(far < 1e-5, "by hand, the kernel and Flash give the same output and gradients")


# %%
def saved_bytes(fn, *inputs) -> int:
    """Bytes that fn stores for its backward pass, not counting its inputs."""
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

# %% [markdown]
# "Attention's memory grows with the square of the length" is true if you *store* the scores: at T =
# 2,048 that takes 32 times the bytes that the kernel keeps. In attention itself only the *work* is
# quadratic. But the square comes back unnoticed with a dense mask (17 times), which you might write
# to keep the texts of a packed row apart (lesson 11); with a bias for every pair; or when somebody
# asks for the weights.
#
# ## Pieces on many devices: a ring
# If a sequence fits on no single device, its positions lie on several ranks. The queries stay. The
# keys and values go round in a ring: each rank works with those that it has, passes them to the
# next rank, and receives those of the rank before. After world - 1 turns it has seen them all, and
# has never held more than one rank's share. The loop is that of `Flash`, with blocks that arrive.
#
# Position t sees t + 1 keys. If each rank has a **block** of consecutive positions, the last rank
# has nearly twice the mean work, and the others wait for it. A **zigzag** cuts the sequence into 2
# P runs and gives rank r an early one, run r, and a late one, run 2 P - 1 - r.


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
    seen = [at]
    so_far = piece(q, k, v, at, at)
    for _ in range(world - 1):
        k, v, there = (pass_on(x) for x in (k, v, seen[-1]))
        so_far = merge(*so_far, *piece(q, k, v, at, there))
        seen.append(there)
    needed = (at[:, None] >= torch.cat(seen)).sum().item()
    return so_far[0], needed, max(map(len, seen))


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
right = all(row[1] < 1e-5 and row[6] == T // P for row in rows_of_ring)
lesson.holds(right, "both rings equal attention on one device, and hold 1 / P of the keys")
late = in_blocks[-1] * P / sum(in_blocks)
lesson.holds(abs(late - 2 + 1 / P) < 0.01, "blocks: the last rank has 2 - 1/P times the mean work")
lesson.holds(len({*in_zigzag}) == 1, "zigzag: every rank has the same number of scores")

# %%
fig = lesson.figure(9, 3.2)
ax, *pictures = fig.subplots(1, 3, width_ratios=[3, 2, 2])
for i in (1, 2, 4):  # Flash is as the kernel
    ax.loglog(lengths, [row[i] / 1e6 for row in rows], "o-", label=names[i - 1])
ax.set(title="stored for the backward pass", xlabel="length T", ylabel="MB"), ax.grid()
ax.set_xticks(lengths, lengths), ax.legend(fontsize=8)
for ax, cut in zip(pictures, (blocks, zigzag)):
    owner = torch.empty(128)
    for r, positions in enumerate(cut(128, P)):
        owner[positions] = r
    picture = owner[:, None].masked_fill(torch.ones(128, 128).triu(1) > 0, math.nan)
    ax.imshow(picture, cmap="Set2", vmin=0, vmax=7, interpolation="nearest")
    ax.set(title=cut.__name__, xlabel="key", xticks=[], yticks=[])
pictures[0].set_ylabel("query, colored by rank")
lesson.save(fig, "20_pieces")

# %% [markdown]
# ## Trap
# When a query may see nothing in a block of keys, all its scores there are -inf, and exp(-inf -
# (-inf)) is NaN. You won't meet this in a test whose ranks hold interleaved positions, but you will
# in every run whose ranks hold blocks. So `piece` takes 0 where lse is -inf; and the *first* piece
# must be that of a query's own block, or `merge` adds up two sets of nothing.

# %%
q, k, v = torch.randn(3, H, 4, D)
later = at + 4  # all keys are in the future
naive = scores_of(q, k, at, later).softmax(-1) @ v
lesson.holds(naive.isnan().all().item(), "softmax over no key at all is NaN")
o, lse = piece(q, k, v, at, later)
lesson.holds(not o.any().item(), "piece gives 0 for queries that see no key")
lesson.holds(merge(o, lse, o, lse)[0].isnan().all().item(), "two such pieces merge into NaN")

# %% [markdown]
# ## Exercise
# `exercises/ex20.py`: a merge that never gives NaN, whatever is masked. `python course/check.py 20`
