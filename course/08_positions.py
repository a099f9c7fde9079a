# %% [markdown]
# # 8. Positions: how far back is a key?
#
# **Afterwards** you can derive RoPE, say what a layer without it sees, and size a cache of keys.
#
# **Question.** A query meets keys that were made earlier, and kept. How does it know how far back
# each of them stands, and what does it cost to keep them?
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Tensor (TP) Nos Blocos do
# Transformers" (grouped queries); *擴展的驚喜*, "擴展的驚喜" (grouped queries, NoPE). RoPE: Su et
# al. 2021. Core file: `model.py`, `rope_tables`, `apply_rope`, `KVCache`.
# Before: lesson 20. Next: lesson 22. Takes 4 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math
from dataclasses import replace

import torch

from config import PRESETS, GPTConfig
from model import GPT, KVCache, apply_rope, attend, rope_tables

lesson.begin(8, "positions")
torch.set_num_threads(1)
torch.manual_seed(0)

# %% [markdown]
# ## What is wanted
# The score of a query at position m and a key at position n is their dot product. It should depend
# on the two vectors and on the distance m - n, and on nothing else: a phrase means the same at the
# start of a book as at its end. And each vector is made where it stands, before it knows what it
# will meet: the position m may change q, the position n may change k.
#
# What changes a vector, and keeps a dot product if done to both? **A rotation.** Turn q by m times
# an angle and k by n times the same angle: their lengths stay, and the angle between them changes
# by (m - n) times it. In two dimensions:


# %%
def turn(x, angle):
    """Rotate the pairs (x[..., 0], x[..., 1]) by an angle in radians."""
    a, b = x[..., 0], x[..., 1]
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


q = torch.randn(2)
k = torch.randn(2)
step = torch.tensor(0.3)
rows = []
for m, n in ((0, 0), (5, 2), (105, 102), (2, 5)):
    rows.append((m, n, m - n, (turn(q, m * step) @ turn(k, n * step)).item()))
columns = ["query at", "key at", "distance", "score"]
lesson.table(columns, rows, "one q and one k, turned by 0.3 radians per position")
score = [row[3] for row in rows]
lesson.holds(abs(score[1] - score[2]) < 1e-4, "5 and 2 have the score of 105 and 102")
apart = min(abs(score[0] - score[1]), abs(score[1] - score[3]))
lesson.holds(apart > 1e-2, "another distance, or another direction, gives another score")

# %% [markdown]
# ## One angle is not enough
# A turn of one radian per position tells near keys apart well. But after 44 positions it has
# made seven whole turns and is back: distance 44 looks like 0. A slow turn never comes back, but
# hardly tells 1 from 2. So a head of D channels (numbers) has D/2 pairs, each with a speed of its
# own, from 1 radian per position down to nearly 1/theta (a constant), like the hands of a clock.

# %%
T = 2048
D = 64


def scores(theta: float, pairs=slice(None)):
    """Of q = k = (1, 1, ...) at distances 0 .. T - 1, relative to distance 0."""
    cos, _ = rope_tables(T, D, theta)  # (T, D/2): cos(distance x speed)
    return cos[:, pairs].mean(1)


curves = {"one pair, 1 radian": scores(1e4, slice(1)), "32 pairs, theta 10,000": scores(1e4)}
curves["32 pairs, theta 100,000"] = scores(1e5)
at = [1, 10, 44, 100, 2047]
rows = [(name, *(curve[d].item() for d in at)) for name, curve in curves.items()]
lesson.table(["turns", *(f"d={d:,}" for d in at)], rows, "score of two equal vectors d apart")
one, many, slow = curves.values()
lesson.holds(one[44] > 0.999, "with one speed, a key 44 back looks like one at distance 0")
lesson.holds(
    many[1:].max() < many[1] + 1e-6 < 0.99, "with 32 speeds the nearest key scores highest"
)
lesson.holds(slow[2047] > 2 * many[2047].abs(), "a larger theta keeps a key 2,047 back higher")

# %% [markdown]
# `apply_rope` does this for all pairs at once. It pairs channel i with channel i + D/2, not with
# i + 1 as the paper did: a matter of taste as long as q and k agree, and a classic mistake when
# weights move between libraries (lesson 44). Read as complex numbers, a pair is multiplied by
# exp(i x position x speed).

# %%
x = torch.randn(1, 64, 2, D)
cos, sin = rope_tables(64, D, 10_000.0)
speed = 10_000.0 ** (-torch.arange(0, D, 2) / D)
angle = torch.outer(torch.arange(64), speed)[:, None]  # (positions, 1, D/2)
pairs = torch.stack(x.chunk(2, -1), -1)  # (1, positions, heads, D/2, 2)
by_hand = turn(pairs, angle).movedim(-1, -2).flatten(-2)
by_complex = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
ours = apply_rope(x, cos, sin)
far = (ours - by_hand).abs().max(), (ours - torch.cat([by_complex.real, by_complex.imag], -1))
lesson.holds(
    max(d.abs().max() for d in far) < 1e-5, "apply_rope turns pairs, as complex numbers do"
)
grown = (ours.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max()
lesson.holds(grown < 1e-5, "RoPE changes no vector's length")

# %% [markdown]
# ## A layer that sees a set
# Leave positions out (NoPE), and a layer's output is a mean of values that does not depend on their
# order: **a set of earlier tokens**. Shuffle them, and the last token notices nothing. Two layers
# do notice, because the causal mask has shown each token a different past; so models can afford to
# leave RoPE out of some layers (`nope_every`), and to those layers distance does not matter.


# %%
def change(n_layer: int, nope_every: int) -> float:
    """Of the last token's logits, when the 31 before it are shuffled."""
    config = GPTConfig(64, 64, n_layer, 2, 2, 16, 32, nope_every=nope_every, mlp_hidden=64)
    model = GPT(config)
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)  # init_weights begins with almost all of it switched off
    idx = torch.randint(64, (1, 32))
    mixed = torch.cat([idx[:, torch.randperm(31)], idx[:, 31:]], 1)
    return (model(idx)[:, -1] - model(mixed)[:, -1]).abs().max().item()


