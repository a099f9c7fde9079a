"""Exercise 21: the reference, and answers that the oracle must refuse."""

from edits import edits
from flops import peak_flops


def truth(line):
    """The four fields as they should be."""
    tokens = line["rows"] * line["seq_len"] * line["grad_accum"] * line["gpus"]
    flops = tokens / line["dt_s"] * line["flops_per_token"] / line["gpus"]
    peak = peak_flops(line["gpu"])
    mfu = flops / peak if peak else None
    return dict(tokens=tokens, tokens_per_s=tokens / line["dt_s"], tflops=flops / 1e12, mfu=mfu)


def agree(printed, value):
    if printed is None or value is None:
        return printed is value
    return abs(printed / value - 1) <= 0.005


def audit(line):
    wrong = [field for field, value in truth(line).items() if not agree(line[field], value)]
    return wrong[0] if wrong else ""


edit = edits(__file__)
AGREE = "abs(printed / value - 1) <= 0.005"
NAMES = """next(
        (peak for name, peak in dict(H100=989e12, L40=181e12).items() if name in line["gpu"]),
        peak_flops(line["gpu"]),
    )"""
WRONG = {  # name -> what of the reference it replaces
    "allows 0.6%": edit("0.005", "0.006"),
    "allows 0.5% of the printed value": edit(AGREE, "abs(value / printed - 1) <= 0.005"),
    "wants tokens to the last digit": edit(AGREE, f"{AGREE} and (printed == value or value % 1)"),
    "computes a field from the printed one before": edit(
        'tokens / line["dt_s"] * line',
        'line["tokens_per_s"] * line',
        AGREE,
        "abs(printed - value) <= 0.005 * value",
    ),
    "finds the card by substring": edit('peak_flops(line["gpu"])', NAMES),
    "finds nothing wrong with NaN": edit(AGREE, "not abs(printed / value - 1) > 0.005"),
}
