"""Ten ways to spoil a training run, for lesson 27 and its exercise, and what the runs leave behind.

`train([("healthy", 0), ("no_rope", 1)])` trains one model for each pair, all at the same time (the
first dimension of every weight is R, the run), and returns what was logged. The seed decides the
text, the initial weights, and where and when the fault strikes: which matrix, which head, at which
step. Matrices, heads and buckets take turns, so eight seeds in a row strike all of them.

Shapes: R runs, B rows, T positions, V symbols, C channels, H heads of D, S steps, E = S / 10 + 1.
"""

from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F

SICK = (
    "rate_spike",  # one step is taken at a rate many times too large
    "not_shuffled",  # the rows come in the order of their documents
    "no_rope",  # queries and keys are not rotated: the model knows no positions
    "stale_bucket",  # from some step on, one bucket of gradients is no longer refreshed
    "fp16_underflow",  # gradients pass through fp16, and the loss scale keeps falling
    "leak",  # validation rows are among the training rows
    "dead_head",  # a head's value and output weights started at zero, so both gradients are zero
    "doubled_rate",  # every step is taken at twice the configured rate
    "repeated_epoch",  # after some steps the same rows come again, in the same order
    "frozen_weight",  # one matrix was not given to the optimizer
)
KINDS = ("healthy", *SICK)
V = 24
T = 16
B = 8
C = 24
H = 3
HIDDEN = 48
VAL = 18
KINDS_OF_TEXT = 6
D = C // H
STEPS = 120
LR = 0.01
SHAPES = {
    "embed": (V, C), "q": (C, C), "k": (C, C), "v": (C, C), "out": (C, C),
    "up": (C, HIDDEN), "down": (HIDDEN, C), "head": (C, V),
}  # fmt: skip
BUCKETS = (("embed", "q", "k"), ("v", "out"), ("up", "down", "head"))


def text(n, rng):
    """-> rows (n, T + 1), and the kind of document of each (n,). A symbol follows from the one two
    before it, or is drawn at random from the favorites of its kind. How often also depends on the
    kind, so some kinds are easier to predict than others."""
    kind = rng.permutation(np.arange(n) % KINDS_OF_TEXT)
    rows = (rng.integers(0, 10, (n, T + 1)) + 4 * kind[:, None]) % V
    regular = rng.random((n, T + 1)) > 0.1 + 0.1 * kind[:, None]
    for t in range(2, T + 1):
        rows[:, t] = np.where(regular[:, t], (rows[:, t - 2] + 1) % V, rows[:, t])
    return rows, kind


