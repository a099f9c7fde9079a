"""The GPT: its initial values, forward pass, loss, FLOPs and generation (config.py has GPTConfig).

`GPT(config)` may be built on the meta device, where tensors have shapes but no memory, so that a
large model is made only once, where it will be. Torch's `to_empty` then gives the tensors memory,
and `init_weights()` their values: nothing else does. Weights are kept in fp32 and cast to
`compute_dtype` where they are used; the loss is computed in fp32.

Shapes: B rows, T positions (S of keys), C = n_embd, L layers, H query heads, G key/value heads
(each for H / G query heads), D = head_dim, V = vocab_size. Next: data.py makes its batches.
"""

from collections.abc import Iterator
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
    """Rotary position embeddings (Su et al. 2021), which take the place of learned ones: cos and
    sin of position * frequency, (seq_len, head_dim / 2) each, fp32."""
    exponent = torch.arange(0, head_dim, 2, device=device) / head_dim
    # From 1 down to almost 1 / theta. The library transformers computes it in the same way: another
    # order of operations would change the last bits.
    frequency = 1.0 / theta**exponent
    angle = torch.outer(torch.arange(seq_len, device=device), frequency)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of channels (x[i], x[i + D/2]) by position * frequency, as Llama does: then
    the product of a query and a key depends on the distance between them.

    x (B, T, H, D), cos and sin (T, D/2) -> (B, T, H, D), same dtype as x.
    """
    x1, x2 = x.chunk(2, dim=-1)  # (B, T, H, D/2) each
    cos, sin = cos[:, None], sin[:, None]  # (T, 1, D/2)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, causal unless a mask (True: may look) says otherwise.

    q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D). With G < H, each key/value head serves
    H / G query heads. PyTorch's kernel never stores the T x T scores.
    """
    causal = mask is None and q.size(2) > 1  # a single query is the last position: it sees all keys
    times = q.size(1) // k.size(1)
    if times > 1 and q.is_cuda and (q.dtype != torch.bfloat16 or mask is not None):
        # In fp32, with a mask, or on a GPU without bf16, the one kernel that takes fewer key/value
        # heads than query heads stores the scores.
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=k.size(1) < q.size(1)
    )


