"""Rows on disk: .npy shards, a checksum per row, and the manifest that lists them.

Writes and reads, in DATA_DIR:
    {train,val}/SOURCE/NAME_00.npy         (rows, row_len), little-endian uint16 or uint32
    {train,val}/SOURCE/NAME_00.crc32.npy   (rows,) uint32: the crc32 of each row's bytes
    manifest.json                          written last: without it there is no dataset
Guarantees: every file is listed with its sha256, and a row is checked whenever it is read, so that
a damaged row is never trained on. Next: data.py draws rows, worker.py writes shards.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from machinery.durable import replacing, sha256_of, write_text
from machinery.errors import DataError, StorageError

FORMAT = 2  # of the folder; grows when older folders can no longer be read
SHARD_ROWS = 16_384  # 67 MB of rows of 2,049 two-byte tokens
AGAIN = "run the same prepare_data.py command again"
REMEDY = f"delete it and {AGAIN} (only missing files are redone)"


def write_json(path: Path, tree: dict) -> None:
    """Replace a whole JSON file."""
    write_text(path, json.dumps(tree, indent=1, ensure_ascii=False) + "\n")


def dtype_for(vocab_size: int) -> str:
    """The smallest unsigned dtype that holds every token id."""
    return "<u2" if vocab_size <= 65_536 else "<u4"


def header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The first 128 bytes of a .npy file of this dtype and shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


def write_shards(rows: Iterable[np.ndarray], folder: Path, name: str, dtype: str) -> list[dict]:
    """Write rows to FOLDER/NAME_00.npy, NAME_01.npy, ...; returns their manifest entries."""
    rows, entries = iter(rows), []
    while block := list(islice(rows, SHARD_ROWS)):
        array = np.stack(block).astype(dtype)  # (rows, row_len)
        crcs = np.array([zlib.crc32(row) for row in array], "<u4")
        path = folder / f"{name}_{len(entries):02d}.npy"
        crc_path = path.with_suffix(".crc32.npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, content in ((path, array), (crc_path, crcs)):
            with replacing(target) as file:
                np.save(file, content)
        entries.append(
            {
                "file": path.relative_to(folder).as_posix(),
                "rows": len(array),
                "bytes": path.stat().st_size,
                "sha256": sha256_of(path),
                "crc32_file": crc_path.relative_to(folder).as_posix(),
                "crc32_bytes": crc_path.stat().st_size,
                "crc32_sha256": sha256_of(crc_path),
                "min": int(array.min()),
                "max": int(array.max()),
            }
        )
    return entries


def files_of(shard: dict) -> list[tuple[str, int, str]]:
    """The two files of a shard entry: (name, bytes, sha256) each."""
    return [
        (shard["file"], shard["bytes"], shard["sha256"]),
        (shard["crc32_file"], shard["crc32_bytes"], shard["crc32_sha256"]),
    ]


class Manifest:
    """A parsed manifest.json. Opens no shard before one of its rows is read."""

    def __init__(self, folder: str | Path, tree: dict) -> None:
        self.dir, self.tree = Path(folder), tree
        self.fingerprint: str = tree["fingerprint"]
        self.row_len: int = tree["row_len"]
        self.dtype: str = tree["dtype"]
        self.vocab_size: int = tree["tokenizer"]["vocab_size"]
        self.bos_id: int = tree["tokenizer"]["bos_id"]
        self.tokenizer_sha256: str = tree["tokenizer"]["sha256"]
        self.sources: list[str] = [s["name"] for s in tree["sources"]]
        self._starts = {  # (split, source index) -> first row of each shard, then the total
            (split, i): [0, *accumulate(shard["rows"] for shard in self.shards(split, i))]
            for split in ("train", "val")
            for i in range(len(self.sources))
        }
        self._open = lru_cache(maxsize=192)(self._open_file)  # macOS allows 256 open files

    @classmethod
    def load(cls, folder: str | Path, preset: str = "PRESET") -> Manifest:
        """Read FOLDER/manifest.json. `preset` is the word that prepares such data, for the error.

        ValueError if there is no manifest, DataError if it cannot be used.
        """
        path = Path(folder) / "manifest.json"
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            usual = Path(folder) == Path("data", preset)
            raise ValueError(
                f"{path} does not exist; run: python prepare_data.py {preset}"
                f"{'' if usual else f' --data_dir {folder}'} (and the options you want)"
            ) from None
        except ValueError:
            raise DataError(f"{path} is not valid JSON; {REMEDY}") from None
        if tree.get("format") != FORMAT:
            raise DataError(
                f"{path} has format {tree.get('format')}, this program reads {FORMAT}; "
                f"remove the data (rm -r {folder}) and {AGAIN}"
            )
        if tree["fingerprint"] != fingerprint(tree):
            raise DataError(
                f"{path} was edited: its fingerprint is {tree['fingerprint'][:12]}, "
                f"its content has {fingerprint(tree)[:12]}; {REMEDY}"
            )
        return cls(folder, tree)

    def shards(self, split: str, source: int) -> list[dict]:
        """The shard entries of one source (by index) in a split, in order."""
        return self.tree["splits"][split][self.sources[source]]["shards"]

    def all_shards(self, splits: tuple[str, ...] = ("train", "val")) -> list[dict]:
        """The shard entries of all sources in these splits, in order."""
        return [
            s for split in splits for i in range(len(self.sources)) for s in self.shards(split, i)
        ]

    def rows(self, split: str, source: int | None = None) -> int:
        """How many rows a source has in a split; None: all sources together."""
        if source is None:
            return sum(self._starts[split, i][-1] for i in range(len(self.sources)))
        return self._starts[split, source][-1]

    def tokens(self, split: str) -> int:
        """Targets in a split: an epoch trains on this many, or evaluation scores them."""
        return self.rows(split) * (self.row_len - 1)

    def token_bytes(self) -> np.ndarray:
        """int32 (vocab_size,): bytes of text per token id, 0 for special tokens."""
        path = self.dir / "token_bytes.npy"
        try:
            return np.load(path)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read ({error}); {AGAIN}") from None

    def locate(self, split: str, source: int, row: int) -> tuple[dict, int]:
        """A source's row -> (shard entry, row within the shard)."""
        starts = self._starts[split, source]
        k = bisect.bisect_right(starts, row) - 1
        return self.shards(split, source)[k], row - starts[k]

    def row(self, split: str, source: int, row: int) -> np.ndarray:
        """One row, (row_len,), checked against its crc32; DataError if it is damaged."""
        shard, i = self.locate(split, source, row)
        raw, crc = self._read(shard, i)
        if zlib.crc32(raw) != int.from_bytes(crc, "little"):
            raise DataError(
                f"shard {self.dir / shard['file']} is damaged: row {i} does not match its crc32; "
                f"{REMEDY}"
            )
        return np.frombuffer(raw, self.dtype)

    def _read(self, shard: dict, i: int) -> tuple[bytes, bytes]:
        """The bytes of row `i` of a shard, and of its crc32, unchecked."""
        file, crc_file = self._files(shard)
        size = self.row_len * np.dtype(self.dtype).itemsize
        # pread: unlike a memory map it reads no further, and a truncated file is no SIGBUS
        raw = os.pread(file.fileno(), size, 128 + i * size)
        crc = os.pread(crc_file.fileno(), 4, 128 + i * 4)
        if len(raw) < size or len(crc) < 4:
            raise DataError(f"shard {self.dir / shard['file']} ends before row {i}; {REMEDY}")
        return raw, crc

    def _files(self, shard: dict) -> tuple[BinaryIO, BinaryIO]:
        """The rows and the checksums of a shard, open."""
        rows = shard["rows"]
        return (
            self._open(shard["file"], self.dtype, (rows, self.row_len)),
            self._open(shard["crc32_file"], "<u4", (rows,)),
        )

    def _open_file(self, name: str, dtype: str, shape: tuple[int, ...]) -> BinaryIO:
        """A .npy file, open; DataError unless it has the header and the size of this array."""
        path, expected = self.dir / name, header(dtype, shape)
        try:
            file = open(path, "rb", buffering=0)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            found, size = file.read(128), os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            raise DataError(f"shard {path} is missing; {REMEDY}") from None
        except OSError as error:
            raise DataError(f"shard {path} cannot be read ({error}); {REMEDY}") from None
        right = 128 + math.prod(shape) * np.dtype(dtype).itemsize
        if size != right:
            raise DataError(f"shard {path} has {size:,} bytes, not {right:,}; {REMEDY}")
        if found != expected:
            says = [h[10:].decode("latin-1").strip() for h in (found, expected)]
            raise DataError(f"shard {path} has the header {says[0]}, not {says[1]}; {REMEDY}")
        return file

    def check(self) -> None:
        """Before the first step: every file has the size, dtype, shape and token range that the
        manifest says. Milliseconds per shard; `row` and `verify` check contents."""
        for shard in self.all_shards():
            self._files(shard)
            if shard["max"] >= self.vocab_size:
                raise DataError(
                    f"shard {self.dir / shard['file']} has token {shard['max']}, the "
                    f"vocabulary ends at {self.vocab_size - 1}; {REMEDY}"
                )
        tokenizer = self.dir / "tokenizer.json"
        if not tokenizer.exists() or sha256_of(tokenizer) != self.tokenizer_sha256:
            raise DataError(
                f"{tokenizer} is not the tokenizer that made the data (sha256 "
                f"{self.tokenizer_sha256[:12]}...); {AGAIN}"
            )
        if self.token_bytes().shape != (self.vocab_size,):
            raise DataError(
                f"{self.dir / 'token_bytes.npy'} does not have {self.vocab_size} entries; {AGAIN}"
            )

    def verify(self) -> None:
        """Read every file of every shard and compare its sha256 with the manifest's."""
        for shard in self.all_shards():
            for name, _, expected in files_of(shard):
                _verify(self.dir / name, self.dir / name, expected)


