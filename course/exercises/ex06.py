"""Exercise 6: let a model write.

    generate(model, prompt, n, length, temperature, top_p, rng) -> list of n new tokens

A token is a whole number from 0 to V - 1; a byte, for example. model(tokens) takes a list of 1 to
`length` tokens and gives an array (T, V) of float64: row t has the scores of the token after the
first t + 1 of them. Predict, draw, append, n times. The model sees the newest `length` tokens, the
prompt included, and is called exactly once for each new token. The prompt has at least one token,
and is not changed.

1. The probabilities are softmax of scores / temperature. Temperature 0 means: the likeliest token
   has probability 1 (of several, the smallest number).
2. Then the tail is cut. Sort by probability, the likeliest first (of equal ones, the smaller number
   first). A token is kept if the sum of those before it is below top_p, so the likeliest always
   stays. The others get 0, and what is left is divided by its sum. top_p is above 0 and at most 1;
   with 1 nothing is cut.
3. To draw: u = rng.random(), once for each new token, whatever the temperature. The new token is
   the smallest number b for which the sum of the probabilities of 0 to b is above u. (rng is a
   random.Random: 0 <= u < 1. If rounding leaves the whole sum at or below u, take the last token
   whose probability is not 0.)

A score may be -inf (this token never comes), and others so large that e to their power is infinite
for the computer. Scores [0, log 3, 0] have the probabilities .2, .6, .2 at temperature 1, so u =
0.75 gives token 1, and u = 0.85 token 2. With top_p = 0.7 they are .25, .75, 0, and u = 0.85 gives
token 1.
"""

import random
from collections.abc import Callable

import numpy as np


def generate(
    model: Callable,
    prompt: list[int],
    n: int,
    length: int,
    temperature: float,
    top_p: float,
    rng: random.Random,
) -> list[int]:
    raise NotImplementedError("write generate, then: python course/check.py 6")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math
    from itertools import accumulate

    def by_definition(scores: list[float], temperature: float, top_p: float) -> list[float]:
        order = sorted(range(len(scores)), key=lambda b: (-scores[b], b))
        if temperature == 0:
            return [float(b == order[0]) for b in range(len(scores))]
        power = [math.exp((s - scores[order[0]]) / temperature) for s in scores]
        total = math.fsum(power)
        kept = [0.0] * len(scores)
        before = 0.0
        for b in order:
            if before / total < top_p:
                kept[b] = power[b]
            before += power[b]
        return [one / math.fsum(kept) for one in kept]

    def writes(prompt: list[int], length: int, temperature: float, top_p: float, after, us) -> None:
        """after(tokens): the scores of the next one; us: what rng gives, one for each new token."""
        n = len(us)
        asked = f"generate(model, {prompt}, {n}, {length}, {temperature}, {top_p}, rng)"
        given = prompt.copy()
        shown = []
        drawn = []

        def model(tokens) -> np.ndarray:
            shown.append([int(b) for b in tokens])
            return np.array([after(shown[-1][: t + 1]) for t in range(len(tokens))])

        class Draws(random.Random):
            def random(self) -> float:
                drawn.append(us[len(drawn) % n])
                return drawn[-1]

        got = answer.generate(model, prompt, n, length, temperature, top_p, Draws(n))
        assert prompt == given, f"{asked}: the prompt became {prompt}"
        counts = len(got), len(shown), len(drawn)
        assert counts == (n, n, n), (
            f"{asked}: tokens, calls of the model, of rng.random(): {counts}"
        )
        for token, u, seen in zip(got, us, shown):
            context = given[-length:]
            assert seen == context, f"{asked}: the model saw {seen} in place of {context}"
            p = by_definition(after(context), temperature, top_p)
            above = [b for b, total in enumerate(accumulate(p)) if total > u]
            right = above[0] if above else max(b for b in range(len(p)) if p[b])
            assert token == right, (
                f"{asked}: u = {u:.9f} gives {token}; it should be {right}, as after {context} the "
                f"first probabilities are {np.round(p[:8], 4).tolist()}"
            )
            given.append(right)

    def edges(scores: list[float], temperature: float, top_p: float) -> None:
        """The same scores after any text, and u at both sides of where each token begins."""
        sums = {0.0, *accumulate(by_definition(scores, temperature, top_p))}
        us = [s + d for s in sorted(sums) for d in (-1e-9, 1e-9) if 0 <= s + d < 1]
        writes([0], 2, temperature, top_p, lambda tokens: scores, us)

    rng = random.Random(8)
    for _ in range(20):
        scores = [rng.gauss(0, 2) for _ in range(rng.choice([2, 5, 40]))]
        edges(scores, rng.choice([0, 0.3, 1.0, 3.0]), rng.choice([0.1, 0.5, 0.9, 1.0]))
    edges([1.0, 3.0, 3.0, *[2.0] * 50_000], 0, 1.0)  # as large as a real vocabulary
    edges([0.0, 0.0, 0.0, 0.0], 1.0, 0.5)  # two: the sum before the third is not below 0.5
    edges([5000.0, 5001.0, 4000.0], 1.0, 1.0)
    edges([1.0, -math.inf, 2.0, 1.5], 0.7, 0.8)
    edges([3.0, 3.005], 0.005, 1.0)  # cold is not greedy

    def depends(tokens: list[int]) -> list[float]:
        """On all that the model sees, and where it stands."""
        draw = random.Random(f"{tokens}")
        return [draw.gauss(0, 2) for _ in range(300)]

    us = [rng.random() for _ in range(9)]
    writes([0, 299, 1, 1, 0], 3, 0.8, 0.9, depends, us)
    writes([3], 1, 0, 1.0, depends, us)
    writes([1, 0], 4, 1.0, 1.0, depends, [])
    almost = math.nextafter(1.0, 0.0)
    equal = [-math.inf, 0.0, 0.0, -math.inf]
    writes([0], 4, 1.0, 1.0, lambda tokens: equal, [0.0, 0.25, 0.5, almost])
    tenths = [math.log(0.1)] * 10 + [-math.inf]  # ten times 0.1 is below 1 for the computer
    writes([0], 4, 1.0, 1.0, lambda tokens: tenths, [almost])
