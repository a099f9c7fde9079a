"""Exercise 19: the gradient noise scale from the norms of many steps.

    noise_scale([(5.0, 2.0, 1, 4)], seq_len=10) -> 40.0

A step is (small_sq, big_sq, small, big): the squared norm of the mean gradient of its first
micro-batch, of `small` rows, and of the whole step, of `big` rows. A row has seq_len tokens. The
mean gradient of b tokens has E|g|^2 = |G|^2 + tr(Sigma) / b, with Sigma of one token. Rules:
1. each step gives two equations, so an estimate of |G|^2 and one of tr(Sigma); average each over
   the steps (all steps count the same), then divide: tr(Sigma) / |G|^2, in tokens;
2. the sizes may differ from step to step (the batch grows);
3. a step with small == big says nothing, and one whose norms are not finite was skipped: neither
   counts;
4. None if no step counts, or if the mean estimate of |G|^2 is not above 0.
"""


def noise_scale(steps: list[tuple[float, float, int, int]], seq_len: int) -> float | None:
    raise NotImplementedError("write noise_scale, then: python course/check.py 19")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import random

    rng = random.Random(9)

    def judge(steps: list[tuple], seq_len: int, expected: float | None, why: str) -> None:
        said = answer.noise_scale(list(steps), seq_len)
        shown = ", ".join(f"({s:.4g}, {b:.4g}, {m}, {n})" for s, b, m, n in steps[:3])
        more = f" and {len(steps) - 3} more" if len(steps) > 3 else ""
        same = said == expected or (
            None not in (said, expected) and abs(said / expected - 1) < 1e-9
        )
        assert same, f"{why}: expected {expected}, got {said}: seq_len {seq_len}, {shown}{more}"

    judge([(5.0, 2.0, 1, 4)], 10, 40.0, "5 = 1 + 4/1 and 2 = 1 + 4/4, in rows of 10 tokens")
    judge([], 10, None, "no step")
    for _ in range(20):  # what the two sizes see on average, without noise
        seq_len, G_sq, trace = rng.choice([1, 16, 128]), rng.uniform(0.1, 2), rng.uniform(1, 2000)
        sizes = [(m, m * rng.randint(2, 9)) for m in rng.choices([1, 2, 3, 8], k=rng.randint(1, 9))]

        def norms(m: int, seq_len=seq_len, G_sq=G_sq, trace=trace) -> float:
            return G_sq + trace / (m * seq_len)

        steps = [(norms(m), norms(n), m, n) for m, n in sizes]
        judge(steps, seq_len, trace / G_sq, f"exact norms of |G|^2 {G_sq:.3g}, tr {trace:.4g}")
        blind = [(norms(4), norms(4), 4, 4), (float("inf"), 1.0, 1, 2), (1.0, float("nan"), 1, 2)]
        blind += [(float("nan"), 1.0, 2, 4), (1.0, float("inf"), 2, 4)]
        judge(steps + blind, seq_len, trace / G_sq, "with steps that must not count")
        judge(blind, seq_len, None, "only steps that do not count")
    # one estimate of |G|^2 is negative, -1, the other 3; tr(Sigma) 8 and 4
    judge([(7.0, 1.0, 1, 4), (7.0, 4.0, 1, 4)], 1, 6.0, "terms are averaged before the division")
    judge([(7.0, 1.0, 1, 4)], 1, None, "|G|^2 is estimated as -1")
    judge([(4.0, 2.0, 1, 2)], 1, None, "|G|^2 is estimated as 0")
    # |G|^2: 1 and 5; tr: 4 and 32. A sum of norms over steps of other sizes would mix them up
    judge([(5.0, 2.0, 1, 4), (21.0, 9.0, 2, 8)], 1, 6.0, "two steps of two sizes")
    steps = []  # gradients of 20 numbers: G is 0.3 in each, the noise of a token has variance 5
    for step in range(1500):
        big = 4 if step < 500 else 16
        rows = [[rng.gauss(0.3, (5 / 8) ** 0.5) for _ in range(20)] for _ in range(big)]
        means = [[sum(column) / n for column in zip(*rows[:n])] for n in (1, big)]
        steps.append((*(sum(x * x for x in mean) for mean in means), 1, big))
    said = answer.noise_scale(steps, 8)
    truth = 5 / 0.3**2
    assert said and abs(said / truth - 1) < 0.1, f"1,500 noisy steps say {said}, truth {truth:.1f}"
