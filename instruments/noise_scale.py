"""The gradient noise scale: up to how many tokens a larger batch pays off (McCandlish et al. 2018).

Reads the gradient norms of the first micro-batch of a step and of the whole step; estimates
tr(Sigma) / |G|^2 in tokens. A batch far below it wastes steps, one far above it wastes tokens.
Sigma: covariance of the gradient of one token; G: the true gradient. Arithmetic on numbers that
have arrived on the host: nothing here waits for the device. Next: train.py, which calls `measure`.
"""

import math

from config import UsageError


class NoiseScale:
    """tr(Sigma) / |G|^2 from the gradients of two batch sizes, estimated every `every` steps.

    A mean gradient over B tokens has E|g|^2 = |G|^2 + tr(Sigma) / B. Two sizes, two equations
    (appendix A.1). One step's estimates are noisy, and a ratio of noisy numbers is biased, so
    `grad_sq` (|G|^2) and `trace` (tr(Sigma) of one token) are moving averages with `decay`.
    """

    def __init__(self, every: int = 1, decay: float = 0.95, marks: tuple[int, ...] = ()):
        """marks: of the data's conversations (data.targets_of); with any, UsageError."""
        if marks:
            raise UsageError(
                f"--noise_scale_every {every} compares gradients of equally many tokens, but of "
                "conversations only the answers count, more in some rows than in others; leave it "
                "out"
            )
        self.every, self.decay = every, decay
        self.grad_sq = self.trace = self._weight = 0.0

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def measure(
        self, first_norm: float, norm: float, first_rows: int, rows: int, seq_len: int
    ) -> float | None:
        """norm: of the mean gradient over the `rows` of a step; first_norm: of that over the first
        `first_rows` of them. Returns `tokens`."""
        if math.isfinite(first_norm) and math.isfinite(norm):  # a skipped step must not count
            self.update(first_norm**2, norm**2, first_rows * seq_len, rows * seq_len)
        return self.tokens

    def update(self, small_sq: float, big_sq: float, b_small: int, b_big: int) -> None:
        """small_sq, big_sq: |gradient|^2 of the mean loss over b_small and b_big tokens."""
        if b_small == b_big:  # nothing to compare
            return
        grad_sq = (b_big * big_sq - b_small * small_sq) / (b_big - b_small)
        trace = (small_sq - big_sq) / (1 / b_small - 1 / b_big)
        self._weight = 1 + self.decay * self._weight  # of all estimates so far; the newest has 1
        self.grad_sq += (grad_sq - self.grad_sq) / self._weight
        self.trace += (trace - self.trace) / self._weight

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens; None (print `n/a`) if unknown or drowned in the noise."""
        return self.trace / self.grad_sq if self.grad_sq > 0 else None
