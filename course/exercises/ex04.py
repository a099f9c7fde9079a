"""Exercise 4: attention with any mask, and with several heads.

    scaled_dot_product_attention(Q, K, V, mask=None) -> a tensor (..., T, E)

Q is (..., T, D): a query of D numbers for each of T positions. K is (..., S, D) and V (..., S, E):
keys and values of S positions; S may differ from T, and may be 0, and E may differ from D. The dots
stand for any number of dimensions, the same for all three; nothing is mixed along them. mask is
(T, S) or (..., T, S), where a 1 among the dots stands for any number. It is True where a query may
look; None means everywhere. A query that may look nowhere gets zeros. All inputs and the result are
floats of one dtype, perhaps float16, whose numbers end at 65,504. Divide the scores by the root of
D; they may be so large that e to their power is infinite for the computer.

    multihead_self_attention(d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight,
                             o_proj_weight, in_features) -> a tensor (..., T, d_model)

in_features is (..., T, d_model), and each weight (d_model, d_model), to be used as torch.nn.Linear
does, x @ weight.T. Queries, keys and values are cut into num_heads heads: the first has the first
d_model / num_heads numbers, and so on. Position t looks at the positions 0 to t. The heads' answers
are put side by side in the same order, and go through o_proj_weight. Queries and keys are not told
their positions: that comes in exercise 8.

Write it with matrix products (a loop over positions or heads is also right, but slow), and without
torch's ready-made attentions. backward must work through it, to each tensor that is given, without
NaN. The names and arguments are those of the first assignment of Stanford's CS336, so its tests run
on your answer.
"""

from torch import Tensor


def scaled_dot_product_attention(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None
) -> Tensor:
    raise NotImplementedError("write scaled_dot_product_attention, then: python course/check.py 4")


def multihead_self_attention(
    d_model: int,
    num_heads: int,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    in_features: Tensor,
) -> Tensor:
    raise NotImplementedError("write multihead_self_attention too: python course/check.py 4")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import torch
    from subject import same

    torch.manual_seed(6)

    def slowly(Q, K, V, mask):
        """By the definition, query by query."""
        mask = torch.tensor(True) if mask is None else mask
        mask = mask.expand(*Q.shape[:-1], K.size(-2))
        if Q.ndim > 2:
            return torch.stack([*map(slowly, Q, K, V, mask)])
        rows = [torch.softmax(K[may] @ q / len(q) ** 0.5, 0) @ V[may] for q, may in zip(Q, mask)]
        return torch.stack(rows)

    def heads_slowly(d_model, num_heads, q_weight, k_weight, v_weight, o_weight, x):
        cut = [torch.stack((x @ w.T).chunk(num_heads, -1)) for w in (q_weight, k_weight, v_weight)]
        causal = torch.ones(x.size(-2), x.size(-2)).tril() > 0
        return torch.cat([*slowly(*cut, causal)], -1) @ o_weight.T

    def judge(case, function, slow, first, shapes, last, dtype=torch.float64, size=1.0):
        """The result and the gradients, for tensors of these shapes and this size; first, last:
        the arguments before and after them."""
        given = [size * torch.randn(shape, dtype=dtype) for shape in shapes.values()]
        for x in given:
            x.requires_grad_()
        twins = [x.detach().double().requires_grad_() for x in given]
        right = slow(*first, *twins, *last)
        found = function(*first, *given, *last)
        near = torch.finfo(dtype).eps ** 0.5
        same(found, right, f"{case}: the result", near, near, dtype)
        slopes = torch.randn_like(right)
        (right * slopes).sum().backward()
        (found * slopes).sum().backward()
        for name, x, twin in zip(shapes, given, twins):
            what = f"{case}: after backward, {name}.grad"
            same(x.grad, twin.grad, what, near, near * size**2, dtype)

    def judge_mask(case, mask, lead=(), T=2, S=2, **how):
        shapes = {"Q": (*lead, T, 2), "K": (*lead, S, 2), "V": (*lead, S, 3)}
        judge(case, answer.scaled_dot_product_attention, slowly, [], shapes, [mask], **how)

    def judge_heads(heads, *shape, **how):
        width = shape[-1]
        shapes = {f"{x}_proj_weight": (width, width) for x in "qkvo"} | {"in_features": shape}
        case = f"num_heads {heads}, in_features {shape}"
        judge(
            case, answer.multihead_self_attention, heads_slowly, [width, heads], shapes, [], **how
        )

    mask = torch.tensor([[True, False], [True, True]])
    judge_mask("no mask", None, (1,))
    judge_mask("the first query may look at the first key alone", mask)
    judge_mask("float16, the first key alone", mask, dtype=torch.float16)
    judge_mask(
        "the first query may look at the first key alone, with scores of about 1e34",
        mask,
        dtype=torch.float32,
        size=1e17,
    )
    judge_mask("the first query may look nowhere", torch.tensor([[False, False], [True, True]]))
    judge_mask("no keys", None, S=0)
    for shape in ((4, 6), (3, 1, 4, 6)):
        judge_mask(f"a mask of shape {shape}", torch.rand(shape) < 0.6, (3, 2), 4, 6)
    judge_heads(1, 2, 2)
    judge_heads(2, 3, 4)
    judge_heads(3, 2, 3, 4, 6)
    judge_heads(2, 3, 4, dtype=torch.float16)
