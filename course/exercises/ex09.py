"""Exercise 9: learn the merges of a BPE, and use them.

    merge_order({b"aaab": 2, b"ab": 1}, 2) -> [(b"a", b"a"), (b"a", b"b")]

words: each distinct word of a text (bytes) -> how often it occurs, which can be beyond 2^53.
merge_order returns the first k merges in the order learned, each as the two tokens (bytes) that it
joins:
1. a pair of neighbours is counted at each place where it stands ("aaa" has (a, a) twice), times
   the word's count; never across two words;
2. the most frequent pair is merged. If several are equally frequent, it is the largest of them, as
   Python compares tuples of bytes: (b"b", b"a") goes before (b"ab", b"c"), as b"b" > b"ab".
   Mind that the library of the lesson takes the *smallest* pair, of *ids*. Here there are no ids;
   Stanford's CS336 has the same rule as this exercise;
3. it is replaced in all words, from the left, without overlap: aaa -> aa, a. Tokens of the same
   bytes are one token, however they came about;
4. it ends early when no pair is left that occurs twice.
4,000 words and 256 merges may take 10 seconds; counting everything anew for each merge takes 4.

    encode(b"the", {(b"h", b"e"): 0, (b"t", b"h"): 1, (b"t", b"he"): 2}) -> [b"the"]

merges: each pair -> its number in the order learned. encode cuts a word into its bytes, and then
makes the merges as training did: of the pairs that stand in the word, the one that was learned
first, everywhere in the word, from the left, without overlap; again, until none of them is left.
(In the example "h" and "e" go first, though "t" and "h" stand before them.) The tokens, joined, are
the word. The numbers may have gaps, begin anywhere, and be in the millions.
"""


def merge_order(words: dict[bytes, int], k: int) -> list[tuple[bytes, bytes]]:
    raise NotImplementedError("write merge_order, then: python course/check.py 9")


def encode(word: bytes, merges: dict[tuple[bytes, bytes], int]) -> list[bytes]:
    raise NotImplementedError("write encode too, then: python course/check.py 9")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random
    import time
    from collections import Counter

    def join(tokens: list[bytes], pair: tuple[bytes, ...]) -> None:
        at = 0
        while at < len(tokens) - 1:
            if (tokens[at], tokens[at + 1]) == pair:
                tokens[at : at + 2] = [b"".join(pair)]
            at += 1

    def letters(word: bytes) -> list[bytes]:
        return [bytes([byte]) for byte in word]

    def learn(words: dict[bytes, int], k: int) -> list:
        """Ask for merges, and follow them one by one: count pairs in the words as they then are."""
        merges = answer.merge_order(words, k)
        texts = [(letters(word), n) for word, n in words.items()]
        for i in range(k):
            counts = Counter()
            for tokens, n in texts:
                for pair in zip(tokens, tokens[1:]):
                    counts[pair] += n
            most = max(counts.values(), default=0)
            if most < 2:
                k = i
                break
            best = max(pair for pair in counts if counts[pair] == most)
            assert merges[i : i + 1] == [best], (
                f"merge {i + 1} is {merges[i : i + 1]}, not {best}, which occurs {most} times, and "
                "is the largest that does (rule 2)"
            )
            for tokens, _ in texts:
                join(tokens, best)
        assert merges[k:] == [], f"after {k} merges {merges[k:]}"
        return merges

    def encodes(word: bytes, merges: dict) -> None:
        right = letters(word)
        for pair in sorted(merges, key=merges.get):  # as training came by
            join(right, pair)
        found = answer.encode(word, merges)
        assert found == right, f"the tokens are {found!r:.300}, not {right!r:.300}"

    rng = random.Random(2)
    words = {bytes(rng.choices(b"etaoinsh", k=9)): rng.randint(1, 50) for _ in range(300)}
    began = time.process_time()
    answer.merge_order(words, 40)
    slow = time.process_time() > began + 0.6
    assert not slow, "300 words and 40 merges take more than 0.6 seconds"

    cases = []
    for line in (  # k, the words
        "2 aaab aaab ab",
        "5 aaaaa aaaaa",
        "1 aaaaa aaaaa",
        "5 aaaaa aaaaa",
        "3 ab cd",
        "4",
        "2 ca ca ab ab b b b",
        "6 xyxyx xyxyx yx yx",
        "9 abc abc bab bab",
        "0 zz zy yz",
        "3 a a",
        "5 ab ab",
        "4 abc cab c c",
        "9 coração coração não ã",
        "12 " + "x" * 30 + "yz" * 9 + "w",
    ):
        k, *parts = line.encode().split()
        cases.append((dict(Counter(parts)), int(k)))
    for alphabet in (b"ab", b"abcd", b"etaoin shrdlu", b"\x00a\x7f\x80\xc3\xff", bytes(range(256))):
        text = [bytes(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(99)]
        cases.append(({word: rng.randint(2, 6) for word in text}, 25 + len(alphabet)))
    cases += [({b"ab": n + 1, b"bc": n, b"": 3}, 2) for n in (1, 2**8, 2**16, 2**24, 2**60, 2**63)]
    cases += [({b"ab": 2, b"bc": 2, b"": 3}, 2), ({rng.randbytes(70_000) + b"qz" * 30: 1}, 2)]
    cases.append(({rng.randbytes(1200): 2}, 1200))
    cases.append(({i.to_bytes(3, "big"): 1 for i in range(70_000)} | {b"qz": 9999}, 1))

    for first, rules in (
        (0, b"h+e t+h t+he _+the _+t"),
        (-2, b"t+h h+e t+he _+the _+t"),
        (2**24, b"\xc3+\xa3 a+\xc3\xa3 a+a"),
    ):
        merges = {tuple(rule.split(b"+")): i for i, rule in enumerate(rules.split(), first)}
        merges = dict(sorted(merges.items()))  # the same pairs, other numbers
        for word in (b"_then_the_other", b"thethe", b"", b"thethe", b"t", b"a\xc3\xa3aaaaaaa\xc3"):
            encodes(word, merges)
    chain = bytes(range(256))
    encodes(9 * chain, {(chain[:i], chain[i : i + 1]): i for i in range(1, 256)})
    for words, k in cases:
        learned = learn(words, k)
        if len({a + b for a, b in learned}) == len(learned):  # a token is learned once
            gap = rng.choice((1, 7, 2**14))
            ranks = [(pair, 99_990 + gap * i) for i, pair in enumerate(learned)]
            merges = dict(rng.sample(ranks, k=len(ranks)))  # their order means nothing
            for word in [*words][:9]:
                encodes(word + b"aaab" + word, merges)
    encodes(b"q" * 70_000 + b"the", {(b"t", b"h"): 2, (b"th", b"e"): 3})
