"""flops.py: device names, and a meter under a fake clock. Lesson 21 recomputes published MFUs."""

import itertools
import math
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bits_per_byte import score_text
from data import IGNORED
from flops import Meter, find_peak, peak_flops

# Strings as torch.cuda.get_device_name() and friends return them.
NAMES = {
    "NVIDIA GH200 144G HBM3e": 989e12,
    "nvidia h100 pcie": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "Tesla T4": 65e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "NVIDIA L40-S": 362e12,
    "NVIDIA Grace Blackwell": 2.5e15,
    "Intel(R) Data Center GPU Max 1550": 340.8e12,  # as torch.xpu names each half of one
    # Names that contain, or nearly are, one of the table's: no figure may be invented for them.
    "NVIDIA RTX A4000": None,
    "NVIDIA GB10 Grace Blackwell": None,
    "NVIDIA Grace Blackwell Ultra": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "Intel(R) Data Center GPU Max 1100": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
}


@pytest.mark.parametrize("name, expected", NAMES.items())
def test_peak_flops_matches_whole_model_words(name, expected):
    assert peak_flops(name) == expected


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def run(meter, steps, *, seconds, tokens=1000):
    for _ in range(steps):
        meter.clock.sleep(seconds)
        meter.step(tokens, data_wait_s=0.002)


def test_meter_counts_accumulation_and_ranks_as_a_wall_clock_does(clock):
    ranks = 2
    meter = Meter(flops_full=8e8, flops_causal=7e8, peak=1e13, world_size=ranks, clock=clock)
    tokens = 4 * 512 * 8 * ranks  # rows x positions x micro-batches x ranks
    run(meter, 1, seconds=60)  # compiles
    start = clock.now
    for step in range(20):
        run(meter, 1, seconds=8 * (0.05 + 0.001 * (step % 2)), tokens=tokens)
    s = meter.summary()
    assert s["tokens_per_s"] == pytest.approx(20 * tokens / (clock.now - start), rel=0.03)
    assert s["mfu_full"] == pytest.approx(s["tokens_per_s"] * 8e8 / (1e13 * ranks))
    assert s["mfu_causal"] == pytest.approx(s["mfu_full"] * 7 / 8)
    assert s["tflops_full"] == pytest.approx(s["mfu_full"] * 10)
    assert s["data_wait_ms"] == pytest.approx(2.0)
    meter.peak = None  # an unknown device: no MFU, but the FLOP/s are known
    assert meter.summary() == s | dict(mfu_full=None, mfu_causal=None)


def test_pauses_are_no_training_time_but_are_shown_and_will_come_again(clock):
    """Before the first step, in the middle of one, and where a save fails."""
    meter = Meter(1e9, 1e9, clock=clock)
    with meter.paused("eval"):
        clock.sleep(7)
    run(meter, 3, seconds=1)
    clock.sleep(0.5)
    with meter.paused("eval"):
        clock.sleep(9)
    left = dict(eval=3, save=2)
    assert meter.eta_s(10_000, **left) == pytest.approx(10 + 3 * 8)  # no save seen yet
    with pytest.raises(OSError), meter.paused("save"):
        clock.sleep(2)
        raise OSError
    assert meter.eta_s(10_000, **left) == pytest.approx(10 + 3 * 8 + 2 * 2)
    clock.sleep(0.5)
    assert meter.step(1000) == pytest.approx(1.0)
    assert meter.summary()["eval_s"] == pytest.approx(16)
    whole = dict(start=10, steps=4, eval=16, report=0, save=2)  # 22 s since it was made
    assert meter.seconds(began=990.0) == pytest.approx(whole)


def test_the_window_forgets_the_compilation_and_what_is_old_and_ignores_a_stall(clock):
    meter = Meter(1e9, 1e9, window=5, clock=clock)
    speed = lambda: pytest.approx(meter.summary()["tokens_per_s"])
    run(meter, 1, seconds=50)
    assert speed() == 20  # all that there is
    run(meter, 1, seconds=2)
    assert speed() == 500
    run(meter, 5, seconds=9)
    run(meter, 2, seconds=1)
    run(meter, 2, seconds=4, tokens=4000)  # other steps, as fast
    run(meter, 1, seconds=6)
    assert speed() == 1000


def test_the_peak_is_given_or_the_datasheets_or_of_a_matmul_timed_now(monkeypatch):
    world = SimpleNamespace(device=torch.device("cuda"), device_name="NVIDIA H100 80GB HBM3")
    for world.dtype in (torch.bfloat16, torch.float16):
        assert find_peak(world) == 989e12 and find_peak(world, tflops=67.0) == 67e12
    world.dtype = torch.float32  # of which the table says nothing
    assert find_peak(world) is None
    world.device = torch.device("cpu")
    clock = itertools.count(0.0, 0.125)  # read twice per matmul
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert find_peak(world) == pytest.approx(2 * 2048**3 / 0.125)


class Table(nn.Module):
    """A model of bytes whose loss at each place depends on the input and the target there."""

    def forward(self, inputs, targets, reduction):
        assert reduction == "none" and not self.training
        self.shapes.append(inputs.shape)
        return 0.1 * inputs + 0.5 * targets  # (B, T)


@pytest.mark.parametrize("fixed, shapes", [(0, [(4, 8), (3, 8)]), (4, [(4, 8), (4, 8)])])
def test_bits_per_byte_is_the_nats_of_the_text_over_its_bytes(fixed, shapes):
    """By a loop over the targets, also of each source; 4 stands for no text, some do not count."""
    rows = torch.randint(0, 5, (7, 9), generator=torch.Generator().manual_seed(0))
    inputs = rows[:, :-1]
    targets = rows[:, 1:].clone()
    targets[2, 1:4] = targets[6, 5:] = IGNORED
    size = [3, 1, 1, 2, 0]
    sources = [0, 1, 1, 0, 1, 0, 1]
    counted = []  # source, nats and bytes of each target
    for source, before, after in zip(sources, inputs.tolist(), targets.tolist()):
        for token, target in zip(before, after):
            if target != IGNORED:
                counted.append((source, 0.1 * token + 0.5 * target, size[target]))

    def bits(*wanted):
        text = [(nats, n) for source, nats, n in counted if n and source in wanted]
        nats, n_bytes = map(sum, zip(*text))
        return pytest.approx(nats / n_bytes / math.log(2))

    batches = zip(inputs.split(4), targets.split(4), (sources[:4], sources[4:]))
    model = Table().train()
    model.shapes = []
    names = ("a", "b", "empty")
    loss, bpb, by_source = score_text(model, batches, torch.tensor(size), fixed, names)
    assert loss == pytest.approx(sum(nats for _, nats, _ in counted) / len(counted))
    assert bpb == bits(0, 1) and by_source == {"a": bits(0), "b": bits(1)}
    assert model.shapes == shapes and model.training
