"""Tokenizers of others: the ids of `tokenizers`, reading the file as it is, for any text."""

import json

import pytest
from conftest import ROOT
from forms import END, FORMS, make
from test_tokenizer import AWKWARD, oracle, random_texts

from config import UsageError
from hf import export, tokenizer_json
from tokenizer import Tokenizer

MORE = ["12 3  45\n6 7", "a  1", "  1", "\n\n1", "x \u00a01", " x zebrafish zebrafishes", "e\u0301"]
MORE += ["<|endoftext|> a <|im_start|>user<tool_call> x <bos>", "<tool_call>", "a    b  c", "ab'LL"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """form -> its folder."""
    root = tmp_path_factory.mktemp("forms")
    for name, form in FORMS.items():
        make(root / name, *form)
    return {name: root / name for name in FORMS}


@pytest.mark.parametrize("name", FORMS)
def test_ids_are_those_of_tokenizers(name, made):
    """Also after a tokenizer has been saved and is read as any other, without hf/."""
    given = tokenizer_json.read(made[name])
    again, ids = Tokenizer(given.spec), oracle((made[name] / "tokenizer.json").read_text())
    for text in [*(text for text in AWKWARD if len(text) < 1100), *MORE, *random_texts(200, 3)]:
        plain = given.normalize(text)
        found = given.encode(text)
        assert found == again.encode(text) == ids(plain), repr(text[:80])
        assert given.decode(found) == plain
        assert sum(given.token_bytes[found]) == len(plain.encode())
        assert not set(found) & set(given.special.values())


def test_bos_is_known_by_its_role(made, tmp_path):
    for name, bos in (("llama3", "<|begin_of_text|>"), ("gpt2", END), ("plain <bos>", "<bos>")):
        tokenizer = tokenizer_json.read(made[name])
        assert tokenizer.bos == bos == Tokenizer(tokenizer.spec).bos
        assert tokenizer.bos_id == tokenizer.special[bos]
    one, other = (tokenizer_json.read(made["qwen"], bos) for bos in ("", "<|im_end|>"))
    assert (one.bos, other.bos) == (END, "<|im_end|>")
    assert one.same_ids(other) and one.sha256 != other.sha256
    make(tmp_path / "none", ("words",), ("<a>", "<b>"), {})
    assert tokenizer_json.read(tmp_path / "none", "<b>").bos_id == 1
    for asked in ("", "<c>"):
        with pytest.raises(UsageError, match="--bos_token: <a>, <b>"):
            tokenizer_json.read(tmp_path / "none", asked)


def test_our_own_stay_as_they_are_to_the_byte(tmp_path):
    """And so does a file that begins a document by itself."""
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
    "Unigram": lambda t: t["model"].update(type="Unigram"),
    "SentencePiece's BPE": sentencepiece,
    "a space before": lambda t: t["pre_tokenizer"].update(add_prefix_space=True),
    "lower case": lambda t: t.update(normalizer={"type": "Lowercase"}),
    "no bytes": lambda t: t.update(pre_tokenizer={"type": "Whitespace"}),
    "dropout": lambda t: t["model"].update(dropout=0.1),
    "ends of words": lambda t: t["model"].update(end_of_word_suffix="~"),
    "a gap": lambda t: t["model"]["vocab"].update({"Ġzzz": 5000}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_refused_by_the_name_of_their_file(case, made, tmp_path):
    tree = json.loads((made["gpt2"] / "tokenizer.json").read_text())
    REFUSED[case](tree)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=str(tmp_path / "tokenizer.json")):
        tokenizer_json.read(tmp_path, END)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="none.json cannot be read"):
        tokenizer_json.read(tmp_path / "none.json")