def head_logits(x: Tensor, weight: Tensor, config: GPTConfig) -> Tensor:
    """x (B, T, C), the output head's weight (padded V, C) -> logits (B, T, V) in fp32.

    The padding, which makes V a multiple of 64 for the tensor cores, is cut off. Unless the cap is
    0, logits are bent smoothly into -cap .. cap (Gemma 2): none can grow without bound."""
    logits = F.linear(x, weight)[..., : config.vocab_size].float()
    cap = config.logit_softcap
    if cap:
        # cap * torch.tanh(logits / cap), as tanh(y) = 2 sigmoid(2 y) - 1. In this form it saves 5%
        # of a step in bf16 on a CPU.
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
        shape = (2, config.n_layer, batch, config.n_kv_head, max_len, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0
        self.last: dict[int, Tensor] = {}  # layer -> what `previous`, below, needs next time

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, G, T, D) to the cache; return the whole (B, G, length + T, D). `length`
        grows after the last layer, in GPT.forward."""
        end = self.length + k.size(2)
        self.kv[:, layer, :, :, self.length : end] = torch.stack([k, v])
        return self.kv[:, layer, :, :, :end].unbind()


def previous(x: Tensor, cache: KVCache | None, layer: int) -> Tensor:
    """Shift x (B, T, ...) right by one: position t gets x[:, t - 1]. Position 0 gets the last one
    of the previous call, if a cache has kept it, or else its own. Attention uses it for keys."""
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
        self.rope = config.has_rope(layer)  # every layer has it, unless --nope_every is given
        C, H, G, D = config.n_embd, config.n_head, config.n_kv_head, config.head_dim
        self.q = Linear(C, H * D)
        self.k = Linear(C, G * D)
        self.v = Linear(C, G * D)
        self.out = Linear(H * D, C)
        if config.qk_gain:
            self.q_gain = nn.Parameter(torch.ones(D))
            self.k_gain = nn.Parameter(torch.ones(D))
        if config.has_value_embed(layer):  # with the extra value_embeds, every second layer
            self.value_gate = Linear(VALUE_GATE_CHANNELS, G)

    def forward(self, x: Tensor, value_embed: Tensor | None, ctx: Context) -> Tensor:
        """x (B, T, C), value_embed (B, T, G * D) -> (B, T, C)."""
        config = self.config
        B, T, _ = x.shape
        H, G, D = config.n_head, config.n_kv_head, config.head_dim
        q = self.q(x).view(B, T, H, D)
        k = self.k(x).view(B, T, G, D)
        v = self.v(x).view(B, T, G, D)
        if value_embed is not None:
            # A second embedding of the token itself, added to this layer's values (modded-nanogpt).
            # nanochat's gate, from a few channels to save time, begins at 3 * sigmoid(0) = 1.5.
            gate = 3 * torch.sigmoid(self.value_gate(x[..., :VALUE_GATE_CHANNELS]))  # (B, T, G)
            v = v + gate[..., None] * value_embed.view(B, T, G, D)
        if "key_offset" in config.extras:
            # Half of each key comes from the token before, so that one layer can find what followed
            # an earlier copy of a token; otherwise it takes two. It is the half that RoPE rotates
            # slowest: there, tokens that are far apart can still be compared.
            before = previous(k, ctx.cache, self.layer)  # (B, T, G, D)
            pair = torch.arange(D, device=x.device) % (D // 2)  # (D,): 0 .. D/2 - 1, twice
            slow = pair >= D // 4  # frequencies fall from pair to pair
            begins = ctx.idx == config.bos_id  # (B, T): a document's first token keeps its own key
            k = torch.where(slow & ~begins[..., None, None], before, k)
        if config.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        if config.qk_gain:
            q = q * self.q_gain.to(q.dtype)
            k = k * self.k_gain.to(k.dtype)
        if self.rope:
            q, k = apply_rope(q, ctx.cos, ctx.sin), apply_rope(k, ctx.cos, ctx.sin)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H or G, T, D)
        if ctx.cache is not None:
            k, v = ctx.cache.append(self.layer, k, v)
        y = attend(q, k, v, ctx.mask)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).flatten(2))  # from (B, T, H * D)


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021). Write another activation here: autograd derives its gradient."""
    x = F.relu(x)
    if x.dtype == torch.float16:  # whose maximum is 65,504: the square of 256 would be inf
        x = x.clamp(max=255)
    return x.square()


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.swiglu = config.mlp == "swiglu"
        self.up = Linear(config.n_embd, config.mlp_hidden)
        if self.swiglu:
            self.gate = Linear(config.n_embd, config.mlp_hidden)
        self.down = Linear(config.mlp_hidden, config.n_embd)

    def forward(self, x):
        if self.swiglu:  # Shazeer 2020
            h = F.silu(self.gate(x)) * self.up(x)  # (B, T, mlp_hidden)
        else:
            h = relu_squared(self.up(x))  # (B, T, mlp_hidden)
        return self.down(h)  # (B, T, C)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, value_embed: Tensor | None, ctx: Context) -> Tensor:
        x = x + self.attn(rms_norm(x), value_embed, ctx)
        return x + self.mlp(rms_norm(x))


# ------------------------------------------------------------------- the kinds of weights

# The kind of a weight is the last word of its name (`kind_of`). It decides the weight's group in
# optim.py, and the size of its initial value, which is nanochat's. `GPT.init_one` says what a size
# means. If the output head is tied to the embedding, tables and matrices have another: DeepSeek
# LLM's 0.006. Were the embedding's larger, its product with itself, as the head, would make each
# token predict itself.
#
# A new weight needs a line here: a gain of yours, like q_gain, begins at 1. A bare nn.Parameter
# must also be cast where it is used, with `.to(x.dtype)`: otherwise all that follows is computed in
# fp32.
KINDS = {
    "embed": ("embedding", 0.8),
    "value_embeds": ("embedding", 1.0),
    "head": ("head", 0.001),
    "q": ("matrix", 1.0),
    "k": ("matrix", 1.0),
    "v": ("matrix", 1.0),
    "q_gain": ("scalar", 1.0),
    "k_gain": ("scalar", 1.0),
    "out": ("matrix", 0.0),
    "up": ("matrix", 0.4),
    "gate": ("matrix", 0.4),
    "down": ("matrix", 0.0),
    "value_gate": ("matrix", 0.02),
}
TIED_SIZE = 0.006


