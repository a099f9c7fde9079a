"""Exercise 3: write backward.

    x = Node(3.0)
    y = Node(x.data * x.data, (x, x), (lambda g: g * x.data, lambda g: g * x.data))
    backward(y)
    x.grad -> 6.0

A node has a value, the nodes it was made from, and for each of those a rule: a function that turns
the gradient of the node into the gradient of that parent. backward(root), root being one number:
1. adds d root / d leaf to the grad of every leaf (a node without parents) below root: what is in it
   already stays, so a second call doubles it;
2. leaves d root / d node of this call, and of no earlier one, in the grad of every other node;
3. undoes broadcasting. In an operation numpy repeats a parent of shape (3,) or (4, 1) or () until
   it fits, and the rule returns a gradient of the shape of the *node*, (2, 4, 3), say. The parent's
   gradient is the sum over the repetitions, and has the parent's shape;
4. calls every rule once, with a gradient of the node's shape, however many paths lead through it;
5. works for a graph that is 5,000 operations deep (Python gives up at about 1,000 calls in calls;
   its limit stays as it is);
6. gives each node an array of its own: to clip one gradient in place changes no other.
"""

import numpy as np


class Node:
    def __init__(self, data, parents=(), rules=()):
        self.data = np.asarray(data, dtype=float)
        self.parents = tuple(parents)
        self.rules = tuple(rules)
        self.grad = np.zeros_like(self.data)


