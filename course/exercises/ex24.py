"""Exercise 24: a cache that never grows, for texts of different lengths.

A model with a sliding window looks at the last `window` positions only, its own included. So its
cache needs `window` places a text, however long the text becomes: position p goes to place
p % window, over the position that nobody looks at any more. A server writes many texts together,
each with a length of its own, and some of them pause. Write

    cache = RingCache(batch, n_kv_head, window, head_dim)
    cache.prefill(k, v, lengths)
    out = cache.step(q, k, v, active)

prefill: the keys and values of the prompts, (batch, n_kv_head, T, head_dim) each; of row b only the
    first lengths[b] positions are real (0 to T of them), the rest is padding and may hold anything,
    NaN too. It comes once, before the first step; a cache without it begins with empty texts.
step: one position more. q is (batch, n_head, head_dim), k and v are (batch, n_kv_head, head_dim);
    query head h looks at key/value head h // (n_head / n_kv_head). active (batch,) of bool says
    whose texts go on; a row that pauses keeps all it has, and its q, k and v may hold anything.
    -> out (batch, n_head, head_dim): softmax(q k^T / sqrt(head_dim)) v over the last `window`
    positions of that row's text, the new one included; zeros for a row that pauses.

Keys arrive rotated already, so their order in the ring does not matter. What is handed over belongs
to the caller, who writes the next numbers into the same tensors. Dtypes stay as they are. The cache
keeps at most 2 * batch * n_kv_head * window * head_dim numbers of that dtype, and 64 bytes a text
for anything else (lengths, places).
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

    generator = torch.Generator().manual_seed(34)
    nan = float("nan")

    def random(*shape: int, dtype=torch.float64) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def kept(thing, seen: set) -> int:
        """The bytes of numbers that an object keeps, wherever and as whatever it keeps them."""
        if id(thing) in seen:
            return 0
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            known = ("storage", storage.data_ptr()) in seen
            seen.add(("storage", storage.data_ptr()))
            return 0 if known else storage.nbytes()
        if hasattr(thing, "nbytes"):  # an array
            return thing.nbytes
        if isinstance(thing, dict):
            return sum(kept(value, seen) for value in thing.values())
        if isinstance(thing, (bytes, bytearray, str)):
            return len(thing)
        if isinstance(thing, (list, tuple, set, deque)):
            return sum(8 if type(x) in (int, float) else kept(x, seen) for x in thing)
        return kept(vars(thing), seen) if hasattr(thing, "__dict__") else 0

    def attention(q: Tensor, keys: list, values: list) -> Tensor:
        """One row: q (H, D), the keys and values it sees, (G, D) each -> (H, D)."""
        k = torch.stack(keys, 1)  # (G, n, D)
        v = torch.stack(values, 1)  # (G, n, D)
        outs = []
        for head, one in enumerate(q):
            group = head // (len(q) // len(k))
            outs.append((k[group] @ one / len(one) ** 0.5).softmax(0) @ v[group])
        return torch.stack(outs)

    def judge(B, H, G, D, window, lengths, steps, dtype=torch.float64, scale=1):
        case = f"{B} texts, {H} heads on {G}, window {window}, prompts of {lengths}"
        cache = answer.RingCache(B, G, window, D, dtype)
        texts = [([], []) for _ in range(B)]
        if lengths is not None:
            k, v = (random(B, G, max(lengths) + 2, D, dtype=dtype) for _ in range(2))
            for row, length in enumerate(lengths):
                texts[row] = tuple(list(x[row, :, :length].clone().unbind(1)) for x in (k, v))
                k[row, :, length:] = nan
                v[row, :, length:] = nan
            before = k.clone(), v.clone(), list(lengths)
            cache.prefill(k, v, lengths)
            same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip((k, v), before))
            assert same and lengths == before[2], f"{case}: prefill has changed what it was given"
            k.fill_(nan), v.fill_(nan)
        answer.RingCache(B, G, window, D, dtype)  # another one changes nothing
        buffers = random(B, H, D, dtype=dtype), *(random(B, G, D, dtype=dtype) for _ in range(2))
        for step in range(steps):
            active = torch.rand(B, generator=generator) < (0.7 if step % 4 else 2)
            for buffer in buffers:
                buffer.copy_(random(*buffer.shape) * scale)
                buffer[~active] = nan
            given = [buffer.clone() for buffer in buffers]
            out = cache.step(*buffers, active.clone())
            unchanged = all(torch.equal(a[active], b[active]) for a, b in zip(buffers, given))
            assert unchanged, f"{case}: step {step} has changed what it was given"
            for buffer in buffers:
                buffer.fill_(nan)
            assert out.shape == (B, H, D), f"{case}: the output has the shape {tuple(out.shape)}"
            assert out.dtype == dtype, f"{case}: {dtype} went in, {out.dtype} came out"
            for row in range(B):
                where = f"{case}: step {step}, row {row}"
                if not active[row]:
                    assert (out[row] == 0).all(), f"{where} pauses; its output is not 0"
                    continue
                for part, new in zip(texts[row], given[1:]):
                    part.append(new[row])
                seen = [part[-window:] for part in texts[row]]
                far = (out[row] - attention(given[0][row], *seen)).abs().amax(-1)  # (H,)
                limit = 1e-9 if dtype == torch.float64 else 1e-5
                wrong = [head for head, x in enumerate(far.tolist()) if not x < limit]
                assert not wrong, (
                    f"{where}, whose text has {len(texts[row][0])} positions now: attention is off "
                    f"by {far.max():.2g}, in the heads {wrong}"
                )
            size = kept(cache, set())
            allowed = 2 * B * G * window * D * out.itemsize + 64 * B
            assert size <= allowed, (
                f"{case}: after step {step} the cache keeps {size} bytes; {allowed} are allowed"
            )

    judge(1, 1, 1, 4, 8, None, 6)  # nothing is forgotten yet
    judge(1, 1, 1, 4, 3, None, 60)  # goes round twenty times
    judge(2, 4, 2, 3, 1, [2, 0], 5)  # each position sees itself
    judge(3, 4, 2, 4, 5, [0, 5, 3], 14)  # an empty prompt, one that fills the ring
    judge(4, 6, 3, 2, 4, [9, 4, 17, 1], 13)  # longer than the window
    judge(3, 2, 2, 4, 6, [6, 6, 6], 14, torch.float32)
    judge(2, 2, 1, 2, 64, [3, 40], 5)  # a window that is never full
    judge(2, 2, 1, 2, 5, None, 9, scale=60)  # scores of thousands
