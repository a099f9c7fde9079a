# %% [markdown]
# # 33. Inside: what do the heads do, and how would you know?
#
# **Afterwards** you can watch a model's attention, switch a head off, and tell what a head looks at
# from what the model uses it for.
#
# **Question.** A model copies: when a token (a piece of text: lesson 9) comes again, it expects
# what followed it last time. Which parts do that, and how would you know?
#
# Source: Olsson et al. 2022, In-context Learning and Induction Heads. Core file: `model.py`
# (`init_previous_token_head`, `key_offset`). Before: lesson 9. Next: lesson 34.
# Takes 30 seconds on two cores.
#
# ## Look first
# This lesson needs the model that `bash run.sh` trains, `runs/tiny`. Before you read on, type
#
# `python eval.py look`
#
# and open the page that it names, `runs/tiny/look.html`. Spend ten minutes there:
#
# 1. The text is held-out Python. A dark token came as a surprise: click one, and read what the
#    model expected in its place.
# 2. *How does the guess form?* Here the model is cut off after each of its layers and asked for its
#    guess. This is called the **logit lens**. After which layer does the right token come up?
# 3. *Where does each head look?* Choose a head labeled *previous token*, then one labeled
#    *induction*. Click a name that comes again, and see where such a head looks.
# 4. *What is each part worth?* How much more does the text cost when a head adds nothing?
#
# (docs/look.md explains each number.) The rest of this lesson does steps 3 and 4 by hand.

# %%
import lesson  # first: it puts the project on the path
from contextlib import redirect_stdout

import torch

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
# earlier one. So put a slow one in its place for a while. It returns the shares, and leaves heads
# out of the sum if you tell it to: they are *off*.


# %%
@torch.no_grad()
def look(model, ids, off=()):
    """-> the loss in nats (B, T - 1) of each token but the first; the shares (B, H, T, T) of each
    layer. The heads in `off`, pairs (layer, head), add nothing."""
    shares = []
    kernel = model_file.attend

    def attend(q, k, v, mask):  # (B, H, T, D) each
        scores = q @ k.mT / q.size(-1) ** 0.5
        p = (scores + torch.full_like(scores, -torch.inf).triu(1)).softmax(-1)
        out = p @ v
        for layer, head in off:
            if layer == len(shares):
                out[:, head] = 0
        shares.append(p)
        return out

    model_file.attend = attend
    try:
        return model(ids[:, :-1], ids[:, 1:], reduction="none"), shares
    finally:
        model_file.attend = kernel


def habits(p, ids):
    """Shares (B, H, T, T), ids (B, T) -> for each head (H,), the mean share on the token before;
    the mean share on what followed earlier copies of the token, where there are any."""
    i = torch.arange(p.size(-1))
    ids = ids[:, : len(i)]
    copied = (ids[:, :, None] == ids.roll(1, 1)[:, None]) & (i >= 1) & (i[:, None] - i >= 2)
    after = (p * copied[:, None]).sum(-1).transpose(1, 2)[copied.any(-1)]  # (places, H)
    return p.diagonal(-1, 2, 3)[..., 1:].mean((0, 2)), after.mean(0)


def again(rows, shortest, longest, length=T, vocab=VOCAB):
    """Random tokens, all different, then the same ones over and over: ids (rows, length); which
    targets can be known. Each row repeats after its own number of tokens, shortest to longest."""
    period = torch.randint(shortest, longest + 1, (rows, 1))
    ids = torch.rand(rows, vocab).argsort(1).gather(1, torch.arange(length) % period)
    return ids, torch.arange(1, length) >= period


# %% [markdown]
# ## The model that you trained
# `runs/tiny` has four layers of two heads. Here are their habits on 100 random tokens that come
# twice: only copying can tell what comes next there. And here is what each head is worth: how many
# nats more the held-out text costs when the head is off, and how many more the random tokens cost
# when they come again.

# %%
with redirect_stdout(None):  # one long line, on the checkpoint that it reads
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


def cost(*off):
    """Nats more without these heads: on the held-out text, on the tokens that come again."""
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
# Keys and queries compare tokens. But what followed the last copy can be any token: what gives it
# away is *the token before it*. So it takes two heads. One, in the first layer, looks at the token
# before and writes it down. Another, in the second layer, then looks for the place where its own
# token is written down: an **induction head**.
#
# Two small models of two layers learn to copy random tokens. Both begin as this project's models
# do, with a first head that looks at the token before. In the text for *many distances*, the tokens
# come again after 8 to 24 tokens; in the text for *one distance*, always after exactly 16.

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
# Look at the maps of both models (in the figure): each has a head that looks at what followed the
# copy, and each began with a head that looks at the token before. Now switch that one off.

# %%
rows = []
pictures = {}
for name, (ids, known) in exams.items():
    for off, part in (((), "whole"), (((0, 0),), "head 0 of layer 0 off")):
        nats, shares = look(models[name], ids, off)
        back = habits(shares[0], ids)[0][0]
        after = habits(shares[1], ids)[1]  # (H,)
        rows.append((name, part, back.item(), after.max().item(), nats[known].mean().item()))
        pictures.setdefault(name, shares[1][0, after.argmax()])
elsewhere, known = exams["many distances"]
moved = look(models["one distance"], elsewhere)[0][known].mean().item()
columns = ["model", "part", "on before", "on copy", "nats"]
lesson.table(columns, rows, "the same maps, another cause")
print(f"'one distance' on repeats after 8 to 24 tokens: {moved:.2f} nats")
lesson.holds(min(row[3] for row in rows[::2]) > 0.35, "both models look at what followed the copy")
needs = rows[1][4] - rows[0][4]
hardly = rows[3][4] - rows[2][4]
lesson.holds(needs > 2, "many distances: without its previous-token head it cannot copy, +2 nats")
lost = rows[1][3] < rows[0][3] / 2
lesson.holds(lost, "many distances: without it, the copying heads do not find the place")
lesson.holds(hardly < needs / 4, "one distance: it needs that head less than a quarter as much")
lesson.holds(moved > 2, "one distance: it cannot copy at another distance")

# %% [markdown]
# *One distance* counts 16 places back. Whether it still has a use for the head that looks back is a
# matter of luck: without that head *one distance* has 0.02 nats (0.02 to 0.42 with four seeds), and
# the other model 4.56 (4.56 to 4.81). (docs/look.md shows when such heads appear during training.)

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
# the copy. Each can do some of the other's work, so switching off one at a time tells you too
# little:

# %%
both = cost(HEADS[first], HEADS[second])[1]
alone = costs[first], costs[second]
print(f"nats more on tokens that come again: {alone[0]:.2f}, {alone[1]:.2f}, both off {both:.2f}")
lesson.holds(both > sum(alone), "both off cost more than each alone, added up")

# %% [markdown]
# ## Exercise
# `exercises/ex33.py`: find the circuit that copies, in a model that you can run but not read.
# `python course/check.py 33`