def backward(root: Node) -> None:
    raise NotImplementedError("write backward, then: python course/check.py 3")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import itertools
    import random
    import sys

    def node(data, *parents_and_rules):
        """Rules that look at what they are given, and count how often they are used."""
        made = Node(data, parents_and_rules[::2])

        def counting(rule):
            def counted(g):
                counted.calls += 1
                assert counted.calls <= calls, f"{name}: a rule is called {counted.calls} times"
                assert np.shape(g) == made.data.shape, (
                    f"{name}: a rule of a node of shape {made.data.shape} is called with a "
                    f"gradient of shape {np.shape(g)}"
                )
                return rule(np.asarray(g))

            counted.calls = 0
            return counted

        made.rules = tuple(counting(rule) for rule in parents_and_rules[1::2])
        return made

    def add(a, b):
        return node(a.data + b.data, a, lambda g: g, b, lambda g: g)

    def mul(a, b):
        return node(a.data * b.data, a, lambda g: g * b.data, b, lambda g: g * a.data)

    def scale(a, k):
        return node(k * a.data, a, lambda g: k * g)

    def total(a):
        return node(a.data.sum(), a, lambda g: np.broadcast_to(g, a.data.shape))

    def check(what, x, expected):
        got = np.asarray(x.grad)
        assert got.shape == np.shape(expected), (
            f"{name}: the gradient of {what}, shape {x.data.shape}, has shape {got.shape}"
        )
        assert got.dtype == float, f"{name}: the gradient of {what} is {got.dtype}"
        assert np.allclose(got, expected), (
            f"{name}: the gradient of {what} is {np.round(got, 3).tolist()}, "
            f"not {np.round(expected, 3).tolist()}"
        )

    name = "15 x"
    calls = 1
    x = Node(2.0)
    limit = sys.getrecursionlimit()
    answer.backward(scale(scale(x, 3), 5))
    after = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    assert after == limit, f"Python's limit of calls within calls was changed to {after}"
    check("x", x, 15)
    name = "x used twice by one node"
    x = Node(3.0)
    answer.backward(node(9.0, x, lambda g: g * 3.0, x, lambda g: g * 3.0))
    check("x", x, 6)
    for first in (False, True):
        name = f"h + 5 h, h = 2 x, h {'first' if first else 'last'}"
        x = Node(1.0)
        h = scale(x, 2)
        f = scale(h, 5)
        answer.backward(add(h, f) if first else add(f, h))
        check("x", x, 12), check("h", h, 6), check("5 h", f, 1)
    name = "40 doublings, one after the other"
    x = Node(1.0)
    y = x
    for _ in range(40):
        y = add(y, y)
    answer.backward(y)
    check("x", x, 2.0**40)
    name = "a chain of 5,000 operations"
    x = Node(1.0)
    y = x
    for _ in range(5000):
        y = scale(y, 1.0)
    try:
        answer.backward(y)
    except RecursionError:
        raise AssertionError(f"{name}: too many calls within calls (RecursionError)") from None
    check("x", x, 1)

    rng = np.random.default_rng(1)
    repeated = [((4, 3), (3,)), ((2, 4, 3), (3,)), ((2, 4, 3), ()), ((4, 3), (4, 1)), ((3,), (1,))]
    repeated += [((2, 4, 3), (4, 1)), ((2, 4, 3), (1, 1, 3)), ((4, 1), (1,)), ((1, 3), (3,))]
    repeated += [((2, 1, 3), (4, 1)), ((1, 1), (1, 1)), ((0, 3), (3,))]
    for shape, small in repeated:
        name = f"shape {small} times shape {shape}, summed"
        calls = 1
        a = Node(rng.normal(size=shape))
        b = Node(rng.normal(size=small))
        out = total(mul(a, b))
        wide = np.ones(np.broadcast_shapes(shape, small))
        gradients = []
        for mine, other in ((a.data, b.data), (b.data, a.data)):
            g = wide * other
            extra = tuple(range(g.ndim - mine.ndim))
            ones = tuple(i + len(extra) for i, n in enumerate(mine.shape) if n == 1)
            gradients.append(g.sum(extra + ones, keepdims=True).reshape(mine.shape))
        answer.backward(out)
        check("the first", a, gradients[0]), check("the second", b, gradients[1])

    def graph():
        """((x + bias) * 3) summed: leaves, inner nodes, their gradients after one call."""
        x = Node(np.arange(12.0).reshape(4, 3))
        bias = Node(np.ones(3))
        h = add(x, bias)
        y = scale(h, 3.0)
        out = total(y)
        leaves = {"x": (x, np.full((4, 3), 3.0)), "the bias": (bias, np.full(3, 12.0))}
        inner = {"h": (h, np.full((4, 3), 3.0)), "y": (y, np.ones((4, 3))), "the root": (out, 1.0)}
        return out, leaves, inner

    calls = 3
    out, leaves, inner = graph()
    for times in (1, 2, 3):
        name = f"call {times} for the same graph"
        answer.backward(out)
        for what, (leaf, expected) in leaves.items():
            check(what, leaf, times * expected)
        for what, (y, expected) in inner.items():
            check(what, y, expected)
        arrays = {what: y.grad for what, (y, _) in (leaves | inner).items()}
        arrays |= {f"{what}'s data": y.data for what, (y, _) in (leaves | inner).items()}
        for a, b in itertools.combinations(arrays, 2):
            shared = np.shares_memory(arrays[a], arrays[b])
            assert not shared, f"rule 6: {name}: the gradient of {a} shares memory with {b}"
    name = "two roots over one h = 2 x: h + 1, then 5 h"
    x = Node(1.0)
    h = scale(x, 2)
    first = add(h, Node(1.0))
    answer.backward(first)
    answer.backward(scale(h, 5))
    check("the first root, after the second call", first, 1)
    check("x", x, 2 + 10), check("h, after the second call", h, 5)
    name = "6 x, where x.grad was 100"
    x = Node(1.0)
    x.grad = np.array(100.0)
    answer.backward(scale(scale(x, 2), 3))
    check("x", x, 106)
    name = "the root is a leaf"
    x = Node(1.0)
    answer.backward(x)
    check("x", x, 1)
    answer.backward(x)
    check("x, called twice", x, 2)

    dice = random.Random(12)
    for trial in range(20):  # against a sum over all paths, node by node
        name = f"random graph {trial}"
        calls = 1
        nodes = [Node(1.0), Node(1.0)]
        slopes = []
        for i in range(2, 14):
            a = dice.randrange(i)
            b = dice.randrange(i)
            k = dice.choice([-2.0, 0.5, 3.0])
            nodes.append(node(1.0, nodes[a], lambda g, k=k: k * g, nodes[b], lambda g: g))
            slopes.append((a, k, b))
        expected = [0.0] * 13 + [1.0]
        for i in range(13, 1, -1):
            a, k, b = slopes[i - 2]
            expected[a] += k * expected[i]
            expected[b] += expected[i]
        answer.backward(nodes[13])
        below = set()
        queue = [nodes[13]]
        for y in queue:
            below.add(y)
            queue += [parent for parent in y.parents if parent not in below]
        for i, y in enumerate(nodes):
            if y in below:
                check(f"node {i}", y, expected[i])
