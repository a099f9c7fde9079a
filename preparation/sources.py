"""Where text comes from: a source spec -> units -> documents.

    stdlib       the Python standard library of this machine (31 MB, no network)
    stdlib+site  the same and the installed packages
    chats:stdlib conversations about its functions and classes (stdlib_chats.py)
    files:PATH   a file, folder or glob: .txt .md .py .jsonl (also .gz .zst), .parquet; or just PATH
    hf:REPO[:CONFIG[:SPLIT]][@REVISION]
                 a dataset of the Hub, streamed (split: train); or the URL of a .parquet or .jsonl
`NAME=` before a spec names the source; `#FIELD+FIELD` after it names the fields that hold the text.
`#messages` and `#conversations` hold lists of turns: the documents are conversations (chat.py).

A unit is a part of a source that can be read on its own: some files, or a byte range of a big one.
The source alone decides its units (for a Hub dataset, the revision that worker.py pins). They are
ordered by hash, so the first few are a fair sample. Next: worker.py turns a unit into shards.
"""

import codecs
import dataclasses
import glob
import hashlib
import io
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from config import UsageError
from machinery.errors import DataError
from preparation import chat, stdlib_chats
from tokenizer import blocks

MB = 1 << 20
# A unit of 16 MB takes one core about 4 seconds: no more is lost by a kill, and few files occupy
# many cores. At 4 bytes of text per token and 2 per id, its shard has about 8 MB.
SMALLEST_UNIT, LARGEST_UNIT = 4 * MB, 16 * MB
DOCUMENT = MB  # characters; a longer plain text becomes several documents
LARGEST_LINE = 32 * MB  # of a .jsonl; a longer one would take a worker ten times its memory
KINDS = (".txt", ".text", ".md", ".py", ".jsonl", ".ndjson", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
NOT_TEXT = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\3\4": "zip", b"\x7fELF": "ELF"}
NOT_TEXT |= {b"%PDF": "PDF", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
REPAIR = "repair or remove it"
AGAIN = "run the same command again: finished units are kept"


@dataclasses.dataclass(frozen=True)
class Source:
    name: str
    kind: str  # stdlib, chats, files or hf; other modules ask for the properties below instead
    place: str
    fields: tuple[str, ...] = ("text",)
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    spec: str = dataclasses.field(default="", repr=False)  # as it was given, without the revision

    remote = property(lambda self: self.kind == "hf")  # read by the Hub's library
    unbounded = remote  # may hold more text than anyone wants
    mutable = property(lambda self: self.kind == "files")  # people edit its files in place
    installed = property(lambda self: self.kind in ("stdlib", "chats"))  # changes with Python
    conversations = property(lambda self: is_turns(self.fields))


def parse(spec: str) -> Source:
    """'code=files:src#body' -> Source(name='code', kind='files', place='src', fields=('body',))"""
    name, rest = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", spec, re.DOTALL).groups()
    rest, _, fields = rest.partition("#")
    kind, _, place = rest.partition(":")
    config = split = rev = ""
    if rest in ("stdlib", "stdlib+site"):
        name, kind, place = name or "stdlib", "stdlib", rest
    elif rest == "chats:stdlib":
        name, fields = name or "chats", "messages"
    elif kind == "files" and place or os.path.exists(rest):
        place, kind = place if kind == "files" else rest, "files"
        name = name or Path(place).stem
        place = os.path.abspath(os.path.expanduser(place))
    elif kind == "hf" and place:
        if "://" not in place:
            place, _, rev = place.partition("@")
            place, _, config = place.partition(":")
            config, _, split = config.partition(":")
        name = name or place.rstrip("/").split("/")[-1]
    else:
        forms = "stdlib, stdlib+site, chats:stdlib, files:PATH, hf:REPO[:CONFIG[:SPLIT]][@REVISION]"
        raise UsageError(f"source {spec!r} is none of {forms}")
    name = re.sub(r"[^\w.-]", "_", name).lstrip(".") or kind  # a folder's name, below train/
    name = name.encode()[:200].decode(errors="ignore")  # no file system takes more than 255 bytes
    fields = tuple((fields or "text").split("+"))
    spec = spec.replace(f"@{rev}", "") if rev else spec
    return Source(name, kind, place, fields, config or None, split or "train", rev or None, spec)


def list_units(source: Source) -> tuple[list[dict], dict]:
    """The units of a source, and facts for the manifest (revision, or the files' sizes).

    Local unit: {"bytes": 123, "pieces": [[name, start, end], ...]}, start and end in bytes, or in
    row groups for parquet. Hub unit: {"shard": 3, "of": 100}: one of the dataset's own files.
    """
    if source.remote:
        return _hf_units(source)
    files = local_files(source)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    target = min(LARGEST_UNIT, max(SMALLEST_UNIT, sum(sizes.values()) // 64))
    pieces = [p for name, path in files.items() for p in _pieces(name, path, sizes[name], target)]
    pieces.sort(key=lambda p: hashlib.blake2b(f"{p[0]}:{p[1]}".encode()).digest())
    units: list[dict] = []
    for name, start, end, size in pieces:
        if not units or units[-1]["bytes"] + size > target:
            units.append({"bytes": 0, "pieces": []})
        units[-1]["pieces"].append([name, start, end])
        units[-1]["bytes"] += size
    return units, {"files": sizes}


def is_turns(fields: tuple[str, ...]) -> bool:
    """Whether these fields of a record hold a conversation, not text."""
    return len(fields) == 1 and fields[0] in chat.FIELDS


def documents(source: Source, unit: dict, notes: Counter) -> Iterator[str | list[chat.Turn]]:
    """The texts of a unit, or its conversations. `notes` counts oddities: empty documents, bytes
    that are not UTF-8, conversations that cannot be used."""
    read = _hf_documents if source.remote else _local_documents
    for document in read(source, unit, notes):
        if document and source.conversations:
            document = _usable_turns(source, document, notes)
        elif not document:
            notes["empty documents"] += 1
        if document:
            yield document


def _usable_turns(source: Source, value: object, notes: Counter) -> list[chat.Turn] | None:
    try:
        return chat.read_turns(value)
    except chat.TurnsError as error:
        notes[f"conversations left out, with {error.reason}"] += 1
    except UsageError as error:
        raise UsageError(f"{source.place}: the field {source.fields[0]!r} holds {error}") from None


# ----------------------------------------------------------------------------------- local files


@lru_cache(maxsize=16)  # a worker needs them once per unit
def local_files(source: Source) -> dict[str, Path]:
    """The files of a local source: name (the same on every machine) -> path, sorted by name.
    DataError if a folder cannot be read."""
    place = Path(source.place)
    with _readable(place, "change its permissions, or name other files"):
        found = _installed_files(source.place) if source.installed else _named_files(place)
    for name, path in found.items():
        if name.encode("utf-8", "ignore").decode() != name:  # other bytes are read as surrogates
            raise UsageError(f"the name of {str(path)!r} is not UTF-8; rename the file")
    return dict(sorted(found.items()))


def _installed_files(place: str) -> dict[str, Path]:
    """The .py files of Python's standard library, and with +site of the installed packages."""
    paths, found = sysconfig.get_paths(), {}
    for path in _walk(Path(paths["stdlib"]), (".py",)):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            found[f"stdlib/{path.relative_to(paths['stdlib'])}"] = path
    if place == "stdlib+site":
        for path in _walk(Path(paths["purelib"]), (".py",)):
            found[f"site/{path.relative_to(paths['purelib'])}"] = path
    return found


def _named_files(place: Path) -> dict[str, Path]:
    """The files of a folder, one file, or those of a glob."""
    if place.is_dir():
        found = {path.relative_to(place).as_posix(): path for path in _walk(place, KINDS)}
        if not found:
            kinds = f"files:{place} has no file that ends in {' '.join(KINDS)} (+ .gz or .zst)"
            raise UsageError(f"{kinds}; name others with a glob: 'files:{place}/**/*.html'")
    elif place.is_file():  # a pipe is not: it can be read only once
        found = {place.name: place}
    else:
        root = Path(*takewhile(lambda part: not glob.has_magic(part), place.parts))
        for parent in (p for p in place.parents if p.is_relative_to(root)):
            for folder in map(Path, glob.glob(f"{parent}/", recursive=True)):
                os.scandir(folder).close()  # raises for a locked folder, which glob would skip
        matches = map(Path, glob.glob(str(place), recursive=True))
        found = {p.relative_to(root).as_posix(): p for p in matches if p.is_file()}
        if not found:
            raise UsageError(f"files:{place}: no such file or folder")
    return found


def _walk(root: Path, kinds: tuple[str, ...]) -> Iterator[Path]:
    """The files of these kinds in a folder and below, but hidden ones. OSError if a folder cannot
    be read."""

    def refuse(error: OSError) -> None:
        raise error

    seen = set()  # a link may lead back to a folder above
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(d for d in folders if d != "__pycache__" and not d.startswith("."))
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if kind_of(path.name) in kinds and path.is_file():
                yield path


def kind_of(name: str) -> str:
    """'a.jsonl.gz' -> '.jsonl'"""
    return Path(re.sub(r"\.(gz|zst)$", "", name.lower())).suffix


def _pieces(name: str, path: Path, size: int, target: int) -> Iterator[tuple]:
    """(name, start, end, bytes) of each piece of a file; one piece if the file cannot be cut."""
    if kind_of(name) == ".parquet":
        with _readable(path):
            metadata = pq.ParquetFile(path).metadata
        for i in range(metadata.num_row_groups):
            yield name, i, i + 1, metadata.row_group(i).total_byte_size
    elif path.suffix.lower() in COMPRESSIONS:
        yield name, 0, -1, size
    else:
        count = max(1, -(-size // target))
        for i in range(count):
            start, end = size * i // count, size * (i + 1) // count
            yield name, start, end, end - start


def _open(path: Path) -> BinaryIO:
    """A file of source text, open; a .gz or .zst file is decompressed as it is read. The user named
    it, so a link is followed; `local_files` lists no pipe and no device."""
    if compression := COMPRESSIONS.get(path.suffix.lower()):
        return io.BufferedReader(pa.input_stream(path, compression), MB)
    return open(path, "rb")


@contextmanager
def _readable(path: Path, remedy: str = REPAIR) -> Iterator[None]:
    """DataError for what the disk or pyarrow cannot read; any other exception is a bug."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({_reason(error)}); {remedy}") from None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _local_documents(source: Source, unit: dict, notes: Counter) -> Iterator[str]:
    """The documents of each piece of a unit: those whose first byte lies in start .. end."""
    for name, start, end in unit["pieces"]:
        path = local_files(source)[name]
        with _readable(path):
            if source.kind == "chats":
                with _open(path) as f:
                    yield from stdlib_chats.conversations(name, f.read())
            elif kind_of(name) == ".parquet":
                yield from _read_parquet(path, range(start, end), source.fields, notes)
            else:
                with _open(path) as f:
                    yield from _read_lines(f, path, start, end, source.fields, notes)


def _read_lines(f: BinaryIO, path: Path, start: int, end: int, fields, notes) -> Iterator[str]:
    """The documents of a piece of a text or .jsonl file."""
    kind, length = kind_of(path.name), -1  # to the end
    is_json = kind in (".jsonl", ".ndjson")
    if end >= 0:
        start, end = (_line_start(f, position, not is_json) for position in (start, end))
        f.seek(start)
        length = end - start  # may be 0: a long line spans several pieces
    if is_json:
        yield from _read_jsonl(f, length, path, fields, notes)
        return
    for i, raw in enumerate(_parts(f) if length < 0 else [f.read(length)]):
        if start == i == 0:
            if what := _not_text(raw):
                raise DataError(f"{path} is {what}, not plain text in UTF-8; convert it first")
            if not raw:
                notes["empty files"] += 1
            if kind != ".py":  # so that the text of stdlib stays what it is
                raw = raw.removeprefix(codecs.BOM_UTF8)
        if raw:
            yield from blocks(decode(raw, notes), DOCUMENT)


def _parts(f: BinaryIO) -> Iterator[bytes]:
    """A compressed file, which may hold more than fits in memory: some MB at a time, up to the end
    of a line or, if that is far, of a character."""
    more = True
    while more:
        raw = f.read(LARGEST_UNIT) + f.readline(LARGEST_UNIT)
        for _ in range(3):  # a character has at most 3 more bytes
            if b"\x80" <= f.peek(1)[:1] <= b"\xbf":
                raw += f.read(1)
        more = f.peek(1)
        yield raw


def _not_text(raw: bytes) -> str | None:
    """What the beginning of a file shows it to be, if that is not plain text."""
    start = raw[:4096]
    controls = sum(byte < 9 or 13 < byte < 32 for byte in start)
    what = "binary, or UTF-16 without its mark" if 16 * controls > max(len(start), 512) else None
    return next((NOT_TEXT[magic] for magic in NOT_TEXT if raw.startswith(magic)), what)


def _line_start(f: BinaryIO, position: int, is_text: bool) -> int:
    """The first start of a line at or after `position`. So byte ranges share no line, miss none.
    Plain text without a line end for LARGEST_UNIT bytes is cut right there, between characters."""
    if position == 0:
        return 0
    f.seek(position - 1)
    while (part := f.readline(MB)) and not part.endswith(b"\n"):
        if is_text and f.tell() - position >= LARGEST_UNIT:
            f.seek(position)
            begins = [i for i, byte in enumerate(f.read(4)) if not 0x80 <= byte <= 0xBF]
            return position + (begins or [0])[0]
    return f.tell()


def decode(raw: bytes, notes: Counter) -> str:
    """Decode UTF-8. Any other byte is read as Latin-1 and counted, so that nothing is lost."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        notes["documents with bytes that are not UTF-8 (read as Latin-1)"] += 1
        return raw.decode("utf-8", errors="as_latin1")


codecs.register_error("as_latin1", lambda e: (e.object[e.start : e.end].decode("latin-1"), e.end))


def join_fields(record: dict, fields: tuple[str, ...], where: object, notes: Counter) -> object:
    """The document of a record: its text fields, a blank line between them; or its turns."""
    texts = []
    for field in fields:
        if field not in record:
            names = f"{where} has no field {field!r}, it has {', '.join(record)}"
            raise UsageError(f"{names}; name one after the source: #{next(iter(record), 'FIELD')}")
        value = record[field]
        if is_turns(fields):
            return value
        if isinstance(value, list | dict):
            kind = f"{where}: the field {field!r} holds a {type(value).__name__}, not text"
            raise UsageError(f"{kind}; write the text (or turns, as `messages`) into a field")
        if value not in (None, "", b""):  # a 0 is text
            texts.append(decode(value, notes) if isinstance(value, bytes) else str(value))
    return "\n\n".join(texts)


def _read_jsonl(f: BinaryIO, length: int, path: Path, fields, notes: Counter) -> Iterator[str]:
    """A document per line, for `length` bytes, which end where a line does (-1: to the end)."""
    done = 0
    while done != length and (line := f.readline(LARGEST_LINE)):
        done += len(line)
        if len(line) == LARGEST_LINE and not line.endswith(b"\n"):
            notes[f"lines of more than {LARGEST_LINE // MB} MB, left out"] += 1
            while not line.endswith(b"\n") and (line := f.readline(MB)):
                done += len(line)
            continue
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        text = decode(line, notes)
        try:
            record = json.loads(text)
        except (json.JSONDecodeError, RecursionError):  # the latter: nested too deeply
            record = None
        if not isinstance(record, dict):
            reason = f"not a JSON object on the line that starts {text[:60]!r}"
            raise DataError(f"{path}: {reason}; {REPAIR}")
        yield join_fields(record, fields, path, notes)


def _read_parquet(path: Path, groups: range, fields: tuple, notes: Counter) -> Iterator[str]:
    """A document per row, of these row groups."""
    text = (pa.string(), pa.large_string(), pa.string_view())
    with pq.ParquetFile(path) as file:
        names = dict.fromkeys(file.schema_arrow.names)
        join_fields(names, fields, path, notes)  # refuses a missing field
        for batch in file.iter_batches(128, groups, columns=list(fields)):
            # as bytes: text that is not UTF-8 would raise in to_pylist
            columns = [c.cast(pa.large_binary()) if c.type in text else c for c in batch.columns]
            for record in pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist():
                yield join_fields(record, fields, path, notes)


# ---------------------------------------------------------------------------------- Hugging Face


@contextmanager
def _reachable(source: Source) -> Iterator[None]:
    """An error of the Hub's library becomes one sentence: UsageError for the name of a repository,
    revision, configuration or split that is not there, else DataError."""
    try:
        yield
    except Exception as error:
        where, kind = f"hf:{source.place}", type(error).__name__
        wrong_name = re.search("(Dataset|Repository|Revision|DataFiles)NotFound", kind)
        wrong_value = isinstance(error, LookupError | ImportError | ValueError)
        if wrong_name or (wrong_value and not isinstance(error, pa.ArrowException)):
            raise UsageError(f"{where}: {_reason(error)}") from None
        raise DataError(f"{where} cannot be read ({_reason(error)}); {AGAIN}") from None


def _hf_load(source: Source):
    import datasets

    options = {"split": source.split, "streaming": True}
    if "://" in source.place:
        kind = "parquet" if kind_of(source.place) == ".parquet" else "json"
        return datasets.load_dataset(kind, data_files=source.place, **options)
    return datasets.load_dataset(source.place, source.config, revision=source.revision, **options)


def _hf_units(source: Source) -> tuple[list[dict], dict]:
    """One unit per file of the dataset, at a pinned revision."""
    revision = source.revision
    with _reachable(source):
        if "://" not in source.place:
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(source.place, revision=revision).sha
        count = _hf_load(source).num_shards
    units = [{"shard": i, "of": count} for i in range(count)]
    units.sort(key=lambda u: hashlib.blake2b(f"{u['shard']}".encode()).digest())
    return units, {"revision": revision, "shards": count}


def _hf_documents(source: Source, unit: dict, notes: Counter) -> Iterator[str]:
    for record in _hf_records(source, unit):
        yield join_fields(record, source.fields, f"hf:{source.place}", notes)


def _hf_records(source: Source, unit: dict) -> Iterator[dict]:
    with _reachable(source):
        yield from _hf_load(source).shard(unit["of"], unit["shard"])
