"""Exercise 3: write backward.

    x = Node(3.0)
    y = Node(x.data * x.data, (x, x), (lambda g: g * x.data, lambda g: g * x.data))
    backward(y)
    x.grad -> 6.0

A node has a value (`data`), the nodes it was made from (`parents`), and for each of those a rule: a
function that is called with the gradient of the node and returns the gradient of that parent. In
the example both parents are x, and each of the two rules hands 1 * 3 to it. backward(root), root
being one number:
1. adds the slope of root for each leaf (a node without parents) below root to the `grad` of the
   leaf: what is in it already stays, so a second call doubles it;
2. leaves in the `grad` of every other node its slope by this call, and nothing of an earlier one;
3. undoes broadcasting. In an operation numpy repeats a parent of shape (3,) or (2, 1) or () until
   it fits the others, and the rule returns a gradient of the shape of the *node*, (2, 3), say. The
   parent's gradient is the sum over the repetitions, and has the parent's shape. If the rule
   returns [[1, 2, 3], [4, 5, 6]], a parent of shape (3,) gets [5, 7, 9], one of (2, 1) gets
   [[6], [15]], one of () gets 21;
4. calls every rule once, with a gradient of the node's shape, however many paths lead through it;
5. works for a graph that is 5,000 operations deep. Python gives up at about 1,000 calls in calls,
   and its limit stays as it is, so the lesson's `visit` cannot be used: keep a list of what is
   still to do, or count for each node how many of the nodes made from it have not been visited;
6. gives each node an array of its own: to change one gradient in place changes no other.
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

    import torch

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

    limit = sys.getrecursionlimit()
    calls = 1
    name = "x x at 3"
    x = Node(3.0)
    answer.backward(mul(x, x))
    check("x", x, 6)
    for first in (False, True):
        name = f"h + 5 h, h = 2 x, h {'first' if first else 'last'}"
        x = Node(1.0)
        h = mul(x, Node(2.0))
        f = mul(h, Node(5.0))
        answer.backward(add(h, f) if first else add(f, h))
        check("x", x, 12), check("h", h, 6), check("5 h", f, 1)
    name = "the root is a leaf"
    x = Node(1.0)
    for times in (1, 2):
        answer.backward(x)
        check(f"x, call {times}", x, times)

    name = "a chain of 5,000 operations"
    x = Node(1.0)
    y = x
    for _ in range(5000):
        y = mul(y, Node(1.0))
    try:
        answer.backward(y)
    except RecursionError:
        raise AssertionError(f"{name}: too many calls within calls (RecursionError)") from None
    after = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    assert after == limit, f"Python's limit of calls within calls was changed to {after}"
    check("x", x, 1)

    rng = np.random.default_rng(1)
    repeated = [((4, 3), (3,)), ((2, 4, 3), (3,)), ((2, 4, 3), ()), ((4, 3), (4, 1)), ((3,), (1,))]
    repeated += [((2, 4, 3), (4, 1)), ((2, 4, 3), (1, 1, 3)), ((1, 3), (3,)), ((0, 3), (3,))]
    repeated += [((2, 1, 3), (4, 1)), ((1, 1), (1, 1))]
    for shape, small in repeated:
        name = f"shape {small} times shape {shape}, summed"
        a, b = (Node(rng.normal(size=size)) for size in (shape, small))
        twins = [torch.tensor(x.data, requires_grad=True) for x in (a, b)]
        (twins[0] * twins[1]).sum().backward()
        answer.backward(total(mul(a, b)))
        check("the first", a, twins[0].grad), check("the second", b, twins[1].grad)

    calls = 2
    x = Node(np.arange(12.0).reshape(4, 3))
    bias = Node(np.ones(3))
    h = add(x, bias)
    y = mul(h, Node(3.0))
    out = total(y)
    for times in (1, 2):
        name = f"((x + bias) * 3) summed, call {times}"
        answer.backward(out)
        check("x", x, np.full((4, 3), 3.0 * times))
        check("the bias", bias, np.full(3, 12.0 * times))
        check("x + bias", h, np.full((4, 3), 3.0))
        check("the root", out, 1)
        arrays = {"x": x, "the bias": bias, "x + bias": h, "(x + bias) * 3": y, "the root": out}
        for a, b in itertools.permutations(arrays, 2):
            for other in (arrays[b].grad, arrays[b].data):
                shared = np.shares_memory(arrays[a].grad, other)
                assert not shared, f"rule 6: {name}: the gradient of {a} shares memory with {b}"

    calls = 1
    dice = random.Random(12)
    for trial in range(20):
        name = f"random graph {trial}"
        nodes = [Node(1.0), Node(1.0)]
        twins = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in nodes]
        for i in range(2, 14):
            a, b = dice.choices(range(i), k=2)
            k = dice.choice([-2.0, 0.5, 3.0])
            nodes.append(node(1.0, nodes[a], lambda g, k=k: k * g, nodes[b], lambda g: g))
            twins.append(k * twins[a] + twins[b])
            twins[i].retain_grad()
        answer.backward(nodes[13])
        twins[13].backward()
        for i, twin in enumerate(twins):
            if twin.grad is not None:
                check(f"node {i}", nodes[i], twin.grad)
