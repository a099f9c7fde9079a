# %% [markdown]
# # 8. Positions: how far back is a key?
#
# **Afterwards** you can derive rotary position embedding (RoPE), and say what a layer without it
# sees and why its angles must not be rounded.
#
# **Question.** A query meets keys that were made at earlier positions. How does it know how far
# back each key is?
#
# In lesson 4 a table gave each position a vector of its own. That told positions apart, but the
# table had an end, and nothing in it says that 5 and 2 are as far apart as 105 and 102. Lesson 5
# used `rotate` instead. Here you derive it.
#
# Sources: Su et al. 2021 (RoPE); *擴展的驚喜*, "擴展的驚喜" (NoPE). Core file: `model.py`,
# `rope_tables`, `apply_rope`. Before: lesson 7. Next: lesson 9. Takes 4 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import torch

from config import GPTConfig
from model import GPT, apply_rope, rope_tables

lesson.begin(8, "positions")
torch.set_num_threads(1)
torch.manual_seed(0)

# %% [markdown]
# ## What is wanted
# The score of a query at position m and a key at position n is their dot product. It should depend
# on the two vectors and on the distance m - n, and on nothing else: a phrase means the same at the
# start of a book as at its end. And each vector is made at its own position, before it knows which
# others it will meet: the position m may change q, and the position n may change k.
#
# What changes a vector, yet leaves a dot product alone when done to both? **A rotation.** Turn q by
# m times an angle and k by n times the same angle: their lengths stay, and the angle between them
# changes by m - n times that angle. In two dimensions:


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
lesson.holds(abs(score[1] - score[2]) < 1e-4, "5 and 2 have the same score as 105 and 102")
apart = min(abs(score[0] - score[1]), abs(score[1] - score[3]))
lesson.holds(apart > 1e-2, "another distance, or another direction, gives another score")

# %% [markdown]
# ## One angle is not enough
# Turn a pair by one radian per position, and its score separates near keys well. But after 44
# positions the pair has made seven whole turns and is back where it began: distance 44 looks like
# 0. A slower pair takes far longer to come back, but its score is nearly the same at distances 1
# and 2. So a head of D channels (numbers) has D/2 pairs, each with its own speed, like the hands of
# a clock: from 1 radian per position down to nearly 1/theta. Theta is a constant you choose. It is
# lesson 5's `base`: 100 there, for pieces of 64 bytes, and 10,000 in the paper.
#
# To see what the pairs do together, let query and key be the same vector, with a 1 in each channel.
# A dot product is length times length times the cosine of the angle between. The pair (1, 1) has
# length sqrt(2), and at distance d a pair of speed s is turned by d s against itself, so it adds
# 2 cos(d s) to the score. Divided by the score at distance 0, that leaves the mean of the cosines:

# %%
T = 2048
D = 64


def scores(theta: float, pairs=slice(None)):
    """The score of q = k = (1, 1, ...) at distances 0 to T - 1, divided by that at distance 0."""
    cos, _ = rope_tables(T, D, theta)  # (T, D/2): cos(distance x speed)
    return cos[:, pairs].mean(1)


# slice(1): the first pair only
curves = {"one pair, speed 1": scores(1e4, slice(1)), "32 pairs, theta 10,000": scores(1e4)}
curves["32 pairs, theta 100,000"] = scores(1e5)
at = [1, 10, 44, 300, 2047]
rows = [(name, *(curve[d].item() for d in at)) for name, curve in curves.items()]
lesson.table(["speeds", *(f"d={d:,}" for d in at)], rows, "score of two equal vectors d apart")
one, many, slow = curves.values()
lesson.holds(one[44] > 0.999, "with one speed, a key 44 back looks like one at distance 0")
lesson.holds(
    many[1:].max() < many[1] + 1e-6 < 0.99, "with 32 speeds the nearest key scores highest"
)
farther = slow[1000:].mean() > 2 * many[1000:].mean()
lesson.holds(farther, "beyond distance 1,000, ten times theta gives over twice the mean score")

# %% [markdown]
# The scores do not measure nearness: they rise and fall along the way. They are where a model
# starts. It learns vectors q and k in which some pairs weigh more than others.
#
# `apply_rope` (lesson 5's `rotate`) turns all pairs at once. It pairs channel i with channel i +
# D/2, not with i + 1 as the paper did. Either is fine as long as q and k agree, but it is a classic
# mistake when weights move between libraries (lesson 34). If you know complex numbers, read a pair
# (a, b) as a + bi: turning it means multiplying it by exp(i x position x speed).