cases = ((1, 0, "RoPE"), (1, 1, "NoPE"), (2, 1, "NoPE"))
rows = [(n, kind, change(n, nope)) for n, nope, kind in cases]
lesson.table(["layers", "positions", "change of the logits"], rows, "earlier tokens shuffled")
lesson.holds(rows[1][2] < 1e-5, "one layer without RoPE sees no order")
lesson.holds(
    min(rows[0][2], rows[2][2]) > 1e-2, "one layer with RoPE sees it, and so do two without"
)

# %% [markdown]
# ## What it costs to keep the keys
# Since a key is turned by its own position only, it never changes again. When a model writes, it
# keeps k and v of all earlier tokens in each layer (the cache of lesson 24), and reads all of it
# for each new token. With *grouped queries* (GQA) several heads share one k and v, as if these had
# been copied for each head.

# %%
q = torch.randn(1, 9, 64, D)
k, v = torch.randn(2, 1, 3, 64, D)
each = [t.repeat_interleave(3, 1) for t in (k, v)]  # heads 0, 1, 2 use the first k and v
far = (attend(q, k, v, None) - attend(q, *each, None)).abs().max()
other = (
    (attend(q, k, v, None) - attend(q, *(t.repeat(1, 3, 1, 1) for t in (k, v)), None)).abs().max()
)
smol = PRESETS["smol-135m"].model
rows = []
for kv_heads in (9, 3, 1):
    config = replace(smol, n_kv_head=kv_heads)
    cache = KVCache(config, 1, 1, torch.bfloat16, "meta")
    with torch.device("meta"):
        weights = sum(2 * p.numel() for p in GPT(config).parameters())  # bytes in bf16
    size = cache.k.nbytes + cache.v.nbytes
    rows.append((kv_heads, size, size * 2048 / 1e6, math.ceil(weights / size)))
columns = ["key/value heads of 9", "bytes per token", "MB at 2,048", "tokens = weights"]
lesson.table(
    columns, rows, "cache of smol-135m in bf16; last: tokens whose cache is as large as the weights"
)
lesson.holds(far < 1e-5 < other, "GQA repeats each k and v for neighbouring heads")
lesson.holds(
    [row[1] for row in rows[:2]] == [69_120, 23_040],
    "a token keeps 30 layers x 2 x 64 x 2 bytes for each kv head",
)

# %%
fig = lesson.figure(7.2, 2.8)
left, right = fig.subplots(1, 2, width_ratios=[3, 2])
for (name, curve), color in zip(curves.items(), ("silver", "tab:blue", "crimson")):
    left.plot(curve[:80], color=color, label=name, zorder=0 if color == "silver" else 1)
left.set(xlabel="distance", ylabel="score of equal vectors", ylim=(-1.1, 1.9))
left.legend(loc="upper right")
tokens = [0, 8192]
for (heads, size, *_), color in zip(rows, ("crimson", "tab:blue", "tab:green")):
    right.plot(tokens, [n * size / 1e6 for n in tokens], color=color)
    right.text(
        8300, 8192 * size / 1e6, f"{heads} kv head" + "s" * (heads > 1), color=color, va="center"
    )
right.set_xticks(tokens, [f"{n:,}" for n in tokens])
right.set(xlabel="tokens kept", ylabel="MB", xlim=(0, 13_000), title="cache of smol-135m")
lesson.save(fig, "08_positions")

# %% [markdown]
# ## Trap
# The table of cos and sin ends at `seq_len`, and so does what the model has seen: at larger
# distances the slow pairs reach angles that they never had in training. And angles need fp32: in
# bf16 the positions 256 and 257 are one number, so neighbours far into a text stand at one place.

# %%
position = torch.arange(4096.0)
different = [len(set(position.to(dtype).tolist())) for dtype in (torch.float32, torch.bfloat16)]
print("different positions of 4,096 in fp32 and bf16:", *different)
lesson.holds(different[0] == 4096 > 4 * different[1], "bf16 has few different positions of 4,096")

# %% [markdown]
# ## Exercise
# `exercises/ex08.py`: turn by any positions, also backwards, and stretch the speeds for a longer
# text. `python course/check.py 8`
#
# In your trainer `rotate` turns queries and keys. It is numpy's, and torch does not know how to go
# backwards through it. So `spine.py`, class `Turn`, tells it: an output is a sum of inputs with
# factors cos and sin. Read the same factors from the output's side, and only the sines change their
# sign: the gradient of a rotation by p is a rotation by -p.
