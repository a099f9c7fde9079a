"""Exercise 12: write backward.

    x = Node(3.0)
    y = Node(x.data * x.data, (x, x), (lambda g: g * x.data, lambda g: g * x.data))
    backward(y)
    x.grad -> 6.0

A node has a value, the nodes it was made from, and for each of those a rule: gradient of the node
-> gradient of that parent. backward(root), root being a number:
1. adds d root / d leaf to the grad of every leaf (a node without parents) below root: what is in it
   already stays, so a second call doubles it;
2. leaves d root / d node of this call in the grad of every other node;
3. sums the gradient of a parent that was broadcast, such as a bias over a batch, to its shape:
   a rule returns the node's shape, which may have more dimensions, or n where the parent has 1;
4. uses every rule once, however many paths lead through it.
"""

import numpy as np


class Node:
    def __init__(self, data, parents=(), rules=()):
        self.data = np.asarray(data, dtype=float)
        self.parents, self.rules = tuple(parents), tuple(rules)
        self.grad = np.zeros_like(self.data)


def backward(root: Node) -> None:
    raise NotImplementedError("write backward, then: python course/check.py 12")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""

    def node(data, *parents_and_rules):
        """Rules that count how often they are used."""

        def counting(rule):
            used = []

            def counted(g):
                used.append(g)
                assert len(used) <= calls, f"a rule is used once more than needed in: {name}"
                return rule(np.asarray(g))

            return counted

        rules = [counting(rule) for rule in parents_and_rules[1::2]]
        return Node(data, parents_and_rules[::2], rules)

    def add(a, b):
        return node(a.data + b.data, a, lambda g: g, b, lambda g: g)

    def scale(a, k):
        return node(k * a.data, a, lambda g: k * g)

    def total(a):
        return node(a.data.sum(), a, lambda g: np.broadcast_to(g, a.data.shape))

    def check(x, expected):
        got = np.asarray(x.grad)
        assert got.shape == np.shape(expected), (
            f"{name}: a gradient of shape {got.shape} for {x.data.shape}"
        )
        assert np.allclose(got, expected), f"{name}: the gradient is {got}, not {expected}"

    name, calls, x = "a chain", 1, Node(2.0)
    answer.backward(scale(scale(x, 3), 5))
    check(x, 15)
    name, x = "x used twice", Node(3.0)
    answer.backward(node(9.0, x, lambda g: g * 3.0, x, lambda g: g * 3.0))
    check(x, 6)
    for swap in (False, True):
        name, x = "h + 5 h, h = 2 x: one node, two depths", Node(1.0)
        h = scale(x, 2)
        f = scale(h, 5)
        answer.backward(add(f, h) if swap else add(h, f))
        check(x, 12), check(h, 6), check(f, 1)
    name, x = "40 doublings, one after the other", Node(1.0)
    y = x
    for _ in range(40):
        y = add(y, y)
    answer.backward(y)
    check(x, 2.0**40)
    name, bias = "a bias added to a batch of 4", Node(np.ones(3))
    batch, column = Node(np.arange(12.0).reshape(4, 3)), Node(np.ones((4, 1)))
    out = total(add(add(batch, bias), column))
    answer.backward(out)
    check(batch, np.ones((4, 3))), check(bias, np.full(3, 4.0)), check(column, np.full((4, 1), 3.0))
    name, calls = "the same graph again", 2
    answer.backward(out)
    check(bias, np.full(3, 8.0)), check(out, 1)
    name, x = "leaves keep what they had", Node(1.0)
    x.grad = np.array(100.0)
    answer.backward(scale(scale(x, 2), 3))
    check(x, 106)
    name, x = "root is a leaf", Node(1.0)
    answer.backward(x)
    check(x, 1)
