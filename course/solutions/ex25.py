"""Exercise 25: the reference, and answers that the oracle must refuse."""


def partition(parameters, world):
    owner, load = {}, [0] * world
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


def in_the_order_of_a_set(parameters, world):
    """The order of a set is that of the hashes."""
    order = list(set(parameters))
    owner = dict(zip((storage for storage, _ in order), partition(order, world)))
    return [owner[storage] for storage, _ in parameters]


def loses_the_rest(parameters, world):
    """Consecutive parts of len // world parameters; those that are left have no rank."""
    names = list(dict(parameters))
    part = max(1, len(names) // world)
    return [names.index(storage) // part for storage, _ in parameters]


def splits_tied_ones(parameters, world):
    load, owner = [0] * world, []
    for _, size in parameters:
        owner.append(load.index(min(load)))
        load[owner[-1]] += size
    return owner


def counts_tied_ones_twice(parameters, world):
    owner, load = {}, [0] * world
    for storage, size in parameters:
        owner.setdefault(storage, load.index(min(load)))
        load[owner[storage]] += size
    return [owner[storage] for storage, _ in parameters]


WRONG = {  # name -> what of the reference it replaces
    "round-robin by count": dict(partition=round_robin),
    "by hash": dict(partition=by_hash),
    "in the order of a set": dict(partition=in_the_order_of_a_set),
    "loses the last ones": dict(partition=loses_the_rest),
    "splits tied parameters": dict(partition=splits_tied_ones),
    "counts tied parameters twice": dict(partition=counts_tied_ones_twice),
}
