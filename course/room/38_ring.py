# %% [markdown]
# # 38. Ring attention: a sequence that fits on no device
#
# **Question.** The positions of a long sequence lie on several ranks, and a query needs the keys of
# all positions before it. How can attention be exact without any rank holding all keys?
#
# **Afterwards** you can write attention over a ring of ranks, and share out positions so that no
# rank works longer than another.
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Contexto", "Ring
# Attention". Core file: `model.py`, `attend`. Before: lesson 29. Next: lesson 23.
# Takes 8 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math

import torch
import torch.distributed as dist

from model import attend

H = 2  # heads
T = 512  # positions
D = 16  # channels of a head
lesson.begin(38, "ring attention")
torch.set_num_threads(1)

# %% [markdown]
# ## Softmax in pieces
# The output for a query is o = sum of exp(s_j) v_j over the keys j that it sees, divided by the sum
# of exp(s_j), where s_j is its score with key j. Suppose that two sets of keys were handled apart,
# each with its output o and the logarithm of its sum, lse = log sum exp(s_j). Then the whole has
#
#     lse = log(exp(lse1) + exp(lse2)),    o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2
#
# So a rank can take the keys a few at a time, and keep one o and one lse per query. (Lesson 20 does
# the same over blocks of one device.)


# %%
def piece(q, k, v, seen):
    """q (H, t, D), k and v (H, u, D), seen (t, u) -> o (H, t, D), lse (H, t)."""
    scores = (q @ k.mT / D**0.5).masked_fill(~seen, -math.inf)  # (H, t, u)
    lse = scores.logsumexp(-1)
    safe = lse.masked_fill(lse == -math.inf, 0)  # a query that sees none of these keys: o = 0
    return (scores - safe[..., None]).exp() @ v, lse


def merge(o1, lse1, o2, lse2):
    lse = torch.logaddexp(lse1, lse2)  # finite if the first piece has a query's own key
    return o1 * (lse1 - lse).exp()[..., None] + o2 * (lse2 - lse).exp()[..., None], lse


# %% [markdown]
# ## A ring
# Queries stay. Keys and values go round: each rank works with those that it has, passes them to the
# next rank, and receives those of the rank before; after world - 1 turns it has seen all. What a
# query may see is decided by position, wherever its rank got it from, so positions travel too.
#
# For comparison, `gathered` asks for all keys and values at once.


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


def ring(q, k, v, mine, world):
    """q, k, v (H, t, D) at the positions `mine` (t,) -> o, scores needed, numbers held, sent."""
    there = mine
    needed = 0
    held = 0
    sent = 0
    o = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf)
    for turn in range(world):
        seen = mine[:, None] >= there
        o, lse = merge(o, lse, *piece(q, k, v, seen))
        needed = needed + int(seen.sum())
        held = max(held, k.numel() + v.numel() + H * seen.numel())
        if turn < world - 1:
            sent += k.numel() + v.numel()
            k, v, there = pass_on(k), pass_on(v), pass_on(there)
    return o, needed, held, sent


def gathered(q, k, v, mine, world):
    parts = [[torch.empty_like(x) for _ in range(world)] for x in (k, v, mine)]
    for into, x in zip(parts, (k, v, mine)):
        dist.all_gather(into, x.contiguous())
    k_all, v_all, there = (torch.cat(x, -2 if x[0].ndim == 3 else 0) for x in parts)
    seen = mine[:, None] >= there
    o, _ = piece(q, k_all, v_all, seen)
    held = k_all.numel() + v_all.numel() + H * seen.numel()
    return o, int(seen.sum()), held, (world - 1) * (k.numel() + v.numel())


# %% [markdown]
# ## Who works, who waits
# Position t sees t + 1 keys. If each rank has a *block* of consecutive positions, the last rank has
# nearly twice the mean work, and the others wait for it. A *zigzag* cuts the sequence into 2 P runs
# and gives rank r an early run, r, and a late one, 2 P - 1 - r.


# %%
def blocks(T, P):
    return torch.arange(T).chunk(P)


def zigzag(T, P):
    runs = torch.arange(T).chunk(2 * P)
    return [torch.cat([runs[r], runs[2 * P - 1 - r]]) for r in range(P)]


