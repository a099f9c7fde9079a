"""Exercise 1: a context that was never seen asks the shorter one.

    predict(text, context, alpha) -> a list of 256 probabilities of the next byte

`text` is what you count in, `context` the bytes before the one to predict, perhaps thousands;
both are of type bytes. Let n(c, b) be how often the byte b comes right after the bytes c in the
text, and n(c) the sum of n(c, b) over all b. Then the probability of b after the context c is

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
    from collections import Counter

    from subject import same

    def slowly(text, context, alpha):
        """By the definition, place by place, one byte of context after the other."""
        p = [1 / 256] * 256
        places = range(len(text))
        for k in range(len(context) + 1):
            if k:
                places = [i for i in places if i >= k and text[i - k] == context[-k]]
            count = Counter(text[i] for i in places)
            p = [(count[b] + alpha * p[b]) / (len(places) + alpha) for b in range(256)]
        return p

    def judge_predict(text, context, alpha):
        same(answer.predict(text, context, alpha), slowly(text, context, alpha), "p")

    def judge_bits(text, exam, order, alpha):
        right = 0.0
        for i, byte in enumerate(exam):
            right -= math.log2(slowly(text, exam[max(0, i - order) : i], alpha)[byte])
        same(answer.bits_per_byte(text, exam, order, alpha), right / len(exam), "the mean")

    rng = random.Random(5)
    letters = [bytes(rng.choices(b"abc", k=rng.randint(0, 30))) for _ in range(12)]
    tens = 3 * b"abcdefghij" + b"defghik"
    cases = [(b"aab", b"a"), (b"aaaa", b"aa"), (b"abab", b"ab"), (b"", b"xy"), (b"abcabd", b"")]
    cases += [(b"xyz", b"yz"), (b"ab", b"abcab"), (b"a.b|a", b"."), (b"a\n\na\n", b"\n")]
    cases += [
        (bytes([0, 255, 0, 254]), b"\0"),
        (b"abcabcabd", b"zab"),
        (b"bcabxacab", b"ca"),
        (tens, tens[:10]),
    ]
    cases += [(text, bytes(rng.choices(b"abcd", k=rng.randint(0, 4)))) for text in 2 * letters]
    for text, context in cases:
        judge_predict(text, context, 1.0)
        judge_predict(text, context, 0.125)
    exams = [(b"abracadabra", b"abra", 2), (b"aaaa", b"aaaaa", 1), (b"", b"q", 3)]
    exams += [(tens, b"x" + tens[:10], 8), (b"abcabc", b"cabcab", 0), (b"xyxyz", b"xyz", 9)]
    exams += [(t, bytes(rng.choices(b"abcd", k=12)), rng.randint(0, 4)) for t in letters]
    for text, exam, order in exams:
        judge_bits(text, exam, order, 2.0)
        judge_bits(text, exam, order + 1, 0.7)
    judge_bits(tens, 128 * b"x", 3, 1e-9)  # the product of all probabilities would be 0
    judge_bits(20 * b"0\xefEo\x12\xf3.", b"\xd2`\x9a`]\xe2.", 6, 1.0)  # of one crc32

    # a long text: words of up to eight letters, of all bytes here and there
    words = [bytes(rng.choices(b"etaoins\n\x00\xff", k=rng.randint(2, 8))) for _ in range(400)]
    long = b" ".join(rng.choices(words, k=45_000))
    text = long[:200_000]
    exam = long[200_000:213_000]
    for order in (0, 1, 3, 6):
        judge_bits(text[:20_000], exam[:20], order, 4.0)
    judge_predict(text[:5_000], text[100:1400], 500.0)
    for byte in (b"a", b"b"):  # the second text may be where the first one was
        judge_predict(byte.center(70_000, b"a"), b"aa", 1.0)
        judge_bits(byte.center(70_000, b"a"), b"aab", 2, 1.0)
    for size, right in ((200, 1.641735547), (13_000, 1.523468702)):
        began = time.process_time()
        found = answer.bits_per_byte(text, exam[:size], 6, 32.0)
        took = time.process_time() - began
        assert took < 4, f"{took:.1f} s; counted in one pass, it takes less than one"
        same(found, right, "the mean", 1e-7)
