"""Exercise 6: let a model write.

    generate(model, prompt, n, length, temperature, top_p, rng) -> list of n new tokens

A token is a whole number from 0 to V - 1: a byte, for example. model(tokens) takes a list of 1 to
`length` tokens and returns an array (T, V) of float64: row t has the scores of the token after the
first t + 1 of them. Predict, draw, append, n times. The model sees the newest `length` tokens, the
prompt included, and you call it exactly once for each new token. The prompt has at least one token.
Change neither it nor the array: the model may hand you a table of its own.

1. The probabilities are softmax of scores / temperature. Temperature 0 means that the likeliest
   token (of several, the smallest number) has probability 1.
2. Then cut off the tail. Sort by probability, the likeliest first (of equal ones, the smaller
   number first). A token is kept if the sum of those before it is below top_p, so the likeliest
   always stays. The others get 0, and what is left is divided by its sum. top_p is above 0 and at
   most 1; with 1 nothing is cut.
3. To draw: u = rng.random(), once for each new token, whatever the temperature. The new token is
   the smallest number b for which the sum of the probabilities of 0 to b is above u. (rng is a
   random.Random: 0 <= u < 1. If rounding leaves the whole sum at or below u, take the last token
   whose probability is not 0.)

A score may be -inf (that token never comes), and others so large that e to their power is infinite
for the computer. Scores [0, log 3, 0] have the probabilities .2, .6, .2 at temperature 1, so u =
0.75 gives token 1, and u = 0.85 gives token 2. With top_p = 0.7 the probabilities are .25, .75, 0,
and u = 0.85 gives token 1.
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
    from unittest.mock import Mock

    import numpy as np
    from subject import SHORT, equal

    hundred = [i / 100 for i in range(100)]

    def probabilities(scores, temperature, top_p):
        """Rules 1 and 2, one token at a time. Temperature 0 is a very small top_p."""
        powers = np.exp((scores - max(scores)) / (temperature or 1))
        p = powers / powers.sum()
        top_p = top_p if temperature else 1e-9
        before = 0.0
        for b in sorted(range(len(p)), key=lambda b: -scores[b]):
            share = p[b]
            p[b] *= before < top_p or top_p == 1
            before += share
        return p / p.sum()

    def writes(rule, scores, temperature=1.0, top_p=1.0, us=hundred, prompt=(0,), length=2):
        """scores: those after each token, or the same after all; us: what rng gives."""
        V = np.shape(scores)[-1]
        table = np.broadcast_to(scores, (V, V))
        shown = []

        def model(tokens):
            shown.append([*tokens])
            return table[tokens]

        rng = random.Random()
        rng.random = Mock(side_effect=2 * us)  # more than are needed: they are counted
        n = len(us)
        found = answer.generate(answer.lent(model), [*prompt], n, length, temperature, top_p, rng)
        equal(len(found), n, "the number of new tokens")
        equal(len(shown), n, "the number of calls of model")
        equal(rng.random.call_count, n, "rule 3: the number of calls of rng.random()")
        text = [*prompt]
        for token, u, seen in zip(found, us, shown):
            equal(seen, text[-length:], f"after {text}, with length {length}, what the model sees")
            p = probabilities(table[text[-1]], temperature, top_p)
            sums = [0.0, *np.cumsum(p).tolist()]
            above = (b for b in range(V) if sums[b + 1] > u)
            right = next(above, int(max(p.nonzero()[0])))
            said = f"{rule}: u = {u}, scores {SHORT(table[text[-1]])}, whose probabilities sum to "
            said += (
                f"{sums[right]} before token {right} and to {sums[right + 1]} with it: the token"
            )
            equal(token, right, said)
            text.append(token)

    example = [0.0, math.log(3), 0.0]
    writes("the text's example", example, us=[0.75, 0.85])
    writes("the text's example with top_p = 0.7", example, top_p=0.7, us=[0.85])
    writes("rule 3, u where a token begins", np.zeros(4), us=[0.0, 0.25, 0.5, 0.75])

    seven = [1.0, 3.0, 0.5, 3.0, 2.0, 1.0, -1.0]
    for temperature in (0, 3.0):
        writes(f"rule 1, temperature {temperature}", seven, temperature)
        writes(f"rule 2, temperature {temperature}, top_p 0.8", seven, temperature, 0.8)
    writes("rule 1, large scores", [5000.0, 5001.0, 4000.0])
    writes("rule 2, a sum that is exactly top_p = 0.5", np.ones(4), top_p=0.5)
    writes("rule 2, 40 scores 0, 1, 2, 0, 1, 2 ..., top_p 0.8", np.arange(40) % 3.0, top_p=0.8)
    writes("rule 2, with top_p = 1 nothing is cut", [-50.0, 0.0])
    almost = [math.nextafter(1.0, 0.0)]  # the computer's sum of ten times 0.1
    writes("rule 3, the whole sum is not above u", [0.0] * 10 + [-np.inf], us=almost)

    table = np.cos(np.arange(81)).reshape(9, 9)
    writes("a longer text", table, 0.8, 0.9, hundred, [0, 8, 1, 1, 0], 3)
    writes("no tokens", seven, us=[])
