"""Exercise 8: the reference, and answers that the oracle must refuse."""

import random
from math import isqrt


def order(p, sizes, weights, seed, hashed):
    source, i = deal(p, weights)
    epoch, i = divmod(i, sizes[source])
    return source, shuffled(
        i, sizes[source], lambda text: hashed(f"{seed}/{source}/{epoch}/{text}")
    )


def deal(p, weights):
    """Position -> source, how many earlier positions it had. Rounds of sum(weights) positions, in
    which each goes to the source that is furthest behind its share."""
    total = sum(weights)
    whole_rounds, i = divmod(p, total)
    had = [0] * len(weights)
    for k in range(i + 1):
        behind = [(k + 1) * w - total * h for w, h in zip(weights, had)]
        source = behind.index(max(behind))
        had[source] += 1
    return source, whole_rounds * weights[source] + had[source] - 1


def shuffled(x, n, turn, rounds=8):
    """A Feistel network on pairs below a x b >= n; what falls outside n goes again."""
    b = isqrt(n)
    a = -(-n // b)
    while True:
        left, right = divmod(x, b)
        for i in range(0, rounds, 2):
            left = (left + turn(f"{i}/{right}")) % a
            right = (right + turn(f"{i + 1}/{left}")) % b
        x = left * b + right
        if x < n:
            return x


def by(key, shuffle=shuffled, deal=deal):
    """An answer with another key, shuffle, or share."""

    def order(p, sizes, weights, seed, hashed):
        source, i = deal(p, weights)
        epoch, i = divmod(i, sizes[source])
        name = key(seed, source, epoch)
        return source, shuffle(i, sizes[source], lambda text: hashed(f"{name}/{text}"))

    return dict(order=order)


right_key = "{}/{}/{}".format


def with_replacement(p, sizes, weights, seed, hashed):
    source, i = deal(p, weights)
    epoch, i = divmod(i, sizes[source])
    return source, (i + hashed(f"{seed}/{source}/{epoch}/{i}")) % sizes[source]


def a_list(x, n, turn):
    rows = list(range(n))
    for i in range(n - 1):
        j = i + turn(str(i)) % (n - i)
        rows[i], rows[j] = rows[j], rows[i]
    return rows[x]


def from_the_project(p, sizes, weights, seed, hashed):
    from data import Order

    return Order(sizes, weights, seed)(p)


def from_the_project_seeded(p, sizes, weights, seed, hashed):
    """The project's shuffle with a key by the hash: still a shuffle that somebody else wrote."""
    from data import Permutation

    source, i = deal(p, weights)
    epoch, i = divmod(i, sizes[source])
    return source, Permutation(sizes[source], hashed(f"{seed}/{source}/{epoch}/"))(i)


def random_numbers(p, sizes, weights, seed, hashed):
    """A generator of random numbers draws the source: right on average."""
    source = random.Random(f"{seed}/{p}").choices(range(len(sizes)), weights)[0]
    epoch, i = divmod(p * weights[source] // sum(weights), sizes[source])
    return source, shuffled(
        i, sizes[source], lambda text: hashed(f"{seed}/{source}/{epoch}/{text}")
    )


def walks_from_the_start(p, weights):
    """The time grows with p."""
    total, had = sum(weights), [0] * len(weights)
    for k in range(p + 1):
        behind = [(k + 1) * w - total * h for w, h in zip(weights, had)]
        source = behind.index(max(behind))
        had[source] += 1
    return source, had[source] - 1


def blocks_of_the_sources(p, weights):
    """In each round first all of one source, then all of the next: too far from the shares."""
    whole_rounds, i = divmod(p, sum(weights))
    for source, w in enumerate(weights):
        if i < w:
            return source, whole_rounds * w + i
        i -= w


WRONG = {  # name -> what of the reference it replaces
    "draws with replacement": dict(order=with_replacement),
    "one shuffle for all epochs": by(lambda seed, source, epoch: f"{seed}/{source}/0"),
    "one key for all sources": by(lambda seed, source, epoch: f"{seed}/0/{epoch}"),
    "a key that is a sum": by(lambda seed, source, epoch: seed + epoch + 1000 * source),
    "a sum behind the seed": by(lambda seed, source, epoch: f"{seed}/{1000 * source + epoch}"),
    "no separator in the key": by(lambda seed, source, epoch: f"{seed}{source}{epoch}"),
    "a list of all rows": by(right_key, a_list),
    "no shuffle above 1,000 rows": by(
        right_key, lambda x, n, turn: shuffled(x, n, turn) if n <= 1000 else x
    ),
    "shuffles in blocks of 1,000 rows": by(
        right_key,
        lambda x, n, turn: (
            x // 1000 * 1000
            + shuffled(
                x % 1000, min(1000, n - x // 1000 * 1000), lambda t: turn(f"{x // 1000}/{t}")
            )
        ),
    ),
    "two rounds": by(right_key, lambda x, n, turn: shuffled(x, n, turn, 2)),
    "no walk: a row below n by the remainder": by(
        right_key, lambda x, n, turn: shuffled(x, (isqrt(n) + 1) ** 2, turn) % n
    ),
    "rotates instead of shuffling": by(right_key, lambda x, n, turn: (x + turn("start")) % n),
    "from data import Order": dict(order=from_the_project),
    "from data import Permutation": dict(order=from_the_project_seeded),
    "draws the source": dict(order=random_numbers),
    "the time grows with the position": by(right_key, deal=walks_from_the_start),
    "one source after the other": by(right_key, deal=blocks_of_the_sources),
}

SHUFFLE = "another bijection that looks as random"
EQUIVALENT = {
    "behind = [(k + 1) * w - total * h for w, h in zip(weights, had)]: `1` -> `2`": (
        "deals in another order, and as evenly"
    ),
    "def shuffled(x, n, turn, rounds=8):: `8` -> `9`": SHUFFLE,
    "for i in range(0, rounds, 2):: `0` -> `1`": SHUFFLE,
    "for i in range(0, rounds, 2):: `2` -> `3`": SHUFFLE,
    'left = (left + turn(f"{i}/{right}")) % a: '
    "`left + turn(f'{i}/{right}')` -> `left - turn(f'{i}/{right}')`": SHUFFLE,
    'right = (right + turn(f"{i + 1}/{left}")) % b: '
    "`right + turn(f'{i + 1}/{left}')` -> `right - turn(f'{i + 1}/{left}')`": SHUFFLE,
    'right = (right + turn(f"{i + 1}/{left}")) % b: `i + 1` -> `i - 1`': SHUFFLE,
    'right = (right + turn(f"{i + 1}/{left}")) % b: `1` -> `2`': SHUFFLE,
}
