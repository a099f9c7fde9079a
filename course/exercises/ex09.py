"""Exercise 9: learn the merges of a BPE, and use them.

    merge_order({b"aaab": 2, b"ab": 1}, 2) -> [(b"a", b"a"), (b"a", b"b")]

words: each distinct word of a text (bytes) -> how often it occurs, which can be beyond 2^53.
merge_order returns the first k merges in the order learned, each as the two tokens (bytes) that it
joins:
1. Count a pair of neighbors at each place where it occurs ("aaa" has (a, a) twice), times the
   word's count; never across two words.
2. Merge the most frequent pair. If several are equally frequent, take the largest of them, as
   Python compares tuples of bytes: (b"b", b"a") goes before (b"ab", b"c"), because b"b" > b"ab".
   This is the lesson's `largest`, and the rule of Stanford's CS336; the lesson's library takes the
   *smallest* pair of *ids* instead. Here there are no ids.
3. Replace it in all words, from the left, without overlap: aaa -> aa, a. Tokens of the same bytes
   are one token, however they came about.
4. Stop early when no pair is left that occurs at least twice.
4,000 words and 256 merges may take 10 seconds; counting everything anew for each merge takes 4.

    encode(b"the", {(b"h", b"e"): 0, (b"t", b"h"): 1, (b"t", b"he"): 2}) -> [b"the"]

merges: each pair -> its number in the order learned. encode cuts a word into its bytes, and then
merges as training did: of the pairs that occur in the word, take the one that was learned first,
and merge it everywhere in the word, from the left, without overlap. Repeat until no pair in the
word has a merge. (In the example "h" and "e" go first, though "t" and "h" come before them in the
word.) The tokens, joined, are the word. The numbers may have gaps, start anywhere, and be in the
millions.
"""


def merge_order(words: dict[bytes, int], k: int) -> list[tuple[bytes, bytes]]:
    raise NotImplementedError("write merge_order, then: python course/check.py 9")


def encode(word: bytes, merges: dict[tuple[bytes, bytes], int]) -> list[bytes]:
    raise NotImplementedError("write encode too, then: python course/check.py 9")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random
    import time
    from collections import Counter

    from subject import equal

    def join(tokens, pair):
        at = 0
        while at < len(tokens) - 1:
            if (tokens[at], tokens[at + 1]) == pair:
                tokens[at : at + 2] = [b"".join(pair)]
            at += 1

    def learns(rule, words, k):
        """Follow the merges one by one: count pairs in the words as they then are."""
        began = time.process_time()
        merges = answer.merge_order(words, k)
        took = time.process_time() - began
        texts = [([bytes([byte]) for byte in word], n) for word, n in words.items()]
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
            merge = f"{rule}: merge {i + 1}, of a pair that occurs {most:,} times,"
            equal(merges[i : i + 1], [best], merge)
            for tokens, _ in texts:
                join(tokens, best)
        equal(merges[k:], [], f"{rule}: what comes after {k} merges")
        assert took < 0.6, f"{len(words)} words and {k} merges took {took:.2f} s; 0.6 is enough"

    for line in (  # rule, k, the words
        "1 2 aaab aaab ab",  # the text's example
        "1 1 ab ab x x x x x",
        "1 1 \u00e3\u00e3 \u00e3\u00e3",
        "2 1 ab ab cd cd",
        "2 2 xy xy xy xya xya xz xz",  # (xy, a) is larger than (x, z)
        "3 2 aaa aaa",
        "3 9 xyxyx xyxyx yx yx",
        "4 4 abc cab c c",
        "4 5",
        "4 0 zz zz",
    ):
        rule, k, *words = line.encode().split()
        learns(f"rule {int(rule)}", dict(Counter(words)), int(k))
    learns("counts beyond 2^53", {b"ab": 2**60 + 1, b"bc": 2**60}, 2)
    rng = random.Random(2)
    words = {bytes(rng.choices(b"abc", k=9)): rng.randint(1, 50) for _ in range(300)}
    learns("rule 3, longer tokens", words, 40)

    the = {(b"h", b"e"): 0, (b"t", b"h"): 1, (b"t", b"he"): 2}
    # any numbers; the last merge makes room for the second
    room = {(b"b", b"c"): -2, (b"abc", b"x"): 70_000, (b"a", b"bc"): 5_000_000}
    for word, merges, tokens in (
        (b"the", the, [b"the"]),  # the text's example
        (b"the", {(b"t", b"h"): 1, (b"h", b"e"): 0}, [b"t", b"he"]),
        (b"abcx", room, [b"abcx"]),
        (b"aaaaa\xc3", {(b"a", b"a"): 7}, [b"aa", b"aa", b"a", b"\xc3"]),
        (b"", the, []),
        (70_000 * b"q", the, 70_000 * [b"q"]),
    ):
        equal(answer.encode(word, merges), tokens, "the list of tokens")
