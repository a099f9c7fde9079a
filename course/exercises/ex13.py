"""Exercise 13: the bits per byte of a text, whatever its tokens.

    bits_of_text([ln 2, 3 ln 2], [1, 3]) -> 1.0        4 bits for 4 bytes

bits_of_text(nats, sizes) -> float: the loss of a text in bits per byte. nats (N,) are the losses of
    its N targets, -ln p, of any floating type; sizes (N,) how many bytes of text each stands for,
    whole numbers of any type.
    It is one number for the whole text: all bits over all bytes, not a mean over the targets. A
    target of no bytes (BOS, which the model must not be asked for) counts in neither sum. The sums
    are made in float64. At least one target has bytes.
"""

import numpy as np


def bits_of_text(nats: np.ndarray, sizes: np.ndarray) -> float:
    raise NotImplementedError("write bits_of_text, then: python course/check.py 13")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math

    import numpy as np
    from subject import same

    answer.may("bits_of_text", whole="sizes")
    rng = np.random.default_rng(32)
    texts = [  # nats, sizes
        (np.array([math.log(2), 3 * math.log(2)]), np.array([1, 3])),
        (np.array([1.0, 50.0, 2.0]), np.array([4, 0, 1])),
        (np.array([0.5, np.inf]), np.array([2, 0])),  # BOS ruled out
        (np.full(3000, 40, np.float16), np.full(3000, 3, np.uint8)),
        (np.full(40_000, 0.1, np.float16), np.full(40_000, 127, np.int8)),
        (np.append(np.full(2000, 1e-8, np.float32), np.float32(4)), np.full(2001, 1)),
    ]
    texts.append((np.array([1.0, np.inf, 2.0]), np.array([1, 2, 0])))  # a target of p = 0
    texts.append((np.array([1.0, np.nan]), np.array([1, 2])))
    texts.append((np.array([1.0, 2.0, 5.0]), np.array([300, 70_000, 3_000_000_000])))
    for n in (1, 7, 5000):
        sizes = np.append(rng.integers(0, 5, n), 2)
        texts.append((rng.exponential(2.0, n + 1), sizes))
        texts.append((rng.exponential(2.0, n + 1).astype(np.float32), sizes.astype(np.int16)))
    for nats, sizes in texts:
        found = answer.bits_of_text(nats, sizes)
        asked = [float(x) for x, size in zip(nats, sizes) if size]
        right = math.fsum(asked) / (sum(map(int, sizes)) * math.log(2))
        assert isinstance(found, float), f"{type(found)}, not a float"
        same(found, right, "it", 1e-10)
