# %% [markdown]
# # 20. Attention: where the square goes
#
# **Afterwards** you can compute exact attention, forward and backward, and store no T x T matrix.
#
# **Question.** A longer sequence takes more memory. Which part of attention's memory is quadratic
# in the length, and who removed it?
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Anotações detalhadas da Semana 1"
# (memory grows with the square of the sequence); *擴展的驚喜*, "擴展的驚喜" (document masks). The
# algorithm: Dao 2023, "FlashAttention-2". Core file: `model.py`, `attend`.
# Before: lesson 23. Next: lesson 8. Takes 4 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from config import GPTConfig
from model import GPT, attend

H = 2
D = 64
BLOCK = 128
lesson.begin(20, "attention")
torch.set_num_threads(1)
torch.manual_seed(0)

# %% [markdown]
# ## A question, labels, contents
# In lesson 4 each token asked a **query**: what am I looking for? Every earlier token shows a
# **key**: what am I about? Where query and key point the same way, their product (the *score*) is
# large. A softmax over the scores of one query makes weights that add up to 1, and the result is
# the mean of the **values**, what the tokens have to give, by these weights. All three are D
# numbers for each of T tokens and H heads. Scores and weights are not: **each of T queries meets T
# keys, so there are T x T for each head.** In the backward pass the product with v needs the
# weights again, so autograd keeps them.


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
# ## A mean over blocks
# A mean can be taken piece by piece, if one remembers how much weight it stands for. So compute the
# scores of one block of keys, fold them into the mean of the values so far, and forget them. Each
# query remembers two things: its output so far, and the log of its sum of exponentials so far
# (`lse`, *log-sum-exp*). A new block raises `lse`, and the old output shrinks by the same factor.
# (Logs, because exp(1000) is more than a float holds.) Here are one query, four keys, two blocks:

# %%
scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
values = torch.tensor([10.0, 20.0, 30.0, 40.0])
halves = zip(scores.split(2), values.split(2))
(o1, lse1), (o2, lse2) = ((s.softmax(0) @ x, s.logsumexp(0)) for s, x in halves)
lse = torch.logaddexp(lse1, lse2)
shares = (lse1 - lse).exp(), (lse2 - lse).exp()  # of the whole weight, in each block
merged = shares[0] * o1 + shares[1] * o2
at_once = scores.softmax(0) @ values
rows = [("keys 0, 1", o1.item(), shares[0].item()), ("keys 2, 3", o2.item(), shares[1].item())]
rows.append(("all four", merged.item(), 1.0))
lesson.table(["block", "mean of values", "share of the weight"], rows, "a mean, piece by piece")
lesson.holds(abs(merged - at_once) < 1e-5, "merged from two blocks, it is the mean of all at once")

# %% [markdown]
# Backward needs the weights, which nobody kept. It computes the scores again, block by block:
# exp(score - lse) is the weight. More work, less memory. This is *flash attention*.
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
    """Flash.apply(q, k, v, is_causal): q (..., T, D), k and v (..., S, D) -> (..., T, D)."""

    def blocks(q, k, is_causal):
        """-> rows i, columns j and scores of each block that is not wholly in the future."""
        for i in range(0, q.size(-2), BLOCK):
            for j in range(0, i + 1 if is_causal else k.size(-2), BLOCK):
                rows = slice(i, i + BLOCK)
                columns = slice(j, j + BLOCK)
                scores = q[..., rows, :] @ k[..., columns, :].mT * q.size(-1) ** -0.5
                if is_causal and i == j:
                    scores += torch.full_like(scores, -math.inf).triu(1)
                yield rows, columns, scores

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        o = torch.zeros_like(q)
        lse = q.new_full(q.shape[:-1], -math.inf)
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
        dq = torch.zeros_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        mean = (do * o).sum(-1, keepdim=True)
        for i, j, scores in Flash.blocks(q, k, ctx.is_causal):
            weights = (scores - lse[..., i, None]).exp()
            dv[..., j, :] += weights.mT @ do[..., i, :]
            d_weights = do[..., i, :] @ v[..., j, :].mT
            d_scores = weights * (d_weights - mean[..., i, :]) * q.size(-1) ** -0.5
            dq[..., i, :] += d_scores @ k[..., j, :]
            dk[..., j, :] += d_scores.mT @ q[..., i, :]
        return dq, dk, dv, None


