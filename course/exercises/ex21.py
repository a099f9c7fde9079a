"""Exercise 21: find the wrong field of a training log line.

A line is a dict. These fields are facts, never wrong:
    gpu (device name), gpus, rows (of a micro-batch of one GPU), seq_len, grad_accum, dt_s (seconds
    per step), flops_per_token
These four are computed from them, each printed with three correct digits (1.05e6, say):
    tokens         of a step: all GPUs, all micro-batches
    tokens_per_s   of all GPUs
    tflops         10^12 FLOP/s of one GPU
    mfu            a fraction of the dense bf16 peak, `flops.peak_flops(gpu)`; None if the name is
                   not in that table

audit(line) -> the first of the four, in this order, that does not follow from the facts; "" if all
do. Three digits may be off by 0.5% of the true value (1.005 is printed as 1.00); what is off by
more is wrong, and so are NaN and infinity.
"""


def audit(line: dict) -> str:
    raise NotImplementedError("write audit, then: python course/check.py 21")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math
    import random

    rng = random.Random(7)
    cards = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA L40": 181e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA B200": 2.25e15,
        "NVIDIA GeForce RTX 4090": 165.2e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA RTX A4000": None,
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA L40-S": 362e12,
    }
    fields = ["tokens", "tokens_per_s", "tflops", "mfu"]

    def judge(line, expected, why):
        found = answer.audit(line)
        assert found == expected, f"{why}: it is {found!r}, not {expected!r}"

    def draw(gpu, gpus):
        """The facts of a line, and the four that follow."""
        facts = dict(gpus=gpus, rows=16, seq_len=2048, grad_accum=3)
        tokens = math.prod(facts.values())
        flops = rng.uniform(40e12, 100e12)
        speed = flops / 3e9 * gpus
        peak = cards[gpu]
        facts |= dict(gpu=gpu, flops_per_token=3e9, dt_s=tokens / speed)
        return facts, dict(zip(fields, (tokens, speed, flops / 1e12, peak and flops / peak)))

    for gpu, gpus in zip(cards, [1, 8, 10**7] * 3):
        facts, exact = draw(gpu, gpus)
        printed = {field: x and float(f"{x:.3g}") for field, x in exact.items()}
        line = facts | printed
        judge(line, "", "nothing is wrong here")
        for fact, field in zip(
            ("gpus", "rows", "seq_len", "grad_accum", "dt_s", "flops_per_token"),
            ("tokens", "tokens", "tokens", "tokens", "tokens_per_s", "tflops"),
        ):
            judge(line | {fact: 2 * line[fact]}, field, f"another {fact}")
        factors = {0.97, 1.03, 0.985, 1.015, 0.5, 2, 100, 0, -1, math.nan, math.inf}
        factors |= {gpus, 1 / gpus, 3, 1 / 3}
        for i, field in enumerate(fields):
            later = dict.fromkeys(fields[i + 1 :], 0.3) if gpus == 8 else {}
            for factor in factors - {1}:
                wrong = {field: factor * (printed[field] or 0.4)}
                judge(line | wrong | later, field, f"{field} x {factor:.3g}")
        if cards[gpu]:
            judge(line | {"mfu": None}, "mfu", "None for a card whose peak is known")
    facts, exact = draw("NVIDIA L40", 8)
    for field, x in exact.items():
        for off in (0.0045, 0.0049, 0.0052, 0.0055, 0.008):
            for factor in (1 - off, 1 + off):
                line = facts | exact | {field: factor * x}
                judge(line, "" if off < 0.005 else field, f"{field} x {factor:.4f}")
    for a in (0.996, 1.004):
        near = {name: x * f for (name, x), f in zip(exact.items(), (1, a, 2 - a, a))}
        judge(facts | near, "", "each within 0.5% of the true value, though not of each other")
