"""Exercise 22: fit a scaling law and predict, with an interval.

    fit([1, 4, 16], [5.0, 4.0, 3.5]) -> (3.0, 2.0, 0.5)      5 = 3 + 2 / 1, 4 = 3 + 2 / 2, ...

The law: L(N) = E + A N^-a with E >= 0, A >= 0 and 0.01 <= a <= 3.
1. fit(sizes, losses) -> (E, A, a) with the least sum of squares of the *relative* errors,
   L(N) / loss - 1. Sizes run from a thousand to 10^10, so take care what you divide. The judge
   compares the sum of squares with the least one that there is, and allows 0.1% more (or 1e-9).
2. predict(sizes, losses, size, draws, seed) -> (low, middle, high). The middle is L(size) of the
   fit. For the interval, repeat the fit `draws` times on losses that could have been: those of the
   fit, each multiplied by 1 + s z, where z is normal and s is the standard deviation of the fit's
   relative errors, with n - 3 in place of n (three numbers were fitted). Each new fit predicts the
   loss at `size`; multiply it by 1 + s z as well, as the new run has its own luck. low and high are
   the 5% and the 95% quantile of these. The same seed gives the same interval.
3. predict needs at least 4 sizes that differ, fit 3: fewer are a ValueError, as is a
   loss that is not finite and positive. What you are given is not changed.
"""


def fit(sizes: list[float], losses: list[float]) -> tuple[float, float, float]:
    raise NotImplementedError("write fit, then: python course/check.py 22")


