"""A row of prepared data as text: `python prepare_data.py show [PRESET] [--row N | --find TEXT]`.

Reads DATA_DIR and, to say which file each document is from, the source's own text, if it is on this
machine; writes nothing. A document in a row begins with BOS, and so does a piece of one that was
cut: a line before each says where it stands. prepare_data.py calls `main`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from config import LARGEST, PRESETS, UsageError, find_preset
from machinery import cli
from machinery.errors import DataError
from machinery.shards import Manifest
from preparation import chat, sources
from tokenizer import Tokenizer

MOST_BYTES = 64 * sources.MB  # of a source that is read to find a document whose unit is not known


@dataclass(frozen=True)
class ShowConfig:
    """Print a row of prepared data as text, and where it comes from."""

    data_dir: str = ""
    """Folder that prepare_data.py wrote; by default data/PRESET."""
    row: Annotated[int, 0, LARGEST] = 0
    """Which row, counted from 0 through all sources of the split; with --find, where to begin."""
    find: str = ""
    """Print the first row that has this text."""
    split: Literal["train", "val"] = "train"
    """Training or validation rows."""


def main(argv: list[str]) -> int:
    """`show [PRESET] [--option value ...]`: print one row."""
    name, options = cli.first_word(argv)
    if not find_preset(name):
        cli.find("preset", name, PRESETS)
    default = ShowConfig(data_dir=f"data/{name}")
    config = cli.read_options(default, options, f"prepare_data.py show {name}")
    manifest = Manifest.load(config.data_dir, name)
    tokenizer = Tokenizer.load(manifest.tokenizer_file())
    print("\n".join(describe(manifest, tokenizer, config, pick(manifest, tokenizer, config))))
    return 0


def place_of(manifest: Manifest, split: str, n: int) -> tuple[int, int]:
    """(source, row) of the n-th row of a split: those of the first source, then of the next."""
    source = 0
    while n >= (rows := manifest.rows(split, source)):
        source, n = source + 1, n - rows
    return source, n


def pick(manifest: Manifest, tokenizer: Tokenizer, config: ShowConfig) -> int:
    """The number of the row that is asked for; UsageError if there is none."""
    from tqdm import tqdm

    rows = manifest.rows(config.split)
    if config.row >= rows:
        which = f"--split {config.split} of {manifest.dir}"
        raise UsageError(f"--row {config.row}: {which} has {rows:,} rows, from 0 to {rows - 1}")
    if not config.find:
        return config.row
    wanted = tokenizer.normalize(config.find)
    for n in tqdm(range(config.row, rows), unit=" rows", disable=None, leave=False):
        ids = manifest.row(config.split, *place_of(manifest, config.split, n))
        if any(wanted in text for _, text in documents(manifest, tokenizer, ids)):
            return n
    where = f"no {config.split} row from {config.row} to {rows - 1} has it within a document"
    raise UsageError(f"--find {config.find!r}: {where}; a text that was cut is in two rows")


def documents(manifest: Manifest, tokenizer: Tokenizer, ids: np.ndarray) -> Iterator[tuple]:
    """(tokens with BOS, text) of each document, or piece of one, in a row."""
    starts = np.flatnonzero(ids == manifest.bos_id)
    for part in np.split(ids, starts[starts > 0]):
        yield len(part), tokenizer.decode(i for i in part.tolist() if i != manifest.bos_id)


def describe(manifest: Manifest, tokenizer: Tokenizer, config: ShowConfig, n: int) -> list[str]:
    """The lines to print for row n."""
    source, row = place_of(manifest, config.split, n)
    shard, within = manifest.locate(config.split, source, row)
    ids = manifest.row(config.split, source, row)
    facts = manifest.tree["sources"][source]
    lines = [
        f"row {n:,} of {manifest.rows(config.split):,}, {config.split}: {len(ids):,} tokens",
        f"source {facts['name']}: {facts.get('spec', '')}",
        f"shard  {manifest.dir / shard['file']}, row {within:,}, crc32 as expected",
    ]
    origin = Origin(facts, shard["file"], tokenizer)
    if origin.why:
        lines.append(f"file   {origin.why}")
    for number, (size, text) in enumerate(documents(manifest, tokenizer, ids), 1):
        lines.append(f"\n---- BOS, document {number}: {size:,} tokens{origin.of(text)}\n{text}")
    return lines


class Origin:
    """Where the documents of a shard come from: the pieces of files of its unit, read again. `why`
    says if the files are not known."""

    def __init__(self, facts: dict, shard: str, tokenizer: Tokenizer):
        self.texts, self.why, self.tokenizer = [], "", tokenizer
        unit = shard.rpartition("/")[2]  # unit_00003_00.npy
        number = int(unit[5:10]) if unit.startswith("unit_") else None
        source = sources.parse(facts.get("spec", facts["name"]))
        if source.remote:
            self.why = f"one of hf:{source.place}, or what several left over"
            return
        try:
            units = sources.list_units(source)[0]
        except (UsageError, DataError) as error:
            self.why = f"not known: {error}"
            return
        if number is None and sum(unit["bytes"] for unit in units) > MOST_BYTES:
            self.why = "not searched for: the row is of what several units left over"
        elif number is None or number < len(units):
            own = units if number is None else [units[number]]
            self.texts = list(self.read(source, own))

    def read(self, source: sources.Source, units: list[dict]) -> Iterator[tuple[str, str]]:
        """(file, text) of each document."""
        for name, start, end in (piece for unit in units for piece in unit["pieces"]):
            piece = {"bytes": 0, "pieces": [[name, start, end]]}
            for document in sources.documents(source, piece, Counter()):
                if not isinstance(document, str):  # as it is in a row, with the roles
                    document = self.tokenizer.decode(chat.encode(document, self.tokenizer))
                yield name, self.tokenizer.normalize(document)

    def of(self, text: str) -> str:
        """The file that a document is from, and which of its characters; "" if that is not known.
        The ends of a cut piece may lie within a character, which is left out here."""
        if not (wanted := text.strip("\ufffd")):
            return ", its text is in another row, or it fills this one"
        for name, whole in self.texts:
            if (at := whole.find(wanted)) >= 0:
                here = f"characters {at:,} to {at + len(wanted):,} of {len(whole):,}"
                return f", {name}, {here if len(wanted) < len(whole) else 'whole'}"
        return ", not found in the text as it is now" if self.texts else ""
