"""Exercise 5: the reference, and answers that the oracle must refuse."""

import numpy as np
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


def block(x, w, heads, attention, turn):
    y = norm(x)
    T = x.size(1)
    q, k, v = ((y @ w[name].T).unflatten(-1, (heads, -1)) for name in ("q", "k", "v"))
    q = turn(q).transpose(1, 2)
    k = turn(k).transpose(1, 2)
    v = v.transpose(1, 2)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    y = attention(q, k, v, mask)  # (B, heads, T, D / heads)
    x = x + y.transpose(1, 2).flatten(-2) @ w["out"].T
    return x + torch.relu(norm(x) @ w["up"].T).square() @ w["down"].T


def gpt(ids, weights, heads, attention, turn):
    x = weights["embed"][ids]
    for i in range(sum(name.endswith(".q") for name in weights)):
        own = {n: weights[f"{i}.{n}"] for n in ("q", "k", "v", "out", "up", "down")}
        x = block(x, own, heads, attention, turn)
    return norm(x)


def distribution(scores, temperature, top_p):
    scores = np.array(scores, dtype=np.float64)
    if temperature == 0:
        return np.eye(len(scores))[scores.argmax()]
    powers = np.exp((scores - scores.max()) / temperature)
    p = powers / powers.sum()
    order = np.argsort(-p, kind="stable")  # of equal ones, the smaller number first
    before = np.cumsum(p[order]) - p[order]
    if top_p < 1:
        p[order[before >= top_p]] = 0
    return p / p.sum()


def generate(model, prompt, n, length, temperature, top_p, rng):
    whole = list(prompt)
    for _ in range(n):
        scores = model(whole[-length:])[-1]
        p = np.asarray(distribution(scores, temperature, top_p))
        above = np.flatnonzero(np.cumsum(p) > rng.random())
        whole.append(int(above[0]) if len(above) else int(np.flatnonzero(p)[-1]))
    return whole[len(prompt) :]


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "initial: bounds that are the size": edit("(3 / width)", "(1 / width)"),
    "initial: uniform where it should be normal": edit(
        "0.8 * torch.randn(vocabulary, width, generator=generator)",
        "uniform(0.8 * width**0.5, vocabulary, width)",
    ),
    "initial: torch's own generator": edit(
        ".uniform_(-bound, bound, generator=generator)", ".uniform_(-bound, bound)"
    ),
    "initial: q, k and v are one": edit(
        "uniform(1.0, width, width)", 'weights.get(f"{i}.q", uniform(1.0, width, width))'
    ),
    "initial: one block's numbers for all": edit(
        'weights[f"{i}.{name}"] = uniform(1.0, width, width)',
        'weights[f"{i}.{name}"] = weights[f"0.{name}"] if i else uniform(1.0, width, width)',
    ),
    "block: no norm before attention": edit("y = norm(x)\n", "y = x\n"),
    "block: no norm before the MLP": edit("torch.relu(norm(x) @", "torch.relu(x @"),
    "block: the norm after the addition": edit(
        "return x + torch.relu(norm(x)", "x = norm(x)\n    return x + torch.relu(x"
    ),
    "block: a norm that takes the mean away": edit(
        "    return x * torch.rsqrt(",
        "    x = x - x.mean(-1, keepdim=True)\n    return x * torch.rsqrt(",
    ),
    "block: attention and MLP side by side": edit(
        "    x = x + y.transpose(1, 2)",
        "    z = x\n    x = x + y.transpose(1, 2)",
        "relu(norm(x)",
        "relu(norm(z)",
    ),
    "block: adds in place": edit("    x = x + y.transpose", "    x += y.transpose"),
    "block: turns v too": edit("v.transpose(1, 2)\n", "turn(v).transpose(1, 2)\n"),
    "block: heads interleaved": edit(
        "(y @ w[name].T).unflatten(-1, (heads, -1))",
        "(y @ w[name].T).unflatten(-1, (-1, heads)).transpose(-2, -1)",
    ),
    "block: heads not put back": edit("y.transpose(1, 2).flatten(-2)", "y.reshape(x.shape)"),
    "block: may not look at itself": edit(".tril()", ".tril(-1)"),
    "gpt: the last block is left out": edit("range(sum(", "range(-1 + sum("),
    "gpt: at most nine blocks": edit('.q") for', '.q") and name < "9" and name[:2] != "10" for'),
    "gpt: no gradient reaches the embedding": edit(
        'weights["embed"][ids]', 'weights["embed"].detach()[ids]'
    ),
    "overflows": edit("(scores - scores.max())", "scores"),
    "cold is greedy": edit("temperature == 0", "temperature < 0.01"),
    "in the scores' own dtype": edit(
        ", dtype=np.float64)", ")", "np.eye(len(scores))", "np.eye(len(scores), dtype=scores.dtype)"
    ),
    "of the likeliest, takes the last": edit(
        "scores.argmax()", "len(scores) - 1 - scores[::-1].argmax()"
    ),
    "of equal ones, keeps the larger number": edit(
        'np.argsort(-p, kind="stable")', 'np.argsort(p, kind="stable")[::-1]'
    ),
    "cuts what exceeds top_p": edit(
        "before >= top_p", "(before + p[order] > top_p) & (before > 0)"
    ),
    "cuts nothing near 1": edit("if top_p < 1:", "if top_p < 0.996:"),
    "cuts before the temperature": edit(
        "order = np.argsort(-p",
        "raw = np.exp(scores - scores.max())\n    order = np.argsort(-p",
        "np.cumsum(p[order]) - p[order]",
        "(np.cumsum(raw[order]) - raw[order]) / raw.sum()",
    ),
    "changes the scores": edit(
        "np.array(scores, dtype=np.float64)",
        "np.asarray(scores, dtype=np.float64)\n    scores -= scores.max()",
    ),
    "shows the model everything": edit("whole[-length:]", "whole"),
    "temperature 0 draws nothing": edit("rng.random())", "(rng.random() if temperature else 0.5))"),
    "falls back to the last byte of all": edit("int(np.flatnonzero(p)[-1])", "len(p) - 1"),
    "sums in order of probability": edit(
        "above = np.flatnonzero(np.cumsum(p) >",
        "sorted_ = np.argsort(-p, kind='stable')\n        above = sorted_[np.cumsum(p[sorted_]) >",
        "rng.random())",
        "rng.random()]",
    ),
    "runs through the prompt": edit(
        "    for _ in range(n):",
        "    for i in range(1, len(prompt)):\n        model(prompt[:i][-length:])\n"
        "    for _ in range(n):",
    ),
}
