"""A folder from a stranger: opening it must not run the stranger's code.

Hashes are no help, as the stranger wrote them too: each test makes them right again.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from test_checkpoint import build
from test_damages import FILES, copy, ends, find, whole  # noqa: F401 (a fixture)

from hf import mapping
from machinery import checkpoint, shards
from machinery.errors import CheckpointError


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def saved(tmp_path):
    model, optimizers = build()
    checkpointer = checkpoint.Checkpointer(tmp_path / "checkpoints", log=lambda text: None)
    checkpointer.save(1, model, optimizers, {}, wait=True)
    return tmp_path / "checkpoints" / "step_00000001"


def spoil(path, content: bytes):
    """Replace DCP's metadata, and its hash in the MANIFEST, as a stranger would."""
    (path / "dcp" / ".metadata").write_bytes(content)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"]["dcp/.metadata"] = hashlib.sha256(content).hexdigest()
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


def test_the_metadata_of_a_checkpoint_cannot_run_code(saved, tmp_path):
    spoil(saved, pickle.dumps(Payload(tmp_path / "ran")))
    for load in (
        lambda: checkpoint.load_model(saved, build()[0]),
        lambda: checkpoint.Checkpointer(saved.parent, log=lambda text: None).resume(*build()),
    ):
        with pytest.raises(CheckpointError, match="posix.mkdir is no part of a checkpoint"):
            load()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps(5), pickle.dumps({})])
def test_metadata_that_is_something_else_is_one_sentence(saved, content):
    spoil(saved, content)
    with pytest.raises(CheckpointError, match="metadata cannot be used"):
        checkpoint.load_model(saved, build()[0])


def test_what_a_checkpoint_needs_is_allowed(saved):
    model, _ = build(seed=1)
    checkpoint.load_model(saved, model)
    assert all((a == b).all() for a, b in zip(model.parameters(), build()[0].parameters()))


# ------------------------------------------------- every file that any program opens

MODULE = "import os\nos.mkdir({!r})\n"  # as a modelling file, or any other


def as_torch(payload) -> bytes:
    torch.save({"weight": payload}, file := io.BytesIO())
    return file.getvalue()


def as_numpy(payload) -> bytes:
    np.save(file := io.BytesIO(), np.array([payload], object), allow_pickle=True)
    return file.getvalue()


FORMS = {
    "a pickle": pickle.dumps,
    "a pickle of torch": as_torch,
    "an array of objects": as_numpy,
    "a module": lambda payload: MODULE.format(str(payload.path)).encode(),
}
PLANTED = {**FILES, "export/modeling_nano2049.py": ["export's loss", "export's sample"]}


def rehash(folder: Path, path: Path) -> None:
    """Let the hashes that the folder keeps say that `path` is as it should be."""
    content = path.read_bytes()
    facts, size = hashlib.sha256(content).hexdigest(), len(content)
    if "step_" in str(path) and path.name != "MANIFEST.json":
        step = next(p for p in path.parents if p.name.startswith("step_"))
        tree = json.loads((step / "MANIFEST.json").read_text())
        tree["files"][str(path.relative_to(step))] = facts
        (step / "MANIFEST.json").write_text(json.dumps(tree))
    elif path.is_relative_to(folder / "data") and path.name != "manifest.json":
        tree = json.loads((folder / "data/manifest.json").read_text())
        text = json.dumps(tree)
        for split in tree["splits"].values():
            for shard in (shard for source in split.values() for shard in source["shards"]):
                for key in ("", "crc32_"):
                    if path == folder / "data" / shard[f"{key}file"]:
                        shard |= {f"{key}bytes": size, f"{key}sha256": facts}
        if path.name == "tokenizer.json":
            tree["tokenizer"]["sha256"] = facts
        tree["fingerprint"] = shards.fingerprint(tree)
        (folder / "data/manifest.json").write_text(json.dumps(tree))
        assert json.dumps(tree) != text or ".units" in str(path)
    elif path.is_relative_to(folder / "export") and path.name != "config.json":
        tree = json.loads((folder / "export/config.json").read_text())
        tree["nano2049"]["files"][path.name] = facts
        tree["nano2049"]["fingerprint"] = mapping.fingerprint(tree)
        (folder / "export/config.json").write_text(json.dumps(tree))


@pytest.mark.parametrize("file", PLANTED)
def test_no_file_that_a_program_opens_runs_code(file, whole, tmp_path):  # noqa: F811
    ran, opened = tmp_path / "ran", 0
    for form in FORMS.values():
        for program in PLANTED[file]:
            folder = Path(tempfile.mkdtemp(prefix="planted"))
            try:
                copy(whole, folder)
                path = find(folder, file)
                path.write_bytes(form(Payload(ran)))
                rehash(folder, path)
                ends(program, folder)
                opened += 1
            except Exception:
                opened += 1  # how it ends is test_damages.py's concern; here, it may not run
            finally:
                shutil.rmtree(folder)
            assert not ran.exists(), f"{program} ran what {file} holds"
    assert opened == len(FORMS) * len(PLANTED[file])


def test_the_payload_would_run(tmp_path):
    """In each form but the module's, by the loader that people use."""
    for load, form in (
        (pickle.loads, "a pickle"),
        (lambda raw: torch.load(io.BytesIO(raw), weights_only=False), "a pickle of torch"),
        (lambda raw: np.load(io.BytesIO(raw), allow_pickle=True), "an array of objects"),
        (lambda raw: exec(raw.decode()), "a module"),
    ):
        load(FORMS[form](Payload(tmp_path / form)))
        assert (tmp_path / form).exists()
