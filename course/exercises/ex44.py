"""Exercise 44: put together a checkpoint that was trained on several devices.

    merge(ranks, n_head, n_kv_head, head_dim, vocab_size) -> {name: tensor}

Megatron cuts each layer over N devices, and each saves its part: ranks[r] is a dictionary of rank
r, here of a model with one layer. In a rank's part, with G = n_kv_head / N groups of its own:

    embedding         (padded / N, C)   its rows of the table; the padding is after the last token
    qkv, qkv_bias     its groups, one after another. A group: the rows of the queries that share a
                      key (n_head / n_kv_head heads), of that key, of its value: head_dim a head
    proj              (C, n_head / N * head_dim): its columns, for its own heads
    proj_bias, norm   (C,): whole, the same on every rank
    fc1               (2 * hidden / N, C): its rows of the gate, then its rows of the up matrix
    fc2               (C, hidden / N): its columns

The result, as a class of transformers wants it (all rows of weights, (out, in)):

    embed (vocab_size, C) · q (n_head * head_dim, C) · k, v (n_kv_head * head_dim, C) · q_bias,
    k_bias, v_bias · out (C, n_head * head_dim) · out_bias, norm (C,) · gate, up (hidden, C) ·
    down (C, hidden)

Heads, groups and tokens stay in their order: rank 0 has the first ones. Dtypes stay, each its own
(norms are often float32 beside bfloat16 weights). What was given
is not changed, and the result shares no memory with it. If the ranks do not have the same proj_bias
or norm, to the bit, one of the files is from another step: a ValueError that names the tensor.
"""

from torch import Tensor


