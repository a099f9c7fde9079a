"""Exercise 12: the reference, and answers that the oracle must refuse."""

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
    order, seen = [], set()

    def visit(node):
        if node not in seen:
            seen.add(node)
            for parent in node.parents:
                visit(parent)
            order.append(node)

    visit(root)
    return order[::-1]


def each_path(root):
    def push(node, g):
        node.grad = node.grad + g
        for parent, rule in zip(node.parents, node.rules):
            push(parent, unbroadcast(rule(g), parent.data.shape))

    push(root, np.ones_like(root.data))


def if_for_while(g, shape):
    """Right for a bias in a batch, wrong where two dimensions are missing."""
    g = np.asarray(g)
    if g.ndim > len(shape):
        g = g.sum(0)
    for i, n in enumerate(shape):
        if n == 1:
            g = g.sum(i, keepdims=True)
    return g


def leading_only(g, shape):
    g = np.asarray(g)
    while g.ndim > len(shape):
        g = g.sum(0)
    return g


def inner_gradients_add_up(root):
    """The leaves are right; what the inner nodes had is added to their new gradients."""
    nodes = sorted_nodes(root)
    before = {node: node.grad for node in nodes if node.parents}
    walk(root)
    for node, grad in before.items():
        node.grad = node.grad + grad


def only_the_root_is_fresh(root):
    """The gradients that inner nodes have from the last call are passed on again."""
    root.grad = np.zeros_like(root.data) if root.parents else root.grad
    walk(root, fresh=False)


def mean_of_the_copies(g, shape):
    g, wide = np.asarray(g), np.size(g)
    return unbroadcast(g, shape) * (np.prod(shape) / wide if wide else 1)


def one_for_the_root(root):
    """A root that is a leaf loses what it had."""
    root.grad = np.zeros_like(root.data)
    walk(root)


WRONG = {  # name -> what of the reference it replaces
    "in the order met": dict(backward=lambda root: walk(root, order=breadth_first)),
    "= for +=": dict(backward=lambda root: walk(root, accumulate=False)),
    "no unbroadcast": dict(backward=lambda root: walk(root, fit=lambda g, shape: g)),
    "if for while": dict(backward=lambda root: walk(root, fit=if_for_while)),
    "sums leading dimensions only": dict(backward=lambda root: walk(root, fit=leading_only)),
    "takes the mean of the copies": dict(backward=lambda root: walk(root, fit=mean_of_the_copies)),
    "passes the inner gradients of the last call on": dict(
        backward=lambda root: walk(root, fresh=False)
    ),
    "clears the root's last gradient only": dict(backward=only_the_root_is_fresh),
    "inner gradients add up over calls": dict(backward=inner_gradients_add_up),
    "clears the gradient of a root that is a leaf": dict(backward=one_for_the_root),
    "follows each path": dict(backward=each_path),
    "calls itself for each parent": dict(backward=lambda root: walk(root, order=recursive)),
}

EQUIVALENT = {
    "waits = {root: 0}  # node -> uses below root that have not been placed yet: `0` -> `1`": (
        "root is nobody's parent, so its count is never read"
    )
}
