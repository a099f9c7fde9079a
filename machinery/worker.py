"""What one process does with one unit of text: read, tokenize, pack, write its shards.

`prepare_unit` is a pure function from a job to files: whichever process runs it, on whichever
machine, the same bytes come out. prepare_data.py hands the jobs to a pool of processes, which
import this file and no torch. Next: prepare_data.py.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from multiprocessing import parent_process
from pathlib import Path

import numpy as np

import data
from machinery import shards, sources
from tokenizer import Tokenizer, blocks

SHARD_ROWS = 65_536  # 268 MB of rows of 2,049 two-byte tokens
BUFFER = 16_384  # documents held by the packer
TOKENIZER_CHARS = 200_000_000  # text that a tokenizer is trained on, at most
TOKENIZER_DOC_CHARS = 10_000  # of one document
TOKENIZER_UNITS = 16  # that it is drawn from, per source

load_tokenizer = lru_cache(maxsize=1)(Tokenizer.load)
_progress = None  # shared counters: documents, tokens, bytes


def start_worker(progress) -> None:
    global _progress
    _progress = progress

    def die_with_parent() -> None:
        parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=die_with_parent, daemon=True).start()


def is_val(raw: bytes, fraction: float) -> bool:
    """By the content alone: a document that occurs twice is on one side only."""
    digest = hashlib.blake2b(raw, digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def prepare_unit(job: dict) -> dict:
    """Read, tokenize, pack and write one unit; its record is written last and makes it done."""
    folder, source, index = Path(job["folder"]), job["source"], job["index"]
    tokenizer = load_tokenizer(job["tokenizer"])
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 65_536 else "<u4")
    notes, totals = Counter(), {"train": Counter(), "val": Counter()}
    val_docs: list[np.ndarray] = []

    def encoded() -> Iterator[np.ndarray]:
        """The training documents as ids; those for validation are set aside."""
        for text in sources.documents(source, job["unit"], notes):
            raw = text.encode("utf-8", "replace")
            split = "val" if is_val(raw, job["val_fraction"]) else "train"
            tokens = 0
            for piece in blocks(text, 1 << 20):
                ids = tokenizer.encode_array(piece).astype(dtype)
                tokens += len(ids)
                if split == "train":
                    yield ids
                else:
                    val_docs.append(ids)
            totals[split].update(documents=1, bytes=len(raw), tokens=tokens)
            if _progress is not None:
                with _progress.get_lock():
                    for i, n in enumerate((1, tokens, len(raw))):
                        _progress[i] += n

    def packing(docs) -> data.Packing:
        return data.pack(docs, job["row_len"], tokenizer.bos_id, job["policy"], BUFFER)

    name = f"{source.name}/unit_{index:05d}"
    for split in ("train", "val"):
        for stale in (folder / split / source.name).glob(f".tmp-unit_{index:05d}*"):
            stale.unlink(missing_ok=True)
    train = packing(encoded())
    result = {"train": write_rows(train, folder, f"train/{name}", job["row_len"], dtype)}
    val = packing(val_docs)
    rows = list(val)  # scattered, so that the first rows are a fair sample of the unit
    order = data.Permutation(len(rows), "val") if rows else None
    result["val"] = write_rows(
        (rows[order(i)] for i in range(len(rows))), folder, f"val/{name}", job["row_len"], dtype
    )
    record = {
        "notes": notes,
        "splits": {
            split: {
                **totals[split],
                "packing": asdict(packed.stats),
                "shards": result[split],
                "rest": [ids.tolist() for ids in packed.rest],
            }
            for split, packed in (("train", train), ("val", val))
        },
    }
    shards.write_json(Path(job["record"]), record)
    return record


def write_rows(rows, folder: Path, name: str, row_len: int, dtype: np.dtype) -> list[dict]:
    """Rows -> shards name_00.npy, name_01.npy, ...; returns their entries."""
    entries, writer = [], None
    for row in rows:
        if writer is None:
            writer = shards.ShardWriter(
                folder / f"{name}_{len(entries):02d}.npy", row_len, dtype.str
            )
        writer.append(row)
        if writer.rows == SHARD_ROWS:
            entries.append(writer.close(folder))
            writer = None
    if writer is not None:
        entries.append(writer.close(folder))
    return entries


def train_tokenizer(job: dict) -> float:
    """Train on a capped sample of the training documents; returns the process's peak in GB."""

    def sample() -> Iterator[str]:
        for source, units, share in job["sources"]:
            units = units[:TOKENIZER_UNITS]
            for unit in units:
                left = job["chars"] * share / len(units)
                for text in sources.documents(source, unit, Counter()):
                    if left <= 0:
                        break
                    if not is_val(text.encode("utf-8", "replace"), job["val_fraction"]):
                        text = text[: min(TOKENIZER_DOC_CHARS, int(left) + 1)]
                        left -= len(text)
                        yield text

    tokenizer = Tokenizer.train(
        sample(), job["vocab_size"], nfc=job["nfc"], progress=sys.stderr.isatty()
    )
    tokenizer.save(job["path"])
    return peak_gb(resource.RUSAGE_SELF)


def peak_gb(who: int) -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(who).ru_maxrss * unit / 1e9
