"""Exercise 6: learn a BPE.

    merge_order({b"aaab": 2, b"ab": 1}, 2) -> [(97, 97), (97, 98)]

words: each distinct word of a text (bytes) -> how often it occurs. Bytes have their values as ids,
0 to 255; the first merge makes id 256, the next 257, ... merge_order returns the first k merges, as
pairs of ids, in the order learned:
1. a pair of neighbours is counted at each place where it stands ("aaa" has (97, 97) twice), times
   the word's count; never across two words;
2. the most frequent pair is merged; of several, the smallest pair of ids;
3. it is replaced in all words, from the left, without overlap: "aaa" -> [256, 97];
4. it ends early when no pair is left that occurs twice.
"""


def merge_order(words: dict[bytes, int], k: int) -> list[tuple[int, int]]:
    raise NotImplementedError("write merge_order, then: python course/check.py 6")


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away.

    It follows your merges one by one, and counts pairs in the words as they then are."""
    import random

    rng = random.Random(2)
    cases = [({b"aaab": 2, b"ab": 1}, 2), ({b"aaaaa": 3}, 5), ({b"ab": 1, b"cd": 1}, 3), ({}, 4)]
    cases += [({b"ca": 5, b"ab": 5, b"b": 9}, 2), ({b"xyxyx": 4, b"yx": 2}, 6)]
    for letters in (b"ab", b"abcd", b"etaoin shrdlu"):
        text = [
            "".join(chr(rng.choice(letters)) for _ in range(rng.randint(1, 9))) for _ in range(40)
        ]
        cases.append(({word.encode(): rng.randint(1, 6) for word in text}, 25))
    for words, k in cases:
        merges = answer.merge_order(dict(words), k)
        texts = [(list(word), n) for word, n in words.items()]
        for i in range(k):
            counts: dict[tuple[int, int], int] = {}
            for ids, n in texts:
                for pair in zip(ids, ids[1:]):
                    counts[pair] = counts.get(pair, 0) + n
            counts = {pair: n for pair, n in counts.items() if n >= 2}
            if not counts:
                assert len(merges) == i, f"no pair occurs twice after {i} merges, but {merges[i:]}"
                break
            assert len(merges) > i, f"{len(merges)} merges, of {k}: {counts} are left in {words}"
            pair, most = tuple(merges[i]), max(counts.values())
            best = min(p for p in counts if counts[p] == most)
            assert pair == best, (
                f"merge {i + 1} is {pair}, which occurs {counts.get(pair, 0)} times; "
                f"{best} occurs {most} times, in {texts}"
            )
            for ids, _ in texts:
                at = 0
                while at < len(ids) - 1:
                    if (ids[at], ids[at + 1]) == pair:
                        ids[at : at + 2] = [256 + i]
                    at += 1
        assert len(merges) <= k, f"{len(merges)} merges, {k} were asked for"
