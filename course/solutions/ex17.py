"""Exercise 17: the reference, and answers that the oracle must refuse."""

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
    return abs(printed / value - 1) < 0.005


def audit(line, last=False):
    wrong = [field for field, value in truth(line).items() if not agree(line[field], value)]
    return wrong[-1 if last else 0] if wrong else ""


def forgets_accumulation(line):
    return audit(line | dict(grad_accum=1))


def divides_by_one_gpu(line):
    """The peak of one GPU under the FLOP/s of all."""
    said = audit(line)
    if said in ("", "mfu") and line["mfu"] is not None:
        return audit(line | dict(mfu=line["mfu"] / line["gpus"]))
    return said


def takes_the_sparse_peak(line):
    return audit(line | dict(mfu=line["mfu"] and 2 * line["mfu"]))


def takes_unknown_for_zero(line):
    return audit(line | dict(mfu=line["mfu"] or None))


def names_the_last(line):
    return audit(line, last=True)


WRONG = {  # name -> what of the reference it replaces
    "forgets accumulation": dict(audit=forgets_accumulation),
    "divides by one GPU's peak": dict(audit=divides_by_one_gpu),
    "takes the sparse peak": dict(audit=takes_the_sparse_peak),
    "takes unknown for 0%": dict(audit=takes_unknown_for_zero),
    "names the last, not the first": dict(audit=names_the_last),
}
