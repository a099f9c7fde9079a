"""Exercise 40: draw a rank's part of a matrix, without the rest.

    draw_part(seed, name, shape, dim, rank, world) -> float32 array

A weight `name` of `shape` (rows, columns) is drawn from the normal distribution (mean 0, variance
1) and cut over `world` ranks: with dim 0 each has some of the rows, with dim 1 some of the columns,
consecutive ones, rank 0 the first; if they do not divide evenly, the first ranks have one more.
With dim None every rank has all of it. So draw_part(7, "up", (5, 3), 0, 1, 2) has rows 3 and 4.

1. The whole is the same, bit for bit, however it is cut: for any dim and world.
2. Another seed or another name gives other numbers, all of them: no row or column of one weight is
   also one of another, or twice in the same. Seeds are ints from 0 on, names any text.
3. A rank never holds the whole: at most 4 times the bytes of its part, and 2 MB.
4. It is the same in every process (there a text has another hash), and numpy's global random
   generator is neither used nor changed.

Hint: np.random.default_rng takes a list of ints, and two lists give different numbers (unless they
differ by zeros at the end only).
"""

import numpy as np


def draw_part(
    seed: int, name: str, shape: tuple[int, int], dim: int | None, rank: int, world: int
) -> np.ndarray:
    raise NotImplementedError("write draw_part, then: python course/check.py 40")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import builtins
    import tracemalloc
    import zlib

    class Name(str):
        """A text whose hash depends on the process."""

        def __hash__(self):
            return hash(("another process", str(self)))

    def part(seed, name, shape, dim, rank, world):
        case = f"draw_part({seed}, {name!r}, {shape}, {dim}, {rank}, {world})"
        before = np.random.get_state()[1].copy()
        got = answer.draw_part(seed, name, shape, dim, rank, world)
        assert np.array_equal(before, np.random.get_state()[1]), (
            f"{case} uses numpy's global generator"
        )
        want = list(shape)
        if dim is not None:
            want[dim] = shape[dim] // world + (rank < shape[dim] % world)
        kind = f"{got.dtype} {got.shape}" if isinstance(got, np.ndarray) else type(got)
        assert kind == f"float32 {tuple(want)}", f"{case} is {kind}, not float32 {tuple(want)}"
        return got

    def whole(seed, name, shape, dim=None, world=1):
        parts = [part(seed, name, shape, dim, rank, world) for rank in range(world)]
        return parts[0] if dim is None else np.concatenate(parts, dim)

    # 1. however it is cut
    for shape in ((8, 12), (5, 3), (7, 1), (1, 9), (3, 5000), (2, 2)):
        one = whole(3, "layers.0.up", shape)
        for dim, world in ((0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (1, 5), (0, 8), (1, 16)):
            got = whole(3, "layers.0.up", shape, dim, world)
            far = np.argwhere(got != one)
            assert not far.size, (
                f"shape {shape}, dim {dim}: element {far[0].tolist()} is {got[tuple(far[0])]} when "
                f"{world} ranks draw it, and {one[tuple(far[0])]} on one"
            )
        for rank in range(3):
            copy = part(3, "layers.0.up", shape, None, rank, 3)
            assert np.array_equal(copy, one), f"shape {shape}, dim None: rank {rank} differs"

    # 2. nothing twice
    big = whole(1, "w", (400, 500))
    for label, got, want, near in (
        ("mean", big.mean(), 0, 0.012),
        ("variance", big.var(), 1, 0.02),
        ("share within +-1", (np.abs(big) < 1).mean(), 0.6827, 0.006),
        ("share beyond +-3", (np.abs(big) > 3).mean(), 0.0027, 0.0007),
    ):
        assert abs(got - want) < near, f"the {label} of 200,000 numbers is {got:.4f}, not {want}"
    for shape in ((150_000, 2), (2, 150_000)):  # a sequence that begins anew, or a short one
        long = whole(1, "w", shape)
        pairs = np.ascontiguousarray(long if shape[0] > 2 else long.T).view(np.int64)
        twice = len(pairs) - len(np.unique(pairs))
        assert not twice, f"shape {shape}: {twice} pairs of numbers come again"
    again = len(big.ravel()) - len(np.unique(big))
    assert again < 0.02 * big.size, f"{again} of {big.size} numbers are there twice"
    lag = [abs((big[k:] * big[: len(big) - k]).mean()) for k in (1, 2, 100, 200)]
    assert max(lag) < 0.02, f"rows at a distance are correlated by {max(lag):.3f}"
    keys = [(s, n) for s in (0, 1, 2, 12) for n in ("a", "b", "2a", "ab", "ba", "layers.1.w")]
    keys += [(1, "layers.11.w"), (11, "layers.1.w"), (1, ""), (2**40, "a"), (2**32, "a"), (0, "é")]
    keys += [(10, "a"), (1, "0a"), (0, "a\0"), (97, ""), (3, "x" * 50), (3, "x" * 49 + "y")]
    keys += [(0, "c"), (0, "d"), (3, "a"), (4, "a"), (2, "1a"), (256, "a"), (1, "aa"), (0, "a" * 5)]
    keys += [(0, "A"), (0, " a"), (0, "a "), (0, ""), (3, "y" + "x" * 49), (1, "layers.01.w")]
    keys += [(1, "layers_1.w"), (0, "a" * 6)]
    crc = sorted((zlib.crc32(n.encode()), n) for n in ("a", "b"))  # seed + crc32(name) is no key
    keys += [(crc[1][0] - crc[0][0], crc[0][1])]
    keys += [(0, "plumless"), (0, "buckeroo")]  # which have the same crc32
    seen = {}
    for seed, name in keys:
        w = whole(seed, name, (12, 12))
        lines = [("row", i, x) for i, x in enumerate(w)] + [
            ("column", i, x) for i, x in enumerate(w.T)
        ]
        for kind, i, x in lines:
            text = x[:4].tobytes()
            here = f"{kind} {i} of {name!r}, seed {seed}"
            assert text not in seen, f"{here} begins like {seen[text]}"
            seen[text] = here
        values = np.unique(w).size
        assert values == 144, f"{name!r}, seed {seed}: only {values} of 144 numbers differ"
    firsts = {}
    for name in (f"layers.{i}.{w}" for i in range(500) for w in ("q", "k", "mlp.up", "mlp.down")):
        text = whole(1, name, (1, 3)).tobytes()
        assert text not in firsts, f"{name!r} has the numbers of {firsts[text]!r}"
        firsts[text] = name

    # 4. in every process
    real = builtins.hash
    before = whole(2, "up", (6, 6), 1, 2)
    try:
        builtins.hash = lambda x: real((real(x), "another process"))
        after = whole(2, Name("up"), (6, 6), 1, 2)
    finally:
        builtins.hash = real
    assert np.array_equal(before, after), "it changes with the hash of the name"
    state = np.random.get_state()
    np.random.seed(12345)
    other = whole(2, "up", (6, 6), 1, 2)
    np.random.set_state(state)
    assert np.array_equal(before, other), "it changes with numpy's global generator"

    # 3. not the whole
    for shape, dim, world in (
        ((2, 6_000_000), 1, 16),
        ((6_000_000, 2), 0, 16),
        ((900, 9000), 1, 30),
    ):
        rank = world - 1
        case = f"draw_part(1, 'w', {shape}, {dim}, {rank}, {world})"
        tracemalloc.start()
        try:
            got = part(1, "w", shape, dim, rank, world)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        limit = 4 * got.nbytes + 2_000_000
        assert most <= limit, f"{case} holds {most:,} bytes; its part has {got.nbytes:,}"
        assert abs(got.mean()) < 0.02 and abs(got.var() - 1) < 0.02, f"{case} is not normal"
