"""tokenizer.py against its oracle: the `tokenizers` library, which reads the same file."""

import json
import os
import random
import sysconfig
import threading
import unicodedata
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import run_code

import tokenizer as T
from config import UsageError
from tokenizer import SPECIAL_TOKENS, Tokenizer, blocks

SPECIALS = " ".join(SPECIAL_TOKENS)
AWKWARD = [
    "",
    "\r\n\r\n  \t",
    "a\x00b\x00\x00",
    "trailing   ",
    "I'll we've it's DON'T 'S 'ſ 'K",
    "1234567 3.14159 1e-10",
    "٣٤٥٦ ३४५ 一二三 Ⅷ ²³ ½ 𝟙𝟚𝟛",
    "👩‍👩‍👧‍👦 👍🏽 🇧🇷🇵🇹 ❤️",
    "a\u200bb\u200d\u00a0c\u3000d\u2028e\u2029f\x85g",
    "\ufeffBOM",
    f"x{SPECIALS}y<|bos|><|bos",
    "=" * 1000 + "\n" * 50,
    " " * 5000 + "x",
    "a" * 5000,
    "\u0301" * 200,
    "def f(x):\n\treturn x  # çãõ\n\n\n",
]


@pytest.fixture(scope="module")
def python_text() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [p.read_text("utf-8", "replace") for p in sorted(folder.glob("*.py"))]


@pytest.fixture(scope="module")
def tok(python_text) -> Tokenizer:
    return Tokenizer.train(python_text[:60] + AWKWARD, 1200)


def oracle(spec: str):
    import tokenizers

    hf = tokenizers.Tokenizer.from_str(spec)
    hf.encode_special_tokens = True  # special tokens in the text are plain text
    return lambda text: hf.encode(text, add_special_tokens=False).ids


def random_texts(count: int, seed: int):
    """Strings over all Unicode categories (but surrogates), long runs and digits mixed in."""
    rng = random.Random(seed)
    by_category = {}
    for c in range(0x110000):
        by_category.setdefault(unicodedata.category(chr(c)), []).append(chr(c))
    del by_category["Cs"]
    short = [text for text in AWKWARD if len(text) < 100]
    groups = [*by_category.values(), [" "], ["\n"], [*"aeiou'"], [*"0123456789"], short]
    for _ in range(count):
        parts = []
        for group in rng.choices(groups, k=rng.randrange(1, 40)):
            run = rng.randrange(2, 60) if rng.random() < 0.05 else 0
            parts += [rng.choice(group) * run] if run else rng.choices(group, k=rng.randrange(1, 6))
        yield "".join(parts)


