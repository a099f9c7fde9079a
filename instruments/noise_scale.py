"""The gradient noise scale: how many tokens a step are worth averaging (McCandlish et al. 2018).

Reads the gradient norms of the first micro-batch of a step and of the whole step; gives
tr(Sigma) / |G|^2 in tokens. A batch far below it wastes steps, one far above it wastes tokens.
Sigma: covariance of the gradient of one token; G: the true gradient. train.py calls `first` and
`whole` on every step that is due.
"""

from __future__ import annotations

import math

from torch import Tensor


class NoiseScale:
    """tr(Sigma) / |G|^2 from the gradients of two batch sizes, averaged over the steps.

    A mean gradient over B tokens has E|g|^2 = |G|^2 + tr(Sigma) / B. Two sizes, two equations
    (appendix A.1). One step's estimates are wild, and a ratio of wild numbers is biased, so each
    is averaged before the ratio: `grad_sq` (|G|^2) and `trace` (tr(Sigma) of one token).
    """

    def __init__(self, every: int = 1, decay: float = 0.95):
        """every: steps between estimates. decay: of the exponential moving averages."""
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
        small_norm, small_rows = self._first
        small_sq, big_sq = small_norm.item() ** 2, norm.item() ** 2
        if math.isfinite(small_sq + big_sq):  # a skipped step must not spoil the average
            self.update(small_sq, big_sq, small_rows * seq_len, rows * seq_len)
        return self.tokens

    def update(self, small_sq: float, big_sq: float, b_small: int, b_big: int) -> None:
        """small_sq, big_sq: |gradient|^2 of the mean loss over b_small and b_big tokens. With equal
        sizes there is nothing to compare and nothing happens."""
        if b_small == b_big:
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
