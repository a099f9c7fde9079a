"""Rows of tokens on disk, and the loader that feeds them to the model.

  documents --pack--> rows of row_len tokens --> shards (.npy) + manifest.json      prepare_data.py
  position p --Order--> (source, row) --Manifest--> tokens --RowLoader--> (inputs, targets) train.py

`pack` is packing.py and `Order` is order.py, which stand below this file: read them first.
Guarantees: a batch depends on (fingerprint, seed, position) and nothing else, so the loader's whole
state is one integer; a file that changed is noticed. Next: train.py.
"""

from __future__ import annotations

import atexit
import bisect
import hashlib
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from durable import StorageError, publish, replacing, sha256_of, temporary_name, write_text
from order import Order, Permutation
from packing import Packing, PackStats, pack

# torch is imported where a batch is made: each process of prepare_data.py does without it.


class DataError(Exception):
    """The data on disk is not what its manifest says, or could not be read."""

    exit_code = 3


# ------------------------------------------------------------------------- shards and manifest


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
        np.lib.format.write_array_header_1_0(self._file, {
            "descr": self.dtype, "fortran_order": False, "shape": (self.rows, self.row_len)})
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
        entry = {"file": self.path.relative_to(root).as_posix(), "rows": self.rows,
                 "bytes": self.temporary.stat().st_size, "sha256": sha256_of(self.temporary),
                 "min": self.min, "max": self.max}
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
            raise ValueError(f"{path} does not exist: no data is prepared there; run: python "
                             f"prepare_data.py {preset}{'' if usual else f' --data_dir {folder}'} "
                             "(and the options you want)") from None
        except ValueError:
            raise DataError(f"{path} is not valid JSON; {REMEDY}") from None
        if tree.get("format") != FORMAT:
            raise DataError(f"{path} has format {tree.get('format')}, this program reads {FORMAT}; "
                            f"remove the data (rm -r {folder}) and {AGAIN}")
        if tree["fingerprint"] != fingerprint(tree):
            raise DataError(f"{path} was edited: its fingerprint is {tree['fingerprint'][:12]}, "
                            f"its content says {fingerprint(tree)[:12]}; {REMEDY}")
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
            shape, _, dtype = np.lib.format.read_array_header_1_0(f) if version == (1, 0) else (
                None, None, None)
        except FileNotFoundError:
            raise DataError(f"shard {path} is missing; {REMEDY}") from None
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"shard {path} cannot be read ({error}); {REMEDY}") from None
        if shape != (rows, self.row_len) or dtype != np.dtype(self.dtype):
            found = "another format" if dtype is None else f"{dtype.str} {shape}"
            raise DataError(f"shard {path} holds {found}, its manifest says {self.dtype} "
                            f"{(rows, self.row_len)}; {REMEDY}")
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
                raise DataError(f"shard {path} has {path.stat().st_size:,} bytes, its manifest "
                                f"says {size:,}; {REMEDY}")
        for shard in self.shards("train") + self.shards("val"):
            self._open(shard["file"], shard["rows"])
            if shard["max"] >= self.vocab_size:
                raise DataError(f"shard {self.dir / shard['file']} has token {shard['max']}, the "
                                f"vocabulary ends at {self.vocab_size - 1}; {REMEDY}")
        tokenizer = self.dir / "tokenizer.json"
        if not tokenizer.exists() or sha256_of(tokenizer) != self.tokenizer_sha256:
            raise DataError(f"{tokenizer} is not the one the data was made with (sha256 "
                            f"{self.tokenizer_sha256[:12]}...); {AGAIN}")
        if self.token_bytes().shape != (self.vocab_size,):
            raise DataError(f"{self.dir / 'token_bytes.npy'} does not have {self.vocab_size} "
                            f"entries; {AGAIN}")

    def verify(self, shards: list[dict] | None = None, pause: float = 0.0,
               stop: threading.Event | None = None) -> None:
        """Read every shard (or those given) and compare its sha256 with the manifest's."""
        for shard in self.shards("train") + self.shards("val") if shards is None else shards:
            path = self.dir / shard["file"]
            if not path.exists():
                raise DataError(f"shard {path} is missing; {REMEDY}")
            actual = sha256_of(path, pause, stop)
            if stop and stop.is_set():
                return
            if actual != shard["sha256"]:
                raise DataError(f"shard {path} is damaged: expected sha256 {shard['sha256']}, "
                                f"actual {actual}; {REMEDY}")


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
        raise StorageError(f"staging needs {missing / 1e9:.1f} GB more in {folder}, where "
                         f"{free / 1e9:.1f} GB are free; choose another disk or leave --stage out")
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
            raise DataError(f"shard {manifest.dir / shard['file']} is damaged: expected sha256 "
                            f"{shard['sha256']}, actual {actual}; {REMEDY}")
        publish(temporary, path)
    for name in ("tokenizer.json", "token_bytes.npy", "manifest.json"):
        with replacing(target / name) as file:
            file.write((manifest.dir / name).read_bytes())
    return Manifest.load(target)


