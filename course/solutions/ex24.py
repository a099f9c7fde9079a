"""Exercise 24: the reference, and answers that the oracle must refuse."""

import torch


class RingCache:
    def __init__(self, batch, n_kv_head, window, head_dim, dtype=torch.float32):
        self.k, self.v = torch.zeros(2, batch, n_kv_head, window, head_dim, dtype=dtype)
        self.length = torch.zeros(batch, dtype=torch.long)  # positions of each text so far
        self.window = window

    def prefill(self, k, v, lengths):
        for row, length in enumerate(lengths):
            last = torch.arange(max(0, length - self.window), length)
            for ring, given in ((self.k, k), (self.v, v)):
                ring[row, :, last % self.window] = given[row, :, last]
            self.length[row] = length

    def step(self, q, k, v, active):
        rows = active.nonzero().flatten()
        place = self.length[rows] % self.window
        self.k[rows, :, place] = k[rows]
        self.v[rows, :, place] = v[rows]
        self.length[rows] += 1
        out = torch.zeros_like(q)
        out[rows] = self.attend(q[rows], rows)
        return out

    def attend(self, q, rows):
        """q (R, H, D) of some rows -> (R, H, D)."""
        shared = q.shape[1] // self.k.shape[1]
        k, v = (x[rows].repeat_interleave(shared, 1) for x in (self.k, self.v))  # (R, H, W, D)
        scores = (k @ q[..., None])[..., 0] / q.shape[-1] ** 0.5  # (R, H, W)
        full = torch.arange(self.window) < self.length[rows, None]  # (R, W)
        shares = scores.masked_fill(~full[:, None], -torch.inf).softmax(-1)
        return (shares[..., None, :] @ v)[..., 0, :]


class FromPlaceZero(RingCache):
    """The last positions of a long prompt go to the places 0, 1, 2, ...: the next one then goes
    over a position that is still in the window."""

    def prefill(self, k, v, lengths):
        for row, length in enumerate(lengths):
            n = min(length, self.window)
            self.k[row, :, :n] = k[row, :, length - n : length]
            self.v[row, :, :n] = v[row, :, length - n : length]
            self.length[row] = length


class PausedGoOn(RingCache):
    """A text that pauses gets the position of the others: its NaN, too."""

    def step(self, q, k, v, active):
        out = super().step(q.nan_to_num(), k.nan_to_num(), v.nan_to_num(), torch.ones_like(active))
        return out * active[:, None, None]


class Everything(RingCache):
    """Right, but it keeps the whole text, and looks at the end of it."""

    def __init__(self, batch, n_kv_head, window, head_dim, dtype=torch.float32):
        super().__init__(batch, n_kv_head, window, head_dim, dtype)
        self.texts = [[] for _ in range(batch)]

    def step(self, q, k, v, active):
        for row in active.nonzero().flatten().tolist():
            kinds = {8: torch.int64, 4: torch.int32}[k.itemsize]  # as if they were whole numbers
            self.texts[row] += [k[row].clone().view(kinds), v[row].clone().view(kinds)]
        return super().step(q, k, v, active)


class Views(RingCache):
    """Keeps what it was handed instead of a copy, while the ring is not full."""

    def __init__(self, batch, n_kv_head, window, head_dim, dtype=torch.float32):
        super().__init__(batch, n_kv_head, window, head_dim, dtype)
        self.last = []

    def step(self, q, k, v, active):
        for row, place, old_k, old_v in self.last:
            self.k[row, :, place] = old_k[row]
            self.v[row, :, place] = old_v[row]
        rows = active.nonzero().flatten()
        places = (self.length % self.window).tolist()
        self.last = [(row, places[row], k, v) for row in rows.tolist()]
        return super().step(q, k, v, active)


WRONG = {  # name -> what of the reference it replaces
    "a long prompt goes to the places 0, 1, ...": dict(RingCache=FromPlaceZero),
    "texts that pause go on": dict(RingCache=PausedGoOn),
    "keeps the whole text": dict(RingCache=Everything),
    "keeps the caller's tensors": dict(RingCache=Views),
}
