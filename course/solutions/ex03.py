"""Exercise 3: the reference, and answers that the oracle must refuse."""

import math

import torch


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


# ------------------------------------------------------------------------------ wrong answers
def with_attention(attention):
    """Both functions on another attention."""

    def heads(d_model, num_heads, wq, wk, wv, wo, x):
        q, k, v = (split(x @ w.T, num_heads) for w in (wq, wk, wv))
        causal = torch.ones(x.size(-2), x.size(-2), dtype=torch.bool).tril()
        return attention(q, k, v, causal).transpose(-2, -3).flatten(-2) @ wo.T

    return dict(scaled_dot_product_attention=attention, multihead_self_attention=heads)


def nan_where_nothing(Q, K, V, mask=None):
    scores = Q @ K.transpose(-2, -1) / Q.size(-1) ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.softmax(scores, dim=-1) @ V


def nan_removed(Q, K, V, mask=None):
    """Zeros, but backward goes through the NaN."""
    return nan_where_nothing(Q, K, V, mask).nan_to_num(0.0)


def average_where_nothing(Q, K, V, mask=None):
    scores = Q @ K.transpose(-2, -1) / Q.size(-1) ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1) @ V


def slightly_lower(Q, K, V, mask=None):
    """-1,000 instead of -inf: too little where scores are large."""
    scores = Q @ K.transpose(-2, -1) / Q.size(-1) ** 0.5
    if mask is None:
        return torch.softmax(scores, dim=-1) @ V
    weights = torch.softmax(scores + torch.where(mask, 0.0, -1000.0).to(scores.dtype), dim=-1)
    return torch.where(mask.any(-1, keepdim=True), weights, 0.0) @ V


def masks_the_weights(Q, K, V, mask=None):
    """Masks after softmax: the weights left do not sum to 1."""
    weights = torch.softmax(Q @ K.transpose(-2, -1) / Q.size(-1) ** 0.5, dim=-1)
    return (weights if mask is None else weights * mask) @ V


def other_way_round(Q, K, V, mask=None):
    return honest(Q, K, V, None if mask is None else ~mask)


def over_queries(Q, K, V, mask=None):
    scores = Q @ K.transpose(-2, -1) / Q.size(-1) ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-2)
    return (weights if mask is None else weights.masked_fill(~mask, 0.0)) @ V


def unscaled(Q, K, V, mask=None):
    return honest(Q * Q.size(-1) ** 0.5, K, V, mask)


def scaled_by_values(Q, K, V, mask=None):
    return honest(Q * (Q.size(-1) / V.size(-1)) ** 0.5, K, V, mask)


def overflows(Q, K, V, mask=None):
    powers = torch.exp(Q @ K.transpose(-2, -1) / Q.size(-1) ** 0.5)
    powers = powers if mask is None else powers * mask
    return powers / powers.sum(-1, keepdim=True).clamp_min(1e-300) @ V


def shifted_by_all(Q, K, V, mask=None):
    """Subtracts the largest score of all, masked ones included: rows of small scores vanish."""
    scores = Q @ K.transpose(-2, -1) / Q.size(-1) ** 0.5
    powers = torch.exp(scores - scores.amax())
    powers = powers if mask is None else powers * mask
    total = powers.sum(-1, keepdim=True)
    return torch.where(total > 0, powers / total.clamp_min(1e-300), 0.0) @ V


def in_float32(Q, K, V, mask=None):
    return honest(Q.float(), K.float(), V.float(), mask).to(Q.dtype)


def ready_made(Q, K, V, mask=None):
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, mask)


def uncausal(d_model, num_heads, wq, wk, wv, wo, x):
    q, k, v = (split(x @ w.T, num_heads) for w in (wq, wk, wv))
    return honest(q, k, v).transpose(-2, -3).flatten(-2) @ wo.T


