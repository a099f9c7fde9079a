"""Exercise 2: the gradient by hand, with numpy alone.

`x` and `y` are arrays of N whole numbers (of any integer type) from 0 to V - 1: for N places of a
text, the byte before and the byte that came. The loss is the mean over the places of -log(p), with
the natural logarithm, where p is the probability that softmax gives to the byte that came.

    table_gradient(W, x, y) -> loss, dW

W (V, V) is the table of lesson 2: row x[i] has the scores for place i. dW has the shape of W and
holds the slope of the loss for each number of W.

    factored_gradient(E, U, x, y) -> loss, dE, dU

Here the table is the product E @ U of a (V, D) and a (D, V) matrix: row x[i] of E is a vector for
the byte before, and its product with U is the row of scores for place i. V can be large, and N is
small beside it: do not build the whole table (V, V), nor anything else of V x V numbers.

Begin with one place. Lesson 2 has its slopes for two letters, and for V bytes you find them the
same way: -log(p) is log(sum of e^score) minus the score of the byte that came; take its derivative
by score j. Then the two matrices. Nudge U[d, j], and score j of place i changes by E[x[i], d] times
the nudge; nudge E[x[i], d], and each score j changes by U[d, j] times the nudge. An example with
two letters and D = 1: let E[x[0]] be (2) and U be (0.42, 0). The scores are 0.84 and 0, so p is
about 0.7 and 0.3, and if the second letter came, their slopes are 0.7 and -0.7. Then dU is
(2 * 0.7, 2 * -0.7), and dE[x[0]] is 0.42 * 0.7 + 0 * -0.7. The loss is a mean over places; a byte
that stands in several of them gets a part of its slope from each. dE and dU have the shapes of E
and U, which leaves few products of matrices to choose from.

Scores can be large, 1,000 say, where e^score is infinite for the computer. Softmax stays the same
if you first subtract the largest score of the row from all scores of the row. Do not change the
arrays you are given. All floats are float64, and so are your results.
"""

import numpy as np


def table_gradient(W: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    raise NotImplementedError("write table_gradient, then: python course/check.py 2")


def factored_gradient(
    E: np.ndarray, U: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    raise NotImplementedError("write factored_gradient, then: python course/check.py 2")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import tracemalloc
    from functools import reduce

    import numpy as np
    from subject import same

    answer.may("table_gradient", whole="x y")
    answer.may("factored_gradient", whole="x y")

    def slow_loss(matrices, x, y):
        """The mean of log(sum of e^score) - score; the scores are rows of the matrices' product."""
        rows = reduce(np.matmul, matrices)[x]  # of W, or of E @ U
        return np.mean([np.logaddexp.reduce(row) - row[came] for row, came in zip(rows, y)])

    def judge(case, function, names, matrices, x, y):
        loss, *slopes = function(*matrices, x, y)
        same(loss, slow_loss(matrices, x, y), f"{case}: the loss")
        for name, matrix, slope in zip(names, matrices, slopes, strict=True):
            right = np.zeros_like(matrix)  # each number is nudged up and down
            for place in np.ndindex(matrix.shape):
                matrix[place] += 1e-5
                up = slow_loss(matrices, x, y)
                matrix[place] -= 2e-5
                right[place] = (up - slow_loss(matrices, x, y)) / 2e-5
                matrix[place] += 1e-5
            same(slope, right, f"{case}: d{name}", 1e-6, 1e-6)

    rng = np.random.default_rng(4)
    cases = {  # E, U, x, y
        "the text's place": ([[2.0], [1.0]], [[0.42, 0.0]], [0], [1]),
        "one byte before three places": ([[0.5], [1.0]], [[0.3, 0.1]], [1, 1, 1], [0, 1, 0]),
        "scores of 2,900": ([[10.0], [-10], [0]], [[290, 0, 289.9]], [0, 1, 2], [1, 0, 1]),
        "drawn": (
            rng.normal(size=(20, 3)),
            rng.normal(size=(3, 20)),
            *rng.integers(20, size=(2, 9)),
        ),
    }
    cases = {case: [*map(np.array, arrays)] for case, arrays in cases.items()}
    for case, (E, U, x, y) in cases.items():
        judge(case, answer.table_gradient, "W", [E @ U], x, y)
    for case, (E, U, x, y) in cases.items():
        judge(case, answer.factored_gradient, "EU", [E, U], x, y)

    V = 6000
    x = np.arange(20)
    tracemalloc.start()
    answer.factored_gradient(np.ones((V, 2)), np.ones((2, V)), x, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < V * V, (
        f"{peak / 1e6:.0f} MB are taken: was a table of {V:,} x {V:,} numbers built?"
    )
