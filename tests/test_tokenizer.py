"""tokenizer.py against its oracle: the `tokenizers` library, which reads the same file."""

import json
import os
import random
import string
import threading
import unicodedata
from unittest import mock

import numpy as np
import pytest
from conftest import code_texts, run_code
from table import read_table

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
    return code_texts()


@pytest.fixture(scope="module")
def tok(python_text) -> Tokenizer:
    return Tokenizer.train(python_text[:7] + AWKWARD, 1200)


def oracle(spec: str):
    import tokenizers

    hf = tokenizers.Tokenizer.from_str(spec)
    hf.encode_special_tokens = True  # special tokens in the text are plain text
    return lambda text: hf.encode(text, add_special_tokens=False).ids


def assert_like_the_library(tok: Tokenizer, texts):
    """The same ids, which have all of the text in them."""
    expected = oracle(tok.spec)
    for text in texts:
        ids = tok.encode(text)
        assert ids == expected(text), repr(text[:80])
        assert tok.decode(ids) == tok.normalize(text)
        assert int(tok.token_bytes[ids].sum()) == len(tok.normalize(text).encode())


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
        text = ""
        for group in rng.choices(groups, k=rng.randrange(1, 40)):
            run = rng.randrange(2, 60) if rng.random() < 0.05 else 0
            some = [rng.choice(group)] * run or rng.choices(group, k=rng.randrange(1, 6))
            text += "".join(some)
        yield text