def plan(kind: str, seed: int) -> dict:
    """What happens in a run: its rows in order, its initial weights, and its fault."""
    rng = np.random.default_rng([seed, 23])
    val, _ = text(VAL, rng)
    rows, document = text(STEPS * B, rng)
    weights = {}
    for name, (n_in, n_out) in SHAPES.items():
        std = 1.0 if name == "embed" else n_in**-0.5
        weights[name] = std * rng.normal(0, 1, (n_in, n_out)) * (0.1 if name == "head" else 1)
    at = int(rng.integers(STEPS // 4, 3 * STEPS // 4))
    p = dict(val=val, weights=weights, scale=np.ones(STEPS), fp16=np.zeros(STEPS), frozen=())
    p |= dict(rope=kind != "no_rope", stale=(), stale_from=at)
    if kind == "rate_spike":
        p["scale"][at] = 30
    if kind == "doubled_rate":
        p["scale"] *= 2
    if kind == "not_shuffled":
        rows = rows[np.argsort(document, kind="stable")]
    if kind == "repeated_epoch":
        rows = rows[np.arange(STEPS * B) % (B * (STEPS // 5 + seed % 12))]
    if kind == "leak":
        rows[::2] = val[np.arange(STEPS * B // 2) % VAL]
    if kind == "stale_bucket":
        p["stale"] = BUCKETS[seed % len(BUCKETS)]
    if kind == "frozen_weight":
        p["frozen"] = (list(SHAPES)[seed % len(SHAPES)],)
    if kind == "dead_head":
        own = slice(seed % H * D, (seed % H + 1) * D)
        weights["v"][:, own] = weights["out"][own] = 0
    if kind == "fp16_underflow":  # the loss scale: from 2^-5, halved every few steps
        p["fp16"] = 2.0 ** -(5 + np.maximum(0, np.arange(STEPS) - at // 2) // 5)
    return p | dict(rows=rows.reshape(STEPS, B, T + 1))


def norm(x):
    return (x * x).mean(-1, keepdim=True).add(1e-6).rsqrt() * x


def forward(w, x, rope):
    """w: weights (R, ., .), x: symbols (R, B, T), rope: (R,) 1 or 0 -> logits (R, B, T, V), and
    how much each head adds (R, H)."""
    R, rows, n = x.shape
    angle = torch.outer(torch.arange(n), 0.5 ** torch.arange(0.0, D // 2))  # (T, D/2)
    angle = angle * rope[:, None, None, None, None]  # (R, 1, 1, T, D/2)

    def heads(y):
        return y.view(R, rows, n, H, D).transpose(2, 3)  # (R, B, H, T, D)

    def turn(y):
        a, b = y.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    r = torch.arange(R)[:, None, None]
    stream = norm(w["embed"][r, x]).view(R, rows * n, C)
    read = norm(stream)
    q, k = (turn(norm(heads(read @ w[name]))) for name in "qk")
    y = F.scaled_dot_product_attention(q, k, heads(read @ w["v"]), is_causal=True, scale=1.0)
    y = y.permute(2, 0, 1, 3, 4).reshape(H, R, rows * n, D)
    parts = y @ w["out"].view(R, H, D, C).transpose(0, 1)  # (H, R, B T, C): what each head adds
    stream = stream + parts.sum(0)
    stream = stream + F.relu(norm(stream) @ w["up"]).square() @ w["down"]
    logits = (norm(stream) @ w["head"]).view(R, rows, n, V)
    return logits, parts.detach().square().mean((2, 3)).sqrt().T


def loss_of(logits, targets):
    """-> (R,): nats per symbol, without the first target, which cannot be predicted."""
    all_nats = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
    return all_nats.view(targets.shape)[:, :, 1:].mean((1, 2))


def train(cases: list[tuple[str, int]]) -> list[dict]:
    """Train all cases, each a (kind, seed) -> for each run a dict of arrays, fp32:

    loss, lr, zeros (S,): training loss; the rate as configured; share of the gradient's entries
    that are exactly 0, leaving out the embedding. grad, update: {matrix: (S,)}, the norm of the
    gradient that the optimizer got, and of the step that it took. heads (S, H): how much each head
    adds (RMS). val_loss (E,) at steps 0, 10, ..: loss on validation rows. order (E,): how far the
    last position's logits move (RMS) when the symbols before it come in reverse. weights: {matrix:
    (2, rows, columns)}, before and after."""
    R = len(cases)
    plans = [plan(*case) for case in cases]
    stacked = lambda key: torch.tensor(np.stack([p[key] for p in plans]))
    rows = stacked("rows")
    val = stacked("val")
    scale = stacked("scale").float()
    fp16 = stacked("fp16").float()
    rope = stacked("rope").float()
    w = {n: torch.tensor(np.stack([p["weights"][n] for p in plans])).float() for n in SHAPES}
    before = {n: x.clone() for n, x in w.items()}
    frozen = {n: torch.tensor([n in p["frozen"] for p in plans])[:, None, None] for n in SHAPES}
    first = {n: torch.zeros_like(x) for n, x in w.items()}
    second = {n: torch.zeros_like(x) for n, x in w.items()}
    sent = {}  # what each bucket sent last
    log = defaultdict(list)
    swapped = torch.cat([val[:, :, : T - 1].flip(2), val[:, :, T - 1 : T]], 2)  # (R, VAL, T)

    for step in range(STEPS + 1):
        if step % 10 == 0:
            with torch.no_grad():
                logits, _ = forward(w, val[:, :, :-1], rope)
                other, _ = forward(w, swapped, rope)
                log["val_loss"].append(loss_of(logits, val[:, :, 1:]))
                log["order"].append((logits - other)[:, :, -1].square().mean((1, 2)).sqrt())
        if step == STEPS:
            break
        leaves = {n: x.requires_grad_() for n, x in w.items()}
        logits, heads = forward(leaves, rows[:, step, :, :-1], rope)
        losses = loss_of(logits, rows[:, step, :, 1:])
        grads = dict(zip(SHAPES, torch.autograd.grad(losses.sum(), list(leaves.values()))))
        lr = LR * min(1, (step + 1) / 8) * min(1, (STEPS - step) / (STEPS / 2))
        zeros = []
        for n, g in grads.items():
            half = fp16[:, step, None, None]
            g = torch.where(half > 0, (g * half).half().float() / half.clamp_min(1e-30), g)
            stale = [n in p["stale"] and step >= p["stale_from"] for p in plans]
            g = torch.where(torch.tensor(stale)[:, None, None], sent.get(n, g), g)
            sent[n] = g
            if n != "embed":
                zeros.append((g == 0).flatten(1))
            first[n].lerp_(g, 1 - 0.9)
            second[n].lerp_(g * g, 1 - 0.95)
            mean = first[n] / (1 - 0.9 ** (step + 1))
            square = second[n] / (1 - 0.95 ** (step + 1))
            update = lr * scale[:, step, None, None] * mean / (square.sqrt() + 1e-12)
            update = update.masked_fill(frozen[n], 0)
            w[n] = w[n].detach() - update
            log["grad", n].append(g.flatten(1).norm(dim=1))
            log["update", n].append(update.flatten(1).norm(dim=1))
        log["loss"].append(losses.detach())
        log["lr"].append(torch.full((R,), lr))
        log["zeros"].append(torch.cat(zeros, 1).float().mean(1))
        log["heads"].append(heads)

    done = {key: torch.stack(values, 1).numpy() for key, values in log.items()}
    return [
        {key: values[r] for key, values in done.items() if isinstance(key, str)}
        | {what: {n: done[what, n][r] for n in SHAPES} for what in ("grad", "update")}
        | {"weights": {n: torch.stack([before[n][r], w[n][r]]).numpy() for n in SHAPES}}
        for r in range(R)
    ]
