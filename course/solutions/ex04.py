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
LOWEST = "torch.finfo(scores.dtype).min"
MASKED = "scores.masked_fill(~mask, lowest)"
RETURN = "weights.masked_fill(~mask, 0.0) @ V"
HEADS = "unflatten(-1, (heads, -1)).transpose(-2, -3)"
WRONG = {  # name -> what of the reference it replaces
    "NaN where nothing may be looked at": edit(LOWEST, "-torch.inf", RETURN, "weights @ V"),
    "NaN removed, but not from backward": edit(
        LOWEST, "-torch.inf", RETURN, "(weights @ V).nan_to_num(0.0)"
    ),
    "an average where nothing may be looked at": edit(RETURN, "weights @ V"),
    "masks with -1e9": edit(LOWEST, "-1e9 if Q.itemsize > 2 else -6e4"),
    "overflows": edit(
        "torch.softmax(scores.masked_fill(~mask, lowest), dim=-1)",
        "scores.exp() * mask / (scores.exp() * mask).sum(-1, keepdim=True).clamp_min(1e-30)",
    ),
    "masks after softmax": edit(MASKED, "scores"),
    "does not divide by the root of D": edit(" / Q.size(-1) ** 0.5", ""),
    "computes in float32": edit(MASKED, f"{MASKED}.float()", "weights.m", "weights.to(V.dtype).m"),
    "looks ahead": edit(".tril()", ""),
    "heads interleaved": edit(HEADS, "unflatten(-1, (-1, heads)).movedim(-1, -3)"),
    "does not turn the heads back": edit(
        "y.transpose(-2, -3).flatten(-2)", "y.reshape(in_features.shape)"
    ),
    "divides by the root of d_model": edit("w.T, num_heads)", "w.T, num_heads) / num_heads**0.25"),
}
