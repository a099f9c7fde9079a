"""A row of prepared data as text: `python prepare_data.py show [NAME] --row N`; how its tokenizer
splits a text: `... show [NAME] --text TEXT`; and all rows compared with the manifest: `python
prepare_data.py verify [NAME]`. NAME: of a preset, or the one that --name gave to the data.

Reads only DATA_DIR; writes nothing. A document in a row begins with BOS, and so does a piece of
one that was cut: a line before each says how many tokens it has.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from config import LARGEST, Local, UsageError
from machinery import cli
from machinery.output import printable, say
from machinery.shards import Manifest, damaged
from tokenizer import Tokenizer


@dataclass(frozen=True)
class ShowConfig:
    """Print a row of prepared data as text, and where it comes from; or a text's tokens."""

    name: str = ""
    """Of the data: data/NAME, in place of data/PRESET."""
    data_dir: Local = ""
    """Folder that prepare_data.py wrote; empty: data/PRESET, or that of `name`."""
    row: Annotated[int, 0, LARGEST] = 0
    """Which row, counted from 0 through all sources of the split."""
    split: Literal["train", "val"] = "train"
    """Training or validation rows."""
    text: str = ""
    """Print the tokens of this text, not a row."""


def find(argv: list[str], command: str) -> tuple[ShowConfig, Manifest]:
    """`[PRESET or NAME] [--option value ...]` -> the options, and the data that they name."""
    name, options = cli.first_word(argv)
    config = cli.read_options(ShowConfig(name), options, f"prepare_data.py {command} {name}")
    return config, Manifest.load(config.data_dir or f"data/{config.name}")


def show(argv: list[str]) -> None:
    """`show [PRESET or NAME] [--option value ...]`: print one row, or the tokens of a text."""
    config, manifest = find(argv, "show")
    tokenizer = Tokenizer.load(manifest.tokenizer_file())
    if config.text:
        lines = tokens_of(config.text, tokenizer)
    else:
        lines = describe(manifest, tokenizer, config.split, config.row)
    print(printable("\n".join(lines)))


def tokens_of(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """The lines to print for a text: each token's text, id and bytes; the tokens that share a
    character together."""
    ids = tokenizer.encode(text)
    size = tokenizer.token_bytes[ids].sum()
    yield f"{len(ids):,} tokens | {size:,} bytes | {size / len(ids):.2f} bytes/token"
    shared = []
    for i in ids:
        shared.append(i)
        with suppress(UnicodeDecodeError):
            found = b"".join(map(tokenizer.bytes_of.get, shared)).decode()
            parts = [f"{n:5} {tokenizer.bytes_of[n].hex(' ')}" for n in shared]
            yield f"{found!r:16}{' | '.join(parts)}"
            shared = []


def verify(argv: list[str]) -> None:
    """Compare every file with its sha256 in the manifest; DataError if one is damaged."""
    _, manifest = find(argv, "verify")
    manifest.check()
    manifest.verify()
    say(f"{manifest.dir}: {len(manifest.all_shards())} shards, every sha256 as expected")


def documents(manifest: Manifest, tokenizer: Tokenizer, ids: np.ndarray) -> Iterator[tuple]:
    """(tokens with BOS, text) of each piece of text in a row. DataError for an unknown token."""
    largest = ids.max(initial=0)
    if largest >= tokenizer.vocab_size:
        raise damaged(
            manifest.dir,
            f"holds a row with token {largest}, and its tokenizer has {tokenizer.vocab_size:,}",
        )
    starts = np.flatnonzero(ids == manifest.bos_id)
    for part in np.split(ids, starts[starts > 0]):
        said = part[part != manifest.bos_id].tolist()
        if said:  # else its BOS fills a place that no document fits
            yield len(part), tokenizer.decode(said)


def describe(manifest: Manifest, tokenizer: Tokenizer, split: str, n: int) -> Iterator[str]:
    """The lines to print for the n-th row of a split: those of the first source, then of the next.
    UsageError if there is none."""
    rows = manifest.rows(split)
    if n >= rows:
        raise UsageError(
            f"--row {n}: --split {split} of {manifest.dir} has {rows:,} rows, from 0 to {rows - 1}"
        )
    source = 0
    row = n
    while row >= manifest.rows(split, source):
        row -= manifest.rows(split, source)
        source += 1
    shard, within = manifest.locate(split, source, row)
    found = [*documents(manifest, tokenizer, manifest.row(split, source, row))]
    facts = manifest.facts.sources[source]
    yield f"row {n:,} of {rows:,}, {split}: {manifest.row_len:,} tokens"
    yield f"source {facts.name}: {facts.spec}"
    yield f"shard  {manifest.dir / shard.file}, row {within:,}, crc32 as expected"
    for number, (size, text) in enumerate(found, 1):
        yield f"\n---- BOS, document {number}: {size:,} tokens\n{text}"
