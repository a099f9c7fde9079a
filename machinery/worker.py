"""One unit of text -> its shards, and the pool that does all units of a job.

`prepare_unit` is a pure function from a job to files, so any number of processes or machines gives
the same bytes. A unit's record, DATA_DIR/.units/KEY/SOURCE_00003.json, is written last and makes
it done; `run_units` does the units without one. The processes of the pool import this file, and no
torch. Next: prepare_data.py tells the story, shards.py holds the rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from itertools import groupby
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np

import data
from machinery import shards, sources
from machinery.errors import DataError, StorageError, UsageError
from tokenizer import Tokenizer, blocks, check_vocab_size

BUFFER = 16_384  # documents held by the packer
TOKENIZER_CHARS = 200_000_000  # text that a tokenizer is trained on, at most
TOKENIZER_DOC_CHARS = 10_000  # at most, of one document
TOKENIZER_UNITS = 16  # per source, from which that text is drawn
FEW_FILES = 256  # with fewer, blocks of documents are held out instead of whole documents
SMALL = 24_000_000  # bytes of a corpus that is read once more, to hold out at least a row

POOL_DIED = (
    "a process of the pool died (out of memory?); run the same command again: finished "
    "units are kept; fewer --workers need less memory"
)

load_tokenizer = lru_cache(maxsize=1)(Tokenizer.load)


# ------------------------------------------------------------------------------------ the job


def digest(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


class Job:
    """A whole preparation, from a DataConfig: its units, its records, and what is done already."""

    def __init__(self, config) -> None:
        self.config, self.folder = config, Path(config.data_dir)
        self.sources = [sources.parse(spec) for spec in config.source]
        names = [s.name for s in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(
                f"two sources are named {max(names, key=names.count)!r}; name them: "
                "--source a=files:... b=files:..."
            )
        self.shares = shares_of(names, config.mixture)
        self.tokens = tokens_wanted(config.tokens, self.sources)
        if not 0 < config.val_fraction < 1:
            raise ValueError(
                f"val_fraction {config.val_fraction} is not between 0 and 1 (a run "
                "validates on that share of the text); try --val_fraction 0.02"
            )
        if config.workers < 0:
            raise ValueError(f"workers {config.workers} is below 0; 0 takes all cores")
        if not config.tokenizer:
            check_vocab_size(config.vocab_size)
        data.pack([], config.row_len, 0)  # refuses a bad row_len, now
        listed = [self._list(source) for source in self.sources]
        self.units = [units for units, _ in listed]
        self.facts = [facts for _, facts in listed]
        tokenizer = [config.vocab_size, config.nfc, TOKENIZER_CHARS, self.shares]
        if config.tokenizer:
            tokenizer = Tokenizer.load(config.tokenizer).sha256
        options = {
            "format": shards.FORMAT,
            "source": list(config.source),
            "revisions": [f.get("revision") for f in self.facts],
            "row_len": config.row_len,
            "buffer": BUFFER,
            "val_fraction": config.val_fraction,
            "tokenizer": tokenizer,
        }
        self.options = digest(options)
        self.key = digest(
            [self.options, self.units]
        )  # a hash of all that decides the content of the shards
        self.records = self.folder / ".units" / self.key
        self.tokenizer = self.records / "tokenizer.json"

    def _list(self, source: sources.Source) -> tuple[list[dict], dict]:
        """The units and facts of a source. A remote list is kept, so that it stays as it was."""
        if not source.remote:
            return sources.list_units(source)
        path = self.folder / ".units" / f"remote-{digest(repr(source))}.json"
        if not path.exists():
            units, facts = sources.list_units(source)
            path.parent.mkdir(parents=True, exist_ok=True)
            shards.write_json(path, {"units": units, "facts": facts})
        listing = json.loads(path.read_text(encoding="utf-8"))
        return listing["units"], listing["facts"]

    def pinned(self, i: int) -> sources.Source:
        """Source `i`, readable from any process: at its pinned revision, its path absolute."""
        revision = self.facts[i].get("revision")
        return replace(self.sources[i], revision=revision).on_any_machine()

    @property
    def local_sizes(self) -> list[int] | None:
        """Bytes of each file; None if a source is remote and does not say."""
        if any("files" not in facts for facts in self.facts):
            return None
        return [size for facts in self.facts for size in facts["files"].values()]

    @cached_property
    def block(self) -> int:
        """Characters that are held out together. Few files: a thousandth of the text."""
        sizes = self.local_sizes
        if sizes is None or len(sizes) >= FEW_FILES:
            return sources.DOCUMENT
        return min(max(4096, sum(sizes) // 1024), sources.DOCUMENT)

    @cached_property
    def val_below(self) -> int:
        """A block is held out if its 64-bit hash is below this: `val_fraction` of all blocks are.

        A small corpus is read here, and if that would be less than a row (at 8 bytes per token),
        the blocks with the smallest hashes are held out, up to half of the text.
        """
        below, sizes = int(self.config.val_fraction * 2**64), self.local_sizes
        if sizes is None or sum(sizes) > SMALL:
            return below
        found = {}  # hash -> bytes: a block that occurs twice counts once
        for s, units in enumerate(self.units):
            for unit in units:
                for text in sources.documents(self.sources[s], unit, Counter()):
                    for block in blocks(text, self.block):
                        raw = block.encode("utf-8", "replace")
                        found[hash64(raw)] = len(raw)
        wanted, held = min(8 * self.config.row_len, sum(found.values()) // 2), 0
        for value in sorted(found):
            if value >= below and held >= wanted:
                break
            held += found[value]
            below = max(below, value + 1)
        return below

    def record_path(self, source: int, unit: int) -> Path:
        return self.records / f"{self.sources[source].name}_{unit:05d}.json"

    def record(self, source: int, unit: int) -> dict | None:
        """The record of a finished unit; None if a shard is missing or its text is newer."""
        path = self.record_path(source, unit)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            for split in ("train", "val"):
                for shard in record["splits"][split]["shards"]:
                    for name, size, _ in shards.files_of(shard):
                        if (self.folder / name).stat().st_size != size:
                            return None
        except (OSError, ValueError):
            return None
        if record["val_below"] != self.val_below or self.newer_than(path, source, unit):
            return None
        return record

    def newer_than(self, path: Path, source: int, unit: int) -> bool:
        """Was a file of the unit written after `path`? (Another size gives another key.)"""
        if not self.sources[source].mutable:
            return False
        files = sources.cached_files(self.sources[source])
        return any(
            files[name].stat().st_mtime > path.stat().st_mtime
            for name, _, _ in self.units[source][unit]["pieces"]
        )

    def target(self, source: int) -> float:
        """Training tokens wanted of a source; inf: all."""
        if not self.tokens:
            return float("inf")
        return self.tokens * self.shares[source] / sum(self.shares)


def shares_of(names: list[str], mixture: tuple[str, ...]) -> list[float]:
    """The share of `tokens` that each source gives; without a mixture, equal shares."""
    from machinery.cli import weights  # cli imports torch

    shares = weights(mixture) or dict.fromkeys(names, 1.0)
    if set(shares) != set(names) or min(shares.values()) <= 0:
        raise ValueError(
            f"the mixture {' '.join(mixture)} must give each source ({', '.join(names)}) a share "
            "above 0, as in --mixture web=80 books=20"
        )
    return [shares[name] for name in names]


def tokens_wanted(text: str, listed: list[sources.Source]) -> int:
    """'2B' -> 2_000_000_000; 'all' or '' -> 0, everything; '' is refused for a Hub source."""
    from machinery.cli import count

    tokens = 0 if text == "all" else count(text)
    unbounded = [s.place for s in listed if s.unbounded]
    if unbounded and not tokens and text != "all":
        raise ValueError(
            f"hf:{unbounded[0]} may hold far more than you need; say how many tokens you "
            "want, as in --tokens 2B, or --tokens all for everything"
        )
    return tokens


# ------------------------------------------------------------------------------------- a unit


def hash64(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def split_text(text: str, block: int, val_below: int) -> Iterator[tuple[str, str]]:
    """A document -> ("train" or "val", text), chosen block by block by the content alone.

    A text that occurs twice is therefore on one side only. Neighbouring blocks on the same side
    stay together.
    """
    side = lambda part: "val" if hash64(part.encode("utf-8", "replace")) < val_below else "train"
    for split, run in groupby(blocks(text, block), side):
        yield split, "".join(run)


def prepare_unit(task: dict) -> dict:
    """Read, tokenize, pack and write one unit; returns its record, which is written last."""
    folder, source, index = Path(task["folder"]), task["source"], task["index"]
    if not Path(task["tokenizer"]).exists():
        raise UsageError(
            f"{task['tokenizer']} is not there on {socket.gethostname()}: all machines of a "
            "cluster must share the data folder"
        )
    tokenizer = load_tokenizer(task["tokenizer"])
    dtype = shards.dtype_for(tokenizer.vocab_size)
    notes, totals = Counter(), {"train": Counter(), "val": Counter()}
    val_docs: list[np.ndarray] = []

    def train_docs() -> Iterator[np.ndarray]:
        """The training documents as ids; those for validation are set aside."""
        for text in sources.documents(source, task["unit"], notes):
            for split, part in split_text(text, task["block"], task["val_below"]):
                ids = tokenizer.encode_array(part).astype(dtype)
                size = len(part.encode("utf-8", "replace"))
                totals[split].update(documents=1, bytes=size, tokens=len(ids))
                if split == "train":
                    yield ids
                else:
                    val_docs.append(ids)

    train = data.pack(train_docs(), task["row_len"], tokenizer.bos_id, BUFFER)
    name = f"{source.name}/unit_{index:05d}"
    entries = {"train": shards.write_shards(train, folder, f"train/{name}", dtype)}
    val = data.pack(val_docs, task["row_len"], tokenizer.bos_id, BUFFER)
    rows = list(val)  # shuffled, so that the first rows are a fair sample of the unit
    order = data.Permutation(len(rows), "val") if rows else None
    shuffled = (rows[order(i)] for i in range(len(rows)))
    entries["val"] = shards.write_shards(shuffled, folder, f"val/{name}", dtype)
    record = {"notes": notes, "val_below": task["val_below"], "splits": {}}
    for split, packed in (("train", train), ("val", val)):
        record["splits"][split] = {
            **totals[split],
            "packing": asdict(packed.stats),
            "shards": entries[split],
            "leftover": [ids.tolist() for ids in packed.leftover],
        }
    shards.write_json(Path(task["record"]), record)
    return record


def tokenizer_sample(job: Job) -> Iterator[str]:
    """Training text for a tokenizer: from the first units of each source, in the job's shares."""
    for s in range(len(job.sources)):
        units = job.units[s][:TOKENIZER_UNITS]
        for unit in units:
            left = TOKENIZER_CHARS * job.shares[s] / sum(job.shares) / len(units)
            for text in sources.documents(job.pinned(s), unit, Counter()):
                for split, part in split_text(text, job.block, job.val_below):
                    if left > 0 and split == "train":
                        part = part[: min(TOKENIZER_DOC_CHARS, int(left) + 1)]
                        left -= len(part)
                        yield part
                if left <= 0:
                    break


