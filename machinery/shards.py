"""Rows on disk: .npy shards and the manifest that names them, written once, checked before use.

Writes and reads DATA_DIR/{train,val}/SOURCE/*.npy and DATA_DIR/manifest.json. Next: data.py reads
rows through `Manifest`, worker.py writes shards.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import shutil
import threading
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from machinery.durable import publish, replacing, sha256_of, temporary_name, write_text
from machinery.errors import DataError, StorageError


def write_json(path: Path, tree: dict) -> None:
    write_text(path, json.dumps(tree, indent=1, ensure_ascii=False) + "\n")


class ShardWriter:
    """Rows -> one .npy file, (rows, row_len), written in blocks: the memory it takes is flat."""

    HEADER = 128  # bytes: numpy pads the header so that the row count can be filled in later

    def __init__(self, path: Path, row_len: int, dtype: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.row_len, self.dtype = path, row_len, dtype
        self.temporary = temporary_name(path)
        self.rows, self.min, self.max, self._block = 0, 2**32, -1, []
        self._file = open(self.temporary, "wb")
        self._write_header()

    def _write_header(self) -> None:
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(
            self._file,
            {"descr": self.dtype, "fortran_order": False, "shape": (self.rows, self.row_len)},
        )
        assert self._file.tell() == self.HEADER

    def append(self, row: np.ndarray) -> None:
        self._block.append(row)
        self.rows += 1
        if len(self._block) == 256:
            self._flush()

    def _flush(self) -> None:
        if self._block:
            block = np.stack(self._block).astype(self.dtype)
            self.min, self.max = min(self.min, int(block.min())), max(self.max, int(block.max()))
            self._file.write(block.tobytes())
            self._block = []

    def close(self, root: Path) -> dict:
        """Publish the shard; returns its entry in the manifest."""
        self._flush()
        self._write_header()
        self._file.close()
        entry = {
            "file": self.path.relative_to(root).as_posix(),
            "rows": self.rows,
            "bytes": self.temporary.stat().st_size,
            "sha256": sha256_of(self.temporary),
            "min": self.min,
            "max": self.max,
        }
        publish(self.temporary, self.path)
        return entry


class Manifest:
    """manifest.json, parsed: what a data folder holds. No shard is opened before it is read."""

    def __init__(self, folder: str | Path, tree: dict) -> None:
        self.dir, self.tree = Path(folder), tree
        self.fingerprint: str = tree["fingerprint"]
        self.row_len: int = tree["row_len"]
        self.dtype: str = tree["dtype"]
        self.vocab_size: int = tree["tokenizer"]["vocab_size"]
        self.bos_id: int = tree["tokenizer"]["bos_id"]
        self.tokenizer_sha256: str = tree["tokenizer"]["sha256"]
        self.sources: list[str] = [s["name"] for s in tree["sources"]]
        self._starts = {}  # (split, source index) -> the first row of each shard, then the total
        for split in ("train", "val"):
            for i in range(len(self.sources)):
                starts = [0]
                for shard in self.shards(split, i):
                    starts.append(starts[-1] + shard["rows"])
                self._starts[split, i] = starts
        self._checked: dict[str, int] = {}  # shards of which the header was read -> its length
        self._open = lru_cache(maxsize=128)(self._open_shard)  # open files are limited (1,024, say)

    @classmethod
    def load(cls, folder: str | Path, preset: str = "PRESET") -> Manifest:
        """Read FOLDER/manifest.json. `preset` is for the remedy: the word that prepares such data.

        ValueError if there is none, DataError if it cannot be used.
        """
        path = Path(folder) / "manifest.json"
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            usual = Path(folder) == Path("data", preset)
            raise ValueError(
                f"{path} does not exist: no data is prepared there; run: python "
                f"prepare_data.py {preset}{'' if usual else f' --data_dir {folder}'} "
                "(and the options you want)"
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
                f"its content says {fingerprint(tree)[:12]}; {REMEDY}"
            )
        return cls(folder, tree)

    def shards(self, split: str, source: str | int | None = None) -> list[dict]:
        """The shard entries of a split, in order; of one source, by name or index, or of all."""
        if isinstance(source, int):
            source = self.sources[source]
        names = self.sources if source is None else [source]
        return [s for name in names for s in self.tree["splits"][split][name]["shards"]]

    def rows(self, split: str, source: str | int | None = None) -> int:
        if source is None:
            return sum(self._starts[split, i][-1] for i in range(len(self.sources)))
        i = source if isinstance(source, int) else self.sources.index(source)
        return self._starts[split, i][-1]

    def tokens(self, split: str) -> int:
        """Targets in a split: what one epoch trains on, or evaluation scores."""
        return self.rows(split) * (self.row_len - 1)

    def token_bytes(self) -> np.ndarray:
        """int32 (vocab_size,): bytes of text per token id, 0 for special tokens."""
        path = self.dir / "token_bytes.npy"
        try:
            return np.load(path)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read ({error}); {AGAIN}") from None

    def locate(self, split: str, source: int, row: int) -> tuple[dict, int]:
        """(shard entry, row within the shard) of a source's row."""
        starts = self._starts[split, source]
        k = bisect.bisect_right(starts, row) - 1
        return self.tree["splits"][split][self.sources[source]]["shards"][k], row - starts[k]

    def row(self, split: str, source: int, row: int) -> np.ndarray:
        """One row, (row_len,), read from its shard."""
        shard, i = self.locate(split, source, row)
        f, start = self._open(shard["file"], shard["rows"])
        size = self.row_len * np.dtype(self.dtype).itemsize
        raw = os.pread(f.fileno(), size, start + i * size)  # unlike a memory map: no read-ahead,
        if len(raw) < size:  # and a file that was cut off is an error, not a crash
            raise DataError(f"shard {self.dir / shard['file']} ends before row {i}; {REMEDY}")
        return np.frombuffer(raw, self.dtype)

    def _open_shard(self, file: str, rows: int) -> tuple[BinaryIO, int]:
        """(open file, where its rows begin), once its header says what the manifest says."""
        path = self.dir / file
        try:
            f = open(path, "rb", buffering=0)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            if file in self._checked:
                return f, self._checked[file]
            version = np.lib.format.read_magic(f)
            shape, _, dtype = (
                np.lib.format.read_array_header_1_0(f) if version == (1, 0) else (None, None, None)
            )
        except FileNotFoundError:
            raise DataError(f"shard {path} is missing; {REMEDY}") from None
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"shard {path} cannot be read ({error}); {REMEDY}") from None
        if shape != (rows, self.row_len) or dtype != np.dtype(self.dtype):
            found = "another format" if dtype is None else f"{dtype.str} {shape}"
            raise DataError(
                f"shard {path} holds {found}, its manifest says {self.dtype} "
                f"{(rows, self.row_len)}; {REMEDY}"
            )
        self._checked[file] = f.tell()
        return f, self._checked[file]

    def check(self) -> None:
        """Before the first step: all files there, with the size, dtype, shape and token range that
        the manifest says. Milliseconds per shard; contents are `verify`'s task."""
        files = [(s["file"], s["bytes"]) for split in ("train", "val") for s in self.shards(split)]
        for file, size in files:
            path = self.dir / file
            if not path.exists():
                raise DataError(f"shard {path} is missing; {REMEDY}")
            if path.stat().st_size != size:
                raise DataError(
                    f"shard {path} has {path.stat().st_size:,} bytes, its manifest "
                    f"says {size:,}; {REMEDY}"
                )
        for shard in self.shards("train") + self.shards("val"):
            self._open(shard["file"], shard["rows"])
            if shard["max"] >= self.vocab_size:
                raise DataError(
                    f"shard {self.dir / shard['file']} has token {shard['max']}, the "
                    f"vocabulary ends at {self.vocab_size - 1}; {REMEDY}"
                )
        tokenizer = self.dir / "tokenizer.json"
        if not tokenizer.exists() or sha256_of(tokenizer) != self.tokenizer_sha256:
            raise DataError(
                f"{tokenizer} is not the one the data was made with (sha256 "
                f"{self.tokenizer_sha256[:12]}...); {AGAIN}"
            )
        if self.token_bytes().shape != (self.vocab_size,):
            raise DataError(
                f"{self.dir / 'token_bytes.npy'} does not have {self.vocab_size} entries; {AGAIN}"
            )

    def verify(
        self,
        shards: list[dict] | None = None,
        pause: float = 0.0,
        stop: threading.Event | None = None,
    ) -> None:
        """Read every shard (or those given) and compare its sha256 with the manifest's."""
        for shard in self.shards("train") + self.shards("val") if shards is None else shards:
            path = self.dir / shard["file"]
            if not path.exists():
                raise DataError(f"shard {path} is missing; {REMEDY}")
            actual = sha256_of(path, pause, stop)
            if stop and stop.is_set():
                return
            if actual != shard["sha256"]:
                raise DataError(
                    f"shard {path} is damaged: expected sha256 {shard['sha256']}, "
                    f"actual {actual}; {REMEDY}"
                )


