"""One unit of text -> its shards, and the pool that does all units of a job.

`prepare_unit` is a pure function from a task to files, so any number of processes or machines gives
the same bytes. It writes the unit's record, DATA_DIR/.units/KEY/SOURCE_00003.json, last: then the
unit is done, and `run_units` does the units without a record. The processes of the pool import this
file, so it imports no torch. Next: prepare_data.py has all the steps, shards.py holds the rows.
"""

import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import groupby
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path

import numpy as np
from tqdm import tqdm

import data
from config import DataConfig, UsageError
from machinery import cli, disk, formats, shards
from machinery.errors import DataError
from machinery.formats import Unit, UnitSplit
from machinery.output import say
from preparation import chat, sources
from preparation.reading import DOCUMENT, Notes
from tokenizer import SPLIT, Tokenizer, blocks, normalize, split_of

BUFFER = 16_384  # documents held by the packer
TOKENIZER_CHARS = 200_000_000  # the most text that a tokenizer is trained on
TOKENIZER_DOC_CHARS = 10_000  # the most of one document, unless there are few files
TOKENIZER_UNITS = 16  # per source, from which that text is drawn
FEW_FILES = 256  # with fewer, blocks of documents are held out instead of whole documents
PROMPTS = 3  # held-out documents, of a unit and of all, whose first words are kept for samples
SMALL = 24_000_000  # bytes; a smaller corpus is read once more, to hold out the share asked for


def digest(tree: object) -> str:
    """16 hexadecimal digits of the sha256 of a JSON tree."""
    return disk.sha256_of_tree(tree)[:16]


