"""Rows on disk: .npy shards, a checksum per row, and the manifest that lists them.

Writes and reads, in DATA_DIR:
    {train,val}/SOURCE/NAME_00.npy         (rows, row_len), little-endian uint16 or uint32
    {train,val}/SOURCE/NAME_00.crc32.npy   (rows,) uint32: the crc32 of each row's bytes
    manifest.json                          written last: without it there is no dataset
The manifest lists every file with its sha256. A row is checked whenever it is read, so a damaged
row is never trained on. Next: data.py draws rows, worker.py writes shards.
"""

import bisect
import io
import math
import os
import resource
import shlex
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, islice, product
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from config import UsageError
from machinery import formats
from machinery.disk import inside, open_file, read_json, replacing, sha256_of, sha256_of_tree
from machinery.errors import DataError
from machinery.formats import ManifestFile, Shard
from tokenizer import Tokenizer

CACHE = "data/cache"  # of copies of published data, by fingerprint
SHARD_ROWS = 16_384  # 67 MB of rows of 2,049 two-byte tokens
AGAIN = "run the same prepare_data.py command again"
REMEDY = f"delete it and {AGAIN} (only missing files are redone)"


def is_published(data_dir: str) -> bool:
    """Whether data is as `prepare_data.py --publish` leaves it: behind a URL, or in a folder that
    has objects. stores/stage.py copies it to a local folder before it is read."""
    return "://" in data_dir or Path(data_dir, "objects").is_dir()


