"""Exercise 4: attention with any mask, and with several heads.

    scaled_dot_product_attention(Q, K, V, mask=None) -> a tensor (..., T, E)

Q is (..., T, D): a query of D numbers for each of T positions. K is (..., S, D) and V (..., S, E):
keys and values of S others; S may differ from T, and be 0, and E may differ from D. The dots stand
for any number of dimensions, the same for all three; nothing is mixed along them. mask is (T, S) or
(..., T, S), where a 1 among the dots stands for any number, and True where a query may look; None:
everywhere. A query that may look nowhere gets zeros. All inputs and the result are floats of one
dtype. The scores are divided by the root of D, and may be so large that e to their power is
infinite for the computer.

    multihead_self_attention(d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight,
                             o_proj_weight, in_features) -> a tensor (..., T, d_model)

in_features is (..., T, d_model), each weight (d_model, d_model), to be used as torch.nn.Linear
does, x @ weight.T. Queries, keys and values are cut into num_heads heads: the first has the first
d_model / num_heads numbers, and so on. Position t looks at the positions 0 to t. The heads' answers
are put side by side in the same order, and go through o_proj_weight. No positions are rotated.

Write it with matrix products: no loop over positions or heads, and none of torch's ready-made
attentions. backward must work through it, to each tensor that is given, without NaN. The names and
arguments are those of the first assignment of Stanford's CS336, so its tests run on your answer.
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
    import numpy as np
    import torch
    from subject import same
    from torch.overrides import TorchFunctionMode

    class Operations(TorchFunctionMode):
        """Counts them, and sees which they are, however they were imported."""

        count = 0

        def __torch_function__(self, function, types, args=(), options=None):
            name = getattr(function, "__name__", "")
            ready = "attention" in name or "multi_head" in name
            assert not ready, f"a ready-made attention of torch was called, {name}"
            self.count += 1
            return function(*args, **(options or {}))

    f16 = torch.float16
    f32 = torch.float32
    f64 = torch.float64
    draw = torch.Generator().manual_seed(6)

    def normal(*shape, dtype=f64, size=1.0):
        numbers = size * torch.randn(shape, generator=draw, dtype=f64)
        return numbers.to(dtype).requires_grad_()

    def slowly(Q, K, V, mask):
        """By the definition, query by query."""
        out = torch.zeros(*Q.shape[:-1], V.size(-1), dtype=f64)
        mask = torch.tensor(True) if mask is None else mask
        mask = mask.expand(*Q.shape[:-1], K.size(-2))
        for place in np.ndindex(*Q.shape[:-1]):
            looked = mask[place]
            scores = K[place[:-1]][looked] @ Q[place] / Q.size(-1) ** 0.5
            out[place] = torch.softmax(scores, 0) @ V[place[:-1]][looked]
        return out

    def heads_slowly(width, heads, q_weight, k_weight, v_weight, o_weight, x):
        causal = torch.ones(x.size(-2), x.size(-2), dtype=torch.bool).tril()
        cut = [(x @ weight.T).chunk(heads, -1) for weight in (q_weight, k_weight, v_weight)]
        return torch.cat([slowly(*QKV, causal) for QKV in zip(*cut)], -1) @ o_weight.T

    def judge(function, slow, first, tensors, *last):
        """The result, and the gradients of the tensors that are given."""
        given = tensors.values()
        twins = [x.detach().double().requires_grad_() for x in given]
        right = slow(*first, *twins, *last)
        slopes = normal(*right.shape)
        (right * slopes).sum().backward()
        with Operations():
            found = function(*first, *given, *last)

        def close(found, right, what):
            near = {f64: 1e-9, f32: 1e-5}.get(dtype, 1e-2)
            same(found, right, what, 0, near * (1 + float(right.norm())), dtype)

        close(found, right.detach(), "the result")
        (found * slopes).sum().backward()
        for (name, x), twin in zip(tensors.items(), twins):
            close(x.grad, twin.grad, f"after backward the gradient of {name}")

    cases = [  # the first dimensions, T, S, D, E, those of the mask, dtype, size
        ((2,), 2, 5, 3, 3, None, f64, 1),
        ((), 3, 4, 2, 6, None, f64, 60),
        ((3, 2), 4, 4, 8, 8, (), f64, 2),
        ((3, 2), 4, 6, 5, 4, (3, 2), f64, 2),
        ((3, 2), 4, 4, 2, 2, (3, 1), f64, 200),
        ((2,), 4, 4, 16, 16, (), torch.bfloat16, 1),
        ((2,), 4, 4, 16, 16, (), f16, 1),
        ((1,), 9, 300, 4, 4, (), f64, 1),
        ((), 3, 0, 2, 4, None, f64, 1),  # no keys
        ((2,), 3, 0, 2, 4, (), f16, 1),
        ((9,), 4, 6, 4, 4, (), f32, 1e5),  # scores below -10^9, too
        ((), 1, 70_000, 1, 1, None, f32, 1),
    ]
    for lead, T, S, D, E, masked, dtype, size in cases[2:6] + cases:
        mask = None
        if masked is not None:
            mask = torch.rand(*masked, T, S, generator=draw) < 0.6
            mask[..., :2, :] = False  # the first query may look nowhere
            mask[..., 1, :1] = True  # the second at one key only
        QKV = {
            "Q": normal(*lead, T, D, dtype=dtype, size=size),
            "K": normal(*lead, S, D, dtype=dtype, size=size),
            "V": normal(*lead, S, E, dtype=dtype),
        }
        judge(answer.scaled_dot_product_attention, slowly, [], QKV, mask)

    cases = [((5, 6), 1, f64), ((5, 6), 2, f64), ((2, 4, 6), 3, f64), ((2, 3, 4, 8), 4, f32)]
    cases += [((1, 4), 4, f64), ((5, 6), 2, f16), ((300, 2), 1, f64)]
    for shape, heads, dtype in cases[:4] + cases:
        width = shape[-1]
        tensors = {f"{x}_proj_weight": normal(width, width, dtype=dtype) for x in "qkvo"}
        tensors["in_features"] = normal(*shape, dtype=dtype)
        judge(answer.multihead_self_attention, heads_slowly, [width, heads], tensors)

    x = torch.eye(258, dtype=torch.bfloat16)[:, -1:]  # all 0, but for the last position
    assert not answer.multihead_self_attention(1, 1, *[x[-1:]] * 4, x)[:-1].any(), (
        "positions look at a later one"
    )

    counts = {}
    for T, heads in ((3, 2), (30, 2), (30, 8)):
        x = normal(heads, T, 16)
        for _ in range(2):  # what is kept from call to call is there the second time
            with Operations() as operations:
                answer.own["scaled_dot_product_attention"](x, x, x)
                answer.own["multihead_self_attention"](16, heads, *[normal(16, 16)] * 4, x)
        counts[f"{T} positions, {heads} heads"] = operations.count
    assert len({*counts.values()}) == 1, (
        f"operations of torch: {counts}; they grow, so there is a loop over positions or heads"
    )
