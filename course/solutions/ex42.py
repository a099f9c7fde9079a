"""Exercise 42: the reference, and answers that the oracle must refuse."""


def partition(parameters, world):
    owner = {}
    load = [0] * world
    for storage, size in parameters:
        if storage not in owner:
            owner[storage] = load.index(min(load))  # the first of the least loaded
            load[owner[storage]] += size
    return [owner[storage] for storage, _ in parameters]


def round_robin(parameters, world):
    """As many parameters for each, of whatever size."""
    names = list(dict(parameters))
    return [names.index(storage) % world for storage, _ in parameters]


def by_hash(parameters, world):
    return [hash(storage) % world for storage, _ in parameters]


def ties_by_identity(parameters, world):
    """`is` finds tied names only if they are the same object."""
    return splits_tied_ones([(id(storage), size) for storage, size in parameters], world)


def sorts_its_argument(parameters, world):
    given = [storage for storage, _ in parameters]
    parameters.sort()
    owner = dict(zip((storage for storage, _ in parameters), partition(parameters, world)))
    return [owner[storage] for storage in given]


def splits_tied_ones(parameters, world):
    load = [0] * world
    owner = []
    for _, size in parameters:
        owner.append(load.index(min(load)))
        load[owner[-1]] += size
    return owner


def counts_tied_ones_twice(parameters, world):
    owner = {}
    load = [0] * world
    for storage, size in parameters:
        owner.setdefault(storage, load.index(min(load)))
        load[owner[storage]] += size
    return [owner[storage] for storage, _ in parameters]


WRONG = {  # name -> what of the reference it replaces
    "round-robin by count": dict(partition=round_robin),
    "by hash": dict(partition=by_hash),
    "knows tied ones by their address": dict(partition=ties_by_identity),
    "sorts the list that it was given": dict(partition=sorts_its_argument),
    "splits tied parameters": dict(partition=splits_tied_ones),
    "counts tied parameters twice": dict(partition=counts_tied_ones_twice),
}

EQUIVALENT = {  # a change that changes nothing -> why
    "load = [0] * world: `0` -> `1`": "only differences of loads count"
}