# %%
x = torch.randn(1, 64, 2, D)
cos, sin = rope_tables(64, D, 10_000.0)
speed = 10_000.0 ** (-torch.arange(0, D, 2) / D)
angle = torch.outer(torch.arange(64), speed)[:, None]  # (positions, 1, D/2)
pairs = torch.stack(x.chunk(2, -1), -1)  # (1, positions, heads, D/2, 2)
by_hand = turn(pairs, angle).movedim(-1, -2).flatten(-2)
ours = apply_rope(x, cos, sin)
lesson.holds(torch.allclose(ours, by_hand, atol=1e-5), "apply_rope turns each pair by its angle")
grown = (ours.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max()
lesson.holds(grown < 1e-5, "RoPE changes no vector's length")

# %% [markdown]
# ## A layer that sees a set
# Leave positions out (NoPE), and a layer's output is a mean of values that ignores their order: it
# sees **a set of earlier tokens** (a token is what a model reads, so far a byte). Shuffle them, and
# the last token notices nothing. Two layers do notice. Lesson 4's mask, the **causal mask**, shows
# each token only those before it. After the first layer, then, a token's vector depends on which
# tokens came before it, and the second layer reads those vectors. So models can afford to leave
# RoPE out of some layers, and to those layers distance does not matter. To try it, take the
# project's model with every layer (`nope_every=1`) or none (0) without RoPE.


# %%
def change(n_layer: int, nope_every: int) -> float:
    """How far the last token's logits (its 64 scores) move when the 31 before it are shuffled."""
    heads = dict(n_head=2, n_kv_head=2, head_dim=16)
    shape = dict(seq_len=64, vocab_size=64, n_layer=n_layer, n_embd=32, mlp_hidden=64)
    model = GPT(GPTConfig(**shape, **heads, nope_every=nope_every))
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)  # as init_weights leaves them, blocks add nothing
    idx = torch.randint(64, (1, 32))
    mixed = torch.cat([idx[:, torch.randperm(31)], idx[:, 31:]], 1)
    return (model(idx)[:, -1] - model(mixed)[:, -1]).abs().max().item()


cases = ((1, 0, "RoPE"), (1, 1, "NoPE"), (2, 1, "NoPE"))
rows = [(n, kind, change(n, nope)) for n, nope, kind in cases]
lesson.table(["layers", "positions", "change of the logits"], rows, "earlier tokens shuffled")
lesson.holds(rows[1][2] < 1e-5, "one layer without RoPE sees no order")
lesson.holds(
    min(rows[0][2], rows[2][2]) > 1e-2, "one layer with RoPE sees the order, and so do two without"
)

# %%
fig = lesson.figure(8, 3)
left, right = fig.subplots(1, 2)
for (name, curve), color in zip(curves.items(), ("silver", "tab:blue", "crimson")):
    left.plot(curve[:80], color=color, label=name)
    if name != "one pair, speed 1":
        right.plot(curve, color=color)
left.set(xlabel="distance", ylabel="score of equal vectors", ylim=(-1.1, 1.9))
left.legend(loc="upper right")
right.set(xlabel="distance", ylim=(-0.2, 1.1), title="the same, farther")
lesson.save(fig, "08_positions")

# %% [markdown]
# ## Trap
# You can compute angles for any position, but a model trained on T positions has never seen a
# larger distance: beyond it, the slow pairs reach angles they never had in training. And angles
# must not be rounded. Models often compute in bf16, numbers of 16 bits with two to three digits;
# fp32 has 32 bits and seven digits. In bf16 the positions 256 and 257 are the same number, so, far
# into a text, neighbors share a position.

# %%
position = torch.arange(4096.0)
different = [len(set(position.to(dtype).tolist())) for dtype in (torch.float32, torch.bfloat16)]
print("of 4,096 positions, how many differ in fp32 and in bf16:", *different)
lesson.holds(different[0] == 4096 > 4 * different[1], "bf16 tells few of 4,096 positions apart")

# %% [markdown]
# ## Exercise
# `exercises/ex08.py`: turn vectors by any positions, backward too, and stretch the speeds for a
# longer text. `python course/check.py 8`
#
# In your trainer, `rotate` turns queries and keys. It is written in numpy, so torch does not know
# how to go backward through it; the class `Turn` in `spine.py` tells it. Each output is a sum
# of inputs with factors cos and sin. Read the same factors from the output's side, and only the
# sines change sign: the gradient of a rotation by p is a rotation by -p.
