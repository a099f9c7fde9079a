"""Exercise 31: an asynchronous server that refuses what is too stale.

asynchronous(w, order, gradient, lr, limit) -> the last weights, what became of each gradient
    w: a list of float32 arrays. Each worker (0, 1, ...) is sent w at first. order: the workers in
    the order in which their gradients arrive. A worker's gradient is gradient(worker, weights), at
    the weights that it was sent last: a list of arrays such as w. Its staleness is the number of
    updates of the server's weights since then. Up to `limit`, the server takes it, w - lr gradient;
    beyond, it throws it away. Either way it sends that worker the weights that it has now. The
    second result has for each arrival its staleness, or None for a gradient thrown away. Call
    gradient once for each arrival, in order.

With w = [[0]], lr = 1, limit 0, and a gradient that is always [[1]], the order [0, 1, 1] gives
[[-2]] and [0, None, 0]: worker 1 computed at the first weights, one update ago, then at the new.

New arrays, float32: another thread may be sending the weights at this moment, and a worker may hold
them. So nothing that was given to you (by `gradient`, too), or that you gave to `gradient`, is ever
changed, and the result shares no memory with it.
"""

from collections.abc import Callable

import numpy as np

Weights = list[np.ndarray]


def asynchronous(
    w: Weights, order: list[int], gradient: Callable, lr: float, limit: int
) -> tuple[Weights, list[int | None]]:
    raise NotImplementedError("write asynchronous, then: python course/check.py 31")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    rng = np.random.default_rng(15)
    shapes = ((4, 3), (1, 3), (2,))

    def draw():
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def same(x, y):
        return all(np.array_equal(a, b) for a, b in zip(x, y))

    def compare(case, new, want, old):
        assert len(new) == len(want), f"{case}: {len(want)} arrays go in, {len(new)} come out"
        for i, (q, x) in enumerate(zip(new, want)):
            kind = f"{q.dtype} {q.shape}" if isinstance(q, np.ndarray) else type(q)
            assert kind == f"float32 {x.shape}", f"{case}: array {i} is {kind}"
            at = int(np.abs(q - x).argmax())
            assert np.abs(q - x).max() < 1e-5, (
                f"{case}: number {at} of array {i} is {q.flat[at]:.5f}, not {x.flat[at]:.5f}; "
                f"it was {old[i].flat[at]:.5f}"
            )

    cases = [([0], 5), ([], 3), ([0, 1, 2] * 3, 1), ([0, 0, 0, 1, 1], 2), ([7, 0, 7, 3, 7], 1)]
    cases += [([int(x) for x in rng.integers(0, 4, 25)], limit) for limit in (0, 1, 2, 4)]
    for order, limit in cases:
        case = f"order {order}, limit {limit}"
        w = draw()
        pull = {k: draw() for k in range(8)}
        calls = []
        given = []
        made: list = []
        before = [p.copy() for p in w]
        order_before = list(order)

        def gradient(worker, weights, calls=calls, given=given, pull=pull, made=made):
            calls.append(worker)
            given.append((weights, [p.copy() for p in weights]))
            g = [(p - x).astype(np.float32) for p, x in zip(weights, pull[worker])]
            made.append((g, [x.copy() for x in g]))
            return g

        new, fate = answer.asynchronous(w, order, gradient, 0.3, limit)
        assert calls == order_before, f"{case}: gradient is called for workers {calls}"
        assert same(w, before), f"{case}: w itself was changed"
        assert order == order_before, f"{case}: order was changed to {order}"
        assert all(same(*pair) for pair in made), f"{case}: an array that gradient returned changed"
        theirs = [*w, *(x for pair in made for x in pair[0])]
        shared = any(np.shares_memory(a, b) for a in new for b in theirs)
        assert not shared, f"{case}: the last weights share memory with w or with a gradient"
        now = [p.astype(float) for p in before]
        version = 0
        held = {}
        want = []
        for i, worker in enumerate(order_before):
            base, sent = held.get(worker, ([p.astype(float) for p in before], 0))
            weights, then = given[i]
            compare(f"{case}: arrival {i}, weights of worker {worker}", then, base, before)
            assert same(weights, then), (
                f"{case}: the weights that worker {worker} held at arrival {i} were changed later"
            )
            stale = version - sent
            want.append(stale if stale <= limit else None)
            if stale <= limit:
                now = [p - 0.3 * (b - x) for p, b, x in zip(now, base, pull[worker])]
                version += 1
            held[worker] = ([p.copy() for p in now], version)
        assert list(fate) == want, f"{case}: staleness {list(fate)}, not {want}"
        compare(f"{case}: the last weights", new, now, before)
