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
from test_checkpoint import rehash

import eval as evaluate
from config import UsageError
from machinery import checkpoint, cli, shards, trained
from machinery.errors import CheckpointError, NonFiniteError
from machinery.trained import EvalConfig
from stores import stage

CPU = ["--device", "cpu", "--dtype", "fp32"]


def forge(run: Path, change) -> Path:
    """change(the tree of trainer.json) in each checkpoint; returns the newest."""
    for path in checkpoint.checkpoints(run / "checkpoints"):
        tree = json.loads((path / "trainer.json").read_text())
        change(tree)
        rehash(path, **{"trainer.json": json.dumps(tree).encode()})
    return checkpoint.checkpoints(run / "checkpoints")[0]


def load(run: Path):
    return evaluate.load_model(EvalConfig(run_dir=str(run), device="cpu", dtype="fp32"))


def loss(run: Path, *options) -> int:
    return evaluate.main(["loss", str(run), *CPU, "--rows", "2", *map(str, options)])


def refused(error_type, work) -> str:
    with pytest.raises(error_type) as error:
        work()
    assert cli.exit_code(error.value) == error_type.exit_code
    return str(error.value)


# ---------------------------------------------------------------------------- by one word
def test_the_forms_of_a_model(trained_run, tmp_path, monkeypatch):
    path = checkpoint.checkpoints(trained_run / "checkpoints")[0]
    assert trained.find_model(str(trained_run)) == dict(run_dir=str(trained_run))
    assert trained.find_model(str(path)) == dict(checkpoint=str(path))
    assert trained.find_model("hf:me/mine") == dict(checkpoint="hf:me/mine")
    assert trained.run_of(path) == trained_run  # and of a copy in a mirror:
    assert trained.run_of(tmp_path / "mirror" / "run" / path.name) == tmp_path / "mirror" / "run"
    model, trainer = load(trained_run)
    assert trainer["step"] == 12 and trainer["path"] == str(path) and not model.training
    shutil.copytree(path, tmp_path / "moved")  # under any name
    config = EvalConfig(checkpoint=str(tmp_path / "moved"), device="cpu")
    assert evaluate.load_model(config)[1]["step"] == 12


# ----------------------------------------------------------------------------- strangers
@pytest.fixture
def connections(monkeypatch) -> list:
    tried = []

    def connect(socket, address):
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", connect)
    return tried


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "reference::http://127.0.0.1:9/x"])
def test_a_url_in_a_record_is_not_opened(url, own_run, connections, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where data/cache would be
    forge(own_run, lambda tree: tree.update(data_dir=url))
    assert url in refused(UsageError, lambda: loss(own_run))
    (own_run / "tokenizer.json").unlink()  # then its data's
    refused(UsageError, lambda: evaluate.main(["sample", str(own_run), *CPU, "--prompt", "a"]))
    assert ("127.0.0.1", 9) not in connections  # a thread of another test may have its own


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
    with pytest.raises(Exception) as error:
        loss(own_run)
    assert cli.exit_code(error.value) == 3


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


@pytest.mark.parametrize("field", ["step", "tokens", "identity", "model"])
def test_a_record_is_complete(own_run, field):
    forge(own_run, lambda tree: tree.pop(field))
    assert field in refused(CheckpointError, lambda: load(own_run))


@pytest.mark.parametrize(
    "field, value", [("n_layer", "4"), ("qk_norm", 1), ("extras", [3]), ("extras", "ab")]
)
def test_an_architecture_has_the_right_types(own_run, field, value):
    forge(own_run, lambda tree: tree["model"].update({field: value}))
    assert field in refused(CheckpointError, lambda: load(own_run))


def test_what_a_record_may_not_bring_along(own_run):
    """Keys by which an export's reader hands over objects, another tokenizer; an endless path."""
    forge(own_run, lambda tree: tree.update(tokenizer={}, about="<b>", path="/", files={"a": 1}))
    _, trainer = load(own_run)
    assert trainer.keys() == checkpoint.RECORD.keys() | {"path"}
    forge(own_run, lambda tree: tree.update(data_dir="x" * 4097))
    assert "data_dir" in refused(CheckpointError, lambda: load(own_run))


def test_no_memory_is_taken_for_a_size_that_the_tensors_do_not_have(own_run, monkeypatch):
    sizes = dict(n_embd=1 << 20, mlp_hidden=1 << 20, n_layer=256)
    forge(own_run, lambda tree: tree["model"].update(sizes))
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *a, **k: pytest.fail("allocated"))
    refused(CheckpointError, lambda: load(own_run))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(own_run, value):
    path = checkpoint.checkpoints(own_run / "checkpoints")[0]
    (file,) = path.glob("dcp/*")
    with safetensors.safe_open(file, "pt") as f:
        metadata = f.metadata()
    tensors = safetensors.torch.load_file(file)
    tensors["model.embed.weight"][3, 3] = value
    rehash(path, **{f"dcp/{file.name}": safetensors.torch.save(tensors, metadata)})
    assert "embed.weight" in refused(NonFiniteError, lambda: load(own_run))


@pytest.mark.parametrize("form", ["/etc/passwd", "pipe", "/dev/zero"])
def test_a_tokenizer_that_is_no_regular_file(own_run, form):
    """It is not read: not for ever, nor from elsewhere; the data's is used instead."""
    file = own_run / "tokenizer.json"
    file.unlink()
    os.mkfifo(file) if form == "pipe" else file.symlink_to(form)
    model, trainer = load(own_run)
    config = EvalConfig(run_dir=str(own_run))
    assert trained.open_tokenizer(config, trainer).vocab_size == 512