# ------------------------------------------------------------------------------------ the pool


@contextmanager
def open_pool(workers: int, cluster: str) -> Iterator[tuple[Executor, int]]:
    """The executor of a preparation and its number of slots: local processes, or a Dask cluster's.

    A cluster's scheduler and workers need the repository's folder in PYTHONPATH, because they
    import this file by name, and they must share the data folder.
    """
    if cluster:
        with connect(cluster) as client:
            yield from _cluster_pool(client, cluster)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker) as pool:
        try:
            yield pool, workers
        except BrokenProcessPool:
            raise DataError(POOL_DIED) from None
        except BaseException:
            for process in list(pool._processes.values()):
                process.terminate()
            raise


def connect(cluster: str):
    """A Dask client; a ValueError of one sentence if Dask or its scheduler is not there."""
    try:
        from distributed import Client
    except ImportError:
        raise ValueError(
            "--cluster needs Dask, which is not installed: pip install distributed"
        ) from None
    try:
        return Client(cluster, timeout="30s")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no Dask scheduler answers at {cluster} ({error}); start one in the "
            "repository's folder: PYTHONPATH=. dask scheduler"
        ) from None


def _cluster_pool(client, cluster: str) -> Iterator[tuple[Executor, int]]:
    from distributed.scheduler import KilledWorker

    if not (slots := sum(client.nthreads().values())):
        raise ValueError(
            f"the cluster {cluster} has no workers; start some in the repository's folder: "
            f"PYTHONPATH=. dask worker {cluster}"
        )
    pool = client.get_executor(pure=False, retries=2)
    try:
        yield pool, slots
    except KilledWorker as error:
        raise DataError(f"the cluster gave up on a unit whose workers died ({error})") from None
    except Exception as error:
        if ModuleNotFoundError in (type(error), type(error.__cause__)):
            raise ValueError(
                f"the cluster {cluster} cannot import our code; start its scheduler and its "
                "workers with the repository's folder in PYTHONPATH"
            ) from None
        raise
    finally:
        pool.shutdown(wait=False)  # cancels the units that still run


