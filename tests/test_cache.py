"""cache.py: data in a real S3 server is, to the bit, the data in a folder; whatever is lost, cut or
damaged on the way is read again, and the disk holds no more than it may."""

import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import flip, losses
from data_helpers import make_folder
from faults import start
from store_helpers import error, until
from test_mirror import s3, server  # noqa: F401

import data
from config import UsageError
from machinery import cache
from machinery.errors import DataError, StorageError

SIZES = {"train": {"a": 300, "b": 40}, "val": {"a": 12, "b": 5}}


@pytest.fixture
def local(tmp_path):
    """A data folder of 9 training shards."""
    return make_folder(tmp_path / "d", SIZES, shard_rows=40)


@pytest.fixture
def far(local, s3, tmp_path):  # noqa: F811
    """How to open the same data, published: far(cache_gb)."""
    cache.publish(local, s3.url)
    return lambda gb=1.0: cache.open_manifest(s3.url, "tiny", tmp_path / "cache", gb)


def batches(manifest, kind=data.RowLoader, count=30, position=0):
    loader = kind(manifest, seed=3, micro_batch=8, position=position)
    found = [loader.next_batch()[0].numpy().copy() for _ in range(count)]
    loader.close()
    return np.stack(found)


def objects(tmp_path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in (tmp_path / "cache" / "objects").iterdir()}


def test_the_same_rows_in_the_same_order(local, far, tmp_path):
    """From the store, from the disk, after a loss of the cache, and from the middle."""
    expected = batches(local)
    manifest = far()
    manifest.check()
    assert manifest.fingerprint == local.fingerprint
    assert (batches(manifest, cache.Loader) == expected).all()
    until(lambda: len(objects(tmp_path)) == 2 * 9)
    again = far()
    assert (batches(again, cache.Loader) == expected).all()
    assert again.hits == again.asked > manifest.hits and "100% of " in again.hit_rate()
    assert (batches(far(), cache.Loader, 10, 160) == expected[20:]).all()
    for split, source, size in (("val", 0, 12), ("val", 1, 5)):
        for row in range(size):
            assert (again.row(split, source, row) == local.row(split, source, row)).all()
    assert again.tokenizer_file().read_bytes() == local.tokenizer_file().read_bytes()


def test_publishing_sends_each_object_once(local, far, s3, capsys):  # noqa: F811
    before = len(s3.requests)
    cache.publish(local, s3.url)
    puts = [r for r in s3.requests[before:] if r[0] == "PUT"]
    assert not puts and " 0.0 MB sent" in capsys.readouterr().out
    name = local.all_shards()[0]["sha256"]
    whole = s3.content(f"{s3.folder}/objects/{name}")
    s3.put(f"{s3.folder}/objects/{name}", whole[:-1] + b"x")  # of a publication that was killed
    s3.s3().delete_object(Bucket="runs", Key=f"{s3.folder}/manifest.json")
    cache.publish(local, s3.url)
    assert s3.content(f"{s3.folder}/objects/{name}") == whole
    flip(local.dir / local.all_shards()[1]["file"])
    with pytest.raises(StorageError, match="was sent, but has sha256"):
        cache.publish(local, f"{s3.url}/other")
    assert not [key for key in s3.keys(f"{s3.folder}/other") if key.endswith("manifest.json")]


def test_the_disk_holds_no_more_than_it_may(local, far, tmp_path):
    """With room for a third of the data, the rest is read row by row; shards of other data go
    first, the oldest before the others."""
    expected, of_all = batches(local), sum(s["bytes"] for s in local.all_shards(("train",)))
    room = of_all / 3
    manifest = far(room / 1e9)
    folder = tmp_path / "cache" / "objects"
    for k in range(4):
        (folder / f"{k:064x}").write_bytes(bytes(int(room / 5)))
        time.sleep(0.01)
    peak = []
    honest = manifest.store.fetch

    def fetch(name, file, sha256=""):
        honest(name, file, sha256)
        with suppress(FileNotFoundError):  # renamed in the other thread
            peak.append(sum(p.stat().st_size for p in folder.iterdir()))

    manifest.store.fetch = fetch
    assert (batches(manifest, cache.Loader) == expected).all()
    time.sleep(0.3)  # for the thread that fills the cache
    crcs = sum(s["crc32_bytes"] for s in local.all_shards(("train",)))
    assert max(peak) <= room + crcs + 1, "the checksums of all shards are kept whatever the room"
    assert f"{0:064x}" not in objects(tmp_path)
    assert 0.05 < manifest.hits / manifest.asked < 0.6


