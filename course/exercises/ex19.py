"""Exercise 19: near copies among files, removed whatever the order in which they come.

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

It makes output_directory if that is not there. The shape is that of Stanford's CS336 (assignment
4), so its tests of this function run on yours. For example, with bands of one, 2 words a shingle
and threshold 0.5:

    a.txt "the cat sat on a mat"     b.txt "The cat sat on a mat!"   c.txt "a dog"  ->  b.txt, c.txt
"""

import os


def minhash_deduplication(
    input_files: list[os.PathLike],
    num_hashes: int,
    num_bands: int,
    ngrams: int,
    jaccard_threshold: float,
    output_directory: os.PathLike,
) -> None:
    raise NotImplementedError("write it, then: python course/check.py 19")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random
    import tempfile
    from pathlib import Path

    draw = random.Random(35)

    def run(texts: dict[str, bytes], *options) -> dict[str, bytes]:
        """What is written for these files."""
        with tempfile.TemporaryDirectory() as name:
            given = Path(name, "in")
            written = Path(name, "made", "out")
            given.mkdir()
            if draw.random() < 0.5:  # it may be there already, or not
                written.mkdir(parents=True)
            for file, text in texts.items():
                (given / file).write_bytes(text)
            answer.minhash_deduplication([given / file for file in texts], *options, written)
            for file, text in texts.items():
                assert (given / file).read_bytes() == text, f"the input {file} has been changed"
            assert written.is_dir(), "output_directory was not made"
            return {path.name: path.read_bytes() for path in written.iterdir()}

    def judge(case: str, texts: dict[str, str], expected: str, *options) -> None:
        """expected: the names that stay; in three orders."""
        data = {file: text.encode() for file, text in texts.items()}
        for order in (sorted(data), sorted(data, reverse=True), draw.sample(list(data), len(data))):
            found = run({file: data[file] for file in order}, *options)
            said = f"{case}, files in the order {' '.join(order)}: "
            assert sorted(found) == expected.split(), (
                f"{said}{' '.join(sorted(found)) or 'nothing'} is left, not {expected}"
            )
            for file, text in found.items():
                assert text == data[file], f"{said}{file} is {text[:40]!r}, was {data[file][:40]!r}"

    def words(n: int) -> list[str]:
        return ["".join(draw.choices("bcdfghklmnprst", k=5)) for _ in range(n)]

    # a chain: each has a similarity of 0.8 to the one before, the ends have 0.4 to each other
    chain = [words(90)]
    for i in range(4):
        chain.append(chain[-1][: 20 * i] + words(7) + chain[-1][20 * i + 7 :])
    names = "pqrst"
    for longest in names:
        texts = {name: " ".join(text) for name, text in zip(names, chain)}
        texts[longest] += " !!"
        texts |= {"u": " ".join(words(50)), "v": " ".join(chain[2][:45])}  # v: a half of r
        case = f"a chain of copies p-q-r-s-t, of which {longest} is the longest; v is a half of r"
        judge(case, texts, f"{longest} u v", 160, 40, 3, 0.7)
    texts = {name: " ".join(text) for name, text in zip("pr", (chain[0], chain[3]))}
    judge("the ends of that chain without its middle", texts, "p r", 160, 40, 3, 0.7)
    texts = {"a": " ".join(chain[0]), "b": " ".join(chain[1]), "c": " ".join(chain[0]).upper()}
    judge("similarity 0.8, in one band of 256", texts, "b c", 256, 1, 3, 0.5)
    judge("similarity 0.8, in two bands of 128", texts, "b c", 256, 2, 3, 0.5)

    sure = 100, 25, 3, 0.65
    judge("a single file", {"x": "one two three four"}, "x", *sure)
    judge("three equal texts", {"z": "x y z w", "m": "x y z w", "n": "x y z w"}, "m", *sure)
    judge("equally long copies", {"x": "yes", "y": "Yes"}, "y", *sure)
    accents = "Le caf\u00e9, \u00e0 la fin: \u00e9t\u00e9 na\u00efve!"
    plain = "le CAFE\r\na la  fin; ete\tnaive ....\r\n"
    judge("accents, case and punctuation", {"x": accents, "y": plain}, "y", *sure)
    apart = {"x": "e\u0301te\u0301", "y": "\u00e9t\u00e9"}
    judge("a letter and its accent apart", apart, "x", *sure)
    judge("longer in bytes, shorter in letters", {"x": "\u00e9t\u00e9", "y": "ete!"}, "y", *sure)
    judge("sharp s is no ss", {"x": "die Stra\u00dfe", "y": "die Strasse"}, "x y", *sure)
    judge("a ligature is a letter", {"x": "\ufb01n de la", "y": "fin de la"}, "x y", *sure)
    short = {"x": "yes", "y": "Yes!", "z": "no", "w": "no yes"}
    judge("shorter than a shingle", short, "w y z", *sure)
    for case, x, y, expected, ngrams, threshold in (
        ("words that join alike", "ab c", "a bc", "x y", 2, 0.5),
        ("another order", "a b c d e f", "f e d c b a", "x y", 2, 0.5),
        ("another order, word by word", "a b c d e f", "f e d c b a", "x", 1, 0.5),
        ("a word six times", "a b", "a b b b b b", "y", 1, 1.0),
        ("exactly at the threshold", "a b c", "a b c d", "y", 1, 0.75),
        ("a bit below it", "a b c", "a b c d", "x y", 1, 0.76),
        ("short texts of other words", "yes", "no", "x y", 3, 0.3),
        ("7 words of 8", "a b c d e f g", "a b c d e f g h", "y", 1, 0.875),
        ("7 words of 8, at 0.88", "a b c d e f g", "a b c d e f g h", "x y", 1, 0.88),
        ("an underscore is part of a word", "a_b c", "a b c", "x y", 1, 0.5),
    ):
        judge(case, {"x": x, "y": y}, expected, 64, 64, ngrams, threshold)
