"""Where text comes from: a source spec -> units -> documents.

    stdlib                       the Python standard library of this machine (31 MB, no network)
    stdlib+site                  the same and the installed packages
    files:PATH                   file, folder or glob: .txt .md .py .jsonl (also .gz .zst), .parquet
    hf:REPO[:CONFIG][@REVISION]  a Hugging Face dataset, streamed; or a URL or path of data files
`NAME=` before a spec names the source; `#FIELD+FIELD` after it names the fields that hold the text.

A unit is a part of a source that can be read on its own: some files, or a byte range of a big one.
The source alone decides its units (for a Hub dataset, the revision that worker.py pins). They are
ordered by hash, so the first few are a fair sample. Next: worker.py turns a unit into shards.
"""

import codecs
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
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, takewhile
from pathlib import Path
from typing import BinaryIO

from machinery.errors import DataError, UsageError
from tokenizer import blocks

MB = 1 << 20
SMALLEST_UNIT, LARGEST_UNIT = 4 * MB, 16 * MB  # 16 MB of text take one core about 4 seconds
DOCUMENT = MB  # characters; a longer plain text becomes several documents
TEXT = (".txt", ".text", ".md", ".py")
KINDS = (*TEXT, ".jsonl", ".ndjson", ".parquet")
NOT_TEXT = {b"BZh": "a bzip2", b"\xfd7zXZ": "an xz", b"PK\3\4": "a zip", b"%PDF": "a PDF"}
LONGEST_NAME = 200  # bytes of a source's name: its files' names have at most 255
REPAIR = "repair or remove it"
AGAIN = "run the same command again: finished units are kept"
TRIES, RETRY_S = 50, 2.0  # the Hub's library survives an outage of 100 s


@dataclass(frozen=True)
class Source:
    name: str
    kind: str  # stdlib, files or hf; other files ask for the properties below instead
    place: str
    fields: tuple[str, ...] = ("text",)
    config: str | None = None
    revision: str | None = None

    remote = property(lambda self: self.kind == "hf")  # read by the Hub's library
    listed_once = property(lambda self: self.remote and not is_local_glob(self.place))
    unbounded = remote  # may hold more text than anyone wants
    mutable = property(lambda self: self.kind == "files")  # people edit its files in place
    installed = property(lambda self: self.kind == "stdlib")  # an update of Python changes it


def parse(spec: str) -> Source:
    """'code=files:src#body' -> Source(name='code', kind='files', place='src', fields=('body',))"""
    if not is_utf8(spec):
        raise ValueError(f"the name in --source {spec!r} is not UTF-8; rename the file or folder")
    name, rest = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", spec, re.DOTALL).groups()
    rest, _, fields = rest.partition("#")
    kind, _, place = rest.partition(":")
    config = revision = ""
    if rest in ("stdlib", "stdlib+site"):
        name, kind, place = name or "stdlib", "stdlib", rest
    elif kind == "files" and place:
        name = name or Path(place).stem
        place = os.path.abspath(os.path.expanduser(place))
    elif kind == "hf" and place:
        if not is_data_file(place):
            place, _, revision = place.partition("@")
            place, _, config = place.partition(":")
        name = name or place.rstrip("/").split("/")[-1]
    else:
        forms = "stdlib, stdlib+site, files:PATH, hf:REPO[:CONFIG][@REVISION]"
        raise ValueError(f"source {spec!r} is none of {forms}")
    name = re.sub(r"[^\w.-]", "_", name).lstrip(".") or kind  # a folder's name, below train/
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(
            f"the source's name {name[:20]}... has {len(name.encode())} bytes, more than "
            f"{LONGEST_NAME}; give it a short name: --source NAME={kind}:..."
        )
    fields = tuple((fields or "text").split("+"))
    return Source(name, kind, place, fields, config or None, revision or None)


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


