"""A folder from a stranger: opening it must not run the stranger's code."""

import hashlib
import json
import os
import pickle

import pytest
from test_checkpoint import build

from machinery import checkpoint
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
