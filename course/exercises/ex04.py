"""Exercise 4: let a model write.

    distribution(scores, temperature, top_p) -> a list or array of V probabilities, float64

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


def distribution(scores: Sequence[float], temperature: float, top_p: float) -> Sequence[float]:
    raise NotImplementedError("write distribution, then: python course/check.py 4")


def generate(
    model: Callable[[list[int]], np.ndarray],
    prompt: list[int],
    n: int,
    length: int,
    temperature: float,
    top_p: float,
    rng: random.Random,
) -> list[int]:
    raise NotImplementedError("write generate, then: python course/check.py 4")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import math

    def by_definition(scores: list[float], temperature: float, top_p: float) -> list[float]:
        order = sorted(range(len(scores)), key=lambda b: (-scores[b], b))
        if temperature == 0:
            return [float(b == order[0]) for b in range(len(scores))]
        top = scores[order[0]]
        power = [math.exp((s - top) / temperature) for s in scores]
        total, before, kept = math.fsum(power), 0.0, {}
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
        ([1.0, 2.0, 3.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], 2.0, 0.6),
        ([1.0, 3.0, 3.0, 2.0], 0.0, 1.0),
        ([-5.0, -1.0, -3.0], 0, 0.4),
        ([2.0, 2.0, 2.0, 2.0], 1.0, 0.6),
        ([0.0, 0.0, 0.0, 0.0], 1.0, 1e-9),
        ([5.0, 9.0, 1.0], 1.0, 1e-6),
        ([5000.0, 5001.0, 4000.0], 1.0, 1.0),
        ([-5000.0, -5001.0, -9000.0], 1.0, 0.9),
        ([3.0, 4.0, 0.0], 0.001, 1.0),
        ([1.0, -inf, 2.0, -inf], 1.0, 1.0),
        ([1.0, -inf, 2.0, 1.5], 0.7, 0.8),
        ([-inf, -inf, 0.0], 1.0, 0.5),
        ([0.25], 1.0, 0.5),
        ([0.0, 0.0, 0.0, 0.0], 1.0, 0.5),  # two: the sum before the third is not below 0.5
        ([0.0, -40.0, -41.0], 1.0, 1.0),  # unlikely, but nothing is cut
        ([0.0, 30.0, 5.0], 1000.0, 0.99),
    ]
    for _ in range(30):
        scores = [rng.gauss(0, 2) for _ in range(rng.choice([2, 5, 256]))]
        cases.append((scores, rng.choice([0, 0.3, 1.0, 3.0]), rng.choice([0.1, 0.5, 0.9, 1.0])))
    for scores, temperature, top_p in cases:
        asked = f"distribution({[round(s, 3) for s in scores[:8]]}{'...' * (len(scores) > 8)}, "
        asked += f"{temperature}, {top_p})"
        for given in (list(scores), np.array(scores)):
            kept = given.copy()
            got = answer.distribution(given, temperature, top_p)
            assert list(given) == list(kept), f"{asked}: the scores were changed"
            assert len(got) == len(scores), f"{asked} has {len(got)} probabilities"
            for b, (p, right) in enumerate(zip(got, by_definition(scores, temperature, top_p))):
                assert math.isclose(p, right, rel_tol=1e-9, abs_tol=1e-30), (
                    f"{asked}: number {b} has {float(p):.6g}, by the definition {right:.6g}"
                )

    class Model:
        """Its scores depend on all bytes that it sees, and on where they stand."""

        def __init__(self, length: int, V: int, spread: float):
            self.length, self.V, self.spread, self.seen = length, V, spread, []

        def __call__(self, bytes_) -> np.ndarray:
            seen = [int(b) for b in bytes_]
            assert 1 <= len(seen) <= self.length, (
                f"the model was shown {len(seen)} bytes; length is {self.length}"
            )
            self.seen.append(seen)
            return np.array([self.after(seen[: t + 1]) for t in range(len(seen))])

        def after(self, seen: list[int]) -> list[float]:
            draw = random.Random(f"{seen}")
            return [draw.gauss(0, self.spread) for _ in range(self.V)]

    class Draws(random.Random):
        """Counts its numbers; `given` ones first."""

        def __init__(self, seed: int, given=()):
            super().__init__(seed)
            self.drawn, self.given = [], list(given)

        def random(self) -> float:
            self.drawn.append(self.given.pop(0) if self.given else super().random())
            return self.drawn[-1]

    almost = math.nextafter(1.0, 0.0)
    cases = [  # prompt, n, length, V, temperature, top_p, given draws
        ([1], 5, 8, 3, 1.0, 1.0, ()),
        ([0, 2, 1, 1, 0], 6, 3, 3, 1.0, 1.0, ()),
        ([0, 1], 7, 2, 4, 1.0, 0.8, ()),
        ([3], 6, 1, 5, 0.5, 1.0, ()),
        ([2, 2], 5, 6, 4, 0, 1.0, ()),
        ([1, 0], 0, 4, 3, 1.0, 1.0, ()),
        ([1, 0], 4, 9, 3, 1.0, 1.0, (0.0, almost, 0.0, almost)),
        ([1, 3], 4, 9, 6, 1.0, 0.5, (0.0, almost, almost, 0.0)),
        ([7, 200, 9], 12, 5, 256, 1.0, 0.9, ()),
        ([4, 4], 8, 4, 6, 0.0, 0.2, ()),
    ]
    for i, (prompt, n, length, V, temperature, top_p, given) in enumerate(cases):
        asked = f"generate(model, {prompt}, n={n}, length={length}, {temperature}, {top_p}, rng)"
        model, draws, kept = Model(length, V, 2.0), Draws(i, given), list(prompt)
        got = answer.generate(model, prompt, n, length, temperature, top_p, draws)
        assert prompt == kept, f"{asked}: the prompt became {prompt}"
        assert len(got) == n, f"{asked} gave {len(got)} bytes"
        calls = f"{asked}: the model was called {len(model.seen)} times for {n} bytes"
        assert len(model.seen) == n, calls
        assert len(draws.drawn) == n, f"{asked}: rng.random() was called {len(draws.drawn)} times"
        whole = list(prompt)
        for t, (byte, u) in enumerate(zip(got, draws.drawn)):
            context = whole[-length:]
            assert model.seen[t] == context, (
                f"{asked}: for new byte {t} the model saw {model.seen[t]}, not {context}"
            )
            p, total, right = by_definition(model.after(context), temperature, top_p), 0.0, None
            for b in range(V):
                total += p[b]
                if right is None and total > u:
                    right = b
            if right is None:
                right = max(b for b in range(V) if p[b])
            assert byte == right, (
                f"{asked}: new byte {t}, drawn with u = {u:.6f}, is {byte}; it should be {right}"
            )
            whole.append(right)

    class Half:
        """A stand-in whose sums are exact: bytes 1 and 2 with probability 1/2 each."""

        def __call__(self, bytes_) -> np.ndarray:
            return np.tile([-inf, 0.0, 0.0, -inf], (len(bytes_), 1))

    for u, right in ((0.0, 1), (0.25, 1), (0.5, 2), (almost, 2)):
        got = list(answer.generate(Half(), [0], 1, 4, 1.0, 1.0, Draws(0, [u])))
        assert got == [right], (
            f"bytes 1 and 2 have probability 1/2 each, u = {u}: {got} came, not [{right}]"
        )
    tenths = np.log(np.full(10, 0.1))
    flat = lambda bytes_: np.tile([*tenths, -inf], (len(bytes_), 1))
    got = list(answer.generate(flat, [0], 1, 4, 1.0, 1.0, Draws(0, [almost])))
    assert got == [9], f"ten bytes of probability 0.1, an 11th of 0, u just below 1: {got}, not [9]"
