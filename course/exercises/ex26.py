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
   the 5% and the 95% quantile of these. The same seed gives the same interval.
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
        said = judge_fit(sizes, losses, truth, "losses with 1% of noise")
        for factor in (0.97, 1.03):  # and nothing near the fit is better
            near = (said[0] * factor, said[1], said[2]), (said[0], said[1] * factor, said[2])
            for other in near:
                judge_fit(sizes, losses, other, f"{other} is near the fit")
    sizes = np.array([1e3, 1e4, 1e5, 1e6])
    judge_fit(sizes, [4.0, 2.0, 1.0, 0.5], (0, 4 * 1e3**0.30103, 0.30103), "a law without E")
    judge_fit(sizes, [4.0, 3.0, 1.6, 0.4], (0, 46.75, 0.3323), "losses that want E below 0")
    judge_fit(sizes, [1.0, 1.2, 1.1, 1.3], (1.1282039, 0, 0.01), "losses that want A below 0")
    judge_fit(sizes, [2.0, 2.0, 2.0, 2.0], (2, 0, 1), "equal losses")
    judge_fit(sizes, law(1, 5e6, 2.0, sizes), (1, 5e6, 2.0), "a steep law")
    judge_fit(sizes, [2.0, 1.0, 1.0, 1.0], (1, 1e9, 3), "steeper than any law")
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
    for n, noise in ((4, 0.01), (12, 0.05)):
        sizes = 10 ** np.linspace(4, 6, n)
        losses = law(1.5, 60, 0.4, sizes) * (1 + noise * rng.normal(size=n))
        for size in (1.1e5, 1e13):  # inside of the sizes, and far from all
            low, middle, high, s, case = judge_predict(sizes, losses, size, 400, n)
            on = law(*answer.fit([*sizes], [*losses]), sizes)
            luck = rng.normal(size=(400, n + 1))
            refits = [answer.fit([*sizes], [*(on * (1 + s * z[:-1]))]) for z in luck]
            ours = [law(*p, size) * (1 + s * z[-1]) for p, z in zip(refits, luck)]
            want = np.quantile(ours, (0.05, 0.95))
            wide = want[1] - want[0]
            off = max(abs(low - want[0]), abs(high - want[1])) / wide
            assert 0.8 < (high - low) / wide < 1.25 and off < 0.25, (
                f"rule 2: {case}: {low:.4f} to {high:.4f} is far from {want[0]:.4f} to "
                f"{want[1]:.4f}, of 400 fits that the judge made with yours"
            )
            assert low < middle < high, f"{case}: {low} < {middle} < {high} is false"
        one, again, other = (
            tuple(answer.predict(list(sizes), list(losses), 1e9, 20, seed))
            for seed in (n, n, n + 1)
        )
        assert one == again, f"{case}: the same seed gives {one}, then {again}"
        assert one[::2] != other[::2], f"{case}: another seed, the same interval"
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