class Job:
    """A whole preparation, from a DataConfig: its units, its records, and what is done already."""

    def __init__(self, config: DataConfig, given: Tokenizer | None = None) -> None:
        """given: the tokenizer that config.tokenizer names; None: one is to be trained."""
        self.config = config
        self.folder = Path(config.data_dir)
        self.given = given
        encoding = sources.encoding_of(config.encoding)
        self.sources = [sources.parse(spec, encoding) for spec in config.source]
        self.conversations = any(source.conversations for source in self.sources)
        self._read_options()
        self.units, self.facts = zip(*map(self._list, self.sources))
        self.all_units = [(s, u) for s, units in enumerate(self.units) for u in range(len(units))]
        self.sources = [
            replace(source, revision=facts.get("revision"))
            for source, facts in zip(self.sources, self.facts)
        ]
        self.nfc = config.nfc
        self.split = split_of(config.digits, config.keep_marks)
        tokenizer = [config.vocab_size, config.nfc, TOKENIZER_CHARS, self.shares]
        tokenizer += [self.split] if self.split != SPLIT else []  # older data keep their key
        if given:
            if self.split not in (SPLIT, given.split):
                raise UsageError(
                    f"--digits and --keep_marks are for a tokenizer that is trained, and "
                    f"{config.tokenizer} cuts text in its own way; add --digits 2 --no_keep_marks"
                )
            if config.nfc and not given.nfc:
                raise UsageError(
                    f"--nfc has no effect: {config.tokenizer} was trained without it; add --no_nfc"
                )
            self.nfc, tokenizer = given.nfc, given.sha256
            if len(set(self.shares)) > 1:  # they decide which units there are
                tokenizer = [tokenizer, self.shares]
        options = {
            "source": [s.spec for s in self.sources],
            "tokenizer": tokenizer,
            "revisions": [s.revision for s in self.sources],
            "format": formats.DATA_FORMAT,
            "row_len": config.row_len,
            "val_fraction": config.val_fraction,
            "buffer": BUFFER,
        }
        options |= {"dedup": config.dedup} if config.dedup != "none" else {}
        options |= {"encoding": encoding} if encoding != "utf-8" else {}
        self.options = digest(options)
        self.key = digest([self.options, self.units])  # of all that decides the shards' content

        is_local = not any(source.remote for source in self.sources)
        # of text; the Hub does not say
        self.bytes = sum(facts["bytes"] for facts in self.facts) if is_local else None
        # With few files, documents are parts of files rather than what someone wrote as one.
        self.few_files = is_local and sum(facts["files"] for facts in self.facts) < FEW_FILES
        self.block = DOCUMENT  # characters that are held out together
        if self.few_files:  # 4,096, or a thousandth of a long text, or a 32nd of a short one
            self.block = min(max(min(4096, self.bytes // 32), self.bytes // 1024, 1), DOCUMENT)
        # (source, unit) -> which of its documents are left out; found by preparation/copies.py
        self.copies = defaultdict(frozenset)
        self.check(remote=False)
        self.val_below = self._val_below()

        self.written_ns = [  # of files that people edit
            path.stat().st_mtime_ns
            for source in self.sources
            if source.local
            for path in sources.find_files(source)[0].values()
        ]
        # The records of finished units: in another folder for other options or other text.
        name = f".units/{digest([self.key, self.val_below, self.written_ns])}"
        self.records = disk.inside(self.folder.absolute(), name)
        self.tokenizer = self.records / "tokenizer.json"

    def _read_options(self) -> None:
        """Set `shares` and `tokens` (0: all); UsageError for an option that cannot be used."""
        config = self.config
        names = [source.name for source in self.sources]
        if not names:
            raise UsageError("--source names no text; try --source stdlib, or files:PATH")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise UsageError(
                f"two sources are named {twice[0]!r}; name them: --source a=files:... b=files:..."
            )
        shares = cli.weights(config.mixture) or dict.fromkeys(names, 1.0)
        if set(shares) != set(names) or min(shares.values()) <= 0:
            raise UsageError(
                f"the mixture {' '.join(config.mixture)} must give each source "
                f"({', '.join(names)}) a share above 0, as in --mixture web=80 books=20"
            )
        self.shares = [shares[name] for name in names]
        self.tokens = 0 if config.tokens == "all" else cli.count(config.tokens)
        remote = [source.place for source in self.sources if source.remote]
        if remote and not config.tokens:
            raise UsageError(
                f"hf:{remote[0]} may hold far more text than you need; give its training "
                "tokens: --tokens 2B, or --tokens all"
            )
        data.pack([], config.row_len, 0)  # refuses a bad row_len

    def _list(self, source: sources.Source) -> tuple[list[dict], dict]:
        """The units and facts of a source. A list from the network is kept on disk."""
        if not source.remote:
            return sources.list_units(source)
        path = disk.inside(self.folder, f".units/remote-{digest(repr(source))}.json")
        try:
            listing = disk.read_json(path)
            facts = {name: listing["facts"][name] for name in ("revision", "shards")}
            return [{**unit} for unit in listing["units"]], facts
        except (DataError, LookupError, TypeError):  # none yet, or damaged
            units, facts = sources.list_units(source)
        disk.write_json(path, {"units": units, "facts": facts})
        return units, facts

    def _val_below(self) -> int:
        """A block is held out if its 64-bit hash is below this: `val_fraction` of all blocks are.

        With few blocks that may be none, or far too many. So if the corpus is small, or little of
        it is held out, it is read here: the smallest hashes are held out, until their blocks have
        `val_fraction` of the bytes and at least a row (8 bytes per token), but not over half."""
        share = self.config.val_fraction
        if self.bytes is None or self.bytes > SMALL and self.bytes * share > SMALL / 100:
            return int(share * 2**64)
        notes = Notes()
        found = {}  # hash -> bytes: a block that occurs twice counts once
        for s, u in self.all_units:
            size = self.block_of(s)
            for block in (b for text in self.texts(s, u, notes) for b in blocks(text, size)):
                found[data.hash64(block)] = len(block.encode("utf-8"))
        if len(found) == 1:
            raise UsageError(
                f"there is only one text, {chat.beginning(block)}{sources.left_out(notes)}; add "
                "others, as one has to be held out for validation"
            )
        size = sum(found.values())
        below = 0
        held = 0
        wanted = max(share * size, min(8 * self.config.row_len, size // 2))
        for value in sorted(found)[:-1]:  # one at least is for training
            if held >= wanted:
                break
            held += found[value]
            below = value + 1
        return below

    def check(self, remote: bool) -> None:
        """UsageError if a source that is remote, or one that is not, cannot be used as asked."""
        for source, units in zip(self.sources, self.units):
            if source.remote == remote:
                sources.check(source, units)

    def block_of(self, source: int) -> int:
        """Characters of a source that are held out together: a conversation is never divided, and
        a record only if it is longer than a document."""
        return self.block if sources.is_plain_text(self.sources[source]) else DOCUMENT

    def texts(self, source: int, unit: int, notes: Notes) -> Iterator[str]:
        """The documents of a unit, normalized: the form in which they are split and tokenized."""
        documents = sources.documents(self.sources[source], self.units[source][unit], notes)
        for i, document in enumerate(documents):
            if i not in self.copies[source, unit]:
                yield normalize(chat.as_text(document), self.nfc)

    def record_path(self, source: int, unit: int) -> Path:
        return self.records / f"{self.sources[source].name}_{unit:05d}.json"

    def record(self, source: int, unit: int) -> Unit | None:
        """The record of a finished unit; None if it, or a shard, is missing or damaged."""
        try:
            record = formats.read(self.record_path(source, unit), Unit)
            for part in record.splits.values():
                for shard in part.shards:
                    for name, size, _ in shard.files():
                        if disk.inside(self.folder, name).stat().st_size != size:
                            return None
        except (OSError, DataError):
            return None
        return record

    def task(self, source: int, unit: int) -> tuple:
        """The arguments of `prepare_unit`: plain values, which any process can unpickle."""
        return (
            self.sources[source],
            self.units[source][unit],
            self.record_path(source, unit),
            f"unit_{unit:05d}",
            self.config.row_len,
            self.block_of(source),
            self.val_below,
            self.copies[source, unit],
        )


def split_text(text: str, block: int, val_below: int) -> Iterator[tuple[str, str]]:
    """A normalized document -> ("train" or "val", text), block by block, by the content alone: a
    text that occurs twice is on one side only. Neighboring blocks on a side stay together."""
    side = lambda part: "val" if data.hash64(part) < val_below else "train"
    for split, run in groupby(blocks(text, block), side):
        yield split, "".join(run)


def first_words(text: str, most: int = 31) -> str:
    """The beginning of the first line of a text: the words that end within 1 + `most` characters,
    or as many characters of a long word, or of Chinese."""
    return re.search(rf"[^\s\ufeff](.{{,{most}}}(?<!\s)(?!\S)|\S{{,{most}}})|$", text)[0]


read_tokenizer = lru_cache(maxsize=1)(Tokenizer)  # a process needs it once per unit


def prepare_unit(
    source, unit: dict, path: Path, name: str, row_len, block, val_below, copies: frozenset
) -> Unit:
    """Read, tokenize, pack and write one unit, but for its `copies`; returns its record, written
    last, to `path`."""
    tokenizer = read_tokenizer(disk.read_text(path.with_name("tokenizer.json")))
    dtype = shards.dtype_for(tokenizer.vocab_size)
    notes = Notes()
    totals = {"train": Counter(), "val": Counter()}
    val_docs = []
    begins = []  # their first words

    def parts(document) -> Iterator[tuple]:
        """(split, ids, bytes of text, how it begins) of each part of a document; of one that is not
        the first, how its first whole line does. A conversation has one split, and a question."""
        text = tokenizer.normalize(chat.as_text(document))
        if isinstance(document, str):
            for i, (split, part) in enumerate(split_text(text, block, val_below)):
                ids = tokenizer.encode_array(part, normalized=True)
                begin = first_words(part.partition("\n")[2] if i else part)
                yield split, ids, len(part.encode("utf-8")), begin
        else:
            split = "val" if data.hash64(text) < val_below else "train"
            begin = first_words(dict(document[::-1])["user"], 159)  # of the first question
            for piece in chat.pieces(document, tokenizer, row_len, notes):
                size = int(tokenizer.token_bytes[piece].sum())
                yield split, np.array(piece), size, begin

    def train_docs() -> Iterator[np.ndarray]:
        """The training documents as ids; those for validation are set aside."""
        for i, document in enumerate(sources.documents(source, unit, notes)):
            if i in copies:
                notes["copies of other documents, left out"] += 1
                continue
            for split, ids, size, begin in parts(document):
                totals[split].update(documents=1, bytes=size, tokens=len(ids))
                if split == "train":
                    yield ids.astype(dtype)
                else:
                    val_docs.append(ids.astype(dtype))
                    begins.append(begin)

    splits = {}
    for split, docs in (("train", train_docs()), ("val", val_docs)):
        packed = data.pack(docs, row_len, tokenizer.bos_id, BUFFER, source.conversations)
        rows = packed
        if split == "val":  # shuffled, so that the first rows are a fair sample of the unit
            in_order = list(packed)
            order = data.Permutation(len(in_order), "val")
            rows = [in_order[order(i)] for i in range(order.n)]
        splits[split] = UnitSplit(
            shards=shards.write_shards(
                rows, path.parents[2], f"{split}/{source.name}/{name}", dtype
            ),
            packing=asdict(packed.stats),
            leftover=[ids.tolist() for ids in packed.leftover],
            **totals[split],
        )
        if source.conversations:  # each piece has one BOS, the others fill rows
            notes[chat.FILLERS] += packed.stats.bos - packed.stats.documents
    record = Unit(
        splits=splits,
        tokens=totals["train"]["tokens"],
        documents=notes.read + notes.bad,
        notes=dict(notes),
        examples=notes.examples,
        beginnings="\n".join([*filter(None, begins)][:PROMPTS]),
    )
    disk.write_json(path, formats.tree_of(record))
    return record


def tokenizer_sample(job: Job) -> Iterator[str]:
    """Training text for a tokenizer: from the first units of each source, in the job's shares. No
    document gives more than TOKENIZER_DOC_CHARS, so that many contribute, unless files are few."""
    most = TOKENIZER_CHARS if job.few_files else TOKENIZER_DOC_CHARS
    for s, share in enumerate(job.shares):
        units = min(TOKENIZER_UNITS, len(job.units[s]))
        for u in range(units):
            left = TOKENIZER_CHARS * share / sum(job.shares) / units
            texts = job.texts(s, u, Notes())
            size = job.block_of(s)
            trained = (
                part
                for text in texts
                for split, part in split_text(text, size, job.val_below)
                if split == "train"
            )
            for part in trained:
                part = part[: min(most, int(left) + 1)]
                left -= len(part)
                yield part
                if left <= 0:
                    break


@contextmanager
def open_pool(workers: int) -> Iterator[tuple[Executor, int]]:
    """The executor of a preparation and its slots: processes of this machine."""
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker) as pool:
        try:
            yield pool, workers
        except BrokenProcessPool:
            raise DataError(
                "a process of the pool died (out of memory? fewer --workers need less); "
                f"{sources.AGAIN}"
            ) from None
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


def run_units(job: Job, pool: Executor, slots: int) -> dict[tuple[int, int], Unit]:
    """Do the unfinished units; returns all records by (source, unit)."""
    found = ((unit, job.record(*unit)) for unit in job.all_units)
    done = {unit: record for unit, record in found if record is not None}
    tokens = sum(record.tokens for record in done.values())
    check_room(job, tokens)
    running = {}  # a future -> its unit
    said = time.monotonic()
    with tqdm(
        desc="prepare",
        total=job.tokens or None,
        initial=tokens,
        unit="tok",
        unit_scale=True,
        disable=None,
    ) as bar:
        while True:
            while len(running) < slots and (unit := next_unit(job, done, running)):
                running[pool.submit(prepare_unit, *job.task(*unit))] = unit
            bar.set_postfix_str(f"{len(done)} of {len(job.all_units)} units")
            if not running:
                return done
            if bar.disable and time.monotonic() > said + 60:  # a log, not a terminal
                said = time.monotonic()
                say(f"prepare   {len(done)} of {len(job.all_units)} units, {tokens:,} tokens")
            finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                record = future.result()
                done[running.pop(future)] = record
                tokens += record.tokens
                bar.update(record.tokens)


def first_units(job: Job, source: int, records: dict) -> Iterator[tuple[int, int]]:
    """The first units of a source that together have the tokens wanted. A unit without a record
    counts as the mean of those with one, or, if there is none, as a 16th of the tokens wanted."""
    known = [record.tokens for (s, _), record in records.items() if s == source]
    guess = sum(known) / len(known) if known else job.tokens / 16
    have = 0.0
    target = job.tokens * job.shares[source] / sum(job.shares) or float("inf")
    for u in range(len(job.units[source])):
        if have >= target:
            break
        yield source, u
        have += records[source, u].tokens if (source, u) in records else guess


def next_unit(job: Job, done: dict, running: dict) -> tuple[int, int] | None:
    """The first unit that is neither done nor running, while tokens are still wanted."""
    busy = {*done, *running.values()}
    wanted = (
        unit
        for s in range(len(job.sources))
        for unit in first_units(job, s, done)
        if unit not in busy
    )
    return next(wanted, None)


def check_room(job: Job, done_tokens: int) -> None:
    """StorageError before any work if the tokens wanted do not fit on the disk."""
    width = np.dtype(shards.dtype_for(job.config.vocab_size)).itemsize
    tokens = job.tokens * 1.05  # a source ends with a whole unit
    if job.bytes is not None:  # at least 2.5 bytes of text per token
        tokens = min(tokens or float("inf"), job.bytes / 2.5)
    elif not tokens:
        say("the size of a Hub source is unknown: room not checked", file=sys.stderr)
    need = max(0.0, tokens - done_tokens) * width
    disk.check_room(job.folder, need, "choose another --data_dir or fewer --tokens")


def reuse(job: Job) -> shards.Manifest | None:
    """The manifest, if the folder holds this job's data; None if something is missing, damaged or
    older than its text; UsageError if the folder holds something else. Python's own text changes
    with each update: data made of it is kept as long as it is intact."""
    path = job.folder / "manifest.json"
    if not path.exists():
        return None
    manifest = shards.Manifest.load(job.folder)
    same_options = manifest.facts.options == job.options
    same_text = manifest.facts.prepared_from == job.key
    if not same_options or not (same_text or all(source.installed for source in job.sources)):
        reason = "its text has changed since" if same_options else "made with other options"
        raise UsageError(
            f"{job.folder} holds other data ({reason}); choose another --data_dir, or remove it "
            f"first: rm -r {shlex.quote(str(job.folder))}"
        )
    try:
        manifest.check()
        # a time in the future proves nothing
        if any(path.stat().st_mtime_ns < when <= time.time_ns() for when in job.written_ns):
            raise DataError("some of its text is newer")
    except DataError as error:
        reason = str(error).partition("; ")[0]  # without its remedy
        say(f"redoing the missing parts of {job.folder}: {reason}", file=sys.stderr)
        return None
    if not same_text:
        say("the installed Python files have changed since; the data is kept as it was made")
    return manifest if manifest.facts.tokens_wanted == job.tokens else None


def sweep(job: Job) -> None:
    """Remove what earlier preparations in this folder left: temporary files, the rows packed from
    leftovers, and records of other options or other text, since this job's shards have the same
    names. Below DATA_DIR there may be folders of others: only its own are looked into."""
    records = job.records.parent
    folders = [  # no link leads elsewhere
        disk.inside(job.folder, f"{split}/{source.name}")
        for split in ("train", "val")
        for source in job.sources
    ]
    for folder in (job.folder, records, job.records, *folders):
        disk.sweep(folder.glob(disk.TEMPORARY))
    for folder in folders:
        for path in folder.glob("leftover_????????_?????_*.npy"):
            path.unlink()
    for other in records.glob("[0-9a-f]" * 16):
        if other.is_dir() and other != job.records:
            say(f"starting {job.folder} again: other options or other text", file=sys.stderr)
            if other.is_symlink():  # which is removed, not its target
                other.unlink()
            else:
                shutil.rmtree(other)
