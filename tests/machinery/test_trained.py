"""machinery/trained.py: a model by one word, and what a stranger's run may not do.

Hashes are no help against a stranger, who wrote them too: `forge` makes them right again."""

import hashlib
import json
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from faults import start

import eval as evaluate
from config import UsageError
from machinery import checkpoint, cli, shards, trained
from machinery.errors import CheckpointError, NonFiniteError
from machinery.trained import EvalConfig

CPU = ["--device", "cpu", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def whole(small_data, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    start(small_data, run_dir, "--steps", 4, "--warmup", 1).end(0)
    return run_dir


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def rehash(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


def forge(run: Path, change) -> Path:
    """change(the tree of trainer.json) in each checkpoint; returns the newest."""
    for path in checkpoint.checkpoints(run / "checkpoints"):
        tree = json.loads((path / "trainer.json").read_text())
        change(tree)
        rehash(path, "trainer.json", json.dumps(tree).encode())
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


def test_the_forms_of_a_model(whole, tmp_path, monkeypatch):
    path = checkpoint.checkpoints(whole / "checkpoints")[0]
    assert trained.find_model("d16") == dict(run_dir="runs/d16")
    assert trained.find_model(str(whole)) == dict(run_dir=str(whole))
    assert trained.find_model(str(path)) == dict(checkpoint=str(path))
    assert trained.find_model("hf:me/mine") == dict(checkpoint="hf:me/mine")
    assert "nowhere" in refused(UsageError, lambda: trained.find_model("nowhere"))
    assert trained.run_of(path) == whole  # and of a copy in a mirror:
    assert trained.run_of(tmp_path / "mirror" / "run" / path.name) == tmp_path / "mirror" / "run"
    model, trainer = load(whole)
    assert trainer["step"] == 4 and trainer["path"] == str(path) and not model.training
    shutil.copytree(path, tmp_path / "moved")  # under any name
    config = EvalConfig(checkpoint=str(tmp_path / "moved"), device="cpu")
    assert evaluate.load_model(config)[1]["step"] == 4


def test_a_record_of_the_figures(run, capsys):
    assert loss(run) == 0
    (line,) = [json.loads(text) for text in (run / "eval.jsonl").read_text().splitlines()]
    assert line["step"] == 4 and line["val_bpb"] > 0 and line["run_dir"] == str(run)


def test_a_link_in_the_place_of_the_record_is_not_followed(run, tmp_path, capsys):
    """Another's run could so make eval.py append lines to a file of yours."""
    mine = tmp_path / "bashrc"
    mine.write_text("mine\n")
    for target in (mine, tmp_path / "new"):
        (run / "eval.jsonl").unlink(missing_ok=True)
        (run / "eval.jsonl").symlink_to(target)
        assert loss(run) == 0
        assert str(run / "eval.jsonl") in capsys.readouterr().err
    assert mine.read_text() == "mine\n" and not (tmp_path / "new").exists()


# ----------------------------------------------------------------------------- strangers


@pytest.fixture
def listener():
    """A port of this machine, and the connections that were opened to it."""
    server, seen = socket.create_server(("127.0.0.1", 0)), []

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            seen.append(connection.recv(1000))
            connection.close()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1], seen
    server.close()


@pytest.mark.parametrize("form", ["http://127.0.0.1:{}/x", "reference::http://127.0.0.1:{}/x"])
def test_a_url_in_a_record_is_not_opened(form, run, listener, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where data/cache would be
    port, seen = listener
    url = form.format(port)
    forge(run, lambda tree: tree.update(data_dir=url))
    assert url in refused(UsageError, lambda: loss(run))
    (run / "tokenizer.json").unlink()  # then its data's
    refused(UsageError, lambda: evaluate.main(["sample", str(run), *CPU, "--prompt", "a"]))
    assert not seen


def test_a_copy_of_the_data_that_was_fetched_before_is_used(run, small_data, tmp_path, monkeypatch):
    fingerprint = shards.Manifest.load(small_data).fingerprint
    forge(run, lambda tree: tree.update(data_dir="s3://theirs/data"))
    monkeypatch.chdir(tmp_path)
    refused(UsageError, lambda: loss(run))
    shutil.copytree(small_data, tmp_path / "data" / "cache" / fingerprint[:16])
    assert loss(run) == 0
    outside = shutil.copytree(small_data, tmp_path / "outside")
    forge(run, lambda tree: tree["identity"].update(data_fingerprint="../../outside"))
    assert (outside / "manifest.json").exists()
    with pytest.raises(Exception) as error:
        loss(run)
    assert cli.exit_code(error.value) == 3


def test_a_url_that_was_typed_is_fetched(run, small_data, monkeypatch):
    asked = []
    stage = type("stage", (), dict(copy=lambda *a: asked.append(a) or str(small_data)))
    monkeypatch.setitem(__import__("sys").modules, "machinery.stage", stage)
    monkeypatch.setattr("machinery.stage", stage, raising=False)
    assert loss(run, "--data_dir", "s3://mine/data") == 0
    assert asked == [("s3://mine/data", trained.CACHE)]


@pytest.mark.parametrize(
    "field, value",
    [("step", "<img src=x>"), ("step", [1]), ("tokens", None), ("identity", None), ("model", [])],
)
def test_a_record_has_the_right_types(run, field, value):
    path = forge(run, lambda tree: tree.update({field: value}))
    assert str(path) in refused(
        CheckpointError, lambda: evaluate.load_model(EvalConfig(checkpoint=str(path), device="cpu"))
    )


@pytest.mark.parametrize("field", ["step", "tokens", "identity", "model"])
def test_a_record_is_complete(run, field):
    forge(run, lambda tree: tree.pop(field))
    assert field in refused(CheckpointError, lambda: load(run))


@pytest.mark.parametrize(
    "field, value", [("n_layer", "4"), ("qk_norm", 1), ("extras", [3]), ("extras", "ab")]
)
def test_an_architecture_has_the_right_types(run, field, value):
    forge(run, lambda tree: tree["model"].update({field: value}))
    assert field in refused(CheckpointError, lambda: load(run))


def test_what_a_record_may_not_bring_along(run):
    """Keys by which an export's reader hands over objects; files would name another tokenizer."""
    forge(run, lambda tree: tree.update(tokenizer={}, about="<b>", path="/", files={"a": 1}))
    _, trainer = load(run)
    assert trainer.keys() == checkpoint.RECORD.keys() | {"path"}


def test_no_memory_is_taken_for_a_size_that_the_tensors_do_not_have(run, monkeypatch):
    sizes = dict(n_embd=1 << 20, mlp_hidden=1 << 20, n_layer=256)
    forge(run, lambda tree: tree["model"].update(sizes))
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *a, **k: pytest.fail("allocated"))
    refused(CheckpointError, lambda: load(run))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(run, value):
    path = checkpoint.checkpoints(run / "checkpoints")[0]
    (file,) = path.glob("dcp/*")
    with safetensors.safe_open(file, "pt") as f:
        metadata = f.metadata()
    tensors = safetensors.torch.load_file(file)
    tensors["model.embed.weight"][3, 3] = value
    rehash(path, f"dcp/{file.name}", safetensors.torch.save(tensors, metadata))
    assert "embed.weight" in refused(NonFiniteError, lambda: load(run))


@pytest.mark.parametrize("form", ["link", "pipe", "device"])
def test_a_tokenizer_that_is_no_regular_file(run, form):
    """It is not read: not for ever, nor from elsewhere; the data's is used instead."""
    file = run / "tokenizer.json"
    file.unlink()
    if form == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if form == "device" else "/etc/passwd")
    model, trainer = load(run)
    config = EvalConfig(run_dir=str(run))
    assert trained.open_tokenizer(config, trainer).vocab_size == 512
