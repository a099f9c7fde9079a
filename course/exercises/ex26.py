"""Exercise 26: fit a scaling law and predict, with an interval.

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
   the 5% and the 95% quantile of these. The same seed gives the same interval. The judge fits about
   1,800 times within 20 seconds, so one fit may take 10 ms.
3. predict needs at least 4 sizes that differ, fit 3: fewer are a ValueError, as is a
   loss that is not finite and positive. What you are given is not changed.
"""


def fit(sizes: list[float], losses: list[float]) -> tuple[float, float, float]:
    raise NotImplementedError("write fit, then: python course/check.py 26")


def predict(
    sizes: list[float], losses: list[float], size: float, draws: int, seed: int
) -> tuple[float, float, float]:
    raise NotImplementedError("write predict, then: python course/check.py 26")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
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
        within = 0.01 - 1e-9 <= a <= 3 + 1e-9
        assert E >= 0 and A >= 0 and within, f"{case}: {said} breaks a bound"
        found, least = (float(((law(*x, sizes) / losses - 1) ** 2).sum()) for x in (said, truth))
        assert found <= 1.001 * least + 1e-9, (
            f"rule 1: {case}: {said} has the sum of squares {found:.4g}, and "
            f"{tuple(float(f'{x:.4g}') for x in truth)} has {least:.4g}"
        )
        return said

    judge_fit([1, 4, 16], [5.0, 4.0, 3.5], (3, 2, 0.5), "the example")
    for _ in range(14):  # exact laws
        sizes = 10 ** np.sort(rng.uniform(3, 10, rng.integers(4, 9)))
        E = rng.uniform(0, 3)
        a = rng.uniform(0.05, 1.0)
        truth = (E, rng.uniform(0.2, 3) * sizes[0] ** a, a)
        judge_fit(sizes, law(*truth, sizes), truth, "losses that obey a law")
    for _ in range(10):  # noisy: the law that made the losses is no better than the fit
        sizes = 10 ** rng.uniform(4, 8, 7)
        truth = (rng.uniform(1, 2), 3.0 * sizes.min() ** 0.3, 0.3)
        losses = law(*truth, sizes) * (1 + 0.01 * rng.normal(size=7))
        judge_fit(sizes, losses, truth, "losses with 1% of noise")
    sizes = np.array([1e3, 1e4, 1e5, 1e6])
    judge_fit(sizes, [4.0, 3.0, 1.6, 0.4], (0, 46.75, 0.3323), "losses that want E below 0")
    judge_fit(sizes, [1.0, 1.2, 1.1, 1.3], (1.1282039, 0, 0.01), "losses that want A below 0")
    judge_fit(sizes, [2.0, 2.0, 2.0, 2.0], (2, 0, 1), "equal losses")
    judge_fit(sizes, [2.0, 1.0, 1.0, 1.0], (1, 1e9, 3), "steeper than any law")
    # relative errors: the first loss is large, and an absolute fit would follow it alone
    big = law(0.01, 500, 0.9, sizes) * (1 + np.array([0.1, -0.02, 0.01, -0.01]))
    judge_fit(sizes, big, (0.01, 500, 0.9), "relative errors")

    for n, noise, size in ((4, 0.01, 1e13), (12, 0.05, 1.1e5)):  # far from all sizes, and inside
        sizes = 10 ** np.linspace(4, 6, n)
        losses = law(1.5, 60, 0.4, sizes) * (1 + noise * rng.normal(size=n))
        given = sizes.tolist(), losses.tolist()
        low, middle, high = answer.predict(*given, size, 400, n)
        one, again, other = (
            tuple(answer.predict(*given, size, 20, seed)) for seed in (n, n, n + 1)
        )
        case = f"predict, {n} sizes from 1e4 to 1e6, losses {np.round(losses, 4)}, size {size:g}"
        assert given == (sizes.tolist(), losses.tolist()), f"{case}: what was given is changed"
        assert one == again, f"{case}: the same seed gives {one}, then {again}"
        assert one != other, f"{case}: another seed, the same interval"
        fitted = answer.fit(*given)
        expected = float(law(*fitted, size))
        assert abs(middle / expected - 1) < 1e-6, f"{case}: middle {middle}, the fit has {expected}"
        on = law(*fitted, sizes)
        s = float(np.sqrt(((on / losses - 1) ** 2).sum() / (n - 3)))
        luck = rng.normal(size=(400, n + 1))
        refits = [answer.fit([*sizes], [*(on * (1 + s * z[:-1]))]) for z in luck]
        ours = [law(*p, size) * (1 + s * z[-1]) for p, z in zip(refits, luck)]
        want = np.quantile(ours, (0.05, 0.95))
        wide = want[1] - want[0]
        off = max(abs(low - want[0]), abs(high - want[1])) / wide
        assert 0.8 < (high - low) / wide < 1.25 and off < 0.25 and low < middle < high, (
            f"rule 2: {case}: {low:.4f} to {high:.4f}, middle {middle:.4f}; with 400 of your "
            f"fits the judge gets {want[0]:.4f} to {want[1]:.4f}"
        )

    four = [1e4, 1e5, 1e6, 1e7]
    refused = [(four, [3.0, 2.0, bad, 1.0]) for bad in (np.nan, np.inf, 0.0, -1.5)]
    refused += [([1e4, 1e5], [3.0, 2.0]), ([1e4, 1e5, 1e5, 1e4], [3.0, 2.0, 2.1, 3.1])]
    three = [1e4, 1e5, 1e6, 1e6], [3.0, 2.0, 1.5, 1.5]
    calls = [("fit", *given) for given in refused]
    calls += [("predict", *given, 1e8, 10, 0) for given in (*refused, three)]
    for name, *given in calls:
        try:
            said = getattr(answer, name)(*given)
        except ValueError:
            continue
        raise AssertionError(f"rule 3: {name}{tuple(given)} gives {said}, no ValueError")
    judge_fit(*three, (1, 200, 0.30103), "three sizes")
