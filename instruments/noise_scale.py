"""The gradient noise scale: up to how many tokens a larger batch pays off (McCandlish et al. 2018).

Reads the gradient norms of the first micro-batch of a step and of the whole step; estimates
tr(Sigma) / |G|^2 in tokens. A batch far below it wastes steps, one far above it wastes tokens.
Sigma: covariance of the gradient of one token; G: the true gradient. Next: train.py, which calls
`first` and `whole`.
"""

import math

from torch import Tensor


class NoiseScale:
    """tr(Sigma) / |G|^2 from the gradients of two batch sizes, estimated every `every` steps.

    A mean gradient over B tokens has E|g|^2 = |G|^2 + tr(Sigma) / B. Two sizes, two equations
    (appendix A.1). One step's estimates are noisy, and a ratio of noisy numbers is biased, so
    `grad_sq` (|G|^2) and `trace` (tr(Sigma) of one token) are moving averages with `decay`.
    """

    def __init__(self, every: int = 1, decay: float = 0.95):
        self.every, self.decay = every, decay
        self.grad_sq = self.trace = self._weight = 0.0

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def first(self, step: int, norm: Tensor, rows: int) -> None:
        """norm: () of the gradient averaged over the first `rows` rows."""
        if self.is_due(step):
            self._first = (norm, rows)

    def whole(self, norm: Tensor, rows: int, seq_len: int) -> float | None:
        """norm: () of the gradient averaged over all `rows` rows of the step. Waits for the
        device; returns `tokens`."""
        first_norm, first_rows = self._first
        small_sq, big_sq = first_norm.item() ** 2, norm.item() ** 2
        if math.isfinite(small_sq + big_sq):  # a skipped step must not spoil the average
            self.update(small_sq, big_sq, first_rows * seq_len, rows * seq_len)
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
