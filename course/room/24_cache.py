# %% [markdown]
# # 24. A cache of keys and values: write a token without reading the text again
#
# **Afterwards** you can add a cache to a model that writes, prove that it changes nothing but
# rounding, and say what it saves and how much memory it takes.
#
# **Question.** To write one token, a model reads the whole text. For the next token it reads all of
# it again, plus one token more. What can it keep from one reading to the next, is the result still
# the same, what does that save, and what does it cost?
#
# Sources: Shazeer 2019, Fast Transformer Decoding; Pope et al. 2022, Efficiently Scaling
# Transformer Inference; *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Tensor (TP)
# Nos Blocos do Transformers", and *擴展的驚喜*, "擴展的驚喜" (grouped queries).
# Core file: `model.py` (`KVCache`, `attend`, `stream`). Before: lesson 8.
# Takes 10 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from config import PRESETS, GPTConfig
from hf.parity import set_unit_weights
from model import GPT, KVCache, apply_rope, attend, rms_norm

torch.set_num_threads(1)
L = 4
H = 4
G = 2
D = 32
C = 128
HIDDEN = 512
VOCAB = 256
LONGEST = 512
lesson.begin(24, "a cache of keys and values")
torch.manual_seed(0)
shape = dict(n_layer=L, n_head=H, n_kv_head=G, head_dim=D, n_embd=C, mlp_hidden=HIDDEN)
shape |= dict(seq_len=LONGEST, vocab_size=VOCAB, logit_softcap=0)
model = GPT(GPTConfig(**shape))
model.init_weights()
set_unit_weights(model)  # random, but none of them zero
model.requires_grad_(False)

# %% [markdown]
# ## What a new token changes
# In a causal model a position sees itself and the past. A token added at the end therefore changes
# *no number* at the positions before it. From those positions the new token needs only what it
# looks at: in every layer, their keys (which it compares its query with) and their values (which it
# adds up). Keep those two, and you can run the model on the new token alone.
#
# Here is the forward pass of `model.py` in one function. The cache takes three lines of it: join
# the keys and values you kept with the new ones, keep the result, and say which positions these
# are, since the rotation (RoPE, lesson 8) and the mask count from the beginning of the text.


