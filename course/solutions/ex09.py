"""Exercise 9: the reference, and answers that the oracle must refuse."""

from collections import Counter

from edits import edits


def joined(tokens, pair):
    out = []
    for token in tokens:
        if out and (out[-1], token) == pair:
            out[-1] += token  # longer than either half, so it is not merged again
        else:
            out.append(token)
    return out


def letters(word):
    return [bytes([byte]) for byte in word]


def merge_order(words, k):
    split = [(letters(word), n) for word, n in words.items()]
    merges = []
    while len(merges) < k:
        counts = Counter()
        for tokens, n in split:
            for pair in zip(tokens, tokens[1:]):
                counts[pair] += n
        best = max(counts, key=lambda pair: (counts[pair], pair), default=None)
        if counts[best] < 2:
            break
        merges.append(best)
        split = [(joined(tokens, best), n) for tokens, n in split]
    return merges


def encode(word, merges):
    tokens = letters(word)
    while pairs := [pair for pair in zip(tokens, tokens[1:]) if pair in merges]:
        tokens = joined(tokens, min(pairs, key=merges.get))
    return tokens


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "counts pairs across words": edit(
        "        for tokens, n in split:\n            for pair in zip(tokens, tokens[1:]):",
        "        text = [t for tokens, n in split for _ in range(min(n, 99)) for t in tokens]\n"
        "        for n in (1,):\n            for pair in zip(text, text[1:]):",
    ),
    "of equals, the smallest bytes": edit(
        "max(counts, key=lambda pair: (counts[pair], pair)",
        "min(counts, key=lambda pair: (-counts[pair], pair)",
    ),
    "of equals, by the joined bytes": edit(
        "(counts[pair], pair)", "(counts[pair], b''.join(pair))"
    ),
    "merges that overlap": edit(
        "            out[-1] += token  # longer than either half, so it is not merged again",
        "            out[-1] += token\n            out.append(token) if pair[0] == pair[1] else 0",
    ),
    "forgets how often a word occurs": edit("counts[pair] += n", "counts[pair] += 1"),
    "takes bytes for characters": edit("bytes([byte]) for byte", "chr(byte).encode() for byte"),
    "slow: once more for each word": edit(
        "        counts = Counter()\n",
        "        counts = Counter()\n        [joined(t, t) for t, _ in split * 200]\n",
    ),
    "encode: the first pair from the left": edit("min(pairs, key=merges.get)", "pairs[0]"),
    "encode: the longest token": edit(
        "min(pairs, key=merges.get)", "max(pairs, key=lambda p: len(b''.join(p)))"
    ),
    "encode: the number of a pair is its place": edit(
        "min(pairs, key=merges.get)", "min(pairs, key=[*merges].index)"
    ),
}
