"""One unit of text -> its rows: `work`, a pure function of a job and a unit, for any process.

    sources.documents   the documents of the unit, one after the other
    parts_of            each in parts that go to "train" or "val", as token ids
    data.pack           parts -> rows; shards.write_shards writes them
    unit_file           what is in them, and less than a row that is left over: a formats.Unit,
                        DATA_DIR/.units/HASH/SOURCE_00003.json; once it is there, the unit is done

Any number of processes or machines gives the same bytes. They import this file, so it imports no
torch. Next: sources.py and reading.py, where documents come from; then prepare_data.py, `finish`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np

import data
from machinery import disk, formats, shards
from machinery.errors import DataError
from machinery.formats import Unit, UnitSplit
from preparation import chat, sources
from preparation.job import BUFFER, Job, UnitId
from preparation.reading import Notes
from tokenizer import Tokenizer, blocks

PROMPTS = 3  # held-out documents, of a unit and of all, whose first words are kept for samples

read_tokenizer = lru_cache(maxsize=1)(Tokenizer)  # a process needs it once per unit


@dataclass
class Part:
    """A part of a document that is as a whole for training, or for validation."""

    split: str
    """train or val."""
    ids: np.ndarray
    """Its tokens, without BOS."""
    bytes: int
    """Of its text."""
    begin: str
    """Its first words."""


def work(job: Job, unit: UnitId) -> Unit:
    """Read, tokenize, pack and write one unit: shards, and last of all its unit_file."""
    tokenizer = read_tokenizer(disk.read_text(job.unit_dir / "tokenizer.json"))
    notes = Notes()
    sums = {"train": Counter(), "val": Counter()}
    held_out = []
    training = training_ids(parts_of(job, unit, tokenizer, notes), sums, held_out)
    train = write_split(job, unit, "train", training, tokenizer, sums)
    val = write_split(job, unit, "val", [part.ids for part in held_out], tokenizer, sums)
    if job.sources[unit[0]].conversations:  # each piece has one BOS, the others fill rows
        for split in (train, val):
            notes[chat.FILLERS] += split.packing["bos"] - split.packing["documents"]
    begins = [part.begin for part in held_out if part.begin]
    done = Unit(
        splits={"train": train, "val": val},
        tokens=train.tokens,
        documents=notes.read + notes.bad,
        notes=dict(notes),
        examples=notes.examples,
        beginnings="\n".join(begins[:PROMPTS]),
    )
    disk.write_json(unit_file(job, unit), formats.tree_of(done))
    return done


def parts_of(job: Job, unit: UnitId, tokenizer: Tokenizer, notes: Notes) -> Iterator[Part]:
    """The parts of all documents of a unit. `notes` counts what is odd or left out."""
    source = job.sources[unit[0]]
    for document in sources.documents(source, job.units[unit], notes):
        if source.conversations:
            yield from conversation_parts(job, document, tokenizer, notes)
        else:
            yield from text_parts(job, document, tokenizer, job.blocks[unit[0]])


def text_parts(job: Job, text: str, tokenizer: Tokenizer, block: int) -> Iterator[Part]:
    """The parts of a text; for one that is not the first, `begin` is of its first whole line."""
    for i, (split, part) in enumerate(split_text(job, tokenizer.normalize(text), block)):
        ids = tokenizer.encode_array(part, normalized=True)
        begin = first_words(part.partition("\n")[2] if i else part)
        yield Part(split, ids, len(part.encode("utf-8")), begin)


def split_text(job: Job, text: str, block: int) -> Iterator[tuple[str, str]]:
    """A normalized document -> ("train" or "val", text), block by block, by the content alone: a
    text that occurs twice is on one side only. Neighboring blocks on a side stay together."""
    for split, run in groupby(blocks(text, block), lambda part: side_of(job, part)):
        yield split, "".join(run)


def side_of(job: Job, text: str) -> str:
    return "val" if data.hash64(text) < job.val_below else "train"


def conversation_parts(job: Job, turns: list, tokenizer: Tokenizer, notes: Notes) -> Iterator[Part]:
    """The pieces of a conversation that fit into rows: on one side; they begin as its first
    question does."""
    split = side_of(job, tokenizer.normalize(chat.as_text(turns)))
    begin = first_words(dict(turns[::-1])["user"], 159)
    for piece in chat.pieces(turns, tokenizer, job.config.row_len, notes):
        yield Part(split, np.array(piece), int(tokenizer.token_bytes[piece].sum()), begin)


def first_words(text: str, most: int = 31) -> str:
    """The beginning of the first line of a text: the words that end within 1 + `most` characters,
    or as many characters of a long word, or of Chinese."""
    return re.search(rf"[^\s\ufeff](.{{,{most}}}(?<!\s)(?!\S)|\S{{,{most}}})|$", text)[0]


def training_ids(parts: Iterator[Part], sums: dict, held_out: list[Part]) -> Iterator[np.ndarray]:
    """The ids for training, part by part, as a unit may not fit in memory. Those for validation,
    which are few, are put into `held_out`; `sums` counts both."""
    for part in parts:
        sums[part.split].update(documents=1, bytes=part.bytes, tokens=len(part.ids))
        if part.split == "train":
            yield part.ids
        else:
            held_out.append(part)


def write_split(
    job: Job, unit: UnitId, split: str, docs: Iterable, tokenizer: Tokenizer, sums: dict
) -> UnitSplit:
    """Pack the ids of documents into rows, and write these."""
    source = job.sources[unit[0]]
    dtype = shards.dtype_for(tokenizer.vocab_size)
    docs = (ids.astype(dtype) for ids in docs)
    packed = data.pack(docs, job.config.row_len, tokenizer.bos_id, BUFFER, source.conversations)
    rows = packed
    if split == "val":  # shuffled, so that the first rows are a fair sample of the unit
        in_order = list(packed)
        order = data.Permutation(len(in_order), "val")
        rows = [in_order[order(i)] for i in range(order.n)]
    name = f"{split}/{source.name}/unit_{unit[1]:05d}"
    return UnitSplit(
        shards=shards.write_shards(rows, job.folder, name, dtype),
        packing=asdict(packed.stats),
        leftover=[ids.tolist() for ids in packed.leftover],
        **sums[split],  # complete by now
    )


def unit_file(job: Job, unit: UnitId) -> Path:
    return job.unit_dir / f"{job.sources[unit[0]].name}_{unit[1]:05d}.json"


def finished(job: Job, unit: UnitId) -> Unit | None:
    """What `work` has returned for a unit; None if that, or a shard, is missing or damaged."""
    try:
        done = formats.read(unit_file(job, unit), Unit)
        for part in done.splits.values():
            for shard in part.shards:
                for name, size, _ in shard.files():
                    if disk.inside(job.folder, name).stat().st_size != size:
                        return None
    except (OSError, DataError):
        return None
    return done
