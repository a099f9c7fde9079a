"""The GPT: its initial values, forward pass, loss, FLOPs and generation (config.py has GPTConfig).

`GPT(config)` may be built on the meta device, where tensors have shapes but no memory. Torch's
`to_empty` then gives them memory, and `init_weights()` their values: nothing else does. Weights are
kept in fp32 and cast to `compute_dtype` where they are used; the loss is computed in fp32.

Shapes: B rows, T positions (S of keys), C = n_embd, L layers, H query heads, G key/value heads,
D = head_dim, V = vocab_size. Next: data.py makes its batches.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from config import VALUE_GATE_CHANNELS, GPTConfig, UsageError


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6) over the last dimension, no weight (Zhang & Sennrich 2019)."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


def rope_tables(seq_len: int, head_dim: int, theta: float, device=None) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency: (seq_len, head_dim / 2) each, fp32 (Su et al. 2021)."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    # 1 for the first pair, falling to almost 1 / theta for the last; in this order of operations,
    # bit for bit that of the library transformers
    frequency = 1.0 / theta**exponent
    angle = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by an angle that grows with the position, as Llama does:
    then the product of a query and a key depends on the distance between them.

    x (B, T, H, D), cos and sin (T, D/2) -> (B, T, H, D), same dtype as x.
    """
    x1, x2 = x.chunk(2, dim=-1)  # (B, T, H, D/2) each
    cos, sin = cos[:, None, :], sin[:, None, :]  # (T, 1, D/2)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, causal unless a mask (True: may look) says otherwise.

    q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D). With G < H, each key/value head serves
    H / G query heads. PyTorch's kernel never stores the T x T scores.
    """
    k, v = share_heads(q, k, v)
    causal = mask is None and q.size(2) > 1  # a single query is the last position: it sees all keys
    gqa = k.size(1) != q.size(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)


def share_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v, repeated for each query head that they serve where PyTorch's kernel takes no grouped
    heads: in fp32 on any GPU, and on cards before the A100, which train in fp16 (not in bf16)."""
    times = q.size(1) // k.size(1)
    if times > 1 and q.is_cuda and q.dtype != torch.bfloat16:
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    return k, v


def head_logits(x: Tensor, weight: Tensor, config: GPTConfig) -> Tensor:
    """x (B, T, C), the head's weight (padded V, C) -> logits (B, T, V) in fp32: the padding is cut
    off, and the rest soft-capped to -cap .. cap (Gemma 2) unless the cap is 0."""
    logits = F.linear(x, weight)[..., : config.vocab_size].float()
    cap = config.logit_softcap
    if cap:
        # This is cap * torch.tanh(logits / cap), since tanh(y) = 2 sigmoid(2 y) - 1. As a sigmoid
        # it saves 5% of a step in bf16 on a CPU.
        logits = cap * (2 * torch.sigmoid(logits * (2 / cap)) - 1)
    return logits


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, config: GPTConfig) -> Tensor:
    """-log softmax(head_logits)[target] in nats: targets (B, T) -> (B, T), 0 where a target is
    data.IGNORED."""
    logits = head_logits(x, weight, config)  # (B, T, V)
    # PyTorch wants the classes second, (B, V, T). Its ignore_index, -100, is data.IGNORED.
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


class Linear(nn.Linear):
    """A matrix without bias, kept in fp32 and cast to the dtype of its input."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class KVCache:
    """Keys and values of the `length` positions seen so far, for generation."""

    def __init__(self, config: GPTConfig, batch: int, max_len: int, dtype, device):
        shape = (config.n_layer, batch, config.n_kv_head, max_len, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0
        self.last: dict[int, Tensor] = {}  # layer -> the keys of the last position, for `previous`

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, G, T, D) to the cache; return the whole (B, G, length + T, D)."""
        end = self.length + k.size(2)
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


def previous(x: Tensor, cache: KVCache | None, layer: int) -> Tensor:
    """Shift x (B, T, ...) right by one: position t gets x[:, t - 1]. Position 0 gets the last of
    the previous call, which the cache has kept; without one, its own."""
    first = x[:, :1]
    if cache is not None:
        first = cache.last.get(layer, first)
        cache.last[layer] = x[:, -1:]
    return torch.cat([first, x[:, :-1]], dim=1)


