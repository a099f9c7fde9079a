# %% [markdown]
# # 33. Inside: what do the heads do, and how would you know?
#
# **Afterwards** you can watch a model's attention, switch a head off, and tell what a head looks at
# from what the model uses it for.
#
# **Question.** A model copies: where a token (a piece of text: lesson 9) comes again, it expects
# what followed it last time. Which parts do that, and how would you know?
#
# Source: Olsson et al. 2022, In-context Learning and Induction Heads. Core file: `model.py`
# (`init_previous_token_head`, `key_offset`). Before: lesson 32. Next: lesson 34.
# Takes 30 seconds on two cores.
#
# ## Look first
# This lesson needs the model that `bash run.sh` trains, `runs/tiny`. Before you read on, run
#
# `python eval.py look`
#
# and open the page that it names, `runs/tiny/look.html`. Spend ten minutes there:
#
# 1. The text is held-out Python; a dark token was a surprise. Click one, and read what the model
#    had expected in its place.
# 2. *How does the guess form?* Here the model is cut after each of its layers and asked for its
#    guess: this is called the **logit lens**. After which layer does the right token come up?
# 3. *Where does each head look?* Choose one that is called *previous token*, then one that is
#    called *induction*. Click a name that comes again, and see what such a head looks at.
# 4. *What is each part worth?* How much does the text cost if a head adds nothing?
#
# (docs/look.md explains each number.) The rest of this lesson makes steps 3 and 4 by hand.

# %%
import lesson  # first: it puts the project on the path
from contextlib import contextmanager, redirect_stdout

import torch
from torch import Tensor

import data
import eval
import model as model_file
import optim
from config import GPTConfig, TrainConfig
from machinery import trained
from model import GPT

torch.set_num_threads(1)
VOCAB = 64
T = 48
STEPS = 350
lesson.begin(33, "inside")
run = trained.EvalConfig(run_dir=str(lesson.tiny_run()), device="cpu", dtype="fp32")

# %% [markdown]
# ## A window into attention
# The fast kernel does not return its shares: how much of its attention a token gives to each
# earlier one. So, for a while, put a slow one in its place. It returns the shares, and leaves
# heads out of the sum if told to: they are *off*.


# %%
@contextmanager
def watched(off: tuple = ()):
    """Yields a list that gets the shares (B, H, T, T) of each layer; the heads in `off`, pairs
    (layer, head), add nothing."""
    shares = []
    kernel = model_file.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:  # (B, H, T, D) each
        later = torch.ones(q.size(2), k.size(2), dtype=torch.bool).triu(1)
        p = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(later, -torch.inf).softmax(-1)
        out = p @ v
        for layer, head in off:
            if layer == len(shares):
                out[:, head] = 0
        shares.append(p)
        return out

    model_file.attend = attend
    try:
        yield shares
    finally:
        model_file.attend = kernel


@torch.no_grad()
def look(model: GPT, ids: Tensor, off: tuple = ()) -> tuple[Tensor, list[Tensor]]:
    """-> the loss in nats (B, T - 1) of each token but the first, the shares of each layer."""
    with watched(off) as shares:
        return model(ids[:, :-1], ids[:, 1:], reduction="none"), shares


