"""Exercise 19: copies in files, removed whatever the order in which they come.

    exact_line_deduplication(input_files, output_directory)

Writes each file under its own name, with the lines that occur exactly once in all files together.
A line that occurs twice is a menu or a footer, and goes everywhere. Lines are compared without the
newline at their end (\\n or \\r\\n, nothing else); a line that stays keeps its own.

    minhash_deduplication(
        input_files, num_hashes, num_bands, ngrams, jaccard_threshold, output_directory
    )

Writes one file of each group of copies, to the byte as it was, under its own name. Two files are
copies if the Jaccard similarity of their shingles is jaccard_threshold or more; so are a copy and
its copies' copies, though they may be less similar. Of a group the longest text stays (in
characters); of equally long ones the smallest text, as Python compares strings; of equal texts that
of the smallest name. The order of input_files changes nothing.

A shingle is a run of `ngrams` words of the normalized text; a text with fewer words has one, all of
it. To normalize: Unicode NFD, accents (category Mn) dropped, lower case, and words are runs of
letters, digits and underscores. Only texts that agree in a whole band of their MinHash signatures
are compared: num_hashes numbers, in num_bands bands of equal size. (So with one band of 256, even
very similar texts are never compared; with bands of one, nearly all are.)

Both make output_directory if it is not there. The shape is that of Stanford's CS336 (assignment 4),
so its tests run on yours. For example, with bands of one, 2 words a shingle and threshold 0.5:

    a.txt "the cat sat on a mat"     b.txt "The cat sat on a mat!"   c.txt "a dog"  ->  b.txt, c.txt
"""

import os


def exact_line_deduplication(input_files: list[os.PathLike], output_directory: os.PathLike) -> None:
    raise NotImplementedError("write both functions, then: python course/check.py 19")