def start_worker() -> None:
    """In a process of the local pool: leave Ctrl-C to the parent, and end when the parent ends."""

    def die_with_parent() -> None:
        parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=die_with_parent, daemon=True).start()


def run_units(job: Job, pool: Executor, slots: int) -> dict[tuple[int, int], dict]:
    """Do the unfinished units; returns all records by (source, unit)."""
    done = {}
    for s in range(len(job.sources)):
        for u in range(len(job.units[s])):
            if (record := job.record(s, u)) is not None:
                done[s, u] = record
    if next_unit(job, done, {}) is None:
        return done
    check_room(job, sum(map(train_tokens, done.values())))
    running: dict[Future, tuple[int, int]] = {}
    with progress_bar(job, done) as bar:
        while True:
            while len(running) < slots and (unit := next_unit(job, done, running)):
                running[pool.submit(prepare_unit, unit_task(job, *unit))] = unit
            if not running:
                return done
            bar.set_postfix_str(f"{len(done)} units done, {len(running)} running")
            finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                s, u = unit = running.pop(future)
                done[unit] = record = future.result()
                bar.update(train_tokens(record) if job.tokens else job.units[s][u].get("bytes", 0))


def train_tokens(record: dict) -> int:
    return record["splits"]["train"].get("tokens", 0)


