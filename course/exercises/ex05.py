"""Exercise 5: a GPT, and a way to let it write.

    initial(vocabulary, width, blocks, generator) -> dict of float32 tensors, as lesson 5 begins:
        "embed" (vocabulary, width), normal of size 0.8    "head" the same shape, normal of 0.001
        and for each block i, with D = width:
        "i.q" "i.k" "i.v" (D, D), uniform of size D^-0.5   "i.up" (4D, D), uniform of 0.4 D^-0.5
        "i.out" (D, D) and "i.down" (D, 4D), all 0
    A size is the root of the mean square; a uniform number between -b and b has b / sqrt(3). All
    random numbers come from `generator` (torch's `generator=` argument), and from nowhere else.

    block(x, w, heads, attention, turn) -> a tensor like x
        x (B, T, D) is the stream, w the matrices of one block by name, without the number: "q",
        "k", "v", "out", "up", "down". Each is used as x @ matrix.T. First attention, which reads
        the norm of the stream: its q, k and v are cut into `heads` heads, in order. turn(q) and
        turn(k) give them their positions: (B, T, heads, D / heads), and back as large. Then
        attention(q, k, v, mask) -> (B, heads, T, D / heads), each (B, heads, T, D / heads), mask
        (T, T), True where row t may look: at 0 .. t. The heads side by side go through "out", and
        are added to the stream. Then the MLP, which reads the norm of *that* stream: "up", relu,
        square, "down"; added as well. The norm of a vector: divided by the root of (the mean of its
        squares + 1e-6). x itself is not changed.

    gpt(ids, weights, heads, attention, turn) -> (B, T, D), which the head is going to read: ids
        (B, T) are looked up in "embed", then come all blocks of `weights`, 0, 1, ... in order (any
        number of them, also 0), then the norm.

    attention and turn are exercises 4 and 8; here the judge brings its own.

    distribution(scores, temperature, top_p) -> V probabilities, float64

scores: V floats, what a model gives to each byte that may come next. The probabilities are softmax
of scores / temperature: a small temperature sharpens them, a large one makes them equal. Then the
tail is cut ("nucleus sampling"): sort by probability, the likeliest first; keep a byte if the sum
of those before it is below top_p (so the likeliest always stays); set the others to 0, and divide
by the sum of what is left. Of equal probabilities the smaller number comes first. Temperature 0
means: the likeliest byte has probability 1 (of several, the smallest number). A score may be -inf
(this byte never comes), and the others so large that e to their power is infinite for the computer.
top_p is above 0, and at most 1; with top_p 1 nothing is cut.

    generate(model, prompt, n, length, temperature, top_p, rng) -> list of n new bytes

model(bytes_) takes a list of 1 to `length` bytes and gives an array (T, V): row t has the scores of
the byte after the first t + 1 of them. Predict, draw, append, n times; the model sees the newest
`length` bytes, the prompt included, and is called exactly once for each new byte. The prompt has at
least one byte, and is not changed. To draw: u = rng.random(), once for each new byte, whatever the
temperature; the new byte is the smallest number b for which the sum of the probabilities of 0 to b
is above u. (rng is a random.Random: u is in 0 <= u < 1. If rounding leaves the whole sum at or
below u, take the last byte whose probability is not 0.)

    distribution([0.0, math.log(3), 0.0], 1.0, 1.0) -> [0.2, 0.6, 0.2]
    distribution([0.0, math.log(3), 0.0], 1.0, 0.7) -> [0.25, 0.75, 0]
"""

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


def initial(
    vocabulary: int, width: int, blocks: int, generator: torch.Generator
) -> dict[str, Tensor]:
    raise NotImplementedError("write initial, then: python course/check.py 5")


def block(
    x: Tensor, w: dict[str, Tensor], heads: int, attention: Callable, turn: Callable
) -> Tensor:
    raise NotImplementedError("write block too, then: python course/check.py 5")


