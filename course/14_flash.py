# %% [markdown]
# # 14. Attention: where the square goes
#
# **Question.** A longer sequence takes more memory. Which part of attention's memory is quadratic
# in the length, and who removed it?
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Anotações detalhadas da Semana 1"
# (memory grows with the square of the sequence), "Paralelismo de Tensor (TP) Nos Blocos do
# Transformers" (grouped queries); *擴展的驚喜*, "擴展的驚喜" (grouped queries, NoPE, document
# masks). Core file: `model.py`, `attend`, `apply_rope`. Before: lesson 13. Next: lesson 16.
# Takes 6 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from config import PRESETS, GPTConfig
from model import GPT, KVCache, apply_rope, attend, rope_tables

H, D, BLOCK = 2, 64, 128
lesson.begin(14, "attention")
torch.set_num_threads(1)
torch.manual_seed(0)

# %% [markdown]
# ## Three lines that store a square
# Each of T queries meets T keys: T x T scores for each head. The product with v needs them again in
# the backward pass, so autograd stores them.


# %%
def by_hand(q, k, v):
    """softmax(q k^T / sqrt(D)) v, causal: (B, H, T, D) each -> (B, H, T, D)."""
    future = torch.full((q.size(2), q.size(2)), -math.inf).triu(1)
    weights = F.softmax(q * D**-0.5 @ k.mT + future, -1)  # (B, H, T, T)
    return weights @ v


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


def random_qkv(T, B=1):
    return [torch.randn(B, H, T, D, requires_grad=True) for _ in range(3)]


# %% [markdown]
# ## The same result from blocks
# Flash attention computes the scores block by block and forgets them. A softmax over all keys is
# not a sum over blocks, but it becomes one if each query keeps two things: its output so far, and
# the log of its sum of exponentials so far (`lse`). When a block raises `lse`, the old output
# shrinks to match. The backward pass computes the scores again: exp(score - lse) is the weight.


# %%
class Flash(torch.autograd.Function):
    """Flash(q, k, v, is_causal), (..., T, D) each, after Dao 2023, "FlashAttention-2"."""

    def blocks(q, k, is_causal):
        """-> rows i, columns j and scores of each block that is not wholly in the future."""
        T = q.size(-2)
        for i, j in ((i, j) for i in range(0, T, BLOCK) for j in range(0, T, BLOCK)):
            if not is_causal or j <= i:
                rows, columns = slice(i, i + BLOCK), slice(j, j + BLOCK)
                scores = q[..., rows, :] @ k[..., columns, :].mT * D**-0.5
                if is_causal and i == j:
                    scores += torch.full_like(scores, -math.inf).triu(1)
                yield rows, columns, scores

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        o, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
        for i, j, scores in Flash.blocks(q, k, is_causal):
            new = torch.logaddexp(lse[..., i], scores.logsumexp(-1))  # (..., BLOCK)
            o[..., i, :] *= (lse[..., i] - new).exp()[..., None]
            o[..., i, :] += (scores - new[..., None]).exp() @ v[..., j, :]
            lse[..., i] = new
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        mean = (do * o).sum(-1, keepdim=True)  # of the weights' gradients, weighted by the weights
        for i, j, scores in Flash.blocks(q, k, ctx.is_causal):
            weights = (scores - lse[..., i, None]).exp()
            dv[..., j, :] += weights.mT @ do[..., i, :]
            d_scores = weights * (do[..., i, :] @ v[..., j, :].mT - mean[..., i, :]) * D**-0.5
            dq[..., i, :] += d_scores @ k[..., j, :]
            dk[..., j, :] += d_scores.mT @ q[..., i, :]
        return dq, dk, dv, None


