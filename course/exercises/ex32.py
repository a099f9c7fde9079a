"""Exercise 32: two questions to ask of a result.

is_chance(3230, n=14_042, k=4) -> False: 3,230 right of 14,042, with k options each. True if the
    number right is at most two standard deviations, sqrt(n p (1 - p)) with p = 1/k, from n p, on
    either side.

constant_answer(predictions, golds) -> (letter, its share, accuracy), for example ("A", 0.97, 0.23):
    the letter that is predicted most often (of several: the first in the alphabet), its share of
    the predictions, and the accuracy of a model that always says that letter.

Starred: bradley_terry(wins) -> ratings. wins[i][j] is how often player i beat player j. Find the
    strengths p under which the wins are likeliest, if i beats j with probability
    p[i] / (p[i] + p[j]), on Elo's scale: 400 points more are ten times the strength, and the mean
    is 1000. Not every pair has met, but the matches join all players, and nobody has only won or
    only lost. Right to a tenth of a point for up to 40 players. (p[i] = wins of i / sum over j of
    matches(i, j) / (p[i] + p[j]), for all i, again and again; how often depends on who met whom.)
    If you write it, it is judged too.
"""


def is_chance(correct: int, n: int, k: int) -> bool:
    raise NotImplementedError("write is_chance, then: python course/check.py 32")


def constant_answer(predictions: str, golds: str) -> tuple[str, float, float]:
    raise NotImplementedError("write constant_answer too, then: python course/check.py 32")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import numpy as np

    rng = np.random.default_rng(32)
    # n p = 3510.5 and a deviation of 51.3; 25 and 4.33; 50 and 5 (k = 2)
    cases = [(3230, 14_042, 4, False), (3500, 14_042, 4, True), (3790, 14_042, 4, False)]
    cases += [(33, 100, 4, True), (34, 100, 4, False), (17, 100, 4, True), (16, 100, 4, False)]
    cases += [(60, 100, 2, True), (61, 100, 2, False), (40, 100, 2, True), (39, 100, 2, False)]
    for _ in range(40):  # the two numbers on each edge of what is chance
        n = int(rng.integers(20, 5000))
        k = int(rng.integers(2, 9))
        near = (n - 2 * (n * (k - 1)) ** 0.5) / k
        far = (n + 2 * (n * (k - 1)) ** 0.5) / k
        for correct in (int(near), int(near) + 1, int(far), int(far) + 1):
            if min(abs(correct - near), abs(correct - far)) > 1e-6:
                cases.append((correct, n, k, near < correct < far))
    for correct, n, k, chance in cases:
        said = bool(answer.is_chance(correct, n, k))
        assert said == chance, (
            f"{correct} of {n:,} with {k} options: chance is {chance}, not {said}"
        )

    constants = [
        ("AAABAAAAAC", "ABCDABCDAB", ("A", 0.8, 0.3)),
        ("DDDDC", "ABCCC", ("D", 0.8, 0.0)),
        ("BBCB", "BCCC", ("B", 0.75, 0.25)),
        ("CBCB", "BBBC", ("B", 0.5, 0.75)),
    ]
    for _ in range(20):
        predictions, golds = ("".join(rng.choice(list("ABCDEFGHIJ"), 12)) for _ in range(2))
        most = max("ABCDEFGHIJ", key=lambda x: (predictions.count(x), -ord(x)))
        expected = most, predictions.count(most) / 12, golds.count(most) / 12
        constants.append((predictions, golds, expected))
    for predictions, golds, expected in constants:
        said = tuple(answer.constant_answer(predictions, golds))
        assert said == expected, f"{predictions} for {golds}: {said} instead of {expected}"

    if not hasattr(answer, "bradley_terry"):
        return

    def likeliest(strengths: list[float], matches) -> None:
        p = np.array(strengths)
        wins = matches * p[:, None] / (p[:, None] + p)  # what these strengths lead one to expect
        expected = 400 * np.log10(p)
        expected += 1000 - expected.mean()
        before = wins.copy()
        ratings = np.asarray(answer.bradley_terry(wins))
        assert np.array_equal(wins, before), "the wins that were handed over have been changed"
        assert ratings.shape == p.shape, f"{len(p)} players, ratings of shape {ratings.shape}"
        far = np.abs(ratings - expected)
        met = [f"{i}-{j}: {matches[i, j]:.0f}" for i, j in np.argwhere(np.triu(matches))]
        assert far.max() < 0.1, (  # also if it is NaN
            f"{len(p)} players of the strengths {strengths}, matches {', '.join(met[:20])}: player "
            f"{far.argmax()} is rated {ratings[far.argmax()]:.2f}, not {expected[far.argmax()]:.2f}"
        )

    likeliest([10.0, 1.0], np.array([[0, 22], [22, 0]]))
    likeliest([3.0, 3.0, 3.0], 8 * (1 - np.eye(3)))
    for players in (4, 7):
        met = np.triu(rng.integers(1, 40, (players, players)), 1)
        likeliest(rng.uniform(0.2, 5, players).round(2).tolist(), met + met.T)
    for players in (4, 20, 40):  # a chain: each meets its neighbours only, not equally often
        chain = np.diag(rng.integers(5, 60, players - 1), 1)
        strengths = np.exp(np.cumsum(rng.normal(0, 0.5, players))).round(3).tolist()
        likeliest(strengths, chain + chain.T)