def minhash_deduplication(
    input_files: list[os.PathLike],
    num_hashes: int,
    num_bands: int,
    ngrams: int,
    jaccard_threshold: float,
    output_directory: os.PathLike,
) -> None:
    raise NotImplementedError("write minhash_deduplication too, then: python course/check.py 19")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random
    import tempfile
    from pathlib import Path

    draw = random.Random(35)

    def run(function, texts: dict[str, bytes], *options) -> dict[str, bytes]:
        """What a function writes for these files."""
        with tempfile.TemporaryDirectory() as name:
            given = Path(name, "in")
            written = Path(name, "made", "out")
            given.mkdir()
            there = draw.random() < 0.5
            if there:  # it may be there already, or not
                written.mkdir(parents=True)
                (written / "other").write_text("stays")
            for file, text in texts.items():
                (given / file).write_bytes(text)
            function([given / file for file in texts], *options, written)
            for file, text in texts.items():
                assert (given / file).read_bytes() == text, f"the input {file} has been changed"
            assert written.is_dir(), f"{function.__name__} made no output_directory"
            found = {path.name: path.read_bytes() for path in written.iterdir()}
            other = found.pop("other", b"stays")
            assert other == b"stays" and there in (False, (written / "other").exists()), (
                f"{function.__name__} has touched another file in output_directory"
            )
            return found

    # ------------------------------------------------------------------------------ lines
    menu = {
        "a.txt": "Home | About\nOne.\n\nTwo.\nOne. \n",
        "b.txt": "Three.\nHome | About\nTwice.\nTwice.\n\nlast",
        "c.txt": "Home | About\n\n",
        "d.txt": "\ufeffLast\nlast\n\u00e9t\u00e9\none.\n",
        "e.txt": "",
        "f.txt": "Home | About\r\nFour.\r\nFive\x0c.\nSix\u2028.\x85\n.\n",
    }
    for order in (sorted(menu), sorted(menu, reverse=True)):
        found = run(answer.exact_line_deduplication, {file: menu[file].encode() for file in order})
        expected = {
            "a.txt": "One.\nTwo.\nOne. \n",
            "b.txt": "Three.\n",
            "c.txt": "",
            "d.txt": "\ufeffLast\n\u00e9t\u00e9\none.\n",
            "e.txt": "",
            "f.txt": "Four.\r\nFive\x0c.\nSix\u2028.\x85\n.\n",
        }
        assert found.keys() == expected.keys(), (
            f"lines: {sorted(found)} were written, not {sorted(expected)}"
        )
        for file, text in expected.items():
            said = found[file].decode()
            assert said == text, f"lines of {menu[file]!r}: {said!r} is left, not {text!r}"

    # ------------------------------------------------------------------------------ copies
    def words(n: int) -> list[str]:
        return ["".join(draw.choices("bcdfghklmnprst", k=5)) for _ in range(n)]

    def similarity(a: list[str], b: list[str], n: int) -> float:
        x, y = ({tuple(t[i : i + n]) for i in range(len(t) - n + 1)} for t in (a, b))
        return len(x & y) / len(x | y)

    def judge(case: str, texts: dict[str, str | bytes], expected: str, *options) -> None:
        """expected: the names that stay; in three orders."""
        data = {f: t if isinstance(t, bytes) else t.encode() for f, t in texts.items()}
        for order in (sorted(data), sorted(data, reverse=True), draw.sample(list(data), len(data))):
            found = run(
                answer.minhash_deduplication, {file: data[file] for file in order}, *options
            )
            said = f"{case}, files in the order {' '.join(order)}: "
            assert sorted(found) == expected.split(), (
                f"{said}{' '.join(sorted(found)) or 'nothing'} is left, not {expected}"
            )
            for file, text in found.items():
                assert text == data[file], f"{said}{file} is {text[:40]!r}, was {data[file][:40]!r}"

    sure = 100, 25, 3, 0.65  # bands of 4: similarity 0.75 meets but once in 10^4; and threshold
    text = words(80)
    changed = text[:39] + words(1) + text[40:]  # 3 of 78 shingles
    assert 0.9 < similarity(text, changed, 3) < 0.95
    base = {"a": " ".join(text), "b": " ".join(changed) + "..", "c": " ".join(words(80))}
    judge("b is a with a word changed, and longer by two dots", base, "b c", *sure)
    more = base | {"d": " ".join(text) + "..", "e": base["a"]}
    left = " ".join(sorted(["c", min("bd", key=lambda name: more[name])]))
    judge("b and d are equally long copies", more, left, *sure)
    judge("three equal texts", {"z": "x y z w", "m": "x y z w", "n": "x y z w"}, "m", *sure)

    # a chain: each is a copy of the one before; the ends are not copies of each other
    chain = [words(90)]
    names = "pqrst"
    for i in range(4):
        chain.append(chain[-1][: 20 * i] + words(7) + chain[-1][20 * i + 7 :])
    near = [similarity(a, b, 3) for a, b in zip(chain, chain[1:])]
    assert min(near) > 0.79 and similarity(chain[0], chain[-1], 3) < 0.45, near
    for longest in names:
        texts = {name: " ".join(text) for name, text in zip(names, chain)}
        texts[longest] += " !!"
        texts |= {"u": " ".join(words(50)), "v": " ".join(chain[2][:45])}  # v: a half of r
        case = f"a chain of copies p-q-r-s-t, of which {longest} is the longest; v is a half of r"
        judge(case, texts, f"{longest} u v", 160, 40, 3, 0.7)
    texts = {name: " ".join(text) for name, text in zip("pr", (chain[0], chain[3]))}
    judge("the ends of that chain without its middle", texts, "p r", 160, 40, 3, 0.7)

    # all of these meet in a band, and none is similar enough
    texts = {}
    for i in range(8):
        text = words(60)
        far = text[:44] + words(16)
        assert 0.55 < similarity(text, far, 3) < 0.65
        texts |= {f"{i}a": " ".join(text), f"{i}b": " ".join(far)}
    everything = " ".join(sorted(texts))
    judge("eight pairs of similarity 0.58, threshold 0.7", texts, everything, 24, 24, 3, 0.7)
    smaller = [min(f"{i}a", f"{i}b", key=lambda name: texts[name]) for i in range(8)]
    judge("the same, threshold 0.5", texts, " ".join(smaller), 24, 24, 3, 0.5)
    # the other way round: similar, but they meet in no band of 256
    texts = {"a": " ".join(chain[0]), "b": " ".join(chain[1]), "c": " ".join(chain[0]).upper()}
    judge("similarity 0.8, in one band of 256", texts, "b c", 256, 1, 3, 0.5)
    judge("similarity 0.8, in two bands of 128", texts, "b c", 256, 2, 3, 0.5)
    judge("a single file", {"x": "one two three four"}, "x", *sure)

    # ------------------------------------------------------------------------------ words
    accents = "Le caf\u00e9, \u00e0 la fin: \u00e9t\u00e9 na\u00efve!"
    plain = b"le CAFE\r\na la  fin; ete\tnaive ....\r\n"
    judge("accents, case and punctuation", {"x": accents, "y": plain}, "y", *sure)
    judge(
        "a letter and its accent apart", {"x": "e\u0301te\u0301", "y": "\u00e9t\u00e9"}, "x", *sure
    )
    judge("longer in bytes, shorter in letters", {"x": "\u00e9t\u00e9", "y": "ete!"}, "y", *sure)
    judge("words that join alike", {"x": "ab c", "y": "a bc"}, "x y", 64, 64, 2, 0.5)
    judge("sharp s is no ss", {"x": "die Stra\u00dfe", "y": "die Strasse"}, "x y", *sure)
    judge("a ligature is a letter", {"x": "\ufb01n de la", "y": "fin de la"}, "x y", *sure)
    judge(
        "shorter than a shingle",
        {"x": "yes", "y": "Yes!", "z": "no", "w": "no yes"},
        "w y z",
        *sure,
    )
    judge("short texts of other words", {"x": "yes", "y": "no"}, "x y", 64, 64, 3, 0.3)
    judge("another order", {"x": "a b c d e f", "y": "f e d c b a"}, "x y", 64, 64, 2, 0.5)
    judge(
        "another order, word by word", {"x": "a b c d e f", "y": "f e d c b a"}, "x", 64, 64, 1, 0.5
    )
    judge("a word six times", {"x": "a b", "y": "a b b b b b"}, "y", 64, 64, 1, 1.0)
    judge("exactly at the threshold", {"x": "a b c", "y": "a b c d"}, "y", 64, 64, 1, 0.75)
    judge("a bit below it", {"x": "a b c", "y": "a b c d"}, "x y", 64, 64, 1, 0.76)
    judge("an underscore is part of a word", {"x": "a_b c", "y": "a b c"}, "x y", 64, 64, 1, 0.5)