@pytest.mark.parametrize("every_nth", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_ids_are_those_of_the_tokenizers_library(every_nth, tok, python_text):
    """Of every character, and of whole files."""
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    chunks = [every[k : k + 64] for k in range(0, len(every), 64 * every_nth)]
    texts = ["a ".join(chunk) + "1".join(chunk) for chunk in chunks]
    assert_like_the_library(tok, [*texts, *AWKWARD, *python_text])


def test_specials_come_first_and_text_cannot_make_them(tok):
    assert tok.bos_id == 0 and tok.vocab_size == 1200
    assert [*tok.special.items()] == [(name, i) for i, name in enumerate(SPECIAL_TOKENS)]
    assert tok.token_bytes[:4].tolist() == [0] * 4
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


def test_the_split_of_plain_text_is_that_of_older_folders():
    assert T.split_of(digits=2, combining=False) == (
        r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )


@pytest.mark.parametrize("text", ["नदी में पानी", "தமிழ்", "ชื่อ", "عَرَب", "cafe\u0301"])
def test_a_few_words_with_marks_among_others_are_noticed(text):
    plain = [string.printable, "café, naïve", "汉字", "🎉", "\ue000"] * 5
    assert T.has_marks([*plain, text]) and not T.has_marks([*plain, text[0]])


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
    text = "\n".join(python_text)
    assert len(list(blocks(text))) > 4
    assert_like_the_library(tok, [text])
    for text in (" " * 1_000_000, "中" * 150_000, "(" * 300_000):
        assert "".join(blocks(text)) == text and max(map(len, blocks(text))) <= T.BLOCK
        assert tok.decode(tok.encode(text)) == text


def test_nfc_is_stored_and_honoured():
    texts = ["cafe\u0301 ac\u0327a\u0303o", "Å \u212b A\u030a \u1112\u1161\u11ab"] * 20
    again = Tokenizer.train(texts, 300, nfc=True)
    assert again.nfc and not Tokenizer.train(texts, 300).nfc
    assert_like_the_library(again, [*texts, *AWKWARD, *random_texts(300, seed=2)])
    for text in [*texts, *AWKWARD]:
        assert again.normalize(text) == unicodedata.normalize("NFC", text)


def test_training_is_deterministic_and_survives_the_disk(tok, python_text, tmp_path):
    (tmp_path / "t.json").write_text(Tokenizer.train(python_text[:7] + AWKWARD, 1200).spec)
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert loaded.sha256 == tok.sha256 and (loaded.token_bytes == tok.token_bytes).all()
    ids = loaded.encode_array("b c")
    assert ids.tolist() == tok.encode("b c") and ids.dtype == np.uint32


def edited(tok: Tokenizer, place: str, value) -> str:
    """The text of its file with another value at a place, as "model type"."""
    tree = at = json.loads(tok.spec)
    *path, last = [int(key) if key.isdigit() else key for key in place.split()]
    for key in path:
        at = at[key]
    at[last] = value
    return json.dumps(tree)


NFC = {"type": "NFC"}


def of_steps(*steps):
    return {"type": "Sequence", "normalizers": [*steps]}


REFUSED = r"""
model => null
model type => "Unigram"
model continuing_subword_prefix => "#"
model vocab zz => 4000000000
model vocab zz => -1
model vocab zz => true
added_tokens 0 id => 4000000000
normalizer => {"type": ["NFC"]}
decoder => {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
pre_tokenizer => {"type": "Metaspace"}
pre_tokenizer pretokenizers 0 pattern Regex => "(unclosed"
pre_tokenizer pretokenizers 0 behavior => "Removed"
"""


TEN = {"type": "Replace", "pattern": {"String": "s"}, "content": "s" * 10}
BYTES = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
DEEP = NFC
for _ in range(300):
    DEEP = of_steps(DEEP)
BOMBS = [
    ("normalizer", of_steps(*[TEN] * 12)),  # of an s it makes a trillion
    ("normalizer", DEEP),
    # of a character that is not ASCII it makes two, again and again
    ("pre_tokenizer pretokenizers", [BYTES] * 41),
    ("pre_tokenizer pretokenizers 0 pattern Regex", r"[^\p{L}]" * 100_000),
    ("added_tokens 1 content", "z" * 30_000_000),
]
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
            assert path in str(error) and len(str(error)) < 500, error
        else:
            sys.exit(f"{path} was read")
        taken = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
        assert taken < 600 << 10, f"{path} took {taken:,} KB"
"""


def test_no_file_takes_all_memory_or_ends_the_program(tok, tmp_path):
    """Each is refused by its name, within 600 MB. Of BOMBS, the library would make more than there
    is."""
    texts = ["5", "{}", "not json", "\udcff", "[" * 100_000]
    texts += [tok.spec.replace("Ġ", "Ġ汉"), tok.spec.replace('"ÿ":', '"ÿÿ":')]
    changes = [(place, json.loads(value)) for place, (value,) in read_table(REFUSED)]
    texts += [edited(tok, *change) for change in changes + BOMBS]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.json").write_text(text, errors="surrogateescape")
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 1 << 33)
    (tmp_path / "folder").mkdir()
    run_code(READ, *tmp_path.iterdir())


def test_a_vocabulary_has_every_byte():
    with pytest.raises(UsageError, match="100"):
        Tokenizer.train(["a"], 100)


NORMALIZERS = [  # as files have them, and whether they make NFC; None: they change text
    (None, False),
    (of_steps(of_steps(), of_steps()), False),
    (of_steps(of_steps(NFC), NFC), True),
    ({"type": "Lowercase"}, None),
    (of_steps(of_steps({"type": "Strip", "strip_left": True, "strip_right": True})), None),
]


@pytest.mark.parametrize("normalizer, nfc", NORMALIZERS)
def test_a_normalizer_is_judged_by_what_it_does(normalizer, nfc, tok):
    spec = json.dumps(json.loads(tok.spec) | {"normalizer": normalizer})
    if nfc is None:
        with pytest.raises(UsageError, match="changes the text"):
            Tokenizer(spec)
        return
    other = Tokenizer(spec)
    assert other.nfc == nfc
    assert_like_the_library(other, ["cafe\u0301", "plain x"])


def test_what_is_nearly_ours_has_the_ids_of_its_own_file(tok, python_text):
    """With the merges in another order, a token without a merge, a second split."""
    merges = json.loads(tok.spec)["model"]["merges"]
    texts = [*AWKWARD, *random_texts(50, 1), python_text[9][:9000]]
    for place, value in (
        ("model merges", merges[::-1]),
        ("model merges", merges[:100] + merges[101:]),
        ("pre_tokenizer pretokenizers 1 use_regex", True),
    ):
        other = Tokenizer(edited(tok, place, value))
        assert_like_the_library(other, texts)
        assert any(other.encode(text) != tok.encode(text) for text in texts)


def test_a_word_without_an_end_is_cut_for_the_trainer_alone():
    for text in ("ACGT" * 20_000, "\n" * 9_000 + "-" * 9_000):
        parts = [*T._cut(text)]
        assert "".join(parts) == text and max(len(part) for part in parts) <= 8192
    assert [*T._cut("a b " * 5_000)] == ["a b " * 5_000]


def test_what_a_file_may_have_the_library_do(tok):
    """Texts are encoded whole, whatever length a model takes; a panic of Rust is no Exception."""
    to = dict(direction="Right", max_length=200, strategy="LongestFirst", stride=0)
    pad = dict(direction="Right", strategy={"Fixed": 9}, pad_id=0, pad_type_id=0, pad_token="x")
    # another split, so it is not ours
    spec = edited(tok, "pre_tokenizer pretokenizers 0 pattern Regex", r"\w+|\W+")
    other = Tokenizer(json.dumps(json.loads(spec) | dict(truncation=to, padding=pad)))
    for text in ("a", "a b " * 500):
        assert other.decode(other.encode(text)) == text
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
