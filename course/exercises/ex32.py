"""Exercise 32: two questions to ask about a result.

is_chance(3230, n=14_042, k=4) -> False: 3,230 right of 14,042, with k options each. True if the
    number right is at most two standard deviations, sqrt(n p (1 - p)) with p = 1/k, away from n p,
    on either side.

constant_answer(predictions, golds) -> (letter, its share, accuracy), for example ("A", 0.97, 0.23):
    the letter that is predicted most often (if there are several, the first in the alphabet), its
    share of the predictions, and the accuracy of a model that always says that letter.

Starred: bradley_terry(wins) -> ratings. wins is an array of whole numbers or floats: wins[i, j] is
    how often player i beat player j. Find the strengths p that make these wins most likely, if i
    beats j with probability p[i] / (p[i] + p[j]). Return them on Elo's scale: 400 points more mean
    ten times the strength, and the mean is 1000. Not every pair has met, but each group of players
    has won and lost against the others. Be right to a tenth of a point for up to 40 players. (The
    books repeat p[i] = wins of i / sum over j of matches(i, j) / (p[i] + p[j]), for all i. Where
    two groups have hardly met, that takes millions of rounds. Newton's method on log p takes a few
    steps: the gradient of the log-likelihood is each player's wins minus the wins you would expect.
    Keep one of the log p at 0, and no step larger than 1.)
    If you write it, it is judged too.
"""


def is_chance(correct: int, n: int, k: int) -> bool:
    raise NotImplementedError("write is_chance, then: python course/check.py 32")


def constant_answer(predictions: str, golds: str) -> tuple[str, float, float]:
    raise NotImplementedError("write constant_answer too, then: python course/check.py 32")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import numpy as np
    from subject import equal, same

    equal(answer.is_chance(3230, n=14_042, k=4), False, "the text's example")
    for n, k, least, most in (
        (48, 4, 6, 18),  # both exactly two deviations away
        (300, 3, 84, 116),
        (1_000_000, 2, 499_000, 501_000),
    ):
        for correct in (least - 1, least, most, most + 1):
            found = answer.is_chance(correct, n, k)
            right = least <= correct <= most
            equal(found, right, f"{least} to {most} right of {n} are chance; for {correct} it")

    for predictions, golds, *right in (
        ("DDDC", "ABCC", "D", 0.75, 0.0),
        ("CBCB", "BBBC", "B", 0.5, 0.75),  # two are as frequent
        ("A" * 30_000 + "B" * 50_000, "B" * 80_000, "B", 0.625, 1.0),
    ):
        found = answer.constant_answer(predictions, golds)
        equal([*found], right, "[letter, its share, accuracy]")

    if not answer.has("bradley_terry"):
        return

    def rated(wins, right):
        found = np.array(answer.bradley_terry(wins), float)
        same(found, 1000 + right - right.mean(), "ratings", 0, 0.1)

    def check(right, matches):
        """All win as often as one has to expect from these ratings: so they are the likeliest."""
        rated(matches / (1 + 10 ** ((right - right[:, None]) / 400)), right)

    rated(np.array([[0, 250], [25, 0]], np.uint8), np.array([400.0, 0.0]))
    rng = np.random.default_rng(32)
    chain = np.diag(rng.integers(5, 60, 39), 1)  # each has met its neighbours only
    check(rng.normal(0, 100, 40).cumsum(), chain + chain.T)
    groups = np.kron(np.eye(2), 1000 - 1000 * np.eye(20))
    groups[0, 20] = groups[20, 0] = 4  # a weak link
    check(np.repeat([200.0, 0.0], 20), groups)
