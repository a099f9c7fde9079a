"""`prepare_data.py show`: a row with its documents, its source, its shard and its files."""

import json
import re
from unittest import mock

import pytest
from data_helpers import in_process

import prepare_data
from config import UsageError
from machinery.shards import Manifest
from preparation import sources
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sources: notes of one line each, and long files, which are cut."""
    folder = tmp_path_factory.mktemp("show")
    for name in ("notes", "long"):
        (folder / name).mkdir()
    for i in range(200):
        (folder / "notes" / f"{i}.txt").write_text(f"Note {i}: the fox has {i * 7} hens é.\n")
    for i in range(8):
        text = "".join(f"Line {k} of file {i}, with número {k * i}.\n" for k in range(60))
        (folder / "long" / f"{i}.md").write_text(text)
    options = "--vocab_size 400 --row_len 65 --val_fraction 0.2 --workers 1".split()
    options += ["--source", *(f"files:{folder / name}" for name in ("notes", "long"))]
    done = in_process("tiny", *options, "--data_dir", folder / "data")
    assert done.returncode == 0, done.stderr
    return folder


def shown(capsys, folders, *args) -> str:
    capsys.readouterr()
    argv = ["show", "--data_dir", folders / "data", *args]
    assert prepare_data.main([str(a) for a in argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_row_is_its_documents_and_each_is_in_the_file_that_is_named(folders, split, capsys):
    manifest = Manifest.load(folders / "data")
    tokenizer = Tokenizer.load(folders / "data" / "tokenizer.json")
    sources_of = range(len(manifest.sources))
    rows = [(s, r) for s in sources_of for r in range(manifest.rows(split, s))]
    named = set()
    assert len(rows) == manifest.rows(split) > 3
    for n in range(0, len(rows), max(1, len(rows) // 6)):
        source, row = rows[n]
        out = shown(capsys, folders, "--row", n, "--split", split)
        shard, within = manifest.locate(split, source, row)
        assert f"{folders / 'data' / shard['file']}, row {within}," in out
        ids, name = manifest.row(split, source, row).tolist(), manifest.sources[source]
        _, *parts = re.split(r"\n\n---- BOS, document \d+: (.*)\n", out[:-1])
        heads, texts = parts[::2], parts[1::2]
        assert len(texts) == ids.count(manifest.bos_id)
        assert sum(int(head.split()[0]) for head in heads) == 65
        plain = tokenizer.decode(i for i in ids if i != manifest.bos_id)
        assert "".join(texts).replace("\n", "") == plain.replace("\n", "")
        for head, text in zip(heads, texts):
            if text:
                where = re.search(r", (\S+\.\w+), (?:whole|characters ([\d,]+) to)", head)
                file, begin = where.groups("0")
                rest = (folders / name / file).read_text()[int(begin.replace(",", "")) :]
                assert rest.startswith(text.strip("\ufffd")[:20].rstrip("\n"))
                named.add(file)
    assert len(named) > 3


def test_mistakes_name_the_value(folders, tmp_path):
    data = ["--data_dir", str(folders / "data")]
    for args, value in (
        ([*data, "--row", "100000"], "100000"),
        ([*data, "--find", "no such text"], "'no such text'"),
        (["tyni"], "tiny"),
        (["--data_dir", str(tmp_path)], str(tmp_path)),
    ):
        with pytest.raises(UsageError, match=value):
            prepare_data.main(["show", *args])


def test_conversations_are_shown_with_their_roles_and_files(tmp_path, capsys):
    turns = [("user", "How many hens has {}?"), ("assistant", "The fox has {} hens.")]
    for i in range(4):
        lines = [
            json.dumps({"messages": [dict(role=r, content=t.format(k)) for r, t in turns]})
            for k in range(100 * i, 100 * i + 100)
        ]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines))
    options = "--vocab_size 300 --row_len 65 --val_fraction 0.2 --workers 1".split()
    source = ["--source", f"files:{tmp_path}#messages", "--data_dir", str(tmp_path / "data")]
    assert prepare_data.main(["tiny", *options, *source]) == 0
    capsys.readouterr()
    argv = ["show", "--data_dir", str(tmp_path / "data"), "--find", "The fox has 123 hens."]
    assert prepare_data.main(argv) == 0
    out = capsys.readouterr().out
    whole = "<|user|>How many hens has 123?<|end|><|assistant|>The fox has 123 hens.<|end|>"
    assert re.search(rf", 1\.jsonl, whole\n{re.escape(whole)}", out), out


def test_a_text_that_has_changed_or_gone_is_told(folders, capsys, monkeypatch):
    other = folders / "other.txt"
    other.write_text("Something else altogether.")
    files = {f"{i}.txt": other for i in range(200)}
    monkeypatch.setattr(sources, "local_files", lambda source: files)
    assert "not found in the text as it is now" in shown(capsys, folders, "--row", 0)
    monkeypatch.undo()
    monkeypatch.setattr(sources, "local_files", mock.Mock(side_effect=UsageError("gone")))
    assert "not known: gone" in shown(capsys, folders, "--row", 0)
