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
    import re

    import numpy as np
    import torch
    from subject import same

    from config import GPTConfig
    from hf.mapping import to_huggingface
    from model import GPT

    def attention(Q, K, V, mask=None):
        assert mask.dtype == torch.bool, f"mask is of {mask.dtype}, not bool"
        assert Q.shape == K.shape == V.shape, f"Q, K, V: {Q.shape}, {K.shape}, {V.shape}"
        return torch.nn.functional.scaled_dot_product_attention(Q, K, V, mask)

    def rotate(x, positions, speeds):
        assert positions.shape == x.shape[:2], f"positions are {positions.shape}, x is {x.shape}"
        a, b = np.split(x, 2, -1)
        turned = (a + 1j * b) * np.exp(1j * positions[:, :, None, None] * speeds)
        return np.concatenate([turned.real, turned.imag], -1).astype(x.dtype)

    # The project's norms have no weights. One does nothing if what reads its norm is divided by
    # it; and a stream `scale` times as large changes nothing if eps is scale^2 times as large.
    reads = {
        "self_attn.[qkv]_proj": "input_layernorm",
        "mlp.(gate|up)_proj": "post_attention_layernorm",
        "lm_head": "model.norm",
    }

    def check(what, zero="-", heads=2, kv_heads=2, theta=50.0, scale=1000.0, V=31, T=7, **more):
        tied = "no head" in what
        shape = dict(n_head=heads, n_kv_head=kv_heads, rope_theta=theta, vocab_size=V, seq_len=T)
        model = GPT(GPTConfig(**plain | shape | more, tie_embeddings=tied)).requires_grad_(False)
        torch.manual_seed(34)
        for name, weight in model.named_parameters():
            size = 0.001 if re.search("embed|out|down", name) else 0.3  # as small as eps, squared
            weight.normal_(0, 0.0 if re.search(zero, name) else size)
        ids = V - 1 - torch.randint(31, (2, T))
        right = model(ids) * (scale if tied else 1)  # (2, T, V)
        w = to_huggingface(model)
        for name in w:
            if re.search("embed|o_proj|down", name):
                w[name] *= scale
            elif "layernorm" in name or "model.norm" in name and not tied:
                w[name] = 0.5 + torch.rand(32)
        for name in w:
            for reader, norm in reads.items():
                if re.search(reader, name):
                    w[name] /= w[re.sub(reader, norm, name)]
        w = dict(sorted(w.items(), reverse=True))  # their order means nothing
        found = answer.llama(ids, w, heads, kv_heads, theta, 1e-6 * scale**2, attention, rotate)
        same(found, right, f"{what}: the logits", 1e-3, 1e-3)

    plain = dict(
        n_layer=1,
        n_embd=32,
        head_dim=6,
        mlp_hidden=20,
        mlp="swiglu",
        qk_norm=False,
        embed_norm=False,
        logit_softcap=0.0,
    )
    check("a layer of zeros, no head", "out|down")
    check("a layer of zeros", "out|down")
    check("only the MLP is not zero", "out")
    for heads in (2, 4):
        check("only attention is not zero", "down", heads)
    check("eleven layers", heads=3, kv_heads=1, n_layer=11)
    check("300 positions", T=300)
    check("70,000 tokens", V=70_000)
    for heads, theta in ((2, 50.0), (4, 50.0), (4, 900.0)):  # the same weights
        check("two layers", "-", heads, heads // 2, theta, 500.0, n_layer=2, head_dim=24 // heads)
