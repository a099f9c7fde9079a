"""A file -> its documents: plain text, or the records of JSON, CSV and parquet; also compressed.

A file is read as its name says. What cannot be read at all is a DataError with the file, the line
and what to do; what is left out is counted in `Notes`, with the reason and an example, so that no
text is lost in silence. Next: worker.py cuts texts into tokens, chat.py conversations.
"""

import bz2
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from machinery.errors import DataError, reason_of
from tokenizer import blocks

MB = 1 << 20
FIRST = 100  # records of a file among which most have to be some
INSIDE = rb"[\x80-\xbf]{0,3}"  # bytes that begin no character
LARGEST_UNIT = 16 * MB  # a piece of plain text; see sources.py
DOCUMENT = MB  # characters; a longer plain text becomes several documents
LARGEST_LINE = 32 * MB  # of a .jsonl; a longer one would take a worker ten times its memory
LARGEST_ARRAY = 256 * MB  # of a .json, which is read whole
TEXTS = ".txt .text .md .py".split()  # what a folder is searched for; a glob names others
RECORDS = ".jsonl .ndjson .parquet .json .csv .tsv".split()  # read by their fields alone
IN_A_FOLDER = RECORDS[:3]  # of these, what a folder is searched for, too
TURNS = ("messages", "conversations", "conversation")  # fields that hold a list of turns
ICONV = """UTF-16; to convert them:
for f in {}; do iconv -f UTF-16 -t UTF-8 "$f" > "$f.new" && mv "$f.new" "$f"; done"""
NOT_TEXT = {  # how a file begins -> what it is, and what to do
    b"version https://git-lfs.": "a pointer of Git LFS; fetch the file: git lfs pull",
    b"/annex/objects/": "a pointer of git-annex; fetch the file: git annex get .",
    b"PK\3\4": (
        "zip; if it is a document (.docx, .odt, .epub), pandoc -t plain makes it text; a sheet "
        "(.xlsx, .ods) is saved as CSV; unzip any other, and name the folder"
    ),
    b"{\\rtf": "RTF; make it text: pandoc -t plain, or textutil -convert txt, or save it as text",
    b"%PDF": "PDF; make it text, for example with pdftotext",
    codecs.BOM_UTF16_LE: ICONV,
    codecs.BOM_UTF16_BE: ICONV,
}
QUOTED = r'(?<![^\s,;|])"(?:[^"]|"")*"'  # a cell in quotes
TOP_OF_TABLE = re.compile(  # blank lines, Excel's sep=; and the row that has the names
    rf'\ufeff?(?:\s*[\r\n])?(?:"?sep=(?:\\t|(?P<sep>[^\\\]^]))"?[,;\s]*?[\r\n]+)?'
    rf"(?P<names>(?:{QUOTED}|[^\r\n])*)",
    re.IGNORECASE,
)
SHIFTED = re.compile(  # what 7-bit encodings have between ASCII: ISO-2022-JP, -KR and -CN; HZ
    r"\x1b\$[@AB(][^\x1b\n]*|\x1b\$\).*|~\{(?:[!-w][!-}])+~\}", re.DOTALL
)
RECORD = (
    "a record is a JSON object on a line of its own, or in a .json one of an array; or a row of a "
    "table, in which a cell with a separator needs quotes; UTF-8, or what --encoding names"
)
BROKEN = (
    OSError,
    EOFError,
    OverflowError,  # a date beyond 9999
    RecursionError,  # JSON that is nested too deeply
    json.JSONDecodeError,
    csv.Error,
    UnicodeDecodeError,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
    pa.ArrowException,
)

WITHOUT = "records without the field"
NO_OBJECT = f"records left out that are not JSON objects of up to {LARGEST_LINE // MB} MB"
MORE_CELLS = "rows left out, with more cells than there are names; one holds an unquoted"
CRLF = "documents with Windows line ends (CRLF), kept as they are; dos2unix removes them"


def beginning(value: object) -> str:
    """The beginning of a value, for a message."""
    return json.dumps(value, ensure_ascii=False, default=str)[:160]