def _verify(path: Path, named: Path, expected: str) -> None:
    """DataError, about the file `named`, if `path` does not have the expected sha256."""
    if not path.exists():
        raise DataError(f"shard {named} is missing; {REMEDY}")
    if (actual := sha256_of(path)) != expected:
        raise DataError(
            f"shard {named} is damaged: expected sha256 {expected}, actual {actual}; {REMEDY}"
        )


def fingerprint(tree: dict) -> str:
    """sha256 over a manifest, except `made` (when, by which commit) and the fingerprint itself."""
    content = {k: v for k, v in tree.items() if k not in ("fingerprint", "made")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def staged(manifest: Manifest, folder: str | Path) -> Path:
    """Where in `folder` the copy is that `stage` makes."""
    return Path(folder) / manifest.fingerprint[:16]


def stage(manifest: Manifest, folder: str | Path) -> Manifest:
    """Copy a data folder to a local disk and verify it; returns the copy's manifest.

    Copies no file again that is already there and intact. The manifest comes last.
    """
    target = staged(manifest, folder)
    files = [f for shard in manifest.all_shards() for f in files_of(shard)]
    missing = sum(size for name, size, _ in files if not (target / name).exists())
    target.mkdir(parents=True, exist_ok=True)
    if missing > (free := shutil.disk_usage(target).free):
        raise StorageError(
            f"staging needs {missing / 1e9:.1f} GB more in {folder}, where "
            f"{free / 1e9:.1f} GB are free; choose another disk or leave --stage out"
        )
    for name, _, sha256 in files:
        path = target / name
        if path.exists() and sha256_of(path) == sha256:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(manifest.dir / name, "rb") as source, replacing(path) as file:
            shutil.copyfileobj(source, file, 1 << 22)
            file.flush()
            _verify(Path(file.name), manifest.dir / name, sha256)
    for name in ("tokenizer.json", "token_bytes.npy", "manifest.json"):
        with replacing(target / name) as file:
            file.write((manifest.dir / name).read_bytes())
    return Manifest.load(target)
