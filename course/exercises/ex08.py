"""Exercise 8: turn vectors by any positions, and stretch the speeds for a longer text.

    rotate(x, positions, speeds)        x (B, T, H, D), positions (B, T), speeds (D/2,)

turns the pair of channels (i, i + D/2) of each vector by position x speeds[i] radians, from the
first channel towards the second:

    rotate([[[[1.0, 0.0]]]], [[1]], [0.5]) -> [[[[0.878, 0.479]]]]          (cos 0.5, sin 0.5)

1. The result is a new array of x's shape and dtype (float32 or float64, as the speeds); x stays as
   it is.
2. Positions are whole numbers of any type, in any order: two texts in a row, one token far into its
   text. At position 1,000,000 the score of a query and a key still depends on their distance only,
   and the angle is still right, to 1e-8 radians if x is float64. Memory and time depend on the
   number of positions, not on how large they are.
   Negative positions turn backwards: rotate(rotate(x, p, s), -p, s) = x. yours.py needs that: the
   gradient of a rotation is the opposite rotation (spine.py, class Turn).

    stretch(speeds, factor, trained, low=1.0, high=4.0) -> speeds, float64

prepares a model that was trained on `trained` positions for `factor` times as many (Llama 3.1's
rule). In `trained` positions a pair makes trained x speed / (2 pi) turns:
3. one of more than `high` turns keeps its speed: it tells neighbours apart;
4. one of fewer than `low` turns gets its speed divided by `factor`: so even at the end of the
   longer text it comes to no angle that it has not met in training;
5. in between, the number that a speed is multiplied by rises evenly with the turns, from 1 / factor
   at `low` to 1 at `high`.
"""

import numpy as np


def rotate(x: np.ndarray, positions: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    raise NotImplementedError("write rotate, then: python course/check.py 8")


def stretch(
    speeds: np.ndarray, factor: float, trained: int, low: float = 1.0, high: float = 4.0
) -> np.ndarray:
    raise NotImplementedError("write stretch too, then: python course/check.py 8")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import tracemalloc

    import numpy as np
    from subject import same

    answer.may("rotate", whole="positions")
    rng = np.random.default_rng(15)

    def judge(x, positions, speeds, tolerance: float) -> None:
        """A pair of channels is a complex number."""
        half = len(speeds)
        turns = np.exp(1j * positions[:, :, None, None] * speeds)
        turned = (x[..., :half] + 1j * x[..., half:]) * turns
        right = np.concatenate([turned.real, turned.imag], -1).astype(x.dtype)
        same(answer.rotate(x, positions, speeds), right, "rules 1 and 2: the result", 0, tolerance)

    judge(np.array([[[[1.0, 0.0]]]]), np.array([[1]]), np.array([0.5]), 1e-8)
    speeds = 10_000.0 ** (-np.arange(8) / 8)
    x = rng.normal(size=(2, 6, 3, 16))
    mixed = rng.integers(-3000, 3000, (2, 6))
    far = np.array([[3, 300, 40_000, 70_000, 999_999, 1_000_000]] * 2)
    for dtype, tolerance in ((np.float64, 3e-8), (np.float32, 1e-5)):
        for positions in (mixed, mixed, far, -far):
            judge(x.astype(dtype), positions, speeds, tolerance)
    inner = mixed.copy()  # the same ends, smallest, largest and sum
    inner[:, 1:5] = mixed[:, 4:0:-1]
    judge(x, inner, speeds, 3e-8)
    judge(x.reshape(3, 4, 3, 16), inner.reshape(3, 4), speeds, 3e-8)
    judge(x, mixed, speeds / 3, 3e-8)
    judge(x, mixed.astype(np.int16), speeds.astype(np.float32), 3e-8)
    judge(-x, mixed, speeds, 3e-8)
    tracemalloc.start()
    try:
        answer.rotate(x[:, :2], np.array([[10**6, 5], [-(10**6), 7]]), speeds)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 10**6, f"rule 2: it takes {most / 1e6:,.0f} MB"
    for kind in (np.int8, np.uint8, np.int16, np.uint16):
        ends = np.array([[np.iinfo(kind).max, np.iinfo(kind).min, 0, 5]], kind)
        judge(x[:1, :4], ends, speeds, 3e-8)
    for shape in ((300, 1, 1, 2), (1, 70_000, 1, 2), (1, 2, 300, 4), (1, 1, 1, 600)):
        positions = rng.permutation(shape[0] * shape[1]).reshape(shape[:2])
        judge(rng.normal(size=shape), positions, rng.random(shape[3] // 2), 3e-8)
    judge(x[:1, :3], np.array([[2**24 + 1, 3 * 10**9, -(2**24) - 1]]), speeds, 1e-5)

    lines = [  # trained, factor, low, high
        (8192, 8.0, 1.0, 4.0),
        (8192, 2.5, 1.0, 4.0),
        (300, 8.0, 1.0, 4.0),
        (8192, 8.0, 2.0, 4.0),
        (8192, 8.0, 1.0, 32.0),
        (10**8, 1.0, 1.0, 4.0),
    ]
    turns = np.array(
        [
            [low / 50, low * 0.99, *np.linspace(low, high, 6), high * 1.01, high * 9]
            for _, _, low, high in lines
        ]
    )
    per_turn = np.array([[2 * np.pi / trained] for trained, *_ in lines])
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 1e-5)):
        speeds = (turns * per_turn).astype(dtype)
        for i, (trained, factor, low, high) in enumerate(lines):
            found = answer.stretch(speeds.ravel(), factor, trained, low, high)[10 * i :][:10]
            times = [1 / factor, 1 / factor, *np.linspace(1 / factor, 1, 6), 1, 1]
            shown = f"rules 3 to 5: of {turns[i].round(2).tolist()} turns the speed"
            same(found, times * speeds[i].astype(float), shown, tolerance, 0)
    answer.stretch(10_000.0 ** (-np.arange(0, 128, 2) / 128), 8.0, 8192)  # other speeds
    speeds = 500_000.0 ** (-np.arange(0, 128, 2) / 128)
    found = answer.stretch(speeds, 8.0, 8192)[[0, 28, 30, 34, 63]]
    golden = np.array([1.0, 0.003211446, 0.001371894, 0.0001785078, 3.068926e-07])
    same(found, golden, "Llama 3.1: of the pairs 0, 28, 30, 34, 63 the speed", 1e-3)