# %%
def forward(ids: Tensor, kept: list | None = None, dtype=torch.float32, fault: str = "") -> Tensor:
    """ids (T,) -> logits (T, VOCAB). kept: by layer (k, v), each (G, n, D); grows by T positions.

    fault: a mistake to make on purpose, for the experiment below."""
    n = kept[0][0].size(1) if kept else 0  # positions kept so far
    start = 0 if fault == "positions start at 0 again" else n
    cos, sin = (table[start : start + len(ids)] for table in (model.cos, model.sin))
    shift = 0 if fault == "mask aligned at the first key" else n
    visible = torch.ones(len(ids), n + len(ids)).tril(shift).bool()  # query n + i sees n + i + 1
    x = rms_norm(model.embed(ids).to(dtype))
    now = []
    for layer, block in enumerate(model.blocks):
        h = rms_norm(x)
        q, k, v = (getattr(block.attn, name)(h).view(len(ids), -1, D) for name in "qkv")
        q, k = (apply_rope(rms_norm(part), cos, sin) for part in (q, k))
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))  # (H, T, D), (G, T, D) twice
        if kept:
            k, v = (torch.cat(pair, 1) for pair in zip(kept[layer], (k, v)))  # (G, n + T, D)
        now.append((k, v) if fault != "keeps the last token alone" else (k[:, -1:], v[:, -1:]))
        k, v = (part.repeat_interleave(H // G, 0) for part in (k, v))  # (H, n + T, D)
        scores = (q @ k.mT / D**0.5).masked_fill(~visible, -torch.inf)  # (H, T, n + T)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)  # (T, H D)
        x = x + block.attn.out(mixed)
        x = x + block.mlp(rms_norm(x))
    if kept is not None:
        kept[:] = now
    return rms_norm(x) @ model.head.weight.to(dtype).T


def in_pieces(ids: Tensor, sizes: list[int], **options) -> Tensor:
    """The logits of all positions, computed piece by piece with a cache."""
    kept = []
    return torch.cat([forward(piece, kept, **options) for piece in ids.split(sizes)])


text = torch.randint(VOCAB, (200,))
whole = forward(text)
lesson.holds((whole - model(text[None])[0]).abs().max() < 1e-4, "by hand = model.py, to 1e-4")
changed = text.clone()
changed[150] = (text[150] + 1) % VOCAB
same = torch.isclose(forward(changed), whole, rtol=0, atol=1e-6).all(1)
lesson.holds(
    same[:150].all() and not same[150:].any(), "changing a token changes nothing before it"
)

# %% [markdown]
# ## The same result?
# The sums are the same, but their order is not: a matmul of one row and a matmul of 200 rows go
# through different code, and the last bit of a floating-point sum depends on the order. How do you
# tell that from a mistake? **Compute in double precision.** Rounding shrinks by a factor of 2^29,
# and a mistake stays as large as it was. Try it on three mistakes, planted here:

# %%
ONE_BY_ONE = [100] + [1] * 100
WAYS = {
    "a prompt of 100, then one by one": ONE_BY_ONE,
    "one by one from the start": [1] * 200,
    "pieces of 64": [64, 64, 64, 8],
}
FAULTS = (
    "positions start at 0 again",
    "mask aligned at the first key",
    "keeps the last token alone",
)
rows = []
exact = forward(text, dtype=torch.float64)
for name, sizes in (WAYS | dict.fromkeys(FAULTS, ONE_BY_ONE)).items():
    single = in_pieces(text, sizes, fault=name)
    double = in_pieces(text, sizes, fault=name, dtype=torch.float64)
    equal = 100 * (single == whole).float().mean().item()
    far = [(a - b).abs().max().item() for a, b in ((single, whole), (double, exact))]
    rows.append((name, equal, *far))
columns = ["computed", "equal bits %", "off, fp32", "off, fp64"]
lesson.table(columns, rows, "logits with a cache, against one pass over the 200 tokens")
_, _, single, double = zip(*rows)
lesson.holds(max(single[:3]) < 1e-4, "in fp32 the right caches differ by less than 1e-4")
lesson.holds(max(double[:3]) < 1e-11, "in fp64 by less than 1e-11: it was rounding")
lesson.holds(min(double[3:]) > 0.1, "in fp64 each of the three mistakes is still above 0.1")


def written(kept: list | None) -> list[int]:
    """100 tokens after the first 100 of the text: each the most probable one (temperature 0)."""
    ids = text[:100].tolist()
    for _ in range(100):
        ids.append(forward(torch.tensor(ids[-1:] if kept else ids), kept)[-1].argmax().item())
    return ids


lesson.holds(written([]) == written(None), "100 tokens written with a cache = 100 without one")

# %% [markdown]
# ## What it saves, and what it takes
# To predict the token after n others, n positions go through all the matrices without a cache, and
# one position with it. What remains of the past is attention, which still looks at every key: that
# part grows with n, slowly.


# %%
def flops(n: int, cached: bool) -> int:
    """Counted FLOPs of the forward pass that reads the last of n tokens."""
    ids = torch.randint(VOCAB, (n,))
    kept = []
    if cached:
        forward(ids[:-1], kept)
        ids = ids[-1:]
    with FlopCounterMode(display=False) as counter:
        forward(ids, kept)
    return counter.get_total_flops()


weights = L * (C * D * (2 * H + 2 * G) + 2 * C * HIDDEN) + C * VOCAB  # in the matrices
lengths = [2**i for i in range(3, 10)]
counted = [(flops(n, False), flops(n, True)) for n in lengths]
formula = [2 * weights + 4 * L * H * D * n for n in lengths]
as_formula = counted == [(n * one, one) for n, one in zip(lengths, formula)]
lesson.holds(as_formula, "FLOPs of a token: 2 a weight, and 4 L H D for each key it sees")
lesson.table(
    ["tokens", "again, MFLOP", "cache, MFLOP", "saved"],
    [(n, a / 1e6, b / 1e6, f"{a / b:.0f} x") for n, (a, b) in zip(lengths, counted)],
    "reading the last token of a text of n tokens",
)

# %% [markdown]
# ## What it costs to keep the keys
# You can keep a key because it is rotated by its own position only, and so never changes again. The
# price is memory: 2 L G D numbers a token, for every text that is being written. And each new token
# reads all of it again.
#
# *Grouped queries* (GQA) bring that price down: H query heads share G heads of keys and values,
# where G is smaller than H, as if each k and v had been copied for H / G neighboring heads. The
# last column of the table says after how many tokens the cache is as large as the weights. With
# G = 1 (multi-query) that happens latest, but then all heads search the same keys.

# %%
q = torch.randn(1, H, 50, D)
shared = torch.randn(2, 1, G, 50, D)  # k and v
grouped = attend(q, *shared, None)
neighbors = attend(q, *shared.repeat_interleave(H // G, 2), None)  # heads 0 0 1 1
turns = attend(q, *shared.repeat(1, 1, H // G, 1, 1), None)  # heads 0 1 0 1
far = [(grouped - other).abs().max() for other in (neighbors, turns)]
lesson.holds(far[0] < 1e-5 < far[1], "GQA repeats each k and v for neighboring heads")
rows = []
configs = [(name, PRESETS[name].model) for name in ("tiny", "d12", "biatron-345m")]
smol = PRESETS["smol-135m"].model  # its G is 3
configs += [("smol-135m", replace(smol, n_kv_head=g)) for g in (9, 3, 1)]
for name, config in configs:
    cache = KVCache(config, 1, config.seq_len, torch.bfloat16, "meta")
    with torch.device("meta"):
        size = sum(2 * p.numel() for p in GPT(config).parameters())
    a_token = cache.kv.nbytes // config.seq_len
    heads = f"{config.n_head} / {config.n_kv_head}"
    rows.append((name, heads, a_token, size / 1e6, size // a_token))
columns = ["preset", "H / G", "bytes a token", "weights, MB", "tokens = weights"]
lesson.table(columns, rows, "the cache in bf16")
of = [2 * p.n_layer * p.n_kv_head * p.head_dim * 2 for _, p in configs]
lesson.holds(of == [row[2] for row in rows], "a token takes up 2 L G D numbers in the cache")

# %%
fig = lesson.figure()
ax = fig.subplots()
for label, work in zip(("read the whole text again", "with a cache"), zip(*counted)):
    ax.loglog(lengths, [x / 1e6 for x in work], "o-", label=label)
ax.set(xlabel="tokens in the text", ylabel="MFLOP", title="work for the next token"), ax.legend()
lesson.save(fig, "24_cache")

# %% [markdown]
# ## Trap
# PyTorch's attention has a switch for causal models, `is_causal=True`. It lets query i see the keys
# 0 to i, so it counts queries from *the first key*. The single query of a new token is then query
# 0: it sees the first token of the text and nothing else. What the model writes still looks like
# text, and gets worse with every token. `model.py` turns the switch off for a single query
# (`attend`).

# %%
q, k, v = torch.randn(3, 1, H, 50, D)
last = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, -1:]
one = q[:, :, -1:]
same = torch.allclose(F.scaled_dot_product_attention(one, k, v), last, atol=1e-5)
lesson.holds(same, "one query that sees all 50 keys gets what position 49 got")
first = F.scaled_dot_product_attention(one, k, v, is_causal=True)
lesson.holds(
    torch.allclose(first, v[:, :, :1]), "with is_causal it gets the first value, and nothing else"
)

# %% [markdown]
# ## Exercise
# `exercises/ex24.py`: a cache that never grows. It keeps the last W positions in a ring, for texts
# of different lengths that are written together. `python course/check.py 24`
