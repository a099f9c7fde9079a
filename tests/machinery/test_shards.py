"""shards.py: a manifest, whoever wrote it, is refused by the field that is wrong, and leads to no
file outside its folder. What rows and loaders do is in test_data.py."""

import os
from pathlib import Path

import pytest
from conftest import flip, losses, read_json
from data_helpers import manifest_of, write_manifest
from faults import start

from data import order_of
from machinery.errors import DataError
from machinery.shards import Manifest


def edit(folder: Path, place: tuple, value):
    """Another value, and the fingerprint that fits it."""
    at = tree = manifest_of(folder)
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    write_manifest(folder, tree)


FIRST = "splits", "train", "a", "shards", 0


@pytest.mark.parametrize("key", ["file", "crc32_file"])
@pytest.mark.parametrize("name", ["../x.npy", "{tmp}/x.npy", "link/x.npy"])
def test_a_name_stays_in_the_folder(key, name, manifest, tmp_path):
    """The file that it leads to is a shard, whole and as the manifest says: that is no excuse."""
    shard = manifest.all_shards()[0]
    (tmp_path / "x.npy").write_bytes((manifest.dir / getattr(shard, key)).read_bytes())
    (manifest.dir / "link").symlink_to(tmp_path)
    edit(manifest.dir, (*FIRST, key), name.format(tmp=tmp_path))
    for work in (Manifest.check, Manifest.verify, lambda forged: forged.row("train", 0, 0)):
        with pytest.raises(DataError):
            work(Manifest.load(manifest.dir))


@pytest.mark.parametrize("how", ["a link", "a pipe", "longer"])  # others: test_disk.py
def test_only_a_regular_file_of_the_right_size_is_a_shard(how, manifest, tmp_path):
    path = manifest.dir / manifest.all_shards()[0].file
    path.rename(tmp_path / "whole")
    if how == "a link":
        path.symlink_to(tmp_path / "whole")
    elif how == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes((tmp_path / "whole").read_bytes() + b"x")
    for work in (manifest.check, manifest.verify, lambda: manifest.row("train", 0, 0)):
        with pytest.raises(DataError, match=path.name):
            work()


def test_verify_reads_every_byte(manifest):
    for name in ("file", "crc32_file"):
        path = manifest.dir / getattr(manifest.all_shards()[-1], name)
        flip(path, at=-1)
        manifest.check()
        with pytest.raises(DataError, match=path.name):
            manifest.verify()
        flip(path, at=-1)
    manifest.verify()


# ------------------------------------------------------------------------------- what a run says
@pytest.mark.parametrize("world, position", [(1, 20), (2, 37)])
def test_a_flipped_byte_is_found_before_its_row_is_trained_on(world, position, own_data, tmp_path):
    """One bit of the row at that position of the run, which its 8 rows a step reach in time."""
    manifest = Manifest.load(own_data)
    order = order_of(manifest)
    shard, row = manifest.locate("train", *order(position))
    file = shard.file
    flip(own_data / file, 128 + row * 2 * manifest.row_len + 70)
    text = start(own_data, tmp_path / "run", world=world).end()
    assert f"{file} is damaged: row {row} " in text
    assert world > 1 or "Traceback" not in text  # the other rank loses its partner
    assert all(step <= position // 8 for step in losses(tmp_path / "run"))
    status = read_json(tmp_path / "run" / "status.json")
    assert status["state"] == "failed" and (world > 1 or status["exit_code"] == 3)


def test_the_last_token_of_the_vocabulary_may_occur_and_the_next_may_not(small_data):
    manifest = Manifest.load(small_data)
    manifest.vocab_size = max(shard.max for shard in manifest.all_shards())
    with pytest.raises(DataError, match=f"token {manifest.vocab_size}"):
        manifest.check()
    manifest.vocab_size += 1
    manifest.check()
