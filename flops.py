"""Speed, in three parts: the table of cards, MFU, and the meter of a run.

1. The table of cards: the peak FLOP/s of a device, by its name. None is guessed for a device that
   the table does not name in whole words.
2. MFU: how much of that peak a model uses. FLOPs per token (`GPT.flops_per_token`) are `full`, with
   all T x T attention (PaLM, appendix B), or `causal`, with the half that a causal model needs
   (Megatron-LM). The same run has 41% MFU in one and 32% in the other, so both are printed.
3. The meter: tokens/s and the time left of a run. Evaluation, saving and compilation never count as
   training time. Next: bits_per_byte.py.
"""

import re
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from string import ascii_uppercase
from typing import NamedTuple

import torch

# ------------------------------------------------------------------------- 1. the table of cards


class Card(NamedTuple):
    """What the datasheet of a device says."""

    peak: float  # dense FLOP/s in bf16, or fp16 (the sparse figure that vendors print is twice it)
    memory_gb: int


# From the vendors' datasheets. A key matches a device name that has all its words; the key with the
# most words wins, and a bare name is the SXM board. An MI250 is two devices, each with its half. So
# is Intel's Max 1550 (Ponte Vecchio), for eval.py plan only, as no run uses an xpu; its figure is
# computed: 512 units x 512 FLOPs x 1.3 GHz, torchtitan's clock (at most 1.6).
CARDS = {
    "GB200": Card(2.5e15, 186), "B200": Card(2.25e15, 180),
    "B100": Card(1.8e15, 192), "H200": Card(989e12, 141), "GH200": Card(989e12, 96),
    "H200 NVL": Card(836e12, 141), "H200 PCIE": Card(836e12, 141),
    "H100": Card(989e12, 80), "H100 NVL": Card(835e12, 94),
    "H100 PCIE": Card(756e12, 80), "H800": Card(989e12, 80),
    "H800 PCIE": Card(756e12, 80), "H20": Card(148e12, 96),
    "A100": Card(312e12, 80), "A100 40GB": Card(312e12, 40),
    "A800": Card(312e12, 80), "A40": Card(149.7e12, 48), "A30": Card(165e12, 24),
    "L40S": Card(362e12, 48), "L40": Card(181e12, 48), "L4": Card(121e12, 24),
    "MI355X": Card(2.5e15, 288), "MI325X": Card(1307.4e12, 256),
    "MI300X": Card(1307.4e12, 192), "MI300A": Card(980.6e12, 128),
    "MI250X": Card(191.5e12, 64), "MI250": Card(181.05e12, 64),
    "MAX 1550": Card(340.8e12, 64),
    "RTX 5090": Card(209.5e12, 32), "RTX 4090": Card(165.2e12, 24),
    "RTX 3090": Card(71e12, 24), "T4": Card(65e12, 15),  # 16 less ECC
    "V100": Card(125e12, 16), "V100 PCIE": Card(112e12, 16),
    "V100 32GB": Card(125e12, 32), "V100 PCIE 32GB": Card(112e12, 32),
}  # fmt: skip
# A device with one of these words in its name is another card: a slice, a laptop's, ... So is one
# with a letter on its own, as in "RTX 4090 D"; but "L40-S" is the L40S.
DIFFERENT_CARD = {"MIG", "LAPTOP", "TI", "SUPER", "CNX", "GB10", "GB300", "ULTRA", *ascii_uppercase}


def find_card(device_name: str) -> Card | None:
    """The card of this name: "NVIDIA H100 80GB HBM3" -> CARDS["H100"], "NVIDIA RTX A4000" -> None
    (it is no A40)."""
    name = device_name.upper().replace("(R)", "")  # else its R is a letter on its own
    name = name.replace("GRACE BLACKWELL", "GB200")
    words = set(re.findall(r"[A-Z0-9]+", re.sub(r"L40[- ]S\b", "L40S", name)))
    keys = [key for key in CARDS if words.issuperset(key.split())]
    if not keys or words & DIFFERENT_CARD:
        return None
    return CARDS[max(keys, key=lambda key: len(key.split()))]


def peak_flops(device_name: str) -> float | None:
    """Dense FLOP/s of one device in 16 bits, by its name; None when it is not in the table."""
    card = find_card(device_name)
    return card.peak if card else None