def both(rank, world):
    q, k, v = torch.randn(3, H, T, D, generator=torch.Generator().manual_seed(1))
    want = attend(q[None], k[None], v[None], None)[0]
    out = {}
    for name, way, cut in (
        ("gathered, blocks", gathered, blocks),
        ("ring, blocks", ring, blocks),
        ("ring, zigzag", ring, zigzag),
    ):
        mine = cut(T, world)[rank]
        o, *counts = way(q[:, mine], k[:, mine], v[:, mine], mine, world)
        out[name] = (o - want[:, mine]).abs().max().item(), *counts
    return out


# %%
P = 4
ranks = lesson.ranks(P, both, timeout_s=150)
rows = []
for name in ranks[0]:
    error, needed, held, sent = zip(*(r[name] for r in ranks))
    rows.append((name, max(error), *needed, max(held), max(sent)))
columns = ["way", "error", *(f"rank {r}" for r in range(P)), "held", "sent"]
lesson.table(columns, rows, "scores by rank; most numbers of k, v and scores held; numbers sent")
lesson.holds(max(row[1] for row in rows) < 1e-5, "all three equal attention on one device, to 1e-5")
lesson.holds(rows[0][7] == rows[1][7] == rows[2][7], "a ring sends what gathering everything sends")
lesson.holds(rows[0][6] == P * rows[1][6], "a ring holds 1 / P of the keys, values and scores")
lesson.holds(sum(rows[1][2:6]) == T * (T + 1) // 2, "each of T (T + 1) / 2 scores is needed once")
lesson.holds(len({*rows[2][2:6]}) == 1, "zigzag: every rank has the same number of scores")

shares = []
for P in (2, 4, 8, 64):
    work = [[float((part + 1).sum()) for part in cut(4096, P)] for cut in (blocks, zigzag)]
    shares.append((P, *(max(w) * P / sum(w) for w in work), 2 - 1 / P))
lesson.table(["P", "blocks", "zigzag", "2 - 1/P"], shares, "most work of a rank / mean, T = 4,096")
gold = [round(row[1], 4) for row in shares[:3]]
lesson.holds(gold == [1.4999, 1.7498, 1.8748], "in blocks the last rank has 2 - 1/P times the mean")
lesson.holds(all(row[2] == 1 for row in shares), "in a zigzag the load is even for 2 to 64 ranks")

# %%
fig = lesson.figure(8, 3)
axes = fig.subplots(1, 3, width_ratios=[2, 2, 3])
future = torch.ones(128, 128).triu(1) > 0
for ax, (name, cut) in zip(axes, (("blocks", blocks), ("zigzag", zigzag))):
    owner = torch.empty(128)
    for r, positions in enumerate(cut(128, 4)):
        owner[positions] = r
    picture = owner[:, None].masked_fill(future, math.nan)
    ax.imshow(picture, cmap="Set2", vmin=0, vmax=7, interpolation="nearest")
    percent = " ".join(f"{(p + 1).sum() / 82.56:.0f}" for p in cut(128, 4))  # of 128 x 129 / 2
    ax.set(title=f"{name}: {percent} %", xlabel="key", xticks=[], yticks=[])
axes[0].set_ylabel("query, colored by rank")
lengths = [2**k for k in range(12, 21)]
names = ("all keys, values and scores", "ring of 64")
for name, cut in zip(names, (1, 64)):  # one head of 128 channels on one of 64 ranks, bf16
    gb = [2 * (2 * n / cut * 128 + n / 64 * n / cut) / 1e9 for n in lengths]
    axes[2].loglog(lengths, gb, label=name)
axes[2].set(xlabel="positions, on 64 ranks", ylabel="GB held, one head"), axes[2].legend()
lesson.save(fig, "38_ring")

# %% [markdown]
# ## Trap
# After a block of keys in which a query sees nothing, all its scores are -inf, and
# exp(-inf - (-inf)) is NaN. It appears in no test whose ranks hold interleaved positions, and in
# every run whose ranks hold blocks. `piece` takes 0 for the missing maximum; and the *first* piece
# must be the rank's own, or `merge` adds up two sets of nothing.

# %%
q, k, v = torch.randn(3, H, 4, D, generator=torch.Generator().manual_seed(2))
nothing = torch.zeros(4, 4, dtype=torch.bool)
naive = (q @ k.mT).masked_fill(~nothing, -math.inf).softmax(-1) @ v
lesson.holds(naive.isnan().all().item(), "softmax over no key at all is NaN")
lesson.holds(not piece(q, k, v, nothing)[0].any().item(), "piece gives 0 for queries without keys")

# %% [markdown]
# ## Exercise
# `exercises/ex38.py`: attention with a window, for which a ring can stop early.
# `python course/check.py 38`
