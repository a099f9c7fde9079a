"""Exercise 5: the reference, and answers that the oracle must refuse."""

import torch
from edits import edits


def initial(vocabulary, width, blocks, generator):
    def uniform(size, rows, columns):
        bound = size * (3 / width) ** 0.5
        return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)

    weights = {
        "embed": 0.8 * torch.randn(vocabulary, width, generator=generator),
        "head": 0.001 * torch.randn(vocabulary, width, generator=generator),
    }
    for i in range(blocks):
        for name in ("q", "k", "v"):
            weights[f"{i}.{name}"] = uniform(1.0, width, width)
        weights[f"{i}.up"] = uniform(0.4, 4 * width, width)
        weights[f"{i}.out"] = torch.zeros(width, width)
        weights[f"{i}.down"] = torch.zeros(width, 4 * width)
    return weights


def norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def block(x, w, i, heads, attention, turn):
    y = norm(x)
    T = x.size(1)
    q, k, v = ((y @ w[f"{i}.{name}"].T).unflatten(-1, (heads, -1)) for name in ("q", "k", "v"))
    q = turn(q).transpose(1, 2)
    k = turn(k).transpose(1, 2)
    v = v.transpose(1, 2)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    y = attention(q, k, v, mask)  # (B, heads, T, D / heads)
    x = x + y.transpose(1, 2).flatten(-2) @ w[f"{i}.out"].T
    return x + torch.relu(norm(x) @ w[f"{i}.up"].T).square() @ w[f"{i}.down"].T


def gpt(ids, weights, heads, attention, turn):
    x = weights["embed"][ids]
    for i in range(sum(name.endswith(".q") for name in weights)):
        x = block(x, weights, i, heads, attention, turn)
    return norm(x)


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "initial: bounds that are the size": edit("(3 / width)", "(1 / width)"),
    "initial: uniform where it should be normal": edit(
        "0.8 * torch.randn(vocabulary, width, generator=generator)",
        "uniform(0.8 * width**0.5, vocabulary, width)",
    ),
    "initial: q, k and v are one draw": edit(
        "        for name in",
        "        one = uniform(1.0, width, width)\n        for name in",
        "] = uniform(1.0, width, width)",
        "] = one.clone()",
    ),
    "no norm before the MLP": edit("torch.relu(norm(x) @", "torch.relu(x @"),
    "attention and MLP side by side": edit(
        "x = x + y", "z = x\n    x = x + y", "relu(norm(x)", "relu(norm(z)"
    ),
    "heads not put back": edit("y.transpose(1, 2).flatten(-2)", "y.reshape(x.shape)"),
    "may not look at itself": edit(".tril()", ".tril(-1)"),
    "at most nine blocks": edit('.q") for', '.q") and name[1] == "." for'),
    "no gradient reaches the embedding": edit(
        'weights["embed"][ids]', 'weights["embed"][ids].detach()'
    ),
}
