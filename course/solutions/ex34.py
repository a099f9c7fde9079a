"""Exercise 34: the reference, and answers that the oracle must refuse."""

import numpy as np
import torch
import torch.nn.functional as F
from edits import edits


def llama(ids, weights, heads, kv_heads, theta, eps, attention, rotate):
    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]

    def times(x, name):
        return x @ weights[f"{name}.weight"].T

    def turn(x):  # (B, T, H, D)
        D = x.size(-1)
        positions = np.tile(np.arange(x.size(1)), (len(x), 1))
        return torch.from_numpy(rotate(x.numpy(), positions, theta ** (-np.arange(0, D, 2) / D)))

    T = ids.size(1)
    mask = torch.ones(T, T).tril().bool()
    x = weights["model.embed_tokens.weight"][ids]
    for i in range(sum("input_layernorm" in name for name in weights)):
        at = f"model.layers.{i}"
        y = norm(x, f"{at}.input_layernorm")
        q = turn(times(y, f"{at}.self_attn.q_proj").unflatten(-1, (heads, -1)))
        k = turn(times(y, f"{at}.self_attn.k_proj").unflatten(-1, (kv_heads, -1)))
        v = times(y, f"{at}.self_attn.v_proj").unflatten(-1, (kv_heads, -1))
        k = k.repeat_interleave(heads // kv_heads, dim=2)  # (B, T, heads, D)
        v = v.repeat_interleave(heads // kv_heads, dim=2)
        y = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        x = x + times(y.transpose(1, 2).flatten(2), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = times(y, f"{at}.mlp.gate_proj")
        up = times(y, f"{at}.mlp.up_proj")
        x = x + times(F.silu(gate) * up, f"{at}.mlp.down_proj")
    head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
    return times(norm(x, "model.norm"), head)


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "relu squared, no gate": edit("F.silu(gate) * up", "torch.relu(up).square()"),
    "norms without their weights": edit(' * weights[f"{name}.weight"]\n', "\n"),
    "key heads dealt out in turn": edit(
        "k.repeat_interleave(heads // kv_heads, dim=2)",
        "k.repeat(1, 1, heads // kv_heads, 1)",
        "v.repeat_interleave(heads // kv_heads, dim=2)",
        "v.repeat(1, 1, heads // kv_heads, 1)",
    ),
    "pairs of neighbours": edit(
        "rotate(x.numpy()", "rotate(torch.cat([x[..., ::2], x[..., 1::2]], -1).numpy()"
    ),
    "eps forgotten": edit(" + eps)", ")"),
    "always the embedding as the head": edit('if "lm_head.weight" in weights', "if False"),
    "at most ten layers": edit("in name for", "in name[:30] for"),
}
