"""One unit of text -> its shards, and the pool that does all units of a job.

`prepare_unit` is a pure function from a task to files, so any number of processes or machines gives
the same bytes. It writes the unit's record, DATA_DIR/.units/KEY/SOURCE_00003.json, last: then the
unit is done, and `run_units` does the units without a record. The processes of the pool import this
file, so it imports no torch. Next: prepare_data.py tells the story, shards.py holds the rows.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from itertools import groupby
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

import numpy as np

import data
from machinery import durable, shards, sources
from machinery.errors import DataError, UsageError
from tokenizer import Tokenizer, blocks, check_vocab_size, normalize

BUFFER = 16_384  # documents held by the packer
TOKENIZER_CHARS = 200_000_000  # the most text that a tokenizer is trained on
TOKENIZER_DOC_CHARS = 10_000  # the most of one document, unless there are few files
TOKENIZER_UNITS = 16  # per source, from which that text is drawn
FEW_FILES = 256  # with fewer, blocks of documents are held out instead of whole documents
SMALL = 24_000_000  # bytes of a corpus that is read once more, to hold out the share asked for


@lru_cache(maxsize=1)  # a process needs it once per unit
def load_tokenizer(path: Path, written_ns: int) -> Tokenizer:
    """`written_ns` is the file's time: a cluster's worker may outlive a tokenizer."""
    return Tokenizer.load(path)


# ------------------------------------------------------------------------------------ the job


def digest(tree: object) -> str:
    """16 hexadecimal digits of the sha256 of a JSON tree."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


