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
    "NVIDIA H200": 989e12,
    "NVIDIA GH200 144G HBM3e": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "nvidia h100 pcie": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA L4": 121e12,
    "Tesla T4": 65e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "AMD Instinct MI300X VF": 1307.4e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA L40-S": 362e12,
    "nvidia l40 s": 362e12,
    "NVIDIA Grace Blackwell": 2.5e15,
    "Intel(R) Data Center GPU Max 1550": 340.8e12,  # as torch.xpu names each half of one
    # Names that contain, or nearly are, one of the table's: no figure may be invented for them.
    "NVIDIA RTX A4000": None,
    "NVIDIA A10G": None,
    "NVIDIA GB10 Grace Blackwell": None,
    "NVIDIA Grace Blackwell Ultra": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "Intel(R) Data Center GPU Max 1100": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA A100X": None,
    "": None,
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


def run(meter, clock, steps, *, tokens, seconds, wait=0.0):
    for _ in range(steps):
        clock.sleep(seconds)
        meter.step(tokens, data_wait_s=wait)


def test_meter_counts_accumulation_and_ranks_as_a_wall_clock_does():
    clock = Clock()
    micro_batch = 4
    seq_len = 512
    accum = 8
    ranks = 2
    meter = Meter(flops_full=8e8, flops_causal=7e8, peak=1e13, world_size=ranks, clock=clock)
    tokens = micro_batch * seq_len * accum * ranks  # 4 x 512 x 8 x 2 = 32,768
    run(meter, clock, 1, tokens=tokens, seconds=60)  # compiles
    start = clock.now
    done = 0
    for step in range(20):
        clock.sleep(accum * (0.05 + 0.001 * (step % 2)))
        meter.step(tokens, data_wait_s=0.002)
        done += tokens
    wall = done / (clock.now - start)
    s = meter.summary()
    assert s["tokens_per_s"] == pytest.approx(wall, rel=0.03)
    assert s["mfu_full"] == pytest.approx(s["tokens_per_s"] * 8e8 / (1e13 * ranks))
    assert s["mfu_causal"] == pytest.approx(s["mfu_full"] * 7 / 8)
    assert s["tflops_full"] == pytest.approx(s["mfu_full"] * 10)
    assert s["data_wait_ms"] == pytest.approx(2.0)
    meter.peak = None  # an unknown device: no MFU, but the FLOP/s are known
    assert meter.summary() == s | dict(mfu_full=None, mfu_causal=None)


def test_pauses_are_no_training_time_but_are_shown():
    clock = Clock()
    meter = Meter(1e9, 1e9, clock=clock)
    with meter.paused("eval"):  # before the first step
        clock.sleep(7)
    run(meter, clock, 3, tokens=1000, seconds=1)
    clock.sleep(0.5)
    with meter.paused("eval"):  # and in the middle of one
        clock.sleep(9)
    with pytest.raises(OSError), meter.paused("save"):
        clock.sleep(2.0)
        raise OSError
    clock.sleep(0.5)
    assert meter.step(1000) == pytest.approx(1.0)
    assert meter.summary()["eval_s"] == pytest.approx(16)
    whole = dict(start=10, steps=4, eval=16, report=0, save=2)  # 22 s since it was made
    assert meter.seconds(began=990.0) == pytest.approx(whole)


def test_eta_has_the_evaluations_and_saves_still_to_come():
    clock = Clock()
    meter = Meter(1e9, 1e9, clock=clock)
    run(meter, clock, 1, tokens=1000, seconds=30)
    run(meter, clock, 5, tokens=1000, seconds=2)
    for seconds in (4, 6):
        with meter.paused("eval"):
            clock.sleep(seconds)
    run(meter, clock, 1, tokens=1000, seconds=2)
    assert meter.eta_s(10_000, eval=3, save=2) == pytest.approx(20 + 3 * 5)  # no save seen yet
    with meter.paused("save"):
        clock.sleep(1)
    assert meter.eta_s(10_000, eval=3, save=2) == pytest.approx(20 + 3 * 5 + 2 * 1)


def test_the_window_forgets_the_compilation_and_what_is_old_and_ignores_a_stall():
    clock = Clock()
    meter = Meter(1e9, 1e9, window=5, clock=clock)
    run(meter, clock, 1, tokens=1000, seconds=50)
    assert meter.summary()["tokens_per_s"] == pytest.approx(20)  # all that there is
    run(meter, clock, 1, tokens=1000, seconds=2)
    assert meter.summary()["tokens_per_s"] == pytest.approx(500)
    run(meter, clock, 5, tokens=1000, seconds=9)
    run(meter, clock, 2, tokens=1000, seconds=1)
    run(meter, clock, 2, tokens=4000, seconds=4)  # other steps, as fast
    run(meter, clock, 1, tokens=1000, seconds=6)
    assert meter.summary()["tokens_per_s"] == pytest.approx(1000)
    assert meter.eta_s(8000) == pytest.approx(8)


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
        self.shapes = [*getattr(self, "shapes", []), tuple(inputs.shape)]
        return 0.1 * inputs + 0.5 * targets  # (B, T)


def test_bits_per_byte_is_the_nats_of_the_text_over_its_bytes():
    """By a loop over the targets, also of each source; 4 stands for no text, some do not count."""
    rows = torch.randint(0, 5, (7, 9), generator=torch.Generator().manual_seed(0))
    inputs = rows[:, :-1]
    targets = rows[:, 1:].clone()
    targets[2, 1:4] = targets[6, 5:] = IGNORED
    size = [3, 1, 1, 2, 0]
    sources = [0, 1, 1, 0, 1, 0, 1]
    nats = []
    text_nats = [0.0, 0.0]
    n_bytes = [0, 0]
    for source, before, after in zip(sources, inputs.tolist(), targets.tolist()):
        for token, target in zip(before, after):
            if target != IGNORED:
                nats.append(0.1 * token + 0.5 * target)
                text_nats[source] += nats[-1] if size[target] else 0
                n_bytes[source] += size[target]
    parts = (sources[:4], sources[4:])  # of 4 rows, and of 3
    batches = list(zip(inputs.split(4), targets.split(4), parts))
    model = Table().train()
    for fixed, shapes in ((0, [(4, 8), (3, 8)]), (4, [(4, 8)] * 2)):
        model.shapes = []
        names = ("a", "b", "empty")
        loss, bpb, by_source = score_text(model, batches, torch.tensor(size), fixed, names)
        assert loss == pytest.approx(sum(nats) / len(nats))
        assert bpb == pytest.approx(sum(text_nats) / sum(n_bytes) / math.log(2))
        each = [n / b / math.log(2) for n, b in zip(text_nats, n_bytes)]
        assert by_source == pytest.approx(dict(zip("ab", each)))
        assert model.shapes == shapes and model.training
