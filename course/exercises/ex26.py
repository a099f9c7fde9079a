"""Exercise 26: fit a scaling law and predict, with an interval.

    fit([1, 4, 16], [5.0, 4.0, 3.5]) -> (3.0, 2.0, 0.5)      5 = 3 + 2 / 1, 4 = 3 + 2 / 2, ...

The law: L(N) = E + A N^-a with E >= 0, A >= 0 and 0.01 <= a <= 3.
1. fit(sizes, losses) -> (E, A, a) with the least sum of squares of the *relative* errors,
   L(N) / loss - 1. Sizes run from a thousand to 10^10, so be careful what you divide. The judge
   compares your sum of squares with the least possible one, and allows 0.1% more (or 1e-9).
2. predict(sizes, losses, size, draws, seed) -> (low, middle, high). The middle is L(size) of the
   fit. For the interval, repeat the fit `draws` times on losses that could have been: those of the
   fit, each multiplied by 1 + s z (by 0.001 if that is less), where z is normal and s is the
   standard deviation of the fit's relative errors, with n - 3 in place of n losses (three numbers
   were fitted). Each new fit predicts the loss at `size`; multiply this in the same way, because
   the new run has its own luck. low and high are the 5% and the 95% quantile of these. The same
   seed gives the same interval. The judge fits about 700 times within 20 seconds, so one fit may
   take 25 ms.
3. predict needs at least 4 different sizes, fit at least 3: with fewer, raise a ValueError, and
   also for a loss that is not finite and positive. Do not change what you are given.
"""


def fit(sizes: list[float], losses: list[float]) -> tuple[float, float, float]:
    raise NotImplementedError("write fit, then: python course/check.py 26")


def predict(
    sizes: list[float], losses: list[float], size: float, draws: int, seed: int
) -> tuple[float, float, float]:
    raise NotImplementedError("write predict, then: python course/check.py 26")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    from contextlib import suppress

    import numpy as np
    from subject import equal, same

    def law(fitted, sizes):
        E, A, a = fitted
        return E + A * np.asarray(sizes, float) ** -a

    def judge(case, sizes, losses, other) -> None:
        """The sum of squares may not exceed that of another law."""
        fitted = E, A, a = answer.fit(sizes, losses)
        within = 0.01 - 1e-9 <= a <= 3 + 1e-9
        assert E >= 0 and A >= 0 and within, f"rule 1, {case}: (E, A, a) = {fitted} breaks a bound"
        found, least = (((law(x, sizes) / losses - 1) ** 2).sum() for x in (fitted, other))
        assert found <= 1.001 * least + 1e-9, (
            f"rule 1, {case}: the sum of squares of (E, A, a) = {fitted} is {found:.4g}, "
            f"and that of {other} is only {least:.4g}"
        )

    judge("the example", [1, 4, 16], [5.0, 4.0, 3.5], (3, 2, 0.5))
    three = [1e4, 1e5, 1e6, 1e6], [3.0, 2.0, 1.5, 1.5]
    sizes = np.logspace(3, 10, 7).tolist()
    truth = 2, 30, 0.3
    judge("sizes to 10^10", sizes, law(truth, sizes).tolist(), truth)
    sizes = [1e3, 1e4, 1e5, 1e6]
    truth = 0.01, 500, 0.9
    losses = law(truth, sizes) * [1.1, 0.98, 1.01, 0.99]
    judge("losses from 1.1 to 0.01", sizes, losses.tolist(), truth)
    judge("E would be below 0", sizes, [4.0, 3.0, 1.6, 0.4], (0, 46.75, 0.3323))
    judge("A would be below 0", sizes, [1.0, 1.2, 1.1, 1.3], (1.1282039, 0, 0.01))
    judge("two minima", sizes, [3.9, 0.7, 1.2, 1.3], (0.909377, 2.984034e9, 3))

    answer.may("predict", once=True)
    far = [2.9875, 2.3116, 1.9737, 1.7503], 1e13, 1.3698, 1.6017
    near = [3.0073, 2.6477, 2.2839, 2.0065, 1.8973, 1.7342, 1.7441], 1.1e5, 1.9278, 2.1113
    for losses, size, right_low, right_high in (far, near):  # of 20,000 draws
        given = np.logspace(4, 6, len(losses)).tolist(), losses
        right = law(answer.fit(*given), size)
        low, middle, high = answer.predict(*given, size, 300, 0)
        off = (right_high - right_low) / 6
        same(low, right_low, "rule 2: low", 0, off)
        same(high, right_high, "rule 2: high", 0, off)
        same(middle, right, "rule 2: middle", 1e-6)
    first, again, other = ([*answer.predict(*given, size, 8, seed)] for seed in (1, 1, 2))
    equal(again, first, "rule 2: what a second call with the same seed gives")
    assert first != other, f"rule 2: the seeds 1 and 2 both give {first}"
    low = -1
    with suppress(ValueError):
        low, _, _ = answer.predict(sizes, [3.0, 0.5, 4.0, 0.6], 1e8, 30, 0)
    assert low >= 0, "rule 2: s is large here, and a factor below 0.001 was not replaced by 0.001"

    def refuse(function, *given):
        with suppress(ValueError):
            found = function(*given)
            raise AssertionError(f"rule 3: the result is {found}, and should be a ValueError")

    for bad in (np.nan, np.inf, 0.0, -1.5):
        losses = [2.0, 2.0, 2.0, bad]
        refuse(answer.fit, sizes, losses)
        refuse(answer.predict, sizes, losses, 1e8, 10, 0)
    refuse(answer.fit, [1e4, 1e5] * 2, [3.0, 2.0] * 2)
    refuse(answer.predict, *three, 1e8, 10, 0)
