"""`prepare_data.py show`: a row with its documents, its source and its shard."""

import re

import numpy as np
import pytest
from data_helpers import prepare_tiny

import prepare_data
from machinery.errors import DataError
from machinery.shards import Manifest
from preparation import sources
from tokenizer import Tokenizer

pytest_plugins = ["chat_helpers"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sources: notes of one line each, and long files, which are cut."""
    folder = tmp_path_factory.mktemp("show")
    for name in ("notes", "long"):
        (folder / name).mkdir()
    for i in range(200):
        (folder / "notes" / f"{i}.txt").write_text(f"Note {i}: the fox has \x1b[2J\x9b {i} é.\n")
    for i in range(8):
        text = "".join(f"Line {k} of file {i}, with número {k * i}.\n" for k in range(60))
        (folder / "long" / f"{i}.md").write_text(text)
    sources = [f"files:{folder}/notes", f"files:{folder}/long"]
    prepare_tiny(folder / "data", "--vocab_size", 400, "--source", *sources)
    return folder


def shown(capsys, folders, *args) -> str:
    capsys.readouterr()
    argv = ["show", "--data_dir", folders / "data", *args]
    assert prepare_data.main([str(a) for a in argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_row_is_its_documents(folders, split, capsys, monkeypatch):
    """The data folder alone is read, whatever a manifest names; a terminal gets no commands."""
    monkeypatch.setattr(sources, "find_files", lambda source: pytest.fail(source.place))
    manifest = Manifest.load(folders / "data")
    tokenizer = Tokenizer.load(folders / "data" / "tokenizer.json")
    rows = [(s, r) for s in range(2) for r in range(manifest.rows(split, s))]
    of_notes = manifest.rows(split, 0)
    for n in (0, of_notes - 1, of_notes, len(rows) - 1):
        out = shown(capsys, folders, "--row", n, "--split", split)
        shard, within = manifest.locate(split, *rows[n])
        assert f"{folders / 'data' / shard.file}, row {within}," in out
        ids = manifest.row(split, *rows[n]).tolist()
        _, *parts = re.split(r"\n\n---- BOS, document \d+: (.*)\n", out[:-1])
        heads, texts = parts[::2], parts[1::2]
        filled = 65 - sum(int(head.split()[0]) for head in heads)
        assert len(texts) == ids.count(manifest.bos_id) - filled and all(texts)
        plain = tokenizer.decode(i for i in ids if i != manifest.bos_id)
        plain = plain.replace("\x1b", r"\x1b").replace("\x9b", r"\x9b")
        assert "".join(texts).replace("\n", "") == plain.replace("\n", "")


def test_a_text_is_shown_with_its_tokens(folders, capsys):
    """Those that share a character stand in one line."""
    *ids, a, b, c = Tokenizer.load(folders / "data" / "tokenizer.json").encode("the 汉")
    head, *rows = shown(capsys, folders, "--text", "the 汉").splitlines()
    assert head.startswith(f"{len(ids) + 3} tokens | 7 bytes | ") and len(rows) == len(ids) + 1
    assert rows[-1] == f"{'汉'!r:16}{a:5} e6 | {b:5} b1 | {c:5} 89"


def test_a_token_that_is_none_is_named(folders, monkeypatch, capsys):
    monkeypatch.setattr(Manifest, "row", lambda *args: np.array([0, 60_000]))  # a stranger's
    with pytest.raises(DataError, match="60000"):
        shown(capsys, folders)


def test_conversations_are_shown_with_their_roles(chat_data, capsys):
    out = "".join(shown(capsys, chat_data.parent, "--row", n) for n in range(20))
    assert re.search(r"Say (\w+ \w+)<\|end\|><\|assistant\|>I say \1\.<\|end\|>", out)
    assert ": 1 tokens" not in out