class Context(NamedTuple):
    """What every layer needs to know about a forward pass."""

    idx: Tensor  # (B, T)
    cos: Tensor  # (T, D/2)
    sin: Tensor  # (T, D/2)
    mask: Tensor | None  # True where a query may look; None: causal
    cache: KVCache | None  # of the earlier positions, in generation


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config = config
        self.layer = layer
        self.rope = config.has_rope(layer)
        self.q = Linear(config.n_embd, config.n_head * config.head_dim)
        self.k = Linear(config.n_embd, config.n_kv_head * config.head_dim)
        self.v = Linear(config.n_embd, config.n_kv_head * config.head_dim)
        self.out = Linear(config.n_head * config.head_dim, config.n_embd)
        if config.has_value_embed(layer):
            self.value_gate = Linear(VALUE_GATE_CHANNELS, config.n_kv_head)

    def forward(self, x: Tensor, value_embed: Tensor | None, ctx: Context) -> Tensor:
        """x (B, T, C), value_embed (B, T, G * D) -> (B, T, C)."""
        config = self.config
        B, T, _ = x.shape
        H, G, D = config.n_head, config.n_kv_head, config.head_dim
        q = self.q(x).view(B, T, H, D)
        k = self.k(x).view(B, T, G, D)
        v = self.v(x).view(B, T, G, D)
        if value_embed is not None:
            # A second embedding, added to this layer's values: what a token means in any context
            # (modded-nanogpt). The gate is nanochat's; it begins at 3 * sigmoid(0) = 1.5.
            gate = 3 * torch.sigmoid(self.value_gate(x[..., :VALUE_GATE_CHANNELS]))  # (B, T, G)
            v = v + gate[..., None] * value_embed.view(B, T, G, D)
        if "key_offset" in config.extras:
            # Half of each key comes from the token before, so that one layer can find what followed
            # an earlier copy of a token; otherwise it takes two. It is the half that RoPE rotates
            # slowest: there, tokens that are far apart can still be compared.
            pair = torch.arange(D, device=x.device) % (D // 2)  # of the channels i and i + D/2
            slow = pair >= D // 4  # the frequency falls with the pair's number
            begins = ctx.idx == config.bos_id  # (B, T): a document's first token keeps its own key
            before = previous(k, ctx.cache, self.layer)
            k = torch.where(slow & ~begins[..., None, None], before, k)
        if config.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        if self.rope:
            q, k = apply_rope(q, ctx.cos, ctx.sin), apply_rope(k, ctx.cos, ctx.sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or G, T, D)
        if ctx.cache is not None:
            k, v = ctx.cache.append(self.layer, k, v)
        y = attend(q, k, v, ctx.mask)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, H * D))


