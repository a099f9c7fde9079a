"""Exercise 13: the reference, and answers that the oracle must refuse."""

from operator import attrgetter

import torch
from torch import nn


def reset(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def names_of(model):
    """The names of each parameter and buffer: [["embed.weight", "head.weight"], ...]."""
    names = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, t in named(remove_duplicate=False):
            names.setdefault(t, []).append(name)
    return list(names.values())


def put(model, name, t):
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, t)


def tie(model, names):
    for first, *others in names:
        for name in others:
            put(model, name, attrgetter(first)(model))


def materialize(model, device):
    names = names_of(model)
    model.to_empty(device=device)
    tie(model, names)
    reset(model)


def unties(model, device):
    model.to_empty(device=device)
    reset(model)


def ties_pairs(model, device):
    """Of three that were one, only the first two are one again."""
    names = names_of(model)
    model.to_empty(device=device)
    tie(model, [group[:2] for group in names])
    reset(model)


def ties_neighbours_backwards(model, device):
    """Each becomes the one before it, from the first on: a chain, but with the old objects."""
    names = names_of(model)
    model.to_empty(device=device)
    old = {name: attrgetter(name)(model) for group in names for name in group}
    for group in names:
        for before, name in zip(group, group[1:]):
            put(model, name, old[before])
    reset(model)


def ties_parameters_only(model, device):
    names = names_of(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    model.to_empty(device=device)
    tie(model, [group for group in names if group[0] in parameters])
    reset(model)


def ties_by_shape(model, device):
    """Whatever has the same shape becomes one."""
    groups = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault((p.shape, p.requires_grad), []).append(name)
    model.to_empty(device=device)
    tie(model, groups.values())
    reset(model)


def forgets_buffers(model, device):
    """Asks only the modules with parameters."""
    names = names_of(model)
    model.to_empty(device=device)
    tie(model, names)
    for module in model.modules():
        if hasattr(module, "reset_parameters") and list(module.parameters(recurse=False)):
            module.reset_parameters()


def initializes_first(model, device):
    """Values for tensors that have no memory yet: nothing happens, and nothing is said."""
    names = names_of(model)
    reset(model)
    model.to_empty(device=device)
    tie(model, names)


def ties_last(model, device):
    """Shares the tables after they have their values."""
    names = names_of(model)
    unties(model, device)
    tie(model, names)


def equal_values(model, device):
    """Copies the values of a shared table instead of sharing it."""
    names = names_of(model)
    materialize(model, device)
    for first, *others in names:
        for name in others:
            t = attrgetter(first)(model)
            if isinstance(t, nn.Parameter):
                put(model, name, nn.Parameter(t.detach().clone(), t.requires_grad))


def thaws(model, device):
    """New parameters, which all want a gradient."""
    for group in names_of(model):
        t = attrgetter(group[0])(model)
        new = torch.empty_like(t, device=device)
        for name in group:
            put(model, name, nn.Parameter(new) if isinstance(t, nn.Parameter) else new)
    reset(model)


def saves_all_buffers(model, device):
    """Registers the buffers again, and so puts them into the state dict."""
    materialize(model, device)
    for module in model.modules():
        for name, t in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, t)


def once_per_name(model, device):
    """A module with two names is asked twice."""
    names = names_of(model)
    model.to_empty(device=device)
    tie(model, names)
    for _, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def another_model(model, device):
    """Fills a copy and hands its modules over."""
    from copy import deepcopy

    new = deepcopy(model)
    materialize(new, device)
    model._modules, model._parameters = new._modules, new._parameters


WRONG = {  # name -> what of the reference it replaces
    "unties the shared table": dict(materialize=unties),
    "ties pairs only": dict(materialize=ties_pairs),
    "gives each the old object of the one before": dict(materialize=ties_neighbours_backwards),
    "ties parameters, not buffers": dict(materialize=ties_parameters_only),
    "ties what has the same shape": dict(materialize=ties_by_shape),
    "forgets the buffers": dict(materialize=forgets_buffers),
    "initializes before to_empty": dict(materialize=initializes_first),
    "ties after the values are drawn": dict(materialize=ties_last),
    "copies what should be shared": dict(materialize=equal_values),
    "thaws what was frozen": dict(materialize=thaws),
    "saves all buffers": dict(materialize=saves_all_buffers),
    "asks a module once for each of its names": dict(materialize=once_per_name),
    "replaces the modules": dict(materialize=another_model),
}