def predict(
    sizes: list[float], losses: list[float], size: float, draws: int, seed: int
) -> tuple[float, float, float]:
    raise NotImplementedError("write predict, then: python course/check.py 22")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import numpy as np

    rng = np.random.default_rng(22)

    def law(E, A, a, sizes):
        return E + A * np.asarray(sizes, float) ** -a

    def judge_fit(sizes, losses, truth, why: str) -> tuple:
        given = [float(x) for x in sizes], [float(x) for x in losses]
        kept = [*given[0]], [*given[1]]
        said = answer.fit(*given)
        assert given == kept, f"{why}: what was given is changed"
        case = f"{why}: sizes {np.array(sizes)}, losses {np.round(losses, 4)}"
        assert len(said) == 3 and all(np.isfinite(said)), f"{case}: got {said}"
        E, A, a = said
        assert E >= 0 and A >= 0 and 0.01 <= a <= 3, f"{case}: {said} breaks a bound"
        found, least = (float(((law(*x, sizes) / losses - 1) ** 2).sum()) for x in (said, truth))
        assert found <= 1.001 * least + 1e-9, (
            f"rule 1: {case}: {said} has the sum of squares {found:.4g}, and "
            f"{tuple(float(f'{x:.4g}') for x in truth)} has {least:.4g}"
        )
        return said

    judge_fit([1, 4, 16], [5.0, 4.0, 3.5], (3, 2, 0.5), "the example")
    for _ in range(14):  # exact laws
        sizes = 10 ** np.sort(rng.uniform(3, 10, rng.integers(4, 9)))
        E, a = rng.uniform(0, 3), rng.uniform(0.05, 1.0)
        truth = (E, rng.uniform(0.2, 3) * sizes[0] ** a, a)
        judge_fit(sizes, law(*truth, sizes), truth, "losses that obey a law")
    for _ in range(10):  # noisy: the law that made the losses is no better than the fit
        sizes = 10 ** rng.uniform(4, 8, 7)
        truth = (rng.uniform(1, 2), 3.0 * sizes.min() ** 0.3, 0.3)
        losses = law(*truth, sizes) * (1 + 0.01 * rng.normal(size=7))
        said = judge_fit(sizes, losses, truth, "losses with 1% of noise")
        for factor in (0.97, 1.03):  # and nothing near the fit is better
            near = (said[0] * factor, said[1], said[2]), (said[0], said[1] * factor, said[2])
            for other in near:
                judge_fit(sizes, losses, other, f"{other} is near the fit")
    sizes = np.array([1e3, 1e4, 1e5, 1e6])
    judge_fit(sizes, [4.0, 2.0, 1.0, 0.5], (0, 4 * 1e3**0.30103, 0.30103), "a law without E")
    judge_fit(sizes, [4.0, 3.0, 1.6, 0.4], (0, 32.4, 0.28), "losses that would want E below 0")
    judge_fit(sizes, [2.0, 2.0, 2.0, 2.0], (2, 0, 1), "equal losses")
    # relative errors: the first loss is large, and an absolute fit would follow it alone
    big = law(0.01, 500, 0.9, sizes) * (1 + np.array([0.1, -0.02, 0.01, -0.01]))
    judge_fit(sizes, big, (0.01, 500, 0.9), "relative errors")

    def judge_predict(sizes, losses, size, draws, seed) -> tuple:
        given = [float(x) for x in sizes], [float(x) for x in losses]
        kept = [*given[0]], [*given[1]]
        low, middle, high = answer.predict(*given, size, draws, seed)
        assert given == kept, "predict changed what it was given"
        case = f"predict({kept[0]}, {np.round(losses, 4).tolist()}, {size:g}, {draws}, {seed})"
        assert np.isfinite([low, middle, high]).all(), f"{case}: got {(low, middle, high)}"
        fitted = answer.fit(*given)
        expected = float(law(*fitted, size))
        assert abs(middle / expected - 1) < 1e-6, (
            f"{case}: middle {middle}, the fit says {expected}"
        )
        off = law(*fitted, sizes) / losses - 1
        s = float(np.sqrt((off**2).sum() / (len(off) - 3)))
        return low, middle, high, s, case

    sizes = 10 ** np.linspace(4, 6, 6)
    exact = law(1.5, 60, 0.4, sizes)
    low, middle, high, _, case = judge_predict(sizes, exact, 1e7, 20, 0)
    assert high - low < 1e-3 * middle, f"{case}: an exact law has the interval {low} .. {high}"
    for n in (4, 5, 12):  # inside of the sizes: mostly the new run's own luck
        sizes = 10 ** np.linspace(4, 6, n)
        noise = 0.01 * rng.normal(size=n)
        losses = law(1.5, 60, 0.4, sizes) * (1 + noise)
        low, middle, high, s, case = judge_predict(sizes, losses, 1.1e5, 240, n)
        width = (high - low) / middle / s
        assert 3.29 * 0.85 < width < 3.29 * 1.75, (
            f"rule 2: {case}: the interval is {width:.2f} s wide; the new run's luck alone makes "
            "3.29 s, and the fit's cannot add as much again"
        )
        assert low < middle < high, f"{case}: {low} < {middle} < {high} is false"
        again = answer.predict(list(sizes), list(losses), 1.1e5, 240, n)
        assert tuple(again) == (low, middle, high), f"{case}: the same seed, another interval"
        other = answer.predict(list(sizes), list(losses), 1.1e5, 240, n + 1)
        assert tuple(other)[::2] != (low, high), f"{case}: another seed, the same interval"
        far = judge_predict(sizes, losses, 1e9, 240, n)
        assert (far[2] - far[0]) / far[1] > 1.2 * (high - low) / middle, (
            f"{case}: at 10^9, far from all sizes, the interval should be wider than inside"
        )
    covered, trials = 0, 40
    for trial in range(trials):  # does the interval hold what it promises?
        sizes = 10 ** np.linspace(4, 6, 10)
        losses = law(1.5, 60, 0.4, sizes) * (1 + 0.01 * rng.normal(size=10))
        new = float(law(1.5, 60, 0.4, 3e6)) * (1 + 0.01 * rng.normal())
        low, _, high, _, _ = judge_predict(sizes, losses, 3e6, 50, trial)
        covered += low <= new <= high
    assert 29 <= covered <= 40, f"rule 2: {covered} of {trials} new runs lie in their 90% intervals"

    for sizes, losses in (
        ([1e4, 1e5, 1e6, 1e7], [3.0, 2.0, float("nan"), 1.0]),
        ([1e4, 1e5, 1e6, 1e7], [3.0, 2.0, float("inf"), 1.0]),
        ([1e4, 1e5, 1e6, 1e7], [3.0, 2.0, 0.0, 1.0]),
        ([1e4, 1e5, 1e6, 1e7], [3.0, 2.0, -1.5, 1.0]),
        ([1e4, 1e5], [3.0, 2.0]),
        ([1e4, 1e5, 1e5, 1e4], [3.0, 2.0, 2.1, 3.1]),
    ):
        for name, arguments in (("fit", ()), ("predict", (1e8, 10, 0))):
            try:
                said = getattr(answer, name)(list(sizes), list(losses), *arguments)
            except ValueError:
                continue
            raise AssertionError(f"rule 3: {name}({sizes}, {losses}) gives {said}, no ValueError")
    three = [1e4, 1e5, 1e6], [3.0, 2.0, 1.5]
    judge_fit(*three, (1, 200, 0.30103), "three sizes")
    doubled = [x for x in three[0] for _ in (0, 1)], [x + y for x in three[1] for y in (-0.1, 0.1)]
    try:
        said = answer.predict(*doubled, 1e8, 10, 0)
    except ValueError:
        return
    raise AssertionError(f"rule 3: predict from three sizes, two runs each, gives {said}")
