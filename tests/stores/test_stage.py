"""stage.py: a copy of data that is verified, made once, and whole or not there; out of a folder or
a real S3 server, where it was published."""

from pathlib import Path

import pytest
from conftest import flip, look
from faults import start
from plans import small_world
from store_helpers import s3  # noqa: F401
from test_shards import FIRST, edit

from config import UsageError
from instruments.run import forecast
from machinery import cli, disk
from machinery.errors import DataError
from machinery.shards import Manifest
from stores import stage
from stores.store import Store


@pytest.fixture(params=["folder", "s3"])
def source(request, manifest):
    """Where the data is: in a slow folder, or published."""
    if request.param == "folder":
        return str(manifest.dir)
    far = request.getfixturevalue("s3").url
    stage.publish(manifest, far)
    return far


def test_a_copy_is_the_data_and_what_is_whole_is_not_copied_again(source, manifest, tmp_path):
    copy = Manifest.load(stage.copy(source, tmp_path / "fast"))
    assert copy.fingerprint == manifest.fingerprint and copy.dir != manifest.dir
    copy.verify()
    files = {copy.dir / name for shard in copy.all_shards() for name, _, _ in shard.files()}
    before = {file: file.stat().st_mtime_ns for file in files}
    damaged, lost = sorted(files)[:2]
    flip(damaged)
    lost.unlink()
    assert stage.copy(source, str(tmp_path / "fast")) == str(copy.dir)
    copy.verify()
    assert {f for f in files if f.stat().st_mtime_ns != before[f]} == {damaged, lost}
    assert not list(copy.dir.rglob(".tmp-*"))


def test_a_damaged_source_is_named_and_no_copy_counts(source, manifest, tmp_path):
    shard = manifest.all_shards()[0]
    name = f"objects/{shard.sha256}" if "://" in source else shard.file
    Store(source).write(name, b"other")
    with pytest.raises(DataError, match=shard.sha256):
        stage.copy(source, tmp_path / "fast")
    assert not list((tmp_path / "fast").rglob("manifest.json"))


def test_data_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=str(tmp_path)):
        stage.copy(str(tmp_path), tmp_path / "fast")


def test_publishing_sends_each_object_once_and_only_what_is_whole(s3, manifest, tmp_path):  # noqa: F811
    stage.publish(manifest, s3.url)
    before = len(s3.requests)
    stage.publish(manifest, s3.url)
    puts = [path for method, path in s3.requests[before:] if method == "PUT"]
    assert len(puts) == 1 and puts[0].endswith("/manifest.json")
    flip(manifest.dir / manifest.all_shards()[1].file)
    with pytest.raises(DataError):
        stage.publish(manifest, f"{s3.url}/other")
    assert Store(f"{s3.url}/other").read("manifest.json") is None


def test_a_stranger_s_manifest_writes_and_reads_nothing_else(manifest, tmp_path):
    """By an absolute name; other ways out of a folder: test_disk.py."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"three years of work")
    named = dict(file=str(victim), bytes=19, sha256=disk.sha256_of(victim))
    edit(manifest.dir, FIRST, vars(manifest.all_shards()[0]) | named)
    with pytest.raises(DataError, match="victim"):
        stage.copy(str(manifest.dir), tmp_path / "fast")
    with pytest.raises(DataError, match="victim"):
        stage.publish(Manifest.load(manifest.dir), str(tmp_path / "far"))
    assert victim.read_bytes() == b"three years of work"
    assert not list(tmp_path.glob("fast/*/manifest.json"))


def test_a_folder_that_was_published_is_read_as_a_url_is(
    own_run, small_data, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    stage.publish(Manifest.load(small_data), f"file://{tmp_path}/far")
    forecast.print_plan(
        cli.parse("train.py", "train", ["tiny", "--data_dir", "far"]), small_world()
    )
    assert not (tmp_path / "data").exists()  # a plan copies nothing
    assert Path(stage.once_per_node("far", "near", small_world())).parent == Path("near")
    look(capsys, "loss", own_run, "--device", "cpu", "--rows", 2, "--data_dir", "far")


def test_an_error_of_the_copy_ends_every_rank(small_data, run_dir, s3):  # noqa: F811
    start(s3.url, run_dir, world=2, env=s3.env()).end(2)
