"""Exercise 1: a context that was never seen asks the shorter one.

    predict(text, context, alpha) -> a list of 256 probabilities of the next byte

`text` is what you count in, `context` the bytes before the one to predict; both are of type bytes.
Let n(c, b) be how often the byte b comes right after the bytes c in the text, and n(c) the sum of
n(c, b) over all b. Then the probability of b after the context c is

    p(b | c) = (n(c, b) + alpha * p(b | c')) / (n(c) + alpha)

where c' is c without its first byte, the one furthest back. The empty context comes right before
each byte of the text, and its own c' is the uniform prediction, 1/256. So if c was never seen, the
answer is that of c', and the more often it was seen, the more its own counts say. alpha > 0.

    predict(b"aab", b"a", 1.0): after "a" came one "a" and one "b", so p(a | "a") =
        (1 + 1.0 * p(a)) / (2 + 1.0) = 0.500, with p(a) = (2 + 1.0 / 256) / (3 + 1.0) = 0.501

    bits_per_byte(text, exam, order, alpha) -> float

the mean of -log2 of the probabilities that the bytes of `exam` are given, each predicted from the
`order` bytes of the exam before it (the first ones from as many as there are, the very first from
none), with counts in `text`. The exam has at least one byte. `yours.py` asks for the whole exam of
lesson 1: a million bytes of text, 65,536 of exam, order 6, in ten seconds. To call predict for each
byte would take hours, so count the text once, all lengths of context in one dictionary. The judge
lets you have 4 seconds for a fifth of that.
"""


def predict(text: bytes, context: bytes, alpha: float) -> list[float]:
    raise NotImplementedError("write predict, then: python course/check.py 1")


def bits_per_byte(text: bytes, exam: bytes, order: int, alpha: float) -> float:
    raise NotImplementedError("write bits_per_byte, then: python course/check.py 1")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import math
    import random
    import time
    from fractions import Fraction

    def slowly(text: bytes, context: bytes, alpha: Fraction) -> list[Fraction]:
        """By the definition, in exact fractions, place by place."""
        k = len(context)
        count = {}
        shorter = [Fraction(1, 256)] * 256
        if k:
            shorter = slowly(text, context[1:], alpha)
        for i in range(k, len(text)):
            if all(text[i - k + j] == context[j] for j in range(k)):
                count[text[i]] = count.get(text[i], 0) + 1
        total = sum(count.values()) + alpha
        return [(count.get(b, 0) + alpha * shorter[b]) / total for b in range(256)]

    def name(text: bytes) -> str:
        return repr(text) if len(text) < 40 else f"{text[:30]!r}... ({len(text)} bytes)"

    rng = random.Random(5)
    letters = [bytes(rng.choices(b"abc", k=rng.randint(0, 30))) for _ in range(12)]
    cases = [(b"aab", b"a", 1), (b"aaaa", b"aa", 2), (b"abab", b"ab", 1), (b"", b"xy", 1)]
    cases += [(b"abcabd", b"", 3), (b"xyz", b"yz", 1), (b"ab", b"abcab", 1), (b"a.b|a", b".", 1)]
    cases += [(bytes([0, 255, 0, 254]), bytes([0]), Fraction(1, 4)), (b"a\n\na\n", b"\n", 1)]
    cases += [(b"abcabcabd", b"zab", 1), (b"bcabxacab", b"ca", Fraction(1, 2))]
    cases += [(3 * b"abcdefghij" + b"defghik", b"abcdefghij", 1)]
    for text in 2 * letters:
        context = bytes(rng.choices(b"abcd", k=rng.randint(0, 4)))
        cases.append((text, context, rng.choice([1, Fraction(1, 8), 9])))
    for text, context, alpha in cases:
        got = answer.predict(text, context, float(alpha))
        asked = f"predict({name(text)}, {context!r}, {float(alpha)})"
        assert len(got) == 256, f"{asked} has {len(got)} probabilities, not 256"
        total = math.fsum(got)
        assert abs(total - 1) < 1e-9, f"{asked}: the probabilities sum to {total}, not to 1"
        right = [float(p) for p in slowly(text, context, Fraction(alpha))]
        off = [b for b in range(256) if not math.isclose(got[b], right[b], rel_tol=1e-9)]
        if off:
            b = max(off, key=lambda b: abs(got[b] - right[b]))
            raise AssertionError(
                f"{asked}: {len(off)} of 256 are wrong, most of all byte {b} ({chr(b)!r}): "
                f"{got[b]:.6g}, by the definition {right[b]:.6g}"
            )

    exams = [(b"abracadabra", b"abra", 2, 1.0), (b"aaaa", b"aaaaa", 1, 0.5), (b"", b"q", 3, 1.0)]
    exams += [(3 * b"abcdefghij" + b"defghik", b"xabcdefghij", 8, 2.0)]
    exams += [(b"abcabc", b"cabcab", 0, 1.0), (b"xyxyz", b"xyz", 9, 2.0)]
    exams += [(t, bytes(rng.choices(b"abcd", k=12)), rng.randint(0, 4), 0.7) for t in letters]
    for text, exam, order, alpha in exams:
        right = 0.0
        for i in range(len(exam)):
            seen = exam[max(0, i - order) : i]
            right -= math.log2(slowly(text, seen, Fraction(alpha))[exam[i]]) / len(exam)
        got = answer.bits_per_byte(text, exam, order, alpha)
        assert math.isclose(got, right, rel_tol=1e-9), (
            f"bits_per_byte({name(text)}, {exam!r}, order={order}, alpha={alpha}) is {got:.6g}; by "
            f"the definition it is {right:.6g}"
        )

    # a long text: words of ten letters, frequent and rare ones, of all bytes here and there
    pieces = [bytes(rng.choices(b"etaoins\n\x00\xff", k=rng.randint(2, 8))) for _ in range(400)]
    common = [int(400 * rng.random() ** 3) for _ in range(45_000)]
    long = b" ".join(pieces[i] for i in common)[:213_000]
    text, exam = long[:200_000], long[200_000:]
    golden = {0: 3.3719766, 1: 3.0797036, 3: 1.6103738, 6: 1.4948391}
    short = text[:20_000]
    for order, right in golden.items():
        got = answer.bits_per_byte(short, exam[:300], order, 4.0)
        assert math.isclose(got, right, rel_tol=1e-6), (
            f"20,000 bytes of text, 300 of exam, order {order}, alpha 4: {got:.6f} bits per byte; "
            f"by the definition {right:.6f}"
        )
    one_by_one = [answer.predict(short, exam[max(0, i - 3) : i], 4.0)[exam[i]] for i in range(9)]
    right = -sum(map(math.log2, one_by_one)) / 9
    got = answer.bits_per_byte(short, exam[:9], 3, 4.0)
    assert math.isclose(got, right, rel_tol=1e-6), (
        f"20,000 bytes of text, 9 of exam, order 3: bits_per_byte gives {got:.6f}; by what "
        f"predict says of these bytes, it is {right:.6f}"
    )
    for size, right in ((200, 1.3679948), (13_000, 1.3991756)):
        began = time.process_time()
        got = answer.bits_per_byte(text, exam[:size], 6, 32.0)
        took = time.process_time() - began
        case = f"200,000 bytes of text, {size:,} of exam, order 6, alpha 32"
        assert took < 4, f"{case}: {took:.1f} s; counted in one pass, it takes less than one"
        assert math.isclose(got, right, rel_tol=1e-6), f"{case}: {got:.6f}; it is {right:.6f}"
