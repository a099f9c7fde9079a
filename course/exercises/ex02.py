"""Exercise 2: the gradient by hand, with numpy alone.

`x` and `y` are arrays of N whole numbers (of any type) from 0 to V - 1: in N places of a text, the
byte before and the byte that came. The loss is the mean over the places of -log(p), with the
natural logarithm, where p is the probability that softmax gives to the byte that came.

    table_gradient(W, x, y) -> loss, dW

W (V, V) is the table of lesson 2: row x[i] has the scores for place i. dW, as large as W, is the
slope of the loss for each number of W.

    factored_gradient(E, U, x, y) -> loss, dE, dU

Here the table is the product E @ U of a (V, D) and a (D, V) matrix: row x[i] of E is the vector of
the byte before (lesson 4's embedding), and its product with U is the row of scores for place i.
V can be large, so do not build the whole table (V, V), nor anything else of V x V numbers; there
are few places.

Begin with one place: lesson 2 has its slopes for two letters, and for V bytes they are found in the
same way: -log(p) is log(sum of e^score) minus the score of the byte that came; take its derivative
by score j. Then the two matrices. A nudge of U[d, j] changes the score j of place i by E[x[i], d]
times the nudge; a nudge of E[x[i], d] changes each score j by U[d, j] times it. With two letters
and D = 1: let E[x[0]] be (2) and U be (0.42, 0). The scores are 0.84 and 0, so p is about 0.7 and
0.3, and if the second letter came, their slopes are 0.7 and -0.7. Then dU is (2 * 0.7, 2 * -0.7),
and dE[x[0]] is 0.42 * 0.7 + 0 * -0.7. The loss is a mean over places; a byte that stands in several
of them gets a part of its slope from each.

Scores can be large, 1,000 say, where e^score is infinite for the computer; softmax is the same if
you subtract the largest score of the row from all scores of the row first. Change none of the
arrays that you are given. All floats are float64, and so are your results.
"""

import numpy as np