flash = lambda q, k, v: Flash.apply(q, k, v, True)
project = lambda q, k, v: attend(q, k, v, None)  # PyTorch's kernel, as the project calls it
inputs = random_qkv(300)  # the last block is not full
outputs = [fn(*inputs) for fn in (by_hand, project, flash)]
g = torch.randn_like(outputs[0])
gradients = [torch.autograd.grad(o, inputs, g) for o in outputs]
far = max((o - outputs[0]).abs().max().item() for o in outputs)
far_g = max((a - b).abs().max().item() for row in gradients for a, b in zip(row, gradients[0]))
lesson.holds(far < 1e-5 and far_g < 1e-5, "three ways, the same output and gradients, to 1e-5")

# %%
lengths, stored = [128, 256, 512, 1024, 2048], {}
ways = {"by hand": by_hand, "PyTorch's kernel": project, "our Flash": flash}
for T in lengths:
    inputs, mask = random_qkv(T), torch.ones(T, T, dtype=torch.bool).tril()
    for name, fn in ways.items():
        stored[name, T] = saved_bytes(fn, *inputs)
    stored["kernel, dense mask", T] = saved_bytes(attend, *inputs, mask)
names = list(dict.fromkeys(name for name, _ in stored))
rows = [(T, *(stored[name, T] for name in names)) for T in lengths]
lesson.table(["T", *names], rows, "bytes stored for the backward pass, 2 heads of 64")

square = all(stored["by hand", T] == 4 * H * (T * T + T * D) for T in lengths)
lesson.holds(square, "by hand: 4 H (T^2 + T D) bytes, the weights and the scaled q")
line = all(stored[name, T] == 4 * H * (T * D + T) for name in names[1:3] for T in lengths)
lesson.holds(line, "kernel and Flash: 4 H (T D + T) bytes, the output and lse")
dense = all(stored[names[3], T] == stored[names[1], T] + 4 * T * T for T in lengths)
lesson.holds(dense, "a mask of True and False is stored as T x T floats")
lesson.holds((rows[-1][1], rows[-1][2]) == (34_603_008, 1_064_960), "at T = 2,048: 35 MB, 1 MB")
twice = all(saved_bytes(f, *random_qkv(512, 2)) == 2 * stored[n, 512] for n, f in ways.items())
lesson.holds(twice, "all are linear in the number of rows")


def flops(fn, T) -> int:
    with FlopCounterMode(display=False) as counter:
        fn(*random_qkv(T))
    return counter.get_total_flops()


work = {name: [flops(ways[name], T) for T in (1024, 2048)] for name in ("by hand", "our Flash")}
lesson.holds(work["by hand"][1] == 4 * work["by hand"][0], "twice the length, four times the work")
lesson.holds(
    0.5 < work["our Flash"][1] / work["by hand"][1] < 0.54, "Flash skips the future's half"
)

# %% [markdown]
# ## Positions are angles
# RoPE reads channels i and i + D/2 as one complex number and turns it by position x frequency. A
# product of q and k then depends on the distance of their positions alone.

# %%
T = 64
cos, sin = rope_tables(T, D, 10_000.0)
x = torch.randn(1, T, H, D)
angle = torch.outer(torch.arange(T), 10_000.0 ** (-torch.arange(0, D, 2) / D))  # (T, D/2)
turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
by_complex = torch.cat([turned.real, turned.imag], -1)
far = (apply_rope(x, cos, sin) - by_complex).abs().max()
lesson.holds(far < 1e-5, "apply_rope multiplies complex numbers")
q, k = (apply_rope(torch.randn(D).expand(1, T, 1, D), cos, sin)[0, :, 0] for _ in range(2))
products = q @ k.T  # the same q and k at each position (T, T)
lesson.holds((products[8:, 8:] - products[:-8, :-8]).abs().max() < 1e-4, "only distance counts")

# %% [markdown]
# Without positions (NoPE) a layer sees a *set* of earlier tokens: shuffle them, and the last token
# notices nothing. A second layer does: the causal mask has given each token a different past.


# %%
def last_logits(n_layer, nope_every, idx):
    config = GPTConfig(64, 64, n_layer, 2, 2, 16, 32, nope_every=nope_every, mlp_hidden=64)
    model = GPT(config)
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)  # init_weights begins with almost all of it switched off
    return model(idx)[:, -1]


