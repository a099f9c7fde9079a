"""Exercise 26: the reference, and answers that the oracle must refuse."""

import numpy as np
from edits import edits


def checked(sizes, losses, least):
    sizes, losses = np.array(sizes, float), np.array(losses, float)
    if len(np.unique(sizes)) < least:
        raise ValueError(f"{len(np.unique(sizes))} sizes are fewer than {least}")
    if not (np.isfinite(losses) & (losses > 0)).all():
        raise ValueError(f"losses must be finite and positive: {losses}")
    return sizes, losses


def best_for(a, x, losses):
    """For each exponent a (k,): E and A with the least squares, and their sum of squares."""
    u = 1 / losses  # E u + A v should be 1
    v = x ** -a[:, None] / losses  # (k, n)
    uu = u @ u
    uv = v @ u
    vv = (v * v).sum(1)
    sv = v.sum(1)
    det = np.maximum(uu * vv - uv * uv, 1e-300)
    E = (u.sum() * vv - uv * sv) / det
    A = (uu * sv - uv * u.sum()) / det
    A = np.where(E < 0, sv / vv, A)
    E = np.where(A < 0, u.sum() / uu, np.maximum(E, 0))
    A = np.maximum(A, 0)
    return E, A, ((E[:, None] * u + A[:, None] * v - 1) ** 2).sum(1)


def fit(sizes, losses):
    sizes, losses = checked(sizes, losses, 3)
    middle = np.exp(np.log(sizes).mean())  # sizes near 1, so that no power is extreme
    low = np.log(0.01)
    high = np.log(3)
    for _ in range(9):
        logs = np.linspace(low, high, 41)
        E, A, squares = best_for(np.exp(logs), sizes / middle, losses)
        i = squares.argmin()
        step = logs[1] - logs[0]
        low = max(np.log(0.01), logs[i] - step)
        high = min(np.log(3), logs[i] + step)
    a = np.exp(logs[i])
    return float(E[i]), float(A[i] * middle**a), float(a)


def law(fitted, sizes):
    E, A, a = fitted
    return E + A * np.asarray(sizes, float) ** -a


def predict(sizes, losses, size, draws, seed):
    sizes, losses = checked(sizes, losses, 4)
    fitted = fit(sizes, losses)
    rng = np.random.default_rng(seed)
    off = law(fitted, sizes) / losses - 1
    s = np.sqrt((off**2).sum() / (len(off) - 3))
    found = []
    for _ in range(draws):
        *luck, own = np.maximum(1 + s * rng.normal(size=len(off) + 1), 0.001)
        found.append(law(fit(sizes, law(fitted, sizes) * luck), size) * own)
    low, high = np.quantile(found, (0.05, 0.95))
    return float(low), float(law(fitted, size)), float(high)


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "a law without E": edit(
        "    return E, A, ((E[:", "    E = 0 * E\n    A = sv / vv\n    return E, A, ((E[:"
    ),
    "no floor under the luck": edit(
        "np.maximum(1 + s * rng.normal(size=len(off) + 1), 0.001)",
        "1 + s * rng.normal(size=len(off) + 1)",
    ),
    "takes two sizes": edit("< least", "< least - 1"),
    "forgets the new run's own luck": edit("size) * own)", "size))"),
    "divides the squares by n": edit("(len(off) - 3)", "len(off)"),
    "does not fit again": edit(
        "law(fit(sizes, law(fitted, sizes) * luck), size)", "law(fitted, size)"
    ),
    "ignores the seed": edit("default_rng(seed)", "default_rng(0)"),
}
