"""Exercise 13: the reference, and answers that the oracle must refuse."""


def reset(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def put(model, name, p):
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, p)


def materialize(model, device):
    names = {}  # parameter on meta -> its names
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    model.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            put(model, name, model.get_parameter(first))
    reset(model)


def unties(model, device):
    model.to_empty(device=device)
    reset(model)


def forgets_buffers(model, device):
    """Asks only the modules with parameters."""
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    model.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            put(model, name, model.get_parameter(first))
    for module in model.modules():
        if hasattr(module, "reset_parameters") and list(module.parameters(recurse=False)):
            module.reset_parameters()


def initializes_first(model, device):
    """Values for tensors that have no memory yet: nothing happens, and nothing is said."""
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    reset(model)
    model.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            put(model, name, model.get_parameter(first))


def ties_last(model, device):
    """Shares the tables after they have their values."""
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    unties(model, device)
    for first, *others in names.values():
        for name in others:
            put(model, name, model.get_parameter(first))


def equal_values(model, device):
    """Copies the values of a shared table instead of sharing it."""
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    materialize(model, device)
    for first, *others in names.values():
        for name in others:
            p = model.get_parameter(first)
            put(model, name, type(p)(p.detach().clone(), p.requires_grad))


WRONG = {  # name -> what of the reference it replaces
    "unties the shared table": dict(materialize=unties),
    "forgets the buffers": dict(materialize=forgets_buffers),
    "initializes before to_empty": dict(materialize=initializes_first),
    "ties after the values are drawn": dict(materialize=ties_last),
    "copies what should be shared": dict(materialize=equal_values),
}
