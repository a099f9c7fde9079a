"""Exercise 21: find the wrong field in a line of a training log.

A line is a dict. These fields are facts, and never wrong:
    gpu (device name), gpus, rows (of a micro-batch of one GPU), seq_len, grad_accum, dt_s (seconds
    per step), flops_per_token
These four are computed from the facts, and each is printed with three correct digits (1.05e6, say):
    tokens         of a step: all GPUs, all micro-batches
    tokens_per_s   of all GPUs
    tflops         10^12 FLOP/s of one GPU
    mfu            a fraction of the dense bf16 peak, `flops.peak_flops(gpu)`; None if the name is
                   not in that table

audit(line) -> the first of the four, in this order, that does not follow from the facts; "" if all
of them do. With three digits a number may be off by 0.5% of the true value (1.005 is printed as
1.00). A number that is off by more is wrong, and so are NaN and infinity.
"""


def audit(line: dict) -> str:
    raise NotImplementedError("write audit, then: python course/check.py 21")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math

    from subject import equal

    facts = dict(
        gpu="NVIDIA H100 80GB HBM3",
        gpus=8,
        rows=16,
        seq_len=2048,
        grad_accum=3,
        dt_s=5.0,
        flops_per_token=3e9,
    )
    tflops = 58.9824
    right = dict(tokens=786_432, tokens_per_s=157_286.4, tflops=tflops, mfu=tflops / 989)

    def judge(expected, why, **changes):
        line = facts | right | changes
        equal(answer.audit(line), expected, f"{why}: the answer for {line}")

    printed = dict(tokens=7.86e5, tokens_per_s=1.57e5, tflops=59.0, mfu=0.0596)
    judge("", "three correct digits each", **printed)
    for field, value in right.items():
        for factor in (0.99501, 1.00499):
            judge("", f"{field} is off by 0.499%", **{field: factor * value})
        for factor in (0.99498, 1.00502, -1, math.nan, math.inf):
            judge(field, f"{field} is {factor} times the true value", **{field: factor * value})
    judge("tokens", "tokens and mfu are wrong", tokens=1, mfu=0.9)

    judge("", "another card", gpu="NVIDIA H100 PCIe", mfu=tflops / 756)
    judge("mfu", "a card of the table", mfu=None)
    for gpu in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX A4000"):
        judge("", "a card that is not in the table", gpu=gpu, mfu=None)
        judge("mfu", "a card that is not in the table", gpu=gpu, mfu=0.4)