def gpt(
    ids: Tensor, weights: dict[str, Tensor], heads: int, attention: Callable, turn: Callable
) -> Tensor:
    raise NotImplementedError("write gpt too, then: python course/check.py 5")


def distribution(scores: Sequence[float], temperature: float, top_p: float) -> Sequence[float]:
    raise NotImplementedError("write distribution too, then: python course/check.py 5")


def generate(
    model: Callable[[list[int]], np.ndarray],
    prompt: list[int],
    n: int,
    length: int,
    temperature: float,
    top_p: float,
    rng: random.Random,
) -> list[int]:
    raise NotImplementedError("write generate too, then: python course/check.py 5")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math
    from itertools import accumulate

    torch.set_num_threads(1)

    def close(found: Tensor, right: Tensor, what: str) -> None:
        assert found.shape == right.shape, (
            f"{what} is of {tuple(found.shape)}, not {tuple(right.shape)}"
        )
        off = float((found - right).detach().abs().max())
        assert torch.allclose(found, right, rtol=1e-8, atol=1e-10), f"{what} is off by {off:.3g}"

    # ------------------------------------------------------------------------ initial values
    for V, D, blocks in ((300, 128, 3), (200, 256, 1), (256, 128, 11)):
        case = f"initial({V}, {D}, {blocks}, generator)"
        own = torch.get_rng_state()
        weights, again = (
            answer.initial(V, D, blocks, torch.Generator().manual_seed(blocks)) for _ in range(2)
        )
        assert torch.equal(own, torch.get_rng_state()), f"{case} draws from torch's own generator"
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
        drawn = [w for name, w in weights.items() if right[name][1]]
        firsts = {round(float(w[0, 0] / w.abs().max()), 6) for w in drawn}
        assert len(firsts) == len(drawn), f"{case}: two weights have the same numbers"
        places = {w.data_ptr() for w in weights.values()}
        assert len(places) == len(weights), f"{case}: two weights share their memory"

    # -------------------------------------------------------------------------- block and gpt
    draw = torch.Generator().manual_seed(4)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)

    def some(D: int) -> dict[str, Tensor]:
        """Weights of a block."""
        shapes = dict.fromkeys(("q", "k", "v", "out"), (D, D))
        shapes |= {"up": (4 * D, D), "down": (D, 4 * D)}
        return {name: normal(*shape) * D**-0.5 for name, shape in shapes.items()}

    def normed(x: Tensor) -> Tensor:
        return x / (x.pow(2).sum(-1, keepdim=True) / x.size(-1) + 1e-6).sqrt()

    def turned(x: Tensor) -> Tensor:
        """A stand-in for RoPE: each position and number gets a factor of its own."""
        return x * torch.arange(1.0, x[0].numel() // x.size(2) + 1).view(x.size(1), 1, x.size(3))

    def listed(q, k, v, mask) -> Tensor:
        """A stand-in for attention, which keeps what it was given."""
        told.append([a.detach().clone() for a in (q, k, v, mask)])
        return v + 0.5 * mask.to(v.dtype) @ (q * k)

    for B, T, D, heads in ((1, 1, 4, 1), (2, 5, 8, 2), (3, 4, 12, 4), (1, 3, 6, 6)):
        case = f"block, x {(B, T, D)}, {heads} heads"
        x = 3 * normal(B, T, D)
        w = some(D)
        told = []
        given = x.clone()
        kept = {name: matrix.clone() for name, matrix in w.items()}
        got = answer.block(given, w, heads, listed, turned)
        assert torch.equal(given, x), f"{case}: x was changed"
        assert all(torch.equal(w[n], m) for n, m in kept.items()), f"{case}: a weight was changed"
        assert len(told) == 1, f"{case}: attention was called {len(told)} times"
        q, k, v, mask = told[0]
        may = [[s <= t for s in range(T)] for t in range(T)]
        assert mask.dtype == torch.bool and mask.tolist() == may, f"{case}: the mask is {mask}"
        for name, found in zip("qkv", (q, k, v)):
            right = torch.stack((normed(x) @ w[name].T).tensor_split(heads, -1), 2)
            right = right if name == "v" else turned(right)
            close(found, right.transpose(1, 2), f"{case}: {name}, as attention gets it,")
        after = torch.cat([*listed(q, k, v, mask).unbind(1)], -1)
        middle = x + torch.einsum("btd,ed->bte", after, w["out"])
        bend = torch.einsum("btd,ed->bte", normed(middle), w["up"]).clamp_min(0) ** 2
        right = middle + torch.einsum("bte,de->btd", bend, w["down"])
        close(got, right, f"{case}: attention gets the right q, k and v; the stream that comes out")
    for blocks in (0, 1, 2, 12):
        D = 8
        heads = 2
        case = f"gpt with {blocks} blocks"
        own = [some(D) for _ in range(blocks)]
        weights = {f"{i}.{n}": m for i, w in enumerate(own) for n, m in w.items()}
        weights |= {"embed": normal(20, D), "head": normal(20, D)}
        names = sorted(weights, reverse=True)  # the order in the dict means nothing
        weights = {n: weights[n].requires_grad_() for n in names}
        ids = torch.randint(20, (2, 6), generator=draw)
        told = []
        got = answer.gpt(ids, weights, heads, listed, turned)
        right = torch.stack([weights["embed"][i] for i in ids.flatten().tolist()]).view(2, 6, D)
        for w in own:
            right = answer.block(right, w, heads, listed, turned)
        close(got, normed(right), f"{case}: what the head would read")
        assert got.requires_grad, f"{case}: no gradient reaches any weight"
        got.square().mul(torch.arange(1.0, D + 1)).sum().backward()
        for name, m in weights.items():
            assert name == "head" or m.grad is not None and m.grad.any(), (
                f"{case}: no gradient reaches {name}"
            )

    # ------------------------------------------------------------------------------- writing
    def by_definition(scores: list[float], temperature: float, top_p: float) -> list[float]:
        order = sorted(range(len(scores)), key=lambda b: (-scores[b], b))
        if temperature == 0:
            return [float(b == order[0]) for b in range(len(scores))]
        top = scores[order[0]]
        power = [math.exp((s - top) / temperature) for s in scores]
        total = math.fsum(power)
        before = 0.0
        kept = {}
        for b in order:
            if before / total < top_p or top_p == 1:
                kept[b] = power[b]
            before += power[b]
        whole = math.fsum(kept.values())
        return [kept.get(b, 0.0) / whole for b in range(len(scores))]

    rng = random.Random(8)
    inf = math.inf
    cases = [  # scores, temperature, top_p
        ([0.0, math.log(3), 0.0], 1.0, 1.0),
        ([0.0, math.log(3), 0.0], 1.0, 0.7),
        ([1.0, 2.0, 3.0], 2.0, 0.6),
        ([1.0, 3.0, 3.0, 2.0], 0.0, 1.0),
        ([0.0, 0.0, 0.0, 0.0], 1.0, 1e-9),
        ([5000.0, 5001.0, 4000.0], 1.0, 1.0),
        ([1.0, -inf, 2.0, 1.5], 0.7, 0.8),
        ([0.0, 0.0, 0.0, 0.0], 1.0, 0.5),  # two: the sum before the third is not below 0.5
        ([0.0, -40.0, -41.0], 1.0, 1.0),  # unlikely, but nothing is cut
        ([3.0, 3.005], 0.005, 1.0),  # cold is not greedy
        ([0.0, 0.0, -4.0, -6.5], 1.0, 0.999),  # the last has a thousandth
    ]
    for _ in range(30):
        scores = [rng.gauss(0, 2) for _ in range(rng.choice([2, 5, 256]))]
        cases.append((scores, rng.choice([0, 0.3, 1.0, 3.0]), rng.choice([0.1, 0.5, 0.9, 1.0])))
    for scores, temperature, top_p in cases:
        asked = f"distribution({[round(s, 3) for s in scores[:8]]}{'...' * (len(scores) > 8)}, "
        asked += f"{temperature}, {top_p})"
        for given in (list(scores), np.array(scores), np.array(scores, np.float32)):
            kept = given.copy()
            got = answer.distribution(given, temperature, top_p)
            assert list(given) == list(kept), f"{asked}: the scores were changed"
            assert len(got) == len(scores), f"{asked} has {len(got)} probabilities"
            found = getattr(got, "dtype", np.float64)
            assert found == np.float64, f"{asked}: of {found}, not float64"
            expected = by_definition([float(s) for s in given], temperature, top_p)
            for b, (p, right) in enumerate(zip(got, expected)):
                assert math.isclose(p, right, rel_tol=1e-9, abs_tol=1e-30), (
                    f"{asked}: number {b} has {float(p):.6g}, by the definition {right:.6g}"
                )

    def writes(prompt, n, length, scores, temperature, top_p, first) -> None:
        """scores: of the next byte, or how many random ones; first: what rng gives first."""
        asked = f"generate(model, {prompt}, n={n}, length={length}, {temperature}, {top_p}, rng)"
        kept = list(prompt)
        shown = []
        drawn = []

        def after(seen: list[int]) -> list[float]:
            """Random scores depend on all bytes that the model sees, and on where they stand."""
            draw = random.Random(f"{seen}")
            return [draw.gauss(0, 2) for _ in range(scores)] if type(scores) is int else scores

        def model(bytes_) -> np.ndarray:
            shown.append([int(b) for b in bytes_])
            return np.array([after(shown[-1][: t + 1]) for t in range(len(shown[-1]))])

        class Draws(random.Random):
            def random(self) -> float:
                drawn.append(first[len(drawn)] if len(drawn) < len(first) else super().random())
                return drawn[-1]

        got = answer.generate(model, prompt, n, length, temperature, top_p, Draws(n))
        assert prompt == kept, f"{asked}: the prompt became {prompt}"
        assert len(got) == n, f"{asked} gave {len(got)} bytes"
        assert len(shown) == n, f"{asked}: the model was called {len(shown)} times for {n} bytes"
        assert len(drawn) == n, f"{asked}: rng.random() was called {len(drawn)} times"
        whole = list(prompt)
        for byte, u, seen in zip(got, drawn, shown):
            context = whole[-length:]
            assert seen == context, f"{asked}: the model saw {seen} in place of {context}"
            p = by_definition(after(context), temperature, top_p)
            above = [b for b, total in enumerate(accumulate(p)) if total > u]
            right = above[0] if above else max(b for b in range(len(p)) if p[b])
            assert byte == right, (
                f"{asked}: after {context}, u = {u:.6f} gives {byte}; it should be {right}"
            )
            whole.append(right)

    almost = math.nextafter(1.0, 0.0)
    writes([1], 5, 8, 3, 1.0, 1.0, [])
    writes([0, 2, 1, 1, 0], 6, 3, 3, 1.0, 1.0, [])
    writes([3], 6, 1, 5, 0.5, 1.0, [])
    writes([2, 2], 5, 6, 4, 0, 1.0, [])
    writes([1, 0], 0, 4, 3, 1.0, 1.0, [])
    writes([1, 0], 4, 9, 3, 1.0, 1.0, [0.0, almost, 0.0, almost])
    writes([1, 3], 4, 9, 6, 1.0, 0.5, [0.0, almost, almost, 0.0])
    writes([7, 200, 9], 12, 5, 256, 1.0, 0.9, [])
    writes([0], 4, 4, [-inf, 0.0, 0.0, -inf], 1.0, 1.0, [0.0, 0.25, 0.5, almost])
    tenths = [math.log(0.1)] * 10 + [-inf]  # ten times 0.1 is below 1 for the computer
    writes([0], 1, 4, tenths, 1.0, 1.0, [almost])
