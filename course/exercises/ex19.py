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
    from pathlib import Path, PurePath

    from subject import SHORT, shallow

    draw = random.Random(35)
    folder = tempfile.TemporaryDirectory()
    given = Path(folder.name)  # the same names with other texts, again and again

    def judge(texts, expected, hashes=64, bands=64, ngrams=3, threshold=0.65):
        """expected: the names that stay, in any order of the files."""
        data = {file: text.encode() for file, text in texts.items()}
        files = sorted(data)
        for made, order in (("", files), ("made/out", files[::-1])):
            for file in order:
                (given / file).write_bytes(data[file])
            written = Path(tempfile.mkdtemp(dir=given), made)
            paths = [PurePath(given, file) for file in order]  # which cannot read themselves
            values = paths, hashes, bands, ngrams, threshold, written
            shallow(answer.minhash_deduplication, values, {})
            for file in order:
                now = (given / file).read_bytes()
                assert now == data[file], f"the input {file} has been changed"
            assert written.is_dir(), "output_directory was not made"
            linked = [path.name for path in written.iterdir() if path.is_symlink()]
            assert not linked, f"{linked} are links, not files"
            found = {path.name: path.read_bytes() for path in written.iterdir()}
            left = " ".join(sorted(found))[:200]
            assert left == expected, f"{SHORT(texts)}: {left or 'nothing'} is left, not {expected}"
            for file, text in found.items():
                assert text == data[file], f"{file} is {text[:40]}, was {data[file][:40]}"

    def words(n):
        return ["".join(draw.choices("bcdfghklmnprst", k=5)) for _ in range(n)]

    # a chain of copies: each has a similarity of 0.8 to the one before, the ends have 0.4;
    # a part of a text is no copy of it
    chain = [words(90)]
    for i in range(4):
        chain.append(chain[-1][: 20 * i] + words(7) + chain[-1][20 * i + 7 :])
    chain += [words(50), chain[2][:45]]
    names = "chain0 chain1 chain2 chain3 chain4 other part_of_chain2".split()
    texts = dict(zip(names, map(" ".join, chain)))
    for longest in names[:5]:
        now = texts | {longest: texts[longest] + " !!"}
        judge(now, f"{longest} other part_of_chain2", 160, 40, 3, 0.7)
    near = {"a": texts["chain0"], "b": texts["chain1"], "c": texts["chain0"].upper()}
    for bands in (1, 2):  # few agree in 128 numbers
        judge(near, "b c", 256, bands, 3, 0.5)
    judge({"x": "one two"}, "x")
    judge(dict.fromkeys("zmn", "x y z w"), "m")
    judge({"x": "yes", "y": "Yes!", "z": "no", "w": "no yes"}, "w y z")
    for x, y, expected, *options in (
        ("Le caf\u00e9, \u00e0 la fin!", "le CAFE\r\na la  fin ....\r\n", "y"),
        ("yes", "Yes", "y"),
        ("e\u0301te\u0301", "\u00e9t\u00e9", "x"),  # a letter and its accent apart
        ("\u00e9t\u00e9", "ete!", "y"),  # longer in bytes, shorter in letters
        ("a b " * 20_000, "a b " * 15_000, "x"),
        ("die Stra\u00dfe", "die Strasse", "x y"),
        ("\ufb01n de la", "fin de la", "x y"),  # a ligature is a letter
        ("\u043c\u0438\u0440", "\u6771\u4eac", "x y", 1, 0.1),  # words in Russian, Japanese
        ("", "one two", "x y"),
        ("", "...", "y"),
        ("ab c", "a bc", "x y", 2, 0.5),
        ("a b c d e f", "f e d c b a", "x y", 2, 0.5),
        ("a b c d e f", "f e d c b a", "x", 1, 0.5),
        ("a b", "a b b b b b", "y", 1, 1.0),
        ("a b c", "a b c d", "y", 1, 0.75),
        ("a b c", "a b c d", "x y", 1, 0.76),
        ("yes", "no", "x y", 3, 0.3),
        ("a_b c", "a b_c", "x y", 2, 0.5),
        ("a\r\nb\r\nc", "a b  c", "x", 1, 0.9),
        ("\u0e01\u0e31\u0e19", "\u0e01\u0e19", "x", 1, 0.9),  # a Thai vowel is of Mn, too
        ("\u0930\u093e\u092e", "\u0930\u092e", "x y", 1, 0.9),  # an Indian one is of Mc
        ("\u039f\u0394\u039f\u03a3", "\u03bf\u03b4\u03bf\u03c2", "x", 1, 0.9),  # sigma at the end
        ("a_b c", "a b c", "x y", 1, 0.5),
    ):
        judge({"x": x, "y": y}, expected, 64, 64, *options)
    slide = words(300)
    texts = {str(i): " ".join(slide[i : i + 4]) for i in range(290)}  # each a copy of the next
    judge(texts, min(texts, key=texts.get), 32, 32, 1, 0.6)
