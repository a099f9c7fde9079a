"""How much faster is generation with the KV cache? `python benchmarks/generate.py [PRESET]`

Without a cache, each new token runs the whole text through the model again: n tokens cost about
n^2 / 2 positions instead of n. Prints tokens/s of both ways and their ratio, greedy and in fp32
with random weights, and checks that both yield the same tokens. Seconds are CPU time of one thread,
so that other programs on the machine count little.
"""

import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import PRESETS  # noqa: E402
from model import GPT  # noqa: E402

TOKENS = 256


@torch.no_grad()
def recompute(model: GPT, idx: torch.Tensor, n: int) -> torch.Tensor:
    """idx (1, T) -> (1, T + n), the whole text through the model for each new token."""
    for _ in range(n):
        idx = torch.cat([idx, model(idx)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return idx


def timed(work) -> tuple[torch.Tensor, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def main(name: str = "tiny") -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(PRESETS[name].model)
    model.init_weights()
    for p in model.parameters():  # an untrained head and an untrained `out` are near 0
        torch.nn.init.normal_(p, std=p.size(-1) ** -0.5)
    idx = torch.zeros(1, 1, dtype=torch.long)
    n = min(TOKENS, model.config.seq_len - 1)
    recompute(model, idx, 8)  # warm up both ways
    model.generate(idx, 8, temperature=0)
    cached, cached_s = timed(lambda: model.generate(idx, n, temperature=0))
    whole, whole_s = timed(lambda: recompute(model, idx, n))
    if not torch.equal(cached, whole):
        raise SystemExit("the two ways give different tokens")
    for way, seconds in (("with the cache", cached_s), ("recomputing", whole_s)):
        print(f"{way:15}  {n} tokens in {seconds:6.2f} s: {n / seconds:7.1f} tokens/s")
    print(f"ratio {whole_s / cached_s:.1f}, and the tokens are equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
