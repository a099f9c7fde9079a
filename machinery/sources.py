"""Where text comes from: a source spec -> units -> documents.

    stdlib                       the Python standard library of this machine (31 MB, no network)
    stdlib+site                  the same and the installed packages
    files:PATH                   a file, a folder or a glob: .txt .md .jsonl .parquet, also .gz .zst
    hf:REPO[:CONFIG][@REVISION]  a Hugging Face dataset, streamed; or a URL or path of data files
`NAME=` before a spec names the source; `#FIELD+FIELD` after it names the fields that hold the text.

A unit is a piece of a source that can be read on its own: some files, or a byte range of a big one.
Units depend on the source alone and are ordered by hash: the first few are a fair sample. (Units of
a Hub dataset depend on its revision, which worker.py pins.) Next: worker.py makes shards of units.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from machinery.errors import DataError, UsageError
from tokenizer import blocks

MB = 1 << 20
SMALLEST_UNIT, LARGEST_UNIT = 4 * MB, 16 * MB  # 16 MB of text take one core about 4 seconds
DOCUMENT = MB  # characters; a longer plain text becomes several documents
TEXT = (".txt", ".text", ".md", ".py")
KINDS = (*TEXT, ".jsonl", ".ndjson", ".parquet")
TRIES, RETRY_S = 50, 2.0  # the Hub's library survives an outage of 100 s


@dataclass(frozen=True)
class Source:
    name: str
    kind: str  # stdlib, files or hf
    place: str
    fields: tuple[str, ...] = ("text",)
    config: str | None = None
    revision: str | None = None

    # Asked for by these names elsewhere, never by the kind:
    remote = property(lambda self: self.kind == "hf")  # listed over the network, once, then kept
    unbounded = property(lambda self: self.kind == "hf")  # may hold more text than anyone wants
    mutable = property(lambda self: self.kind == "files")  # people edit its files in place
    installed = property(lambda self: self.kind == "stdlib")  # an update of Python changes it


def parse(spec: str) -> Source:
    """'code=files:src#body' -> Source(name='code', kind='files', place='src', fields=('body',))"""
    name, rest = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", spec, re.DOTALL).groups()
    rest, _, fields = rest.partition("#")
    fields = tuple(fields.split("+")) if fields else ("text",)
    kind, _, place = rest.partition(":")
    if rest in ("stdlib", "stdlib+site"):
        return Source(name or "stdlib", "stdlib", rest, fields)
    if kind == "files" and place:
        name = name or re.sub(r"[^\w.-]", "_", Path(place).stem) or "files"
        return Source(name, "files", os.path.abspath(os.path.expanduser(place)), fields)
    if kind == "hf" and place:
        config = revision = None
        if not is_data_file(place):
            place, _, revision = place.partition("@")
            place, _, config = place.partition(":")
        name = name or re.sub(r"[^\w.-]", "_", place.rstrip("/").split("/")[-1])
        return Source(name, "hf", place, fields, config or None, revision or None)
    raise ValueError(
        f"source {spec!r} is none of stdlib, stdlib+site, files:PATH, hf:REPO[:CONFIG][@REVISION]"
    )


def list_units(source: Source) -> tuple[list[dict], dict]:
    """The units of a source, and facts for the manifest (revision, or the files' sizes).

    Local unit: {"bytes": 123, "pieces": [[name, start, end], ...]}, start and end in bytes, or in
    row groups for parquet. Streamed unit: {"shard": 3, "of": 100}: one of the dataset's own files.
    """
    if source.remote:
        return _hf_units(source)
    files = local_files(source)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    target = min(LARGEST_UNIT, max(SMALLEST_UNIT, total // 64))
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
        texts = _hf_documents(source, unit)
    else:
        files = cached_files(source)
        texts = (
            text
            for name, start, end in unit["pieces"]
            for text in _read(files[name], start, end, source.fields, notes)
        )
    for text in texts:
        if text:
            yield text
        else:
            notes["empty documents"] += 1


# ----------------------------------------------------------------------------------- local files


def local_files(source: Source) -> dict[str, Path]:
    """The files of a local source: name (the same on every machine) -> path, sorted by name."""
    if source.kind == "stdlib":
        paths = sysconfig.get_paths()
        roots = {"stdlib": paths["stdlib"]}
        if source.place == "stdlib+site":
            roots |= {"site": paths["purelib"]}
        found = {
            f"{root}/{path.relative_to(folder)}": path
            for root, folder in roots.items()
            for path in _walk(Path(folder), (".py",), links=False)
            if root == "site" or not {"site-packages", "dist-packages"} & set(path.parts)
        }
        return dict(sorted(found.items()))
    place = Path(source.place)
    if place.is_dir():
        found = {path.relative_to(place).as_posix(): path for path in _walk(place, KINDS)}
    elif place.exists():
        found = {place.name: place}
    else:
        root = Path(*takewhile(lambda part: not glob.has_magic(part), place.parts))
        matches = map(Path, glob.glob(str(place), recursive=True))
        found = {p.relative_to(root).as_posix(): p for p in matches if p.is_file()}
        if not found:
            raise ValueError(f"files:{place}: no such file or folder")
    if not found:
        raise ValueError(
            f"files:{place} has no file that ends in {' '.join(KINDS)} (or in one of these + .gz "
            f"or .zst); name its files with a glob, as in 'files:{place}/**/*.html'"
        )
    return dict(sorted(found.items()))


cached_files = lru_cache(maxsize=16)(local_files)  # a worker needs them once per unit


def _walk(root: Path, kinds: tuple[str, ...], links: bool = True) -> Iterator[Path]:
    seen = set()  # a link may lead back to a folder above
    for folder, folders, names in os.walk(root, followlinks=links):
        real = os.path.realpath(folder)
        folders[:] = sorted(d for d in folders if d != "__pycache__" and not d.startswith("."))
        if real in seen:
            folders[:] = []
            continue
        seen.add(real)
        for name in sorted(names):
            path = Path(folder, name)
            if kind_of(name) in kinds and path.is_file() and (links or not path.is_symlink()):
                yield path


def kind_of(name: str) -> str:
    """'a.jsonl.gz' -> '.jsonl'"""
    return Path(re.sub(r"\.(gz|zst)$", "", name.lower())).suffix


def _pieces(name: str, path: Path, size: int, target: int) -> Iterator[tuple]:
    """(name, start, end, bytes) of each piece of a file; one piece if the file cannot be cut."""
    if kind_of(name) == ".parquet":
        import pyarrow.parquet as pq

        try:
            metadata = pq.ParquetFile(path).metadata
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a readable parquet file: {error}") from None
        first = held = 0
        for i in range(metadata.num_row_groups):
            held += metadata.row_group(i).total_byte_size
            if held >= target or i == metadata.num_row_groups - 1:
                yield name, first, i + 1, held
                first, held = i + 1, 0
    elif name.endswith((".gz", ".zst")):
        yield name, 0, -1, size
    else:
        count = max(1, -(-size // target))
        for i in range(count):
            start, end = size * i // count, size * (i + 1) // count
            yield name, start, end, end - start


def _open(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return gzip.open(path)
    if path.name.endswith(".zst"):
        import zstandard

        reader = zstandard.ZstdDecompressor().stream_reader
        return io.BufferedReader(reader(open(path, "rb"), read_across_frames=True), MB)
    return open(path, "rb")


def _read(path: Path, start: int, end: int, fields: tuple, notes: Counter) -> Iterator[str]:
    """The documents of one piece of a file: those whose first byte lies in start .. end."""
    kind, length = kind_of(path.name), -1  # to the end
    try:
        if kind == ".parquet":
            yield from _read_parquet(path, start, end, fields)
            return
        with _open(path) as f:
            if end >= 0:
                first, start, end = start, _line_start(f, start), _line_start(f, end)
                if start == end and first > 0:
                    return  # no line starts in this range
                f.seek(start)
                length = end - start
            if kind in (".jsonl", ".ndjson"):
                yield from _read_jsonl(f, length, fields, path, notes)
            else:
                yield from _read_text(f.read(length), path, notes)
    except Exception as error:
        known = isinstance(error, OSError | EOFError | zlib.error)
        if not known and type(error).__module__.split(".")[0] not in ("pyarrow", "zstandard"):
            raise
        raise DataError(f"{path} cannot be read: {error}") from None


def _line_start(f: BinaryIO, position: int) -> int:
    """The first start of a line at or after `position`: byte ranges then neither miss nor repeat
    a line."""
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


def _read_text(raw: bytes, path: Path, notes: Counter) -> Iterator[str]:
    """A piece of plain text -> documents of at most DOCUMENT characters."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
    if not raw:
        notes["empty files"] += 1
        return
    yield from blocks(decode(raw, notes), DOCUMENT)


def join_fields(record: dict, fields: tuple[str, ...], where: str) -> str:
    if missing := [f for f in fields if f not in record]:
        raise UsageError(
            f"{where} has no field {missing[0]!r}, it has {', '.join(record)}; add "
            f"#{next(iter(record), 'FIELD')} to the source, say"
        )
    return "\n\n".join(str(record[f]) for f in fields if record[f])


def _read_jsonl(
    f: BinaryIO, length: int, fields: tuple, path: Path, notes: Counter
) -> Iterator[str]:
    done = 0
    while done != length and (line := f.readline()):  # a range ends where a line does
        done += len(line)
        if not line.strip():
            continue
        try:
            record = json.loads(decode(line, notes))
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise DataError(
                f"{path}: not a JSON object on the line that starts "
                f"{decode(line[:60], Counter())!r}; repair or remove it"
            )
        yield join_fields(record, fields, str(path))


def _read_parquet(path: Path, first: int, last: int, fields: tuple[str, ...]) -> Iterator[str]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        join_fields(dict.fromkeys(columns), fields, str(path))  # refuses a missing field
        groups = list(range(first, last))
        for batch in file.iter_batches(128, row_groups=groups, columns=list(fields)):
            for record in batch.to_pylist():
                yield join_fields(record, fields, str(path))


# ---------------------------------------------------------------------------------- Hugging Face


def is_data_file(place: str) -> bool:
    return "://" in place or kind_of(place) in (".parquet", ".jsonl", ".json")


def _hf_load(source: Source):
    import datasets

    for action in ("READ", "OPEN"):
        setattr(datasets.config, f"STREAMING_{action}_MAX_RETRIES", TRIES)
        setattr(datasets.config, f"STREAMING_{action}_RETRY_INTERVAL", RETRY_S)
    what, options = (source.place, source.config), {"revision": source.revision}
    if is_data_file(source.place):
        what = ("parquet" if kind_of(source.place) == ".parquet" else "json",)
        options = {"data_files": source.place}
    return datasets.load_dataset(*what, **options, split="train", streaming=True)


def _hf_units(source: Source) -> tuple[list[dict], dict]:
    """One unit per file of the dataset, at a pinned revision."""
    revision = source.revision
    with _named_errors(source):
        if not is_data_file(source.place):
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(source.place, revision=source.revision).sha
        count = _hf_load(source).num_shards
    units = [{"shard": i, "of": count} for i in range(count)]
    units.sort(key=lambda u: hashlib.blake2b(f"{u['shard']}".encode()).digest())
    return units, {"revision": revision, "shards": count}


def _hf_documents(source: Source, unit: dict) -> Iterator[str]:
    with _named_errors(source):
        for record in _hf_load(source).shard(unit["of"], unit["shard"]):
            yield join_fields(record, source.fields, f"hf:{source.place}")


@contextmanager
def _named_errors(source: Source) -> Iterator[None]:
    """Turn a library's error into one sentence: UsageError if the name is wrong, else DataError."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        where, kind = f"hf:{source.place}", type(error)
        reason = f"{kind.__name__}: {' '.join(str(error).split())[:300]}"
        wrong_name = re.search("(Dataset|Repository|Revision|DataFiles)NotFound", kind.__name__)
        torn = kind.__module__.startswith("pyarrow")  # it raises ValueError too
        if wrong_name or isinstance(error, LookupError | ImportError | ValueError) and not torn:
            raise UsageError(f"{where}: {reason}") from None
        raise DataError(
            f"{where} cannot be read ({reason}); run the same command again: finished units "
            "are kept"
        ) from None
