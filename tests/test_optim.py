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
    lr_batch_factor,
    momentum_at,
    orthogonalize,
    set_schedule,
)


@pytest.mark.parametrize("shape", [(8, 8), (40, 8), (8, 40)])
def test_orthogonalize_brings_every_singular_value_near_one(shape):
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(5, *shape), full_matrices=False)
    g = left @ torch.diag(torch.logspace(-2, 0, 8)) @ right  # singular values from 0.01 to 1
    u = orthogonalize(g * torch.logspace(-4, 4, 5)[:, None, None])  # whatever the scale
    values = torch.linalg.svdvals(u)
    assert values.min() > 0.7 and values.max() < 1.3
    assert_close(u, left @ right, atol=0.25, rtol=0)
    assert not orthogonalize(torch.zeros(1, *shape)).any()  # no 0/0


def slow_muon(params, grads_by_step, lr, momentum, weight_decay, beta2):
    """One matrix at a time, every formula written out, in float64."""
    state = [dict(m=torch.zeros_like(p), v=None) for p in params]
    params = [p.clone() for p in params]
    for grads in grads_by_step:
        for i, (p, g) in enumerate(zip(params, grads)):
            rows, cols = p.shape
            m = state[i]["m"] = momentum * state[i]["m"] + (1 - momentum) * g
            x = (1 - momentum) * g + momentum * m
            x = x / (1.01 * x.norm() + 1e-7)
            if rows > cols:
                x = x.T
            for a, b, c in POLAR_EXPRESS:
                s = x @ x.T
                x = a * x + b * s @ x + c * s @ s @ x
            if rows > cols:
                x = x.T
            mean_square = (x**2).mean(1, keepdim=True) if rows >= cols else (x**2).mean(0, True)
            v = torch.zeros_like(mean_square) if state[i]["v"] is None else state[i]["v"]
            v = state[i]["v"] = beta2 * v + (1 - beta2) * mean_square
            y = x / v.clamp_min(1e-10).sqrt()
            y = y * x.norm() / y.norm()
            pull = weight_decay * p * (y * p > 0)
            params[i] = p - lr * max(1, rows / cols) ** 0.5 * (y + pull)
    return params


SHAPES = [(6, 6), (6, 6), (12, 4), (4, 12), (12, 4)]


def make(values, **options):
    params = [torch.nn.Parameter(t.detach().clone()) for t in values]
    return params, Muon(params, lr=0.1, **options)


def go(params, optimizer, grads_by_step):
    for grads in grads_by_step:
        for p, g in zip(params, grads):
            p.grad = g.to(p.dtype, copy=True)
        optimizer.step()
    return [p.detach() for p in params]


def test_muon_equals_a_loop_over_matrices():
    with pytest.raises(UsageError, match=r"\(3,\)"):  # what is no matrix
        Muon([torch.nn.Parameter(torch.zeros(3))])
    torch.manual_seed(0)
    start = [torch.randn(s, dtype=torch.float64) for s in SHAPES]
    grads = [[torch.randn(s, dtype=torch.float64) for s in SHAPES] for _ in range(3)]
    want = slow_muon(start, grads, 0.1, 0.9, 0.2, 0.8)
    single = [p.float() for p in start]
    found = go(*make(single, momentum=0.9, weight_decay=0.2, beta2=0.8), grads)
    assert_close([p.double() for p in found], want, atol=2e-4, rtol=2e-4)


