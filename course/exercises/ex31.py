"""Exercise 31: the update of a parameter server, and its bytes.

server_update(w, gradients, lr, mode) -> the new weights
    w: a list of arrays; gradients: one such list per worker. SGD with the gradients' "sum" or
    "mean". Another thread may be sending `w` at this moment: leave it as it is.

bytes_sent(n, T, mode, floats=25_450) -> bytes that the server sends to its n workers together
    during T updates of a model of so many float32. In mode "sync" it sends the weights to all
    before each update, and at the end four bytes to each. In mode "async" it sends the weights
    to all once; then each update follows from one worker's gradient, and only that worker gets
    the new weights.
"""

import numpy as np


def server_update(
    w: list[np.ndarray], gradients: list[list[np.ndarray]], lr: float, mode: str
) -> list[np.ndarray]:
    raise NotImplementedError("write server_update, then: python course/check.py 31")


def bytes_sent(n: int, T: int, mode: str, floats: int = 25_450) -> int:
    raise NotImplementedError("write bytes_sent, then: python course/check.py 31")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    rng = np.random.default_rng(15)
    for n in (1, 2, 3, 5):
        w = [rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (1, 3))]
        gradients = [[rng.normal(size=p.shape).astype(np.float32) for p in w] for _ in range(n)]
        before = [p.copy() for p in w]
        for mode, lr in (("sum", 0.01), ("mean", 0.01), ("sum", 0.5), ("mean", 0.5)):
            new = answer.server_update(w, gradients, lr, mode)
            case = f"{n} workers, mode {mode}, lr {lr}"
            assert len(new) == len(w), f"{case}: {len(w)} arrays go in, {len(new)} come out"
            for i, (p, q) in enumerate(zip(before, new)):
                step = np.zeros(p.shape)
                for g in gradients:
                    step += g[i].astype(float) / (n if mode == "mean" else 1)
                found = (p.astype(float) - q) / lr
                at = int(np.abs(found - step).argmax())
                assert np.abs(found - step).max() < 1e-3, (
                    f"{case}: number {at} of array {i} falls by lr x {found.flat[at]:.4f}, "
                    f"the {mode} of the gradients there is {step.flat[at]:.4f}"
                )
                assert (w[i] == p).all(), f"{case}: array {i} of w itself was changed"
    published = {  # the table of the monograph: T = 5,000
        ("sync", 1): 509_000_004,
        ("sync", 2): 1_018_000_008,
        ("sync", 3): 1_527_000_012,
        ("async", 1): 509_101_800,
        ("async", 2): 509_203_600,
        ("async", 3): 509_305_400,
    }
    cases = [(n, 5000, mode, 25_450, right) for (mode, n), right in published.items()]
    cases += [(4, 0, "sync", 10, 16), (4, 0, "async", 10, 160), (7, 3, "sync", 1, 112)]
    for n, T, mode, floats, right in cases:
        said = answer.bytes_sent(n, T, mode, floats)
        assert said == right, f"bytes_sent({n}, {T}, {mode!r}, {floats}) is {right:,}, not {said:,}"
    said = answer.bytes_sent(1, 1, "async")
    assert said == 203_600, f"bytes_sent(1, 1, 'async') is 203,600 with 25,450 floats, not {said:,}"