class ReluSquared(torch.autograd.Function):
    """relu(x)^2. Backward needs only the result, which the next matmul keeps anyway: the slope is
    2 sqrt(result). F.relu(x).square() would keep its input too: a fifth more memory for the
    activations of `tiny` (benchmarks/RESULTS.md)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        h = F.relu(x).square()
        if h.dtype == torch.float16:  # whose maximum is 65,504: from x = 256 on, h would be inf
            h = h.clamp(max=torch.finfo(h.dtype).max)
        ctx.save_for_backward(h)
        return h

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return grad * (2 * h.sqrt())


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.swiglu = config.mlp == "swiglu"
        self.up = Linear(config.n_embd, config.mlp_hidden)
        if self.swiglu:
            self.gate = Linear(config.n_embd, config.mlp_hidden)
        self.down = Linear(config.mlp_hidden, config.n_embd)

    def forward(self, x):
        if self.swiglu:
            h = F.silu(self.gate(x)) * self.up(x)  # (B, T, mlp_hidden)
        else:
            h = ReluSquared.apply(self.up(x))  # (B, T, mlp_hidden)
        return self.down(h)  # (B, T, C)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, value_embed: Tensor | None, ctx: Context) -> Tensor:
        x = x + self.attn(rms_norm(x), value_embed, ctx)
        return x + self.mlp(rms_norm(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, compute_dtype=torch.float32, recompute: bool = False):
        """compute_dtype: the dtype of the activations, and of the weights while in use. recompute:
        keep only the input of each block; backward computes the rest again."""
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.recompute = recompute
        # An attribute, so that with FSDP, which compiles part by part, build.py can replace it.
        self.cross_entropy = cross_entropy
        self.embed = nn.Embedding(config.padded_vocab, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if not config.tie_embeddings:
            self.head = Linear(config.n_embd, config.padded_vocab)
        kv_width = config.n_kv_head * config.head_dim
        self.value_embeds = nn.ModuleDict()
        for layer in range(config.n_layer):
            if config.has_value_embed(layer):
                self.value_embeds[str(layer)] = nn.Embedding(config.padded_vocab, kv_width)
        cos, sin = rope_tables(config.seq_len, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    # ---------------------------------------------------------------- initial values

    def init_weights(self) -> None:
        """Give every weight the initial value that KINDS, below the class, has for its kind. If the
        output head is not tied to the embedding, one attention head gets other values. Random
        numbers come from torch's global generator, one weight after another."""
        for name, p in self.named_parameters():
            self.init_one(name, p)
        self.init_tables()

    def init_tables(self) -> None:
        """Compute the rotary tables again: `to_empty` has lost them."""
        cos, sin = rope_tables(self.config.seq_len, self.config.head_dim, self.config.rope_theta)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    @torch.no_grad()
    def init_one(self, name: str, weight: Tensor) -> None:
        """Initialize one weight by its name. With FSDP, build.py calls this with a whole weight,
        of which each rank then keeps its share."""
        kind = KINDS[kind_of(name)]
        if self.config.tie_embeddings:
            kind.tied(weight, self.config)
        else:
            kind.untied(weight, self.config)
            self._init_previous_token_head(name, weight)

    def _init_previous_token_head(self, name: str, weight: Tensor) -> None:
        """Initialize the first head of the first layer as a previous-token head.

        To copy what followed a token last time, keys must know the token before theirs (induction
        heads, Olsson et al. 2022; lesson 33). A model that has to discover this first stays on a
        plateau, for a time that depends on the seed.

        So n_same channels of the embedding have one value for every token, and the weights of q and
        k that read them make a part of q and k that is the same for every token, in the n_pairs
        pairs of channels that RoPE rotates fastest. RoPE turns this part by the position. In q it
        is turned back by one position in advance: it matches best the k of the token before. And
        this head's output does not begin at zero, as that of the others does. What it is worth:
        benchmarks/RESULTS.md. It takes RoPE, and norms that make the sizes below known."""
        config = self.config
        D = config.head_dim
        if not (config.embed_norm and config.qk_norm and config.has_rope(0)):
            return
        n_same = config.n_embd // 4
        n_pairs = max(1, D // 12)
        same_value = 0.8  # the standard deviation of the other channels; after the norm, about 1
        # The rest of q has a norm of sqrt(D): this part shall have 5 times as much. So each of its
        # n_pairs channels is 5 * (D / n_pairs)**0.5, the sum of n_same equal products.
        part = 5 * (D / n_pairs) ** 0.5 / n_same
        out_std = 0.5 * D**-0.5
        if name == "embed.weight":
            weight[:, :n_same] = same_value
        elif name == "blocks.0.attn.k.weight":
            weight[:n_pairs, :n_same] += part
        elif name == "blocks.0.attn.q.weight":
            cos, sin = rope_tables(2, D, config.rope_theta, weight.device)  # of positions 0 and 1
            weight[:n_pairs, :n_same] += part * cos[1, :n_pairs, None]
            weight[D // 2 : D // 2 + n_pairs, :n_same] -= part * sin[1, :n_pairs, None]
        elif name == "blocks.0.attn.out.weight":
            weight[:, :D].normal_(0, out_std)

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters by group. With --optimizer muon, Muon takes "matrix", and AdamW takes
        "embedding" and "head", each with a rate of its own. A table that is both counts as "head".
        "scalar" is for gains and biases that you add; it is empty here."""
        groups = {"matrix": [], "embedding": [], "head": [], "scalar": []}
        for name, p in self.named_parameters():
            tied = name == "embed.weight" and self.config.tie_embeddings
            group = "head" if tied else KINDS[kind_of(name)].group
            groups[group].append(p)
        return groups

    # ---------------------------------------------------------------- forward

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, reduction: str = "mean", cache=None
    ) -> Tensor:
        """idx (B, T) int64 -> logits (B, T, V) in fp32, or with targets (B, T) their cross-entropy
        in nats: (B, T) with `reduction="none"`, else the mean of these. cache: a KVCache."""
        config = self.config
        start = cache.length if cache else 0
        T = idx.size(1)
        if start + T > config.seq_len:
            raise ValueError(f"{start + T} positions do not fit in seq_len {config.seq_len}")
        cos, sin = self.cos[start : start + T], self.sin[start : start + T]  # (T, D/2)
        ctx = Context(idx, cos, sin, self._mask(idx, start, cache), cache)

        x = self.embed(idx).to(self.compute_dtype)  # (B, T, C)
        if config.embed_norm:
            x = rms_norm(x)
        for layer, block in enumerate(self.blocks):
            value_embed = None
            if config.has_value_embed(layer):
                value_embed = self.value_embeds[str(layer)](idx).to(self.compute_dtype)
            if self.recompute:  # activation checkpointing (Chen et al. 2016)
                x = checkpoint(block, x, value_embed, ctx, use_reentrant=False)
            else:
                x = block(x, value_embed, ctx)
        if cache is not None:
            cache.length += T

        head = self.embed if config.tie_embeddings else self.head
        x = rms_norm(x)
        weight = head.weight.to(x.dtype)
        if targets is None:
            return head_logits(x, weight, config)
        loss = self.cross_entropy(x, weight, targets, config)  # (B, T)
        return loss.mean() if reduction == "mean" else loss

    def _mask(self, idx: Tensor, start: int, cache: KVCache | None) -> Tensor | None:
        """None for plain causal attention (the fast path); else True where a query may look."""
        T = idx.size(1)
        if cache is not None and start > 0 and T > 1:
            ones = torch.ones(T, start + T, dtype=torch.bool, device=idx.device)
            return ones.tril(start)  # (T, start + T): query t stands at position start + t
        if self.config.doc_mask and cache is None:
            document = (idx == self.config.bos_id).cumsum(1)  # (B, T)
            same = document[:, None, :, None] == document[:, None, None, :]  # (B, 1, T, T)
            return same & torch.ones(T, T, dtype=torch.bool, device=idx.device).tril()
        return None

    # ---------------------------------------------------------------- cost and use

    def flops_per_token(self, causal: bool = False) -> int:
        """FLOPs of forward and backward per token. A matmul takes 6 per weight: a multiplication
        and an addition each for its result, its input's gradient and its weight's. Every 2-D weight
        is one but the look-up tables; a tied table counts once, as the head. Attention has two
        products, with the keys and with the values, each of 6 per channel and pair of positions:
        12 L H D T if each query meets all T keys (PaLM, appendix B: the usual "MFU"), half of that
        if `causal` (Megatron-LM). Recomputation and the optimizer are not counted."""
        c = self.config
        lookups = sum(p.numel() for p in self.param_groups()["embedding"])
        matmul = sum(p.numel() for p in self.parameters() if p.ndim == 2) - lookups
        attention = 12 * c.n_layer * c.n_head * c.head_dim * c.seq_len
        return 6 * matmul + (attention // 2 if causal else attention)

    @torch.no_grad()
    def stream(
        self,
        idx: Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 1.0,
        stop_id: int = -1,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Continue the prompts idx (B, T), one document each: yield each next id, (B, 1), as soon
        as it is drawn. It is drawn from the top_k likeliest (0: all), cut to the fewest of these
        that make up top_p of their probability; temperature 0 takes the likeliest. Ends after
        max_new_tokens, at seq_len, or once every row has drawn stop_id."""
        if max_new_tokens < 1 or top_k < 0 or not temperature >= 0 or not 0 < top_p <= 1:  # or NaN
            raise UsageError(
                f"{max_new_tokens=}, {top_k=}, {temperature=}, {top_p=}: they must be >= 1, >= 0, "
                ">= 0, and above 0 but at most 1"
            )
        B, T = idx.shape
        most = self.config.seq_len
        n = min(max_new_tokens, most - T)
        if n <= 0:
            raise UsageError(f"the prompt has {T} tokens; fewer than {most} fit: give fewer words")
        cache = KVCache(self.config, B, T + n, self.compute_dtype, idx.device)
        new = idx  # at first the whole prompts; then only the newest ids: the cache has the rest
        stopped = False
        for _ in range(n):
            logits = self(new, cache=cache)[:, -1]  # (B, V)
            if temperature < 1e-5:  # dividing by less could overflow
                new = logits.argmax(-1, keepdim=True)  # (B, 1)
            else:
                V = logits.size(-1)
                top, ids = logits.topk(min(top_k, V) if top_k else V)  # (B, k)
                probs = F.softmax(top / temperature, dim=-1)  # the likeliest first
                if top_p < 1:  # keep a token if those before it hold less than top_p: at least one
                    probs = probs * (probs.cumsum(-1) - probs < top_p)
                drawn = torch.multinomial(probs, 1, generator=generator)  # it divides by their sum
                new = ids.gather(-1, drawn)  # (B, 1)
            yield new
            stopped = stopped | (new == stop_id)
            if stopped.all():
                return

    def generate(self, idx: Tensor, max_new_tokens: int, **options) -> Tensor:
        """The prompts with all of `stream` appended: idx (B, T) -> (B, T + n)."""
        return torch.cat([idx, *self.stream(idx, max_new_tokens=max_new_tokens, **options)], dim=1)


# ------------------------------------------------------------------- the kinds of weights


def normal(std: float) -> Callable:
    """How a weight begins: N(0, std^2)."""
    return lambda weight, config: weight.normal_(0, std)


def uniform(times: float) -> Callable:
    """How a weight begins: uniform, with a standard deviation of times * C^-1/2."""

    def fill(weight: Tensor, config: GPTConfig) -> None:
        bound = 3**0.5 * config.n_embd**-0.5 * times  # U(-b, b) has the std b / sqrt(3)
        weight.uniform_(-bound, bound)

    return fill


def zero(weight: Tensor, config: GPTConfig) -> None:
    """With an untied head, a projection adds nothing to the residual stream at first."""
    weight.zero_()


def near_zero(weight: Tensor, config: GPTConfig) -> None:
    """The input of the gate's sigmoid begins near 0."""
    weight.uniform_(0, 0.02)


def by_depth(weight: Tensor, config: GPTConfig) -> None:
    """The 2 L matrices that add to the residual stream (out and down of each layer) together add as
    much as a single one would with a standard deviation of 0.006."""
    weight.normal_(0, 0.006 / (2 * config.n_layer) ** 0.5)


class Kind(NamedTuple):
    """How a kind of weight is optimized, and the functions of (weight, config) that fill in its
    initial values: beside an untied head, or beside a tied one."""

    group: str  # matrix, embedding, head or scalar (gains and biases)
    untied: Callable  # nanochat's values
    tied: Callable | None  # DeepSeek LLM's 0.006, Megatron-LM's scaling; then there is no head


# kind_of(a weight's name): Kind(group, initial values beside an untied head, beside a tied one).
# A new weight needs a line here. A bare nn.Parameter must also be cast where it is used, with
# `.to(x.dtype)`: otherwise everything after it is computed in fp32. A table that is tied begins
# small: the product of a large embedding with itself would make each token predict itself.
KINDS = {
    "embed": Kind("embedding", normal(0.8), normal(0.006)),
    "value_embeds": Kind("embedding", uniform(1.0), normal(0.006)),
    "head": Kind("head", normal(0.001), None),
    "q": Kind("matrix", uniform(1.0), normal(0.006)),
    "k": Kind("matrix", uniform(1.0), normal(0.006)),
    "v": Kind("matrix", uniform(1.0), normal(0.006)),
    "out": Kind("matrix", zero, by_depth),
    "up": Kind("matrix", uniform(0.4), normal(0.006)),
    "gate": Kind("matrix", uniform(0.4), normal(0.006)),
    "down": Kind("matrix", zero, by_depth),
    "value_gate": Kind("matrix", near_zero, near_zero),
}


def kind_of(name: str) -> str:
    """The key in KINDS: "blocks.3.attn.q.weight" -> "q"."""
    words = name.removesuffix(".weight").split(".")
    kind = "value_embeds" if words[0] == "value_embeds" else words[-1]
    if kind not in KINDS:
        raise UsageError(
            f"the weight {name!r} has no initial value and no optimizer; give {kind!r} a line in "
            "KINDS (model.py)"
        )
    return kind
