"""Prepared data in a store: published once, and read as training needs it.

Writes URL/objects/SHA256, one object for each file of the data, named by its content and never
changed, and URL/manifest.json, last. Reads them into CACHE/objects, at most cache_gb.
A shuffled epoch wants a row of every shard within its first steps, so no shard can be waited for:
rows are read one by one, many at once, while whole shards arrive behind the training, after which
rows come from the disk. Guarantees: order, bits and resume are those of local data; every object
has its sha256 and every row its crc32, or it is read again, or the run stops. Next: shards.py.
"""

import contextlib
import fcntl
import os
import resource
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np

import data
from config import UsageError
from machinery import disk
from machinery.cli import public
from machinery.errors import CheckpointError, DataError, StorageError
from machinery.shards import Manifest, files_of
from machinery.store import Store

CACHE = "data/cache"
PAUSES_S = 5.0, 15.0, 60.0, 180.0  # that training waits for a store which fails


def open_manifest(
    data_dir: str, preset: str = "PRESET", folder: str = "", cache_gb: float = 0.0
) -> Manifest:
    """The data in a folder, or, with a cache in `folder`, behind a URL."""
    if "://" not in str(data_dir):
        return Manifest.load(data_dir, preset)
    store, cache = Store(data_dir), Path(folder or CACHE)
    if (text := store.read("manifest.json")) is None:
        raise UsageError(
            f"{store.url}/manifest.json does not exist; run: python prepare_data.py {preset} "
            f"--publish {store.url}"
        )
    own = cache / f"manifest_{zlib.crc32(text):08x}"
    with disk.writable(cache, "choose another --stage"), disk.replacing(own / "manifest.json") as f:
        f.write(text)
    manifest = CachedManifest.load(own)
    manifest.open_store(store, cache, cache_gb)
    return manifest


def publish(manifest: Manifest, url: str) -> None:
    """Send the data to a store, manifest.json last. What is there and whole is not sent again."""
    store, began, sent = Store(url), time.monotonic(), 0
    files = {
        sha256: (name, size) for s in manifest.all_shards() for name, size, sha256 in files_of(s)
    }
    tokenizer = manifest.tokenizer_file()
    files[manifest.tokenizer_sha256] = (tokenizer.name, tokenizer.stat().st_size)
    text, there = (manifest.dir / "manifest.json").read_bytes(), store.sizes("objects")
    published = store.read("manifest.json") == text  # then its objects have been read back
    for sha256, (name, size) in files.items():
        whole = there.get(sha256) == size and (
            published or store.sha256(f"objects/{sha256}") == sha256
        )
        if not whole:
            store.send(manifest.dir / name, f"objects/{sha256}", sha256)
            sent += size
    if not published:
        store.write("manifest.json", text)
    took_s = time.monotonic() - began
    print(f"{store.url}: {len(files):,} objects, {sent / 1e6:,.1f} MB sent in {took_s:.1f} s")


def waiting(work: Callable, *args):
    """work(*args), tried again for some minutes while the store fails."""
    for pause_s in (*PAUSES_S, None):
        try:
            return work(*args)
        except StorageError as error:
            if pause_s is None:
                raise
            print(f"warning: {error}; again in {pause_s:.0f} s", flush=True)
            time.sleep(pause_s)


