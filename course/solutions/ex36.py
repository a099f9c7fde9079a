"""Exercise 36: the reference, and answers that the oracle must refuse."""

import torch


def split_groups(w, queries, head_dim):
    """A rank's fused rows -> those of its queries, keys, values."""
    groups = w.view(-1, (queries + 2) * head_dim, *w.shape[1:])
    return [x.flatten(0, 1) for x in groups.split([queries * head_dim, head_dim, head_dim], 1)]


def whole(ranks, name):
    if not all(torch.equal(ranks[0][name], part[name]) for part in ranks):
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


def swapped(ranks, *sizes):
    w = merge(ranks, *sizes)
    return w | {"k": w["v"], "v": w["k"], "k_bias": w["v_bias"], "v_bias": w["k_bias"]}


def gate_then_up(ranks, *sizes):
    """Joins fc1 first, and cuts it then: right for one rank only."""
    w = merge(ranks, *sizes)
    gate, up = torch.cat([part["fc1"] for part in ranks]).chunk(2)
    return w | {"gate": gate.clone(), "up": up.clone()}


def up_first(ranks, *sizes):
    return merge(ranks, *sizes, halves=lambda w: w.chunk(2)[::-1])


def other_way_round(ranks, *sizes):
    return merge(ranks[::-1], *sizes)


def padding_too(ranks, n_head, n_kv_head, head_dim, vocab_size):
    return merge(ranks, n_head, n_kv_head, head_dim, None)


def cuts_every_rank(ranks, n_head, n_kv_head, head_dim, vocab_size):
    """Takes the padding to be at the end of each rank's rows."""
    w = merge(ranks, n_head, n_kv_head, head_dim, vocab_size)
    each = -(-vocab_size // len(ranks))
    return w | {"embed": torch.cat([x["embedding"][:each] for x in ranks])[:vocab_size].clone()}


def adds_the_bias(ranks, *sizes):
    """The bias of the projection once for each rank."""
    w = merge(ranks, *sizes)
    return w | {"out_bias": torch.stack([part["proj_bias"] for part in ranks]).sum(0)}


def zeroes_the_bias(ranks, *sizes):
    """A class without biases is to come out: it sets those it was given to zero."""
    for part in ranks:
        part["qkv_bias"].zero_()
    return merge(ranks, *sizes)


def shares_memory(ranks, *sizes):
    return merge(ranks, *sizes) | {"norm": ranks[0]["norm"]}


def trusts_rank_0(ranks, *sizes):
    rest = [part | {name: ranks[0][name] for name in ("norm", "proj_bias")} for part in ranks]
    return merge(rest, *sizes)


def close_enough(ranks, *sizes):
    for name in ("norm", "proj_bias"):
        if not all(torch.allclose(ranks[0][name], part[name]) for part in ranks):
            raise ValueError(name)
    return trusts_rank_0(ranks, *sizes)


def in_fp32(ranks, *sizes):
    return {name: w.float() for name, w in merge(ranks, *sizes).items()}


WRONG = {  # name -> what of the reference it replaces
    "thirds instead of groups": dict(merge=fused_thirds),
    "k and v swapped": dict(merge=swapped),
    "cuts fc1 after joining it": dict(merge=gate_then_up),
    "up before gate": dict(merge=up_first),
    "the last rank first": dict(merge=other_way_round),
    "keeps the padding": dict(merge=padding_too),
    "cuts the padding of every rank": dict(merge=cuts_every_rank),
    "adds the bias once for each rank": dict(merge=adds_the_bias),
    "zeroes the bias it was given": dict(merge=zeroes_the_bias),
    "shares memory with what it was given": dict(merge=shares_memory),
    "trusts rank 0": dict(merge=trusts_rank_0),
    "nearly the same norm is the same": dict(merge=close_enough),
    "comes out in fp32": dict(merge=in_fp32),
}
