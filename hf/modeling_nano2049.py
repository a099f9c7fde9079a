"""nano2049's GPT for transformers 5.23 or newer: `from_pretrained(DIR, trust_remote_code=True)`.

export.py copies this file beside the weights of a model that no stock class of transformers
computes. It imports torch and transformers only. The parameters have the names of the trainer's
model, so model.safetensors holds its weights as they are. A row of ids is one document: BOS, then
its tokens. Shapes: B rows, T positions, H query heads, G key/value heads, D = head_dim.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

VALUE_GATE_CHANNELS = 12


class Nano2049Config(PreTrainedConfig):
    """The fields of the trainer's GPTConfig, under its names, as config.json has them."""

    model_type = "nano2049"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {  # the names that other code asks for
        "max_position_embeddings": "seq_len",
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "intermediate_size": "mlp_hidden",
    }

    def has_value_embed(self, layer):
        return "value_embeds" in self.extras and (self.n_layer - 1 - layer) % 2 == 0

    def has_rope(self, layer):
        return self.nope_every == 0 or (layer + 1) % self.nope_every != 0


def rms_norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


def apply_rope(x, cos, sin):
    """x (B, T, H, D), cos and sin (B or 1, T, 1, D/2) -> (B, T, H, D)."""
    x1, x2 = x.chunk(2, dim=-1)  # (B, T, H, D/2) each
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def remember(cache, layer, x):
    """Keep x (B, n, T, d) in the cache as one more layer, so that whatever reorders, cuts or
    repeats the cache does the same to it; returns all seen so far, (B, n, S, d)."""
    if cache is None:
        return x
    while len(cache.layers) <= layer:
        cache.layers.append(DynamicLayer())
    return cache.update(x, x[..., :0], layer)[0]


def refuse_unread(options):
    """TypeError for a tensor or a cache under a name that `forward` does not read."""
    known = ("num_items_in_batch", "cache_position")  # for the loss; as position_ids
    for name, value in options.items():
        if isinstance(value, torch.Tensor | Cache) and name not in known:
            raise TypeError(f"this model does not read {name}")


linear = partial(nn.Linear, bias=False)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.layer = layer
        C, H, G, D = config.n_embd, config.n_head, config.n_kv_head, config.head_dim
        # what transformers' attention functions ask a module for
        self.is_causal = True
        self.num_key_value_groups = H // G
        self.q = linear(C, H * D)
        self.k = linear(C, G * D)
        self.v = linear(C, G * D)
        self.out = linear(H * D, C)
        if config.qk_gain:
            self.q_gain = nn.Parameter(torch.ones(D))
            self.k_gain = nn.Parameter(torch.ones(D))
        if config.has_value_embed(layer):
            self.value_gate = linear(VALUE_GATE_CHANNELS, G)

    def forward(self, x, value_embed, has_previous, cos, sin, mask, cache):
        config = self.config
        B, T, _ = x.shape
        heads = (B, T, -1, config.head_dim)
        q = self.q(x).view(heads)
        k = self.k(x).view(heads)
        v = self.v(x).view(heads)
        if value_embed is not None:
            gate = 3 * torch.sigmoid(self.value_gate(x[..., :VALUE_GATE_CHANNELS]))  # (B, T, G)
            v = v + gate[..., None] * value_embed.view(heads)
        if "key_offset" in config.extras:
            k = self._offset(k, has_previous, cache)
        if config.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        if config.qk_gain:
            q = q * self.q_gain
            k = k * self.k_gain
        if config.has_rope(self.layer):
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H or G, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            config._attn_implementation, eager_attention_forward
        )
        y, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=config.head_dim**-0.5)
        return self.out(y.flatten(2))  # y (B, T, H, D)

    def _offset(self, k, has_previous, cache):
        """Take half of each key, the pairs that RoPE rotates slowest, from the token before."""
        _, T, _, D = k.shape
        seen = remember(cache, self.config.n_layer + self.layer, k.transpose(1, 2))
        previous = F.pad(seen, (0, 0, 1, 0))[:, :, -T - 1 : -1].transpose(1, 2)  # (B, T, G, D)
        slow = torch.arange(D, device=k.device) % (D // 2) >= D // 4
        return torch.where(slow & has_previous[..., None, None], previous, k)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.swiglu = config.mlp == "swiglu"
        self.up = linear(config.n_embd, config.mlp_hidden)
        if self.swiglu:
            self.gate = linear(config.n_embd, config.mlp_hidden)
        self.down = linear(config.mlp_hidden, config.n_embd)

    def forward(self, x):
        h = F.silu(self.gate(x)) * self.up(x) if self.swiglu else F.relu(self.up(x)).square()
        return self.down(h)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x, *args):
        x = x + self.attn(rms_norm(x), *args)
        return x + self.mlp(rms_norm(x))


class Nano2049ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = Nano2049Config
    _input_embed_layer = "embed"
    _supports_sdpa = True
    _no_split_modules = ["Block"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _tied_weights_keys = {"head.weight": "embed.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.head = linear(config.n_embd, config.vocab_size)
        self.value_embeds = nn.ModuleDict()
        for layer in filter(config.has_value_embed, range(config.n_layer)):
            table = nn.Embedding(config.vocab_size, config.n_kv_head * config.head_dim)
            self.value_embeds[str(layer)] = table
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, value):
        self.head = value

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """input_ids (B, T) -> logits (B, T, V) in fp32, or of the last logits_to_keep positions."""
        config = self.config
        # From 5.24 on, `generate` hands the cache over as `cache`.
        cache = past_key_values if past_key_values is not None else kwargs.pop("cache", None)
        refuse_unread(kwargs)
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        start = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = start + torch.arange(input_ids.size(1), device=input_ids.device)[None]
        x = self.embed(input_ids)  # (B, T, C)
        if config.embed_norm:
            x = rms_norm(x)
        # By position, as the names of the fourth here and of the third below depend on the release.
        mask = create_causal_mask(config, x, attention_mask, cache, position_ids=position_ids)
        cos, sin = self._rope(position_ids)
        has_previous = self._has_previous(input_ids, attention_mask, start)

        for layer, block in enumerate(self.blocks):
            value_embed = None
            if config.has_value_embed(layer):
                value_embed = self.value_embeds[str(layer)](input_ids)
            x = block(x, value_embed, has_previous, cos, sin, mask, cache)

        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)  # 0: slice(0, None), all
        logits = self.head(rms_norm(x[:, logits_to_keep])).float()
        cap = config.logit_softcap
        if cap:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, cache)

    def _rope(self, position_ids):
        """(B or 1, T) -> cos and sin, (B or 1, T, 1, D/2) each, in fp32."""
        D = self.config.head_dim
        exponent = torch.arange(0, D, 2, device=position_ids.device, dtype=torch.float32) / D
        angle = position_ids[..., None, None] * (1.0 / self.config.rope_theta**exponent)
        return angle.cos(), angle.sin()

    def _has_previous(self, ids, attention_mask, start):
        """(B, T): whether the token before exists, is not padding, and is of the same document.
        start: the number of tokens that the cache has seen."""
        T = ids.size(1)
        is_token = ids.new_ones(ids.size(0), start + T)
        if attention_mask is not None and attention_mask.ndim == 2:
            is_token = attention_mask[:, -start - T :]  # 0: padding
        return F.pad(is_token, (1, 0))[:, -T - 1 : -1].bool() & (ids != self.config.bos_token_id)