class Job:
    """A whole preparation, from a DataConfig: its units, its records, and what is done already."""

    def __init__(self, config) -> None:
        self.config, self.folder = config, Path(config.data_dir)
        self.sources = [sources.parse(spec) for spec in config.source]
        self._read_options()
        self.units, self.facts = zip(*map(self._list, self.sources))
        self.all_units = [(s, u) for s, units in enumerate(self.units) for u in range(len(units))]
        revisions = [facts.get("revision") for facts in self.facts]
        self.sources = [replace(s, revision=r) for s, r in zip(self.sources, revisions)]
        self.nfc = config.nfc
        tokenizer = [config.vocab_size, config.nfc, TOKENIZER_CHARS, self.shares]
        if config.tokenizer:
            loaded = Tokenizer.load(config.tokenizer)
            if config.nfc and not loaded.nfc:
                raise ValueError(
                    f"--nfc has no effect: {config.tokenizer} was trained without it; add --no_nfc"
                )
            self.nfc, tokenizer = loaded.nfc, loaded.sha256
            if len(set(self.shares)) > 1:  # they decide which units there are
                tokenizer = [tokenizer, self.shares]
        options = {key: getattr(config, key) for key in ("source", "row_len", "val_fraction")}
        options |= {"format": shards.FORMAT, "buffer": BUFFER, "revisions": revisions}
        self.options = digest(options | {"tokenizer": tokenizer})
        self.key = digest([self.options, self.units])  # of all that decides the shards' content
        self.records = self.folder.absolute() / ".units" / self.key
        self.tokenizer = self.records / "tokenizer.json"

    def _read_options(self) -> None:
        """Set `shares` and `tokens` (0: all); ValueError for an option that cannot be used."""
        from machinery.cli import count, weights  # imports torch: the workers do without

        config, names = self.config, [source.name for source in self.sources]
        if twice := [name for name in names if names.count(name) > 1]:
            names = "--source a=files:... b=files:..."
            raise ValueError(f"two sources are named {twice[0]!r}; name them: {names}")
        shares = weights(config.mixture) or dict.fromkeys(names, 1.0)
        if set(shares) != set(names) or min(shares.values()) <= 0:
            raise ValueError(
                f"the mixture {' '.join(config.mixture)} must give each source "
                f"({', '.join(names)}) a share above 0, as in --mixture web=80 books=20"
            )
        self.shares = [shares[name] for name in names]
        self.tokens = 0 if config.tokens == "all" else count(config.tokens)
        unbounded = [source.place for source in self.sources if source.unbounded]
        if unbounded and not self.tokens and config.tokens != "all":
            raise ValueError(
                f"hf:{unbounded[0]} may hold far more text than you need; choose a number of "
                "training tokens, as in --tokens 2B, or --tokens all for everything"
            )
        if not 0 < (fraction := config.val_fraction) < 1:
            raise ValueError(f"val_fraction {fraction} is not in (0, 1); try --val_fraction 0.02")
        if config.workers < 0:
            raise ValueError(f"workers {config.workers} is below 0; 0 takes all cores")
        if not config.tokenizer:
            check_vocab_size(config.vocab_size)
        data.pack([], config.row_len, 0)  # refuses a bad row_len

    def _list(self, source: sources.Source) -> tuple[list[dict], dict]:
        """The units and facts of a source. A list from the network is kept on disk."""
        if not source.listed_once:
            return sources.list_units(source)
        path = self.folder / ".units" / f"remote-{digest(repr(source))}.json"
        if not path.exists():
            units, facts = sources.list_units(source)
            with durable.writable(self.folder, "choose another --data_dir"):
                durable.write_json(path, {"units": units, "facts": facts})
        listing = json.loads(path.read_text(encoding="utf-8"))
        return listing["units"], listing["facts"]

    @property
    def local_sizes(self) -> list[int] | None:
        """Bytes of each file; None if a source is remote: the Hub does not say."""
        if any("files" not in facts for facts in self.facts):
            return None
        return [size for facts in self.facts for size in facts["files"].values()]

    @property
    def few_files(self) -> bool:
        """Whether the documents are parts of files, rather than what someone wrote as one."""
        return self.local_sizes is not None and len(self.local_sizes) < FEW_FILES

    @cached_property
    def block(self) -> int:
        """Characters that are held out together. With few files: 4,096, or a thousandth of a long
        text, or a 32nd of a short one."""
        if not self.few_files:
            return sources.DOCUMENT
        size = sum(self.local_sizes)
        return min(max(min(4096, size // 32), size // 1024, 1), sources.DOCUMENT)

    @cached_property
    def val_below(self) -> int:
        """A block is held out if its 64-bit hash is below this: `val_fraction` of all blocks are.

        Of a few dozen blocks that may be none, or far too many. So a small corpus is read here, and
        the blocks with the smallest hashes are held out, until they have `val_fraction` of the
        bytes, and at least a row (at 8 bytes per token), but not over half of the text.
        """
        below, sizes = int(self.config.val_fraction * 2**64), self.local_sizes
        if sizes is None or sum(sizes) > SMALL:
            return below
        found = {}  # hash -> bytes: a block that occurs twice counts once
        for s, u in self.all_units:
            for block in (b for text in self.texts(s, u) for b in blocks(text, self.block)):
                found[hash64(block)] = len(block.encode("utf-8"))
        size, below, held = sum(found.values()), 0, 0
        wanted = max(self.config.val_fraction * size, min(8 * self.config.row_len, size // 2))
        for value in sorted(found):
            if held >= wanted:
                break
            held += found[value]
            below = value + 1
        return below

    def texts(self, source: int, unit: int) -> Iterator[str]:
        """The documents of a unit, normalized: the form in which they are split and tokenized."""
        documents = sources.documents(self.sources[source], self.units[source][unit], Counter())
        return (normalize(text, self.nfc) for text in documents)

    def record(self, source: int, unit: int) -> dict | None:
        """The record of a finished unit; None if a shard is missing or its text is newer."""
        path = self.record_path(source, unit)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            entries = [s for split in record["splits"].values() for s in split["shards"]]
            listed = [file for entry in entries for file in shards.files_of(entry)]
            whole = all((self.folder / f).stat().st_size == size for f, size, _ in listed)
        except (OSError, ValueError):
            return None
        same = whole and record["val_below"] == self.val_below
        return record if same and not self.newer_than(path, source, unit) else None

    def record_path(self, source: int, unit: int) -> Path:
        return self.records / f"{self.sources[source].name}_{unit:05d}.json"

    def newer_than(self, path: Path, source: int, unit: int) -> bool:
        """Was a file of the unit written after `path`? (Another size gives another key.) A time in
        the future says nothing and is ignored."""
        if not self.sources[source].mutable:
            return False
        files, written = sources.local_files(self.sources[source]), path.stat().st_mtime
        names = {name for name, _, _ in self.units[source][unit]["pieces"]}
        return any(written < files[name].stat().st_mtime <= time.time() for name in names)

    def task(self, source: int, unit: int) -> tuple:
        """The arguments of `prepare_unit`: plain values, which any process can unpickle."""
        what = self.sources[source], self.units[source][unit], self.record_path(source, unit)
        return *what, f"unit_{unit:05d}", self.config.row_len, self.block, self.val_below


# ------------------------------------------------------------------------------------- a unit


def hash64(text: str) -> int:
    """64 bits that depend on the text alone: the same on every machine."""
    raw = text.encode("utf-8")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def split_text(text: str, block: int, val_below: int) -> Iterator[tuple[str, str]]:
    """A normalized document -> ("train" or "val", text), block by block, by the content alone.

    So a text that occurs twice is on one side only. Neighboring blocks on a side stay together.
    """
    side = lambda part: "val" if hash64(part) < val_below else "train"
    for split, run in groupby(blocks(text, block), side):
        yield split, "".join(run)


def prepare_unit(source, unit: dict, path: Path, name: str, row_len, block, val_below) -> dict:
    """Read, tokenize, pack and write one unit; returns its record, written last, to `path`."""
    spec, folder = path.with_name("tokenizer.json"), path.parents[2]
    if not spec.exists():
        raise UsageError(
            f"{spec} is not there on {socket.gethostname()}: all machines of a cluster must share "
            "the data folder"
        )
    tokenizer = load_tokenizer(spec, spec.stat().st_mtime_ns)
    dtype = shards.dtype_for(tokenizer.vocab_size)
    notes, totals = Counter(), {"train": Counter(), "val": Counter()}
    val_docs: list[np.ndarray] = []

    def train_docs() -> Iterator[np.ndarray]:
        """The training documents as ids; those for validation are set aside."""
        for text in sources.documents(source, unit, notes):
            for split, part in split_text(tokenizer.normalize(text), block, val_below):
                ids = tokenizer.encode_array(part, normalized=True).astype(dtype)
                size = len(part.encode("utf-8"))
                totals[split].update(documents=1, bytes=size, tokens=len(ids))
                if split == "train":
                    yield ids
                else:
                    val_docs.append(ids)

    splits = {}
    for split, docs in (("train", train_docs()), ("val", val_docs)):
        packed = data.pack(docs, row_len, tokenizer.bos_id, BUFFER)
        rows = iter(packed)
        if split == "val":  # shuffled, so that the first rows are a fair sample of the unit
            order = data.Permutation(len(in_order := list(packed)), "val")
            rows = (in_order[order(i)] for i in range(order.n))
        entries = shards.write_shards(rows, folder, f"{split}/{source.name}/{name}", dtype)
        leftover = [ids.tolist() for ids in packed.leftover]
        counts = {**totals[split], "packing": asdict(packed.stats)}
        splits[split] = {**counts, "shards": entries, "leftover": leftover}
    record = {"notes": notes, "val_below": val_below, "splits": splits}
    durable.write_json(path, record)
    return record


def tokenizer_sample(job: Job) -> Iterator[str]:
    """Training text for a tokenizer: from the first units of each source, in the job's shares.

    No document gives more than TOKENIZER_DOC_CHARS, so that many contribute. With few files, whose
    parts are no such documents, only the total is limited.
    """
    most = TOKENIZER_CHARS if job.few_files else TOKENIZER_DOC_CHARS
    for s, share in enumerate(job.shares):
        units = min(TOKENIZER_UNITS, len(job.units[s]))
        for u in range(units):
            left = TOKENIZER_CHARS * share / sum(job.shares) / units
            texts = job.texts(s, u)
            parts = (part for t in texts for part in split_text(t, job.block, job.val_below))
            for part in (part for split, part in parts if split == "train"):
                part = part[: min(most, int(left) + 1)]
                left -= len(part)
                yield part
                if left <= 0:
                    break


# ------------------------------------------------------------------------------------ the pool


@contextmanager
def open_pool(workers: int, cluster: str) -> Iterator[tuple[Executor, int]]:
    """The executor of a preparation and its slots: local processes, or a Dask cluster's."""
    if cluster:
        from instruments import dask_cluster

        yield from dask_cluster.executor(cluster)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker) as pool:
        try:
            yield pool, workers
        except BrokenProcessPool:
            reason = "a process of the pool died (out of memory?)"
            remedy = f"{sources.AGAIN}; fewer --workers need less memory"
            raise DataError(f"{reason}; {remedy}") from None
        except BaseException:
            for process in active_children():
                process.terminate()
            raise


def start_worker() -> None:
    """In a process of the local pool: leave Ctrl-C to the parent, and end when the parent ends."""

    def end_with_parent() -> None:
        parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def run_units(job: Job, pool: Executor, slots: int) -> dict[tuple[int, int], dict]:
    """Do the unfinished units; returns all records by (source, unit)."""
    from tqdm import tqdm

    done = {unit: record for unit in job.all_units if (record := job.record(*unit)) is not None}
    if next_unit(job, done, {}) is None:
        return done
    check_room(job, sum(map(train_tokens, done.values())))
    running: dict[Future, tuple[int, int]] = {}
    # the bar counts tokens if a number of them is wanted, else units
    amount, name = (train_tokens, "tok") if job.tokens else (lambda record: 1, " units")
    total, initial = job.tokens or len(job.all_units), sum(map(amount, done.values()))
    with tqdm(desc="prepare", total=total, initial=initial, unit=name, unit_scale=True) as bar:
        while True:
            while len(running) < slots and (unit := next_unit(job, done, running)):
                running[pool.submit(prepare_unit, *job.task(*unit))] = unit
            if not running:
                return done
            bar.set_postfix_str(f"{len(running)} running")
            finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                done[running.pop(future)] = record = future.result()
                bar.update(amount(record))


def train_tokens(record: dict) -> int:
    """The training tokens of a finished unit."""
    return record["splits"]["train"].get("tokens", 0)


def first_units(job: Job, source: int, records: dict) -> Iterator[tuple[int, int]]:
    """The first units of a source that together have the tokens wanted.

    A unit without a record counts as much as the mean of those with one; as long as there is none,
    as a 16th of all tokens, so that 16 begin at once.
    """
    known = [train_tokens(record) for (s, _), record in records.items() if s == source]
    guess, have = sum(known) / len(known) if known else job.tokens / 16, 0.0
    target = job.tokens * job.shares[source] / sum(job.shares) or float("inf")
    for u in range(len(job.units[source])):
        if have >= target:
            break
        yield source, u
        have += train_tokens(records[source, u]) if (source, u) in records else guess


def next_unit(job: Job, done: dict, running: dict) -> tuple[int, int] | None:
    """The first unit that is neither done nor running, while tokens are still wanted."""
    busy = {*done, *running.values()}
    wanted = (unit for s in range(len(job.sources)) for unit in first_units(job, s, done))
    return next((unit for unit in wanted if unit not in busy), None)


def check_room(job: Job, done_tokens: int) -> None:
    """StorageError before any work if the tokens wanted do not fit on the disk."""
    width = np.dtype(shards.dtype_for(job.config.vocab_size)).itemsize
    tokens = job.tokens * 1.05  # a source ends with a whole unit
    if (sizes := job.local_sizes) is not None:  # at least 2.5 bytes of text per token
        tokens = min(tokens or float("inf"), sum(sizes) / 2.5)
    elif not tokens:
        print("the size of a Hub source is unknown: room not checked", file=sys.stderr)
    need = max(0.0, tokens - done_tokens) * width
    durable.check_room(job.folder, need, "choose another --data_dir or fewer --tokens")


# ----------------------------------------------------------------------------- earlier results


def reuse(job: Job) -> shards.Manifest | None:
    """The manifest, if the folder holds this job's data; ValueError if it holds something else.

    None if something is missing or damaged: the caller removes the manifest and redoes that.
    Python's own text changes with each update: data made of it is kept while it is whole.
    """
    path, remove = job.folder / "manifest.json", f"rm -r {job.folder}"
    if not path.exists():
        return None
    manifest = shards.Manifest.load(job.folder)
    tree, installed = manifest.tree, all(source.installed for source in job.sources)
    same_text, same_tokens = tree["prepared_from"] == job.key, tree["tokens_wanted"] == job.tokens
    same_options = tree["options"] == job.options
    if not same_text and not (same_options and same_tokens and installed):
        reason = "its text has changed since" if same_options else "made with other options"
        remedy = f"choose another --data_dir, or remove it first: {remove}"
        raise ValueError(f"{job.folder} holds other data ({reason}); {remedy}")
    try:
        manifest.check()
        units = ((s, u) for s, facts in enumerate(tree["sources"]) for u in range(facts["units"]))
        if same_text and any(job.newer_than(path, *unit) for unit in units):
            raise DataError("some of its text is newer")
    except DataError as error:
        reason = str(error).partition("; ")[0]  # without its remedy
        if same_text:
            print(f"redoing the missing parts of {job.folder}: {reason}", file=sys.stderr)
            return None
        raise DataError(
            f"{reason}; the installed Python files have changed since, so it cannot be made as it "
            f"was; remove the data and run the same command again: {remove}"
        ) from None
    if not same_text:
        print("the installed Python files have changed since; the data is kept as it was made")
    return manifest if same_tokens else None


def forget_others(job: Job) -> None:
    """Remove the records of other options or other text: this job's shards have the same names."""
    for records in job.records.parent.glob("*"):
        if records.is_dir() and records != job.records:
            reason = "its finished units were made with other options or other text"
            print(f"starting {job.folder} again: {reason}", file=sys.stderr)
            shutil.rmtree(records)


def sweep(folder: Path, manifest: shards.Manifest | None = None) -> None:
    """Remove the temporary files of killed runs, and the leftover rows of smaller selections."""
    stale = set(folder.rglob(".tmp-*"))
    if manifest is not None:
        kept = {folder / name for s in manifest.all_shards() for name, _, _ in shards.files_of(s)}
        stale |= set(folder.glob("[tv]*/*/leftover_*")) - kept
    for path in stale:
        path.unlink(missing_ok=True)
