# %% [markdown]
# # 33. Inside: what do the heads do, and how would you know?
#
# **Afterwards** you can watch a model's attention, read its guess after each layer, switch a head
# off, and tell what a head looks at from what the model uses it for.
#
# **Question.** A model copies: where a token (a piece of text: lesson 9) comes again, it expects
# what followed it last time. Which parts do that, when do they appear, and how would you know?
#
# Source: Olsson et al. 2022, In-context Learning and Induction Heads; nostalgebraist 2020,
# interpreting GPT: the logit lens. Core file: `model.py` (`_init_previous_token_head`,
# `key_offset`). Before: lesson 32. Next: lesson 24 (a cache). Takes 25 seconds on two cores.

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
EVERY = 50
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
# ## How to find what followed
# Keys and queries compare tokens. But what followed the last copy is an arbitrary token: what gives
# it away is *the token before it*. So it takes two heads. One, in the first layer, looks at the
# token before and writes it down; one in the second layer then looks for the place where its own
# token is written down: an **induction head**.
#
# Three small models of two layers learn to copy random tokens, repeated after 8 to 24 of them.
# *Plain* begins with random heads. *Planted* begins as the models of this project do: its first
# head looks at the token before from the start. *One distance* is planted too, but its text always
# repeats after exactly 16 tokens.


# %%
class Plain(GPT):
    def _init_previous_token_head(self, name, weight):
        pass


shape = dict(n_layer=2, n_head=2, n_kv_head=2, head_dim=32, n_embd=64, mlp_hidden=64)
config = GPTConfig(seq_len=64, vocab_size=VOCAB, logit_softcap=0, **shape)
KINDS = {"plain": (Plain, 8, 24), "planted": (GPT, 8, 24), "one distance": (GPT, 16, 16)}
history = {}
models = {}
exams = {}
for name, (kind, *periods) in KINDS.items():
    torch.manual_seed(0)
    models[name] = kind(config)
    exams[name] = again(64, *periods)
    models[name].init_weights()
    adamw = TrainConfig(optimizer="adamw", lr=5e-3)
    optimizer, *_ = optim.build(models[name].param_groups(), adamw, config.n_embd)
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            ids, known = exams[name]
            nats, (first, second) = look(models[name], ids)
            shares = habits(first, ids)[0].max().item(), habits(second, ids)[1].max().item()
            history[name, step] = nats[known].mean().item(), *shares
        ids, _ = again(24, *periods)
        models[name](ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step(), optimizer.zero_grad()
steps = range(0, STEPS + 1, EVERY)
rows = [(n, *history["plain", n], *history["planted", n]) for n in steps]
columns = ["step", "nats", "on before", "on copy", "planted: nats", "before", "copy"]
lesson.table(columns, rows, "best head's share on the token before (layer 0), on a copy (layer 1)")
_, nats, before, copy, quick, *_ = map(torch.tensor, zip(*rows))
lesson.holds(nats[2] > 3.5 and nats[-1] < 1, "plain: a plateau for 100 steps, and then it copies")
grown = [int((x > x.max() / 2).nonzero()[0]) for x in (before, copy)]
lesson.holds(grown[0] <= grown[1], "the head for the token before comes no later than the copying")
lesson.holds(quick[3] < 1 < nats[3] - 1, "with the planted head it copies 100 steps earlier")

# %% [markdown]
# ## A map is not a reason
# Look at the maps of *planted* and of *one distance*: both have heads that look at what followed
# the copy, and both began with a head that looks at the token before. Now switch that head off.

# %%
rows = []
nats_off = {}
for name in ("planted", "one distance"):
    ids, known = exams[name]
    for off in ((), ((0, 0),)):
        nats, shares = look(models[name], ids, off)
        back = habits(shares[0], ids)[0][0]
        after = habits(shares[1], ids)[1].max()
        nats_off[name, len(off)] = nats[known].mean().item()
        way = "head 0 of layer 0 off" if off else "whole"
        rows.append((name, way, back.item(), after.item(), nats_off[name, len(off)]))
elsewhere, known = exams["planted"]
moved = look(models["one distance"], elsewhere)[0][known].mean().item()
columns = ["model", "part", "on before", "on copy", "nats"]
lesson.table(columns, rows, "the same maps, another cause")
print(f"'one distance' on repeats after 8 to 24 tokens: {moved:.2f} nats")
lesson.holds(min(row[3] for row in rows[::2]) > 0.35, "both models look at what followed the copy")
needs, hardly = (nats_off[name, 1] - nats_off[name, 0] for name in ("planted", "one distance"))
lesson.holds(needs > 2, "planted: without its previous-token head it cannot copy, +2 nats")
lesson.holds(rows[1][3] < 0.2, "planted: without it, the copying heads do not find the place")
lesson.holds(hardly < needs / 4, "one distance: it needs that head less than a quarter as much")
lesson.holds(moved > 2, "one distance: it cannot copy at another distance")

# %% [markdown]
# *One distance* counts 16 places back, and keeps a use for the planted head or not, as it happens:
# with seeds 1, 2 and 3 switching it off costs 0.11, 0.60 and 0.03 nats, but 5 in *planted*. Without
# it *one distance* has 0.16 nats (0.04 to 0.16 with three seeds), *planted* 5.05 (4.51 to 5.16).
#
# ## The model that you trained
# `runs/tiny` has four layers of two heads. Here are their habits on 100 random tokens that come
# twice, and what each is worth: how many nats more held-out text costs when it is off, and how many
# more the random tokens do when they come again. (Half of each key is that of the token before,
# `key_offset` in `model.py`. So in `tiny` one head can find the place by itself.)

# %%
with redirect_stdout(None):  # it says which checkpoint it reads, in a long line
    loaded = eval.load_model(run)
tiny = loaded.model
torch.manual_seed(0)
ids, known = again(4, 100, 100, 200, tiny.config.vocab_size)
inputs, targets, _ = next(data.val_batches(loaded.data, 4, 4))
text = torch.cat([inputs, targets[:, -1:]], 1)
plain = tiny(inputs, targets, reduction="none").detach()
whole, _ = look(tiny, text)
copied, maps = look(tiny, ids)
lesson.holds((whole - plain).abs().max() < 1e-2, "watched, tiny has the same loss at every token")


def cost(*off) -> tuple[float, float]:
    """Nats more without these heads: of the held-out text, of the tokens that come again."""
    more = look(tiny, text, off)[0] - whole, (look(tiny, ids, off)[0] - copied)[known]
    return more[0].mean().item(), more[1].mean().item()


HEADS = [(layer, head) for layer in range(4) for head in range(2)]
rows = []
for layer, head in HEADS:
    back, after = (share[head].item() for share in habits(maps[layer], ids))
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
# ## A guess after each layer
# Each layer adds to one stream of vectors, and the output head reads what the last one leaves. It
# can read earlier: leave out the layers after the second, say, and it tells what the model would
# guess by then. This is the **logit lens**. Below are the nats of held-out text and of the random
# tokens that come again, and the likeliest next token after `for key, value in d.items():` and a
# line that begins with `print(key,`. It is the last layer that finds a word there.

# %%
prompt = "for key, value in d.items():\n    print(key,"
blocks = tiny.blocks
rows = []
tokenizer = loaded.tokenizer
asked = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(prompt)]])
for depth in range(5):
    tiny.blocks = blocks[:depth]
    guess = tokenizer.decode([tiny(asked)[0, -1].argmax().item()])
    of_text = look(tiny, text)[0].mean()
    of_copies = look(tiny, ids)[0][known].mean()
    rows.append((depth, of_text.item(), of_copies.item(), repr(guess)))
