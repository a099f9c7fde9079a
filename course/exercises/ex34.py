"""Exercise 34: a Llama, from the names in its file.

    llama(ids, weights, heads, kv_heads, theta, eps, attention, rotate) -> logits (B, T, V)

ids (B, T) are tokens. `weights` are those of a Llama on Hugging Face, under the names that they
have there. All of them are float32, and so are the logits:

    model.embed_tokens.weight        (V, C)     a row for each of V tokens
    lm_head.weight                   (V, C)     the head; if it is missing, use the embedding
    model.norm.weight                (C,)       the norm before the head

and for each layer i, with model.layers.i. in front of each name (as many layers as there are):

    input_layernorm.weight           (C,)       the norm before attention
    self_attn.q_proj.weight          (heads x D, C)
    self_attn.k_proj.weight, self_attn.v_proj.weight         (kv_heads x D, C)
    self_attn.o_proj.weight          (C, heads x D)
    post_attention_layernorm.weight  (C,)       the norm before the MLP (in spite of its name)
    mlp.gate_proj.weight, mlp.up_proj.weight                 (F, C)
    mlp.down_proj.weight             (C, F)

D, the size of a head, is not always C / heads.

It is lesson 5's model with five differences, those of lesson 34's table:
1. A norm divides by the root of (the mean of the squares + eps), and then multiplies by its weight,
   number by number.
2. The MLP is SwiGLU: down(silu(gate(x)) * up(x)), with silu(y) = y * sigmoid(y).
3. There are only kv_heads heads of keys and values; kv_heads divides heads, and neighboring query
   heads share one. With 4 and 2, the query heads 0 and 1 use key head 0, and 2 and 3 use 1. In each
   matrix, the heads come one after another: its first D rows are head 0, and so on.
4. The base of the positions is theta, not 100: pair i of D / 2 turns with the speed
   theta^(-2 i / D).
5. The head may be missing: then it is the embedding.

attention(Q, K, V, mask) is exercise 4's scaled_dot_product_attention, with Q (B, heads, T, D), and
rotate(x, positions, speeds) is exercise 8's: it takes and returns numpy arrays, not tensors, and
another order of dimensions: x (B, T, heads, D), positions (B, T), speeds (D / 2,). You need not
compute gradients.
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
    from subject import equal, same

    from config import GPTConfig
    from hf.mapping import to_huggingface
    from model import GPT

    def attention(Q, K, V, mask):
        equal(mask.dtype, torch.bool, "attention got a mask whose dtype")
        assert Q.shape == K.shape == V.shape, (
            f"attention got Q, K, V of the shapes {tuple(Q.shape)}, {tuple(K.shape)} and "
            f"{tuple(V.shape)}, and should get them of one shape"
        )
        return torch.nn.functional.scaled_dot_product_attention(Q, K, V, mask)

    def rotate(x, positions, speeds):
        equal(positions.shape, x.shape[:2], f"rotate got x {x.shape}; the shape of positions")
        equal(len(speeds), x.shape[3] // 2, f"rotate got x {x.shape}; the number of speeds")
        a, b = np.split(x, 2, -1)
        turned = (a + 1j * b) * np.exp(1j * positions[:, :, None, None] * speeds)
        return np.concatenate([turned.real, turned.imag], -1).astype(x.dtype)

    # The project's norms have no weights. One does nothing if what reads its norm is divided by
    # it; and a stream `scale` times as large changes nothing if eps is scale^2 times as large.
    scale = 1000.0

    def check(what, zero="-", layers=1, tied=False):
        """zero: whose weights are 0."""
        model = GPT(
            GPTConfig(
                n_layer=layers,
                n_head=4,
                n_kv_head=2,
                rope_theta=50.0,
                tie_embeddings=tied,
                vocab_size=31,
                seq_len=7,
                n_embd=32,
                head_dim=6,
                mlp_hidden=20,
                mlp="swiglu",
                qk_norm=False,
                embed_norm=False,
                logit_softcap=0.0,
            )
        ).requires_grad_(False)
        torch.manual_seed(34)
        for name, weight in model.named_parameters():
            size = 0.001 if re.search("embed|out|down", name) else 0.3  # as small as eps, squared
            weight.normal_(0, 0.0 if re.search(zero, name) else size)
        ids = torch.randint(31, (2, 7))
        right = model(ids) * (scale if tied else 1)  # (2, T, V)
        w = to_huggingface(model)
        norm = torch.ones(32) if tied else torch.linspace(0.5, 1.5, 32)
        for name in w:
            layer = re.search(r"layers\.(\d+)", name)
            own = norm.roll(1 + int(layer[1])) if layer else norm
            own = own.flip(0) if re.search("self_attn|input", name) else own
            if re.search("embed|o_proj|down", name):
                w[name] *= scale
            elif "norm" in name:
                w[name] = own
            else:
                w[name] /= own
        found = answer.llama(ids, w, 4, 2, 50.0, 1e-6 * scale**2, attention, rotate)
        same(found, right, f"{what}: logits", 1e-3, 1e-3)

    check("o_proj and down_proj are 0, and no lm_head", "out|down", tied=True)
    check("o_proj and down_proj are 0: only embedding, model.norm and lm_head count", "out|down")
    check("o_proj is 0, so attention changes nothing", "out")
    check("down_proj is 0, so the MLP changes nothing", "down")
    check("one layer, all of it")
    check("eleven layers", layers=11)
