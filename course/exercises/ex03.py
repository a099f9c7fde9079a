"""Exercise 3: write backward.

    x = Node(3.0)
    y = Node(x.data * x.data, (x, x), (lambda g: g * x.data, lambda g: g * x.data))
    backward(y)
    x.grad -> 6.0

A node has a value (`data`), the nodes it was made from (`parents`), and for each of those a rule: a
function that is called with the gradient of the node and returns the gradient of that parent. In
the example both parents are x, and each of the two rules hands 1 * 3 to it. backward(root), where
root is a single number (of shape (), (1,), (1, 1) ...):
1. adds the slope of root for each leaf (a node without parents) below root to the `grad` of the
   leaf: what is in it already stays, so a second call doubles it;
2. leaves in the `grad` of every other node its slope from this call, and nothing of an earlier one;
3. undoes broadcasting. In an operation numpy repeats a parent of shape (3,) or (2, 1) or () until
   it fits the others, and the rule returns a gradient of the shape of the *node*, say (2, 3). (A
   rule that changes a shape, as that of reshape does, may already return the parent's shape.) The
   gradient of the parent is the sum over the repetitions, and has the parent's shape. If the rule
   returns [[1, 2, 3], [4, 5, 6]], a parent of shape (3,) gets [5, 7, 9], one of (2, 1) gets
   [[6], [15]], and one of () gets 21;
4. calls every rule once, with a gradient of the node's shape, however many paths lead through it;
   a node can have 70,000 of them;
5. works for a graph that is 5,000 operations deep. Python gives up at about 1,000 calls within
   calls, and its limit stays as it is, so you cannot use the lesson's `visit`: keep a list of what
   is still to do, or count for each node how many of the nodes made from it are not yet visited;
6. gives each node an array of its own: changing one gradient in place changes no other.
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
    import sys

    import numpy as np
    from subject import equal, same, shared

    limit = 1000
    sys.setrecursionlimit(limit)  # whatever the file has set
    called = set()  # rules
    cases = []

    def node(data, parents=(), rules=()):
        """A node whose rules look at how they are called."""

        def watched(rule):
            def call(g):
                assert call not in called, f"{cases[-1]}: rule 4: a rule is called a second time"
                called.add(call)
                what = f"{cases[-1]}: rule 4: the shape of the gradient that a rule is given"
                equal(np.shape(g), np.shape(data), what)
                equal(sys.getrecursionlimit(), limit, "rule 5: the limit that a rule sees")
                return rule(g)

            return call

        return answer.own["Node"](data, parents, [*map(watched, rules)])

    def mul(a, b):
        return node(a.data * b.data, (a, b), (lambda g: g * b.data, lambda g: g * a.data))

    def dot(y, weights):
        return node((y.data * weights).sum(), (y,), (lambda g: g * weights,))

    def judge(case, root, **expected):
        """expected: by its name a node, and its gradient."""
        called.clear()
        cases.append(case)
        try:
            answer.backward(root)
        except RecursionError:
            raise AssertionError(f"rule 5: {case}: too many calls within calls") from None
        for name, (x, right) in expected.items():
            same(x.grad, right * np.ones_like(x.data), f"{case}: {name}.grad")

    for shape in ((), (1, 1)):
        x = node(np.full(shape, 3.0))
        y = mul(x, x)
        case = f"y = x * x at x = {x.data}, backward(y)"
        judge(case, y, x=(x, 6), y=(y, 1))
        judge(f"{case} a second time (rule 1 for x, 2 for y)", y, x=(x, 12), y=(y, 1))

    x = node(1.0)
    h = mul(x, node(2.0))
    f = mul(h, node(5.0))
    graph = "x = 1, h = 2 * x, f = 5 * h; backward(h * f)"
    judge(graph, mul(h, f), f=(f, 2), h=(h, 20), x=(x, 40))
    judge(f"{graph}, backward(f * h)", mul(f, h), f=(f, 2), h=(h, 20), x=(x, 80))
    passed = np.asarray  # a rule that hands on what it is given
    root = node(1.0, 70_000 * (h,), 70_000 * (passed,))
    judge("rule 4: 70,000 paths from root to h", root, h=(h, 70_000))

    given = np.array([[1.0, 2, 3], [4, 5, 6]])
    for shape, rule, right in (
        ((3,), passed, [5, 7, 9]),
        ((2, 1), passed, [[6], [15]]),
        ((), passed, 21),
        ((1,), passed, [21]),
        ((6,), np.ravel, given.ravel()),
    ):
        x = node(np.ones(shape))
        y = node(given, (x,), (rule,))
        case = f"rule 3: x of shape {shape}, y of (2, 3) with the rule np.{rule.__name__}"
        judge(case, dot(y, given), x=(x, right))

    x = y = node(1.0)
    for _ in range(5000):
        y = node(1.0, (y,), (passed,))
    judge("rule 5: x, and 5,000 nodes, each made from the one before", y, x=(x, 1))

    one = np.ones(3)
    a = node(one)
    b = node(one)
    y = node(one + one, (a, b), (passed, passed))
    z = node(y.data, (y,), (passed,))
    answer.backward(dot(z, one))
    one_array = shared([a.grad, z.grad], [b.grad, y.grad])
    assert not one_array, (
        "rule 6: y = a + b, z = y: a.grad or z.grad is one array with b.grad or y.grad"
    )
