"""Exercise 20: the reference, and answers that the oracle must refuse."""

import numpy as np

from optim import POLAR_EXPRESS

FLAT = (15 / 8, -10 / 8, 3 / 8)  # p(1) = 1, p'(1) = p''(1) = 0: an error e becomes 2.5 e^3
NEAR = 0.15  # where the first six polynomials leave every singular value above 3e-4 (0.1412)


def plan(tolerance):
    """The polynomials: the lesson's five with the second one twice (it makes small values four
    times as large and leaves none above 2), then as many flat ones as needed."""
    error, flat = NEAR, []
    while error > tolerance:
        error, flat = 2.5 * error**3, [*flat, FLAT]
    first, second, *rest = POLAR_EXPRESS
    return [first, second, second, *rest, *flat]


def iterate(G, polynomials):
    wide = G if len(G) <= len(G.T) else G.T
    largest = abs(wide).max()
    if not largest:
        return 0 * G
    X = wide / largest  # before anything is squared
    X = X / (1.01 * np.linalg.norm(X))
    for a, b, c in polynomials:
        A = X @ X.T
        X = a * X + (b * A + c * (A @ A)) @ X
    return X if len(G) <= len(G.T) else X.T


def polar(G, tolerance):
    return iterate(G, plan(tolerance))


# ---------------------------------------------------------------------------- wrong answers


def five(G, tolerance):
    return iterate(G, POLAR_EXPRESS)


def express_only(G, tolerance):
    return iterate(G, [*POLAR_EXPRESS, *POLAR_EXPRESS[-1:] * 4])


def flat_only(G, tolerance):
    return iterate(G, [FLAT] * 20)


def flat_only_few(G, tolerance):
    return iterate(G, [FLAT] * 8)


def one_polynomial_fewer(G, tolerance):
    return iterate(G, [*POLAR_EXPRESS, *plan(tolerance)[6:]])


def always_ten(G, tolerance):
    return iterate(G, plan(1e-12) + [FLAT])


def long_side(G, tolerance):
    return iterate(G.T, plan(tolerance)).T if len(G) == len(G.T) else wrong_side(G, tolerance)


def wrong_side(G, tolerance):
    tall = G if len(G) >= len(G.T) else G.T
    X = tall / max(np.linalg.norm(tall), 1e-300) / 1.01
    for a, b, c in plan(tolerance):
        A = X @ X.T
        X = a * X + b * (A @ X) + c * (A @ (A @ X))
    return X if len(G) >= len(G.T) else X.T


def epsilon(G, tolerance):
    X = G if len(G) <= len(G.T) else G.T
    X = X / (1.01 * np.linalg.norm(X) + 1e-7)
    for a, b, c in plan(tolerance):
        A = X @ X.T
        X = a * X + (b * A + c * (A @ A)) @ X
    return X if len(G) <= len(G.T) else X.T


def unsquared(G, tolerance):
    """Divides by the largest entry, but singular values may be larger."""
    X = G / max(abs(G).max(), 1e-300)
    for a, b, c in plan(tolerance):
        A = X @ X.T
        X = a * X + (b * A + c * (A @ A)) @ X
    return X


def divides_zeros(G, tolerance):
    return iterate(G / np.linalg.norm(G), plan(tolerance))


def by_svd(G, tolerance):
    U, _, Vt = np.linalg.svd(G, full_matrices=False)
    return U @ Vt


def by_plain_svd(G, tolerance):
    U, _, Vt = np.linalg.svd(np.asarray(G).view(np.ndarray), full_matrices=False)
    return U @ Vt


def in_place(G, tolerance):
    G /= max(np.linalg.norm(G), 1e-300)
    return polar(G, tolerance)


WRONG = {  # name -> what of the reference it replaces
    "stops after the lesson's five": dict(polar=five),
    "repeats the lesson's last polynomial": dict(polar=express_only),
    "takes 20 flat polynomials": dict(polar=flat_only),
    "takes 8 flat polynomials": dict(polar=flat_only_few),
    "expects s above 0.001": dict(polar=one_polynomial_fewer),
    "is always as accurate as it can be": dict(polar=always_ten),
    "works on the long side": dict(polar=long_side),
    "adds 1e-7 to the norm": dict(polar=epsilon),
    "divides by the largest entry": dict(polar=unsquared),
    "divides zeros by zero": dict(polar=divides_zeros),
    "takes the SVD": dict(polar=by_svd),
    "takes the SVD of a plain copy": dict(polar=by_plain_svd),
    "divides G in place": dict(polar=in_place),
}

EQUIVALENT = {  # changes that change nothing that is asked for
    "while error > tolerance:: `error > tolerance` -> `error >= tolerance`": "never equal",
    "error, flat = 2.5 * error**3, [*flat, FLAT]: `2.5` -> `3.5`": "one more is allowed for",
    "error, flat = 2.5 * error**3, [*flat, FLAT]: `3` -> `4`": "as many for the three tolerances",
    "return 0 * G: `0 * G` -> `0 + G`": "G is zero here",
    "return 0 * G: `0` -> `1`": "G is zero here",
}
