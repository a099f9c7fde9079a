"""Exercise 5: a GPT for your own trainer.

The lesson's model in another form. It is not a `nn.Module` but a function of its weights, and they
are in a dict: so the trainer that calls it (`yours.py`) can hand any of its parts to you or to the
reference, and an optimizer of your own (exercise 12) can go through the weights one by one. What is
computed is the same, with three differences: attention and positions are handed in, as they are
exercises 4 and 8; the vocabulary may be larger than 256; the head's matrix is not applied. Close
the lesson, and write it from what you know of the parts. The judge looks into every block, and says
which number first differs from what it should be.

    initial(vocabulary, width, blocks, generator) -> dict of float32 tensors, as lesson 5 begins:
        "embed" (vocabulary, width), normal of size 0.8    "head" the same shape, normal of 0.001
        and for each block i, with D = width:
        "i.q" "i.k" "i.v" (D, D), uniform of size D^-0.5   "i.up" (4D, D), uniform of 0.4 D^-0.5
        "i.out" (D, D) and "i.down" (D, 4D), all 0
    A size is the root of the mean square; a uniform number between -b and b has b / sqrt(3). All
    random numbers come from `generator` (torch's `generator=` argument), and from nowhere else.

    gpt(ids, weights, heads, attention, turn) -> (B, T, D), which the head is going to read
        ids (B, T) are rows of "embed". Then come all blocks of `weights`, 0, 1, ... in order: any
        number of them, also 0. A matrix is used as x @ matrix.T, with no bias. Queries, keys and
        values are cut into `heads` heads: the first has the first D / heads numbers, and so on.
        turn(q) and turn(k) give them their positions: (B, T, heads, D / heads), and back as large.
        attention(q, k, v, mask) -> (B, heads, T, D / heads), of three as large as that; mask
        (T, T) is True where row t may look: at 0 .. t. The norms have 1e-6 as in the lesson.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def initial(
    vocabulary: int, width: int, blocks: int, generator: torch.Generator
) -> dict[str, Tensor]:
    raise NotImplementedError("write initial, then: python course/check.py 5")


def gpt(
    ids: Tensor, weights: dict[str, Tensor], heads: int, attention: Callable, turn: Callable
) -> Tensor:
    raise NotImplementedError("write gpt too, then: python course/check.py 5")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    torch.set_num_threads(1)

    def close(found: Tensor, right: Tensor, what: str) -> None:
        assert found.shape == right.shape, (
            f"{what} is of {tuple(found.shape)}, not {tuple(right.shape)}"
        )
        off = float((found - right).detach().abs().max())
        assert torch.allclose(found, right, rtol=1e-8, atol=1e-10), f"{what} is off by {off:.3g}"

    for V, D, blocks in ((300, 128, 11), (200, 256, 1)):
        case = f"initial({V}, {D}, {blocks}, generator)"
        weights, again = (
            answer.initial(V, D, blocks, torch.Generator().manual_seed(blocks)) for _ in range(2)
        )
        right = {"embed": ((V, D), 0.8), "head": ((V, D), 0.001)}
        for i in range(blocks):
            right |= {f"{i}.{name}": ((D, D), D**-0.5) for name in "qkv"}
            right |= {f"{i}.up": ((4 * D, D), 0.4 * D**-0.5), f"{i}.out": ((D, D), 0)}
            right |= {f"{i}.down": ((D, 4 * D), 0)}
        assert {*weights} == {*right}, f"{case} has other names: {sorted({*weights} ^ {*right})}"
        for name, (form, size) in right.items():
            w = weights[name]
            kind = "normal" if name in ("embed", "head") else "uniform"
            assert w.shape == form and w.dtype == torch.float32, (
                f"{case}: {name} is {w.dtype} of {tuple(w.shape)}, not float32 of {form}"
            )
            far = 2.241 if kind == "normal" else 1.689  # from 0, in sizes: 97.5% are nearer
            edge = w.abs().flatten().kthvalue(int(0.975 * w.numel())).values
            for what, found, expected in (
                ("mean", w.mean(), 0.0),
                ("size (root of the mean square)", w.square().mean().sqrt(), size),
                (f"97.5% quantile, signs aside (is it {kind}?)", edge, far * size),
            ):
                assert abs(found - expected) <= 0.05 * size, (
                    f"{case}: the {what} of {name} is {found:.4g}, not {expected:.4g}"
                )
            assert torch.equal(w, again[name]), f"{case}: the same generator, another {name}"
        places = {w.data_ptr() for w in weights.values()}
        assert len(places) == len(weights), (
            f"{case}: two weights are one: an update of one changes the other"
        )

    draw = torch.Generator().manual_seed(4)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)

    def normed(x: Tensor) -> Tensor:
        return x / (x.pow(2).sum(-1, keepdim=True) / x.size(-1) + 1e-6).sqrt()

    def turned(x: Tensor) -> Tensor:
        """A stand-in for RoPE: what it does depends on the position, and on the number's place."""
        return x.cumsum(1).cumsum(-1)

    def listed(q, k, v, mask) -> Tensor:
        """A stand-in for attention, which keeps what it was given, and what it returns."""
        told.append([a.detach().clone() for a in (q, k, v, mask)])
        return v + 0.5 * mask.to(v.dtype) @ (q * k)

    for B, T, D, heads, blocks in ((2, 5, 8, 2, 1), (1, 1, 4, 1, 0), (3, 4, 12, 4, 12)):
        case = f"gpt, {B} texts of {T}, width {D}, {heads} heads, {blocks} blocks"
        shapes = {"embed": (20, D), "head": (20, D)}
        for i in range(blocks):
            shapes |= {f"{i}.{name}": (D, D) for name in ("q", "k", "v", "out")}
            shapes |= {f"{i}.up": (4 * D, D), f"{i}.down": (D, 4 * D)}
        names = sorted(shapes, reverse=True)  # the order in the dict means nothing
        w = {name: (normal(*shapes[name]) * D**-0.5).requires_grad_() for name in names}
        ids = torch.randint(20, (B, T), generator=draw)
        told = []
        got = answer.gpt(ids, w, heads, listed, turned)
        calls = told.copy()
        assert len(calls) == blocks, f"{case}: attention was called {len(calls)} times"
        x = w["embed"][ids]
        for i, (q, k, v, mask) in enumerate(calls):
            may = [[s <= t for s in range(T)] for t in range(T)]
            assert mask.dtype == torch.bool and mask.tolist() == may, f"{case}: the mask is {mask}"
            for name, found in zip("qkv", (q, k, v)):
                right = (normed(x) @ w[f"{i}.{name}"].T).view(B, T, heads, -1)
                right = right if name == "v" else turned(right)
                what = f"{case}: in block {i}, {name} as attention gets it"
                close(found, right.transpose(1, 2), what)
            x = x + listed(q, k, v, mask).transpose(1, 2).flatten(2) @ w[f"{i}.out"].T
            x = x + (normed(x) @ w[f"{i}.up"].T).clamp_min(0) ** 2 @ w[f"{i}.down"].T
        close(got, normed(x), f"{case}: what the head would read")
        got.square().mul(torch.arange(1.0, D + 1)).sum().backward()
        lost = [n for n in names if n != "head" and (w[n].grad is None or not w[n].grad.any())]
        assert not lost, f"{case}: no gradient reaches {lost}"