idx = torch.randint(64, (1, 32))
mixed = torch.cat([idx[:, torch.randperm(31)], idx[:, 31:]], 1)
rows = []
for n_layer, nope_every in ((1, 0), (1, 1), (2, 1)):
    change = (last_logits(n_layer, nope_every, idx) - last_logits(n_layer, nope_every, mixed)).abs()
    rows.append((n_layer, "NoPE" if nope_every else "RoPE", change.max().item()))
lesson.table(["layers", "positions", "change of the logits"], rows, "earlier tokens shuffled")
lesson.holds(rows[1][2] < 1e-5 < 1e-2 < min(rows[0][2], rows[2][2]), "one NoPE layer sees a set")

# %% [markdown]
# ## Fewer keys, and only those of the same text
# In generation the memory is the cache: k and v of all earlier tokens, in every layer. Grouped
# queries (GQA) let several heads share one k and v. A document mask computes each text of a packed
# row (lesson 7) as if it were alone, at the price of a dense T x T mask.

# %%
q, k, v = torch.randn(1, 9, T, D), *torch.randn(2, 1, 3, T, D)
each = [t.repeat_interleave(3, 1) for t in (k, v)]  # heads 0, 1, 2 use the first k and v
far = (attend(q, k, v, None) - by_hand(q, *each)).abs().max()
smol = PRESETS["smol-135m"].model
whole = replace(smol, n_kv_head=smol.n_head)
caches = [KVCache(c, 1, 1, torch.bfloat16, "meta") for c in (smol, whole)]
rows = [(c.k.size(2), c.k.nbytes + c.v.nbytes) for c in caches]
lesson.table(["kv heads of 9", "bytes per token"], rows, "key/value cache of smol-135m in bf16")
lesson.holds(far < 1e-5, "GQA is repeating k and v")
lesson.holds([size for _, size in rows] == [23_040, 69_120], "30 layers x 2 x 3 x 64 x 2 bytes")

texts = [torch.cat([torch.tensor([0]), torch.randint(1, 64, (n,))]) for n in (9, 30, 22)]
model = GPT(GPTConfig(64, 64, 3, 2, 2, 16, 32, mlp_hidden=64, doc_mask=True))
for p in model.parameters():
    torch.nn.init.normal_(p, std=0.3)
together, alone = model(torch.cat(texts)[None]), torch.cat([model(t[None]) for t in texts], 1)
lesson.holds((together - alone).abs().max() < 1e-5, "masked, packed texts are as if alone")

# %%
fig = lesson.figure(7, 4)
ax = fig.subplots()
for name, color in zip(names, ("crimson", "steelblue", None, "darkorange")):
    if name != "our Flash":  # equal to the kernel
        y = [stored[name, T] / 1e6 for T in lengths]
        ax.loglog(lengths, y, "o-", color=color)
        label = f"{name}, {y[-1]:.0f} MB"
        ax.text(2300, y[-1], label, color=color, va="center")
ax.set(xlim=(110, 9000), ylim=(0.05, 80))
ax.set(xlabel="length T", ylabel="MB stored for the backward pass")
ax.set_xticks(lengths, [f"{T:,}" for T in lengths]), ax.minorticks_off()
ax.set_yticks([0.1, 1, 10], ["0.1", "1", "10"]), ax.grid(color="gainsboro")
ax.set(title="16 times the length: 16 times the memory, or 176")
lesson.save(fig, "14_flash")

# %% [markdown]
# ## Trap
# "Attention's memory grows with the square of the length" is true of scores that are *stored*: at
# T = 2,048 they take 32 times the bytes that the kernel keeps. Of attention itself only the *work*
# is quadratic. But the square comes back unnoticed with a dense mask (17 times), with a bias for
# every pair, or when somebody asks for the weights.
#
# ## Exercise
# `exercises/ex14.py`: merge the attention of two blocks of keys. `python course/check.py 14`
