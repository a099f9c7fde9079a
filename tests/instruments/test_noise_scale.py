"""instruments/run/noise_scale.py: landscapes whose noise scale is known."""

import math

import pytest
import torch
from conftest import look, read_lines

from config import UsageError
from instruments.run import noise_scale
from machinery.errors import NonFiniteError


def drawn(G: torch.Tensor, deviation: torch.Tensor, K: int, seed: int):
    """K gradients around G: |g_k|^2 and g_k . (their sum)."""
    torch.manual_seed(seed)
    g = G + torch.randn(K, len(G)) * deviation  # (K, D)
    return g.square().sum(1), g @ g.sum(0)


def test_the_estimate_and_its_error_are_those_of_a_known_landscape():
    """|G|^2 and tr(Sigma) by hand: the truth lies within two errors in about 95% of the draws."""
    G = torch.full((50,), 0.3)
    deviation = torch.linspace(0.1, 2.0, 50)
    truth = (deviation.square().sum() / G.square().sum()).item()
    scales = [noise_scale.estimate(*drawn(G, deviation, 64, seed)) for seed in range(200)]
    inside = sum(abs(scale - truth) < 2 * error for scale, error in scales)
    assert 0.88 < inside / 200 < 0.99
    mean = sum(scale for scale, _ in scales) / 200
    assert mean == pytest.approx(truth, rel=0.1)
    few, many = (noise_scale.estimate(*drawn(G, deviation, K, 0))[1] for K in (64, 6400))
    assert many == pytest.approx(few / 10, rel=0.5)


def test_what_cannot_be_said_is_no_number():
    squares = torch.ones(4)
    dots = torch.tensor([1.0, 0.5, 1.0, 0.5])  # orthogonal, or against
    scale, error = noise_scale.estimate(squares, dots)
    assert math.isnan(scale) and math.isnan(error)
    assert noise_scale.estimate(torch.ones(4), torch.full((4,), 4.0)) == (0, 0)


class Bowl(torch.nn.Module):
    """loss(w; x) = a mean |w - x|^2 / 2: its gradient is a (w - mean x)."""

    def __init__(self, dtype, a: float):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((6,), 0.5))
        self.unused = torch.nn.Parameter(torch.ones(1))
        self.dtype = dtype
        self.a = a

    def forward(self, x, _):
        return (self.w.to(self.dtype) - x.to(self.dtype)).square().sum(1).mean() / 2 * self.a


@pytest.mark.parametrize("dtype, a, rtol", [(torch.float32, 1, 1e-5), (torch.float16, 1e-6, 3e-3)])
def test_two_passes_give_the_products_of_all_gradients(dtype, a, rtol):
    """Against all gradients in memory at once. fp16 has few digits below 6e-5."""
    model = Bowl(dtype, a)
    torch.manual_seed(0)
    x = torch.randn(5, 3, 6)
    squares, dots = noise_scale.compare(model, [(part, None) for part in x])
    g = (model.w - x.mean(1)).detach() * a * 1024  # (5, 6)
    torch.testing.assert_close(squares, g.square().sum(1).double(), rtol=rtol, atol=0)
    torch.testing.assert_close(dots, (g @ g.sum(0)).double(), rtol=3 * rtol, atol=rtol * a**2)
    with pytest.raises(NonFiniteError):
        noise_scale.compare(model, [(part / 0, None) for part in x])


def test_the_command_measures_a_checkpoint(own_run, monkeypatch, capsys):
    """Twice the same, and written down; other rows with another seed, each at most once."""
    honest = noise_scale.compare
    lines = []

    def compare(model, batches):
        rows = [tuple(row) for inputs, _ in batches for row in inputs.tolist()]
        assert len(rows) == len(set(rows)) == 12
        return honest(model, batches)

    monkeypatch.setattr(noise_scale, "compare", compare)
    for seed in (0, 0, 1):
        options = ["--batches", 6, "--batch", 2, "--device", "cpu", "--seed", seed]
        look(capsys, "noise", own_run, *options)
        lines.append(read_lines(own_run / "eval.jsonl")[-1])
    scales = [line["noise_scale_tokens"] for line in lines]
    assert scales[0] == scales[1] != scales[2] and lines[0]["step"] == 12
    with pytest.raises(UsageError, match="100000"):
        look(capsys, "noise", own_run, "--batches", 100_000)
