"""Exercise 1: the reference, and answers that the oracle must refuse."""

import math
from collections import Counter

from edits import edits


def predict(text, context, alpha):
    p = [1 / 256] * 256
    for start in range(len(context), -1, -1):  # the empty context first
        own = context[start:]
        counts = [0] * 256
        at = text.find(own)
        while at >= 0:
            after = at + len(own)
            if after < len(text):
                counts[text[after]] += 1
            at = text.find(own, at + 1)
        total = sum(counts) + alpha
        p = [(n + alpha * q) / total for n, q in zip(counts, p)]
    return p


def bits_per_byte(text, exam, order, alpha):
    seen = Counter()  # contexts with the byte after them
    total = Counter()  # contexts before a byte
    for k in range(order + 1):
        seen.update(text[i : i + k + 1] for i in range(len(text) - k))
        total.update(text[i : i + k] for i in range(len(text) - k))
    bits = 0.0
    for i, byte in enumerate(exam):
        p = 1 / 256
        for k in range(min(order, i) + 1):
            own = exam[i - k : i]
            p = (seen[own + bytes([byte])] + alpha * p) / (total[own] + alpha)
        bits -= math.log2(p)
    return bits / len(exam)


edit = edits(__file__)
LOOP = "for k in range(min(order, i) + 1):"
SLOW = """p = predict(text, exam[max(0, i - order) : i], alpha)[byte]
        for k in ():"""
LEARN = """
        for k in range(min(order, i) + 1):
            seen[exam[i - k : i + 1]] += 1
            total[exam[i - k : i]] += 1"""
WRONG = {  # name -> what of the reference it replaces
    "counts a context at the end of the text": edit(
        "sum(counts) + alpha", "sum(counts) + text.endswith(own) + alpha"
    ),
    "counts no overlaps": edit("at + 1)", "at + max(1, len(own)))"),
    "drops the byte just before": edit("context[start:]", "context[: len(context) - start]"),
    "asks the shorter one only if unseen": edit(
        "[(n + alpha * q) / total for n, q in zip(counts, p)]",
        "[n / sum(counts) for n in counts] if any(counts) else p",
    ),
    "bits: in nats": edit("math.log2", "math.log"),
    "bits: leaves the first bytes out": edit("enumerate(exam):", "[*enumerate(exam)][order:]:"),
    "bits: predict for each byte": edit(LOOP, SLOW),
    "bits: counts the exam too": edit("math.log2(p)", "math.log2(p)" + LEARN),
    "bits: the longest context alone": edit("+ alpha * p)", "+ alpha / 256)"),
}