columns = ["layers", "text", "tokens that come again", "print(key,"]
lesson.table(columns, rows, "tiny's nats if the head reads early, and its next token")
_, by_text, by_copy, _ = zip(*rows)
layer, head = HEADS[first]
lesson.holds(by_copy[layer] - by_copy[layer + 1] > 2, "copies appear in the layer of that head")
lesson.holds(by_text[4] == min(by_text), "the whole model reads held-out text best")

# %%
fig = lesson.figure(8, 2.7)
a, b, c = fig.subplots(1, 3)
for name, color in (("plain", "silver"), ("planted", "crimson")):
    for i, line, what in ((1, "--", "before"), (2, "-", "copy")):
        y = [history[name, n][i] for n in steps]
        a.plot(steps, y, line, color=color, label=f"{name}, on {what}")
a.set(xlabel="step", ylabel="share of attention", title="two heads appear")
a.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.12), ncols=2)
b.imshow(maps[layer][0, head] ** 0.5, cmap="Blues")
b.set(xlabel="on position", ylabel="position", title=f"tiny's head {layer}.{head}")
c.plot(range(5), by_text, "o-", label="held-out text")
c.plot(range(5), by_copy, "o-", label="tokens that come again")
c.set(xlabel="layers", ylabel="nats", title="logit lens", ylim=(0, None)), c.legend(fontsize=7)
lesson.save(fig, "33_inside")

# %% [markdown]
# ## Trap
# What a head is worth depends on which others are there. Two heads of `tiny` look at what followed
# the copy. Each does some of the other's work, so to switch off one at a time says too little:

# %%
both = cost(HEADS[first], HEADS[second])[1]
rows = [(f"{first // 2}.{first % 2}", costs[first]), (f"{second // 2}.{second % 2}", costs[second])]
rows += [("sum of the two", costs[first] + costs[second]), ("both at once", both)]
lesson.table(["heads off", "nats more"], rows, "tokens that come again")
lesson.holds(both > rows[2][1], "both off cost more than the sum of each alone")

# %% [markdown]
# ## Exercise
# `exercises/ex33.py`: find the circuit that copies, in a model that you can run but not read.
# `python course/check.py 33`