def damaged(path: Path, fault: str, remedy: str = REMEDY) -> DataError:
    """The error for a damaged file."""
    return DataError(f"{path} {fault}; {remedy}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError: a file that cannot be read, though perhaps not damaged."""
    try:
        yield
    except OSError as error:
        raise damaged(
            path, f"cannot be read ({error.strerror})", f"remove the cause, or {AGAIN}"
        ) from None


def dtype_for(vocab_size: int) -> str:
    """The smallest unsigned dtype that holds every token id."""
    return "<u2" if vocab_size <= 65_536 else "<u4"


def write_shards(rows: Iterable[np.ndarray], folder: Path, name: str, dtype: str) -> list[Shard]:
    """Write rows to FOLDER/NAME_00.npy, NAME_01.npy, ...; returns their manifest entries."""
    rows = iter(rows)
    shards = []
    while block := list(islice(rows, SHARD_ROWS)):
        array = np.stack(block).astype(dtype)  # (rows, row_len)
        crcs = np.array([zlib.crc32(row) for row in array], "<u4")
        entry = {"rows": len(array), "min": int(array.min()), "max": int(array.max())}
        for key, suffix, content in (("", "npy", array), ("crc32_", "crc32.npy", crcs)):
            file = f"{name}_{len(shards):02d}.{suffix}"
            path = folder / file
            with replacing(path) as f:
                # np.save would write the same, but its OSError does not say that the disk is full
                npy.write_array_header_1_0(f, npy.header_data_from_array_1_0(content))
                f.write(content.data)
            size = path.stat().st_size
            sha256 = sha256_of(path)
            entry |= {f"{key}file": file, f"{key}bytes": size, f"{key}sha256": sha256}
        shards.append(Shard(**entry))
    return shards


class Manifest:
    """A parsed manifest.json. A shard is opened only to check it, or when a row of it is read."""

    def __init__(self, folder: str | Path, tree: dict):
        """DataError, which names the field, unless `fingerprint` shows no edit and every field has
        the right type."""
        self.dir = Path(folder)
        path = self.dir / "manifest.json"
        try:
            self.facts = facts = formats.checked(ManifestFile, tree, path)
        except DataError as error:
            raise DataError(f"{error}; {REMEDY}") from None
        if facts.fingerprint != fingerprint(tree):
            raise damaged(path, "was edited: its fingerprint is another one")
        self.fingerprint = facts.fingerprint
        self.row_len = facts.row_len
        self.dtype = facts.dtype
        self.vocab_size = facts.tokenizer.vocab_size
        self.bos_id = facts.tokenizer.bos_id
        self.tokenizer_sha256 = facts.tokenizer.sha256
        self.marks = facts.tokenizer.marks or ()  # data.targets_of
        self.sources = [source.name for source in facts.sources]
        self._starts = {}  # (split, source index) -> first row of each shard, then the total
        for split, source in product(("train", "val"), range(len(self.sources))):
            rows = (shard.rows for shard in self.shards(split, source))
            self._starts[split, source] = [0, *accumulate(rows)]
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # open files; 256 on macOS
        self._open = lru_cache(maxsize=allowed * 3 // 4)(self._open_file)

    @classmethod
    def load(cls, folder: str | Path, preset: str = "PRESET") -> "Manifest":
        """Read FOLDER/manifest.json. UsageError, with the command that prepares `preset`, if there
        is none; DataError if it cannot be used."""
        path = Path(folder) / "manifest.json"
        if not os.path.lexists(path):
            is_foreign = path.parent.exists() and not Path(folder, ".units").is_dir()  # of texts?
            named = "NEW_FOLDER" if is_foreign else shlex.quote(str(folder))
            raise UsageError(
                f"{path} does not exist; run: python prepare_data.py {preset} --data_dir {named} "
                "(of your own text: --source files:MY_TEXTS)"
            )
        return cls(folder, read_json(path))

    def shards(self, split: str, source: int) -> list[Shard]:
        """The shard entries of one source (by index) in a split, in order."""
        return self.facts.splits[split][self.sources[source]].shards

    def all_shards(self) -> list[Shard]:
        """The shard entries of all sources, for training and then for validation, in order."""
        return [shard for pair in self._starts for shard in self.shards(*pair)]

    def files(self) -> list[tuple[str, int, str]]:
        """(name, bytes, sha256) of every file but the manifest; bytes is 0 if not known."""
        files = [file for shard in self.all_shards() for file in shard.files()]
        return [*files, ("tokenizer.json", 0, self.tokenizer_sha256)]

    def rows(self, split: str, source: int | None = None) -> int:
        """How many rows a source has in a split; None: all sources together."""
        sources = range(len(self.sources)) if source is None else [source]
        return sum(self._starts[split, i][-1] for i in sources)

    def tokens(self, split: str) -> int:
        """How many targets a split has: those of one epoch, or of a full validation."""
        return self.rows(split) * (self.row_len - 1)

    def tokenizer_file(self) -> Path:
        """The path of tokenizer.json; DataError unless its sha256 is the one in the manifest."""
        return self.whole_file("tokenizer.json", self.tokenizer_sha256)

    def whole_file(self, name: str, sha256: str) -> Path:
        """The path of a file; DataError unless it has this sha256."""
        path = inside(self.dir, name)
        with reading(path):
            actual = sha256_of(path)
        if actual != sha256:
            raise damaged(path, f"is damaged: expected sha256 {sha256}, actual {actual}")
        return path

    def token_bytes(self) -> np.ndarray:
        """int32 (vocab_size,): bytes of text per token id, 0 for special tokens."""
        return Tokenizer.load(self.tokenizer_file()).token_bytes

    def locate(self, split: str, source: int, row: int) -> tuple[Shard, int]:
        """A source's row -> (shard entry, row within the shard)."""
        starts = self._starts[split, source]
        k = bisect.bisect_right(starts, row) - 1
        return self.shards(split, source)[k], row - starts[k]

    def row(self, split: str, source: int, row: int) -> np.ndarray:
        """One row, (row_len,), checked against its crc32; DataError if it is damaged."""
        shard, i = self.locate(split, source, row)
        path = self.dir / shard.file
        file, crc_file = self.open_shard(shard)
        size = self.row_len * np.dtype(self.dtype).itemsize
        # pread: unlike a memory map, it reads only the row, and a truncated file raises no SIGBUS
        with reading(path):
            raw = os.pread(file.fileno(), size, 128 + i * size)
            crc = os.pread(crc_file.fileno(), 4, 128 + i * 4)
        if len(raw) < size or zlib.crc32(raw) != int.from_bytes(crc, "little"):
            raise damaged(path, f"is damaged: row {i} does not match its crc32")
        return np.frombuffer(raw, self.dtype)

    def open_shard(self, shard: Shard) -> tuple[BinaryIO, BinaryIO]:
        """The rows and the checksums of a shard, open."""
        rows = self._open(shard.file, self.dtype, (shard.rows, self.row_len))
        return rows, self._open(shard.crc32_file, "<u4", (shard.rows,))

    def _open_file(self, name: str, dtype: str, shape: tuple[int, ...]) -> BinaryIO:
        """A .npy file, open; DataError unless it has the header and the size of this array."""
        path = inside(self.dir, name)
        header = io.BytesIO()
        npy.write_array_header_1_0(header, dict(descr=dtype, fortran_order=False, shape=shape))
        right = header.getvalue(), 128 + math.prod(shape) * np.dtype(dtype).itemsize
        with reading(path):
            file = open_file(path)
            found = file.read(128), os.fstat(file.fileno()).st_size
        if found != right:
            raise damaged(
                path, f"has {found[1]:,} bytes, and is not {dtype} {shape} of {right[1]:,} bytes"
            )
        return file

    def check(self) -> None:
        """Compare every file's size, dtype, shape and token range with the manifest."""
        for shard in self.all_shards():
            self.open_shard(shard)
            if shard.max >= self.vocab_size:
                raise damaged(
                    self.dir / shard.file,
                    f"has token {shard.max}, the vocabulary ends at {self.vocab_size - 1}",
                )
        self._open.cache_clear()  # a program may check several folders but read only one
        self.tokenizer_file()

    def verify(self) -> None:
        """Compare the sha256 of every file with the manifest's."""
        for name, _, sha256 in self.files():
            self.whole_file(name, sha256)


def fingerprint(tree: dict) -> str:
    """sha256 over a manifest, except `made` (when, by which commit) and the fingerprint itself."""
    content = {k: v for k, v in tree.items() if k not in ("fingerprint", "made")}
    return sha256_of_tree(content)
