"""Exercise 12: the reference, and answers that the oracle must refuse."""

import numpy as np


def parents_first(node, seen):
    if node not in seen:
        seen.add(node)
        for parent in node.parents:
            yield from parents_first(parent, seen)
        yield node


def sorted_nodes(root):
    return list(parents_first(root, set()))[::-1]


def unbroadcast(g, shape):
    g = np.asarray(g)
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


def each_path(root):
    def push(node, g):
        node.grad = node.grad + g
        for parent, rule in zip(node.parents, node.rules):
            push(parent, unbroadcast(rule(g), parent.data.shape))

    push(root, np.ones_like(root.data))


WRONG = {  # name -> what of the reference it replaces
    "in the order met": dict(backward=lambda root: walk(root, order=breadth_first)),
    "= for +=": dict(backward=lambda root: walk(root, accumulate=False)),
    "no unbroadcast": dict(backward=lambda root: walk(root, fit=lambda g, shape: g)),
    "keeps the inner gradients of the last call": dict(
        backward=lambda root: walk(root, fresh=False)
    ),
    "follows each path": dict(backward=each_path),
}
