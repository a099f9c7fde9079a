"""machinery/trained.py: a model by one word, and what a stranger's run may not do.

Hashes are no help against a stranger, who wrote them too: `forge` makes them right again."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import CPU, read_json
from test_checkpoint import rehash

import eval as evaluate
from config import UsageError
from machinery import checkpoint, shards, trained
from machinery.errors import CheckpointError, DataError, NonFiniteError
from machinery.trained import EvalConfig
from stores import stage


def forge(run: Path, change):
    """change(the tree of trainer.json) in each checkpoint."""
    for path in checkpoint.checkpoints(run / "checkpoints"):
        tree = read_json(path / "trainer.json")
        change(tree)
        rehash(path, **{"trainer.json": json.dumps(tree).encode()})


def load(run: Path):
    return evaluate.load_model(EvalConfig(run_dir=str(run), device="cpu", dtype="fp32"))


def loss(run: Path, *options) -> int:
    return evaluate.main(["loss", str(run), *CPU, "--rows", "2", *map(str, options)])


def refused(error_type, work) -> str:
    with pytest.raises(error_type) as error:
        work()
    return str(error.value)


# ---------------------------------------------------------------------------- by one word
def test_the_forms_of_a_model(trained_run, tmp_path, monkeypatch):
    path = checkpoint.checkpoints(trained_run / "checkpoints")[0]
    assert trained.find_model(str(trained_run)) == dict(run_dir=str(trained_run))
    assert trained.find_model(str(path)) == dict(checkpoint=str(path))
    assert trained.find_model("hf:me/mine") == dict(checkpoint="hf:me/mine")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_run, "runs/mine")
    (tmp_path / "tiny").mkdir()  # a preset's name goes first
    for word, folder in (("mine", "runs/mine"), ("runs/mine", "runs/mine"), ("tiny", "runs/tiny")):
        assert trained.find_model(word) == dict(run_dir=folder)
    shutil.copytree(trained_run, "mine")  # a path goes before a name in runs/
    assert trained.find_model("mine") == dict(run_dir="mine")
    for word in ("other", "runs/other"):
        with pytest.raises(UsageError, match=f"'{word}' .*; .*runs has mine; to train one"):
            trained.find_model(word)
    assert trained.run_of(path) == trained_run  # and of a copy in a mirror:
    assert trained.run_of(tmp_path / "mirror" / "run" / path.name) == tmp_path / "mirror" / "run"
    loaded = load(trained_run)
    assert loaded.provenance.step == 12 and loaded.path == path and not loaded.model.training
    shutil.copytree(path, tmp_path / "moved")  # under any name
    config = EvalConfig(checkpoint=str(tmp_path / "moved"), device="cpu")
    assert evaluate.load_model(config).provenance.step == 12


# ----------------------------------------------------------------------------- strangers
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "reference::http://127.0.0.1:9/x"])
def test_a_url_in_a_record_is_not_opened(url, own_run, tmp_path, monkeypatch):
    tried = []

    def connect(socket, address):
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.chdir(tmp_path)  # where data/cache would be
    forge(own_run, lambda tree: tree.update(data_dir=url))
    assert url in refused(UsageError, lambda: loss(own_run))
    (own_run / "tokenizer.json").unlink()  # then its data's
    refused(UsageError, lambda: evaluate.main(["sample", str(own_run), *CPU, "--prompt", "a"]))
    assert ("127.0.0.1", 9) not in tried  # a thread of another test may have its own


def test_a_copy_of_data_fetched_before_is_used(own_run, small_data, tmp_path, monkeypatch):
    fingerprint = shards.Manifest.load(small_data).fingerprint
    forge(own_run, lambda tree: tree.update(data_dir="s3://theirs/data"))
    monkeypatch.chdir(tmp_path)
    refused(UsageError, lambda: loss(own_run))
    shutil.copytree(small_data, tmp_path / "data" / "cache" / fingerprint[:16])
    assert loss(own_run) == 0
    outside = shutil.copytree(small_data, tmp_path / "outside")
    forge(own_run, lambda tree: tree["identity"].update(data_fingerprint="../../outside"))
    assert (outside / "manifest.json").exists()
    refused(DataError, lambda: loss(own_run))


def test_a_record_that_names_no_tokenizer_goes_with_no_data(own_run):
    forge(own_run, lambda tree: tree["identity"].pop("tokenizer_sha256"))
    assert "different tokenizer" in refused(UsageError, lambda: loss(own_run))


def test_a_url_that_was_typed_is_fetched(own_run, small_data, monkeypatch):
    asked = []
    monkeypatch.setattr(stage, "copy", lambda *a: asked.append(a) or str(small_data))
    assert loss(own_run, "--data_dir", "s3://mine/data") == 0
    assert asked == [("s3://mine/data",)]


@pytest.mark.parametrize("name", ["2026-11-26T10:00", "a::b", "file:x"])
def test_a_folder_may_have_a_colon(name, own_run, small_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where data/cache would be
    folder = shutil.copytree(small_data, tmp_path / name)
    forge(own_run, lambda tree: tree.update(data_dir=str(folder)))
    assert loss(own_run) == 0
    assert loss(own_run, "--data_dir", folder) == 0 and not Path("data").exists()


def test_an_architecture_is_one_that_is_computed_here(own_run):
    """Its fields fit each other; others: test_formats.py."""
    forge(own_run, lambda tree: tree["model"].update(n_head=3))
    assert "n_head" in refused(CheckpointError, lambda: load(own_run))


def test_no_memory_is_taken_for_a_size_that_the_tensors_do_not_have(own_run, monkeypatch):
    sizes = dict(n_embd=1 << 20, mlp_hidden=1 << 20, n_layer=256)
    forge(own_run, lambda tree: tree["model"].update(sizes))
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *a, **k: pytest.fail("allocated"))
    refused(CheckpointError, lambda: load(own_run))


def test_weights_that_are_not_finite_are_refused(own_run):
    """Infinity as well: test_checkpoint.py."""
    path = checkpoint.checkpoints(own_run / "checkpoints")[0]
    (file,) = path.glob("dcp/*")
    with safetensors.safe_open(file, "pt") as f:
        metadata = f.metadata()
    tensors = safetensors.torch.load_file(file)
    tensors["model.embed.weight"][3, 3] = float("nan")
    rehash(path, **{f"dcp/{file.name}": safetensors.torch.save(tensors, metadata)})
    assert "embed.weight" in refused(NonFiniteError, lambda: load(own_run))


@pytest.mark.parametrize("form", ["/etc/passwd", "pipe", "/dev/zero"])
def test_a_tokenizer_that_is_no_regular_file(own_run, form):
    """It is not read: not for ever, nor from elsewhere; the data's is used instead."""
    file = own_run / "tokenizer.json"
    file.unlink()
    os.mkfifo(file) if form == "pipe" else file.symlink_to(form)
    assert load(own_run).tokenizer.vocab_size == 512
