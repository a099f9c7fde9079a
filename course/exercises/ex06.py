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
    model: Callable[[list[int]], np.ndarray],
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
    import random
    from itertools import accumulate, cycle, product
    from operator import index
    from unittest.mock import Mock

    import numpy as np

    def sums_of(scores, temperature, top_p):
        """The sum of the probabilities up to each token; temperature 0 is a very small top_p."""
        top = max(scores)
        power = [math.exp((score - top) / (temperature or 1)) for score in scores]
        whole = temperature and top_p == 1  # nothing is cut
        left = math.inf if whole else (top_p if temperature else 1e-9) * math.fsum(power)
        for b in sorted(range(len(scores)), key=lambda b: (-scores[b], b)):
            power[b] = power[b] * (left > 0)
            left -= power[b]
        total = math.fsum(power)
        return [part / total for part in accumulate(power)]

    def writes(prompt, length, temperature, top_p, after, us):
        """after(tokens): the scores of the next one; us: what rng gives, one for each new token."""
        text = prompt.copy()
        shown = []

        def model(tokens):
            shown.append([*map(index, tokens)])
            return np.array([after(shown[-1][: t + 1]) for t in range(len(tokens))])

        n = len(us)
        rng = random.Random()
        rng.random = Mock(side_effect=cycle(us))
        found = answer.generate(model, prompt, n, length, temperature, top_p, rng)
        counts = [len(found), len(shown), rng.random.call_count]
        assert counts == 3 * [n], f"tokens, calls of the model, of rng.random(): {counts}"
        for token, u, seen in zip(map(index, found), us, shown):
            context = text[-length:]
            assert seen == context, (
                f"the model saw {len(seen)} tokens, at the end {seen[-9:]}, in place of "
                f"{len(context)}, at the end {context[-9:]}"
            )
            sums = sums_of(after(context), temperature, top_p)
            right = next((b for b, total in enumerate(sums) if total > u), sums.index(sums[-1]))
            assert token == right, (
                f"after {context[-9:]} u = {u} gives {token}, not {right}: the sums are "
                f"{np.round(sums[:8], 4).tolist()}"
            )
            text.append(right)

    def edges(scores, temperature, top_p):
        """The same scores after any text, and u at both sides of where each token begins."""
        sums = {*sums_of(scores, temperature, top_p)}
        us = [total + d for total in sums for d in (-1e-9, 1e-9) if 0 <= total + d < 1] + [0.0]
        writes([0], 2, temperature, top_p, lambda tokens: scores, us)

    rng = random.Random(8)
    for size in (5, 5, 40):
        scores = [rng.gauss(0, 2) for _ in range(size)]
        for temperature, top_p in product((0, 0.3, 1.0, 3.0), (0.1, 0.5, 0.9, 1.0)):
            edges(scores, temperature, top_p)
    edges([5000.0, 5001.0, 4000.0], 0.7, 1.0)
    edges([3.0, 3.0 + 2**-30], 2**-30, 1.0)  # cold is not greedy
    edges([1.0] * 300, 1.0, 0.501)
    edges([-50.0, 0.0], 1.0, 1.0)  # the second is 1 to the last digit, but the first is not cut

    def depends(tokens):
        """On where the model stands, and on the token there."""
        return [2 * math.sin(b * len(tokens) + tokens[-1]) for b in range(300)]

    us = [rng.random() for _ in range(1200)]
    writes([0, 299, 1, 1, 0], 3, 0.8, 0.9, depends, us)
    writes([3], 1, 0, 1.0, depends, [])
    writes([3] * 70_000, 300, 1.0, 1.0, depends, us[:2])
    large = [1.0] * 70_000 + [3.0, 3.0]  # as large as a real vocabulary
    for temperature in (0, 1.0):
        writes([0], 4, temperature, 1.0, lambda tokens: large, us[:2])
    edges([-math.inf, 0.0, 0.0, 0.0, 0.0], 1.0, 0.5)  # the sum before the third is not below 0.5
    tenths = [math.log(0.1)] * 10 + [-math.inf]  # ten times 0.1 is below 1 for the computer
    writes([0], 4, 1.0, 1.0, lambda tokens: tenths, [math.nextafter(1.0, 0.0)])
