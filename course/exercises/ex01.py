"""Exercise 1: each context leans on the one that is a byte shorter.

    predict(text, context, alpha) -> a list of 256 probabilities of the next byte

`text` is what you count in, `context` the bytes before the one to predict; both are of type bytes.
A context may have thousands of bytes, and Python gives up at about 1,000 calls within calls, so
predict must not call itself for each. Let n(c, b) be how often the byte b comes right after the
bytes c in the text, and n(c) the sum of n(c, b) over all b. Then the probability of b after the
context c is

    p(b | c) = (n(c, b) + alpha * p(b | c')) / (n(c) + alpha)

where c' is c without its first byte, the one furthest back. The empty context comes right before
every byte of the text, and for it, p(b | c') is 1/256. So if c was never seen, the answer is that
of c', and the more often c was seen, the more its own counts decide. alpha > 0.

    predict(b"aab", b"a", 1.0): after "a" came one "a" and one "b", so p(a | "a") =
        (1 + 1.0 * p(a)) / (2 + 1.0) = 0.500, with p(a) = (2 + 1.0 / 256) / (3 + 1.0) = 0.501

    bits_per_byte(text, exam, order, alpha) -> float

the mean of -log2(p), where p is the probability given to a byte of `exam`. Each byte is predicted
from the `order` bytes of the exam before it (the first ones from as many as there are, the very
first from none), with counts in `text`. The exam has at least one byte. `yours.py` asks for the
whole exam of lesson 1: a million bytes of text, 65,536 of exam, order 6. To call predict for every
byte would take hours, so count the text once, for all lengths of context. The judge gives you 6
seconds for a fifth of that exam and text.
"""


def predict(text: bytes, context: bytes, alpha: float) -> list[float]:
    raise NotImplementedError("write predict, then: python course/check.py 1")


def bits_per_byte(text: bytes, exam: bytes, order: int, alpha: float) -> float:
    raise NotImplementedError("write bits_per_byte, then: python course/check.py 1")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math
    import random
    import time
    from collections import Counter

    from subject import same

    def slowly(text, context, alpha):
        """By the definition, the empty context first."""
        p = [1 / 256] * 256
        for k in range(len(context) + 1):
            end = context[len(context) - k :]
            after = [i for i in range(k, len(text)) if text[i - k : i] == end]
            count = Counter(text[i] for i in after)
            p = [(count[b] + alpha * p[b]) / (len(after) + alpha) for b in range(256)]
        return p

    rng = random.Random(5)
    drawn = bytes(rng.choices(b"abc", k=2000))
    cases = {
        "the text's example": (b"aab", b"a"),
        "the empty context": (b"abcabd", b""),
        "a context that was never seen, but its end was": (b"abcabcabd", b"zab"),
        "places of a context may overlap": (b"aaaa", b"aa"),
        "after the context at the end comes no byte": (b"abab", b"ab"),
        "bytes that are not letters": (b"\0\xff.\n\0\xfe.\n", b".\n\0"),
        "a context of 1,100 bytes": (drawn[:60], drawn[:1040] + drawn[10:60]),
    }
    for case, (text, context) in cases.items():
        for alpha in (1.0, 500.0):
            same(answer.predict(text, context, alpha), slowly(text, context, alpha), f"{case}: p")

    cases = {
        "the very first byte": (b"aab", b"a", 2),
        "order 0, and the exam is not counted": (b"aab", b"abab", 0),
        "three first bytes, and one more": (b"abracadabra", b"abra", 3),
        "a drawn text, and order 30": (drawn, drawn[20:40], 30),
    }
    for case, (text, exam, order) in cases.items():
        p = [slowly(text, exam[max(0, i - order) : i], 0.7)[b] for i, b in enumerate(exam)]
        mean = -sum(map(math.log2, p)) / len(p)
        same(answer.bits_per_byte(text, exam, order, 0.7), mean, f"{case}: the mean of -log2(p)")

    words = b"a the cat rat sat slept ate on in mat house cheese \0 \xff".split(b" ")
    long = b" ".join(rng.choices(words, k=60_000))
    for size, mean in ((200, 0.920767340), (13_000, 0.969211121)):  # by the reference
        began = time.process_time()
        found = answer.bits_per_byte(long[:200_000], long[200_000:][:size], 6, 32.0)
        took = time.process_time() - began
        assert took < 6, (
            f"it took {took:.1f} s; with the text counted once, and only the byte that came looked "
            "up, it takes less than one"
        )
        same(
            found, mean, f"a text of 200,000 bytes, an exam of {size:,}: the mean of -log2(p)", 1e-7
        )
