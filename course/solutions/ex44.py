"""Exercise 44: the reference, and answers that the oracle must refuse."""

import torch
from edits import edits


def split_groups(w, queries, head_dim):
    """A rank's fused rows -> those of its queries, keys, values."""
    groups = w.view(-1, (queries + 2) * head_dim, *w.shape[1:])
    return [x.flatten(0, 1) for x in groups.split([queries * head_dim, head_dim, head_dim], 1)]


def whole(ranks, name):
    bits = [part[name].view(torch.uint8) for part in ranks]  # 0.0 and -0.0 are equal numbers
    if not all(torch.equal(bits[0], other) for other in bits):
        raise ValueError(f"the ranks do not have the same {name}: are they of one step?")
    return ranks[0][name].clone()


def merge(ranks, n_head, n_kv_head, head_dim, vocab_size):
    def joined(parts, dim=0):
        return torch.cat(list(parts), dim)

    result = {}
    for end in ("", "_bias"):
        parts = zip(
            *(split_groups(part["qkv" + end], n_head // n_kv_head, head_dim) for part in ranks)
        )
        result |= {name + end: joined(part) for name, part in zip("qkv", parts)}
    result["embed"] = joined(part["embedding"] for part in ranks)[:vocab_size].clone()
    result["out"] = joined((part["proj"] for part in ranks), 1)
    result["down"] = joined((part["fc2"] for part in ranks), 1)
    result["gate"], result["up"] = map(joined, zip(*(part["fc1"].chunk(2) for part in ranks)))
    return result | {"out_bias": whole(ranks, "proj_bias"), "norm": whole(ranks, "norm")}


edit = edits(__file__)
CUT = """groups = w.view(-1, (queries + 2) * head_dim, *w.shape[1:])
    return [x.flatten(0, 1) for x in groups.split([queries * head_dim, head_dim, head_dim], 1)]"""
THIRDS = """groups = len(w) // (queries + 2)
    return w.split([groups * queries, groups, groups])"""
GATES = 'map(joined, zip(*(part["fc1"].chunk(2) for part in ranks)))'
WHOLE = '{"out_bias": whole(ranks, "proj_bias"), "norm": whole(ranks, "norm")}'
WRONG = {  # name -> what of the reference it replaces
    "thirds instead of groups": edit(CUT, THIRDS),
    "cuts fc1 after joining it": edit(GATES, 'joined(part["fc1"] for part in ranks).chunk(2)'),
    "shares memory with what it was given": edit(
        '"norm": whole(ranks, "norm")', '"norm": ranks[0]["norm"]'
    ),
    "trusts rank 0": edit("if not all(", "if False and all("),
    "one dtype for all": edit(
        "return result | " + WHOLE,
        f"result |= {WHOLE}\n"
        '    return {name: w.to(ranks[0]["qkv"].dtype) for name, w in result.items()}',
    ),
    "looks at the first and the last rank": edit("other in bits)", "other in bits[-1:])"),
    "equal numbers, other bits": edit("part[name].view(torch.uint8)", "part[name]"),
}