# ----------------------------------------------------------------------------------- the loader


def mixture_weights(manifest: Manifest, weights: dict | Sequence[float] | None) -> list[float]:
    """Weights in the manifest's order of sources; None: in proportion to their rows."""
    names = manifest.sources
    if weights is None:
        return [manifest.rows("train", i) for i in range(len(names))]
    if isinstance(weights, dict):
        if unknown := [name for name in weights if name not in names]:
            raise ValueError(f"the mixture names source {unknown[0]!r}, the data has "
                             f"{', '.join(names)}")
        return [weights.get(name, 0) for name in names]
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} mixture weights for {len(names)} sources: "
                         f"{', '.join(names)}")
    return list(weights)


class RowLoader:
    """Batches by position. A thread reads ahead into a small ring of (pinned) buffers.

    Item j of the batch that rank r reads at `position` is the row at position + r * micro_batch
    + j; then `position` grows by world_size * micro_batch. So the rows of a step, taken together,
    are the same for any number of ranks and any split into micro-batches.
    """

    def __init__(self, manifest: Manifest, *, seed: int, micro_batch: int, split: str = "train",
                 rank: int = 0, world_size: int = 1, position: int = 0,
                 weights: dict | Sequence[float] | None = None,
                 decay_weights: dict | Sequence[float] | None = None, decay_from: int = 0,
                 device: object = "cpu", prefetch: int = 4, verify: bool = False) -> None:
        import torch

        self.manifest, self.split, self.position = manifest, split, position
        self.rank, self.world_size, self.micro_batch = rank, world_size, micro_batch
        self.device = torch.device(device)
        sizes = [manifest.rows(split, i) for i in range(len(manifest.sources))]
        self.order = Order(
            sizes, mixture_weights(manifest, weights), seed, decay_from=decay_from,
            decay_weights=None if decay_weights is None else mixture_weights(
                manifest, decay_weights))
        self._wait_s, self._stop = 0.0, threading.Event()
        self._free, self._ready, self._failure = queue.Queue(), queue.Queue(), None
        pin, T = self.device.type == "cuda", manifest.row_len - 1
        for _ in range(max(2, prefetch)):
            buffer = torch.empty((2, micro_batch, T), dtype=torch.int64, pin_memory=pin)
            self._free.put((buffer, torch.cuda.Event() if pin else None))
        self._threads = [threading.Thread(target=self._read_ahead, args=(position,), daemon=True)]
        if verify:
            self._threads.append(threading.Thread(target=self._verify, daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread that is in torch when Python ends aborts the process

    def row_ids(self, position: int, count: int) -> list[str]:
        """The names of `count` rows from `position` on: 'train/stdlib/unit_00003_00.npy row 17'."""
        names = []
        for p in range(position, position + count):
            shard, row = self.manifest.locate(self.split, *self.order(p))
            names.append(f"{shard['file']} row {row}")
        return names

    def next_batch(self):
        """-> inputs, targets: int64 (micro_batch, row_len - 1) each, on the device."""
        import torch

        t0 = time.perf_counter()
        item = self._ready.get()
        self._wait_s += time.perf_counter() - t0
        if self._failure is not None:
            raise self._failure
        buffer, copied = item
        if copied is None:
            batch = buffer.to(self.device, copy=True)
        else:
            batch = buffer.to(self.device, non_blocking=True)
            copied.record(torch.cuda.current_stream(self.device))  # till then, leave the buffer
        self._free.put((buffer, copied))
        self.position += self.world_size * self.micro_batch
        return batch[0], batch[1]

    def pop_wait_s(self) -> float:
        """Seconds that next_batch has waited for data since this was last asked."""
        waited, self._wait_s = self._wait_s, 0.0
        return waited

    def close(self) -> None:
        """Stop the threads; also done when the program ends. Once closed, it stays so."""
        self._stop.set()
        self._free.put(None)  # wakes the reader
        for thread in self._threads:
            thread.join(timeout=10)
        atexit.unregister(self.close)

    def _read_ahead(self, position: int) -> None:
        import torch

        rows = np.empty((self.micro_batch, self.manifest.row_len), dtype=self.manifest.dtype)
        try:
            if self.device.type == "cuda":  # a new thread would begin with the first GPU
                torch.cuda.set_device(self.device)
            while (slot := self._free.get()) is not None and not self._stop.is_set():
                buffer, copied = slot
                if copied is not None:
                    copied.synchronize()  # its last copy to the GPU may still be in flight
                first = position + self.rank * self.micro_batch
                for j in range(self.micro_batch):
                    rows[j] = self.manifest.row(self.split, *self.order(first + j))
                if rows.max() >= self.manifest.vocab_size:
                    j = int(rows.max(axis=1).argmax())
                    raise DataError(f"{self.row_ids(first + j, 1)[0]} has token {rows[j].max()}, "
                                    f"the vocabulary ends at {self.manifest.vocab_size - 1}; "
                                    "run: python prepare_data.py verify --data_dir "
                                    f"{self.manifest.dir}")
                array = buffer.numpy()
                array[0], array[1] = rows[:, :-1], rows[:, 1:]
                self._ready.put(slot)
                position += self.world_size * self.micro_batch
        except Exception as error:
            self._fail(error)

    def _verify(self) -> None:
        """sha256 of this rank's share of the shards, on at most a fifth of one core."""
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux: this thread
        except (AttributeError, OSError):
            pass
        try:
            shards = self.manifest.shards("train") + self.manifest.shards("val")
            self.manifest.verify(shards[self.rank :: self.world_size], pause=4.0, stop=self._stop)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._ready.put(None)  # wakes next_batch, which raises it


def val_batches(manifest: Manifest, batch: int, max_rows: int = 0, rank: int = 0,
                world_size: int = 1, device: object = "cpu") -> Iterator[tuple]:
    """The first `max_rows` validation rows (0: all), each once, in an order that never changes.

    Yields (inputs, targets) as RowLoader does, of about `batch` rows. Sources take turns; within
    one, rows come in unit order. Rank r has rows r, r + world_size, ...; each rank has the same
    number of batches (a sharded model's ranks must all take part), hence their uneven sizes.
    """
    import torch

    sizes = [manifest.rows("val", i) for i in range(len(manifest.sources))]
    turns = ((i, row) for row in range(max(sizes, default=0))
             for i, size in enumerate(sizes) if row < size)
    total = min(max_rows or sum(sizes), sum(sizes))
    if total < world_size:
        raise ValueError(f"{total} validation rows cannot be shared by {world_size} ranks; prepare "
                         "more: --val_fraction")
    mine = [place for k, place in zip(range(total), turns) if k % world_size == rank]
    # the same on each rank, and no rank's is ever empty
    batches = min(-(-total // (batch * world_size)), total // world_size)
    for k in range(batches):
        part = mine[len(mine) * k // batches : len(mine) * (k + 1) // batches]
        rows = np.stack([manifest.row("val", i, row) for i, row in part])
        tensor = torch.from_numpy(rows.astype(np.int64)).to(device)
        yield tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()


__all__ = ["DataError", "Manifest", "Order", "PackStats", "Packing", "Permutation", "RowLoader",
           "ShardWriter", "pack", "stage", "val_batches"]
