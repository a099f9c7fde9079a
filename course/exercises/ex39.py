"""Exercise 39: eight bits for each number, and a scale for each block.

    quantize(x, block) -> codes, scales

x: float32, (n,). It is cut into blocks of `block` neighbours; the last may be shorter. codes: int8
(n,), from -127 to 127. scales: float32, one per block. A number is read back as code * scale of its
block. Rules:
1. no number is off by more than half a step (plus float32's rounding), where a step is the block's
   largest magnitude / 127;
2. the largest of a block has the code 127 or -127;
3. a block of zeros is read back as zeros; its scale is 0;
4. a block whose largest magnitude is below 1e-35 has no scale that float32 can hold with all its
   digits: it counts as a block of zeros;
5. x is not changed.
"""

import numpy as np


def quantize(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError("write quantize, then: python course/check.py 39")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    rng = np.random.default_rng(6)
    cases = [([1.0, -2.0, 0.5, 4.0], 2), ([0.0, 0.0, 3.0], 2), ([-5.0], 4), ([], 3)]
    cases += [([127.0, 0.6, 63.5, -1.4, -127.0], 5), ([1e-30, -3e-30, 1e30, 2e30], 2)]
    cases += [([1e-44, 0.0, -1e-40, 1e-39, 9.9e-36, -1e-36], 2), ([1.1e-35, -1e-37, 3e38, 1e38], 2)]
    cases += [([-3.4e38, 3.4e38, 0.5, -1e-44], 2), ([1e-44, 1.0, -2e-36, 2e-36], 2), ([-0.0], 1)]
    for n, block in ((64, 32), (100, 32), (33, 32), (7, 1), (50, 100), (40_000, 64)):
        x = rng.normal(0, 10.0 ** rng.integers(-12, 12), n)
        x[rng.integers(n)] *= 1000
        cases.append((x, block))
    for x, block in cases:
        x = np.array(x, np.float32)
        given = x.copy()
        with np.errstate(all="ignore"):
            codes, scales = answer.quantize(given, block)
        assert np.array_equal(given, x), f"x was changed: {given[:4]}, not {x[:4]}"
        assert codes.dtype == np.int8 and codes.shape == x.shape, (
            f"codes are {codes.dtype} {codes.shape}, should be int8 {x.shape}"
        )
        blocks = -(-len(x) // block)
        assert scales.dtype == np.float32 and scales.shape == (blocks,), (
            f"{len(x)} numbers in blocks of {block}: scales are {scales.dtype} {scales.shape}, "
            f"should be float32 {(blocks,)}"
        )
        for i in range(blocks):
            part, code = (a[i * block : (i + 1) * block].astype(float) for a in (x, codes))
            largest = np.abs(part).max()
            scale = float(scales[i])
            if largest < 1e-35:  # no normal number is its scale
                part = np.zeros_like(part)
                largest = 0.0
            shown = f"block {i}, {part[:4]}, scale {scale:.4g}, codes {code[:4]}"
            assert np.isfinite(scale) and (largest > 0 or scale == 0), f"a wrong scale: {shown}"
            assert np.abs(code).max() == (127 if largest else 0), (
                f"the largest, {largest:.4g}, has the code {np.abs(code).max():.0f}: {shown}"
            )
            off = np.abs(code * scale - part)
            worst = int(off.argmax())
            assert off[worst] <= largest / 127 * 0.50001, (
                f"{part[worst]:.5g} is read back as {code[worst] * scale:.5g}, off by "
                f"{off[worst] / (largest / 127):.2f} steps: {shown}"
            )
