"""The gradient noise scale: up to how many tokens a larger batch pays off (McCandlish et al. 2018).

`python eval.py noise MODEL --batches K` loads a checkpoint, draws K micro-batches of training rows,
and compares their gradients: tr(Sigma) / |G|^2 in tokens, where G is the true gradient, and Sigma
the covariance of the gradient of one token. A batch far below it wastes steps, one far above it
wastes tokens. Appends the figures to eval.jsonl. Next: docs/evaluation.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

import data
from config import LARGEST, Count, UsageError
from machinery.errors import NonFiniteError
from machinery.output import say
from machinery.trained import EvalConfig


@dataclass(frozen=True)
class NoiseConfig(EvalConfig):
    """The gradient noise scale of a model on its training rows."""

    batches: Annotated[int, 3, LARGEST] = 32
    """Micro-batches to draw; each is read twice. More of them make the estimate sharper."""
    batch: Count = 4
    """Rows per micro-batch. Far below the noise scale a single gradient is mostly noise: then more
    rows help as much as more micro-batches."""
    seed: int = 0
    """Seed of the order in which training rows are drawn, each at most once."""


def estimate(squares: Tensor, dots: Tensor) -> tuple[float, float]:
    """|g_k|^2 (K,) and g_k . (their sum) (K,) of K gradients g_k -> (noise scale, its standard
    error), in batches. NaN if the noise drowns |G|^2, with G the true gradient.

    E|g_k|^2 = |G|^2 + tr(Sigma), of a batch, and products of different gradients have the mean
    |G|^2; both are averaged first and divided once, as a mean of ratios has no meaning. The error
    is the jackknife's: the estimate again, without each of the gradients in turn."""
    K = len(squares)
    squares = squares.double()
    dots = dots.double()

    def scale(n: int, total: Tensor, power: Tensor) -> Tensor:
        """n gradients, |their sum|^2, the sum of their squares -> tr(Sigma) / |G|^2."""
        signal = (total - power) / (n * (n - 1))
        return torch.where(signal > 0, (power / n - signal) / signal, torch.nan)

    total = dots.sum()
    power = squares.sum()
    without = scale(K - 1, total - 2 * dots + squares, power - squares)  # (K,)
    error = ((K - 1) * without.var(correction=0)).sqrt()
    return scale(K, total, power).item(), error.item()


def compare(model: torch.nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """|g_k|^2 and g_k . (sum of all), (K,) each, of 1,024 x the loss. Reads the batches twice,
    to hold one sum in memory instead of K gradients."""

    def add_gradient(inputs: Tensor, targets: Tensor) -> None:
        loss = model(inputs, targets)
        if not loss.isfinite():
            raise NonFiniteError(f"the loss of training rows is {loss.item()}")
        (loss * 1024).backward()  # fp16 loses small gradients; the ratio stays the same

    model.zero_grad()
    for batch in batches:
        add_gradient(*batch)
    total = {p: p.grad for p in model.parameters() if p.grad is not None}
    squares = []
    dots = []
    for batch in batches:
        model.zero_grad()  # leaves `total` as it is: each p gets a new gradient
        add_gradient(*batch)
        squares.append(sum(p.grad.double().square().sum().cpu() for p in total))
        dots.append(sum((p.grad.double() * s).sum().cpu() for p, s in total.items()))
    return torch.stack(squares), torch.stack(dots)


def measure(config: NoiseConfig, load_model: Callable) -> None:
    """`eval.py noise`: print the noise scale, and append it to eval.jsonl. load_model: EvalConfig
    -> Trained."""
    loaded = load_model(config)
    model = loaded.model
    manifest = loaded.data
    n = config.batches * config.batch
    rows = manifest.rows("train")
    if n > rows:
        raise UsageError(
            f"--batches {config.batches} x {config.batch} rows, but {manifest.dir} has {rows:,}; "
            f"try --batches {rows // config.batch}"
        )
    T = min(manifest.row_len - 1, model.config.seq_len)
    device = model.cos.device
    place_of = data.order_of(manifest, config.seed)
    drawn = np.stack([manifest.row("train", *place_of(i))[: T + 1] for i in range(n)])  # (n, T + 1)
    inputs = torch.from_numpy(drawn[:, :-1].astype(np.int64)).to(device)
    targets = torch.from_numpy(data.targets_of(drawn, manifest.marks)).to(device)  # (n, T)
    batches = list(zip(inputs.split(config.batch), targets.split(config.batch)))
    tokens = (targets != data.IGNORED).sum().item() / config.batches  # of a micro-batch
    scale, error = (tokens * x for x in estimate(*compare(model, batches)))
    about = f"{config.batches} micro-batches of {config.batch} rows, {tokens:,.0f} tokens"
    if not math.isfinite(scale + error):
        say(f"noise scale: n/a, the noise drowns the gradient ({about}); try more --batches")
        scale = error = None
    else:
        say(f"noise scale: {max(scale, 0):,.0f} tokens, standard error {error:,.0f} ({about})")
    loaded.keep_record(
        noise_scale_tokens=scale, noise_scale_error=error, data_fingerprint=manifest.fingerprint
    )
