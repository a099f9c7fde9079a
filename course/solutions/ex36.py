"""Exercise 36: the reference, and answers that the oracle must refuse."""

import torch


def split_groups(w, queries, head_dim):
    """A rank's fused rows -> those of its queries, keys, values."""
    groups = w.view(-1, (queries + 2) * head_dim, *w.shape[1:])
    return [x.flatten(0, 1) for x in groups.split([queries * head_dim, head_dim, head_dim], 1)]


def whole(ranks, name):
    bits = [part[name].view(torch.uint8) for part in ranks]  # 0.0 and -0.0 are equal numbers
    if not all(torch.equal(bits[0], other) for other in bits):
        raise ValueError(f"the ranks do not have the same {name}: are they of one step?")
    return ranks[0][name].clone()


def halves(w):
    return w.chunk(2)


def merge(ranks, n_head, n_kv_head, head_dim, vocab_size, split=split_groups, halves=halves):
    def joined(parts, dim=0):
        return torch.cat(list(parts), dim)

    result = {}
    for end in ("", "_bias"):
        parts = zip(*(split(part["qkv" + end], n_head // n_kv_head, head_dim) for part in ranks))
        result |= {name + end: joined(part) for name, part in zip("qkv", parts)}
    result["embed"] = joined(part["embedding"] for part in ranks)[:vocab_size].clone()
    result["out"] = joined((part["proj"] for part in ranks), 1)
    result["down"] = joined((part["fc2"] for part in ranks), 1)
    result["gate"], result["up"] = map(joined, zip(*(halves(part["fc1"]) for part in ranks)))
    return result | {"out_bias": whole(ranks, "proj_bias"), "norm": whole(ranks, "norm")}


def thirds(w, queries, head_dim):
    """All queries of a rank, then all its keys, then all its values."""
    groups = len(w) // (queries + 2) // head_dim
    return w.split([groups * queries * head_dim, groups * head_dim, groups * head_dim])


def fused_thirds(ranks, *sizes):
    return merge(ranks, *sizes, split=thirds)


def gate_then_up(ranks, *sizes):
    """Joins fc1 first, and cuts it then: right for one rank only."""
    w = merge(ranks, *sizes)
    gate, up = torch.cat([part["fc1"] for part in ranks]).chunk(2)
    return w | {"gate": gate.clone(), "up": up.clone()}


def shares_memory(ranks, *sizes):
    return merge(ranks, *sizes) | {"norm": ranks[0]["norm"]}


def trusts_rank_0(ranks, *sizes):
    rest = [part | {name: ranks[0][name] for name in ("norm", "proj_bias")} for part in ranks]
    return merge(rest, *sizes)


def as_the_others(ranks, *sizes):
    """One dtype for all."""
    return {name: w.to(ranks[0]["qkv"].dtype) for name, w in merge(ranks, *sizes).items()}


def first_and_last(ranks, *sizes):
    """Nobody looks at the ranks in the middle."""
    middle = [part | {n: ranks[0][n] for n in ("norm", "proj_bias")} for part in ranks[1:-1]]
    return merge([ranks[0], *middle, *ranks[1:][-1:]], *sizes)


def equal_numbers(ranks, *sizes):
    """0.0 is -0.0."""
    if not all(torch.equal(ranks[0][n], p[n]) for p in ranks for n in ("norm", "proj_bias")):
        return merge(ranks, *sizes)
    return trusts_rank_0(ranks, *sizes)


WRONG = {  # name -> what of the reference it replaces
    "thirds instead of groups": dict(merge=fused_thirds),
    "cuts fc1 after joining it": dict(merge=gate_then_up),
    "shares memory with what it was given": dict(merge=shares_memory),
    "trusts rank 0": dict(merge=trusts_rank_0),
    "one dtype for all": dict(merge=as_the_others),
    "looks at the first and the last rank": dict(merge=first_and_last),
    "equal numbers, other bits": dict(merge=equal_numbers),
}