flash = lambda q, k, v: Flash.apply(q, k, v, True)
kernel = lambda q, k, v: attend(q, k, v, None)  # PyTorch's, as the project calls it
inputs = random_qkv(300)  # the last block is not full
outputs = [fn(*inputs) for fn in (by_hand, kernel, flash)]
g = torch.randn_like(outputs[0])
gradients = [torch.autograd.grad(o, inputs, g) for o in outputs]
far = max((o - outputs[0]).abs().max().item() for o in outputs)
far_g = max((a - b).abs().max().item() for row in gradients for a, b in zip(row, gradients[0]))
lesson.holds(far < 1e-5, "by hand, the kernel and Flash give the same output, to 1e-5")
lesson.holds(far_g < 1e-5, "by hand, the kernel and Flash give the same gradients")

# %%
lengths = [128, 256, 512, 1024, 2048]
stored = {}
ways = {"by hand": by_hand, "PyTorch's kernel": kernel, "Flash": flash}
for T in lengths:
    inputs = random_qkv(T)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
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
at_2048 = rows[-1][1:3] == (34_603_008, 1_064_960)
lesson.holds(at_2048, "at T = 2,048: 35 MB by hand, 1 MB in the kernel")
twice = all(saved_bytes(f, *random_qkv(512, 2)) == 2 * stored[n, 512] for n, f in ways.items())
lesson.holds(twice, "twice the rows take twice the bytes, in all three ways")


def flops(fn, T) -> int:
    with FlopCounterMode(display=False) as counter:
        fn(*random_qkv(T))
    return counter.get_total_flops()


work = {name: [flops(ways[name], T) for T in (1024, 2048)] for name in ("by hand", "Flash")}
by_length = work["by hand"][1] / work["by hand"][0], work["Flash"][1] / work["by hand"][1]
lesson.holds(by_length[0] == 4, "by hand, twice the length is four times the FLOPs")
lesson.holds(0.5 < by_length[1] < 0.54, "Flash skips the half of the blocks that is future")

# %% [markdown]
# ## A mask brings it back
# Rows are packed (lesson 11): a row holds several texts, and a token may look into the text before
# its own. A *document mask* forbids that, and each text is computed as if it were alone. The price
# is a dense T x T mask, and the square returns: the last column of the table.

# %%
texts = [torch.cat([torch.tensor([0]), torch.randint(1, 64, (n,))]) for n in (9, 30, 22)]
models = [GPT(GPTConfig(64, 64, 3, 2, 2, 16, 32, mlp_hidden=64, doc_mask=m)) for m in (True, False)]
far = []
for model in models:
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    alone = torch.cat([model(text[None]) for text in texts], 1)
    far.append((model(torch.cat(texts)[None]) - alone).abs().max().item())
print(f"largest change of a logit by packing: {far[0]:.2g} masked, {far[1]:.2g} not")
lesson.holds(far[0] < 1e-5, "with a document mask, packed texts are as if alone")
lesson.holds(far[1] > 1e-2, "without it, a text changes what follows in its row")

# %%
fig = lesson.figure(7, 4)
ax = fig.subplots()
for name, color in zip(names, ("crimson", "steelblue", None, "darkorange")):
    if name != "Flash":  # equal to the kernel
        y = [stored[name, T] / 1e6 for T in lengths]
        ax.loglog(lengths, y, "o-", color=color)
        label = f"{name}, {y[-1]:.0f} MB"
        ax.text(2300, y[-1], label, color=color, va="center")
ax.set(xlim=(110, 9000), ylim=(0.05, 80))
ax.set(xlabel="length T", ylabel="MB stored for the backward pass")
ax.set_xticks(lengths, [f"{T:,}" for T in lengths]), ax.minorticks_off()
ax.set_yticks([0.1, 1, 10], ["0.1", "1", "10"]), ax.grid()
ax.set(title="16 times the length: 16 times the memory, or 176")
lesson.save(fig, "20_flash")

# %% [markdown]
# ## Trap
# "Attention's memory grows with the square of the length" is true of scores that are *stored*: at
# T = 2,048 they take 32 times the bytes that the kernel keeps. Of attention itself only the *work*
# is quadratic. But the square comes back unnoticed with a dense mask (17 times), with a bias for
# every pair, or when somebody asks for the weights.
#
# ## Exercise
# `exercises/ex20.py`: merge the attention of two blocks of keys. `python course/check.py 20`
