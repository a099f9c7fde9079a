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
more is wrong.
"""


def audit(line: dict) -> str:
    raise NotImplementedError("write audit, then: python course/check.py 21")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random

    rng = random.Random(7)
    cards = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA L40": 181e12, "NVIDIA A100-SXM4-80GB": 312e12}
    cards |= {
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA B200": 2.25e15,
        "NVIDIA GeForce RTX 4090": 165.2e12,
    }
    cards |= {"NVIDIA RTX A4000": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None}

    def digits(x: float) -> float:
        return float(f"{x:.3g}")

    def true_line() -> dict:
        gpu = rng.choice(list(cards))
        gpus = rng.choice([1, 2, 8, 64])
        facts = dict(gpu=gpu, gpus=gpus, rows=rng.choice([4, 16, 32]), seq_len=2048)
        facts |= dict(grad_accum=rng.choice([2, 3, 8]), flops_per_token=rng.uniform(1e9, 9e9))
        tokens = facts["rows"] * 2048 * facts["grad_accum"] * gpus
        tflops = 40 + 60 * rng.random()
        facts["dt_s"] = tokens * facts["flops_per_token"] / gpus / (tflops * 1e12)
        mfu = cards[gpu] and digits(tflops * 1e12 / cards[gpu])
        printed = dict(tokens=digits(tokens), tokens_per_s=digits(tokens / facts["dt_s"]))
        return facts | printed | dict(tflops=digits(tflops), mfu=mfu)

    def judge(line: dict, expected: str, why: str) -> None:
        given = dict(line)
        said = answer.audit(given)
        assert given == line, f"audit has changed the line to {given}"
        shown = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()
        )
        assert said == expected, f"{why}: expected {expected!r}, audit says {said!r} of {shown}"

    fields = ("tokens", "tokens_per_s", "tflops", "mfu")
    for _ in range(60):
        line = true_line()
        judge(line, "", "nothing is wrong here")
        for field in fields:
            if line[field] is not None:
                for factor in (0.97, 1.03, 1 / line["grad_accum"], 0.985, 1.015):
                    judge(line | {field: line[field] * factor}, field, f"{field} x {factor:.3g}")
        few = line["tokens"] // line["grad_accum"]
        wrong = dict(tokens=few, tokens_per_s=few / line["dt_s"])
        judge(line | wrong, "tokens", "tokens and speed of one micro-batch")
        first, second = sorted(rng.sample(range(3), 2))
        both = {fields[i]: 1.2 * line[fields[i]] for i in (first, second)}
        judge(line | both, fields[first], f"{fields[first]} and {fields[second]} x 1.2")
        if line["mfu"]:
            wrong_mfu = {
                "the peak of sparse matrices, twice the dense one": line["mfu"] / 2,
                "MFU in percent": 100 * line["mfu"],
                "None for a card whose peak is known": None,
                "0% for a card whose peak is known": 0.0,
            }
            if line["gpus"] > 1:
                wrong_mfu["all GPUs over the peak of one"] = line["mfu"] * line["gpus"]
                wrong_mfu["one GPU over the peak of all"] = line["mfu"] / line["gpus"]
            for why, value in wrong_mfu.items():
                judge(line | dict(mfu=value), "mfu", why)
                judge(
                    line | dict(mfu=value, tflops=line["tflops"] * 2), "tflops", f"2 x, and {why}"
                )
        else:
            judge(line | dict(mfu=0.0), "mfu", "0% for a card whose peak is unknown")
            judge(line | dict(mfu=0.4), "mfu", "40% for a card whose peak is unknown")
    facts = dict(gpu="NVIDIA L40", gpus=8, rows=16, seq_len=2048, grad_accum=2)
    tokens = 16 * 2048 * 2 * 8
    facts |= dict(flops_per_token=2e9, dt_s=tokens * 2e9 / 8 / 100e12)
    exact = dict(tokens=tokens, tokens_per_s=tokens / facts["dt_s"], tflops=100.0, mfu=100 / 181)
    for field in fields:
        for off in (-0.0049, 0.0049, -0.0045, 0.0045, -0.0052, 0.0052, -0.0055, 0.0055, 0.008):
            line = facts | exact | {field: exact[field] * (1 + off)}
            judge(line, "" if abs(off) < 0.005 else field, f"{field} is {off:+.2%} off")
    speed = exact["tokens_per_s"]
    for a, b in ((0.996, 1.004), (1.004, 0.996)):
        printed = dict(tokens=tokens, tokens_per_s=a * speed, tflops=100 * b, mfu=a * 100 / 181)
        judge(facts | printed, "", "each within 0.5% of the true value, though not of each other")
