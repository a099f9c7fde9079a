"""Exercise 6: learn the merges of a BPE, and recover them where only the tokens are left.

    merge_order({b"aaab": 2, b"ab": 1}, 2) -> [(b"a", b"a"), (b"a", b"b")]

words: each distinct word of a text (bytes) -> how often it occurs. merge_order returns the first k
merges in the order learned, each as the two tokens (bytes) that it joins:
1. a pair of neighbours is counted at each place where it stands ("aaa" has (a, a) twice), times
   the word's count; never across two words;
2. the most frequent pair is merged; of several, the largest pair of bytes: (b"b", b"a") goes before
   (b"ab", b"c"). So ids play no part, unlike in the lesson. Stanford's CS336 has this rule;
3. it is replaced in all words, from the left, without overlap: aaa -> aa, a. Tokens of the same
   bytes are one token, however they came about;
4. it ends early when no pair is left that occurs twice.

    recover_merges([b"he", b"th", b"the"]) -> [(b"h", b"e"), (b"t", b"h"), (b"t", b"he")]

OpenAI publishes its tokenizers without the merges: as the tokens that were learned, in that order
(the 256 bytes left out). recover_merges finds out which two tokens each was made of. They are the
two that are left of its bytes when only the merges before it are applied, the earliest first. In
the example "the" is (t, he) and not (th, e), since (h, e) was learned before (t, h).
"""


def merge_order(words: dict[bytes, int], k: int) -> list[tuple[bytes, bytes]]:
    raise NotImplementedError("write merge_order, then: python course/check.py 6")


def recover_merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    raise NotImplementedError("write recover_merges, then: python course/check.py 6")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away.

    It follows your merges one by one, and counts pairs in the words as they then are."""
    import random

    rng = random.Random(2)
    cases = [({b"aaab": 2, b"ab": 1}, 2), ({b"aaaaa": 3}, 5), ({b"ab": 1, b"cd": 1}, 3), ({}, 4)]
    cases += [({b"ca": 5, b"ab": 5, b"b": 9}, 2), ({b"xyxyx": 4, b"yx": 2}, 6)]
    cases += [({b"abc": 3, b"bab": 3}, 9), ({b"zz": 1, b"zy": 1, b"yz": 1}, 0), ({b"a": 7}, 3)]
    cases += [({b"ab": 2}, 5), ({b"abc": 1, b"cab": 1, b"c": 8}, 4), ({b"": 3, b"qq": 2}, 2)]
    cases += [({"coração".encode(): 4, "não".encode(): 3, b"\xff\xfe\xff\xfe": 2}, 9)]
    for letters in (b"ab", b"abcd", b"etaoin shrdlu", b"\x00a\x7f\x80\xc3\xff", bytes(range(256))):
        text = [bytes(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(40)]
        cases.append(({word: rng.randint(1, 6) for word in text}, 25))
    for words, k in cases:
        given = dict(words)
        merges = answer.merge_order(given, k)
        assert given == words, f"merge_order changes the words it was given, {words}"
        assert isinstance(merges, list), f"merge_order returns {merges!r}, no list"
        _follow(merges, words, k)
        if len({*(a + b for a, b in merges)}) == len(merges):  # a token is learned once
            _recover(answer, merges)
    merges = [(b"h", b"e"), (b"t", b"h"), (b"t", b"he"), (b" ", b"the"), (b" ", b"t")]
    _recover(answer, merges)
    _recover(answer, [(b"\xc3", b"\xa3"), (b"a", b"\xc3\xa3"), (b"a", b"a"), (b"aa", b"a")])


def _follow(merges: list, words: dict[bytes, int], k: int) -> None:
    texts = [([bytes([byte]) for byte in word], n) for word, n in words.items()]
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
        pair, most = merges[i], max(counts.values())
        best = max(p for p in counts if counts[p] == most)
        assert pair == best, (
            f"merge {i + 1} is {pair!r}, which occurs {counts.get(pair, 0)} times; "
            f"{best} occurs {most} times, in {texts}"
        )
        for tokens, _ in texts:
            at = 0
            while at < len(tokens) - 1:
                if (tokens[at], tokens[at + 1]) == pair:
                    tokens[at : at + 2] = [pair[0] + pair[1]]
                at += 1


def _recover(answer, merges: list[tuple[bytes, bytes]]) -> None:
    tokens = [a + b for a, b in merges]
    given = list(tokens)
    found = answer.recover_merges(given)
    assert given == tokens, f"recover_merges changes the tokens it was given, {tokens}"
    assert found == merges, (
        f"of {tokens} recover_merges returns {found!r}, they were learned as {merges}"
    )