class Notes(Counter):
    """What is odd in a text, counted by reason."""

    read = 0
    """Documents and records read, those that are left out included, but not the bad ones."""
    bad = 0
    """What stands in the place of a record, and is none."""
    bytes = 0
    """Of text that was decoded."""
    foreign = 0
    """Bytes of it in documents in which most of what is not ASCII is in another encoding."""
    names = ()
    """The fields of the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.examples = {}
        """The first one left out, by reason."""

    def leave_out(self, reason: str, value: object, where: str = "") -> None:
        """Count a document that is not used, for a reason: the same words for each of a kind."""
        self[reason] += 1
        if reason not in self.examples:
            self.examples[reason] = f", for example {where}{beginning(value)}"

    def lines(self, documents: int = 0) -> Iterator[str]:
        """Each reason with its count and an example, and with its share of these documents."""
        for reason, n in sorted(self.items()):
            is_share = "s left out" in reason or reason.startswith("documents")
            share = f" ({n / documents:.1%} of all)" if documents and is_share else ""
            yield f"{n:,} {reason}{share}{self.examples.get(reason, '')}"


class Zstd(io.RawIOBase):
    """A .zst of any window (--long=31 is common in public dumps) and any number of frames. The
    library's own readers take a file that was cut for one that ends."""

    def __init__(self, path: Path) -> None:
        self.parts = filter(None, _zstd_parts(path))
        self.part = io.BytesIO()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer, as far as there is something; returns the bytes, 0 at the end."""
        while not (n := self.part.readinto(buffer)) and (part := next(self.parts, b"")):
            self.part = io.BytesIO(part)
        return n


def _zstd_parts(path):
    engine = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = engine.decompressobj()
    with open(path, "rb") as file:
        while raw := file.read(1 << 14):  # may become a thousand times as much
            while raw:
                frame = engine.decompressobj() if frame.eof else frame
                yield frame.decompress(raw)
                raw = frame.unused_data
    if not frame.eof:
        raise EOFError("the file was cut")


COMPRESSIONS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": Zstd}


def kind_of(name: str) -> str:
    """'a.jsonl.gz' -> '.jsonl'"""
    stem, ending = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if ending in COMPRESSIONS else ending


def open_file(path: Path) -> BinaryIO:
    """A file of source text, open; decompressed as it is read. The user named it, so a link is
    followed; `find_files` lists no pipe and no device."""
    return io.BufferedReader(COMPRESSIONS.get(path.suffix.lower(), io.FileIO)(path), MB)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """DataError for what the disk or a library cannot read; any other exception is a bug."""
    try:
        yield
    except BROKEN as error:
        reason = reason_of(error).replace(str(path), "...")
        raise DataError(
            f"{path}: cannot be read ({reason}); repair, unlock or remove it; if it is a pointer, "
            "fetch it (git lfs pull, git annex get .); if it is text, name its --encoding"
        ) from None


def refuse(path: Path, start: bytes) -> None:
    """DataError if the beginning of a file shows that it is in NOT_TEXT, or binary."""
    for magic, fault in NOT_TEXT.items():
        if start.startswith(magic):
            raise DataError(f"{path}: {fault}")
    start = start[:4096]
    controls = sum(byte < 32 and byte not in b"\t\n\v\f\r\x0e\x0f\x1b" for byte in start)
    if 16 * controls > max(len(start), 512):
        raise DataError(
            f"{path}: binary, or UTF-16 without its mark; convert or remove it (unpack an archive: "
            "tar xf, and name the folder; save an old .doc as text, an .xls as CSV; what is only "
            f"compressed is read if its name ends in {' '.join(COMPRESSIONS)})"
        )


def read_file(path: Path, start: int, end: int, source, notes: Notes) -> Iterator[str | list]:
    """The documents of a piece of a file: those whose first byte lies in start .. end (row groups
    of a .parquet; end -1: of all). source: a sources.Source, which says in which fields of a record
    the text is, and the encoding of files."""
    kind = kind_of(path.name)
    read = partial(decode, notes=notes, encoding=source.encoding)
    with readable(path):
        if kind == ".parquet":
            records = _parquet_records(path, range(start, end), source.fields)
        elif kind in RECORDS:
            records = _text_records(path, kind, start, end, read, notes)
        else:
            yield from _plain_text(path, start, end, read, notes)
            return
        for record in records:
            yield document_of(record, source.fields, notes)


def is_turns(fields: tuple[str, ...]) -> bool:
    """Whether these fields of a record hold a conversation, not text."""
    return len(fields) == 1 and fields[0] in TURNS


def document_of(record: dict, fields: tuple[str, ...], notes: Notes) -> object:
    """The document of a record: its text fields, a blank line between; or its turns, as they are.
    None if it has none of the fields, or no text in one of them."""
    notes.read += 1
    if not notes.names:
        notes.names = (*record,)
    found = [field for field in fields if field in record]
    notes.update(f"{WITHOUT} {field!r}" for field in fields if field not in record)
    if not found:
        return None
    if is_turns(fields):
        return record[fields[0]] or ""
    texts = []
    for field in found:
        value = record[field]
        if isinstance(value, list | dict | bool):
            notes.leave_out(
                f"records left out, whose field {field!r} holds a {type(value).__name__}, not text",
                value,
            )
            return None
        if value not in (None, "", b"") and value == value:  # a 0 is text, NaN is none
            texts.append(decode(value, notes) if isinstance(value, bytes) else str(value))
    return "\n\n".join(texts)


def decode(raw: bytes, notes: Notes, encoding: str = "utf-8") -> str:
    """Text of this encoding. Any other byte is read as Latin-1 and counted: nothing is lost."""
    notes.bytes += len(raw)
    text = raw.decode(encoding, errors="as_latin1")
    right = raw.decode(encoding, errors="ignore")
    wrong = len(text) - len(right) + sum(map(len, SHIFTED.findall(right)))
    if wrong:
        notes[f"documents with text that is not {encoding.upper()} (read as Latin-1)"] += 1
    if 1000 * wrong >= len(text) and wrong >= sum(character > "\x7f" for character in right):
        notes.foreign += len(raw)
    return text


codecs.register_error("as_latin1", lambda e: (e.object[e.start : e.end].decode("latin-1"), e.end))


# ------------------------------------------------------------------------------------ plain text
# `file` is open, in binary; `read` turns bytes into text, and counts what is odd (`decode`).


def _plain_text(path, start, end, read, notes):
    with open_file(path) as file:
        if end < 0:
            parts = _parts(file)
        else:
            start, end = (line_start(file, position, True) for position in (start, end))
            file.seek(start)
            parts = [file.read(end - start)]  # may be empty: a long line spans several pieces
        for i, raw in enumerate(parts):
            if start == i == 0:
                if not raw:
                    notes["empty files"] += 1
                if kind_of(path.name) != ".py":  # so that the text of stdlib stays what it is
                    raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw:
                for document in blocks(read(raw), DOCUMENT):
                    notes.read += 1
                    yield document


def _parts(file):
    """A compressed file, which may hold more than fits in memory: some MB at a time, up to the end
    of a line or, if that is far, of a character."""
    more = True
    while more:
        raw = file.read(LARGEST_UNIT) + file.readline(LARGEST_UNIT)
        raw += file.read(len(re.match(INSIDE, file.peek(3))[0]))
        more = file.peek(1)
        yield raw


def line_start(file: BinaryIO, position: int, is_text: bool) -> int:
    """The first start of a line at or after `position`. So byte ranges share no line, miss none.
    Plain text without a line end for LARGEST_UNIT bytes is cut right there, between characters."""
    if position == 0:
        return 0
    file.seek(position - 1)
    while (part := file.readline(MB)) and not part.endswith(b"\n"):
        if is_text and file.tell() - position >= LARGEST_UNIT:
            file.seek(position)
            return position + len(re.match(INSIDE, file.read(3))[0])
    return file.tell()


# --------------------------------------------------------------------------------------- records
# Each reader yields dicts; for what is none, (why it is left out, where it is, what stands there).


def _text_records(path, kind, start, end, read, notes):
    """The records of a file of lines, of a JSON array, or of a table. What is none is left out; but
    DataError if it is most of what a file begins with: then it is no such file."""
    with open_file(path) as file:
        if kind in (".csv", ".tsv"):
            records = _table_records(file, path, kind, read)
        elif kind == ".json" and re.match(rb"(\xef\xbb\xbf)?\s*\[", file.peek(4096)):
            records = _array_records(file, path, read)
        else:
            records = _line_records(file, path, start, end, read)
        first = [*itertools.islice(records, FIRST)]
        bad = [record for record in first if not isinstance(record, dict)]
        if start == 0 and len(bad) > len(first) / 2:
            _, place, value = bad[0]
            raise DataError(f"{path}, {place}: no record, but {beginning(value)}; {RECORD}")
        for record in itertools.chain(first, records):
            if isinstance(record, dict):
                yield record
                continue
            reason, place, value = record
            notes.bad += 1
            notes.leave_out(reason, value, f"{path}, {place}: ")


def load_json(text: str) -> object:
    """The value of a JSON text; an integer of more digits than Python reads (4,300) stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text, parse_int=str)


