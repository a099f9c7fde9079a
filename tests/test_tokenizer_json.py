"""Tokenizers of others: the ids of `tokenizers`, reading the file as it is, for any text."""

import json
import time

import pytest
from conftest import ROOT
from forms import FORMS, SLOW, make
from test_tokenizer import AWKWARD, random_texts

import export
from config import UsageError
from hf import tokenizer_json
from tokenizer import Tokenizer

ALL = FORMS | SLOW
MORE = ["12 3  45\n6 7", "a  1", "  1", "\n\n1", "x \u00a01", " x zebrafish zebrafishes", "e\u0301"]
MORE += ["<|endoftext|> a <|im_start|>user<tool_call> x <bos>", "<tool_call>", "a    b  c", "ab'LL"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """form -> its folder."""
    root = tmp_path_factory.mktemp("forms")
    for name, form in ALL.items():
        make(root / name, *form)
    return {name: root / name for name in ALL}


def oracle(folder):
    import tokenizers

    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.encode_special_tokens = True
    return lambda text: theirs.encode(text, add_special_tokens=False).ids


def compare(folder, texts) -> None:
    tokenizer, ids = tokenizer_json.read(folder), oracle(folder)
    for text in texts:
        found = tokenizer.encode(text)
        assert found == ids(tokenizer.normalize(text)), repr(text[:80])
        assert tokenizer.decode(found) == tokenizer.normalize(text)
        size = len(tokenizer.normalize(text).encode())
        assert sum(tokenizer.token_bytes[found]) == size
        assert not set(found) & set(tokenizer.special.values())


@pytest.mark.parametrize("name", ALL)
def test_ids_are_those_of_tokenizers(name, made):
    texts = [text for text in AWKWARD if len(text) < 1100]
    compare(made[name], [*texts, *MORE, *random_texts(200, seed=3)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_ids_are_those_of_tokenizers_for_10_000_texts(name, made):
    compare(made[name], [*AWKWARD, *random_texts(10_000, seed=4)])


def test_what_runs_by_tiktoken_and_why_the_others_do_not(made):
    for name in FORMS:
        assert not tokenizer_json.read(made[name]).slow
    for name, form in SLOW.items():
        assert form[3] in tokenizer_json.read(made[name]).slow


def test_bos_is_known_by_its_role(made, tmp_path):
    for name, bos in (("llama3", "<|begin_of_text|>"), ("gpt2", "<|endoftext|>")):
        tokenizer = tokenizer_json.read(made[name])
        assert tokenizer.bos == bos == Tokenizer(tokenizer.spec).bos
        assert tokenizer.bos_id == tokenizer.special[bos]
    assert tokenizer_json.read(made["plain <bos>"]).bos == "<bos>"
    assert tokenizer_json.read(made["qwen"], "<|im_end|>").bos == "<|im_end|>"
    make(tmp_path / "none", ("words",), ("<a>", "<b>"), {})
    with pytest.raises(UsageError, match="not say what begins a document; .*--bos_token: <a>, <b>"):
        tokenizer_json.read(tmp_path / "none")
    assert tokenizer_json.read(tmp_path / "none", "<b>").bos_id == 1
    with pytest.raises(UsageError, match="has no special token <c>"):
        tokenizer_json.read(tmp_path / "none", "<c>")


def test_our_own_stay_as_they_are_to_the_byte(tmp_path):
    """And so does a file that begins a document by itself and is split by one pattern."""
    ours = Tokenizer.train([p.read_text() for p in ROOT.glob("*.py")], 400)
    ours.save(tmp_path / "tokenizer.json")
    assert tokenizer_json.read(tmp_path).sha256 == ours.sha256
    assert tokenizer_json.read(tmp_path / "tokenizer.json", "<|end|>").bos == "<|end|>"
    make(tmp_path / "l", *FORMS["llama3"])
    text = (tmp_path / "l" / "tokenizer.json").read_text()
    assert tokenizer_json.read(tmp_path / "l").spec == text


def test_an_export_of_it_is_read_by_transformers(made, tmp_path):
    import transformers

    tokenizer = tokenizer_json.read(made["smollm2"])
    export.write_tokenizer(tokenizer, tmp_path, 64, tuned=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in MORE:
        assert theirs(text).input_ids == [tokenizer.bos_id, *tokenizer.encode(text)]


def sentencepiece(tree):
    tree["model"] |= dict(byte_fallback=True, unk_token="<unk>")
    tree["model"]["vocab"]["<unk>"] = len(tree["model"]["vocab"])


REFUSED = {
    "Unigram": (lambda t: t["model"].update(type="Unigram"), "not a tokenizer.json of a byte"),
    "SentencePiece's BPE": (sentencepiece, "the model is BPE of SentencePiece"),
    "a space before": (
        lambda t: t["pre_tokenizer"].update(add_prefix_space=True), "adds a space before the text"
    ),
    "lower case": (lambda t: t.update(normalizer={"type": "Lowercase"}), "normalizer is Lowercase"),
    "no bytes": (
        lambda t: t.update(pre_tokenizer={"type": "Whitespace"}), "does not end in ByteLevel"
    ),
    "dropout": (lambda t: t["model"].update(dropout=0.1), "BPE has a dropout"),
    "ends of words": (lambda t: t["model"].update(end_of_word_suffix="~"), "end_of_word_suffix"),
    "a gap": (lambda t: t["model"]["vocab"].update({"Ġzzz": 5000}), "gaps or duplicates"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_refused_by_name(case, made, tmp_path):
    change, words = REFUSED[case]
    tree = json.loads((made["gpt2"] / "tokenizer.json").read_text())
    change(tree)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=words):
        tokenizer_json.read(tmp_path, "<|endoftext|>")


def test_sentencepieces_own_file_is_named(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(UsageError, match="SentencePiece's tokenizer.model"):
        tokenizer_json.read(tmp_path)


@pytest.mark.slow
def test_tiktoken_is_faster(made):
    """Processor time beside `tokenizers`, printed; with -s."""
    text = "\n".join(p.read_text() for p in sorted(ROOT.glob("*.py"))) * 4
    for name, folder in made.items():
        tokenizer, ids = tokenizer_json.read(folder), oracle(folder)
        seconds = []
        for encode in (tokenizer.encode, ids):
            start = time.process_time()
            encode(text)
            seconds.append(time.process_time() - start)
        print(f"{name}: {len(text) / seconds[0] / 1e6:.1f} MB/s, {seconds[1] / seconds[0]:.1f}x")
        assert tokenizer.slow or seconds[0] < seconds[1]