def heads_interleaved(d_model, num_heads, wq, wk, wv, wo, x):
    """Head h takes the numbers h, h + H, h + 2 H, ..."""
    q, k, v = ((x @ w.T).unflatten(-1, (-1, num_heads)).movedim(-1, -3) for w in (wq, wk, wv))
    causal = torch.ones(x.size(-2), x.size(-2), dtype=torch.bool).tril()
    return honest(q, k, v, causal).movedim(-3, -1).flatten(-2) @ wo.T


def heads_mixed_with_positions(d_model, num_heads, wq, wk, wv, wo, x):
    """A view where a transpose belongs: heads are cut out of the positions."""
    shape = (*x.shape[:-2], num_heads, x.size(-2), d_model // num_heads)
    q, k, v = ((x @ w.T).reshape(shape) for w in (wq, wk, wv))
    causal = torch.ones(x.size(-2), x.size(-2), dtype=torch.bool).tril()
    return honest(q, k, v, causal).transpose(-2, -3).flatten(-2) @ wo.T


def forgets_to_turn_back(d_model, num_heads, wq, wk, wv, wo, x):
    q, k, v = (split(x @ w.T, num_heads) for w in (wq, wk, wv))
    causal = torch.ones(x.size(-2), x.size(-2), dtype=torch.bool).tril()
    return honest(q, k, v, causal).reshape(x.shape) @ wo.T


def head_by_head(d_model, num_heads, wq, wk, wv, wo, x):
    q, k, v = ((x @ w.T).chunk(num_heads, dim=-1) for w in (wq, wk, wv))
    causal = torch.ones(x.size(-2), x.size(-2), dtype=torch.bool).tril()
    return torch.cat([honest(*parts, causal) for parts in zip(q, k, v)], dim=-1) @ wo.T


def weights_not_turned(d_model, num_heads, wq, wk, wv, wo, x):
    return honest_heads(d_model, num_heads, wq.T, wk.T, wv.T, wo.T, x)


def without_the_last_matrix(d_model, num_heads, wq, wk, wv, wo, x):
    return honest_heads(d_model, num_heads, wq, wk, wv, torch.eye(d_model, dtype=x.dtype), x)


def scaled_by_the_width(d_model, num_heads, wq, wk, wv, wo, x):
    """Divides by the root of d_model, not of a head's size."""
    return honest_heads(d_model, num_heads, wq * num_heads**-0.5, wk, wv, wo, x)


honest, honest_heads = scaled_dot_product_attention, multihead_self_attention
WRONG = {  # name -> what of the reference it replaces
    "NaN where nothing may be looked at": with_attention(nan_where_nothing),
    "NaN removed, but not from backward": with_attention(nan_removed),
    "an average where nothing may be looked at": with_attention(average_where_nothing),
    "masks with -1,000": with_attention(slightly_lower),
    "masks after softmax": with_attention(masks_the_weights),
    "the mask the other way round": with_attention(other_way_round),
    "softmax over the queries": with_attention(over_queries),
    "does not divide by the root of D": with_attention(unscaled),
    "divides by the root of the values' size": with_attention(scaled_by_values),
    "overflows": with_attention(overflows),
    "one maximum for all rows": with_attention(shifted_by_all),
    "computes in float32": with_attention(in_float32),
    "torch's own": with_attention(ready_made),
    "looks ahead": dict(multihead_self_attention=uncausal),
    "heads interleaved": dict(multihead_self_attention=heads_interleaved),
    "heads cut out of the positions": dict(multihead_self_attention=heads_mixed_with_positions),
    "does not turn the heads back": dict(multihead_self_attention=forgets_to_turn_back),
    "a loop over the heads": dict(multihead_self_attention=head_by_head),
    "x @ weight": dict(multihead_self_attention=weights_not_turned),
    "no last matrix": dict(multihead_self_attention=without_the_last_matrix),
    "divides by the root of d_model": dict(multihead_self_attention=scaled_by_the_width),
}
