"""Exercise 13: the bits per byte of a text, whatever its tokens.

    bits_of_text([ln 2, 3 ln 2], [1, 3]) -> 1.0        4 bits for 4 bytes

bits_of_text(nats, sizes) -> float: the loss of a text in bits per byte. nats (N,) holds the losses
    of its N targets, -ln p, in any floating type; sizes (N,) says how many bytes of text each
    target stands for, as whole numbers of any type.
    Return one number for the whole text: all bits over all bytes, not a mean over the targets. A
    target of no bytes (such as BOS, which is not text) counts in neither sum. Add up in
    float64. At least one target has bytes.
"""

import numpy as np


def bits_of_text(nats: np.ndarray, sizes: np.ndarray) -> float:
    raise NotImplementedError("write bits_of_text, then: python course/check.py 13")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import numpy as np
    from subject import same

    answer.may("bits_of_text", whole="sizes")

    def judge(rule, nats, sizes, right):
        found = answer.bits_of_text(np.array(nats), np.array(sizes))
        same(found, right, f"{rule}: the result", 1e-10)

    ln2 = np.log(2)
    judge("the text's example", [ln2, 3 * ln2], [1, 3], 1)
    judge("all bits over all bytes", [ln2, 2 * ln2], [4, 1], 3 / 5)
    judge("BOS counts in neither sum", [ln2, 50, np.inf, ln2], [1, 0, 0, 3], 2 / 4)
    nats = [4096, 1, 2**-13]  # not even float32 has their sum
    sizes = np.array([200, 100, 1], np.uint8)
    judge("sums in float64", np.array(nats, np.float16), sizes, sum(nats) / (301 * ln2))