def _line_records(file, path, start, end, read):
    """A record per line, of the lines that begin in start .. end."""
    if end >= 0:
        start, end = (line_start(file, position, False) for position in (start, end))
        file.seek(start)
    lines = 0
    while (end < 0 or file.tell() != end) and (line := file.readline(LARGEST_LINE)):
        lines += 1
        place = f"line {lines:,}{f' after byte {start:,}' if start else ''}"
        text = read(line.removeprefix(codecs.BOM_UTF8))
        while not line.endswith(b"\n") and (line := file.readline(MB)):
            pass  # the rest of a longer one, whose beginning is no JSON
        if text.strip():
            record = None
            with suppress(ValueError, RecursionError):  # the latter: nested too deeply
                record = load_json(text)
            yield record if isinstance(record, dict) else (NO_OBJECT, place, text)


def _array_records(file, path, read):
    """The records of one JSON array."""
    raw = file.read(LARGEST_ARRAY + 1)
    if len(raw) > LARGEST_ARRAY:
        raise DataError(
            f"{path} is an array of more than {LARGEST_ARRAY // MB} MB; jq -c '.[]' {path.name} > "
            f"{Path(path.stem).stem}.jsonl makes it lines"
        )
    records = load_json(read(raw.removeprefix(codecs.BOM_UTF8)))
    for i, record in enumerate(records):
        yield record if isinstance(record, dict) else (NO_OBJECT, f"item {i:,}", record)


