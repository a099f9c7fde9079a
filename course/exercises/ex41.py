"""Exercise 41: the gradient noise scale from the norms of many steps, and the batch to take.

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

    take(noise=4000.0, overhead_s=0.1, token_s=0.0001, unit=512, waste=0.6) -> 2048

The batch for a run: a step of B tokens takes overhead_s + token_s B seconds, and the run needs
1 + noise / B times as many steps as with a batch without end. B is a multiple of `unit` (the
tokens that the devices take at once). Rules:
5. B is the multiple whose run takes the least time, the smaller one of two that take the same;
6. but the run may need at most 1 + waste times the fewest tokens, and tokens go as 1 + B / noise.
   If no multiple obeys that, it is one unit.
"""


def noise_scale(steps: list[tuple[float, float, int, int]], seq_len: int) -> float | None:
    raise NotImplementedError("write noise_scale, then: python course/check.py 41")


def take(noise: float, overhead_s: float, token_s: float, unit: int, waste: float) -> int:
    raise NotImplementedError("write take, then: python course/check.py 41")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
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
        seq_len = rng.choice([1, 16, 128])
        G_sq = rng.uniform(0.1, 2)
        trace = rng.uniform(1, 2000)
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
    judge([(5.0, 2.0, 1, 4), (1.0, 2.0, 1, 4)], 1, 0.8, "tr(Sigma) is estimated as 4 and -4/3")
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

    def judge_take(expected: int, why: str, *case) -> None:
        said = answer.take(*case)
        names = ("noise", "overhead_s", "token_s", "unit", "waste")
        given = ", ".join(f"{name} {x:g}" for name, x in zip(names, case))
        assert isinstance(said, int) and said == expected, f"{why}: {expected}, not {said}: {given}"

    judge_take(2048, "2,000 would be best; 2,048 is nearer", 4000.0, 0.1, 0.0001, 512, 0.6)
    judge_take(512, "no waste is allowed: one unit", 4000.0, 0.1, 0.0001, 512, 0.0)
    judge_take(512, "one unit already wastes more", 100.0, 0.1, 0.0001, 512, 0.5)
    judge_take(1024, "2,048 would waste 51%, 1,536 38%", 4000.0, 0.1, 0.0001, 512, 0.26)
    judge_take(256, "no overhead: the smallest batch", 4000.0, 0.0, 0.0001, 256, 9.0)
    judge_take(2, "2 and 3 take the same time", 6.0, 1.0, 1.0, 1, 9.0)
    judge_take(3, "the limit itself is allowed", 8.0, 100.0, 1.0, 3, 0.375)
    for _ in range(200):
        noise = 10 ** rng.uniform(0, 5)
        unit = rng.choice([1, 7, 64, 1000])
        overhead_s = 10 ** rng.uniform(-3, 1)
        token_s = 10 ** rng.uniform(-5, -2)
        waste = 10 ** rng.uniform(-2, 2)
        case = (noise, overhead_s, token_s, unit, waste)

        def hours(B: int, noise=noise, overhead_s=overhead_s, token_s=token_s) -> float:
            return (1 + noise / B) * (overhead_s + token_s * B)

        said = answer.take(*case)
        given = f"take{tuple(float(f'{x:.6g}') for x in case)}"
        assert isinstance(said, int) and said >= unit and said % unit == 0, (
            f"{given} is {said!r}, no multiple of {unit}"
        )
        allowed = said == unit or said / noise <= waste
        assert allowed, f"rule 6: {given} is {said}, which wastes {said / noise:.3f}"
        for other in (said - unit, said + unit, said // 2 // unit * unit, 2 * said, unit):
            if other >= unit and other / noise <= waste:
                assert hours(other) >= hours(said) * (1 - 1e-12), (
                    f"rule 5: {given} is {said}, but {other} takes only "
                    f"{hours(other) / hours(said):.6f} of its time"
                )
