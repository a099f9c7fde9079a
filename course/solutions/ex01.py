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
MIX = "p = [(n + alpha * q) / total for n, q in zip(counts, p)]"
P = "p = (seen[own + bytes([byte])] + alpha * p) / (total[own] + alpha)"
SLOW = """p = predict(text, exam[max(0, i - order) : i], alpha)[byte]
        for k in ():"""
LOOP = "for k in range(min(order, i) + 1):"
FIND = "        counts = [0] * 256\n        at = text.find(own)\n"
WRONG = {  # name -> what of the reference it replaces
    "counts a context at the end of the text": edit(
        "sum(counts) + alpha", "sum(counts) + text.endswith(own) + alpha"
    ),
    "counts no overlaps": edit("text.find(own, at + 1)", "text.find(own, at + max(1, len(own)))"),
    "drops the byte just before": edit(
        "own = context[start:]", "own = context[: len(context) - start]"
    ),
    "asks the shorter one only if unseen": edit(
        MIX, "p = [n / sum(counts) for n in counts] if any(counts) else p"
    ),
    "ten bytes of context at most": edit(
        "    p = [1 / 256] * 256\n", "    p, context = [1 / 256] * 256, context[-9:]\n"
    ),
    "the last 1,000 bytes, in predict": edit(
        "    p = [1 / 256] * 256\n", "    p, text = [1 / 256] * 256, text[-1000:]\n"
    ),
    "remembers counts by context, not by text": edit(
        FIND, "        text = globals().setdefault(own, text)\n" + FIND
    ),
    "a context is a pattern": edit(
        FIND,
        "        import re\n        at = -1\n        counts = [0] * 256\n"
        "        pattern = b'(?s)(?=' + own.replace(b'|', b'[|]') + b'(.))'\n"
        "        for found in re.finditer(pattern, text):\n"
        "            counts[found[1][0]] += 1\n",
    ),
    "loses a zero byte at the end": edit(
        "own = context[start:]", "own = context[start:].rstrip(b'\\0')"
    ),
    "bits: order four at most": edit(LOOP, "for k in range(min(order, i, 4) + 1):"),
    "bits: the last 1,000 bytes": edit("    seen =", "    text = text[-1000:]\n    seen ="),
    "bits: the first 100,000 bytes": edit("    seen =", "    text = text[:100_000]\n    seen ="),
    "bits: forgets what came once, in a long text": edit(
        "    bits = 0.0",
        "    if len(text) > 9999:\n        seen = Counter({k: n for k, n in seen.items() if n > 1})"
        "\n"
        "    bits = 0.0",
    ),
    "bits: predict for each byte": edit(LOOP, SLOW),
    "bits: counts the exam too": edit(
        "        bits -= math.log2(p)",
        "        bits -= math.log2(p)\n        for k in range(min(order, i) + 1):\n"
        "            seen[exam[i - k : i + 1]] += 1\n            total[exam[i - k : i]] += 1",
    ),
    "bits: the longest context alone": edit(P, P.replace("alpha * p", "alpha / 256")),
}
EQUIVALENT = {
    "p = [1 / 256] * 256: `256` -> `257`": "a 257th probability, which zip leaves out below",
    "counts = [0] * 256: `256` -> `257`": "a 257th count, likewise",
}
