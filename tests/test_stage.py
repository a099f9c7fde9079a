"""instruments/stage.py: a copy that is verified, made once, and whole or not there."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import flip
from data_helpers import make_folder

from instruments import stage
from machinery.errors import DataError


@pytest.fixture
def manifest(tmp_path):
    return make_folder(tmp_path / "d", {"train": {"a": 50, "b": 30}, "val": {"a": 3, "b": 2}})


def test_stage_copies_verifies_and_does_not_copy_twice(manifest, tmp_path):
    staged = stage.copy(manifest, tmp_path / "fast")
    assert staged.fingerprint == manifest.fingerprint and staged.dir != manifest.dir
    staged.check()
    staged.verify()
    files = {
        s["file"]: (staged.dir / s["file"]).stat().st_mtime_ns
        for s in staged.all_shards(("train",))
    }
    flip(staged.dir / staged.all_shards(("train",))[0]["file"])  # a damaged copy is replaced
    again = stage.copy(manifest, tmp_path / "fast")
    again.verify()
    times = {f: (again.dir / f).stat().st_mtime_ns for f in files}
    assert sum(times[f] != files[f] for f in files) == 1
    assert not list(again.dir.rglob("*.tmp-*"))


def test_stage_refuses_a_damaged_source(manifest, tmp_path):
    flip(manifest.dir / manifest.all_shards()[0]["file"])
    with pytest.raises(DataError, match="damaged"):
        stage.copy(manifest, tmp_path / "fast")
    assert not list((tmp_path / "fast").rglob("manifest.json"))
