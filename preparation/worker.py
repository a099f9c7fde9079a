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
from collections.abc import Iterator
from dataclasses import asdict
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


def work(job: Job, unit: UnitId) -> Unit:
    """Read, tokenize, pack and write one unit: shards, and last of all its unit_file."""
    tokenizer = read_tokenizer(disk.read_text(job.unit_dir / "tokenizer.json"))
    notes = Notes()
    sizes = Counter()
    held_out = []  # filled while the training rows are written, which is why those come first
    training = training_ids(parts_of(job, unit, tokenizer, notes), tokenizer, sizes, held_out)
    splits = {}
    for split, docs in (("train", training), ("val", (ids for ids, _ in held_out))):
        splits[split] = write_split(job, unit, split, docs, tokenizer, sizes)
        if job.sources[unit[0]].conversations:  # each piece has one BOS, the others fill rows
            packing = splits[split].packing
            notes[chat.FILLERS] += packing["bos"] - packing["documents"]
    done = Unit(
        splits=splits,
        tokens=splits["train"].tokens,
        documents=notes.read + notes.bad,
        notes=dict(notes),
        examples=notes.examples,
        beginnings="\n".join([begin for _, begin in held_out if begin][:PROMPTS]),
    )
    disk.write_json(unit_file(job, unit), done)
    return done


def parts_of(
    job: Job, unit: UnitId, tokenizer: Tokenizer, notes: Notes
) -> Iterator[tuple[str, np.ndarray, str]]:
    """("train" or "val", ids without BOS, first words) of each part of each document of a unit."""
    s = unit[0]
    source = job.sources[s]
    for document in sources.documents(source, job.units[unit], notes):
        if source.conversations:  # all of it is on one side, in pieces that fit into rows
            split = side_of(job, tokenizer.normalize(chat.as_text(document)))
            question = next(text for role, text in document if role == "user")
            for piece in chat.pieces(document, tokenizer, job.config.row_len, notes):
                yield split, np.array(piece), first_words(question, 159)
            continue
        text = tokenizer.normalize(document)
        for i, (split, part) in enumerate(split_text(job, text, job.blocks[s])):
            # a later part may begin within a line: its first words are those of the next one
            begin = first_words(part.partition("\n")[2] if i else part)
            yield split, tokenizer.encode_array(part), begin


def split_text(job: Job, text: str, block: int) -> Iterator[tuple[str, str]]:
    """A normalized document -> ("train" or "val", text), block by block, by the content alone: a
    text that occurs twice is on one side only. Neighboring blocks on a side stay together."""
    for split, run in groupby(blocks(text, block), lambda part: side_of(job, part)):
        yield split, "".join(run)


def side_of(job: Job, text: str) -> str:
    return "val" if data.hash64(text) < job.val_below else "train"


def first_words(text: str, most: int = 31) -> str:
    """The beginning of the first line of a text: the words that end within 1 + `most` characters,
    or as many characters of a long word, or of Chinese."""
    return re.search(rf"[^\s\ufeff](.{{,{most}}}(?<!\s)(?!\S)|\S{{,{most}}})|$", text)[0]


def training_ids(
    parts: Iterator[tuple], tokenizer: Tokenizer, sizes: Counter, held_out: list
) -> Iterator[np.ndarray]:
    """The ids for training, one part after the other, since a unit may not fit in memory. Those for
    validation, which are few, are put into `held_out`. `sizes` counts the bytes of both."""
    for split, ids, begin in parts:
        sizes[split] += int(tokenizer.token_bytes[ids].sum())
        if split == "train":
            yield ids
        else:
            held_out.append((ids, begin))


def write_split(
    job: Job, unit: UnitId, split: str, docs: Iterator, tokenizer: Tokenizer, sizes: Counter
) -> UnitSplit:
    """Pack documents, which are ids without BOS, into rows, and write these."""
    s, number = unit
    source = job.sources[s]
    dtype = shards.dtype_for(tokenizer.vocab_size)
    docs = (ids.astype(dtype) for ids in docs)
    packed = data.pack(
        docs, job.config.row_len, tokenizer.bos_id, BUFFER, whole=source.conversations
    )
    rows = packed
    if split == "val":  # shuffled, so that the first rows are a fair sample of the unit
        in_order = list(packed)
        order = data.Permutation(len(in_order), "val")
        rows = [in_order[order(i)] for i in range(order.n)]
    written = shards.write_shards(
        rows, job.folder, f"{split}/{source.name}/unit_{number:05d}", dtype
    )
    stats = packed.stats  # complete, as `sizes` are, now that all rows have been taken
    return UnitSplit(
        shards=written,
        documents=stats.documents,
        bytes=sizes[split],
        tokens=stats.tokens,
        packing=asdict(stats),
        leftover=[ids.tolist() for ids in packed.leftover],
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
