"""Exercise 43: places in the experts' buffers, and who is dropped.

    route(scores, top, room) -> expert, place, weight: three arrays (tokens, top)
    combine(outputs, expert, place, weight) -> y (tokens, C)

scores (tokens, E) float64 are the router's. Each expert has a buffer of `room` places, and computes
what is in it: outputs (E, room, C).

route:
1. expert[t], int64: the `top` experts with the largest scores for token t, the best first; of equal
   scores the expert with the smaller number first.
2. place[t, i], int64: the copy's place in the buffer of expert[t, i]: 0, 1, 2, ... First choices of
   all tokens come before second choices of any, and so on; among equal choices tokens come in
   order. A copy that finds `room` copies before it is dropped: its place is -1.
3. weight[t, i], float64: a softmax over the token's `top` scores, whatever is dropped (scores of
   1,000 must not overflow); a dropped copy has weight 0, and the others keep theirs.

With scores [[2, 1, 0], [2, 0, 1], [9, 8, 0]], top 2 and room 2: experts [[0, 1], [0, 2], [0, 1]];
the third token finds expert 0 full: places [[0, 0], [1, 0], [-1, 1]]; its weights are [0, 0.2689].

combine: y[t] is the sum of weight x output over the copies that have a place (it must not rely on a
weight of 0 for the others). Places that nobody has may hold anything, NaN too. Arguments are left
as they are.
"""

import numpy as np


def route(scores: np.ndarray, top: int, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    raise NotImplementedError("write route, then: python course/check.py 43")


def combine(
    outputs: np.ndarray, expert: np.ndarray, place: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    raise NotImplementedError("write combine, then: python course/check.py 43")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math

    rng = np.random.default_rng(30)

    def check(name, scores, top, room):
        tokens, E = scores.shape
        given = scores.copy()
        expert, place, weight = answer.route(given, top, room)
        assert np.array_equal(given, scores), f"{name}: scores were changed"
        for label, x, kind in (
            ("expert", expert, "i"),
            ("place", place, "i"),
            ("weight", weight, "f"),
        ):
            found = f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else type(x)
            want = f"{'int64' if kind == 'i' else 'float64'} {(tokens, top)}"
            assert found == want, f"{name}: {label} is {found}, not {want}"
        chosen = [sorted(range(E), key=lambda e: (-scores[t, e], e))[:top] for t in range(tokens)]
        taken = [0] * E
        right = {}
        for i in range(top):
            for t in range(tokens):
                e = chosen[t][i]
                right[t, i] = taken[e] if taken[e] < room else -1
                taken[e] += 1
        for t in range(tokens):
            row = f"{name}: token {t}, scores {scores[t].tolist()}, room {room}: "
            assert expert[t].tolist() == chosen[t], (
                f"{row}experts {expert[t].tolist()}, not {chosen[t]}"
            )
            want = [right[t, i] for i in range(top)]
            assert place[t].tolist() == want, f"{row}places {place[t].tolist()}, not {want}"
            best = scores[t, chosen[t][0]]
            exp = [math.exp(scores[t, e] - best) for e in chosen[t]]
            want = [x / sum(exp) * (right[t, i] >= 0) for i, x in enumerate(exp)]
            assert np.allclose(weight[t], want, 1e-9, 1e-12), (
                f"{row}weights {weight[t].tolist()}, not {want}"
            )
        C = 3
        outputs = np.full((E, room, C), np.nan)
        for t, i in right:
            if right[t, i] >= 0:
                outputs[chosen[t][i], right[t, i]] = rng.normal(size=C)
        weight = weight + 0.5
        args = [outputs, expert, place, weight]
        before = [x.copy() for x in args]
        y = answer.combine(*args)
        for label, x, old in zip(("outputs", "expert", "place", "weight"), args, before):
            assert np.array_equal(x, old, equal_nan=x.dtype.kind == "f"), f"{name}: {label} changed"
        assert np.shape(y) == (tokens, C), f"{name}: combine gives {np.shape(y)}, not {(tokens, C)}"
        for t in range(tokens):
            parts = [i for i in range(top) if right[t, i] >= 0]
            want = sum(
                (weight[t, i] * outputs[chosen[t][i], right[t, i]] for i in parts), np.zeros(C)
            )
            assert np.allclose(y[t], want, 1e-9, 1e-12), (
                f"{name}: combine gives token {t}, places {place[t].tolist()}, {y[t].tolist()}, "
                f"not {want.tolist()}"
            )

    check("the example", np.array([[2.0, 1, 0], [2, 0, 1], [9, 8, 0]]), 2, 2)
    check("one expert", rng.normal(size=(4, 1)), 1, 2)
    check("room for all", rng.normal(size=(9, 4)), 2, 18)
    check("room for one", rng.normal(size=(9, 4)), 2, 1)
    check("no room at all", rng.normal(size=(3, 4)), 2, 0)
    check("all want expert 2", rng.normal(size=(8, 4)) + [0, 0, 9, 0], 2, 3)
    check("all want the same two", np.tile([0.0, 3, 0, 2], (6, 1)), 2, 4)
    check("a second choice meets later first choices", np.array([[2.0, 1], [1, 2], [1, 2]]), 2, 2)
    check("equal scores", np.zeros((5, 4)), 3, 3)
    check("equal scores, some", rng.integers(0, 3, (30, 6)).astype(float), 3, 9)
    close = 1 + 1e-12 * rng.permuted(np.tile(np.arange(6.0), (12, 1)), axis=1)
    check("scores that differ by 1e-12", close, 3, 5)
    check("all experts are chosen", rng.normal(size=(7, 3)), 3, 5)
    check("scores of 1,000", 1000 * rng.normal(size=(10, 5)), 2, 3)
    check("scores near -1,000", -1000 + rng.normal(size=(10, 5)), 2, 3)
    check("no tokens", np.zeros((0, 4)), 2, 3)
    for tokens in (400, 70_000):  # more than a small integer counts
        expert, place, weight = answer.route(np.zeros((tokens, 2)), 2, tokens)
        right = (place == np.arange(tokens)[:, None]).all() and (expert == [0, 1]).all()
        assert right, f"{tokens} tokens of equal scores, room for all: places {place[-3:].tolist()}"
        y = answer.combine(np.ones((2, tokens, 1)), expert, place, weight)
        ones = y.shape == (tokens, 1) and np.allclose(y, 1)
        assert ones, f"{tokens} tokens: combine gives {y[-3:].tolist()}, not 1"
    for i in range(8):
        tokens = int(rng.integers(1, 60))
        E = int(rng.integers(2, 9))
        top = int(rng.integers(1, E + 1))
        room = int(rng.integers(1, 20))
        check(f"random {i}", rng.normal(size=(tokens, E)), top, room)