FORMAT = 1  # of the folder; changes when older folders can no longer be read
AGAIN = "run the same prepare_data.py command again"
REMEDY = f"delete it and {AGAIN} (only what is missing is redone)"


def fingerprint(tree: dict) -> str:
    """sha256 over all of a manifest but the fingerprint and `made` (when, and by which commit)."""
    content = {k: v for k, v in tree.items() if k not in ("fingerprint", "made")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def staged(manifest: Manifest, folder: str | Path) -> Path:
    """Where in `folder` the copy is that `stage` makes."""
    return Path(folder) / manifest.fingerprint[:16]


def stage(manifest: Manifest, folder: str | Path) -> Manifest:
    """Copy a data folder onto a local disk, verifying every shard; returns the copy's manifest.

    What is already there and intact is not copied again. The manifest comes last, as always.
    """
    target = staged(manifest, folder)
    shards = manifest.shards("train") + manifest.shards("val")
    missing = sum(s["bytes"] for s in shards if not (target / s["file"]).exists())
    target.mkdir(parents=True, exist_ok=True)
    if missing > (free := shutil.disk_usage(target).free):
        raise StorageError(
            f"staging needs {missing / 1e9:.1f} GB more in {folder}, where "
            f"{free / 1e9:.1f} GB are free; choose another disk or leave --stage out"
        )
    for shard in shards:
        path = target / shard["file"]
        if path.exists() and sha256_of(path) == shard["sha256"]:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        try:
            shutil.copyfile(manifest.dir / shard["file"], temporary)
        except FileNotFoundError:
            raise DataError(f"shard {manifest.dir / shard['file']} is missing; {REMEDY}") from None
        if (actual := sha256_of(temporary)) != shard["sha256"]:
            temporary.unlink()
            raise DataError(
                f"shard {manifest.dir / shard['file']} is damaged: expected sha256 "
                f"{shard['sha256']}, actual {actual}; {REMEDY}"
            )
        publish(temporary, path)
    for name in ("tokenizer.json", "token_bytes.npy", "manifest.json"):
        with replacing(target / name) as file:
            file.write((manifest.dir / name).read_bytes())
    return Manifest.load(target)
