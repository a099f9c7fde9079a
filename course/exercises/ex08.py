"""Exercise 8: turn vectors by any positions, and stretch the speeds for a longer text.

    rotate(x, positions, speeds)        x (B, T, H, D), positions (B, T), speeds (D/2,)

turns the pair of channels (i, i + D/2) of each vector by position x speeds[i] radians, from the
first channel towards the second:

    rotate([[[[1.0, 0.0]]]], [[1]], [0.5]) -> [[[[0.878, 0.479]]]]          (cos 0.5, sin 0.5)

1. The result is a new array of x's shape and dtype (float32 or float64); x stays as it is.
2. Positions are whole numbers in any order: two texts in a row, one token far into its text. At
   position 1,000,000 the score of a query and a key still depends on their distance only, and the
   angle is still right, to 1e-8 radians if x is float64. Memory and time depend on the number of
   positions, not on how large they are.
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

    import torch

    from model import apply_rope, rope_tables

    rng = np.random.default_rng(15)

    def rotate(x, positions, speeds):
        given = x.copy(), positions.copy(), speeds.copy()
        y = answer.rotate(x, positions, speeds)
        what = f"x {x.dtype} {x.shape}, positions {positions.dtype} {positions.tolist()}"
        same = [np.array_equal(a, b) for a, b in zip(given, (x, positions, speeds))]
        assert all(same) and y is not x, f"rule 1: an argument was changed: {what}"
        assert isinstance(y, np.ndarray) and (y.dtype, y.shape) == (x.dtype, x.shape), (
            f"rule 1: the result is {getattr(y, 'dtype', type(y))} {np.shape(y)}: {what}"
        )
        return y, what

    y, _ = rotate(np.array([[[[1.0, 0.0]]]]), np.array([[1]]), np.array([0.5]))
    assert np.allclose(y.ravel(), [0.877583, 0.479426]), (
        f"(1, 0) at position 1, speed 0.5, becomes {y.ravel().tolist()}, not (0.878, 0.479)"
    )
    for B, T, H, D in ((1, 1, 1, 2), (2, 9, 3, 8), (3, 20, 1, 64), (1, 5, 2, 6)):
        for dtype in (np.float32, np.float64):
            x = rng.normal(size=(B, T, H, D)).astype(dtype)
            cos, sin = rope_tables(T, D, 10_000.0)
            expected = apply_rope(torch.from_numpy(x), cos, sin).numpy()
            speeds = 10_000.0 ** (-np.arange(0, D, 2) / D)
            y, what = rotate(x, np.tile(np.arange(T), (B, 1)), speeds)
            worst = np.unravel_index(np.abs(y - expected).argmax(), y.shape)
            assert np.allclose(y, expected, atol=1e-4), (
                f"at (row, position, head, channel) {tuple(map(int, worst))}: {y[worst]:.4f}, "
                f"where model.apply_rope gives {expected[worst]:.4f}: {what}"
            )
            order = rng.permuted(np.tile(np.arange(T), (B, 1)), axis=1)
            mixed, what = rotate(np.take_along_axis(x, order[..., None, None], 1), order, speeds)
            assert np.allclose(
                mixed, np.take_along_axis(y, order[..., None, None], 1), atol=1e-5
            ), f"rule 2: the same vectors and positions in another order, another result: {what}"
    q, k = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    speeds = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    for distance in (0, 1, 7, 300):
        scores = {}
        for start in (0, 5, 30_000, 1_000_000):
            a, _ = rotate(q, np.array([[start + distance]]), speeds)
            b, _ = rotate(k, np.array([[start]]), speeds)
            scores[start] = float((a * b).sum())
        for start, score in scores.items():
            assert abs(score - scores[0]) < 1e-4, (
                f"rule 2: q at {start + distance:,} and k at {start:,} have the score {score:.4f}; "
                f"at {distance} and 0 it is {scores[0]:.4f}"
            )

    x = rng.normal(size=(1, 3, 1, 16))
    far = np.array([[3, 40_000, 1_000_000]])
    y, what = rotate(x, far, speeds)
    turn = np.exp(1j * far[..., None, None] * speeds)  # a pair as a complex number
    turned = (x[..., :8] + 1j * x[..., 8:]) * turn
    off = np.abs(y - np.concatenate([turned.real, turned.imag], -1)).max((0, 2, 3))
    assert off.max() < 1e-7, (
        f"rule 2: at position {far[0, off.argmax()]:,} a channel is off by {off.max():.1e}: {what}"
    )

    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 1e-4)):
        x = rng.normal(size=(2, 5, 3, 16)).astype(dtype)
        there = rng.integers(-3000, 3000, (2, 5))
        back, what = rotate(rotate(x, there, speeds)[0], -there, speeds)
        assert np.allclose(back, x, atol=tolerance), (
            f"rule 2: turned by p and by -p, x is off by {np.abs(back - x).max():.1e}: {what}"
        )
        alone = np.concatenate(
            [rotate(x[:, t : t + 1], there[:, t : t + 1], speeds)[0] for t in range(5)], 1
        )
        together, what = rotate(x, there, speeds)
        assert np.allclose(alone, together, atol=tolerance), (
            f"rule 2: alone, another result: {what}"
        )
    tracemalloc.start()
    try:
        rotate(x[:, :2], np.array([[10**6, 5], [-(10**6), 7]]), speeds)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 10**6, f"rule 2: at position 10^6 it takes {most / 1e6:,.0f} MB"

    def stretch(speeds, *how, **named):
        given = speeds.copy()
        out = answer.stretch(speeds, *how, **named)
        assert np.array_equal(given, speeds), f"stretch changed its argument: {how}"
        assert out.shape == speeds.shape, f"stretch returns {out.shape} for {speeds.shape}"
        assert out.dtype == np.float64, f"stretch returns {out.dtype}, should be float64"
        return out

    for factor, trained, low, high in (
        (8.0, 8192, 1.0, 4.0),
        (4.0, 2048, 1.0, 32.0),
        (2.5, 300, 2.0, 3.0),
        (1.0, 512, 1.0, 4.0),
    ):
        case = f"factor {factor}, trained {trained}, low {low}, high {high}"
        per_turn = 2 * np.pi / trained
        for turns, rule in ((high * 1.01, 3), (high * 9, 3), (low * 0.99, 4), (low / 50, 4)):
            speed = turns * per_turn
            (found,) = stretch(np.array([speed]), factor, trained, low=low, high=high)
            expected = speed if rule == 3 else speed / factor
            assert np.isclose(found, expected, rtol=1e-9), (
                f"rule {rule}: a pair of {turns:.3g} turns, speed {speed:.6g}, gets {found:.6g}, "
                f"should be {expected:.6g}: {case}"
            )
        turns = low + (high - low) * np.array([0.001, 0.25, 0.5, 0.75, 0.999])
        times = stretch(turns * per_turn, factor, trained, low=low, high=high) / (turns * per_turn)
        shown = f"{np.round(times, 4).tolist()} at {np.round(turns, 2).tolist()} turns: {case}"
        ends = abs(times[0] - 1 / factor) < 0.01 and abs(times[-1] - 1) < 0.01
        assert ends, f"rule 5: speeds just inside the limits are multiplied by {shown}"
        rises = np.diff(times[1:4])
        assert np.allclose(times[2], times[[1, 3]].mean()) and np.allclose(rises, rises[0]), (
            f"rule 5: it does not rise evenly, but is {shown}"
        )
    speeds = 500_000.0 ** (-np.arange(0, 128, 2) / 128)  # Llama 3.1
    golden = {0: 1.0, 28: 0.003211446, 30: 0.001371894, 34: 0.0001785078, 63: 3.068926e-07}
    found = stretch(speeds, 8.0, 8192)
    for i, expected in golden.items():
        assert np.isclose(found[i], expected, rtol=1e-3), (
            f"Llama 3.1: the speed of pair {i} is {found[i]:.7g}, should be {expected:.7g}"
        )
