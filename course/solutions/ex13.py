"""Exercise 13: the reference, and answers that the oracle must refuse."""

from operator import attrgetter


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


def ties_parameters_only(model, device):
    names = names_of(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    model.to_empty(device=device)
    tie(model, [group for group in names if group[0] in parameters])
    reset(model)


def initializes_first(model, device):
    """Values for tensors that have no memory yet: nothing happens, and nothing is said."""
    names = names_of(model)
    reset(model)
    model.to_empty(device=device)
    tie(model, names)


def on_the_cpu(model, device):
    materialize(model, "cpu")


def in_float32(model, device):
    """Each tensor becomes the default kind."""
    model.float()
    materialize(model, device)


WRONG = {  # name -> what of the reference it replaces
    "unties the shared table": dict(materialize=unties),
    "ties parameters, not buffers": dict(materialize=ties_parameters_only),
    "initializes before to_empty": dict(materialize=initializes_first),
    "forgets the device": dict(materialize=on_the_cpu),
    "makes all float32": dict(materialize=in_float32),
}
