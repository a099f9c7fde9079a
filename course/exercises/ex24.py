"""Exercise 24: a cache that never grows, for texts of different lengths.

A model with a sliding window looks only at the last `window` positions, its own included. So its
cache needs `window` places for each text, however long the text gets: position p goes to place
p % window, over the position that nobody looks at any more. A server writes many texts together;
each has its own length, and some of them pause. Write

    cache = RingCache(batch, n_kv_head, window, head_dim)
    cache.prefill(k, v, lengths)
    out = cache.step(q, k, v, active)

prefill: the keys and values of the prompts, (batch, n_kv_head, T, head_dim) each. In row b only the
    first lengths[b] positions are real (0 to T of them); the rest is padding and may hold anything,
    even NaN. It comes once, before the first step; without it, a cache starts with empty texts.
step: one position more. q is (batch, n_head, head_dim), k and v are (batch, n_kv_head, head_dim);
    query head h looks at key/value head h // (n_head / n_kv_head). active (batch,) of bool says
    whose texts go on; a row that pauses keeps all it has, and its q, k and v may hold anything.
    -> out (batch, n_head, head_dim): softmax(q k^T / sqrt(head_dim)) v over the last `window`
    positions of that row's text, the new one included; zeros for a row that pauses.

The keys are already rotated, so their order in the ring does not matter. What you are given belongs
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
    import gc

    import torch
    from subject import same
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(34)
    nan = float("nan")

    def weigh(cache) -> int:
        """The bytes of the tensors that it leads to, under whatever names."""
        things = [cache]
        sizes = {}
        for _ in range(6):  # its attributes, what is in them, ...
            things = [x for x in gc.get_referents(*things) if not callable(x)]
            for thing in things:
                if isinstance(thing, torch.Tensor):
                    memory = thing.untyped_storage()
                    sizes[memory.data_ptr()] = memory.nbytes()
        return sum(sizes.values())

    def judge(case, window, lengths, G=2, dtype=torch.float32, near=1e-5):
        B = len(lengths)
        D = 2
        cache = answer.RingCache(B, G, window, D, dtype)
        prompts = torch.randn(2, B, G, max(lengths) + 2, D, dtype=dtype)  # keys and values
        texts = []
        for row, length in enumerate(lengths):
            texts.append(prompts[:, row, :, :length].clone())
            prompts[:, row, :, length:] = nan
        if any(lengths):
            given = [*lengths]
            cache.prefill(*prompts, given)
            prompts.fill_(nan)  # they belong to the caller
            given.clear()
        for step in range(12):
            active = (torch.arange(B) + step) % 3 != 2
            q = torch.randn(B, 2 * G, D, dtype=dtype)
            kv = torch.randn(2, B, G, D, dtype=dtype)
            q[~active] = nan
            kv[:, ~active] = nan
            right = torch.zeros_like(q)
            for row in active.nonzero().flatten():
                texts[row] = torch.cat([texts[row], kv[:, row, :, None]], 2)[:, :, -window:]
                asked = q[row, :, None].double()
                k, v = texts[row].double()
                right[row] = scaled_dot_product_attention(asked, k, v, enable_gqa=True)[:, 0]
            what = (
                f"{case}, window {window}; row r pauses if r + step is 2, 5, 8 or 11; "
                f"what was given earlier is NaN by now. In step {step} out"
            )
            same(cache.step(q, *kv, active), right, what, 0, near)
            kv.fill_(nan)
        size = weigh(cache)
        allowed = 2 * B * G * window * D * dtype.itemsize + 64 * B
        assert size <= allowed, f"{case}: the cache keeps {size:,} bytes; {allowed:,} are allowed"

    judge("one text, no prompt", 3, [0], 1)
    judge("prompts of 5 and 3", 5, [5, 3])
    judge("prompts of 9 and 17", 4, [9, 17])
    judge("prompts of 2 and 0", 1, [2, 0])
    judge("prompts of 3 and 70,000", 6, [3, 70_000], 2, torch.bfloat16, 0.1)
