"""Exercise 4: attention with any mask, and with several heads.

    scaled_dot_product_attention(Q, K, V, mask=None) -> a tensor (..., T, E)

Q is (..., T, D): a query of D numbers for each of T positions. K is (..., S, D) and V (..., S, E):
keys and values of S others; S may differ from T, and E from D. The dots stand for any number of
dimensions, the same for all three; nothing is mixed along them. mask is (T, S) or (..., T, S), True
where a query may look; None: everywhere. A query that may look nowhere gets zeros. All inputs and
the result are floats of one dtype. The scores are divided by the root of D, and may be so large
that e to their power is infinite for the computer.

    multihead_self_attention(d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight,
                             o_proj_weight, in_features) -> a tensor (..., T, d_model)

in_features is (..., T, d_model), each weight (d_model, d_model), to be used as torch.nn.Linear
does, x @ weight.T. Queries, keys and values are cut into num_heads heads: the first has the first
d_model / num_heads numbers, and so on. Position t looks at the positions 0 to t. The heads' answers
are put side by side in the same order, and go through o_proj_weight. No positions are rotated.

Write it with matrix products: no loop over positions or heads, and none of torch's ready-made
attentions. backward must work through it, without NaN. The names and arguments are those of the
first assignment of Stanford's CS336, so its tests run on your answer.
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
    import math
    from itertools import product

    import torch
    from torch.overrides import TorchFunctionMode

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(6)

    def normal(*shape, dtype=torch.float64, size=1.0) -> Tensor:
        return size * torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    def slowly(Q, K, V, mask) -> Tensor:
        """By the definition, query by query."""
        out = torch.zeros(*Q.shape[:-1], V.size(-1), dtype=torch.float64)
        if mask is not None:
            mask = mask.expand(*Q.shape[:-1], K.size(-2))
        for place in product(*(range(n) for n in Q.shape[:-1])):
            keys = K[place[:-1]].tolist()
            values = V[place[:-1]].double()
            looked = [s for s in range(len(keys)) if mask is None or mask[(*place, s)]]
            query = Q[place].tolist()
            scores = [sum(a * b for a, b in zip(query, keys[s])) for s in looked]
            scores = [score / math.sqrt(len(query)) for score in scores]
            powers = [math.exp(score - max(scores)) for score in scores]
            for s, power in zip(looked, powers):  # none: the query may look nowhere
                out[place] += power / sum(powers) * values[s]
        return out

    def close(asked: str, got: Tensor, right: Tensor, dtype) -> None:
        assert isinstance(got, Tensor), f"{asked}: {type(got)}, not a tensor"
        assert got.shape == right.shape and got.dtype == dtype, (
            f"{asked}: {got.dtype} of shape {tuple(got.shape)}, expected {dtype} of "
            f"{tuple(right.shape)}"
        )
        assert not got.isnan().any(), f"{asked}: NaN"
        off = (got.double() - right).abs()
        tolerance = precision[dtype] * (1 + right.abs().max())
        if off.max() > tolerance:
            place = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]
            raise AssertionError(
                f"{asked}: at {place} it is {float(got[tuple(place)]):.6g}, by the definition "
                f"{float(right[tuple(place)]):.6g}"
            )

    class Operations(TorchFunctionMode):
        """Counts them, and sees which they are, however they were imported."""

        count = 0

        def __torch_function__(self, function, types, args=(), options=None):
            name = getattr(function, "__name__", "")
            assert "attention" not in name and "multi_head" not in name, (
                f"a ready-made attention of torch was called, {name}; write it yourself"
            )
            self.count += 1
            return function(*args, **(options or {}))

    f32 = torch.float32
    f64 = torch.float64
    precision = {}
    for kind in (f64, f32, torch.bfloat16, torch.float16):
        precision[kind] = {f64: 1e-9, f32: 1e-5}.get(kind, 2e-2)
    cases = [  # what, shapes of Q, K, V, mask (or a share of True), dtype, size
        ("4 queries, 4 keys", (4, 3), (4, 3), (4, 3), None, f64, 1),
        ("2 queries, 5 keys", (2, 3), (5, 3), (5, 3), None, f64, 1),
        ("values longer than keys", (3, 2), (4, 2), (4, 6), None, f64, 1),
        ("keys of 1 number", (3, 1), (3, 1), (3, 2), None, f64, 2),
        ("three dimensions", (2, 4, 3), (2, 5, 3), (2, 5, 3), "(4, 5)", f64, 2),
        ("four dimensions", (3, 2, 4, 8), (3, 2, 4, 8), (3, 2, 4, 8), "(4, 4)", f64, 2),
        ("a mask for each", (3, 2, 4, 5), (3, 2, 6, 5), (3, 2, 6, 4), "(3, 2, 4, 6)", f64, 2),
        (
            "a mask for each of the first dimension",
            (3, 2, 4, 2),
            (3, 2, 4, 2),
            (3, 2, 4, 2),
            "(3, 1, 4, 4)",
            f64,
            2,
        ),
        ("bfloat16", (2, 4, 16), (2, 4, 16), (2, 4, 16), "(4, 4)", torch.bfloat16, 1),
        ("float16", (2, 4, 16), (2, 4, 16), (2, 4, 16), "(4, 4)", torch.float16, 1),
        ("70 keys", (1, 9, 4), (1, 70, 4), (1, 70, 4), "(9, 70)", f64, 1),
        ("scores beyond 1,000", (4, 4), (6, 4), (6, 4), "(4, 6)", f32, 40),
        ("scores beyond 1,000 in float64", (4, 4), (6, 4), (6, 4), None, f64, 60),
        ("masked scores beyond 10,000", (2, 9, 4), (2, 6, 4), (2, 6, 4), "(2, 9, 6)", f64, 200),
    ]
    with Operations():
        for told, *shapes, masked, dtype, size in cases:
            Q, K = (normal(*shape, dtype=dtype, size=size) for shape in shapes[:2])
            V = normal(*shapes[2], dtype=dtype)
            mask = None
            if masked:
                mask = torch.rand(eval(masked), generator=draw) < 0.6
                mask[..., 0, :] = False  # the first query may look nowhere
                mask[..., 1, :] = False
                mask[..., 1, 0] = True  # the second at one key only
            asked = f"{told}: Q {tuple(Q.shape)}, K {tuple(K.shape)}, V {tuple(V.shape)}"
            asked += f", mask {masked}" * bool(masked)
            given = [x.clone() for x in (Q, K, V)]
            try:
                allowed = None if mask is None else mask.clone()
                got = answer.scaled_dot_product_attention(*given, allowed)
            except NotImplementedError:  # a RuntimeError too
                raise
            except RuntimeError as error:
                raise AssertionError(f"{asked}, {dtype}: {error}") from None
            assert all(map(torch.equal, given, (Q, K, V))), f"{asked}: an input was changed"
            close(asked, got, slowly(Q, K, V, mask), dtype)
            assert got.data_ptr() not in [x.data_ptr() for x in given], f"{asked}: shared memory"

        Q, K, V = (normal(3, 4).requires_grad_() for _ in range(3))
        mask = torch.tensor([[False] * 3, [True, False, False], [True] * 3])
        answer.scaled_dot_product_attention(Q, K, V, mask).square().sum().backward()
        for name, x in (("Q", Q), ("K", K), ("V", V)):
            assert x.grad is not None and x.grad[2].any() and not x.grad.isnan().any(), (
                f"after backward, the gradient of {name} is {x.grad}; the first query may look "
                "nowhere, the last everywhere"
            )

        shapes = [((5, 6), 1), ((5, 6), 2), ((2, 4, 6), 3), ((2, 3, 4, 8), 4), ((1, 4), 4)]
        for shape, heads in shapes:
            width = shape[-1]
            x = normal(*shape)
            weights = [normal(width, width) for _ in range(4)]
            q, k, v = (x @ w.T for w in weights[:3])
            size = width // heads
            T = shape[-2]
            causal = torch.ones(T, T, dtype=torch.bool).tril()
            parts = [slice(h * size, (h + 1) * size) for h in range(heads)]
            y = [slowly(q[..., part], k[..., part], v[..., part], causal) for part in parts]
            right = torch.cat(y, dim=-1) @ weights[3].T
            asked = f"multihead_self_attention: {heads} heads, in_features {shape}"
            given = [w.clone() for w in (*weights, x)]
            got = answer.multihead_self_attention(width, heads, *given)
            assert all(map(torch.equal, given, (*weights, x))), f"{asked}: an input was changed"
            close(asked, got, right, f64)

        counts = {}
        for T, heads in ((3, 2), (30, 2), (30, 8)):
            weights = [normal(16, 16) for _ in range(4)]
            with Operations() as operations:
                answer.multihead_self_attention(16, heads, *weights, normal(2, T, 16))
            counts[f"{T} positions, {heads} heads"] = operations.count
        assert len({*counts.values()}) == 1, (
            f"operations of torch: {counts}; they grow, so there is a loop over positions or heads"
        )