def _table_records(file, path, kind, read):
    """The rows of a table, whose first lines say how it is written.

    Between commas, a cell that holds a separator, a line end or a quote has quotes around it. In a
    .tsv, or between tabs, a line is a row, so no cell holds the first two, and a quote is text:
    only those around a cell, which many programs write there as well, are taken off."""
    if re.match(rb'(?:"[^"]*"|[^"\r\n])+\r[^\r\n]', file.peek(4096)):  # CR alone: an old Mac's
        file = io.BytesIO(file.read().replace(b"\r", b"\n"))
    lines = map(read, file)
    head = "".join(itertools.islice(lines, FIRST))
    top = TOP_OF_TABLE.match(head)
    how = _dialect(top, head)
    if kind == ".tsv" or how["delimiter"] == "\t":
        how["quoting"] = csv.QUOTE_NONE
    names = [name.strip(' "') for name in next(csv.reader([top["names"]], **how), [])]
    _no_name_twice(path, [*filter(None, names)])
    lines = itertools.chain(io.StringIO(head[top.end() :]), lines)
    rows = csv.DictReader(lines, names, **how)
    try:
        for record in rows:
            more = record.pop(None, ())
            if any(more):
                yield f"{MORE_CELLS} {how['delimiter']!r}", f"line {rows.line_num:,}", more
            else:
                yield _tsv_record(record) if "quoting" in how else record
    except csv.Error as error:
        raise DataError(
            f"{path}, in the row that begins on line {rows.line_num + 1:,}: {error}; a quote "
            "within quotes is doubled, and a table whose cells hold line ends is written with "
            "commas, not tabs (or it is in another encoding: name its --encoding)"
        ) from None


def _dialect(top, head):
    """How a table is written, as csv.reader takes it: what is between two cells, and whether a
    space follows. top: the match of TOP_OF_TABLE."""
    names, *rows = re.sub(QUOTED, "", head[top.start("names") :]).splitlines() or [""]
    alike = lambda mark: sum(row.count(mark) == names.count(mark) > 0 for row in [names, *rows])
    separator = top["sep"] or max("\t,;|", key=alike)  # some countries write a;b
    if separator not in names:
        separator = "\x1f"  # one column: whatever a line has
    spaced = re.search(rf'(?!\t)[{separator}] +"[^"{separator}\s]', head)
    csv.field_size_limit(LARGEST_LINE)
    # strict: no cell without its second quote
    return {"delimiter": separator, "skipinitialspace": bool(spaced), "strict": True}


def _tsv_record(record):
    """The record without the quotes around cells. csv.Error if a quotation may go on in the next
    line: then a row is short, or has no second cell by which to tell."""
    cells = record.values()
    if (None in cells or len(cells) < 2) and "".join(filter(None, cells)).count('"') % 2:
        raise csv.Error("a quotation that may go over several lines")
    return {
        name: cell[1:-1].replace('""', '"') if re.fullmatch(QUOTED, cell or "") else cell
        for name, cell in record.items()
    }


def _no_name_twice(path, names):
    if len(set(names)) < len(names):
        raise DataError(f"{path}: two of its columns are called {max(names, key=names.count)!r}")


def _parquet_records(path, groups, fields):
    """The rows of these row groups: the fields alone, or all columns if it has none of them."""
    text = (pa.string(), pa.large_string(), pa.string_view())
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        columns = [name for name in names if name in fields]
        _no_name_twice(path, columns)
        # few at a time, as each may have megabytes
        for batch in file.iter_batches(32, groups, columns=columns or names):
            # as bytes: text that is not UTF-8 would raise in as_py
            cast = [c.cast(pa.large_binary()) if c.type in text else c for c in batch.columns]
            yield from pa.RecordBatch.from_arrays(cast, batch.schema.names).to_pylist()