@pytest.mark.parametrize("every_nth", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_ids_are_those_of_the_tokenizers_library(every_nth, tok, python_text):
    hf = oracle(tok.spec)
    for text in [*AWKWARD, *python_text[60:110], *random_texts(3000, seed=0)]:
        ids = tok.encode(text)
        assert ids == hf(text), repr(text[:80])
        assert tok.decode(ids) == text
        assert int(tok.token_bytes[ids].sum()) == len(text.encode("utf-8"))
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for k in range(0, len(every), 64 * every_nth):
        text = "a ".join(every[k : k + 64]) + "1".join(every[k : k + 64])
        assert tok.encode(text) == hf(text), hex(ord(every[k]))


def test_specials_come_first_and_text_cannot_make_them(tok):
    assert tok.bos_id == 0 and tok.vocab_size == 1200
    assert [*tok.special.items()] == [(name, i) for i, name in enumerate(SPECIAL_TOKENS)]
    assert tok.token_bytes[:4].tolist() == [0] * 4
    assert sorted(tok.token_bytes[4:])[:256] == [1] * 256
    assert min(tok.encode(f"a{SPECIALS}b")) >= 4


def test_lone_surrogates_become_replacement_characters(tok):
    assert tok.decode(tok.encode("a\ud800b\ud83d\ude00")) == "a\ufffdb😀"


@pytest.mark.parametrize("digits, expected", enumerate(["2 0 2 1 9 9", "20 21 99", "202 199"], 1))
def test_digits_come_in_groups(digits, expected):
    """Even a text of nothing but years does not teach it a token of more digits."""
    years = [" ".join(str(year) for year in range(1000, 3000))] * 5
    tok = Tokenizer.train(years, 1500, split=T.split_of(digits, combining=False))
    assert [tok.decode([i]) for i in tok.encode("202199")] == expected.split()
    ids = [*tok.encode("7" * 40), *tok.encode("2020" * 5)]
    assert max(len(tok.decode([i])) for i in ids) <= digits


def test_the_default_split_is_that_of_older_folders():
    assert T.SPLIT == (
        r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )


@pytest.mark.parametrize("split", sorted(T.SPLITS))
def test_any_split_gives_the_ids_of_the_library(split, python_text):
    texts = [*python_text[:20], *AWKWARD, "नमस्ते दुनिया தமிழ் สวัสดี العَرَبِيَّة " * 500]
    again = Tokenizer.train(texts, 1200, split=split)
    assert again.split == split
    hf = oracle(again.spec)
    for text in [*texts, *random_texts(500, seed=3)]:
        assert again.encode(text) == hf(text)
        assert again.decode(again.encode(text)) == text
    words = [len(again.encode(word)) for word in (" दुनिया", " தமிழ்")]
    assert (max(words) == 1) == (r"\p{M}" in split)


def test_a_long_text_has_the_ids_of_the_uncut_one(tok, python_text):
    """Blocks end where the split ends anyway; without such a place bytes still all survive."""
    text = "\n".join(python_text)[:400_000]
    assert len(list(blocks(text))) > 4
    assert tok.encode(text) == oracle(tok.spec)(text)
    for text in (" " * 1_000_000, "中" * 150_000, "(" * 300_000):
        assert "".join(blocks(text)) == text and max(map(len, blocks(text))) <= T.BLOCK
        assert tok.decode(tok.encode(text)) == text


def test_nfc_is_stored_and_honoured():
    texts = ["cafe\u0301 ac\u0327a\u0303o", "Å \u212b A\u030a \u1112\u1161\u11ab"] * 20
    again = Tokenizer.train(texts, 300, nfc=True)
    assert again.nfc and not Tokenizer.train(texts, 300).nfc
    hf = oracle(again.spec)
    for text in [*texts, *AWKWARD, *random_texts(1000, seed=2)]:
        assert again.encode(text) == hf(text)
    for text in [*texts, *AWKWARD]:
        assert again.decode(again.encode(text)) == unicodedata.normalize("NFC", text)


def test_training_is_deterministic_and_survives_the_disk(tok, python_text, tmp_path):
    (tmp_path / "t.json").write_text(Tokenizer.train(python_text[:60] + AWKWARD, 1200).spec)
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert loaded.sha256 == tok.sha256 and (loaded.token_bytes == tok.token_bytes).all()
    ids = loaded.encode_array("b c")
    assert ids.tolist() == tok.encode("b c") and ids.dtype == np.uint32


def edited(tok: Tokenizer, change) -> str:
    """The text of its file, after a change of the tree."""
    tree = json.loads(tok.spec)
    change(tree)
    return json.dumps(tree)


def split_at(tree, regex, **more):
    tree["pre_tokenizer"]["pretokenizers"][0] |= {"pattern": {"Regex": regex}, **more}
    return tree


def no_space(tree):  # the byte of a space goes, the last id takes its place
    vocab = tree["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = vocab.pop("Ġ")


CHANGES = {
    "unigram": lambda tree: tree["model"].update(type="Unigram"),
    "words alone": lambda tree: split_at(tree, r"\w+", behavior="Removed", invert=True),
    "unclosed": lambda tree: split_at(tree, "(unclosed"),
    "a panic": lambda tree: tree["model"].update(continuing_subword_prefix="#" * 99),
    "no space": no_space,
    "metaspace": lambda tree: tree.update(pre_tokenizer={"type": "Metaspace"}),
}


def test_other_tokenizers_are_refused_by_the_name_of_the_file(tok, tmp_path):
    path = tmp_path / "t.json"
    texts = ["5", "{}", "not json", tok.spec.replace("Ġ", "Ġ汉")]
    texts += [edited(tok, change) for change in CHANGES.values()]
    for text in [*texts, "\udcff"]:
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(UsageError, match=str(path)):
            Tokenizer.load(path)
    with pytest.raises(UsageError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
    with pytest.raises(UsageError, match="100"):
        Tokenizer.train(["a"], 100)


def of_steps(*steps):
    return {"type": "Sequence", "normalizers": [*steps]}


TEN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


def grows(tree):
    """The normalizer is asked for a trillion characters, as soon as the file is read."""
    tree["normalizer"] = of_steps(*[TEN] * 12)
    tree["added_tokens"].append(tree["added_tokens"][0] | dict(content="a", normalized=True))


def nested(tree):
    for _ in range(300):
        tree["normalizer"] = of_steps(tree["normalizer"])


def doubled(tree):
    """ByteLevel makes two characters of one that is not ASCII, again and again."""
    tree["pre_tokenizer"]["pretokenizers"] += tree["pre_tokenizer"]["pretokenizers"][1:] * 40


def with_id(i):
    return lambda tree: tree["model"]["vocab"].update(zz=i)


HUGE = 4 * 10**9
BOMBS = {
    "a huge id": with_id(HUGE),
    "an id below 0": with_id(-1),
    "a truth": with_id(True),
    "a huge id of a special token": lambda tree: tree["added_tokens"][0].update(id=HUGE),
    "a text that grows": grows,
    "steps in steps": nested,
    "bytes of bytes": doubled,
    "a decoder that grows": lambda tree: tree.update(decoder=TEN),
    "a long pattern": lambda tree: split_at(tree, r"[^\p{L}]" * 100_000),
    "a long token": lambda tree: tree["added_tokens"][1].update(content="z" * 30_000_000),
    "no model": lambda tree: tree.update(model=None),
    "kinds of no kind": lambda tree: tree.update(normalizer={"type": ["NFC"]}),
}
READ = """
import resource, sys
from config import UsageError
from hf import tokenizer_json
from tokenizer import Tokenizer
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30),) * 2)
for path in sys.argv[1:]:
    for read in (Tokenizer.load, tokenizer_json.read):
        print(path, file=sys.stderr)
        try:
            read(path)
        except UsageError as error:
            assert len(str(error)) < 500, error
        else:
            sys.exit(f"{path} was read")
        taken = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
        assert taken < 600 << 10, f"{path} took {taken:,} KB"
"""


def test_no_file_takes_all_memory_or_ends_the_program(tok, tmp_path):
    """Each is refused within 600 MB. Of most, the library would make more than there is."""
    for name, change in BOMBS.items():
        (tmp_path / name).write_text(edited(tok, change))
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "long").write_text("")
    os.truncate(tmp_path / "long", 1 << 33)
    run_code(READ, *tmp_path.iterdir())


NFC = {"type": "NFC"}
NORMALIZERS = [  # as files have them, and the steps that change text
    (None, []),
    (of_steps(of_steps(), of_steps()), []),
    (of_steps(of_steps(NFC), NFC), ["NFC"]),
    ({"type": "Lowercase"}, None),
    (of_steps(of_steps({"type": "Strip", "strip_left": True, "strip_right": True})), None),
]


@pytest.mark.parametrize("normalizer, changes", NORMALIZERS)
def test_a_normalizer_is_judged_by_what_it_does(normalizer, changes, tok):
    spec = json.dumps(json.loads(tok.spec) | {"normalizer": normalizer})
    if changes is None:
        with pytest.raises(UsageError, match="changes the text"):
            Tokenizer(spec)
        return
    other = Tokenizer(spec)
    assert other.nfc == (changes == ["NFC"])
    for text in ("cafe\u0301", "plain x"):
        assert other.encode(text) == oracle(spec)(text)
        assert other.decode(other.encode(text)) == other.normalize(text)


def swapped_merges(tree):
    merges = tree["model"]["merges"]
    merges[5], merges[400] = merges[400], merges[5]


def one_merge_less(tree):
    del tree["model"]["merges"][100]


LIKE_OURS = {
    "the order of merges": swapped_merges,
    "a token without a merge": one_merge_less,
    "a second split": lambda tree: tree["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
}


@pytest.mark.parametrize("change", LIKE_OURS)
def test_what_is_nearly_ours_has_the_ids_of_its_own_file(change, tok, python_text):
    spec = edited(tok, LIKE_OURS[change])
    other = Tokenizer(spec)
    expected = oracle(spec)
    texts = [*AWKWARD, *random_texts(50, 1), *python_text[60:70]]
    assert all(other.encode(text) == expected(text) for text in texts)
    assert any(expected(text) != tok.encode(text) for text in texts)  # else it shows nothing


def test_a_word_without_an_end_is_cut_for_the_trainer_alone():
    for text in ("ACGT" * 20_000, "\n" * 9_000 + "-" * 9_000):
        parts = [*T._cut(text)]
        assert "".join(parts) == text and max(len(part) for part in parts) <= 8192
    assert [*T._cut("a b " * 5_000)] == ["a b " * 5_000]


def test_what_a_file_may_have_the_library_do(tok):
    """Texts are encoded whole, whatever length a model takes; a panic of Rust is no Exception."""
    to = dict(direction="Right", max_length=200, strategy="LongestFirst", stride=0)
    pad = dict(direction="Right", strategy={"Fixed": 9}, pad_id=0, pad_type_id=0, pad_token="x")
    tree = split_at(json.loads(tok.spec), r"\w+|\W+")  # so it is not ours
    other = Tokenizer(json.dumps(tree | dict(truncation=to, padding=pad)))
    assert [other.decode(other.encode(text)) for text in ("a", "a b " * 500)] == ["a", "a b " * 500]
    for error, expected in ((BaseException, UsageError), (KeyboardInterrupt, KeyboardInterrupt)):
        other._library = mock.Mock(**{"encode.side_effect": error})
        with pytest.raises(expected):
            other.encode("a")


def test_a_bug_in_changed_code_is_not_called_a_damaged_file(tok, tmp_path, monkeypatch):
    (tmp_path / "t.json").write_text(tok.spec)
    monkeypatch.setattr(T, "byte_symbols", mock.Mock(side_effect=ValueError("x")))
    with pytest.raises(ValueError) as raised:
        Tokenizer.load(tmp_path / "t.json")
    assert type(raised.value) is ValueError


def test_text_is_asked_for_in_the_thread_that_trains():
    """The library's own thread, which would ask for it, has crashed in what streams text."""
    threads = []

    def texts():
        for i in range(50):
            threads.append(threading.get_ident())
            yield f"text number {i}"

    Tokenizer.train(texts(), 280)
    assert threads == [threading.get_ident()] * 50
