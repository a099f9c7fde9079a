"""Exercise 8: turn vectors by any positions, and stretch the speeds for a longer text.

    rotate(x, positions, speeds)        x (B, T, H, D), positions (B, T), speeds (D/2,)

turns the pair of channels (i, i + D/2) of each vector by position x speeds[i] radians, from the
first channel toward the second:

    rotate([[[[1.0, 0.0]]]], [[1]], [0.5]) -> [[[[0.878, 0.479]]]]          (cos 0.5, sin 0.5)

1. The result is a new array with x's shape and dtype. x is float32 or float64, and so are the
   speeds; the two may differ.
2. Positions are whole numbers of any type, in any order: two texts in a row, or one token far into
   its text. At position 1,000,000 the score of a query and a key still depends only on their
   distance, and the angle is still right, to 1e-8 radians if x is float64. Memory and time depend
   on how many positions there are, not on how large they are.
   Negative positions turn backward: rotate(rotate(x, p, s), -p, s) = x. yours.py needs that,
   because the gradient of a rotation is the opposite rotation (spine.py, class Turn).

    stretch(speeds, factor, trained, low=1.0, high=4.0) -> speeds, float64

prepares a model that was trained on `trained` positions for `factor` times as many (Llama 3.1's
rule). Over `trained` positions a pair makes trained x speed / (2 pi) turns:
3. A pair that makes more than `high` turns keeps its speed: it tells neighbors apart.
4. A pair that makes fewer than `low` turns has its speed divided by `factor`, so even at the end of
   the longer text it reaches no angle that it did not meet in training. (low may be 0: then there
   is no such pair.)
5. In between, the number that multiplies a speed rises evenly with the turns, from 1 / factor at
   `low` to 1 at `high`.
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

    def turn(what, x, positions, speeds, tolerance=3e-8):
        """A pair of channels is a complex number."""
        first, second = np.split(x, 2, -1)
        turned = (first + 1j * second) * np.exp(1j * positions[:, :, None, None] * speeds)
        right = np.concatenate([turned.real, turned.imag], -1).astype(x.dtype)
        same(answer.rotate(x, positions, speeds), right, f"{what}: the result", 0, tolerance)

    speeds = np.array([0.5, 0.1])
    x = np.array([[[[1.0, 2.0, 0.0, 0.0]]]])
    for position in (1, -1, 1_000_000):
        turn(f"position {position:,}", x, np.array([[position]]), speeds)
    x = np.random.default_rng(15).normal(size=(2, 4, 3, 4))
    far = np.array([[70_000, 3, -1_000_000, 5], [999_999, 1_000_000, -300, 40_000]])
    turn("float32 speeds", x, far, speeds.astype(np.float32))
    turn("float32 x", x.astype(np.float32), far, speeds, 1e-5)
    tracemalloc.start()
    answer.rotate(x, far, speeds)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**20, f"rule 2: eight positions take {most:,} bytes of memory"

    for rule, ends, turns, times in (
        (3, (), [36.0, 5.0], [1.0, 1.0]),
        (4, (), [0.02, 0.5], [0.125, 0.125]),
        (5, (), [1.6, 2.5], [0.3, 0.5625]),
        (5, (0.0, 32.0), [8.0, 16.0], [0.34375, 0.5625]),
    ):
        for dtype in (np.float64, np.float32):
            speeds = (np.array(turns) * 2 * np.pi / 70_000).astype(dtype)
            found = answer.stretch(speeds, 8.0, 70_000, *ends)
            what = f"rule {rule}: speeds of {turns} turns, to be multiplied by {times}: the result"
            same(found, speeds * np.array(times), what, 1e-6, 0)
