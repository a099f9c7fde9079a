"""Exercise 23: the reference, and answers that the oracle must refuse."""

from operator import attrgetter

from edits import edits


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


edit = edits(__file__)
NAMES = "    names = names_of(model)\n"
WRONG = {  # name -> what of the reference it replaces
    "unties the shared table": edit("    tie(model, names)\n", ""),
    "ties parameters, not buffers": edit(", model.named_buffers)", ",)"),
    "initializes before to_empty": edit(
        "    reset(model)\n", "", NAMES, NAMES + "    reset(model)\n"
    ),
    "forgets the device": edit("device=device", 'device="cpu"'),
    "asks the last module first": edit("in model.modules()", "in reversed([*model.modules()])"),
    "trains what was frozen": edit(NAMES, "    model.requires_grad_()\n" + NAMES),
    "makes all float32": edit(NAMES, "    model.float()\n" + NAMES),
}
