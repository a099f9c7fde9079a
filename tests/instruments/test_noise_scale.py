"""noise_scale.py against a quadratic problem whose noise scale is known."""

import pytest
import torch
from instruments.noise_scale import NoiseScale


def test_quadratic_with_known_covariance():
    """loss(w; x) = |w - x|^2 / 2, x ~ N(0, diag(var)): G = w, Sigma = diag(var), by hand."""
    generator = torch.Generator().manual_seed(0)
    var = torch.linspace(0.1, 4.0, 50)
    w = torch.full((50,), 0.3, requires_grad=True)
    true = var.sum().item() / w.detach().square().sum().item()

    micro_batch, accum = 8, 8
    noise = NoiseScale(decay=0.999)
    for _ in range(2000):
        w.grad = None
        for k in range(accum):
            x = torch.randn(micro_batch, 50, generator=generator) * var.sqrt()
            ((w - x).square().sum(1).mean() / 2 / accum).backward()
            if k == 0:
                small_sq = (w.grad * accum).square().sum().item()
        noise.update(small_sq, w.grad.square().sum().item(), micro_batch, micro_batch * accum)
    assert noise.trace == pytest.approx(var.sum().item(), rel=0.1)
    assert noise.grad_sq == pytest.approx(50 * 0.09, rel=0.1)
    assert noise.tokens == pytest.approx(true, rel=0.1)


def test_nothing_to_compare_is_not_a_division_by_zero():
    noise = NoiseScale()
    assert noise.tokens is None
    noise.update(2.0, 2.0, b_small=512, b_big=512)
    assert noise.tokens is None


def test_drowned_in_noise_is_not_a_negative_scale():
    noise = NoiseScale()
    noise.update(small_sq=8.0, big_sq=0.5, b_small=1, b_big=8)  # |G|^2 comes out at -0.57
    assert noise.tokens is None


def test_a_constant_is_its_own_average_from_the_first_update():
    """Exact |g|^2 of |G|^2 = 2, tr(Sigma) = 640, at 64 and 256 tokens."""
    noise = NoiseScale(decay=0.99)
    for _ in range(3):
        noise.update(2 + 640 / 64, 2 + 640 / 256, 64, 256)
        assert noise.grad_sq == pytest.approx(2)
        assert noise.trace == pytest.approx(640)
        assert noise.tokens == pytest.approx(320)


def test_the_numbers_of_a_step_are_norms_over_rows():
    """Plain numbers in, tokens out; a step with NaN, which was skipped, is left out."""
    first_norm, norm = (2 + 640 / 64) ** 0.5, (2 + 640 / 256) ** 0.5
    noise = NoiseScale()
    sizes = dict(first_rows=8, rows=32, seq_len=8)
    assert noise.measure(first_norm, norm, **sizes) == pytest.approx(320)
    for bad in (float("nan"), float("inf")):
        assert noise.measure(bad, norm, **sizes) == pytest.approx(320)
        assert noise.measure(first_norm, bad, **sizes) == pytest.approx(320)
    assert NoiseScale().measure(first_norm, norm, first_rows=8, rows=8, seq_len=8) is None


def test_it_is_due_every_few_steps():
    assert [step for step in range(9) if NoiseScale(every=4).is_due(step)] == [0, 4, 8]
