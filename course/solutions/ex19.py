"""Exercise 19: the reference, and answers that the oracle must refuse."""

import random
import re
import unicodedata
import zlib
from collections import defaultdict
from itertools import combinations
from pathlib import Path

from edits import edits

PRIME = 2**61 - 1


def shingles(text, n):
    text = unicodedata.normalize("NFD", text)
    plain = "".join(c for c in text if unicodedata.category(c) != "Mn")
    words = re.findall(r"\w+", plain.lower())
    return {" ".join(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}


def signature(items, num_hashes):
    draw = random.Random(0)
    values = [zlib.crc32(item.encode()) for item in items]
    found = []
    for _ in range(num_hashes):
        a = draw.randrange(1, PRIME)
        b = draw.randrange(PRIME)
        found.append(min((a * x + b) % PRIME for x in values))
    return tuple(found)


def candidates(signatures, size, num_bands):
    """Pairs that agree in one of the bands of `size` numbers."""
    pairs = set()
    for start in range(0, size * num_bands, size):
        shelf = defaultdict(list)
        for i, numbers in enumerate(signatures):
            shelf[numbers[start : start + size]].append(i)
        for same in shelf.values():
            pairs.update(combinations(same, 2))
    return sorted(pairs)


def minhash_deduplication(
    input_files, num_hashes, num_bands, ngrams, jaccard_threshold, output_directory
):
    files = [Path(file) for file in input_files]
    data = [file.read_bytes() for file in files]
    texts = [raw.decode() for raw in data]
    sets = [shingles(text, ngrams) for text in texts]
    signatures = [signature(items, num_hashes) for items in sets]
    group = [{i} for i in range(len(files))]  # of each file: it and its copies' copies
    for i, j in candidates(signatures, num_hashes // num_bands, num_bands):
        if len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= jaccard_threshold:
            group[i] |= group[j]
            for k in group[i]:
                group[k] = group[i]
    Path(output_directory).mkdir(parents=True, exist_ok=True)
    for members in group:
        best = min(members, key=lambda i: (-len(texts[i]), texts[i], files[i].name))
        (Path(output_directory) / files[best].name).write_bytes(data[best])


edit = edits(__file__)
WRONG = {  # name -> what of the reference it replaces
    "folds letters": edit('"NFD", text', '"NFKD", text.casefold()'),
    "the first of a group stays": edit("(-len(texts[i]), texts[i], files[i].name)", "i"),
    "a chain is cut, in some orders": edit(
        "group[i] |= group[j]", "group[i].add(j)", "for k in group[i]:", "for k in (j,):"
    ),
    "a part counts as a copy": edit("len(sets[i] | sets[j])", "min(len(sets[i]), len(sets[j]))"),
    "believes the estimate": edit(
        "len(sets[i] & sets[j]) / len(sets[i] | sets[j])",
        "sum(a == b for a, b in zip(signatures[i], signatures[j])) / num_hashes",
    ),
    "compares all pairs": edit("sorted(pairs)", "combinations(range(len(signatures)), 2)"),
    "writes text with other newlines": edit(
        "write_bytes(data[best])", "write_bytes(data[best].replace(b'\\r\\n', b'\\n'))"
    ),
}
