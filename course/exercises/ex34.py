"""Exercise 34: a Llama, from the names in its file.

    llama(ids, weights, heads, kv_heads, theta, eps, attention, rotate) -> logits (B, T, V)

ids (B, T) are tokens. `weights` are those of a Llama on Hugging Face, under their names there. All
are float32, and so are the logits:

    model.embed_tokens.weight        (V, C)     a row for each of V tokens
    lm_head.weight                   (V, C)     the head; if it is missing, it is the embedding
    model.norm.weight                (C,)       the norm before the head

and for each layer i, all with model.layers.i. in front (as many layers as there are):

    input_layernorm.weight           (C,)       the norm before attention
    self_attn.q_proj.weight          (heads x D, C)
    self_attn.k_proj.weight, self_attn.v_proj.weight         (kv_heads x D, C)
    self_attn.o_proj.weight          (C, heads x D)
    post_attention_layernorm.weight  (C,)       the norm before the MLP (in spite of its name)
    mlp.gate_proj.weight, mlp.up_proj.weight                 (F, C)
    mlp.down_proj.weight             (C, F)

It is lesson 5's model with five differences:
1. A norm divides by the root of (the mean of the squares + eps), and then multiplies with its
   weight, number by number.
2. D, the size of a head, is not always C / heads.
3. Of keys and values there are only kv_heads, which divides heads: query heads that stand beside
   each other share one. With 4 and 2, the query heads 0 and 1 use key head 0, 2 and 3 use 1. The
   heads stand in a row in each matrix: its first D rows are head 0, and so on.
4. Pair i of D / 2 turns with the speed theta^(-2 i / D).
5. The MLP is SwiGLU: down(silu(gate(x)) * up(x)), with silu(y) = y * sigmoid(y).

attention(Q, K, V, mask) is exercise 4's scaled_dot_product_attention, with Q (B, heads, T, D), and
rotate(x, positions, speeds) exercise 8's: it takes and returns numpy arrays, x (B, T, heads, D),
positions (B, T), speeds (D / 2,). No gradients are asked for.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def llama(
    ids: Tensor,
    weights: dict[str, Tensor],
    heads: int,
    kv_heads: int,
    theta: float,
    eps: float,
    attention: Callable,
    rotate: Callable,
) -> Tensor:
    raise NotImplementedError("write llama, then: python course/check.py 34")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import numpy as np

    from config import GPTConfig
    from hf.mapping import to_huggingface
    from model import GPT

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(34)
    attention = torch.nn.functional.scaled_dot_product_attention

    def rotate(x, positions, speeds) -> np.ndarray:
        a, b = np.split(x, 2, -1)
        turned = (a + 1j * b) * np.exp(1j * positions[:, :, None, None] * speeds)
        return np.concatenate([turned.real, turned.imag], -1).astype(x.dtype)

    shape = dict(seq_len=16, vocab_size=31, head_dim=6, n_embd=32, mlp_hidden=20, mlp="swiglu")
    shape |= dict(qk_norm=False, embed_norm=False, logit_softcap=0.0, rope_theta=50.0)
    neither = ("attn.out", "mlp.down")
    for case, layers, heads, kv_heads, tied, silent in (
        ("a layer that adds nothing; the embedding is the head", 1, 2, 2, True, neither),
        ("a layer that adds nothing; a head of its own", 1, 2, 2, False, neither),
        ("one layer, o_proj is 0: only its MLP counts", 1, 2, 2, False, ("attn.out",)),
        ("one layer, down_proj is 0: only attention counts", 1, 2, 2, False, ("mlp.down",)),
        ("the same, 4 query heads and 2 key heads", 1, 4, 2, False, ("mlp.down",)),
        ("11 layers, 3 query heads and 1 key head", 11, 3, 1, False, ()),
        ("3 layers, 6 query heads and 2 key heads; the embedding is the head", 3, 6, 2, True, ()),
    ):
        how = dict(n_layer=layers, n_head=heads, n_kv_head=kv_heads, tie_embeddings=tied)
        model = GPT(GPTConfig(**shape, **how)).requires_grad_(False)
        for name, weight in model.named_parameters():
            small = any(part in name for part in ("embed", *neither))  # as small as eps, squared
            size = 0.0 if any(part in name for part in silent) else 0.001 if small else 0.3
            weight.normal_(0, size, generator=draw)
        ids = torch.randint(31, (2, 7), generator=draw)
        right = model(ids)  # (2, 7, 31)
        w = to_huggingface(model)
        # The project's norms have no weights. One does nothing if what reads its norm is divided by
        # it; and a stream 1,000 times as large changes nothing if eps is 1,000^2 times as large.
        readers = {} if tied else {"model.norm": ["lm_head"]}
        for i in range(layers):
            at = f"model.layers.{i}."
            readers[at + "input_layernorm"] = [f"{at}self_attn.{n}_proj" for n in "qkv"]
            readers[at + "post_attention_layernorm"] = [at + "mlp.gate_proj", at + "mlp.up_proj"]
        for norm, matrices in readers.items():
            w[norm + ".weight"] = 0.5 + torch.rand(32, generator=draw)
            for matrix in matrices:
                w[matrix + ".weight"] /= w[norm + ".weight"]
        for name in w:
            if any(part in name for part in ("embed_tokens", "o_proj", "down_proj")):
                w[name] *= 1000.0
        if tied:
            right *= 1000.0
        given = {name: w[name] for name in sorted(w, reverse=True)}  # their order means nothing
        got = answer.llama(ids, given, heads, kv_heads, 50.0, 1.0, attention, rotate)
        assert got.shape == right.shape and got.dtype == torch.float32, (
            f"{case}: {got.dtype} of {tuple(got.shape)}, not float32 of {tuple(right.shape)}"
        )
        b, t, v = np.unravel_index(int((got - right).abs().argmax()), right.shape)
        assert torch.allclose(got, right, atol=1e-3, rtol=1e-3), (
            f"{case}: the logit of token {v} at position {t} of text {b} is {got[b, t, v]:.4f}, "
            f"not {right[b, t, v]:.4f}"
        )
