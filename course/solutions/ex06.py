"""Exercise 6: the reference, and answers that the oracle must refuse."""

from collections import Counter


def replace(ids, pair, new):
    out = []
    for i in ids:
        if out and (out[-1], i) == pair:
            out[-1] = new
        else:
            out.append(i)
    return out


def replace_overlapping(ids, pair, new):
    """[97, 97, 97] -> two new ids: a letter is used twice."""
    out, used = [], False
    for i, after in zip(ids, [*ids[1:], None]):
        if (i, after) == pair:
            out.append(new)
            used = True
        else:
            out += [] if used else [i]
            used = False
    return out


def pairs_of(words):
    counts = Counter()
    for ids, n in words:
        for pair in zip(ids, ids[1:]):
            counts[pair] += n
    return counts


def smallest(counts):
    return min(counts, key=lambda pair: (-counts[pair], pair))


def learn(words, k, count=pairs_of, choose=smallest, replace=replace, least=2):
    words, merges = [(list(word), n) for word, n in words.items()], []
    while len(merges) < k:
        counts = count(words)
        if not counts or counts[choose(counts)] < least:
            break
        pair = choose(counts)
        words = [(replace(ids, pair, 256 + len(merges)), n) for ids, n in words]
        merges.append(pair)
    return merges


def merge_order(words, k):
    return learn(words, k)


def pairs_across_words(words):
    text = [i for ids, n in words for _ in range(n) for i in ids]
    return Counter(zip(text, text[1:]))


def pairs_of_distinct_words(words):
    return pairs_of([(ids, 1) for ids, _ in words])


def largest(counts):
    return max(counts, key=lambda pair: (counts[pair], pair))


def wrong(**parts):
    return dict(merge_order=lambda words, k: learn(words, k, **parts))


WRONG = {  # name -> what of the reference it replaces
    "counts pairs across words": wrong(count=pairs_across_words),
    "of equals, the largest ids": wrong(choose=largest),
    "of equals, the first met": wrong(choose=lambda counts: max(counts, key=counts.get)),
    "merges that overlap": wrong(replace=replace_overlapping),
    "forgets how often a word occurs": wrong(count=pairs_of_distinct_words),
    "merges what occurs once": wrong(least=1),
}
