"""Exercise 9: learn the merges of a BPE, and use them.

    merge_order({b"aaab": 2, b"ab": 1}, 2) -> [(b"a", b"a"), (b"a", b"b")]

words: each distinct word of a text (bytes) -> how often it occurs. merge_order returns the first k
merges in the order learned, each as the two tokens (bytes) that it joins:
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
the word. The numbers may have gaps and need not begin at 0.
"""


def merge_order(words: dict[bytes, int], k: int) -> list[tuple[bytes, bytes]]:
    raise NotImplementedError("write merge_order, then: python course/check.py 9")


def encode(word: bytes, merges: dict[tuple[bytes, bytes], int]) -> list[bytes]:
    raise NotImplementedError("write encode too, then: python course/check.py 9")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away.

    It follows your merges one by one, and counts pairs in the words as they then are."""
    import random
    import time

    def join(tokens: list[bytes], pair: tuple[bytes, bytes]) -> None:
        at = 0
        while at < len(tokens) - 1:
            if (tokens[at], tokens[at + 1]) == pair:
                tokens[at : at + 2] = [pair[0] + pair[1]]
            at += 1

    def letters(word: bytes) -> list[bytes]:
        return [bytes([byte]) for byte in word]

    def follow(merges: list, words: dict[bytes, int], k: int) -> None:
        texts = [(letters(word), n) for word, n in words.items()]
        assert len(merges) <= k, f"{len(merges)} merges of {words}, {k} were asked for"
        for i in range(k):
            counts: dict[tuple[bytes, bytes], int] = {}
            for tokens, n in texts:
                for pair in zip(tokens, tokens[1:]):
                    counts[pair] = counts.get(pair, 0) + n
            counts = {pair: n for pair, n in counts.items() if n >= 2}
            said = f"of {words}: no pair occurs twice after {i} merges, but {merges[i:]}"
            assert counts or len(merges) == i, said
            if not counts:
                break
            assert len(merges) > i, f"{len(merges)} merges, of {k}: {counts} are left in {words}"
            pair = merges[i]
            most = max(counts.values())
            best = max(p for p in counts if counts[p] == most)
            tie = counts.get(pair) == most
            rule = "as often, and is the larger pair (rule 2)" if tie else f"{most} times"
            assert pair == best, (
                f"merge {i + 1} is {pair!r}, which occurs {counts.get(pair, 0)} times; "
                f"{best} occurs {rule}, in {texts}"
            )
            for tokens, _ in texts:
                join(tokens, pair)

    def encodes(word: bytes, merges: dict) -> None:
        given = dict(merges)
        right = letters(word)
        for pair in sorted(merges, key=merges.get):  # as training came by
            join(right, pair)
        while right != (before := list(right)):
            for pair in sorted(merges, key=merges.get):
                join(right, pair)
            assert right == before, "the judge's merges are not in an order that training makes"
        found = answer.encode(word, given)
        assert given == merges, f"encode changes the merges it was given, {merges}"
        assert found == right, (
            f"with these merges, whose order in the dict means nothing, encode({word}, merges) is "
            f"{found!r}, not {right}: {merges}"
        )

    rng = random.Random(2)
    cases = [({b"aaab": 2, b"ab": 1}, 2), ({b"aaaaa": 3}, 5), ({b"ab": 1, b"cd": 1}, 3), ({}, 4)]
    cases += [({b"ca": 5, b"ab": 5, b"b": 9}, 2), ({b"xyxyx": 4, b"yx": 2}, 6)]
    cases += [({b"abc": 3, b"bab": 3}, 9), ({b"zz": 1, b"zy": 1, b"yz": 1}, 0), ({b"a": 7}, 3)]
    cases += [({b"ab": 2}, 5), ({b"abc": 1, b"cab": 1, b"c": 8}, 4), ({b"": 3, b"qq": 2}, 2)]
    cases += [({"coração".encode(): 4, "não".encode(): 3, b"\xff\xfe\xff\xfe": 2}, 9)]
    cases += [({b"x" * 30 + b"yz" * 9 + b"w": 1}, 12), ({b"ab": 300, b"bc": 2**40}, 2)]
    for alphabet in (b"ab", b"abcd", b"etaoin shrdlu", b"\x00a\x7f\x80\xc3\xff", bytes(range(256))):
        text = [bytes(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(40)]
        cases.append(({word: rng.randint(1, 6) for word in text}, 25))
    learned = []
    for words, k in cases:
        given = dict(words)
        merges = answer.merge_order(given, k)
        assert given == words, f"merge_order changes the words it was given, {words}"
        assert isinstance(merges, list), f"merge_order returns {merges!r}, no list"
        follow(merges, words, k)
        learned.append((words, merges))
    pieces = [bytes(rng.choices(b"etaoinshrdlucmfw", k=3)) for _ in range(300)]
    many = {b"".join(rng.choices(pieces, k=3)): rng.randint(1, 50) for _ in range(1000)}
    began = time.process_time()
    found = answer.merge_order(many, 60)
    took = time.process_time() - began
    assert len(found) == 60 and took < 3, f"1,000 words, {len(found)} merges: {took:.1f} s"
    for words, merges in learned:
        if len({*(a + b for a, b in merges)}) == len(merges):  # a token is learned once
            ranks = {pair: 7 * i + 3 for i, pair in enumerate(merges)}
            ranks = dict(rng.sample([*ranks.items()], len(ranks)))
            other = [bytes(rng.choices(b"".join(words) or b"a", k=12)) for _ in range(5)]
            for word in [*words, *other, b"", 5 * b"aaab"]:
                encodes(word, ranks)
    the = [(b"h", b"e"), (b"t", b"h"), (b"t", b"he"), (b" ", b"the"), (b" ", b"t")]
    accents = [(b"\xc3", b"\xa3"), (b"a", b"\xc3\xa3"), (b"a", b"a"), (b"aa", b"a")]
    for merges in (the, accents):
        for word in (b" then the other", b"thethe", b"a\xc3\xa3aaaaaaa\xc3", b"\xa3\xc3\xa3"):
            encodes(word, {pair: i for i, pair in enumerate(merges)})