def documents(source: Source, unit: dict, notes: Counter) -> Iterator[str]:
    """The texts of a unit. `notes` counts oddities: empty documents, bytes that are not UTF-8."""
    if source.remote:
        texts = _hf_documents(source, unit, notes)
    else:
        files = local_files(source)
        read = (_read(files[name], *span, source.fields, notes) for name, *span in unit["pieces"])
        texts = chain.from_iterable(read)
    for text in texts:
        if text:
            yield text
        else:
            notes["empty documents"] += 1


# ----------------------------------------------------------------------------------- local files


@lru_cache(maxsize=16)  # a worker needs them once per unit
def local_files(source: Source) -> dict[str, Path]:
    """The files of a local source: name (the same on every machine) -> path, sorted by name.
    DataError if a folder cannot be read."""
    with _named_errors(Path(source.place), "change its permissions, or name other files"):
        return _find_files(source, Path(source.place))


def _find_files(source: Source, place: Path) -> dict[str, Path]:
    if source.kind == "stdlib":
        paths = sysconfig.get_paths()
        roots = {"stdlib": paths["stdlib"]}
        if source.place == "stdlib+site":
            roots |= {"site": paths["purelib"]}
        found = {
            f"{root}/{path.relative_to(folder)}": path
            for root, folder in roots.items()
            for path in _walk(Path(folder), (".py",), installed=True)
            if root == "site" or not {"site-packages", "dist-packages"} & set(path.parts)
        }
    elif place.is_dir():
        found = {path.relative_to(place).as_posix(): path for path in _walk(place, KINDS)}
        if not found:
            raise ValueError(
                f"files:{place} has no file that ends in {' '.join(KINDS)} (or in one of these + "
                f".gz or .zst); name its files with a glob, as in 'files:{place}/**/*.html'"
            )
    elif place.exists():
        found = {place.name: place}
    else:
        root = Path(*takewhile(lambda part: not glob.has_magic(part), place.parts))
        for parent in (p for p in place.parents if p.is_relative_to(root)):
            for folder in map(Path, glob.glob(f"{parent}/", recursive=True)):
                os.scandir(folder).close()  # raises for a locked folder, which glob would skip
        matches = map(Path, glob.glob(str(place), recursive=True))
        found = {p.relative_to(root).as_posix(): p for p in matches if p.is_file()}
        if not found:
            raise ValueError(f"files:{place}: no such file or folder")
    if odd := [str(path) for name, path in found.items() if not is_utf8(name)]:
        raise UsageError(f"the name of {odd[0]!r} is not UTF-8; rename the file")
    return dict(sorted(found.items()))


def is_utf8(name: str) -> bool:
    """Whether a name is UTF-8: Python reads other bytes as surrogates, which cannot be encoded."""
    return name.encode("utf-8", "ignore").decode() == name