class CachedManifest(Manifest):
    """The manifest of data in a store, whose rows are on the disk or come from there."""

    def open_store(self, store: Store, cache: Path, cache_gb: float) -> None:
        self.store, self.objects, self.most = store, cache / "objects", cache_gb * 1e9
        self.objects.mkdir(parents=True, exist_ok=True)
        self.asked = self.hits = 0  # rows of the training
        self._ready: dict[tuple, bytes] = {}  # (split, source, row) -> what `row` will return
        self._files: dict[str, int] = {}  # sha256 -> descriptor of a shard that is here
        self._allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._crcs = lru_cache(maxsize=20_000)(self._read_crcs)

    def check(self) -> None:
        """That tokens are in the vocabulary, and the tokenizer there; shards are checked as they
        come."""
        for shard in self.all_shards():
            if shard["max"] >= self.vocab_size:
                raise self._damaged(shard["sha256"], f"has token {shard['max']}")
        path = self.dir / "tokenizer.json"
        if not disk.has_sha256(path, self.tokenizer_sha256):
            self._fetch(self.tokenizer_sha256, path)

    def hit_rate(self) -> str:
        """How often a row of the training was on the disk when it was needed, in words."""
        share = self.hits / max(1, self.asked)
        return f"{share:.0%} of {self.asked:,} rows were on the disk when they were needed"

    def expect(self, split: str, places: list[tuple[int, int]]) -> None:
        """These rows, (source, row) each, are needed next: ask for those together that are not on
        the disk, and keep them for `row`. DataError for one that is damaged in the store too."""
        size, far = self.row_len * np.dtype(self.dtype).itemsize, {}
        for place in places:
            found = self.locate(split, *place)
            if (raw := self._local(*found, size)) is None:
                far[place] = found
            else:
                self._ready[(split, *place)] = raw
        if split == "train":
            self.asked, self.hits = self.asked + len(places), self.hits + len(places) - len(far)
        checksums = {shard["crc32_sha256"] for shard, _ in far.values()}
        with ThreadPoolExecutor(16) as pool:  # the first steps need those of every shard
            list(pool.map(lambda sha256: waiting(self._crcs, sha256), checksums))
        for again in (False, True):  # one that is damaged on its way is read a second time
            wanted = [(f"objects/{shard['sha256']}", 128 + i * size) for shard, i in far.values()]
            raws = waiting(self.store.ranges, wanted, size)
            for (place, found), raw in zip(list(far.items()), raws):
                if self._is_right(*found, raw):
                    self._ready[(split, *place)] = raw
                    del far[place]
                elif again:
                    how = f"is damaged: row {found[1]} does not match its crc32"
                    raise self._damaged(found[0]["sha256"], how)

    def row(self, split: str, source: int, row: int) -> np.ndarray:
        if split == "val":  # every validation reads them: whole, if there is room
            self._keep(self.locate(split, source, row)[0])
        if (split, source, row) not in self._ready:
            self.expect(split, [(source, row)])
        return np.frombuffer(self._ready.pop((split, source, row)), self.dtype)

    # ---------------------------------------------------------------------------- the disk

    def _local(self, shard: dict, i: int, size: int) -> bytes | None:
        """A row from the disk; None if its shard is not here, or not as it should be."""
        sha256 = shard["sha256"]
        if sha256 not in self._files:
            with contextlib.suppress(OSError):
                path = self.objects / sha256
                if path.stat().st_size != shard["bytes"]:
                    path.unlink()  # cut by a crash
                elif len(self._files) < self._allowed:
                    self._files[sha256] = os.open(path, os.O_RDONLY)
        if sha256 not in self._files:
            return None
        with contextlib.suppress(OSError):
            raw = os.pread(self._files[sha256], size, 128 + i * size)
            if self._is_right(shard, i, raw):
                return raw
        self._forget(sha256)
        return None

    def _forget(self, sha256: str) -> None:
        """A shard on the disk is damaged: it is fetched again at the next start."""
        os.close(self._files.pop(sha256))
        (self.objects / sha256).unlink(missing_ok=True)
        print(
            f"warning: {self.objects / sha256} is damaged, and read from {self.store.url} instead"
        )

    def _is_right(self, shard: dict, i: int, raw: bytes) -> bool:
        return zlib.crc32(raw) == self._crcs(shard["crc32_sha256"])[i]

    def _read_crcs(self, sha256: str) -> np.ndarray:
        """The checksums of a shard's rows, (rows,) uint32."""
        path = self.objects / sha256
        if not disk.has_sha256(path, sha256):
            self._fetch(sha256, path)
        return np.frombuffer(path.read_bytes()[128:], "<u4")

    def _fetch(self, sha256: str, path: Path) -> None:
        """Download an object to `path`, which is whole or not there."""
        try:
            with disk.replacing(path) as file:
                self.store.fetch(f"objects/{sha256}", Path(file.name), sha256)
        except CheckpointError as error:
            raise self._damaged(sha256, f"cannot be used: {error}") from None

    def _damaged(self, sha256: str, how: str) -> DataError:
        remedy = "publish the data again: prepare_data.py --publish"
        return DataError(f"{self.store.url}/objects/{sha256} {how}; {remedy}")

    # -------------------------------------------------------------------------- the filler

    def _keep(self, shard: dict) -> bool:
        """Bring a whole shard onto the disk, if there is room; whether it is there."""
        path = self.objects / shard["sha256"]
        if path.exists() and path.stat().st_size == shard["bytes"]:
            return True
        if not self._make_room(shard["bytes"]):
            return False
        self._fetch(shard["sha256"], path)
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Delete shards of other data, oldest first, until there is room. Those of this data stay:
        each is needed as often as any other."""
        began = time.time()
        own = {sha256 for shard in self.all_shards() for _, _, sha256 in files_of(shard)}
        there = {}
        for path in self.objects.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
                there[path] = path.stat()
        used = sum(stat.st_size for stat in there.values())
        for path in sorted(there, key=lambda path: there[path].st_mtime):
            if used + nbytes <= self.most:
                break
            is_junk = path.name.startswith(".") and began - there[path].st_mtime > 3600
            if path.is_file() and path.name not in own and (path.name[0] != "." or is_junk):
                path.unlink(missing_ok=True)
                used -= there[path].st_size
        return used + nbytes <= self.most and nbytes < disk.free_bytes(self.objects)

    def fill(self) -> None:
        """Behind the training, one process of this machine brings the shards of a run here."""
        shards, began, kept = self.all_shards(("train",)), time.monotonic(), 0
        with open(self.objects.parent / ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # another rank does it
            for shard in shards:
                try:
                    if not self._keep(shard):
                        break
                except (StorageError, DataError, OSError) as error:  # its rows are read one by one
                    print(f"warning: {public(str(error))}", flush=True)
                    continue
                kept += 1
            took_s = time.monotonic() - began
            found = f"{kept} of {len(shards)} shards are in {self.objects} after {took_s:.1f} s"
            print(f"{found}; so far {self.hit_rate()}", flush=True)


class Loader(data.RowLoader):
    """A RowLoader of data in a store, which asks for the rows of a batch together."""

    def _places(self, *args):
        threading.Thread(target=self.manifest.fill, daemon=True).start()
        for first, end in super()._places(*args):
            rows = range(first, min(end, first + self.micro_batch))
            self.manifest.expect("train", [self.order(p) for p in rows])
            yield first, end

    def close(self) -> None:
        super().close()
        if self.rank == 0:
            print(f"data from {self.manifest.store.url}: {self.manifest.hit_rate()}", flush=True)
