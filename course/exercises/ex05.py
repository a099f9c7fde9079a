"""Exercise 5: a GPT for your own trainer.

It is the lesson's model in another form: not an `nn.Module` but a function of its weights, which
are in a dict. That way the trainer that calls it (`yours.py`) can hand any of its parts to you or
to the reference, and an optimizer of your own (exercise 12) can go through the weights one by one.
It computes the same, with three differences: attention and positions are handed in, since they are
exercises 4 and 8 (until you have solved 8, the trainer's `turn` changes nothing, and its GPT knows
no positions); the vocabulary may be larger than 256; the head's matrix is not applied. Close
the lesson, and write it from what you know of the parts. The judge looks into every block, and
tells you which number is the first to differ from what it should be.

    initial(vocabulary, width, blocks, generator) -> dict of float32 tensors, as lesson 5 begins:
        "embed" (vocabulary, width), normal of size 0.8    "head" the same shape, normal of 0.001
        and for each block i, with D = width:
        "i.q" "i.k" "i.v" (D, D), uniform of size D^-0.5
        "i.up" (4 * D, D), uniform of size 0.4 * D^-0.5
        "i.out" (D, D) and "i.down" (D, 4 * D), all 0
    A size is the root of the mean square; a uniform number between -b and b has size b / sqrt(3).
    All random numbers come from `generator` (torch's `generator=` argument), and from nowhere else.

    gpt(ids, weights, heads, attention, turn) -> (B, T, D), which the head is going to read
        ids (B, T) are rows of "embed". Then come all the blocks of `weights`, 0, 1, ... in order:
        there may be any number of them, even 0. Use a matrix as x @ matrix.T, with no bias. Cut
        queries, keys and values into `heads` heads: the first has the first D / heads numbers, and
        so on. turn(q) and turn(k) give them their positions: they take (B, T, heads, D / heads) and
        return the same shape.
        attention(q, k, v, mask) takes q, k and v of shape (B, heads, T, D / heads), and returns
        that shape; mask (T, T) is True where row t may look: at 0 .. t. The norms use 1e-6 as in
        the lesson.
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
    from subject import equal, same

    D = 64
    right = {"embed": ((300, D), 0.8), "head": ((300, D), 0.001)}  # name -> shape, size
    for i in range(11):
        right |= {f"{i}.{name}": ((D, D), D**-0.5) for name in "qkv"}
        right |= {f"{i}.up": ((4 * D, D), 0.4 * D**-0.5)}
        right |= {f"{i}.out": ((D, D), 0), f"{i}.down": ((D, 4 * D), 0)}
    drawn = {}  # first number (its address if that is 0) -> name
    weights = answer.initial(300, D, 11, torch.Generator().manual_seed(1))
    equal(sorted(weights), sorted(right), "the list of all names")
    for name, (shape, size) in right.items():
        w = weights[name]
        same(w, torch.zeros(shape), name, atol=1e9)  # the shape, and float32
        same(float(w.square().mean().sqrt()), size, f"{name}: the size", 0.05)
        if size:
            end = -float(w.min()) / size
            low, high = (3, 6) if name in ("embed", "head") else (1.7, 1.74)
            assert low < end < high, (
                f"{name}: the lowest number is -{end:.2f} times its size; of uniform ones, -1.73; "
                "of many normal ones, below -3"
            )
        other = drawn.setdefault(float(w[0, 0]) or w.data_ptr(), name)
        assert other == name, f"{other} and {name} are one tensor, or one draw"

    torch.manual_seed(4)

    def normed(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def turned(x):
        """A stand-in for RoPE: what it does depends on the position, and on the number's place."""
        return x.cumsum(1).cumsum(-1)

    def listed(q, k, v, mask):
        """A stand-in for attention, which keeps what it was given, and returned."""
        y = v + mask.to(v.dtype) @ (q * k)
        told.append(((q, k, v), mask, y))
        return y

    for B, T, D, heads, blocks in ((1, 2, 2, 1, 1), (3, 4, 12, 4, 11)):
        w = answer.initial(5, D, blocks, torch.Generator())
        w = {name: torch.randn(w[name].shape).double() / D for name in reversed(w)}
        for x in w.values():
            x.requires_grad_()
        ids = torch.randint(5, (B, T))
        told = []
        found = answer.gpt(ids, w, heads, listed, turned)
        equal(len(told), blocks, f"of {blocks} blocks, the number of calls of attention")
        x = w["embed"][ids]
        for i, (qkv, mask, y) in enumerate(told):
            where = f"block {i} of {blocks}: attention's"
            same(mask, torch.ones(T, T).tril() > 0, f"{where} mask")
            for name, z in zip("qkv", qkv):
                right = (normed(x) @ w[f"{i}.{name}"].T).view(B, T, heads, -1)
                right = right if name == "v" else turned(right)
                same(z, right.transpose(1, 2), f"{where} {name}", 1e-8, 1e-9)
            x = x + y.transpose(1, 2).flatten(2) @ w[f"{i}.out"].T
            x = x + (normed(x) @ w[f"{i}.up"].T).clamp_min(0) ** 2 @ w[f"{i}.down"].T
        what = f"blocks = {blocks}: attention got the right q, k, v and mask; the result"
        same(found, normed(x), what, 1e-8, 1e-9)
        found.sum().backward()
        for name in {*w} - {"head"}:
            assert w[name].grad is not None, f"after backward on the result {name} has no gradient"