def _walk(root: Path, kinds: tuple[str, ...], installed: bool = False) -> Iterator[Path]:
    """The files of these kinds in a folder and below, in a fixed order; what is hidden is left out.
    OSError if a folder cannot be read. installed: Python's own folders, where links and folders
    that cannot be read are left out."""

    def refuse(error: OSError) -> None:
        if not installed:
            raise error

    seen = set()  # a link may lead back to a folder above
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=not installed):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(d for d in folders if d != "__pycache__" and not d.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or kind_of(name) not in kinds:
                continue
            if path.is_file() and not (installed and path.is_symlink()):
                yield path


def kind_of(name: str) -> str:
    """'a.jsonl.gz' -> '.jsonl'"""
    return Path(re.sub(r"\.(gz|zst)$", "", name.lower())).suffix


def _pieces(name: str, path: Path, size: int, target: int) -> Iterator[tuple]:
    """(name, start, end, bytes) of each piece of a file; one piece if the file cannot be cut."""
    if kind_of(name) == ".parquet":
        import pyarrow.parquet as pq

        with _named_errors(path, REPAIR):
            metadata = pq.ParquetFile(path).metadata
        first = held = 0
        for i in range(metadata.num_row_groups):
            held += metadata.row_group(i).total_byte_size
            if held >= target or i == metadata.num_row_groups - 1:
                yield name, first, i + 1, held
                first, held = i + 1, 0
    elif compression_of(name):
        yield name, 0, -1, size
    else:
        if kind_of(name) not in KINDS:  # named by hand
            with _named_errors(path, REPAIR), open(path, "rb") as f:
                _refuse_packed(path, f.read(8))
        count = max(1, -(-size // target))
        for i in range(count):
            start, end = size * i // count, size * (i + 1) // count
            yield name, start, end, end - start


def _refuse_packed(path: Path, start: bytes) -> None:
    """DataError if a file starts as a form of compressed text that is not read here."""
    for magic, kind in NOT_TEXT.items():
        if start.startswith(magic):
            raise DataError(f"{path} is {kind} file, not text; take the text out of it first")


def compression_of(name: str) -> str | None:
    return {".gz": "gzip", ".zst": "zstd"}.get(Path(name).suffix.lower())


def _open(path: Path) -> BinaryIO:
    """A file, open; a .gz or .zst file is decompressed as it is read."""
    if not (compression := compression_of(path.name)):
        return open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression), MB)


def _read(path: Path, start: int, end: int, fields: tuple, notes: Counter) -> Iterator[str]:
    """The documents of one piece of a file: those whose first byte lies in start .. end."""
    kind, length = kind_of(path.name), -1  # to the end
    with _named_errors(path, REPAIR):
        if kind == ".parquet":
            yield from _read_parquet(path, start, end, fields, notes)
            return
        with _open(path) as f:
            if end >= 0:
                start, end = _line_start(f, start), _line_start(f, end)
                f.seek(start)
                length = end - start  # may be 0: a long line spans several pieces
            if kind in (".jsonl", ".ndjson"):
                yield from _read_jsonl(f, length, path, fields, notes)
            elif raw := f.read(length):
                if start == 0 and kind != ".py":  # so that the text of stdlib stays what it is
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise DataError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
                yield from blocks(decode(raw, notes), DOCUMENT)
            elif start == 0:
                notes["empty files"] += 1


@contextmanager
def _named_errors(where: object, remedy: str) -> Iterator[None]:
    """Turn a library's error into one sentence: UsageError for a wrong name on the Hub, else
    DataError. While local files are read, any other error is a bug and passes through."""
    try:
        yield
    except (DataError, UsageError):
        raise
    except Exception as error:
        kind, local = type(error), isinstance(where, Path)
        reason = f"{kind.__name__}: {' '.join(str(error).split())[:300]}"
        of_pyarrow = kind.__module__.startswith("pyarrow")  # some are ValueErrors: a damaged file
        if local and not of_pyarrow and not isinstance(error, OSError):
            raise
        wrong_name = re.search("(Dataset|Repository|Revision|DataFiles)NotFound", kind.__name__)
        wrong_value = not of_pyarrow and isinstance(error, LookupError | ImportError | ValueError)
        if wrong_name or wrong_value:
            raise UsageError(f"{where}: {reason}") from None
        raise DataError(f"{where} cannot be read ({reason}); {remedy}") from None


def _line_start(f: BinaryIO, position: int) -> int:
    """The first start of a line at or after `position`. So byte ranges share no line, miss none."""
    if position == 0:
        return 0
    f.seek(position - 1)
    while (line := f.readline(MB)) and not line.endswith(b"\n"):
        pass
    return f.tell()


def decode(raw: bytes, notes: Counter) -> str:
    """Decode UTF-8. Any other byte is read as Latin-1 and counted, so that nothing is lost."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        notes["documents with bytes that are not UTF-8 (read as Latin-1)"] += 1
        return raw.decode("utf-8", errors="as_latin1")


codecs.register_error("as_latin1", lambda e: (e.object[e.start : e.end].decode("latin-1"), e.end))


def join_fields(record: dict, fields: tuple[str, ...], where: object, notes: Counter) -> str:
    """The document of a record: its text fields, a blank line between them."""
    if missing := [f for f in fields if f not in record]:
        raise UsageError(
            f"{where} has no field {missing[0]!r}, it has {', '.join(record)}; for example, add "
            f"#{next(iter(record), 'FIELD')} to the source"
        )
    full = lambda value: value not in (None, "", b"")  # a 0 is text
    return "\n\n".join(_text(record[f], f, where, notes) for f in fields if full(record[f]))


def _text(value: object, field: str, where: object, notes: Counter) -> str:
    if isinstance(value, bytes):
        return decode(value, notes)
    if isinstance(value, list | dict):
        raise UsageError(
            f"{where}: the field {field!r} holds a {type(value).__name__}, not text; write the "
            "text that you want into a field of its own"
        )
    return str(value)


def _read_jsonl(f: BinaryIO, length: int, path: Path, fields, notes: Counter) -> Iterator[str]:
    """A document per line, for `length` bytes, which end where a line does (-1: to the end)."""
    done = 0
    while done != length and (line := f.readline()):
        done += len(line)
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            record = json.loads(decode(line, notes))
        except (ValueError, RecursionError):  # the latter: nested too deeply
            record = None
        if not isinstance(record, dict):
            start = decode(line[:60], Counter())
            reason = f"not a JSON object on the line that starts {start!r}"
            raise DataError(f"{path}: {reason}; {REPAIR}")
        yield join_fields(record, fields, path, notes)


def _read_parquet(path: Path, first: int, last: int, fields: tuple, notes) -> Iterator[str]:
    """A document per row, of the row groups first .. last - 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = (pa.string(), pa.large_string(), pa.string_view())

    def raw(column: pa.Array) -> pa.Array:  # text that is not UTF-8 would raise in to_pylist
        return column.cast(pa.large_binary()) if column.type in text else column

    with pq.ParquetFile(path) as file:
        names = dict.fromkeys(file.schema_arrow.names)
        join_fields(names, fields, path, notes)  # refuses a missing field
        for batch in file.iter_batches(128, range(first, last), columns=list(fields)):
            columns = pa.RecordBatch.from_arrays(list(map(raw, batch.columns)), batch.schema.names)
            for record in columns.to_pylist():
                yield join_fields(record, fields, path, notes)


# ---------------------------------------------------------------------------------- Hugging Face


def is_data_file(place: str) -> bool:
    return "://" in place or kind_of(place) in (".parquet", ".jsonl", ".json")


def is_local_glob(place: str) -> bool:
    """Whether hf:PLACE names data files of this machine, which may become more at any time."""
    return is_data_file(place) and "://" not in place


def _hf_load(source: Source):
    import datasets

    for action in ("READ", "OPEN"):
        setattr(datasets.config, f"STREAMING_{action}_MAX_RETRIES", TRIES)
        setattr(datasets.config, f"STREAMING_{action}_RETRY_INTERVAL", RETRY_S)
    what = {"path": source.place, "name": source.config, "revision": source.revision}
    if is_data_file(source.place):
        kind = "parquet" if kind_of(source.place) == ".parquet" else "json"
        what = {"path": kind, "data_files": source.place}
    return datasets.load_dataset(**what, split="train", streaming=True)


def _hf_units(source: Source) -> tuple[list[dict], dict]:
    """One unit per file of the dataset, at a pinned revision."""
    revision = source.revision
    with _named_errors(f"hf:{source.place}", AGAIN):
        if not is_data_file(source.place):
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(source.place, revision=revision).sha
        count = _hf_load(source).num_shards
    units = [{"shard": i, "of": count} for i in range(count)]
    units.sort(key=lambda u: hashlib.blake2b(f"{u['shard']}".encode()).digest())
    return units, {"revision": revision, "shards": count}


def _hf_documents(source: Source, unit: dict, notes: Counter) -> Iterator[str]:
    where = f"hf:{source.place}"
    with _named_errors(where, AGAIN):
        for record in _hf_load(source).shard(unit["of"], unit["shard"]):
            yield join_fields(record, source.fields, where, notes)
