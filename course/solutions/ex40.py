"""Exercise 40: the reference, and answers that the oracle must refuse."""

import zlib

import numpy as np

BLOCK = 4096  # numbers that one generator makes


def bounds(n, rank, world):
    edges = [n // world * r + min(r, n % world) for r in (rank, rank + 1)]
    return edges[0], edges[1]


def numbers(key, start, stop):
    """Numbers start .. stop - 1 of an endless sequence, which is made in blocks."""
    out = np.empty(stop - start, np.float32)
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        made = np.random.default_rng([*key, block]).standard_normal(BLOCK, np.float32)
        a = max(start, block * BLOCK)
        b = min(stop, (block + 1) * BLOCK)
        out[a - start : b - start] = made[a - block * BLOCK : b - block * BLOCK]
    return out


def text_key(name):
    data = name.encode()
    return [len(data), *data]


def draw(key, shape, dim, rank, world):
    rows, columns = shape
    if dim == 1:
        a, b = bounds(columns, rank, world)
        return np.stack([numbers(key, i * columns + a, i * columns + b) for i in range(rows)])
    first, last = bounds(rows, rank, world) if dim == 0 else (0, rows)
    return numbers(key, first * columns, last * columns).reshape(last - first, columns)


def draw_part(seed, name, shape, dim, rank, world):
    return draw([*divmod(seed, 2**32), *text_key(name)], shape, dim, rank, world)


def cut(whole, dim, rank, world):
    return whole if dim is None else np.array_split(whole, world, dim)[rank].copy()


def keyed(key):
    """The reference with another key for a name and a seed."""
    return lambda seed, name, *cut: draw(key(seed, name), *cut)


def begins_anew(seed, name, shape, dim, rank, world):
    """Rows come again after 65,536."""
    rows, columns = shape
    first, last = bounds(rows, rank, world) if dim == 0 else (0, rows)
    a, b = bounds(columns, rank, world) if dim == 1 else (0, columns)
    key = [*divmod(seed, 2**32), *text_key(name)]
    out = np.empty((last - first, b - a), np.float32)
    for i, row in enumerate(range(first, last)):
        at = row % 65536 * columns
        out[i] = numbers(key, at + a, at + b)
    return out


def in_float64(*args):
    return draw_part(*args).astype(float)


WRONG = {  # name -> what of the reference it replaces
    "ignores the seed": dict(draw_part=keyed(lambda s, n: text_key(n))),
    "seed and name as one text": dict(draw_part=keyed(lambda s, n: [*f"{s}{n}".encode()])),
    "seed + number of the name": dict(draw_part=keyed(lambda s, n: [s + zlib.crc32(n.encode())])),
    "a number of 32 bits for the name": dict(
        draw_part=keyed(lambda s, n: [*divmod(s, 2**32), zlib.crc32(n.encode())])
    ),
    "32 bits of the seed": dict(draw_part=keyed(lambda s, n: [s % 2**32, *text_key(n)])),
    "rows come again": dict(draw_part=begins_anew),
    "a number of 16 bits for the name": dict(
        draw_part=keyed(lambda s, n: [*divmod(s, 2**32), zlib.crc32(n.encode()) % 2**16])
    ),
    "float64": dict(draw_part=in_float64),
}

SPLIT = "return draw([*divmod(seed, 2**32), *text_key(name)], shape, dim, rank, world): "
WHY = "any divisor above 1 gives two numbers from which the seed follows"
EQUIVALENT = {  # a change that changes nothing -> why
    SPLIT + "`2 ** 32` -> `2 * 32`": WHY,
    SPLIT + "`2` -> `3`": WHY,
    SPLIT + "`32` -> `33`": WHY,
}
