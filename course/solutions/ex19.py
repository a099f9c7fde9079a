"""Exercise 19: the reference, and answers that the oracle must refuse."""

import random
import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

PRIME = 2**61 - 1


def exact_line_deduplication(input_files, output_directory, at_most=1):
    files = {Path(file): Path(file).read_bytes().splitlines(keepends=True) for file in input_files}
    times = Counter(line.rstrip(b"\r\n") for lines in files.values() for line in lines)
    Path(output_directory).mkdir(parents=True, exist_ok=True)
    for file, lines in files.items():
        left = [line for line in lines if times[line.rstrip(b"\r\n")] <= at_most]
        (Path(output_directory) / file.name).write_bytes(b"".join(left))


def normalized(text):
    letters = [c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn"]
    return re.findall(r"\w+", "".join(letters).lower())


def shingles(text, n):
    words = normalized(text)
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


def candidates(signatures, num_bands):
    size = len(signatures[0]) // num_bands
    pairs = set()
    for start in range(0, size * num_bands, size):
        shelf = defaultdict(list)
        for i, numbers in enumerate(signatures):
            shelf[numbers[start : start + size]].append(i)
        for same in shelf.values():
            pairs.update(combinations(same, 2))
    return pairs


def jaccard(a, b):
    return len(a & b) / len(a | b)


def groups(n, pairs):
    """Indices 0 .. n - 1, joined by pairs -> the groups."""
    group = {i: [i] for i in range(n)}
    for i, j in pairs:
        if group[i] is not group[j]:
            group[i] += group[j]
            for k in group[j]:
                group[k] = group[i]
    return [group[i] for i in range(n) if group[i][0] == i]


def best(texts, names, group):
    return min(group, key=lambda i: (-len(texts[i]), texts[i], names[i]))


def minhash_deduplication(
    input_files,
    num_hashes,
    num_bands,
    ngrams,
    jaccard_threshold,
    output_directory,
    shingles=shingles,
    candidates=candidates,
    jaccard=jaccard,
    groups=groups,
    best=best,
    written=lambda data: data,
):
    files = [Path(file) for file in input_files]
    texts = [file.read_bytes().decode() for file in files]
    sets = [shingles(text, ngrams) for text in texts]
    signatures = [signature(items, num_hashes) for items in sets]
    near = [
        (i, j)
        for i, j in sorted(candidates(signatures, num_bands))
        if jaccard(sets[i], sets[j]) >= jaccard_threshold
    ]
    Path(output_directory).mkdir(parents=True, exist_ok=True)
    names = [file.name for file in files]
    for group in groups(len(files), near):
        file = files[best(texts, names, group)]
        (Path(output_directory) / file.name).write_bytes(written(file.read_bytes()))


def other(**parts):
    """The reference with another part."""

    def changed(*args):
        minhash_deduplication(*args, **parts)

    return changed


def in_text_mode(input_files, output_directory):
    """The file's newlines become \\n, and a form feed ends a line."""
    texts = {Path(file): Path(file).read_text("utf-8") for file in input_files}
    times = Counter(line for text in texts.values() for line in text.splitlines())
    Path(output_directory).mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        left = [line for line in text.splitlines(True) if times[line.rstrip("\n")] == 1]
        (Path(output_directory) / file.name).write_text("".join(left), "utf-8")


def folded(text, n):
    """Sharp s is ss, a ligature its letters."""
    return shingles(unicodedata.normalize("NFKD", text).casefold(), n)


def without_the_kept(n, pairs):
    """Later texts are compared with those that were kept alone: a chain breaks."""
    kept = []
    for j in range(n):
        owner = next((group for group in kept if (group[0], j) in pairs), None)
        owner.append(j) if owner else kept.append([j])
    return kept


WRONG = {  # name -> what of the reference it replaces
    "reads and writes text": dict(exact_line_deduplication=in_text_mode),
    "folds letters": dict(minhash_deduplication=other(shingles=folded)),
    "the first of a group stays": dict(
        minhash_deduplication=other(best=lambda texts, names, group: min(group))
    ),
    "copies of copies stay": dict(minhash_deduplication=other(groups=without_the_kept)),
    "a part counts as a copy": dict(
        minhash_deduplication=other(jaccard=lambda a, b: len(a & b) / min(len(a), len(b)))
    ),
    "writes text with other newlines": dict(
        minhash_deduplication=other(written=lambda data: data.replace(b"\r\n", b"\n"))
    ),
}

OTHER = "other random numbers, as good as these"
EQUIVALENT = {
    "draw = random.Random(0): `0` -> `1`": OTHER,
    "a = draw.randrange(1, PRIME): `1` -> `2`": OTHER,
    "found.append(min((a * x + b) % PRIME for x in values)): `a * x + b` -> `a * x - b`": OTHER,
    "for start in range(0, size * num_bands, size):: `0` -> `1`": (
        "other numbers of the signature; the last band is one shorter"
    ),
}
