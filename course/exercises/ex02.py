"""Exercise 2: the gradient by hand, with numpy alone.

`x` and `y` are arrays of N whole numbers from 0 to V - 1: in N places of a text, the byte before
and the byte that came. The loss is the mean over the places of -log(p), with the natural logarithm,
where p is the probability that softmax gives to the byte that came.

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
    import itertools
    import sys
    import tracemalloc
    from decimal import Decimal, localcontext
    from unittest.mock import patch

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

    def exact(m: np.ndarray) -> list[list[Decimal]]:
        return [[Decimal(float(number)) for number in row] for row in m]

    def judge(name: str, function, slowly, matrices: dict, x, y, told: str) -> None:
        given = {k: m.copy() for k, m in matrices.items()} | {"x": x.copy(), "y": y.copy()}
        asked = f"{name}, {told}"
        try:
            loss, *slopes = function(*given.values())
        except ImportError as error:
            raise AssertionError(f"{asked}: with numpy alone; {error}") from None
        for k, old in (matrices | {"x": x, "y": y}).items():
            assert np.array_equal(given[k], old), f"{asked}: {k} was changed"
        digits = {k: exact(m) for k, m in matrices.items()}
        right = slowly(*digits.values(), x, y)
        assert np.isclose(loss, float(right), rtol=1e-9, atol=1e-12), (
            f"{asked}: the loss is {loss}, by the definition it is {float(right)}"
        )
        assert len(slopes) == len(matrices), f"{asked}: {1 + len(slopes)} results"
        arrays = [*given.values(), *slopes]
        shared = any(np.shares_memory(a, b) for a, b in itertools.combinations(arrays, 2))
        assert not shared, f"{asked}: a result shares memory with an argument, or with another"
        for (k, m), slope in zip(matrices.items(), slopes):
            assert np.shape(slope) == m.shape and slope.dtype == np.float64, (
                f"{asked}: d{k} is of shape {np.shape(slope)} and {slope.dtype}, not "
                f"{m.shape} and float64"
            )
            for i, j in np.ndindex(m.shape):
                old = digits[k][i][j]
                nudge = Decimal(10) ** -22
                digits[k][i][j] = old + nudge
                nudged = float((slowly(*digits.values(), x, y) - right) / nudge)
                digits[k][i][j] = old
                assert np.isclose(slope[i, j], nudged, rtol=1e-9, atol=1e-12), (
                    f"{asked}: d{k}[{i}, {j}] is {slope[i, j]:.12g}, nudging {k} there, with 50 "
                    f"digits, says {nudged:.12g}"
                )

    for name, value in vars(answer).items():
        kinds = (value, type(value), type(getattr(value, "__self__", None)))
        places = [getattr(kind, "__module__", None) or "" for kind in kinds]
        places.append(getattr(value, "__name__", ""))
        bound = any(str(place).partition(".")[0] == "torch" for place in places)
        assert not bound, f"{name} is torch's: with numpy alone"

    with localcontext() as context, patch.dict(sys.modules, {"torch": None}):
        context.prec = 50
        rng = np.random.default_rng(4)
        cases = [  # V, D, places, size of the scores
            (3, 2, [0], [2], 1.0, "a single place"),
            (4, 3, [1, 1, 1], [0, 2, 0], 1.0, "one byte in three places"),
            (5, 1, [4, 0, 4, 2], [4, 4, 1, 0], 1.0, "vectors of one number"),
            (3, 5, [2, 2, 0, 1, 2, 2], [2, 1, 0, 0, 1, 1], 2.0, "long vectors"),
            (6, 3, rng.integers(0, 6, 30), rng.integers(0, 6, 30), 0.5, "30 places"),
            (4, 2, [0, 3, 3], [1, 0, 2], 0.0, "all weights 0"),
            (2, 2, [0, 1, 0], [0, 0, 1], 3.0, "two bytes"),
            (7, 2, range(5), [6, 0, 6, 1, 2], 1.0, "each byte once, as the trainer asks"),
        ]
        factored = []
        for V, D, x, y, size, told in cases:
            x, y = np.array(x), np.array(y)
            W = size * rng.normal(size=(V, V))
            E = size * rng.normal(size=(V, D))
            U = size * rng.normal(size=(D, V))
            told = f"{told} (V {V}, D {D}, x {x.tolist()}, y {y.tolist()})"
            judge("table_gradient", answer.table_gradient, table_loss, {"W": W}, x, y, told)
            factored.append(({"E": E, "U": U}, x, y, told))

        x = np.array([0, 1, 1])
        y = np.array([1, 0, 1])  # the first is 2,900 below the top
        W = np.array([[2900.0, 0, 2899], [-2000, -2001, -1999], [0, 0, 0]])
        judge(
            "table_gradient", answer.table_gradient, table_loss, {"W": W}, x, y, "scores of 2,900"
        )
        E = W[:, :2] / 10
        U = np.array([[3.0, 2, 1], [5, 5, 5.01]])
        for case in [*factored, ({"E": E, "U": U}, x, y, "large scores")]:
            judge("factored_gradient", answer.factored_gradient, factored_loss, *case)

        V = 3000
        D = 4
        E = rng.normal(size=(V, D))
        U = rng.normal(size=(D, V))
        x = rng.integers(0, V, 20)
        y = rng.integers(0, V, 20)
        tracemalloc.start()
        try:
            _, dE, dU = answer.factored_gradient(E, U, x, y)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 8 * V * V / 4, (
            f"factored_gradient with V {V} and 20 places took {peak / 1e6:.0f} MB: was a table of "
            f"{V} x {V} numbers built?"
        )
        unseen = np.setdiff1d(np.arange(V), x)
        assert not dE[unseen].any(), f"E[{unseen[0]}] is in no place, but dE there is not 0"
        assert np.allclose(dU.sum(1), 0, atol=1e-12), (
            "raising all scores alike changes no probability"
        )
