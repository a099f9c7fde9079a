"""Exercise 19: near copies among files, removed whatever the order in which they come.

    minhash_deduplication(
        input_files, num_hashes, num_bands, ngrams, jaccard_threshold, output_directory
    )

Write one file of each group of copies, byte for byte as it was, under its own name. Two files are
copies if the Jaccard similarity of their shingles is jaccard_threshold or more. A copy of a copy
belongs to the same group, even if it is less similar to the first. Of a group, the longest text
stays (in characters); if several are equally long, the smallest text, as Python compares strings;
if texts are equal, the one with the smallest name. The order of input_files changes nothing.

A shingle is a run of `ngrams` words of the normalized text; a text with fewer words has one
shingle, which is all of it. To normalize: Unicode NFD, accents (category Mn) dropped, lower case;
words are runs of letters, digits and underscores. Compare only texts that agree in a whole band of
their MinHash signatures, which are num_hashes numbers in num_bands bands of equal size. (So with
one band of 256, even very similar texts are never compared; with bands of one number, nearly all
are.)

Make output_directory if it is not there; leave whatever else is in it. The function has the form of
Stanford's CS336 (assignment 4), so that course's tests of it run on yours. For example, with bands
of one number, 2 words in a shingle and threshold 0.5:

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
    import tempfile
    from pathlib import Path

    from subject import equal

    def judge(why, texts, expected, ngrams=1, threshold=0.65, bands=64):
        """expected: the names that stay, whatever the order of the files."""
        data = {name: text.encode() for name, text in texts.items()}
        right = {name: data[name] for name in expected.split()}
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder, "made/out")
            for name in data:
                Path(folder, name).write_bytes(data[name])
            for back in (False, True):
                files = [Path(folder, name) for name in sorted(data, reverse=back)]
                answer.minhash_deduplication(files, 64, bands, ngrams, threshold, written)
                found = {path.name: path.read_bytes() for path in written.iterdir()}
                equal(found, right, f"{why}: of {texts} what stays")
                (written / "of_the_judge").write_bytes(b"notes")
                right["of_the_judge"] = b"notes"

    cats = {"a.txt": "the cat sat on a mat", "b.txt": "The cat sat on a mat!", "c.txt": "a dog"}
    judge("the text's example", cats, "b.txt c.txt", 2, 0.5)
    chain = {name: "a b c d e f g h i"[2 * i : 2 * i + 7] for i, name in enumerate("sprtuq")}
    judge("a copy and its copies' copies", chain, "s", 1, 0.6)
    judge("of equal texts the smallest name", dict.fromkeys("zmn", "x y"), "m")
    texts = {"u": "", "v": "...", "w": "no", "x": "yes", "y": "yes!"}
    judge("fewer words are one shingle", texts, "v w y", 3)
    for why, x, y, expected, *options in (
        ("the longest in characters", "\u00e9t\u00e9", "ete!", "y"),
        ("of equally long ones the smallest text", "yes", "Yes", "y"),
        ("to the byte, as it was", "a\r\nb\r\nc", "a b  c", "x"),
        ("a shingle is a run of words", "a b c d", "d c b a", "x y", 2),
        ("a shingle is a run of words", "ab c", "a bc", "x y", 2),
        ("NFD", "\ufb01n", "fin", "x y"),  # a ligature is a letter
        ("category Mn", "\u0e01\u0e31\u0e19", "\u0e01\u0e19", "x"),  # a Thai vowel
        ("lower case", "Stra\u00dfe", "Strasse", "x y"),
        ("letters", "\u043c\u0438\u0440", "\u6771\u4eac", "x y"),  # Russian, Japanese
        ("runs of letters", "don't", "dont", "x y"),
        ("digits and underscores", "a_b c1", "a b c 1", "x y"),
        ("the threshold or more", "a b c", "a b c d", "y", 1, 0.75),
        ("the threshold or more", "a b c", "a b c d", "x y", 1, 0.76),
        ("all of one band of 64 must agree", "a b c", "a b c d", "x y", 1, 0.1, 1),
    ):
        judge(why, {"x": x, "y": y}, expected, *options)
