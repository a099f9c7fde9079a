"""The loss that a run may end with, before it runs: L(N, D) = E + A N^-a + B D^-b bits per byte.

N: weights (see weights_of). D: tokens. law.json has the constants for two texts, and
benchmarks/law.py has fitted them (Hoffmann et al. 2022; docs/scaling.md). Next: forecast.py.
"""

import json
import math
from functools import cache
from pathlib import Path

import torch

from config import GPTConfig
from model import GPT

# By text: E, A, a, B, b, a factor on the whole; the number of `runs`, and the range of their
# `tokens` and of their `weights`, of the kinds in `counts`; by how much the law is `off` at worst,
# as a share of the loss, and `beyond` that range with each doubling.
LAWS = json.loads(Path(__file__).with_name("law.json").read_text(encoding="utf-8"))
REREAD = 15.4  # times: Muennighoff et al. 2023, R_D* of "Scaling data-constrained language models"


@cache
def built(c: GPTConfig) -> GPT:
    """The model without memory for its weights: it knows their number, and its FLOPs."""
    with torch.device("meta"):
        return GPT(c)


def weights_of(text: str, c: GPTConfig) -> int:
    """The weights that the law of `text` counts: those of the blocks, and for ClimbMix those of the
    head, as the published runs do."""
    groups = built(c).param_groups()
    return sum(p.numel() for kind in LAWS[text]["counts"] for p in groups[kind])


def predict(text: str, weights: float, tokens: float) -> float:
    """Bits per byte of `text` after so many tokens, none of them read twice."""
    E, A, a, B, b, factor = map(LAWS[text].get, (*"EAaBb", "factor"))
    return factor * (E + A * weights**-a + B * tokens**-b)


def worth(tokens: float, unique: float) -> float:
    """As many tokens of new text as `tokens` of a text of `unique` are worth: a text that is read
    again teaches less each time, and after some 40 times nothing."""
    again = max(0.0, tokens / unique - 1)
    return min(tokens, unique) + unique * REREAD * (1 - math.exp(-again / REREAD))


def margin(text: str, weights: float, tokens: float) -> float:
    """By which share of the loss the law may be wrong there: as far as for one of its own runs, and
    further with each doubling that it is outside of their range."""
    law = LAWS[text]
    outside = 1.0
    for x, (least, most) in ((weights, law["weights"]), (tokens, law["tokens"])):
        outside *= max(1.0, x / most, least / x)
    return law["off"] + law["beyond"] * math.log2(outside)
