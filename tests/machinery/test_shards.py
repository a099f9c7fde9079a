"""shards.py: a manifest, whoever wrote it, is refused by the field that is wrong, and leads to no
file outside its folder. What rows and loaders do is in test_data.py."""

from pathlib import Path

import pytest
from conftest import flip
from data_helpers import manifest_of, write_manifest

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
@pytest.mark.parametrize("name", ["../x.npy", "link/x.npy"])
def test_a_name_stays_in_the_folder(key, name, manifest, tmp_path):
    """The file that it leads to is a shard, whole and as the manifest says: that is no excuse."""
    shard = manifest.all_shards()[0]
    (tmp_path / "x.npy").write_bytes((manifest.dir / getattr(shard, key)).read_bytes())
    (manifest.dir / "link").symlink_to(tmp_path)
    edit(manifest.dir, (*FIRST, key), name)
    for work in (Manifest.check, Manifest.verify, lambda forged: forged.row("train", 0, 0)):
        with pytest.raises(DataError):
            work(Manifest.load(manifest.dir))


def test_only_a_file_of_the_right_size_is_a_shard(manifest):
    """And only a regular one: test_disk.py."""
    path = manifest.dir / manifest.all_shards()[0].file
    with open(path, "ab") as file:
        file.write(b"x")
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


def test_the_last_token_of_the_vocabulary_may_occur_and_the_next_may_not(small_data):
    manifest = Manifest.load(small_data)
    manifest.vocab_size = max(shard.max for shard in manifest.all_shards())
    with pytest.raises(DataError, match=f"token {manifest.vocab_size}"):
        manifest.check()
    manifest.vocab_size += 1
    manifest.check()
