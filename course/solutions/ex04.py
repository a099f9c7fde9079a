"""Exercise 4: the reference, and answers that the oracle must refuse."""

import torch
from edits import edits


def scaled_dot_product_attention(Q, K, V, mask=None):
    scores = Q @ K.transpose(-2, -1) / Q.size(-1) ** 0.5  # (..., T, S)
    if mask is None:
        return torch.softmax(scores, dim=-1) @ V
    # a finite number instead of -inf: where all are masked, softmax has something to work with
    lowest = torch.finfo(scores.dtype).min
    weights = torch.softmax(scores.masked_fill(~mask, lowest), dim=-1)
    return weights.masked_fill(~mask, 0.0) @ V


def multihead_self_attention(
    d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight, in_features
):
    T = in_features.size(-2)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    q, k, v = (split(in_features @ w.T, num_heads) for w in weights)
    causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    y = scaled_dot_product_attention(q, k, v, causal)  # (..., H, T, D)
    return y.transpose(-2, -3).flatten(-2) @ o_proj_weight.T


def split(x, heads):
    """(..., T, heads * D) -> (..., heads, T, D)"""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


edit = edits(__file__)
LOWEST = "    lowest = torch.finfo(scores.dtype).min\n"
INFINITE = "    lowest = -torch.inf\n"
SCORES = "    scores = Q @"
SUM = "    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)"
WEIGHTS = "weights = torch.softmax(scores.masked_fill(~mask, lowest), dim=-1)"
RETURN = "    return weights.masked_fill(~mask, 0.0) @ V\n"
KERNEL = "torch.nn.functional.scaled_dot_product_attention"
WRONG = {  # name -> what of the reference it replaces
    "NaN where nothing may be looked at": edit(
        LOWEST, INFINITE, RETURN, "    return weights @ V\n"
    ),
    "NaN removed, but not from backward": edit(
        LOWEST, INFINITE, RETURN, "    return (weights @ V).nan_to_num(0.0)\n"
    ),
    "an average where nothing may be looked at": edit(RETURN, "    return weights @ V\n"),
    "masks with -1,000": edit(
        LOWEST,
        "    lowest = -1000.0\n",
        RETURN,
        "    return (weights * mask.any(-1, keepdim=True)) @ V\n",
    ),
    "adds -1e4 where it should mask": edit(
        "scores.masked_fill(~mask, lowest)", "scores - 1e4 * (~mask).to(scores.dtype)"
    ),
    "masks after softmax": edit("scores.masked_fill(~mask, lowest)", "scores"),
    "does not divide by the root of D": edit(" / Q.size(-1) ** 0.5", ""),
    "divides by the root of the values' size": edit("Q.size(-1) ** 0.5", "V.size(-1) ** 0.5"),
    "one maximum for all rows": edit(
        WEIGHTS, "weights = torch.exp(scores - scores.amax()) * mask\n" + SUM
    ),
    "computes in float32": edit(
        SCORES,
        "    dtype = Q.dtype\n    Q, K, V = Q.float(), K.float(), V.float()\n" + SCORES,
        RETURN,
        "    return (weights.masked_fill(~mask, 0.0) @ V).to(dtype)\n",
    ),
    "the newest 64 keys": edit(
        SCORES,
        "    K, V = K[..., -64:, :], V[..., -64:, :]\n"
        "    mask = None if mask is None else mask[..., -64:]\n" + SCORES,
    ),
    "no gradient through the weights": edit(
        RETURN, RETURN.replace("weights.", "weights.detach().")
    ),
    "torch's own": edit(SCORES, f"    return {KERNEL}(Q, K, V, mask)\n" + SCORES),
    "torch's own, imported at the top": edit(
        SCORES,
        "    return kernel(Q, K, V, mask)\n" + SCORES,
        "import torch\n",
        f"import torch\n\nkernel = {KERNEL}\n",
    ),
    "looks ahead": edit("device=q.device).tril()", "device=q.device)"),
    "heads interleaved": edit(
        "return x.unflatten(-1, (heads, -1)).transpose(-2, -3)",
        "return x.unflatten(-1, (-1, heads)).movedim(-1, -3)",
    ),
    "heads cut out of the positions": edit(
        "return x.unflatten(-1, (heads, -1)).transpose(-2, -3)",
        "return x.reshape(*x.shape[:-2], heads, x.size(-2), x.size(-1) // heads)",
    ),
    "does not turn the heads back": edit(
        "y.transpose(-2, -3).flatten(-2)", "y.reshape(in_features.shape)"
    ),
    "a loop over the heads": edit(
        "y = scaled_dot_product_attention(q, k, v, causal)",
        "parts = zip(*(x.unbind(-3) for x in (q, k, v)))\n"
        "    y = torch.stack([scaled_dot_product_attention(*p, causal) for p in parts], -3)",
    ),
    "divides by the root of d_model": edit(
        "split(in_features @ w.T, num_heads)",
        "split(in_features @ w.T, num_heads) / num_heads**0.25",
    ),
}
