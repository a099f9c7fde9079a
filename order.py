"""Which row comes when: position p, any p >= 0 -> (source, row), with no table and no state.

    p --Quota--> (source, i-th row drawn from it) --Permutation of that epoch--> (source, row)

Both steps are arithmetic on p: position 10^12 costs what position 0 does, a run resumes anywhere,
and all ranks agree without a word. Next: data.py (RowLoader reads the rows).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

MASK = 2**64 - 1


def mix(x: int) -> int:
    """64 bits -> 64 well-mixed bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Permutation:
    """A keyed bijection of 0..n-1, computed one element at a time: no table, whatever n.

    A Feistel network on pairs (l, r) with l < a, r < b, a * b just above n (Black and Rogaway
    2002): each round adds to one half a keyed hash of the other half, which can be undone, so the
    whole can. A result outside 0..n-1 goes through again (cycle walking; rare, as a * b is hardly
    above n). 12 rounds; 4 are visibly biased on small sets.
    """

    ROUNDS = 12

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self.b = max(1, math.isqrt(n))
        self.a = -(-n // self.b)
        name = "/".join(map(str, key))
        self.keys = [
            int.from_bytes(hashlib.blake2b(f"{name}/{i}".encode(), digest_size=8).digest(), "big")
            for i in range(self.ROUNDS)
        ]

    def __call__(self, x: int) -> int:
        a, b, keys = self.a, self.b, self.keys
        while True:
            left, right = divmod(x, b)
            for i in range(0, self.ROUNDS, 2):
                left = (left + mix((right + keys[i]) & MASK)) % a
                right = (right + mix((left + keys[i + 1]) & MASK)) % b
            x = left * b + right
            if x < self.n:
                return x


class Quota:
    """Deals positions 0, 1, 2, ... to sources in exact proportion to their weights, in O(1).

    The sources are the leaves of a binary tree. Of the n positions that reach a node, the left
    branch has had round(n * its share): whole numbers, exact at any n. So the i-th source has had
    p * w_i of the first p positions, within 1 for up to 4 sources and within 1.5 for up to 16.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(w)) for w in weights]  # 0.05 means 1/20
        if not exact or min(exact) < 0 or sum(exact) == 0:
            raise ValueError(f"mixture weights {list(weights)} must be >= 0, and not all 0")
        unit = math.lcm(*(w.denominator for w in exact))
        leaves = [(int(w * unit), i) for i, w in enumerate(exact) if w]
        leaves.sort(key=lambda leaf: (-leaf[0], leaf[1]))
        self.count = len(weights)
        self.tree = self._build(leaves, Fraction(0), root=True)[1]

    def _build(self, leaves: list, above: Fraction, root: bool = False) -> tuple:
        """(error bound, tree). A rounding error made at a node of weight W reaches a leaf of
        weight w scaled by w / W: of the possible trees, take that with the smallest sum."""
        if len(leaves) == 1:
            return leaves[0][0] * above, leaves[0][1]
        total = sum(w for w, _ in leaves)
        above = above if root else above + Fraction(1, total)
        if len(leaves) <= 6:
            cuts = range(1, len(leaves))
        else:  # too many trees to try: split where the halves are the most equal
            cuts = [min(range(1, len(leaves)),
                        key=lambda k: abs(total - 2 * sum(w for w, _ in leaves[:k])))]
        best = None
        for k in cuts:
            left, right = self._build(leaves[:k], above), self._build(leaves[k:], above)
            bound = max(left[0], right[0])
            if best is None or bound < best[0]:
                best = bound, (left[1], right[1], sum(w for w, _ in leaves[:k]), total)
        return best

    def __call__(self, p: int) -> tuple[int, int]:
        """Position p -> (source, how many earlier positions that source had)."""
        node = self.tree
        while isinstance(node, tuple):
            left, right, w, total = node
            had = (2 * p * w + total) // (2 * total)  # round(p * w / total)
            if (2 * (p + 1) * w + total) // (2 * total) > had:
                node, p = left, had
            else:
                node, p = right, p - had
        return node, p

    def counts(self, p: int) -> list[int]:
        """How many of the first p positions each source has had."""
        counts = [0] * self.count
        todo = [(self.tree, p)]
        while todo:
            node, n = todo.pop()
            if isinstance(node, tuple):
                left, right, w, total = node
                had = (2 * n * w + total) // (2 * total)
                todo += [(left, had), (right, n - had)]
            else:
                counts[node] = n
        return counts


class Order:
    """Position p, any p >= 0 -> (source, row). A pure function: nothing to save, nothing to replay.

    p -> (source, i-th row drawn from it) by quota -> epoch, index = divmod(i, size) -> that epoch's
    permutation of the source's rows. From position `decay_from` on, `decay_weights` hold; each
    source goes on where it was, so that no row comes twice before all have come once.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, *,
                 decay_weights: Sequence[float] | None = None, decay_from: int = 0) -> None:
        if len(sizes) != len(weights):
            raise ValueError(f"{len(sizes)} sources but {len(weights)} mixture weights")
        self.sizes, self.seed = list(sizes), seed
        self.stages = [(0, [0] * len(sizes), Quota(weights))]  # (from, counts there, quota)
        if decay_weights is not None:
            if len(sizes) != len(decay_weights):
                raise ValueError(f"{len(sizes)} sources but {len(decay_weights)} decay weights")
            before = self.stages[0][2].counts(decay_from)
            self.stages.append((decay_from, before, Quota(decay_weights)))
        for i, size in enumerate(sizes):
            if size < 1 and any(w[i] for w in (weights, decay_weights) if w is not None):
                raise ValueError(f"source {i} has no rows to draw from; give it more text or "
                                 "weight 0")
        self._permutation = lru_cache(maxsize=64)(
            lambda source, epoch: Permutation(self.sizes[source], seed, source, epoch))

    def __call__(self, p: int) -> tuple[int, int]:
        start, before, quota = self.stages[-1 if p >= self.stages[-1][0] else 0]
        source, i = quota(p - start)
        epoch, i = divmod(i + before[source], self.sizes[source])
        return source, self._permutation(source, epoch)(i)

    def epochs(self, p: int) -> list[float]:
        """How many times the first p positions went through each source."""
        start, before, quota = self.stages[-1 if p >= self.stages[-1][0] else 0]
        counts = [a + b for a, b in zip(before, quota.counts(p - start))]
        return [n / size if size else 0.0 for n, size in zip(counts, self.sizes)]