def table_gradient(W: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    raise NotImplementedError("write table_gradient, then: python course/check.py 2")


def factored_gradient(
    E: np.ndarray, U: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    raise NotImplementedError("write factored_gradient, then: python course/check.py 2")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import sys
    import tracemalloc
    from decimal import Decimal, localcontext
    from unittest.mock import patch

    import numpy as np
    from subject import same

    def slow_loss(scores: list[list[Decimal]], y: np.ndarray) -> Decimal:
        """The mean of -log(p), place by place, with 50 digits."""
        total = Decimal(0)
        for row, came in zip(scores, y):
            top = max(row)
            total += top + sum((s - top).exp() for s in row).ln() - row[came]
        return total / len(y)

    def table_loss(W, x, y) -> Decimal:
        return slow_loss([W[a] for a in x], y)

    def factored_loss(E, U, x, y) -> Decimal:
        scores = [[sum(e * u for e, u in zip(E[a], column)) for column in zip(*U)] for a in x]
        return slow_loss(scores, y)

    def judge(function, slowly, matrices: dict, x, y) -> None:
        try:
            loss, *slopes = function(*matrices.values(), x, y)
        except ImportError as error:
            raise AssertionError(f"with numpy alone; {error}") from None
        digits = {k: [[Decimal(float(n)) for n in row] for row in m] for k, m in matrices.items()}
        right = slowly(*digits.values(), x, y)
        same(loss, float(right), "the loss")
        assert len(slopes) == len(matrices), f"{1 + len(slopes)} results"
        for (name, m), slope in zip(matrices.items(), slopes):
            nudged = np.zeros_like(m)
            for i, j in np.ndindex(m.shape):
                old = digits[name][i][j]
                nudge = Decimal(10) ** -22
                digits[name][i][j] = old + nudge
                nudged[i, j] = (slowly(*digits.values(), x, y) - right) / nudge
                digits[name][i][j] = old
            same(slope, nudged, f"d{name}")

    for name, value in answer.own.items():
        kinds = (value, type(value), type(getattr(value, "__self__", None)))
        places = [getattr(kind, "__module__", None) or "" for kind in kinds]
        places.append(getattr(value, "__name__", ""))
        bound = any(str(place).partition(".")[0] == "torch" for place in places)
        assert not bound, f"{name} is torch's: with numpy alone"
    answer.may("table_gradient", whole="x y")
    answer.may("factored_gradient", whole="x y")

    with localcontext() as context, patch.dict(sys.modules, {"torch": None}):
        context.prec = 50
        rng = np.random.default_rng(4)
        cases = [  # V, D, places, size of the scores
            (3, 2, [0], [2], 1.0),
            (4, 3, [1, 1, 1], [0, 2, 0], 1.0),  # one byte in three places
            (5, 1, [4, 0, 4, 2], [4, 4, 1, 0], 1.0),
            (3, 5, [2, 2, 0, 1, 2, 2], [2, 1, 0, 0, 1, 1], 2.0),
            (6, 3, rng.integers(0, 6, 30), rng.integers(0, 6, 30), 0.5),
            (4, 2, [0, 3, 3], [1, 0, 2], 0.0),
            (2, 2, [0, 1, 0], [0, 0, 1], 3.0),
            (7, 2, range(5), [6, 0, 6, 1, 2], 1.0),  # each byte once, as the trainer asks
        ]
        factored = []
        for V, D, x, y, size in cases:
            x, y = np.array(x), np.array(y)
            W, E, U = (size * rng.normal(size=shape) for shape in ((V, V), (V, D), (D, V)))
            judge(answer.table_gradient, table_loss, {"W": W}, x, y)
            factored.append(({"E": E, "U": U}, x, y))
        x = np.array([0, 1, 1])
        y = np.array([1, 0, 1])  # the first is 2,900 below the top
        W = np.array([[2900.0, 0, 2899], [-2000, -2001, -1999], [0, 0, 0]])
        judge(answer.table_gradient, table_loss, {"W": W}, x, y)
        E = W[:, :2] / 10
        U = np.array([[3.0, 2, 1], [5, 5, 5.01]])
        for case in [*factored, ({"E": E, "U": U}, x, y)]:
            judge(answer.factored_gradient, factored_loss, *case)

        V = 6000
        D = 2
        E = rng.normal(size=(V, D))
        U = rng.normal(size=(D, V))
        x = rng.integers(0, V, 20).astype(np.int16)
        y = rng.integers(0, V, 20).astype(np.int16)
        tracemalloc.start()
        try:
            _, dE, dU = answer.factored_gradient(E, U, x, y)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < V * V / 4, f"{peak / 1e6:.0f} MB: was a table of {V} x {V} numbers built?"
        p = np.exp(E[x] @ U)
        p /= p.sum(1, keepdims=True)
        p[np.arange(20), y] -= 1
        right = np.zeros_like(E)
        np.add.at(right, x, p @ U.T / 20)
        same(dE, right, "dE", 1e-7)
        same(dU, E[x].T @ p / 20, "dU", 1e-7)
        W = rng.normal(size=(300, 300))
        small = x % 300
        _, dW = answer.table_gradient(W, small, small)
        _, right = answer.table_gradient(W, small.astype(int), small.astype(int))
        same(dW, right, "for x and y of int16 dW")
        x = np.repeat([0, 1, 2, 3], [300, 70_000, 300, 300])
        y = np.append(x[300:], x[:300])
        logits = rng.normal(size=(4, 4))
        p = np.exp(logits[x])
        p /= p.sum(1, keepdims=True)
        nats = -np.log(p[np.arange(len(x)), y]).mean()
        p[np.arange(len(x)), y] -= 1
        right = np.zeros_like(logits)
        np.add.at(right, x, p / len(x))
        loss, dW = answer.table_gradient(logits, x, y)
        same(loss, nats, "of 70,900 places the loss", 1e-7)
        same(dW, right, "of 70,900 places dW", 1e-7)
