"""Exercise 21: the reference, and answers that the oracle must refuse."""

import math


def mean(x):
    return sum(x) / len(x)


def error_sq(losses):
    """The square of the standard error of their mean."""
    m = mean(losses)
    return sum((x - m) ** 2 for x in losses) / (len(losses) - 1) / len(losses)


def vertex(points):
    """x of the lowest point of the parabola through three points (x, y)."""
    (x0, y0), (x1, y1), (x2, y2) = points
    left, right = (y0 - y1) / (x0 - x1), (y2 - y1) / (x2 - x1)  # slopes towards the middle
    bend = (right - left) / (x2 - x0)
    return (x0 + x1) / 2 - left / (2 * bend)


def best_rate(results, errors=True, log=math.log, exp=math.exp):
    alive = {r: mean(x) for r, x in results.items() if all(map(math.isfinite, x))}
    if not alive:
        return "lower"
    best, rates = min(alive, key=alive.get), sorted(results)
    i = rates.index(best)
    if best == rates[-1]:
        return "higher"
    if best == rates[0]:
        return "lower"
    sides = [rates[i - 1], rates[i + 1]]
    if not all(rate in alive for rate in sides):
        return best
    if errors and min(map(len, results.values())) > 1:
        side = min(sides, key=alive.get)
        gap = alive[side] - alive[best]
        if gap**2 <= error_sq(results[side]) + error_sq(results[best]):
            return "seeds"
    return exp(vertex([(log(rate), alive[rate]) for rate in (sides[0], best, sides[1])]))


# ---------------------------------------------------------------------------- wrong answers


def no_edges(results):
    """The best rate of the grid, edge or not."""
    said = best_rate(results)
    alive = {r: mean(x) for r, x in results.items() if all(map(math.isfinite, x))}
    return min(alive, key=alive.get) if said in ("lower", "higher") and alive else said


def grid_only(results):
    said = best_rate(results)
    alive = {r: mean(x) for r, x in results.items() if all(map(math.isfinite, x))}
    return said if isinstance(said, str) else min(alive, key=alive.get)


def linear_rates(results):
    return best_rate(results, log=float, exp=float)


def no_errors(results):
    return best_rate(results, errors=False)


def drops_the_diverged(results):
    """Removes diverged rates first, so that the next one becomes the neighbour, or the edge."""
    alive = {r: x for r, x in results.items() if all(map(math.isfinite, x))}
    return best_rate(alive) if alive else "lower"


def drops_single_runs(results):
    """A rate of which one seed diverged keeps the others."""
    return best_rate({r: [y for y in x if math.isfinite(y)] or x for r, x in results.items()})


def in_the_given_order(results):
    rates = list(results)
    ranked = {i: results[r] for i, r in enumerate(rates)}
    said = best_rate(ranked, exp=lambda x: x, log=lambda i: math.log(rates[i]))
    return said if isinstance(said, str) else math.exp(said) if said not in ranked else rates[said]


def best_seed(results):
    return best_rate({r: [min(x)] if all(map(math.isfinite, x)) else x for r, x in results.items()})


def whole_parabola(results):
    """Fits one parabola to all rates instead of the three around the best."""
    import numpy as np

    said = best_rate(results)
    alive = {r: mean(x) for r, x in results.items() if all(map(math.isfinite, x))}
    if isinstance(said, str) or len(alive) < 3:
        return said
    a, b, _ = np.polyfit(np.log(list(alive)), list(alive.values()), 2)
    return float(np.exp(-b / (2 * a)))


def biased(results):
    """The variance over n instead of n - 1."""
    shrunk = {}
    for r, x in results.items():
        k = ((len(x) - 1) / len(x)) ** 0.5
        shrunk[r] = [mean(x) + k * (y - mean(x)) for y in x]
    return best_rate(shrunk)


def not_of_the_mean(results):
    """Takes the standard deviation for the standard error."""
    wide = {}
    for r, x in results.items():
        wide[r] = [mean(x) + len(x) ** 0.5 * (y - mean(x)) for y in x]
    return best_rate(wide)


WRONG = {  # name -> what of the reference it replaces
    "takes the edge for the best": dict(best_rate=no_edges),
    "stays on the grid": dict(best_rate=grid_only),
    "fits over the rate, not its logarithm": dict(best_rate=linear_rates),
    "does not ask for more seeds": dict(best_rate=no_errors),
    "removes diverged rates from the grid": dict(best_rate=drops_the_diverged),
    "removes diverged runs and keeps the rate": dict(best_rate=drops_single_runs),
    "takes the order of the dict for that of the rates": dict(best_rate=in_the_given_order),
    "compares the best seeds": dict(best_rate=best_seed),
    "fits the parabola to all rates": dict(best_rate=whole_parabola),
    "divides the variance by n": dict(best_rate=biased),
    "takes the deviation of one run for the error of the mean": dict(best_rate=not_of_the_mean),
}

EQUIVALENT = {
    "if gap**2 <= error_sq(results[side]) + error_sq(results[best]):: "
    "`gap ** 2 <= error_sq(results[side]) + error_sq(results[best])` -> "
    "`gap ** 2 < error_sq(results[side]) + error_sq(results[best])`": "rounded: never equal"
}
