"""Exercise 42: decide which rank updates which parameter.

    partition([("embed", 900), ("q", 100), ("k", 100), ("embed", 900)], world=2) -> [0, 1, 1, 0]

Each entry is (storage, size): a parameter's memory, by name, and its number of elements. Entries of
the same storage are tied: one parameter that has two places in the model. The result has an owner
(0 .. world - 1) for every entry, in order.
1. Tied entries have one owner, and count once.
2. A rank's load is the sum of the sizes it owns. It differs from total / world by the size of the
   largest parameter at most.
3. Every rank calls partition for itself, in a process of its own, and all must get the same answer.
   Python hashes a str differently in every process, and keeps it at another address. So names are
   labels: other names that sort in the same order must get the same owners.
4. `parameters` stays as it is.
"""


def partition(parameters: list[tuple[str, int]], world: int) -> list[int]:
    raise NotImplementedError("write partition, then: python course/check.py 42")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random

    rng = random.Random(12)
    layers = [
        (f"layer {i}.{w}", n) for i in range(6) for w, n in (("q", 64), ("up", 256), ("b", 3))
    ]
    cases = {
        "one parameter, one rank": ([("w", 5)], 1),
        "fewer parameters than ranks": ([("a", 5), ("b", 7)], 4),
        "no parameter": ([], 3),
        "equal ones, not a multiple of the ranks": ([(f"w{i}", 10) for i in range(11)], 4),
        "equal ones, many ranks": ([(f"w{i}", 10) for i in range(64)], 16),
        "a network": ([("embed", 900), *layers, ("head", 900)], 4),
        "a network with tied tables": ([("embed", 900), *layers, ("embed", 900)], 4),
        "tied in three places": ([("a", 50), ("b", 20), ("a", 50), ("c", 30), ("a", 50)], 2),
        "tied in five places": ([("a", 100)] * 5 + [(f"w{i}", 10) for i in range(60)], 2),
        "big and small in turn": ([(f"w{i}", 100 if i % 2 else 1) for i in range(20)], 2),
        "growing": ([(f"w{i}", i) for i in range(1, 60)], 3),
        "growing, 8 ranks": ([(f"w{i}", i * i) for i in range(1, 60)], 8),
    }
    for i in range(12):
        sizes = [(f"w{k}", rng.choice((1, 10, 100, 1000))) for k in range(rng.randint(1, 40))]
        cases[f"random sizes {i}"] = (sizes + rng.sample(sizes, len(sizes) // 4), rng.randint(1, 9))
    for name, (parameters, world) in cases.items():
        owners = []
        order = sorted(dict(parameters))
        for process in ("", "a/", "b/", "c/", "d/", "e/", None):  # as if each had another hash
            given = list(parameters)
            for i in rng.sample(range(len(given)), len(given)):  # and other addresses
                storage, size = given[i]
                at = order.index(storage)
                other = f"{at:03d}" + at * 7 % 5 * "x" if process is None else process + storage
                given[i] = "".join(list(other)), size  # and other lengths
            before = list(given)
            owners.append(list(answer.partition(given, world)))
            assert given == before, f"{name}: the list of parameters was changed"
        owner = owners[0]
        for other in owners:
            differ = [i for i, (a, b) in enumerate(zip(other, owner)) if a != b] + [None]
            assert other == owner, (
                f"{name}: a process with other hashes or names gives parameter {differ[0]} "
                f"to another rank: {other}, not {owner}"
            )
        assert len(owner) == len(parameters), (
            f"{name}: {len(owner)} owners of {len(parameters)} parameters"
        )
        load = [0] * world
        place = {}
        for (storage, size), rank in zip(parameters, owner):
            assert rank in range(world), f"{name}: {storage} belongs to rank {rank} of {world}"
            if storage not in place:
                place[storage] = rank
                load[rank] += size
            assert place[storage] == rank, (
                f"{name}: {storage} is one parameter, with owners {place[storage]} and {rank}"
            )
        even = sum(load) / world
        largest = max((size for _, size in parameters), default=0)
        for rank, n in enumerate(load):
            assert abs(n - even) <= largest, (
                f"{name}: rank {rank} has {n}, {abs(n - even):.0f} from the even {even:.0f}, "
                f"and the largest parameter has {largest}"
            )
