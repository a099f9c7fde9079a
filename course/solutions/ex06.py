"""Exercise 6: the reference, and answers that the oracle must refuse."""

from collections import Counter


def replace(tokens, pair):
    out = []
    for token in tokens:
        if out and (out[-1], token) == pair:
            out[-1] += token  # longer than either half, so it is not merged again
        else:
            out.append(token)
    return out


def replace_overlapping(tokens, pair):
    """a, a, a -> aa, aa: a letter is used twice."""
    out, used = [], False
    for token, after in zip(tokens, [*tokens[1:], None]):
        if (token, after) == pair:
            out.append(token + after)
            used = True
        else:
            out += [] if used else [token]
            used = False
    return out


def pairs_of(words):
    counts = Counter()
    for tokens, n in words:
        for pair in zip(tokens, tokens[1:]):
            counts[pair] += n
    return counts


def largest(counts):
    return max(counts, key=lambda pair: (counts[pair], pair))


def letters(word):
    return [bytes([byte]) for byte in word]


def learn(words, k, count, choose, replace, least, letters):
    words, merges = [(letters(word), n) for word, n in words.items()], []
    while len(merges) < k:
        counts = count(words)
        if not counts or counts[choose(counts)] < least:
            break
        merges.append(choose(counts))
        words = [(replace(tokens, merges[-1]), n) for tokens, n in words]
    return merges


def merge_order(words, k):
    return learn(words, k, pairs_of, largest, replace, 2, letters)


def recover_merges(tokens):
    merges = []
    for token in tokens:
        parts = letters(token)
        for pair in merges:
            parts = replace(parts, pair)
        merges.append(tuple(parts))
    return merges


def pairs_across_words(words):
    text = [token for tokens, n in words for _ in range(n) for token in tokens]
    return Counter(zip(text, text[1:]))


def pairs_of_distinct_words(words):
    return pairs_of([(tokens, 1) for tokens, _ in words])


def smallest(counts):
    return min(counts, key=lambda pair: (-counts[pair], pair))


def by_ids(words, k):
    """The lesson's rule: of equals the smallest pair of ids."""
    ids = {bytes([byte]): byte for byte in range(256)}

    def choose(counts):
        return min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))

    def replace_and_number(tokens, pair):
        ids.setdefault(pair[0] + pair[1], len(ids))
        return replace(tokens, pair)

    return learn(words, k, pairs_of, choose, replace_and_number, 2, letters)


def characters(word):
    """A byte becomes the character of that number, and a character above 127 is two bytes."""
    return [chr(byte).encode() for byte in word]


def text(word):
    """What is no UTF-8 is lost, and é is one letter."""
    return [letter.encode() for letter in word.decode(errors="replace")]


def wrong(**parts):
    names = ("count", "choose", "replace", "least", "letters")
    parts = {**dict(zip(names, (pairs_of, largest, replace, 2, letters))), **parts}
    return dict(merge_order=lambda words, k: learn(words, k, *(parts[name] for name in names)))


def first_split(tokens):
    """The first cut of which both halves are tokens."""
    known = {bytes([byte]) for byte in range(256)} | {*tokens}
    cuts = [[(t[:i], t[i:]) for i in range(1, len(t)) if {t[:i], t[i:]} <= known] for t in tokens]
    return [cut[0] for cut in cuts]


def earliest_halves(tokens):
    """As first_split, but it prefers the halves that were learned first. Close."""
    rank = {bytes([byte]): byte for byte in range(256)}
    merges = []
    for i, t in enumerate(tokens):
        cuts = [(t[:j], t[j:]) for j in range(1, len(t)) if {t[:j], t[j:]} <= rank.keys()]
        merges.append(min(cuts, key=lambda cut: max(rank[cut[0]], rank[cut[1]])))
        rank[t] = 256 + i
    return merges


def longest_beginning(tokens):
    """Greedy from the left: the longest token that fits, then the rest."""
    merges = []
    for i, t in enumerate(tokens):
        known = [x for x in tokens[:i] if t.startswith(x)] + [t[:1]]
        first = max(known, key=len)
        merges.append((first, t[len(first) :]))
    return merges


WRONG = {  # name -> what of the reference it replaces
    "counts pairs across words": wrong(count=pairs_across_words),
    "of equals, the smallest bytes": wrong(choose=smallest),
    "of equals, the smallest ids": dict(merge_order=by_ids),
    "of equals, the first met": wrong(choose=lambda counts: max(counts, key=counts.get)),
    "merges that overlap": wrong(replace=replace_overlapping),
    "forgets how often a word occurs": wrong(count=pairs_of_distinct_words),
    "merges what occurs once": wrong(least=1),
    "takes bytes for characters": wrong(letters=characters),
    "decodes bytes to characters": wrong(letters=text),
    "recovers the first cut": dict(recover_merges=first_split),
    "recovers the halves learned first": dict(recover_merges=earliest_halves),
    "recovers the longest beginning": dict(recover_merges=longest_beginning),
}
