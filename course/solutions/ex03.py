"""Exercise 3: the reference, and answers that the oracle must refuse."""

import sys

import numpy as np


def sorted_nodes(root):
    """Each node before the nodes it was made from, without calls within calls."""
    waits = {root: 0}  # node -> uses below root that have not been placed yet
    found = [root]
    for node in found:
        for parent in node.parents:
            if parent not in waits:
                waits[parent] = 0
                found.append(parent)
            waits[parent] += 1
    order = [root]
    for node in order:
        for parent in node.parents:
            waits[parent] -= 1
            if waits[parent] == 0:
                order.append(parent)
    return order


def unbroadcast(g, shape):
    while g.ndim > len(shape):
        g = g.sum(0)
    for i, n in enumerate(shape):
        if n == 1:
            g = g.sum(i, keepdims=True)
    return g


def walk(root, order=sorted_nodes, fit=unbroadcast, accumulate=True, fresh=True):
    nodes = order(root)
    for node in nodes:
        if node.parents and fresh:
            node.grad = np.zeros_like(node.data)
    root.grad = root.grad + 1.0
    for node in nodes:
        for parent, rule in zip(node.parents, node.rules):
            g = fit(rule(node.grad), parent.data.shape)
            parent.grad = parent.grad + g if accumulate else g


def backward(root):
    walk(root)


def breadth_first(root):
    order = [root]
    for node in order:
        order += [parent for parent in node.parents if parent not in order]
    return order


def recursive(root):
    order = []
    seen = set()

    def visit(node):
        if node not in seen:
            seen.add(node)
            for parent in node.parents:
                visit(parent)
            order.append(node)

    visit(root)
    return order[::-1]


def shares_memory(root):
    """Where a rule hands on what it got, two nodes get one array."""
    walk(root)
    for node in sorted_nodes(root):
        for parent in node.parents:
            if np.array_equal(parent.grad, node.grad):
                parent.grad = node.grad


def raises_the_limit(root):
    sys.setrecursionlimit(50_000)
    walk(root)


WRONG = {  # name -> what of the reference it replaces
    "in the order met": dict(backward=lambda root: walk(root, order=breadth_first)),
    "= for +=": dict(backward=lambda root: walk(root, accumulate=False)),
    "passes the inner gradients of the last call on": dict(
        backward=lambda root: walk(root, fresh=False)
    ),
    "one array for two gradients": dict(backward=shares_memory),
    "raises the recursion limit": dict(backward=raises_the_limit),
    "calls itself for each parent": dict(backward=lambda root: walk(root, order=recursive)),
}

EQUIVALENT = {
    "waits = {root: 0}  # node -> uses below root that have not been placed yet: `0` -> `1`": (
        "root is nobody's parent, so its count is never read"
    )
}
