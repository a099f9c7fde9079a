"""Exercise 21: the reference, and answers that the oracle must refuse."""

from flops import peak_flops


def truth(line):
    """The four fields as they should be."""
    tokens = line["rows"] * line["seq_len"] * line["grad_accum"] * line["gpus"]
    flops = tokens / line["dt_s"] * line["flops_per_token"] / line["gpus"]
    peak = peak_flops(line["gpu"])
    mfu = flops / peak if peak else None
    return dict(tokens=tokens, tokens_per_s=tokens / line["dt_s"], tflops=flops / 1e12, mfu=mfu)


def agree(printed, value, tolerance=0.005):
    if printed is None or value is None:
        return printed is value
    return abs(printed / value - 1) <= tolerance


def audit(line, **options):
    wrong = [f for f, value in truth(line).items() if not agree(line[f], value, **options)]
    return wrong[0] if wrong else ""


def follows_the_printed(line):
    """Computes each field from the printed one before it."""
    line = dict(line)
    if line["tokens"] != truth(line)["tokens"]:
        return "tokens"
    per_gpu = line["tokens_per_s"] / line["gpus"] * line["flops_per_token"] / 1e12
    peak = peak_flops(line["gpu"])
    mfu = line["tflops"] * 1e12 / peak if peak else None
    right = dict(tokens_per_s=line["tokens"] / line["dt_s"], tflops=per_gpu, mfu=mfu)
    return next((field for field, value in right.items() if not agree(line[field], value)), "")


def wide_for_two(line):
    said = audit(line)
    return audit(line, tolerance=0.0095) if said in ("tokens_per_s", "mfu") else said


def exact_tokens(line):
    return audit(line) if line["tokens"] == truth(line)["tokens"] else "tokens"


def looks_for_a_substring(line):
    """Every H100 is the SXM board, and a laptop's card is the desktop's."""
    peaks = {"H100": 989e12, "L40": 181e12, "A100": 312e12, "B200": 2.25e15, "RTX 4090": 165.2e12}
    peak = next((peak for name, peak in peaks.items() if name in line["gpu"]), None)
    flops = truth(line)["tflops"] * 1e12
    said = audit(line | dict(mfu=truth(line)["mfu"]))
    return said or ("" if agree(line["mfu"], flops / peak if peak else None) else "mfu")


WRONG = {  # name -> what of the reference it replaces
    "allows 0.6%": dict(audit=lambda line: audit(line, tolerance=0.006)),
    "allows 0.95% for the speed and the MFU": dict(audit=wide_for_two),
    "wants tokens to the last digit": dict(audit=exact_tokens),
    "allows 0.1%": dict(audit=lambda line: audit(line, tolerance=0.001)),
    "computes a field from the printed one before": dict(audit=follows_the_printed),
    "finds the card by substring": dict(audit=looks_for_a_substring),
}

EQUIVALENT = {
    "return abs(printed / value - 1) <= tolerance: `abs(printed / value - 1) <= tolerance` -> "
    "`abs(printed / value - 1) < tolerance`": "no float is off by 0.5% exactly"
}
