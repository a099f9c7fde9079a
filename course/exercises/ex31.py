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
    import numpy as np
    from subject import frozen, same, shared

    seen = []  # what gradient was given and what it returned, in all calls; as it was then

    def check(order, limit, *shapes):
        draw = lambda: [rng.normal(size=shape).astype(np.float32).T for shape in shapes]
        w = draw()
        lr = rng.uniform()
        now = w
        version = 0
        held = {}
        fate = []

        def compare(found, right, what):
            assert len(found) == len(right), f"{what}: {len(found)} arrays"
            for i, (a, b) in enumerate(zip(found, right)):
                same(a, b, f"{what}: array {i}", 1e-4, 1e-4)

        def gradient(worker, weights):
            nonlocal now, version
            arrival = f"arrival {len(fate)}, worker {worker}"
            assert [worker] == order[len(fate) : len(fate) + 1], f"{arrival}: this is not its turn"
            base, sent = held.get(worker, (w, 0))
            compare(weights, base, f"{arrival}, its weights")
            g = draw()
            stale = version - sent
            fate.append(stale if stale <= limit else None)
            if stale <= limit:
                now = [p - np.float32(lr) * x for p, x in zip(now, g)]
                version += 1
            else:
                g = [np.full_like(x, np.inf) for x in g]
            held[worker] = now, version
            seen.extend((x, frozen(x)) for x in (weights, g) if x)
            return g

        new, found = answer.asynchronous(w, order, gradient, lr, limit)
        counts = f"gradient is called {len(fate)} times, {len(found)} are told"
        assert len(fate) == len(found) == len(order), counts
        for i, (a, b) in enumerate(zip(found, fate)):
            assert a == b, f"the staleness of arrival {i} is {a}, not {b}"
        compare(new, now, "the last weights")
        kept = all(frozen(x) == was for x, was in seen)
        assert kept, "what gradient was given, or what it returned, was changed later"
        assert not shared(new, seen), "the last weights share memory with what gradient knows"

    rng = np.random.default_rng(15)
    cases = [([], 3), ([0, 1, 2] * 3, 1), ([0, 0, 0, 1, 1], 2)]
    order = rng.integers(0, 4, 25).tolist()
    cases += [(order, limit) for limit in (0, 1, 2, 4)]
    cases += [([70_000, 1, 70_000, 1], 0), ([3, *[0, 1] * 150, 3, 0], 300)]
    for order, limit in cases:
        check(order, limit, (3, 4), (3, 1), (2,), (0, 2))
    check([1, *[0] * 66_000, 1], 70_000)
    one = np.ones(1, np.float32)
    buffer = np.zeros(1, np.float32)

    def busy(worker, weights):
        own = answer.own["asynchronous"]
        inner = own([5 * one], [1, 0], lambda *_: [one.copy()], 1.0, 3)
        assert inner[1] == [0, 1], f"a run inside a run has the fates {inner[1]}"
        buffer[:] = worker + 1  # its own buffer, again
        return [buffer]

    weights, fates = answer.own["asynchronous"]([0 * one], [0, 1, 2], busy, 1.0, 5)
    same(weights[0], -6 * one, "the last weights")
    assert fates == [0, 1, 2], fates
