"""Exercise 3: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


class Node:
    def __init__(self, data, parents=(), rules=()):
        self.data = np.asarray(data, dtype=float)
        self.parents = tuple(parents)
        self.rules = tuple(rules)
        self.grad = np.zeros_like(self.data)


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
    g = np.asarray(g)
    while g.ndim > len(shape):
        g = g.sum(0)
    for i, n in enumerate(shape):
        if n == 1:
            g = g.sum(i, keepdims=True)
    return g


def backward(root):
    nodes = sorted_nodes(root)
    for node in nodes:
        if node.parents:
            node.grad = np.zeros_like(node.data)
    root.grad = root.grad + 1.0
    for node in nodes:
        for parent, rule in zip(node.parents, node.rules):
            g = unbroadcast(rule(node.grad), parent.data.shape)
            parent.grad = parent.grad + g


edit = edits(__file__)
RECURSIVE = """[]
    seen = set()

    def visit(node):
        if node not in seen:
            seen.add(node)
            for parent in node.parents:
                visit(parent)
            nodes.insert(0, node)

    visit(root)"""
PLACED = "waits[parent] -= 1\n            if waits[parent] == 0:"
ADD = "parent.grad + g"
MOVED = """
    import sys
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    nodes = sorted"""
WRONG = {  # name -> what of the reference it replaces
    "in the order met": edit(PLACED, "if parent not in order:"),
    "along each path": edit(PLACED, "if True:"),
    "= for +=": edit(ADD, "g"),
    "passes the inner gradients of the last call on": edit("if node.parents:", "if False:"),
    "forgets the leaves' gradients of the last call": edit("if node.parents:", "if True:"),
    "one array for two gradients": edit(ADD, "g if not parent.grad.any() else parent.grad + g"),
    "sums over new dimensions only": edit("if n == 1:", "if False:"),
    "calls itself for each parent": edit("sorted_nodes(root)\n    for", RECURSIVE + "\n    for"),
    "moves the limit for a while": edit(
        "\n    nodes = sorted", MOVED, ADD, ADD + "\n    sys.setrecursionlimit(limit)"
    ),
}
