"""Exercise 26: fit a scaling law and predict, with an interval.

    fit([1, 4, 16], [5.0, 4.0, 3.5]) -> (3.0, 2.0, 0.5)      5 = 3 + 2 / 1, 4 = 3 + 2 / 2, ...

The law: L(N) = E + A N^-a with E >= 0, A >= 0 and 0.01 <= a <= 3.
1. fit(sizes, losses) -> (E, A, a) with the least sum of squares of the *relative* errors,
   L(N) / loss - 1. Sizes run from a thousand to 10^10, so take care what you divide. The judge
   compares the sum of squares with the least one that there is, and allows 0.1% more (or 1e-9).
2. predict(sizes, losses, size, draws, seed) -> (low, middle, high). The middle is L(size) of the
   fit. For the interval, repeat the fit `draws` times on losses that could have been: those of the
   fit, each multiplied by 1 + s z (by 0.001 if that is less), where z is normal and s is the
   standard deviation of the fit's relative errors, with n - 3 in place of n losses (three numbers
   were fitted). Each new fit predicts the loss at `size`; multiply it in the same way, as the new
   run has its own luck. low and high are the 5% and the 95% quantile of these. The same seed gives
   the same interval. The judge fits about 900 times within 20 seconds, so one fit may take 20 ms.
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
    from subject import same

    rng = np.random.default_rng(22)

    def law(fitted, sizes):
        E, A, a = fitted
        return E + A * np.asarray(sizes, float) ** -a

    def judge(sizes, losses, truth) -> None:
        fitted = E, A, a = answer.fit(list(sizes), list(losses))
        within = 0.01 - 1e-9 <= a <= 3 + 1e-9
        assert E >= 0 and A >= 0 and within, f"{fitted} breaks a bound"
        found, least = (((law(x, sizes) / losses - 1) ** 2).sum() for x in (fitted, truth))
        assert found <= 1.001 * least + 1e-9, (
            f"rule 1: {fitted} has the sum of squares {found:.4g}, and {truth} has {least:.4g}"
        )

    judge([1, 4, 16], [5.0, 4.0, 3.5], (3, 2, 0.5))
    judge([2, 8, 32], [5.0, 4.0, 3.5], (3, 8**0.5, 0.5))
    for _ in range(10):  # losses that obey a law
        sizes = [int(10**x) for x in rng.uniform(3, 10, rng.integers(4, 9))]
        a = rng.uniform(0.05, 1.0)
        truth = rng.uniform(0, 3), rng.uniform(0.2, 3) * min(sizes) ** a, a
        judge(sizes, law(truth, sizes), truth)
    for n in (7, 7, 7, 7, 7, 300):  # 1% of noise: the law that made the losses is no better
        sizes = 10 ** rng.uniform(4, 8, n)
        truth = rng.uniform(1, 2), 3.0 * min(sizes) ** 0.3, 0.3
        judge(sizes, law(truth, sizes) * (1 + 0.01 * rng.normal(size=n)), truth)
    sizes = [1e3, 1e4, 1e5, 1e6]
    judge(sizes, [4.0, 3.0, 1.6, 0.4], (0, 46.75, 0.3323))  # E would be below 0
    judge(sizes, [1.0, 1.2, 1.1, 1.3], (1.1282039, 0, 0.01))  # A would
    judge(sizes, [2.0] * 4, (2, 0, 1))
    judge(sizes, [3.9, 0.7, 1.2, 1.3], (0.909377, 2.984034e9, 3))  # two valleys; the steep one
    truth = 0.01, 500, 0.9  # an absolute fit would follow the first loss alone
    judge(sizes, law(truth, sizes) * [1.1, 0.98, 1.01, 0.99], truth)
    three = [1e4, 1e5, 1e6, 1e6], [3.0, 2.0, 1.5, 1.5]
    judge(*three, (1, 200, 0.30103))

    answer.may("predict", once=True)
    widths = []
    for n, losses, size, draws, *right in (  # right: of 20,000 draws
        (4, [2.9875, 2.3116, 1.9737, 1.7503], 1e13, 200, 1.3698, 1.6017),  # far from all sizes
        (7, [3.0073, 2.6477, 2.2839, 2.0065, 1.8973, 1.7342, 1.7441], 1.1e5, 200, 1.9278, 2.1113),
        # sizes come twice, and A would be below 0
        (4, [1.0, 1.05, 1.1, 1.15, 1.05, 1.1, 1.1, 1.15], 1e12, 400, 0.8295, 1.1691),
    ):
        given = np.logspace(4, 6, n).repeat(len(losses) // n).tolist(), losses
        low, _, high = answer.predict(*given, size, draws, 0)
        wide = right[1] - right[0]
        same([low, high], right, "(low, high)", 0, 0.25 * wide)
        widths.append((high - low) / wide)
        for other in (size, 2e9):
            low, middle, high = answer.predict(*given, other, 1, 0)
            same(low, high, "of one draw, low")
            assert low != middle, "of one draw, low is the middle, not what was drawn"
            same(middle, law(answer.fit(*given), other), "the middle", 1e-6)
        near, again, other = (answer.predict(*given, size, 8, seed)[0] for seed in (1, 1, 2))
        same(again, near, "with the same seed once more, low")
        assert other != near, "another seed, the same interval"
    width = sum(widths) / 3
    assert 0.86 < width < 1.16, f"rule 2: intervals are {width:.2f} times as wide as they should be"

    def refuses(name, *given) -> None:
        try:
            said = getattr(answer, name)(*given)
        except ValueError:
            return
        raise AssertionError(f"rule 3: {said}, not a ValueError")

    refused = [(sizes, [2.0] * 3 + [bad]) for bad in (np.nan, np.inf, 0.0, -1.5)]
    for given in (*refused, ([], []), ([1e4, 1e5] * 2, [3.0, 2.0] * 2)):
        refuses("fit", *given)
        refuses("predict", *given, 1e8, 10, 0)
    refuses("predict", *three, 1e8, 10, 0)
