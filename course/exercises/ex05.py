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
    import torch
    from subject import same

    def parts(V, D, blocks):
        """Names -> shape, size; their order means nothing."""
        found = {"head": ((V, D), 0.001), "embed": ((V, D), 0.8)}
        for i in reversed(range(blocks)):
            found |= {f"{i}.{name}": ((D, D), D**-0.5) for name in "vkq"}
            found |= {f"{i}.up": ((4 * D, D), 0.4 * D**-0.5), f"{i}.out": ((D, D), 0)}
            found |= {f"{i}.down": ((D, 4 * D), 0)}
        return found

    for V, D, blocks in ((300, 128, 2), (200, 32, 30)):
        weights, *others = (
            answer.initial(V, D, blocks, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
        )
        right = parts(V, D, blocks)
        assert weights.keys() == right.keys(), f"other names: {sorted({*weights} ^ {*right})}"
        for name, (shape, size) in right.items():
            w = weights[name]
            same(w, torch.zeros(shape), name, 0, 9 * size)
            assert [torch.equal(w, other[name]) for other in others] == [True, size == 0], (
                f"{name} does not come from the generator, or not alone"
            )
            if size:
                z = w.double().flatten().sort().values / size
                share = torch.erf(z / 2**0.5) if name in ("embed", "head") else z / 3**0.5
                far = (share - torch.linspace(-1, 1, len(z))).abs().max()
                assert max(far, abs(z.std() - 1)) < 6 * len(z) ** -0.5, (
                    f"{name} is not of size {size:.4g}, or uniform for normal, or the reverse"
                )
        places = {w.data_ptr() for w in weights.values()}
        assert len(places) == len(right), "two weights are one: both change together"

    draw = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def normed(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def turned(x):
        """A stand-in for RoPE: what it does depends on the position, and on the number's place."""
        return x.cumsum(1).cumsum(-1)

    def listed(q, k, v, mask):
        """A stand-in for attention, which keeps what it was given."""
        told.append((q, k, v, mask))
        return v + mask.to(v.dtype) @ (q * k)

    for B, T, D, heads, blocks in (
        (3, 4, 12, 4, 12),
        (1, 1, 4, 1, 0),
        (1, 300, 4, 2, 1),
        (2, 2, 4, 1, 257),
    ):
        w = {
            name: (normal(*shape) / D).requires_grad_()
            for name, (shape, _) in parts(250 * T, D, blocks).items()
        }
        ids = torch.randint(250 * T, (B, T), generator=draw)
        for _ in range(2):  # the second time with other weights, in the same place
            told = []
            found = answer.gpt(ids, w, heads, listed, turned)
            assert len(told) == blocks, f"attention was called {len(told)} times"
            x = w["embed"][ids]
            for i, (*given, mask) in enumerate(told[:]):
                same(mask, torch.tensor([[s <= t for s in range(T)] for t in range(T)]), "the mask")
                qkv = []
                for name, y in zip("qkv", given):
                    right = (normed(x) @ w[f"{i}.{name}"].T).view(B, T, heads, -1)
                    if name != "v":
                        right = turned(right)
                    qkv.append(right.transpose(1, 2))
                    same(y, qkv[-1], f"in block {i}, {name} as attention gets it", 1e-8, 1e-9)
                x = x + listed(*qkv, mask).transpose(1, 2).flatten(2) @ w[f"{i}.out"].T
                x = x + (normed(x) @ w[f"{i}.up"].T).clamp_min(0) ** 2 @ w[f"{i}.down"].T
            same(found, normed(x), "what the head would read", 1e-8, 1e-9)
            ((found - normed(x)) * normal(D)).sum().backward()
            for name in {*w} - {"head"}:
                slope = w[name].grad
                same(slope, 0 * slope, f"the error of the gradient of {name}", 0, 1e-7)
                w[name].detach().mul_(0.5)
    weights = answer.initial(500, 4, 1000, draw)  # float32; blocks that add 0
    found = answer.gpt(ids, weights, 4, listed, turned)
    same(found, normed(weights["embed"][ids]), "what the head would read", 1e-4, 1e-5)
