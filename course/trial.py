"""The second judge of a part: one call as the run of yours.py makes it, compared with ours."""

import random
import time
from collections import Counter

import judging
import lesson
import numpy as np
import torch
from spine import BASE, BLOCKS, HEADS, MICRO, PART_S, WIDTH, WORD, T, hashed, plain_attention


def calls() -> dict[int, tuple]:
    """Number of a part -> what to call of it, how many times as much a run of 1,200 steps does."""
    rng = np.random.default_rng(0)
    draw = torch.Generator().manual_seed(0)
    text = bytes(lesson.bytes_of_stdlib(60_000).astype(np.uint8))
    words = dict(Counter(WORD.findall(text)))
    ranks = {(b"i", b"n"): 1, (b"o", b"n"): 0, (b"t", b"i"): 2}
    # as the run has them: heads moved in front of positions, so not contiguous
    heads = torch.randn(3, MICRO, T, HEADS, WIDTH // HEADS, generator=draw).transpose(2, 3)
    q, k, v = heads.unbind()
    mask = torch.ones(T, T).tril().bool()
    E = rng.normal(size=(MICRO * T, WIDTH))
    U = rng.normal(size=(WIDTH, 513))
    places = np.arange(MICRO * T)
    targets = rng.integers(0, 513, MICRO * T)
    x = rng.normal(size=(MICRO, T, HEADS, WIDTH // HEADS)).astype(np.float32)
    positions = np.tile(np.arange(T), (MICRO, 1))
    speeds = BASE ** (-np.arange(0, 16, 2) / 16)
    G = rng.normal(size=(64, 256))
    W = torch.randn(256, 64, generator=draw)
    nats = rng.random(999)
    sizes = rng.integers(0, 4, 999)
    ids = torch.arange(MICRO * T).view(MICRO, T)
    model = lambda tokens: scores[: len(tokens)]
    scores = rng.normal(size=(T, 513))
    turns = [("user", "Is it slow?"), ("assistant", "No.")]

    def gpt(part) -> list:
        weights = part.initial(513, WIDTH, BLOCKS, torch.Generator().manual_seed(1))
        sizes = [float(w.square().mean()) for _, w in sorted(weights.items())]
        other = torch.Generator().manual_seed(2)
        weights = {n: torch.randn(w.shape, generator=other) / 8 for n, w in sorted(weights.items())}
        return [part.gpt(ids, weights, HEADS, plain_attention, lambda x: x), *sizes]

    def loop(part) -> list:
        w = torch.ones(5, requires_grad=True)
        sgd = torch.optim.SGD([w], lr=0.1)
        rows = torch.arange(105.0).view(3, 7, 5) / 35
        loss = lambda some: ((some @ w - 1) ** 2).mean()
        return [part.train([w], loss, lambda s: rows[s], lambda s: sgd.step(), 3, 3), w.detach()]

    def muon(part) -> list:
        w = W.clone()
        average = torch.zeros_like(W)
        for _ in range(2):
            part.muon(w, W, average, 0.1, 0.95, lambda G: G.tanh())
        return [w, average, np.linalg.svd(part.polar(G), compute_uv=False) > 0.85]

    def conversation(part) -> list:
        ids, mask = part.render(turns, lambda text: [9 + len(word) for word in text.split()])
        return [*ids, *mask, *part.shifted(ids, mask, T)]

    return {
        1: (lambda part: part.bits_per_byte(text[:50_000], text[50_000:50_500], 4, 8.0), 20),
        2: (lambda part: part.factored_gradient(E, U, places, targets), 2400),
        4: (lambda part: part.scaled_dot_product_attention(q, k, v, mask), 7200),
        5: (gpt, 2400),
        6: (lambda part: part.generate(model, [1, 2], 40, T, 0.8, 0.95, random.Random(0)), 4),
        7: (loop, 1),
        8: (lambda part: [part.rotate(x, p, speeds) for p in (positions, -positions)], 7200),
        9: (lambda part: [part.merge_order(words, 20), part.encode(b" information", ranks)], 20),
        10: (lambda part: [part.rate(step, 800, 20) for step in range(800)], 1),
        11: (lambda part: len(part.pack_lengths([9000, 70, 5, 12_000] * 11, T + 1)), 8),
        12: (muon, 14_400),
        13: (lambda part: part.bits_of_text(nats, sizes), 1),
        14: (conversation, 2500),
        17: (lambda part: [len({part.order(p, [60], [1], 0, hashed) for p in range(60)})], 160),
    }


def flat(result) -> list:
    """All numbers of a result, in order; bytes as they are."""
    if isinstance(result, (list, tuple)):
        return [number for one in result for number in flat(one)]
    if isinstance(result, bytes):
        return [*result]
    if isinstance(result, torch.Tensor):
        result = result.detach().numpy()
    return np.asarray(result, float).ravel().tolist()


def trial(number: int, yours, ours) -> str | None:
    """Right, and fast enough for the run? None, or what is wrong."""
    call, times = calls()[number]
    results = []
    seconds = []
    for part in (ours, yours) * 3:  # the least of three: a few milliseconds are easily disturbed
        began = time.process_time()
        try:
            # numpy's parts are called inside of autograd.Functions, where torch records nothing
            with judging.limit(20, 60), torch.set_grad_enabled(number == 7):
                results.append(flat(call(part)))
        except judging.TooLong:
            return "its trial did not end within 20 s"
        except Exception as error:
            return f"in its trial: {type(error).__name__}: {error}"
        seconds.append(time.process_time() - began)
    right, found = results[:2]
    if len(right) != len(found):
        return f"on the run's shapes it gives {len(found):,} numbers, ours gives {len(right):,}"
    off = np.abs(np.subtract(right, found)).max()
    if not np.allclose(found, right, atol=2e-3, rtol=1e-3):
        return f"on the run's shapes it gives other numbers than ours, by up to {off:.3g}"
    least = min(seconds[1::2]) * times
    ours_s = min(seconds[::2]) * times
    if least > max(PART_S, 3 * ours_s):  # on a busy machine ours is slow, too
        return f"too slow for the run: about {least:.0f} s, of {PART_S} allowed; ours {ours_s:.0f}"
    return None
