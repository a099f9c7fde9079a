"""Exercise 17: find the wrong field of a training log line.

A line is a dict. These fields are facts, never wrong:
    gpu (device name), gpus, rows (of a micro-batch of one GPU), seq_len, grad_accum, dt_s (seconds
    per step), flops_per_token
These four are computed from them, each printed with three correct digits:
    tokens         of a step: all GPUs, all micro-batches
    tokens_per_s   of all GPUs
    tflops         10^12 FLOP/s of one GPU
    mfu            a fraction of the dense bf16 peak, `flops.peak_flops(gpu)`; None if the name is
                   not in that table

audit(line) -> the first of the four, in this order, that does not follow from the facts; "" if all
do. Allow 0.5% for rounding.
"""


def audit(line: dict) -> str:
    raise NotImplementedError("write audit, then: python course/check.py 17")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import random

    rng = random.Random(7)
    cards = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA L40": 181e12, "NVIDIA A100-SXM4-80GB": 312e12}
    cards["NVIDIA RTX A4000"] = None

    def digits(x: float) -> float:
        return float(f"{x:.3g}")

    def true_line() -> dict:
        gpu, gpus = rng.choice(list(cards)), rng.choice([1, 2, 8, 64])
        facts = dict(gpu=gpu, gpus=gpus, rows=rng.choice([4, 16, 32]), seq_len=2048)
        facts |= dict(grad_accum=rng.choice([2, 3, 8]), flops_per_token=rng.uniform(1e9, 9e9))
        tokens = facts["rows"] * 2048 * facts["grad_accum"] * gpus
        tflops = 40 + 60 * rng.random()
        facts["dt_s"] = tokens * facts["flops_per_token"] / gpus / (tflops * 1e12)
        mfu = cards[gpu] and digits(tflops * 1e12 / cards[gpu])
        printed = dict(tokens=tokens, tokens_per_s=digits(tokens / facts["dt_s"]))
        return facts | printed | dict(tflops=digits(tflops), mfu=mfu)

    def judge(line: dict, expected: str, why: str) -> None:
        said = answer.audit(dict(line))
        shown = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()
        )
        assert said == expected, f"{why}: expected {expected!r}, audit says {said!r} of {shown}"

    for _ in range(60):
        line = true_line()
        judge(line, "", "nothing is wrong here")
        for field in ("tokens", "tokens_per_s", "tflops", "mfu"):
            if line[field] is not None:
                factor = rng.choice([0.97, 1.03, 1 / line["grad_accum"]])
                judge(line | {field: line[field] * factor}, field, f"{field} times {factor:.2f}")
        few = line["tokens"] // line["grad_accum"]
        wrong = dict(tokens=few, tokens_per_s=few / line["dt_s"])
        judge(line | wrong, "tokens", "tokens and speed of one micro-batch")
        if line["mfu"]:
            sparse = line["mfu"] / 2
            judge(
                line | dict(mfu=sparse), "mfu", "the peak of sparse matrices, twice the dense one"
            )
            if line["gpus"] > 1:
                whole = line["mfu"] * line["gpus"]
                judge(line | dict(mfu=whole), "mfu", "all GPUs over the peak of one")
        else:
            judge(line | dict(mfu=0.0), "mfu", "0% for a card whose peak is unknown")