@pytest.mark.parametrize("how", ["cut", "flipped", "gone", "a folder"])
def test_a_damaged_cache_is_fetched_again(how, local, far, tmp_path):
    expected = batches(local)
    first = far()
    batches(first, cache.Loader)
    until(lambda: len(objects(tmp_path)) == 2 * 9)
    for path in list((tmp_path / "cache" / "objects").iterdir())[::2]:
        size = path.stat().st_size
        if how == "flipped":
            flip(path, at=size // 2)
        elif how == "cut":
            path.write_bytes(path.read_bytes()[: size // 2])
        else:
            path.unlink()
            if how == "a folder":
                path.mkdir()
    assert (batches(far(), cache.Loader) == expected).all()


def test_a_store_that_flips_cuts_or_fails(local, far, s3, monkeypatch):  # noqa: F811
    """A row that comes damaged once is read again; one that is damaged for good ends the run with
    its object's name, as does a store that has gone."""
    expected, count = batches(local, count=4), [0]

    def flips_now_and_then(method, path, body, answer):
        status, headers, content = answer(body)
        count[0] += 1
        if method == "GET" and "/objects/" in path and count[0] % 20 == 0 and len(content) > 3:
            content = bytes([content[0] ^ 1]) + content[1:]
        return status, headers, content

    s3.spoil = flips_now_and_then
    assert (batches(far(0.0), cache.Loader, 4) == expected).all()
    s3.spoil = None
    for shard in local.all_shards(("train",)):
        key = f"{s3.folder}/objects/{shard['sha256']}"
        content = s3.content(key)
        s3.put(key, content[:128] + bytes(len(content) - 128))
    with pytest.raises(DataError, match=r"s3://runs/.*/objects/\w+ is damaged: row \d+ does not"):
        batches(far(0.0), cache.Loader, 1)
    manifest = far(0.0)
    monkeypatch.setattr(cache, "PAUSES_S", (0.1,))
    s3.spoil = lambda *_: error("500 Internal Server Error", "InternalError")
    with pytest.raises(StorageError, match="cannot be read"):
        batches(manifest, cache.Loader, 1)


def test_data_that_is_not_there_is_named(s3, tmp_path):  # noqa: F811
    words = rf"{s3.url}/manifest.json does not exist; run: python prepare_data.py tiny --publish"
    with pytest.raises(UsageError, match=words):
        cache.open_manifest(s3.url, "tiny", tmp_path / "cache", 1.0)
    s3.put(f"{s3.folder}/manifest.json", b"{}")
    with pytest.raises(DataError, match="manifest.json"):
        cache.open_manifest(s3.url, "tiny", tmp_path / "cache", 1.0)


def test_training_from_the_store_is_training_from_the_disk(small_data, tmp_path, s3):  # noqa: F811
    """And the cache is lost while the run is stopped."""
    from machinery.shards import Manifest

    cache.publish(Manifest.load(small_data), s3.url)
    start(small_data, tmp_path / "near" / "run", "--save_every", 4).end(0)
    options = ["--save_every", 4, "--stage", tmp_path / "cache"]
    cut = [("signal_at", 6, 15)]
    run = start(s3.url, tmp_path / "far" / "run", *options, spoil=cut, env=s3.env())
    text = run.end(143)
    assert "shards are in" in text
    shutil.rmtree(tmp_path / "cache")
    text = start(s3.url, tmp_path / "far" / "run", *options, env=s3.env()).end(0)
    near, far_away = losses(tmp_path / "near" / "run"), losses(tmp_path / "far" / "run")
    assert near == far_away
    assert f"data from {s3.url}: " in text and "rows were on the disk when they were needed" in text
