"""optim.py: Muon against a loop over matrices, the schedules' values."""

import dataclasses
from functools import partial

import pytest
import torch
from faults import start
from torch.testing import assert_close

from config import PRESETS, TrainConfig, UsageError
from optim import (
    POLAR_EXPRESS,
    Muon,
    build,
    compile_steps,
    lr_at,
    momentum_at,
    orthogonalize,
    set_schedule,
)


@pytest.mark.parametrize("shape", [(40, 8), (8, 40)])
def test_orthogonalize_brings_every_singular_value_near_one(shape):
    """Whatever the scale of the matrix; and zeros stay zeros."""
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(5, *shape), full_matrices=False)
    g = left @ torch.diag(torch.logspace(-2, 0, 8)) @ right  # singular values from 0.01 to 1
    u = orthogonalize(g * torch.logspace(-4, 4, 5)[:, None, None])
    assert (torch.linalg.svdvals(u) - 1).abs().max() < 0.3
    assert not orthogonalize(torch.zeros(1, *shape)).any()


def slow_muon(p, grads, lr, momentum, weight_decay, beta2):
    """One matrix, every formula written out, in float64."""
    rows, cols = p.shape
    m = torch.zeros_like(p)
    v = 0.0
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * m
        x = x / (1.01 * x.norm() + 1e-7)
        x = x.T if rows > cols else x
        for a, b, c in POLAR_EXPRESS:
            s = x @ x.T
            x = a * x + b * s @ x + c * s @ s @ x
        x = x.T if rows > cols else x
        v = beta2 * v + (1 - beta2) * (x**2).mean(1 if rows >= cols else 0, keepdim=True)
        y = x / v.clamp_min(1e-10).sqrt()
        y = y * x.norm() / y.norm()
        pull = weight_decay * p * (y * p > 0)
        p = p - lr * max(1, rows / cols) ** 0.5 * (y + pull)
    return p


def muon_of(values, grads_by_step, prepare=lambda optimizers: None, **options):
    """The values after these steps of Muon."""
    params = [torch.nn.Parameter(value.clone()) for value in values]
    muon = Muon(params, lr=0.1, **options)
    prepare([muon])
    for grads in grads_by_step:
        for p, g in zip(params, grads):
            p.grad = g.to(p.dtype, copy=True)
        muon.step()
    return [p.detach() for p in params]


def test_muon_equals_a_loop_over_matrices():
    with pytest.raises(UsageError, match=r"\(3,\)"):  # what is no matrix
        Muon([torch.nn.Parameter(torch.zeros(3))])
    torch.manual_seed(0)
    shapes = [(6, 6), (6, 6), (12, 4), (4, 12), (12, 4)]
    start = [torch.randn(s, dtype=torch.float64) for s in shapes]
    grads = [[torch.randn(s, dtype=torch.float64) for s in shapes] for _ in range(3)]
    want = [slow_muon(p, g, 0.1, 0.9, 0.2, 0.8).float() for p, g in zip(start, zip(*grads))]
    single = [p.float() for p in start]
    found = muon_of(single, grads, momentum=0.9, weight_decay=0.2, beta2=0.8)
    assert_close(found, want, atol=2e-4, rtol=2e-4)


def test_compiled_muon_takes_more_shapes_than_dynamo_would(monkeypatch):
    """Eleven, as where each layer has a width of its own; the compiler's limit is eight."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # quick
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = [torch.randn(4, cols) for cols in range(2, 13)]
    with torch._dynamo.config.patch(recompile_limit=8):  # put back at the end of the block
        found = muon_of(start, [start], compile_steps)
    assert_close(found, muon_of(start, [start]), atol=1e-6, rtol=1e-5)


def test_optimizers_on_two_ranks_divided_and_sharded(tmp_path):
    run = start(None, tmp_path / "run", argv=[], world=2, main="ranks_muon:main")
    assert run.end(0).count("agrees") == 2


def test_schedules():
    wsd = [lr_at(s, 100, "wsd", warmup=10, decay=0.5, final=0.1) for s in (0, 9, 50, 75, 99)]
    assert wsd == pytest.approx([0.1, 1.0, 1.0, 0.55, 0.118])
    cosine = [lr_at(s, 110, "cosine", warmup=10, final=0.1) for s in (0, 10, 60, 110)]
    assert cosine == pytest.approx([0.1, 1.0, 0.55, 0.1])
    assert [lr_at(s, 100, "multistep", 5) for s in (0, 79, 80, 90)] == [0.2, 1.0, 0.316, 0.1]
    assert lr_at(50, 100, "wsd", 0, decay=0.0) == lr_at(9, 10, "cosine", warmup=10) == 1.0
    short = [lr_at(s, 50, "wsd", warmup=40) for s in range(50)]  # warm after 40 of 50
    assert max(abs(a - b) for a, b in zip(short, short[1:])) < 0.05  # and yet without a jump
    momentum = [momentum_at(s, 4000, 40, 0.65) for s in (0, 200, 1400, 2700, 4000)]
    assert momentum == pytest.approx([0.85, 0.91, 0.97, 0.935, 0.90])
    assert momentum_at(100, 1000, 10, 0.65) == pytest.approx(0.91)


def groups_of_one():
    kinds = ("matrix", "embedding", "head", "scalar")
    return {kind: [torch.nn.Parameter(torch.ones(4, 4))] for kind in kinds}


@pytest.mark.parametrize("schedule, last", [("wsd", 0.90), ("cosine", 0.97)])
def test_only_the_schedule_with_a_decay_bends_the_momentum(schedule, last):
    """Learning rates, and Muon's weight decay, follow every schedule."""
    config = TrainConfig(schedule=schedule)
    muon, adam = optimizers = build(groups_of_one(), config, width=64)
    factor = set_schedule(optimizers, 990, 1000, config)
    assert factor == lr_at(990, 1000, schedule, config.warmup, config.decay, config.final_lr) < 0.1
    for group in (*muon.param_groups, *adam.param_groups):
        assert group["lr"] == group["initial_lr"] * factor > 0
    (matrices,) = muon.param_groups  # of one shape
    assert matrices["weight_decay"] == config.weight_decay * factor > 0
    for group in adam.param_groups:
        assert group["weight_decay"] == group["initial_weight_decay"]
    set_schedule(optimizers, 1000, 1000, config)
    assert matrices["momentum"] == pytest.approx(last)


@pytest.mark.parametrize(
    "preset, tokens, factor", [("tiny", 256, 0.4), ("d12", 2**40, 2), ("d20", 1_048_576, 1.6**0.5)]
)
def test_the_rates_of_a_preset_are_for_the_batch_at_which_they_were_tuned(preset, tokens, factor):
    """The factors follow from the noise of a gradient, three times its square there
    (docs/scaling.md). And for a width of 768: at a quarter of it those of the tables double."""
    config = dataclasses.replace(PRESETS[preset].train, tokens_per_step=tokens)
    tuned = [config.matrix_lr, config.embedding_lr, config.head_lr, 0.005]

    def rates(config, width):
        built = build(groups_of_one(), config, width)
        return [g["lr"] for optimizer in built for g in optimizer.param_groups]

    assert rates(config, 768) == pytest.approx([factor * lr for lr in tuned])
    narrow = [factor * lr * by for lr, by in zip(tuned, (1, 2, 2, 1))]
    assert rates(config, 192) == pytest.approx(narrow)
    assert rates(dataclasses.replace(config, optimizer="adamw"), 192) == [config.lr] * 2
