"""Exercise 31: an asynchronous server that refuses gradients which are too stale.

asynchronous(w, order, gradient, lr, limit) -> the last weights, what became of each gradient
    w: a list of float32 arrays, some perhaps of shape (). At first, each worker (0, 1, ...) is sent
    w. order: the workers, in the order in which their gradients arrive. A worker's gradient is
    gradient(worker, weights), at the weights that it was sent last: a list of arrays such as w. Its
    staleness is the number of times that the server has updated its weights since then. Up to
    `limit`, the server takes the gradient, w - lr gradient; beyond, it throws the gradient away.
    Either way it then sends that worker the weights it has now. The second result has, for each
    arrival, the staleness, or None for a gradient thrown away. Call gradient once for each arrival,
    in order.

With w = [[0]], lr = 1, limit 0, and a gradient that is always [[1]], the order [0, 1, 1] gives
[[-2]] and [0, None, 0]: worker 1 computes at the first weights, one update ago, and then at the new
ones.

Return new float32 arrays: another thread may be sending the weights at this very moment, and a
worker may hold on to them. So never change anything that was given to you (by `gradient`, too) or
that you gave to `gradient`, and share no memory with it in the result.
"""

from collections.abc import Callable

import numpy as np

Weights = list[np.ndarray]


def asynchronous(
    w: Weights, order: list[int], gradient: Callable, lr: float, limit: int
) -> tuple[Weights, list[int | None]]:
    raise NotImplementedError("write asynchronous, then: python course/check.py 31")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import numpy as np
    from subject import equal, same

    def compare(found, right, what):
        equal(len(found), len(right), f"the number of {what}")
        for i, (a, b) in enumerate(zip(found, right)):
            same(a, b, f"{what}[{i}]", 1e-4, 1e-4)

    def check(order, limit, lr):
        full = lambda number: [np.full(shape, number, np.float32) for shape in ((1, 1), ())]
        server = [full(0)]  # its weights at first, and after each update
        sent = {}  # worker -> how many updates are in the weights that it was sent last
        workers = []
        fate = []
        given = []

        def gradient(worker, weights):
            """1 in the first call, 2 in the second, and so on."""
            workers.append(worker)
            call = (
                f"gradient returns 1, 2, ..; in its call {len(workers)}, worker {worker}, weights"
            )
            version = sent.get(worker, 0)
            compare(weights, server[version], call)
            given.append((weights, server[version], f"changed later: {call}"))
            g = full(len(workers))
            stale = len(server) - 1 - version
            fate.append(stale if stale <= limit else None)
            if stale <= limit:
                server.append([np.asarray(p - np.float32(lr) * x) for p, x in zip(server[-1], g)])
            sent[worker] = len(server) - 1
            return g

        new, found = answer.asynchronous(server[0], order, answer.lent(gradient), lr, limit)
        equal(workers, order, "the list of the workers for whom gradient is called")
        equal([*found], fate, "the second result")
        compare(new, server[-1], "the last weights")
        for held in given:
            compare(*held)

    check([0, 1, 1], 0, 1.0)  # as in the text, but for the gradients
    check([0, 1, 2, 1], 1, 0.5)
    check([], 3, 0.5)
    order = np.random.default_rng(15).integers(0, 4, 25).tolist()
    check(order, 2, np.float64(0.3))  # which is a float, too
