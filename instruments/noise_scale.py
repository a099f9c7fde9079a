"""The gradient noise scale: how many tokens a step are worth averaging (McCandlish et al. 2018).

Reads the gradient norms of the first micro-batch of a step and of the whole step; gives
tr(Sigma) / |G|^2 in tokens. A batch far below it wastes steps, one far above it wastes tokens.
Sigma: covariance of the gradient of one token; G: the true gradient. train.py calls `first` and
`whole` on every step that is due.
"""

from __future__ import annotations

import math


class NoiseScale:
    """tr(Sigma) / |G|^2 from batches of two sizes, both averaged over time before the ratio.

    A mean gradient over B tokens has E|g|^2 = |G|^2 + tr(Sigma) / B. Two sizes, two equations
    (appendix A.1). One step's estimates are wild, and a ratio of wild numbers is biased: so each
    is averaged first, with an exponential moving average that starts unbiased (as Adam's do).
    """

    def __init__(self, every: int = 1, decay: float = 0.95):
        """every: steps between estimates."""
        self.every, self.decay = every, decay
        self.n_updates = 0
        self._sums = [0.0, 0.0]  # moving averages of |G|^2 and tr(Sigma), before bias correction

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def first(self, step: int, norm, rows: int) -> None:
        """norm: 0-D tensor, that of the gradient averaged over the first `rows` rows."""
        if self.is_due(step):
            self._first = (norm, rows)

    def whole(self, norm, rows: int, seq_len: int) -> float | None:
        """norm: of the gradient averaged over all `rows` rows of the step. Returns the noise scale
        in tokens. Waits for the device."""
        small_norm, small_rows = self._first
        small_sq, big_sq = small_norm.item() ** 2, norm.item() ** 2
        if math.isfinite(small_sq + big_sq):  # a skipped step must not spoil the average
            self.update(small_sq, big_sq, small_rows * seq_len, rows * seq_len)
        return self.tokens

    def update(self, small_sq: float, big_sq: float, b_small: int, b_big: int) -> None:
        """small_sq, big_sq: |gradient|^2 of the mean loss over b_small and b_big tokens.

        The small batch is the step's first micro-batch, the big one the whole step. With equal
        sizes there is nothing to compare and nothing happens.
        """
        if b_small == b_big:
            return
        grad_sq = (b_big * big_sq - b_small * small_sq) / (b_big - b_small)
        trace = (small_sq - big_sq) / (1 / b_small - 1 / b_big)
        for i, new in enumerate((grad_sq, trace)):
            self._sums[i] = self.decay * self._sums[i] + (1 - self.decay) * new
        self.n_updates += 1

    @property
    def grad_sq(self) -> float | None:
        """|G|^2, averaged; None before the first update."""
        return self._sums[0] / (1 - self.decay**self.n_updates) if self.n_updates else None

    @property
    def trace(self) -> float | None:
        """tr(Sigma) of one token, averaged; None before the first update."""
        return self._sums[1] / (1 - self.decay**self.n_updates) if self.n_updates else None

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens; None (print `n/a`) if unknown or drowned in the noise."""
        return self.trace / self.grad_sq if self.n_updates and self.grad_sq > 0 else None