def next_unit(job: Job, done: dict, running: dict) -> tuple[int, int] | None:
    """The first unit that is neither done nor running, while tokens are still wanted."""
    busy = set(running.values())
    for s in range(len(job.sources)):
        known = [train_tokens(r) for (i, _), r in done.items() if i == s]
        guess, have = sum(known) / len(known) if known else job.tokens / 4, 0.0
        for u in range(len(job.units[s])):
            if have >= job.target(s):
                break
            if (s, u) in done:
                have += train_tokens(done[s, u])
            elif (s, u) in busy:
                have += guess
            else:
                return s, u
    return None


def unit_task(job: Job, source: int, unit: int) -> dict:
    """The arguments of `prepare_unit`: plain values, which any process can unpickle."""
    return {
        "source": job.pinned(source),
        "index": unit,
        "unit": job.units[source][unit],
        "folder": str(job.folder.absolute()),
        "record": str(job.record_path(source, unit).absolute()),
        "tokenizer": str(job.tokenizer.absolute()),
        "row_len": job.config.row_len,
        "block": job.block,
        "val_below": job.val_below,
    }


def progress_bar(job: Job, done: dict):
    """Tokens if a number is wanted, else bytes; moves whenever a unit ends."""
    from tqdm import tqdm

    sizes = [u.get("bytes") for units in job.units for u in units]
    total, start = job.tokens, sum(map(train_tokens, done.values()))
    if not job.tokens:
        total = None if None in sizes else sum(sizes)
        start = sum(job.units[s][u].get("bytes", 0) for s, u in done)
    return tqdm(
        total=total, initial=start, unit="tok" if job.tokens else "B", unit_scale=True,
        desc="prepare", mininterval=0.5, dynamic_ncols=True,
    )  # fmt: skip


