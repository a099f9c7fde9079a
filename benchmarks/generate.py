"""How much faster is generation with the KV cache? `python benchmarks/generate.py [PRESET]`

Without a cache, each new token runs the whole text through the model again: n tokens cost about
n^2 / 2 positions instead of n. Prints tokens/s of both ways and their ratio, greedy and in fp32
with random weights, and checks that both give the same tokens. The ways take turns and the fastest
turn counts, so that a busy machine changes the ratio little.
"""

import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machinery.cli import find_preset  # noqa: E402
from model import GPT  # noqa: E402

TOKENS, TURNS = 256, 3


@torch.no_grad()
def recompute(model: GPT, idx: torch.Tensor, n: int) -> torch.Tensor:
    """idx (1, T) -> (1, T + n), the whole text through the model for each new token."""
    for _ in range(n):
        idx = torch.cat([idx, model(idx)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return idx


def timed(work) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def main(name: str = "tiny") -> None:
    torch.manual_seed(0)
    model = GPT(find_preset(name).model)
    model.init_weights()
    for p in model.parameters():  # an untrained head and an untrained `out` are near 0
        torch.nn.init.normal_(p, std=p.size(-1) ** -0.5)
    idx = torch.zeros(1, 1, dtype=torch.long)
    n = min(TOKENS, model.config.seq_len - 1)
    ways = {
        "with the cache": lambda: model.generate(idx, n, temperature=0),
        "recomputing": lambda: recompute(model, idx, n),
    }
    best, texts = dict.fromkeys(ways, float("inf")), []
    for _ in range(TURNS):
        for way, work in ways.items():
            text, seconds = timed(work)
            best[way] = min(best[way], seconds)
            texts.append(text)
    if any(not torch.equal(text, texts[0]) for text in texts):
        raise SystemExit("the two ways give different tokens")
    for way, seconds in best.items():
        print(f"{way:15}  {n} tokens in {seconds:6.3f} s: {n / seconds:7.1f} tokens/s")
    print(f"ratio {best['recomputing'] / best['with the cache']:.1f}, the tokens are equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
