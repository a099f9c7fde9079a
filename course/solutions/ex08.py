"""Exercise 8: the reference, and answers that the oracle must refuse."""

import random
from hashlib import blake2b
from math import isqrt


def order(p, sizes, weights, seed):
    source, i = deal(p, weights)
    epoch, i = divmod(i, sizes[source])
    return source, shuffled(i, sizes[source], f"{seed}/{source}/{epoch}")


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


def shuffled(x, n, key):
    """A Feistel network on pairs below side x side >= n; what falls outside n goes again."""
    side = isqrt(n - 1) + 1
    while True:
        left, right = divmod(x, side)
        for i in range(8):
            hashed = blake2b(f"{key}/{i}/{right}".encode(), digest_size=8).digest()
            left, right = right, (left + int.from_bytes(hashed, "big")) % side
        x = left * side + right
        if x < n:
            return x


def with_replacement(p, sizes, weights, seed):
    source, _ = deal(p, weights)
    return source, random.Random(f"{seed}/{p}").randrange(sizes[source])


def one_shuffle_for_all_epochs(p, sizes, weights, seed):
    source, i = deal(p, weights)
    return source, shuffled(i % sizes[source], sizes[source], f"{seed}/{source}")


def a_list(p, sizes, weights, seed):
    source, i = deal(p, weights)
    epoch, i = divmod(i, sizes[source])
    rows = list(range(sizes[source]))
    random.Random(f"{seed}/{source}/{epoch}").shuffle(rows)
    return source, rows[i]


def draws_the_source(p, sizes, weights, seed):
    """Right on average; the number of earlier rows of the source is a guess."""
    source = random.Random(f"{seed}/{p}").choices(range(len(sizes)), weights)[0]
    epoch, i = divmod(p * weights[source] // sum(weights), sizes[source])
    return source, shuffled(i, sizes[source], f"{seed}/{source}/{epoch}")


def rotates(p, sizes, weights, seed):
    """A different start in each epoch, and the same neighbours."""
    source, i = deal(p, weights)
    epoch, i = divmod(i, sizes[source])
    start = random.Random(f"{seed}/{source}/{epoch}").randrange(sizes[source])
    return source, (i + start) % sizes[source]


def one_key_for_all_sources(p, sizes, weights, seed):
    source, i = deal(p, weights)
    epoch, i = divmod(i, sizes[source])
    return source, shuffled(i, sizes[source], f"{seed}/{epoch}")


WRONG = {  # name -> what of the reference it replaces
    "draws with replacement": dict(order=with_replacement),
    "one shuffle for all epochs": dict(order=one_shuffle_for_all_epochs),
    "a list of all rows": dict(order=a_list),
    "draws the source": dict(order=draws_the_source),
    "rotates instead of shuffling": dict(order=rotates),
    "one key for all sources": dict(order=one_key_for_all_sources),
}
