"""Exercise 24: a cache that never grows, for texts of different lengths.

A model with a sliding window looks at the last `window` positions only, its own included. So its
cache needs `window` places a text, however long the text becomes: position p goes to place
p % window, over the position that nobody looks at any more. A server writes many texts together,
each with a length of its own, and some of them pause. Write

    cache = RingCache(batch, n_kv_head, window, head_dim)
    cache.prefill(k, v, lengths)
    out = cache.step(q, k, v, active)

prefill: the keys and values of the prompts, (batch, n_kv_head, T, head_dim) each; of row b only the
    first lengths[b] positions are real (0 to T of them, and T may be 20 million), the rest is
    padding and may hold anything, NaN too. It comes once, before the first step; a cache without it
    begins with empty texts.
step: one position more. q is (batch, n_head, head_dim), k and v are (batch, n_kv_head, head_dim);
    query head h looks at key/value head h // (n_head / n_kv_head). active (batch,) of bool says
    whose texts go on; a row that pauses keeps all it has, and its q, k and v may hold anything.
    -> out (batch, n_head, head_dim): softmax(q k^T / sqrt(head_dim)) v over the last `window`
    positions of that row's text, the new one included; zeros for a row that pauses.

Keys arrive rotated already, so their order in the ring does not matter. What is handed over belongs
to the caller, who writes the next numbers into the same tensors and list. Dtypes stay as they are.
The cache keeps at most 2 * batch * n_kv_head * window * head_dim numbers of that dtype, and 64
bytes a text for anything else (lengths, places).
"""

import torch
from torch import Tensor


class RingCache:
    def __init__(self, batch: int, n_kv_head: int, window: int, head_dim: int, dtype=torch.float32):
        raise NotImplementedError("write RingCache, then: python course/check.py 24")

    def prefill(self, k: Tensor, v: Tensor, lengths: list[int]) -> None:
        raise NotImplementedError("write prefill too, then: python course/check.py 24")

    def step(self, q: Tensor, k: Tensor, v: Tensor, active: Tensor) -> Tensor:
        raise NotImplementedError("write step too, then: python course/check.py 24")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    from collections import deque

    import torch
    from subject import same
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(34)
    nan = float("nan")

    def weigh(thing, sizes: dict) -> None:
        """Add the bytes of numbers that an object keeps, wherever and as whatever it keeps them."""
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif id(thing) not in sizes:
            parts = thing if isinstance(thing, (list, tuple, set, deque)) else ()
            numbers = [x for x in parts if isinstance(x, (int, float))]
            sizes[id(thing)] = getattr(thing, "nbytes", 8 * len(numbers))
            named = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
            for part in (*parts, *named.values()):
                weigh(part, sizes)

    def judge(B, H, G, D, window, lengths, steps, dtype=torch.float64, scale=1):
        torch.use_deterministic_algorithms(True)  # new memory is full of NaN
        cache = answer.RingCache(B, G, window, D, dtype)
        torch.use_deterministic_algorithms(False)
        texts = [torch.empty(2, 1, G, 0, D, dtype=dtype)] * B  # keys and values
        if lengths:
            given = torch.randn(2, B, max(lengths) + B - 1, G, D, dtype=dtype).transpose(2, 3)
            for row, length in enumerate(lengths):
                texts[row] = given[:, row : row + 1, :, :length].clone()
                given[:, row, :, length:] = nan
            cache.prefill(*given, lengths)
            given.fill_(nan)
            lengths.reverse()
        answer.RingCache(B, G, window, D, dtype)  # another one changes nothing
        q = torch.empty(B, H, D, dtype=dtype)
        new = torch.empty(2, B, G, D, dtype=dtype)
        for step in range(steps):
            active = torch.rand(B) < (0.7 if step % 4 else 2)
            right = torch.zeros_like(q)
            for numbers in (q, *new):
                numbers.normal_(0, scale)[~active] = nan
            for row in active.nonzero().flatten():
                both = torch.cat([texts[row], new[:, row, None, :, None]], 3)[..., -window:, :]
                texts[row] = both
                asked = q[row, None, :, None].double()
                heads = scaled_dot_product_attention(asked, *both.double(), enable_gqa=True)
                right[row] = heads[0, :, 0]
            out = cache.step(q, *new, active)
            q.fill_(nan)
            new.fill_(nan)
            limit = 1e-5 if dtype.itemsize > 2 else 0.1
            same(out, right, f"window {window}, step {step}: out", 0, limit)
            sizes = {}
            weigh(cache, sizes)
            size = sum(sizes.values())
            allowed = 2 * B * G * window * D * dtype.itemsize + 64 * B
            assert size <= allowed, f"the cache keeps {size:,} bytes; {allowed:,} are allowed"

    judge(1, 1, 1, 4, 3, [0], 60)  # goes round twenty times
    judge(2, 4, 2, 3, 1, [2, 0], 5)  # each position sees itself
    judge(3, 4, 2, 4, 5, [0, 5, 3], 14)  # an empty prompt, one that fills the ring
    judge(4, 6, 3, 2, 4, [9, 4, 17, 1], 13)  # longer than the window
    judge(3, 2, 2, 4, 6, [6, 6, 6], 14, torch.float32)
    judge(2, 2, 1, 2, 5, None, 9, scale=60)  # scores of thousands
    judge(2, 2, 1, 2, 6, [3, 250], 20, torch.bfloat16)
    judge(2, 2, 1, 2, 6, [3, 2040], 20, torch.float16)
    judge(300, 1, 1, 1, 2, None, 3)  # many texts, many places, a long text
    judge(1, 1, 1, 1, 66_000, [65_990], 20)
    judge(1, 1, 1, 1, 3, [2**24 - 2], 6, torch.float32)