def merge(
    ranks: list[dict[str, Tensor]], n_head: int, n_kv_head: int, head_dim: int, vocab_size: int
) -> dict[str, Tensor]:
    raise NotImplementedError("write merge, then: python course/check.py 44")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(36)

    def attention(x, parts, H, G, D):
        """What the ranks compute together: each its own heads, and the sum of what they give."""
        total = parts[0]["proj_bias"]
        for part in parts:
            groups = (x @ part["qkv"].T + part["qkv_bias"]).view(len(x), -1, H // G + 2, D)
            outs = []
            for group in groups.unbind(1):  # (T, H / G + 2, D)
                *queries, key, value = group.unbind(1)
                outs += [(query @ key.T / D**0.5).softmax(-1) @ value for query in queries]
            total = total + torch.cat(outs, 1) @ part["proj"].T
        return total

    def attention_of(x, w, H, G, D):
        """The same from the merged weights."""
        q, k, v = (x @ w[name].T + w[f"{name}_bias"] for name in "qkv")
        outs = []
        for head in range(H):
            own, shared = (slice(i * D, (i + 1) * D) for i in (head, head // (H // G)))
            outs.append((q[:, own] @ k[:, shared].T / D**0.5).softmax(-1) @ v[:, shared])
        return torch.cat(outs, 1) @ w["out"].T + w["out_bias"]

    def mlp(x, parts):
        total = 0
        for part in parts:
            gate, up = (x @ part["fc1"].T).chunk(2, 1)
            total = total + (F.silu(gate) * up) @ part["fc2"].T
        return total

    cases = [(1, 4, 2, 3, 7, 8), (2, 8, 2, 2, 11, 16), (2, 4, 4, 3, 9, 10), (4, 8, 4, 2, 13, 16)]
    cases += [(3, 12, 6, 1, 20, 30), (2, 6, 6, 2, 12, 12), (4, 8, 8, 2, 1, 64)]
    for N, H, G, D, vocab, padded in cases:
        case = f"{N} ranks, {H} heads in {G} groups of {D}, {vocab} of {padded} tokens"
        C = 6
        hidden = 4 * N
        T = 5

        def random(*size):
            return torch.randn(size, generator=generator, dtype=torch.float64)

        same = dict(proj_bias=random(C), norm=random(C))
        sizes = dict(embedding=(padded // N, C), qkv=((H + 2 * G) // N * D, C))
        sizes |= dict(qkv_bias=((H + 2 * G) // N * D,), proj=(C, H // N * D))
        sizes |= dict(fc1=(2 * hidden // N, C), fc2=(C, hidden // N))
        parts = [
            {name: random(*size) for name, size in sizes.items()}
            | {name: w.clone() for name, w in same.items()}
            for _ in range(N)
        ]
        given = [{name: w.clone() for name, w in part.items()} for part in parts]

        def unchanged(when, parts=parts, given=given, case=case):
            for rank, (part, before) in enumerate(zip(parts, given)):
                for name, w in before.items():
                    here = name in part and torch.equal(part[name], w)
                    assert here, f"{case}: {when}, {name} of rank {rank} is not what it was"

        w = answer.merge(parts, H, G, D, vocab)
        unchanged("after the merge")
        want = dict(embed=(vocab, C), q=(H * D, C), k=(G * D, C), v=(G * D, C), q_bias=(H * D,))
        want |= dict(k_bias=(G * D,), v_bias=(G * D,), out=(C, H * D), out_bias=(C,), norm=(C,))
        want |= dict(gate=(hidden, C), up=(hidden, C), down=(C, hidden))
        shapes = {name: tuple(tensor.shape) for name, tensor in w.items()}
        wrong = {name for name in want.keys() | shapes.keys() if shapes.get(name) != want.get(name)}
        assert not wrong, f"{case}: " + ", ".join(
            f"{n} is {shapes.get(n)}, not {want.get(n)}" for n in sorted(wrong)
        )
        for name, tensor in w.items():
            assert tensor.dtype == torch.float64, f"{case}: {name} has become {tensor.dtype}"
        table = torch.cat([part["embedding"] for part in given])
        rows = (w["embed"] != table[:vocab]).any(1).nonzero().flatten().tolist()
        assert not rows, f"{case}: the rows {rows[:9]} of the table are those of other tokens"
        x = random(T, C)
        far = (attention_of(x, w, H, G, D) - attention(x, given, H, G, D)).abs().max()
        assert far < 1e-9, f"{case}: attention differs by {far:.2g}"
        for at in range(H):  # and head by head, so that no two mistakes make up for each other
            only = w | {"out": torch.zeros_like(w["out"])}
            own = slice(at * D, (at + 1) * D)
            only["out"][:, own] = w["out"][:, own]
            alone = [part | {"proj": torch.zeros_like(part["proj"])} for part in given]
            rank, place = divmod(at, H // N)
            there = slice(place * D, (place + 1) * D)
            alone[rank]["proj"][:, there] = given[rank]["proj"][:, there]
            far = (attention_of(x, only, H, G, D) - attention(x, alone, H, G, D)).abs().max()
            assert far < 1e-9, f"{case}: head {at} alone differs by {far:.2g}"
        ours = (F.silu(x @ w["gate"].T) * (x @ w["up"].T)) @ w["down"].T
        far = (ours - mlp(x, given)).abs().max()
        assert far < 1e-9, f"{case}: the MLP differs by {far:.2g}"
        for name in ("norm", "out_bias"):
            right = same["proj_bias" if name == "out_bias" else name]
            assert torch.equal(w[name], right), f"{case}: {name} is not what every rank has"
        for tensor in w.values():
            tensor.fill_(7.0)
        unchanged("after writing into the result")

        for name in same if N > 1 else ():
            for rank, zeros in [(rank, False) for rank in range(N)] + [(N - 1, True)]:
                other = [part | {name: part[name].clone()} for part in given]
                if zeros:
                    for part in other:
                        part[name][C - 1] = 0.0
                    other[rank][name][C - 1] = -0.0  # an equal number, and other bits
                else:
                    other[rank][name][C - 1] += 1e-12
                try:
                    answer.merge(other, H, G, D, vocab)
                except ValueError as error:
                    assert name in str(error), f"the error does not name {name}: {error}"
                else:
                    raise AssertionError(f"{case}: rank {rank} has another {name}, and no error")
    half = [
        {name: w.float() if name == "norm" else w.bfloat16() for name, w in part.items()}
        for part in given
    ]
    for name, w in answer.merge(half, H, G, D, vocab).items():
        right = torch.float32 if name == "norm" else torch.bfloat16
        assert w.dtype == right, f"{right} went in, {name} comes out as {w.dtype}"