def check_room(job: Job, done_tokens: int) -> None:
    """StorageError before any work if the tokens wanted do not fit on the disk."""
    width = np.dtype(shards.dtype_for(job.config.vocab_size)).itemsize
    tokens = job.tokens * 1.05  # a source ends with a whole unit
    if (sizes := job.local_sizes) is not None:  # at least 2.5 bytes of text per token
        tokens = min(tokens or float("inf"), sum(sizes) / 2.5)
    elif not tokens:
        print(
            "the size of a Hub source is unknown until it is read: the room on the disk was not "
            "checked",
            file=sys.stderr,
        )
    need = max(0.0, tokens - done_tokens) * width
    if need > (free := shutil.disk_usage(job.folder).free):
        raise StorageError(
            f"about {need / 1e9:.1f} GB more are needed in {job.folder}, "
            f"{free / 1e9:.1f} GB are free; choose another --data_dir or fewer --tokens"
        )


# ----------------------------------------------------------------------------- earlier results


def reuse(job: Job) -> shards.Manifest | None:
    """The manifest, if the folder holds this job's data; ValueError if it holds something else.

    None if something is missing or damaged: the caller removes the manifest and redoes that.
    """
    if not (job.folder / "manifest.json").exists():
        return None
    manifest = shards.Manifest.load(job.folder)
    tree = manifest.tree
    same_tokens = tree["tokens_wanted"] == job.tokens
    if tree["prepared_from"] != job.key:
        same = tree["options"] == job.options
        if same and same_tokens and all(s.installed for s in job.sources):
            return keep_as_made(job, manifest)
        reason = "its text has changed since" if same else "made with other options"
        raise ValueError(
            f"{job.folder} holds other data ({reason}); choose another --data_dir, or "
            f"remove it first: rm -r {job.folder}"
        )
    reason = ""
    try:
        manifest.check()
    except DataError as error:
        reason = str(error)
    units = [(s, u) for s, facts in enumerate(tree["sources"]) for u in range(facts["units"])]
    if any(job.newer_than(job.folder / "manifest.json", s, u) for s, u in units):
        reason = "some of its text is newer"
    if reason:
        print(f"redoing the missing parts of {job.folder}: {reason}", file=sys.stderr)
        return None
    return manifest if same_tokens else None


def keep_as_made(job: Job, manifest: shards.Manifest) -> shards.Manifest:
    """After an update of Python, whose text has changed: use the data if it is whole. It can no
    longer be repaired, because its text is gone."""
    try:
        manifest.check()
    except DataError as error:
        reason = str(error).partition("; ")[0]  # without the remedy, which does not apply here
        raise DataError(
            f"{reason}; the installed Python files have changed since, so it cannot be made as it "
            f"was; remove the data and run the same command again: rm -r {job.folder}"
        ) from None
    print("the installed Python files have changed since; the data is kept as it was made")
    return manifest


def sweep(folder: Path, manifest: shards.Manifest | None = None) -> None:
    """Remove the temporary files of killed runs, and the leftover rows of smaller selections."""
    stale = set(folder.rglob(".tmp-*"))
    if manifest is not None:
        kept = {folder / name for s in manifest.all_shards() for name, _, _ in shards.files_of(s)}
        stale |= set(folder.glob("[tv]*/*/leftover_*")) - kept
    for path in stale:
        path.unlink(missing_ok=True)
