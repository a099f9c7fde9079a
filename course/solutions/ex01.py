"""Exercise 1: the reference, and answers that the oracle must refuse."""

import math


def predict(text, context, alpha):
    p = [1 / 256] * 256
    for start in range(len(context), -1, -1):  # the empty context first
        p = mixed(text, context[start:], alpha, p)
    return p


def mixed(text, context, alpha, shorter):
    """The counts after one context, mixed with the prediction of the shorter one."""
    counts, at = [0] * 256, text.find(context)
    while at >= 0:
        after = at + len(context)
        if after < len(text):
            counts[text[after]] += 1
        at = text.find(context, at + 1)
    total = sum(counts) + alpha
    return [(n + alpha * p) / total for n, p in zip(counts, shorter)]


def bits_per_byte(text, exam, order, alpha):
    total = 0.0
    for i, byte in enumerate(exam):
        context = exam[max(0, i - order) : i]
        total -= math.log2(predict(text, context, alpha)[byte])
    return total / len(exam)


# ------------------------------------------------------------------------------ wrong answers
def counts_the_end(text, context, alpha, shorter):
    """n(c) also counts a context at the very end of the text, after which nothing comes."""
    n = sum(text.startswith(context, i) for i in range(len(text) + 1))
    pairs = [
        sum(text.startswith(context + bytes([b]), i) for i in range(len(text))) for b in range(256)
    ]
    return [(k + alpha * p) / (n + alpha) for k, p in zip(pairs, shorter)]


def without_overlaps(text, context, alpha, shorter):
    """bytes.count steps over what it has found: "aaaa" has two "aa" for it, not three."""
    counts = [text.count(context + bytes([b])) for b in range(256)]
    total = sum(counts) + alpha
    return [(n + alpha * p) / total for n, p in zip(counts, shorter)]


def drops_the_last(text, context, alpha):
    """Shortens the context at the wrong end: forgets the byte just before."""
    p = [1 / 256] * 256
    for stop in range(len(context) + 1):
        p = mixed(text, context[:stop], alpha, p)
    return p


def only_if_unseen(text, context, alpha, shorter):
    """Asks the shorter context only if this one was never seen."""
    own = mixed(text, context, alpha, [1 / 256] * 256)
    return own if context in text[:-1] else shorter


def spreads_alpha_evenly(text, context, alpha, shorter):
    return mixed_honest(text, context, alpha, [1 / 256] * 256)


def alpha_for_each_byte(text, context, alpha, shorter):
    """Lesson 1's smoothing: alpha for each of 256 bytes."""
    return mixed_honest(text, context, 256 * alpha, shorter)


def two_bytes_at_most(text, context, alpha):
    return honest(text, context[-2:], alpha)


def four_bytes_at_most(text, context, alpha):
    return honest(text, context[-4:], alpha)


def order_four_at_most(text, exam, order, alpha):
    return honest_bits(text, exam, min(order, 4), alpha)


REMEMBERED = {}


def remembers_by_context(text, context, alpha, shorter):
    """Keeps the counts of a context, and forgets of which text."""
    return mixed_honest(REMEMBERED.setdefault(context, text), context, alpha, shorter)


def by_regex(text, context, alpha, shorter):
    """Takes the context for a pattern: "." matches anything."""
    import re

    counts = [0] * 256
    for found in re.finditer(b"(?=" + context.replace(b"|", b"[|]") + b"(.))", text):
        counts[found[1][0]] += 1
    return [(n + alpha * p) / (sum(counts) + alpha) for n, p in zip(counts, shorter)]


def from_the_text(text, exam, order, alpha):
    """The first bytes of the exam are predicted from the end of the training text."""
    whole, start = text + exam, len(text)
    p = [
        honest(text, whole[max(0, start + i - order) : start + i], alpha)[byte]
        for i, byte in enumerate(exam)
    ]
    return -sum(map(math.log2, p)) / len(exam)


def skips_the_first(text, exam, order, alpha):
    """Begins with the first byte that has `order` bytes before it."""
    first = min(order, len(exam) - 1)
    p = [honest(text, exam[i - first : i], alpha)[exam[i]] for i in range(first, len(exam))]
    return -sum(map(math.log2, p)) / len(p)


def in_nats(text, exam, order, alpha):
    return honest_bits(text, exam, order, alpha) * math.log(2)


def learns_in_the_exam(text, exam, order, alpha):
    """Counts the exam as it goes."""
    p = [
        honest(text + exam[:i], exam[max(0, i - order) : i], alpha)[byte]
        for i, byte in enumerate(exam)
    ]
    return -sum(map(math.log2, p)) / len(exam)


def mean_of_probabilities(text, exam, order, alpha):
    p = [honest(text, exam[max(0, i - order) : i], alpha)[byte] for i, byte in enumerate(exam)]
    return -math.log2(sum(p) / len(p))


def with_mixed(mix):
    """predict, and bits_per_byte, on another way to mix."""

    def other(text, context, alpha):
        p = [1 / 256] * 256
        for start in range(len(context), -1, -1):
            p = mix(text, context[start:], alpha, p)
        return p

    return dict(predict=other)


honest, mixed_honest, honest_bits = predict, mixed, bits_per_byte
WRONG = {  # name -> what of the reference it replaces
    "counts a context at the end of the text": with_mixed(counts_the_end),
    "counts no overlaps": with_mixed(without_overlaps),
    "drops the byte just before": dict(predict=drops_the_last),
    "asks the shorter one only if unseen": with_mixed(only_if_unseen),
    "gives alpha to all bytes evenly": with_mixed(spreads_alpha_evenly),
    "alpha for each byte": with_mixed(alpha_for_each_byte),
    "two bytes of context at most": dict(predict=two_bytes_at_most),
    "four bytes of context at most": dict(predict=four_bytes_at_most),
    "order four at most": dict(bits_per_byte=order_four_at_most),
    "remembers counts by context, not by text": with_mixed(remembers_by_context),
    "a context is a pattern": with_mixed(by_regex),
    "predicts from the training text": dict(bits_per_byte=from_the_text),
    "leaves out the first bytes": dict(bits_per_byte=skips_the_first),
    "nats": dict(bits_per_byte=in_nats),
    "counts the exam too": dict(bits_per_byte=learns_in_the_exam),
    "logarithm of the mean": dict(bits_per_byte=mean_of_probabilities),
}
EQUIVALENT = {
    "p = [1 / 256] * 256: `256` -> `257`": "a 257th probability, which zip leaves out below",
    "counts, at = [0] * 256, text.find(context): `256` -> `257`": "a 257th count, likewise",
}