def habits(p: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Shares (B, H, T, T), ids (B, T) -> by head (H,): the mean share on the token before; the mean
    share on what followed earlier copies of the token, where there are any."""
    i = torch.arange(p.size(-1))
    ids = ids[:, : len(i)]
    copied = (ids[:, :, None] == ids.roll(1, 1)[:, None]) & (i >= 1) & (i[:, None] - i >= 2)
    after = (p * copied[:, None]).sum(-1).transpose(1, 2)[copied.any(-1)]  # (places, H)
    return p.diagonal(-1, 2, 3)[..., 1:].mean((0, 2)), after.mean(0)


def again(rows: int, shortest: int, longest: int, length: int = T, vocab: int = VOCAB) -> tuple:
    """Random tokens, none twice, and then the same over and over: ids (rows, length); which of the
    targets can be known. Each row repeats after its own number of tokens, shortest to longest."""
    period = torch.randint(shortest, longest + 1, (rows, 1))
    ids = torch.rand(rows, vocab).argsort(1).gather(1, torch.arange(length) % period)
    return ids, torch.arange(1, length) >= period


# %% [markdown]
# ## The model that you trained
# `runs/tiny` has four layers of two heads. Here are their habits on 100 random tokens that come
# twice: nothing but copying can tell what comes next there. And what each is worth: how many nats
# more held-out text costs when it is off, and how many more the random tokens do when they come
# again.

# %%
with redirect_stdout(None):  # it says which checkpoint it reads, in a long line
    loaded = eval.load_model(run)
tiny = loaded.model
torch.manual_seed(0)
twice, repeated = again(4, 100, 100, 200, tiny.config.vocab_size)
inputs, targets, _ = next(data.val_batches(loaded.data, 4, 4))
text = torch.cat([inputs, targets[:, -1:]], 1)
plain = tiny(inputs, targets, reduction="none").detach()
whole, _ = look(tiny, text)
copied, maps = look(tiny, twice)
lesson.holds((whole - plain).abs().max() < 1e-2, "watched, tiny has the same loss at every token")


def cost(*off) -> tuple[float, float]:
    """Nats more without these heads: of the held-out text, of the tokens that come again."""
    more = look(tiny, text, off)[0] - whole, (look(tiny, twice, off)[0] - copied)[repeated]
    return more[0].mean().item(), more[1].mean().item()


HEADS = [(layer, head) for layer in range(4) for head in range(2)]
rows = []
for layer, head in HEADS:
    back, after = (share[head].item() for share in habits(maps[layer], twice))
    rows.append((f"{layer}.{head}", back, after, *cost((layer, head))))
columns = ["head", "on before", "on copy", "text", "tokens that come again"]
lesson.table(columns, rows, "tiny's heads, layer.head; nats more when it is off")
_, backs, copies, _, costs = zip(*rows)
second, first = sorted(range(8), key=lambda i: copies[i])[-2:]  # look most at what followed
lesson.holds(backs[0] == max(backs) and backs[0] > 0.3, "tiny's planted head still looks back")
needed = copies[first] > 0.3 and costs[first] > 0.5
lesson.holds(needed, f"head {rows[first][0]} looks at the copy, and copying needs it: +0.5 nats")
lesson.holds(costs[0] < costs[first] / 2, "tiny's copying hardly needs the head that looks back")

# %% [markdown]
# ## How to find what followed
# Keys and queries compare tokens. But what followed the last copy is an arbitrary token: what gives
# it away is *the token before it*. So it takes two heads. One, in the first layer, looks at the
# token before and writes it down; one in the second layer then looks for the place where its own
# token is written down: an **induction head**.
#
# Two small models of two layers learn to copy random tokens. Both begin as the models of this
# project do: the first head looks at the token before from the start. In the text of *many
# distances*, tokens come again after 8 to 24 of them; in that of *one distance*, always after
# exactly 16.

# %%
shape = dict(n_layer=2, n_head=2, n_kv_head=2, head_dim=32, n_embd=64, mlp_hidden=64)
config = GPTConfig(seq_len=64, vocab_size=VOCAB, logit_softcap=0, **shape)
PERIODS = {"many distances": (8, 24), "one distance": (16, 16)}
models = {}
exams = {}
for name, periods in PERIODS.items():
    torch.manual_seed(0)
    models[name] = GPT(config)
    models[name].init_weights()
    exams[name] = again(64, *periods)
    adamw = TrainConfig(optimizer="adamw", lr=5e-3)
    optimizer, *_ = optim.build(models[name].param_groups(), adamw, config.n_embd)
    for _ in range(STEPS):
        ids, _ = again(24, *periods)
        models[name](ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

# %% [markdown]
# ## A map is not a reason
# Look at the maps of both (the figure): each has a head that looks at what followed the copy, and
# both began with a head that looks at the token before. Now switch that head off.

# %%
rows = []
nats_off = {}
pictures = {}
for name in models:
    ids, known = exams[name]
    for off in ((), ((0, 0),)):
        nats, shares = look(models[name], ids, off)
        back = habits(shares[0], ids)[0][0]
        after = habits(shares[1], ids)[1]  # (H,)
        if not off:
            pictures[name] = shares[1][0, after.argmax()]
        nats_off[name, len(off)] = nats[known].mean().item()
        way = "head 0 of layer 0 off" if off else "whole"
        rows.append((name, way, back.item(), after.max().item(), nats_off[name, len(off)]))
elsewhere, known = exams["many distances"]
moved = look(models["one distance"], elsewhere)[0][known].mean().item()
columns = ["model", "part", "on before", "on copy", "nats"]
lesson.table(columns, rows, "the same maps, another cause")
print(f"'one distance' on repeats after 8 to 24 tokens: {moved:.2f} nats")
lesson.holds(min(row[3] for row in rows[::2]) > 0.35, "both models look at what followed the copy")
needs, hardly = (nats_off[name, 1] - nats_off[name, 0] for name in models)
lesson.holds(needs > 2, "many distances: without its previous-token head it cannot copy, +2 nats")
lesson.holds(
    rows[1][3] < rows[0][3] / 2,
    "many distances: without it, the copying heads do not find the place",
)
lesson.holds(hardly < needs / 4, "one distance: it needs that head less than a quarter as much")
lesson.holds(moved > 2, "one distance: it cannot copy at another distance")

# %% [markdown]
# *One distance* counts 16 places back, and keeps a use for the head that looks back or not, as it
# happens: without that head *one distance* has 0.02 nats (0.02 to 0.42 with four seeds), and the
# other model 4.56 (4.56 to 4.81). (docs/look.md shows when such heads appear in a training.)

# %%
layer, head = HEADS[first]
pictures = {f"tiny's head {layer}.{head}": maps[layer][0, head]} | pictures
fig = lesson.figure(8, 3)
for ax, (name, p) in zip(fig.subplots(1, 3), pictures.items()):
    ax.imshow(p**0.5, cmap="Blues")
    ax.set(xlabel="looks at position", ylabel="position", title=name)
lesson.save(fig, "33_inside")

# %% [markdown]
# ## Trap
# What a head is worth depends on which others are there. Two heads of `tiny` look at what followed
# the copy. Each does some of the other's work, so to switch off one at a time says too little:

# %%
both = cost(HEADS[first], HEADS[second])[1]
alone = costs[first], costs[second]
print(f"nats more on tokens that come again: {alone[0]:.2f}, {alone[1]:.2f}, both off {both:.2f}")
lesson.holds(both > sum(alone), "both off cost more than the sum of each alone")

# %% [markdown]
# ## Exercise
# `exercises/ex33.py`: find the circuit that copies, in a model that you can run but not read.
# `python course/check.py 33`
