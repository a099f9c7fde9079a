"""Exercise 3: write backward.

    x = Node(3.0)
    y = Node(x.data * x.data, (x, x), (lambda g: g * x.data, lambda g: g * x.data))
    backward(y)
    x.grad -> 6.0

A node has a value (`data`), the nodes it was made from (`parents`), and for each of those a rule: a
function that is called with the gradient of the node and returns the gradient of that parent. In
the example both parents are x, and each of the two rules hands 1 * 3 to it. backward(root), root
being one number (of shape (), (1,), (1, 1) ...):
1. adds the slope of root for each leaf (a node without parents) below root to the `grad` of the
   leaf: what is in it already stays, so a second call doubles it;
2. leaves in the `grad` of every other node its slope by this call, and nothing of an earlier one;
3. undoes broadcasting. In an operation numpy repeats a parent of shape (3,) or (2, 1) or () until
   it fits the others, and the rule returns a gradient of the shape of the *node*, (2, 3), say (one
   that takes a shape apart, as reshape's, may return the parent's already). The parent's gradient
   is the sum over the repetitions, and has the parent's shape. If the rule returns
   [[1, 2, 3], [4, 5, 6]], a parent of shape (3,) gets [5, 7, 9], one of (2, 1) gets [[6], [15]],
   one of () gets 21;
4. calls every rule once, with a gradient of the node's shape, however many paths lead through it;
   a node can have 70,000 of them;
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
    import random
    from itertools import permutations

    import numpy as np
    import torch
    from subject import same, shared

    nodes = []  # of a graph, in the order in which they are made
    used = []  # the rules that were called

    def node(twin, *parents_and_rules):
        """A node of torch's numbers, whose rules look at what they are given."""

        def watched(rule):
            def call(g):
                used.append(call)
                assert np.shape(g) == twin.shape, (
                    f"rule 4: a rule of a node of shape {(*twin.shape,)} is called with a "
                    f"gradient of shape {np.shape(g)}"
                )
                return rule(np.asarray(g))

            return call

        made = answer.own["Node"](
            np.array(twin.detach(), order="F"),
            parents_and_rules[::2],
            map(watched, parents_and_rules[1::2]),
        )
        made.twin = twin
        twin.retain_grad()
        nodes.append(made)
        return made

    def leaf(values):
        return node(torch.tensor(values, dtype=torch.float64, requires_grad=True))

    def mul(a, b):
        return node(a.twin * b.twin, a, lambda g: g * b.data, b, lambda g: g * a.data)

    def total(a):
        return node(a.twin.sum().view([1] * 4), a, lambda g: np.broadcast_to(g.sum(), a.data.shape))

    def scaled(k):
        """A rule that returns one array for both parents."""
        kept = {}
        return lambda g: kept.setdefault(g.tobytes(), k * g)

    def judge(name, *roots):
        """Each root twice; torch says what is right."""
        for times, root in enumerate(2 * roots, 1):
            case = f"{name}, call {times}"
            used.clear()
            for made in nodes:
                if made.parents:
                    made.grad = made.grad + np.inf  # left by another call
                    made.twin.grad = None
            root.twin.backward(retain_graph=True)
            try:
                answer.backward(root)
            except RecursionError:
                raise AssertionError(f"rule 5: {case}: too many calls in calls") from None
            below = sum(len(made.parents) for made in nodes if made.twin.grad is not None)
            assert len({*used}) == len(used) >= below, (
                f"rule 4: {case}: {len(used)} calls of {len({*used})} rules; there are {below}"
            )
            for i, made in enumerate(nodes):
                right = made.twin.grad
                if right is not None:
                    same(np.asarray(made.grad), right.numpy(), f"{case}: node {i}'s gradient")
            for a, b in permutations(nodes[:9], 2):
                apart = not shared(a.grad, [b.grad, b.data])
                assert apart, f"rule 6: {case}: two nodes share the memory of a gradient"
        nodes.clear()

    for shape in ((), (1,), (1, 1)):
        x = leaf(np.full(shape, 3.0))
        judge(f"x x at 3, x of shape {shape}", mul(x, x))
        judge(f"a leaf of shape {shape}", leaf(np.ones(shape)))
    x = leaf(1.0)
    h = mul(x, leaf(2.0))
    f = mul(h, leaf(5.0))
    judge("x, 2, h = 2 x, 5, f = 5 h, h f, f h", mul(h, f), mul(f, h), h)

    rng = np.random.default_rng(1)
    shapes = [(), (1,), (3,), (1, 1), (300, 1), (1, 3), (300, 3), (2, 1, 3), (2, 300, 1)]
    for first, second in [*permutations(shapes, 2), ((0, 3), (3,))]:
        b = leaf(rng.normal(size=second))
        y = mul(leaf(rng.normal(size=first)), mul(b, b))
        judge(f"b of shape {second}, a of {first}, b b, a b b, its sum", total(y))

    dice = random.Random(12)
    for trial in range(12):
        leaf([1.0, 2.0, 3.0])
        leaf([1.0, 2.0, 3.0])
        for _ in range(12):
            a, b = dice.choices(nodes, k=2)
            k = dice.choice([-2.0, 0.0, 3.0])
            rule = scaled(k)
            node(k * (a.twin + b.twin), a, rule, b, rule)
        judge(f"random graph {trial}", *[total(made) for made in nodes[-2:]])

    y = leaf(1.0)
    for _ in range(5000):
        y = node(2 - y.twin, y, lambda g: -g)
    del nodes[1:-1]
    judge("the first and the last of a chain of 5,000 operations", y)
    x = leaf(1.0)
    h = mul(x, leaf(2.0))
    f = mul(h, leaf(3.0))
    uses = 65_536 * (h, lambda g: g) + (f, lambda g: g)
    y = node(65_536 * h.twin + f.twin, *uses)
    judge("x, 2, h = 2 x, 3, f = 3 h, the sum of 65,536 h and f", y)
