"""Exercise 25: the reference, and answers that the oracle must refuse."""

import math

from edits import edits


def mean(x):
    return sum(x) / len(x)


def error_sq(losses):
    """The square of the standard error of their mean."""
    m = mean(losses)
    return sum((x - m) ** 2 for x in losses) / (len(losses) - 1) / len(losses)


def vertex(points):
    """x of the lowest point of the parabola through three points (x, y)."""
    (x0, y0), (x1, y1), (x2, y2) = points
    # Slopes towards the middle.
    left = (y0 - y1) / (x0 - x1)
    right = (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    return (x0 + x1) / 2 - left / (2 * bend)


def best_rate(results):
    alive = {r: mean(x) for r, x in results.items() if all(map(math.isfinite, x))}
    if not alive:
        return "lower"
    best = min(sorted(alive), key=alive.get)  # of equal ones the lower rate
    rates = sorted(results)
    i = rates.index(best)
    if best == rates[-1]:
        return "higher"
    if best == rates[0]:
        return "lower"
    sides = [rates[i - 1], rates[i + 1]]
    if not all(r in alive for r in sides):
        return best
    if min(map(len, results.values())) > 1:
        side = min(sides, key=alive.get)
        gap = alive[side] - alive[best]
        if gap**2 <= error_sq(results[side]) + error_sq(results[best]):
            return "seeds"
    points = [(math.log(r), alive[r]) for r in (sides[0], best, sides[1])]
    return math.exp(vertex(points))


edit = edits(__file__)
ALIVE = "alive = {r: mean(x) for r, x in results.items() if all(map(math.isfinite, x))}"
WRONG = {  # name -> what of the reference it replaces
    "takes the edge for the best": edit(
        'return "higher"',
        "return best",
        '        return "lower"\n    sides',
        "        return best\n    sides",
    ),
    "stays on the grid": edit("return math.exp(vertex(points))", "return best"),
    "fits over the rate, not its logarithm": edit(
        "(math.log(r), alive", "(r, alive", "math.exp(vertex(points))", "vertex(points)"
    ),
    "removes diverged rates from the grid": edit("sorted(results)", "sorted(alive.keys())"),
    "removes diverged runs and keeps the rate": edit(
        ALIVE,
        "results = {r: [y for y in x if y < math.inf] or x for r, x in results.items()}\n    "
        + ALIVE,
    ),
    "takes the order of the dict for that of the rates": edit("sorted(results)", "list(results)"),
    "compares the best seeds": edit("alive = {r: mean(x)", "alive = {r: min(x)"),
    "fits the parabola to all rates": edit(
        "return math.exp(vertex(points))",
        "import numpy as np\n    logs = [*map(math.log, alive)]\n"
        "    a, b, _ = np.polyfit(logs, [*alive.values()], 2)\n"
        "    return float(np.exp(-b / (2 * a)))",
    ),
    "divides the variance by n": edit("/ (len(losses) - 1)", "/ len(losses)"),
    "takes the highest of equal rates": edit("sorted(alive)", "sorted(alive)[::-1]"),
    "takes the deviation of one run for the error of the mean": edit(
        "/ (len(losses) - 1) / len(losses)", "/ (len(losses) - 1)"
    ),
    "adds the errors, not their squares": edit(
        "gap**2 <= error_sq(results[side]) + error_sq(results[best])",
        "gap <= error_sq(results[side]) ** 0.5 + error_sq(results[best]) ** 0.5",
    ),
    "asks the worse neighbour": edit("side = min(sides", "side = max(sides"),
}