def kind_of(name: str) -> str:
    """The key in KINDS: "blocks.3.attn.q.weight" -> "q". Only "value_embeds.1.weight", whose last
    word is a layer, -> "value_embeds"."""
    words = name.removesuffix(".weight").split(".")
    kind = "value_embeds" if words[0] == "value_embeds" else words[-1]
    if kind not in KINDS:
        raise UsageError(
            f"the weight {name!r} has no initial value and no optimizer; give {kind!r} a line in "
            "KINDS (model.py)"
        )
    return kind


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, compute_dtype=torch.float32, recompute: bool = False):
        """compute_dtype: the dtype of the activations, and of the weights while in use. recompute:
        keep only the input of each block; backward computes the rest again."""
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.recompute = recompute
        self.cross_entropy = cross_entropy  # build.py may replace it by a compiled one
        self.embed = nn.Embedding(config.padded_vocab, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if not config.tie_embeddings:
            self.head = Linear(config.n_embd, config.padded_vocab)
        kv_width = config.n_kv_head * config.head_dim
        layers = filter(config.has_value_embed, range(config.n_layer))
        self.value_embeds = nn.ModuleDict(
            {str(layer): nn.Embedding(config.padded_vocab, kv_width) for layer in layers}
        )
        self.init_tables()

    # ---------------------------------------------------------------- initial values

    def init_weights(self) -> None:
        """Give every weight its initial value, and compute the rotary tables. Random numbers come
        from torch's global generator, one weight after another."""
        for name, p in self.named_parameters():
            self.init_one(name, p)
        self.init_tables()

    def init_tables(self) -> None:
        """Compute the rotary tables: with the model, and again after `to_empty`, which loses them.
        They are not saved."""
        config = self.config
        tables = rope_tables(config.seq_len, config.head_dim, config.rope_theta)
        for name, table in zip(("cos", "sin"), tables):
            self.register_buffer(name, table.to(self.embed.weight.device), persistent=False)

    @torch.no_grad()
    def init_one(self, name: str, weight: Tensor) -> None:
        """Give the weight of this name its initial value, of the size that KINDS has for it."""
        config = self.config
        kind = kind_of(name)
        group, size = KINDS[kind]
        if group == "scalar":
            weight.fill_(size)
        elif kind == "value_gate":
            weight.uniform_(0, size)
        elif config.tie_embeddings:
            size = TIED_SIZE
            if kind in ("out", "down"):
                # What these compute is added to the residual stream, 2 L times in all. The variance
                # of the sum is that of one matrix of this size (Megatron-LM).
                size /= (2 * config.n_layer) ** 0.5
            weight.normal_(0, size)
        elif kind in ("embed", "head"):
            weight.normal_(0, size)
        elif size == 0:  # `out` and `down` add nothing at first
            weight.zero_()
        else:  # with size 1, what a matrix of C inputs computes is about as large as they are
            bound = 3**0.5 * config.n_embd**-0.5 * size  # the std of U(-b, b) is b / sqrt(3)
            weight.uniform_(-bound, bound)
        init_previous_token_head(name, weight, config)

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters by group. With --optimizer muon each group has a learning rate of its own,
        and Muon takes "matrix", the matrices inside the blocks; AdamW takes the others. A tied
        table counts as "head". "scalar" is for gains, and for biases that you add."""
        groups = {"matrix": [], "embedding": [], "head": [], "scalar": []}
        for name, p in self.named_parameters():
            tied = name == "embed.weight" and self.config.tie_embeddings
            group = "head" if tied else KINDS[kind_of(name)][0]
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
        here = slice(start, start + T)
        mask = self._mask(idx, start, cache)
        ctx = Context(idx, self.cos[here], self.sin[here], mask, cache)

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
        """True where a query may look; None for plain causal attention (the fast path)."""
        T = idx.size(1)
        by_document = self.config.doc_mask and cache is None
        if T == 1 or not (start or by_document):
            return None
        # (T, start + T): query t stands at position start + t
        mask = torch.ones(T, start + T, dtype=torch.bool, device=idx.device).tril(start)
        if by_document:
            document = (idx == self.config.bos_id).cumsum(1)  # (B, T)
            mask = mask & (document[:, None, :, None] == document[:, None, None, :])  # (B, 1, T, T)
        return mask

    # ---------------------------------------------------------------- cost and use

    def flops_per_token(self, causal: bool = False) -> int:
        """FLOPs of forward and backward per token, without recomputation and the optimizer.

        A matmul takes 6 per weight: a multiplication and an addition for its result, as many for
        its input's gradient, as many for its weight's. Every 2-D weight is in one but the look-up
        tables; a tied table counts once, as the head. A layer's attention multiplies queries with
        keys, and the softmax with values: 6 each per channel and key, so 12 L H D T in all if each
        query meets all T keys (PaLM, appendix B: the usual "MFU"), half of that if `causal`
        (Megatron-LM)."""
        c = self.config
        groups = self.param_groups()
        del groups["embedding"]  # looked up, not multiplied
        matmul = sum(p.numel() for ps in groups.values() for p in ps if p.ndim == 2)
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
        n = min(max_new_tokens, self.config.seq_len - T)
        if n <= 0:
            raise UsageError(
                f"the prompt has {T} tokens; fewer than {self.config.seq_len} fit: give fewer words"
            )
        cache = KVCache(self.config, B, T + n, self.compute_dtype, idx.device)
        new = idx  # at first the whole prompts; then only the newest ids: the cache has the rest
        stopped = False
        for _ in range(n):
            logits = self(new, cache=cache)[:, -1]  # (B, V)
            if temperature < 1e-5:  # dividing by less could overflow
                new = logits.argmax(-1, keepdim=True)  # (B, 1)
            else:
                V = logits.size(-1)
                top, ids = logits.topk(min(top_k or V, V))  # (B, k)
                probs = F.softmax(top / temperature, dim=-1)  # the likeliest first
                if top_p < 1:  # keep a token if those before it hold less than top_p: at least one
                    probs = probs * (probs.cumsum(-1) - probs < top_p)
                drawn = torch.multinomial(probs, 1, generator=generator)  # it divides by their sum
                new = ids.gather(-1, drawn)  # (B, 1)
            yield new
            stopped |= new == stop_id
            if stopped.all():
                return

    def generate(self, idx: Tensor, max_new_tokens: int, **options) -> Tensor:
        """The prompts with all of `stream` appended: idx (B, T) -> (B, T + n)."""
        return torch.cat([idx, *self.stream(idx, max_new_tokens=max_new_tokens, **options)], dim=1)


# -------------------------------------------------------- a head that looks at the token before


def init_previous_token_head(name: str, weight: Tensor, config: GPTConfig) -> None:
    """Change the weights of one attention head, the first of the first layer, so that it begins by
    looking at the token before. A model learns without it: skip this at a first reading. It takes
    an untied output head, RoPE, and norms that make the sizes below known.

    Why: to copy what followed a token last time, a key must know the token before its own
    (induction heads, Olsson et al. 2022; lesson 33). A model that has to discover this first stays
    on a plateau, for a time that depends on the seed. benchmarks/RESULTS.md says what it is worth.

    How: n_same channels of the embedding begin with one value for every token. The weights of q and
    k that read them add a vector that is the same for every token. In a pair of channels of
    frequency f, that of k is (A, 0): at position s, RoPE turns it by the angle s f. That of q is
    the same vector, turned back by one position, A (cos f, -sin f): at position t, RoPE turns it to
    the angle (t - 1) f. Their product, A^2 cos((t - 1 - s) f), is largest for the key at s = t - 1.
    It is done in the n_pairs pairs of highest frequency, where one position makes the most
    difference. To all other weights, the equal channels are a bias."""
    D = config.head_dim
    if config.tie_embeddings or not (config.embed_norm and config.qk_norm and config.has_rope(0)):
        return
    n_same = config.n_embd // 4
    n_pairs = max(1, D // 12)
    # What is added to q has 5 times the norm of the rest, which is sqrt(D). So in each of n_pairs
    # pairs, A is 5 * (D / n_pairs)**0.5: a sum over n_same channels, each about 1 after the norms.
    part = 5 * (D / n_pairs) ** 0.5 / n_same
    if name == "embed.weight":
        weight[:, :n_same] = 0.8  # the standard deviation of the others
    elif name == "blocks.0.attn.k.weight":
        weight[:n_pairs, :n_same] += part
    elif name == "blocks.0.attn.q.weight":
        cos, sin = rope_tables(2, D, config.rope_theta, weight.device)  # of positions 0 and 1
        weight[:n_pairs, :n_same] += part * cos[1, :n_pairs, None]
        weight[D // 2 : D // 2 + n_pairs, :n_same] -= part * sin[1, :n_pairs, None]
    elif name == "blocks.0.attn.out.weight":
        weight[:, :D].normal_(0, 0.5 * D**-0.5)  # what it adds is half as large as its values