def test_compiled_muon_takes_more_shapes_than_dynamo_would(monkeypatch):
    """Eleven, as where each layer has a width of its own; the compiler's limit is eight."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # quick
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = [torch.randn(4, cols) for cols in range(2, 13)]
    grads = [[t + 1 for t in start]]
    params, muon = make(start)
    with torch._dynamo.config.patch(recompile_limit=8):  # put back at the end of the block
        compile_steps([muon])
        found = go(params, muon, grads)
    assert_close(found, go(*make(start), grads), atol=1e-6, rtol=1e-5)


def test_optimizers_on_two_ranks_divided_and_sharded(tmp_path):
    run = start(None, tmp_path / "run", argv=[], world=2, main="ranks_muon:main")
    assert run.end(0).count("agrees") == 2


def test_schedules():
    wsd = [lr_at(s, 100, "wsd", warmup=10, decay=0.5, final=0.1) for s in (0, 9, 30, 50, 75, 99)]
    assert wsd == pytest.approx([0.1, 1.0, 1.0, 1.0, 0.55, 0.118])
    cosine = [lr_at(s, 110, "cosine", warmup=10, final=0.1) for s in (0, 10, 60, 110)]
    assert cosine == pytest.approx([0.1, 1.0, 0.55, 0.1])
    assert [lr_at(s, 100, "multistep", 5) for s in (0, 79, 80, 90)] == [0.2, 1.0, 0.316, 0.1]
    assert lr_at(50, 100, "wsd", 0, decay=0.0) == lr_at(9, 10, "cosine", warmup=10) == 1.0
    short = [lr_at(s, 50, "wsd", warmup=40, decay=0.65) for s in range(50)]  # warm after 40 of 50
    assert max(abs(a - b) for a, b in zip(short, short[1:])) < 0.05  # and yet without a jump
    momentum = [momentum_at(s, 4000, 40, 0.65) for s in (0, 200, 400, 1400, 2700, 4000)]
    assert momentum == pytest.approx([0.85, 0.91, 0.97, 0.97, 0.935, 0.90])
    assert momentum_at(100, 1000, 10, 0.65) == momentum_at(100, 100, 10, 0.0) == pytest.approx(0.91)


def groups_of_one() -> dict:
    kinds = ("matrix", "embedding", "head", "scalar")
    return {kind: [torch.nn.Parameter(torch.ones(4, 4))] for kind in kinds}


def test_only_the_schedule_with_a_decay_bends_the_momentum():
    for schedule, last in (("wsd", 0.90), ("cosine", 0.97)):
        config = TrainConfig(schedule=schedule)
        muon, adam = optimizers = build(groups_of_one(), config, width=64)
        before = [g["weight_decay"] for g in adam.param_groups]
        factor = set_schedule(optimizers, 990, 1000, config)
        assert factor == lr_at(990, 1000, schedule, config.warmup, config.decay, config.final_lr)
        assert 0 < factor < 0.1
        for group in (*muon.param_groups, *adam.param_groups):
            assert group["lr"] == group["initial_lr"] * factor > 0
        (matrices,) = muon.param_groups  # of one shape
        assert matrices["weight_decay"] == config.weight_decay * factor > 0
        assert [g["weight_decay"] for g in adam.param_groups] == before
        set_schedule(optimizers, 1000, 1000, config)
        assert matrices["momentum"] == pytest.approx(last)


def test_the_factor_of_a_batch_is_the_part_of_a_step_along_the_true_gradient():
    """Relative to that part at the batch for which the rates are; the noise is three times it."""
    torch.manual_seed(0)
    size = 1_000_000
    rates_at = 2048
    g = torch.randn(size)
    one_token = (3 * rates_at) ** 0.5 * torch.randn(size)  # of B0 times the squared norm of g
    along = lambda batch: torch.cosine_similarity(g, g + one_token / batch**0.5, dim=0).item()
    for tokens in (512, 32_768):
        expected = along(tokens) / along(rates_at)
        assert lr_batch_factor(tokens, rates_at) == pytest.approx(expected, rel=0.01)


def rates(config, width: int) -> list[float]:
    built = build(groups_of_one(), config, width)
    return [g["lr"] for optimizer in built for g in optimizer.param_groups]


@pytest.mark.parametrize(
    "preset, tokens, factor", [("tiny", 256, 0.4), ("d12", 2**40, 2), ("d20", 1_048_576, 1.6**0.5)]
)
def test_the_rates_of_a_preset_are_for_the_batch_at_which_they_were_tuned(preset, tokens, factor):
    """And for a width of 768: at a quarter of it those of the tables are twice as large."""
    config = dataclasses.replace(PRESETS[preset].train, tokens_per_step=tokens)
    tuned = [config.matrix_lr, config.embedding_lr, config.head_lr, 0.005]
    assert rates(config, 768) == pytest.approx([factor * lr for lr in tuned])
    narrow = [factor * lr * by for lr, by in zip(tuned, (1, 2, 2, 1))]
    assert rates(config, 192) == pytest.approx(narrow)
    assert rates(dataclasses.replace(config, optimizer="adamw"), 192) == [config.lr] * 2
