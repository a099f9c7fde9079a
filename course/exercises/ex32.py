"""Exercise 32: two questions to ask of a result.

is_chance(3230, n=14_042, k=4) -> False: 3,230 right of 14,042, with k options each. True if the
    number right is at most two standard deviations, sqrt(n p (1 - p)) with p = 1/k, from n p, on
    either side.

constant_answer(predictions, golds) -> (letter, its share, accuracy), for example ("A", 0.97, 0.23):
    the letter that is predicted most often (of several: the first in the alphabet), its share of
    the predictions, and the accuracy of a model that always says that letter.

Starred: bradley_terry(wins) -> ratings. wins is an array of whole numbers or floats: wins[i, j] is
    how often player i beat player j. Find the strengths p under which the wins are likeliest, if i
    beats j with probability p[i] / (p[i] + p[j]), on Elo's scale: 400 points more are ten times the
    strength, and the mean is 1000. Not every pair has met, but the matches join all players, and
    nobody has only won or only lost. Right to a tenth of a point for up to 40 players. (p[i] = wins
    of i / sum over j of matches(i, j) / (p[i] + p[j]), for all i, again and again; how often
    depends on who met whom.)
    If you write it, it is judged too.
"""


def is_chance(correct: int, n: int, k: int) -> bool:
    raise NotImplementedError("write is_chance, then: python course/check.py 32")


def constant_answer(predictions: str, golds: str) -> tuple[str, float, float]:
    raise NotImplementedError("write constant_answer too, then: python course/check.py 32")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math

    import numpy as np
    from subject import same

    rng = np.random.default_rng(32)
    assert answer.is_chance(7, 7, 1) and answer.is_chance(0, 0, 4), "a deviation of 0"
    for n in (1, 48, 100, 14_042, 10**6 + 1, 10**10 + 1):
        for k in (2, 3, 4, 256, 70_000):
            room = math.isqrt(4 * n * (k - 1))
            near = (n - room) // k
            far = (n + room) // k
            for correct in (0, n // 2, near, near + 1, far, far + 1):  # on each edge of chance
                if 0 <= correct <= n:
                    found = bool(answer.is_chance(correct, n, k))
                    chance = abs(correct * k - n) <= room
                    assert found == chance, f"it is {found}, not {chance}"

    constants = [("AAABAAAAAC", "ABCDABCDAB"), ("DDDDC", "ABCCC"), ("BBCB", "BCCC")]
    constants += [("CBCB", "BBBC"), ("CBCB", "CCCC"), ("CCCC", "CCCC")]
    letters = [chr(65 + i) for i in range(26)]
    for n in (*[20] * 20, 300):
        constants.append(["".join(rng.choice(letters, n)) for _ in range(2)])
    constants += [("aab", "abc"), ("dcd", "abc")]
    letters += [chr(97 + i) for i in range(26)]
    constants += [("Z", "Z"), ("A" * 65_000 + "B" * 70_000, "B" * 135_000)]
    for predictions, golds in constants:
        letter, *numbers = answer.constant_answer(predictions, golds)
        right = max(letters, key=predictions.count)  # the first of several
        assert letter == right, f"the letter is {letter}, not {right}"
        right = [text.count(letter) / len(text) for text in (predictions, golds)]
        same(numbers, right, "share and accuracy")

    if not answer.has("bradley_terry"):
        return
    answer.may("bradley_terry", once=True)

    def likeliest(strengths, matches) -> None:
        p = np.array(strengths)
        wins = matches * p[:, None] / (p[:, None] + p)  # what these strengths lead one to expect
        right = 400 * np.log10(p)
        whole = wins.astype(int)
        ratings = answer.bradley_terry(whole if (whole == wins).all() else wins)
        same(np.asarray(ratings), 1000 + right - right.mean(), "the rating", 0, 0.1)

    small = np.array([[0, 200, 20], [100, 0, 150], [30, 140, 0]], np.uint8)
    same(
        answer.bradley_terry(small), answer.bradley_terry(small.astype(int)), "of uint8, it", 0, 0.1
    )
    for matches in (22, 220_000):
        likeliest([10.0, 1.0], np.array([[0, matches], [matches, 0]]))
    for players in (4, 7):
        met = np.triu(rng.integers(1, 40, (players, players)), 1)
        likeliest(rng.uniform(0.2, 5, players), met + met.T)
    for players in (4, 20, 40):  # a chain: each meets its neighbours only, not equally often
        chain = np.diag(rng.integers(5, 60, players - 1), 1)
        likeliest(np.exp(np.cumsum(rng.normal(0, 0.5, players))), chain + chain.T)