def find_peak(world, tflops: float = 0.0) -> float | None:
    """Peak FLOP/s of the device of a machinery.ranks.World: as given; by its name, in 16 bits; or,
    on a CPU, as it multiplies two matrices now."""
    if tflops:
        return tflops * 1e12
    if world.device.type != "cpu":
        return peak_flops(world.device_name) if world.dtype != torch.float32 else None
    n = 2048
    times = []
    a, b = (torch.randn(n, n).to(world.dtype) for _ in range(2))
    while len(times) < 5 or sum(times) < 0.5:
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(times[2:])  # the first two warm up


# ----------------------------------------------------------------------------------- 2. MFU


def mfu(
    tokens_per_s: float, flops_per_token: float, peak: float | None, world_size: int = 1
) -> float | None:
    """Model FLOPs utilization, a fraction: the model's FLOP/s over the peak of all devices.

    tokens_per_s counts all ranks and all micro-batches; peak is the FLOP/s of ONE device. If it is
    None, unknown, so is the result. PaLM (Chowdhery et al. 2022), appendix B."""
    return tokens_per_s * flops_per_token / (peak * world_size) if peak else None


# ----------------------------------------------------------------------------- 3. the meter


@dataclass
class Meter:
    """Speed over the last `window` optimizer steps, and the time left.

    A step's time is from one call of `step` to the next. On a GPU, the optimizer may not be done by
    then: its time is in the next step's. The first step of a process compiles, so it leaves the
    window as soon as there is a second. Nothing here is saved: a resumed run starts afresh.

    flops_full, flops_causal: per token. peak: FLOP/s of one device."""

    flops_full: float
    flops_causal: float
    peak: float | None = None
    world_size: int = 1
    window: int = 50
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self):
        self.steps: deque[tuple[int, float, float]] = deque(maxlen=self.window)  # tokens, dt, wait
        self.pauses = defaultdict(list)  # kind -> seconds of each
        self.n_steps = 0
        self.steps_s = 0.0  # of all steps
        self.start()

    def start(self) -> None:
        """The next step begins now (the constructor and `step` call it)."""
        self._since = self.clock()
        self._paused_s = 0.0

    def step(self, tokens: int, data_wait_s: float = 0.0) -> float:
        """A step is complete, of `tokens` (all ranks, all micro-batches); returns its seconds
        without the pauses."""
        dt_s = self.clock() - self._since - self._paused_s
        self.start()
        self.n_steps += 1
        self.steps_s += dt_s
        if self.n_steps == 2:
            self.steps.clear()
        self.steps.append((tokens, dt_s, data_wait_s))
        return dt_s

    @contextmanager
    def paused(self, kind: str) -> Iterator[None]:
        """`with meter.paused("eval"): ...` does not count as training; not to be nested."""
        start = self.clock()
        try:
            yield
        finally:
            self.pauses[kind].append(self.clock() - start)
            self._paused_s += self.pauses[kind][-1]

    def seconds(self, began: float) -> dict[str, float]:
        """Where the time of a process went that began at `began`, by the clock: to the steps, to
        the pauses, and to the start, which is the rest: data checked, model built, compiled."""
        parts = {"steps": self.steps_s}
        for kind in ("eval", "report", "save"):
            parts[kind] = sum(self.pauses[kind])
        return {"start": self.clock() - began - sum(parts.values())} | parts

    def eta_s(self, tokens_left: int, **pauses_left: int) -> float:
        """Seconds to the end: `eta_s(tokens_left, eval=12, save=3)` with 12 evaluations and 3 saves
        still to come. A kind of pause that has not happened yet counts as 0 s."""
        left_s = tokens_left / self.summary()["tokens_per_s"]
        for kind, n in pauses_left.items():
            left_s += n * statistics.mean(self.pauses[kind] or [0.0])
        return left_s

    def summary(self) -> dict[str, float | None]:
        """For metrics.jsonl: medians of the window, lest one stall hide the speed (data_wait_ms: a
        mean), and sums of all pauses. TFLOP/s are per device; MFU is None without a known peak."""
        _, dts, waits = zip(*self.steps)
        tokens_per_s = statistics.median(tokens / dt_s for tokens, dt_s, _ in self.steps)
        per_device = tokens_per_s / self.world_size / 1e12
        return {
            "tokens_per_s": tokens_per_s,
            "dt_ms": 1e3 * statistics.median(dts),
            "data_wait_ms": 1e3 * statistics.mean(waits),
            "tflops_full": per_device * self.flops_full,
            "tflops_causal": per_device * self.flops_causal,
            "mfu_full": mfu(tokens_per_s, self.flops_full, self.peak, self.world_size),
            "mfu_causal": mfu(tokens_per_s, self.flops_causal, self.peak, self.world_size),
            **{f"{kind}_s": sum(seconds) for kind, seconds in self.pauses.items()},
        }
