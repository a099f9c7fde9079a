"""Where text comes from: a source spec -> units -> documents.

    stdlib       the Python standard library of this machine (31 MB, no network)
    stdlib+site  the same and the installed packages
    chats:stdlib conversations about its functions and classes (stdlib_chats.py)
    files:PATH   a file, folder or glob (docs/text.md has the table of kinds); or just PATH
    hf:REPO[:CONFIG[:SPLIT]][@REVISION]
                 a dataset of the Hub, streamed (split: train); or the URL of a .parquet or .jsonl
`NAME=` before a spec names the source; `#FIELD+FIELD` after it names the fields that hold the text.
`#messages` and `#conversations` hold lists of turns: the documents are conversations (chat.py).

A unit is a part of a source that can be read on its own: some files, or a byte range of a big one.
The source alone decides its units (for a Hub dataset, the revision that job.py keeps). They are
ordered by hash, so the first few are a fair sample. Next: reading.py, a file -> its documents.
"""

import codecs
import glob
import hashlib
import os
import re
import shlex
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq

from config import UsageError
from machinery.errors import DataError, reason_of
from machinery.output import public
from preparation import chat, reading, stdlib_chats
from preparation.reading import (
    LARGEST_UNIT,
    MB,
    RECORDS,
    TEXTS,
    Notes,
    document_of,
    kind_of,
    read_file,
)

# Of 4 to 16 MB (LARGEST_UNIT). 16 MB take one core about 4 seconds: no more is lost by a kill, and
# even few files occupy many cores. At 4 bytes of text per token and 2 per id, a shard has 8 MB.
SMALLEST_UNIT = 4 * MB
SAMPLE = 100  # documents of a source that are read before any work
FIRST_RECORDS = 10_000  # if all of these lack a field that is asked for, that is an error
AGAIN = "run the same command again: finished units are kept"


@dataclass(frozen=True)
class Source:
    name: str
    kind: str  # stdlib, chats, files or hf; other modules ask for the properties below instead
    place: str
    fields: tuple[str, ...] = ("text",)
    # whether the fields were named: then plain text, which has none, is no source
    named: bool = False
    encoding: str = "utf-8"
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    # as given, without what is secret in a URL, and without a revision, which the job adds
    spec: str = ""

    remote = property(lambda self: self.kind == "hf")  # read by the Hub's library
    local = property(lambda self: self.kind == "files")  # people edit its files in place
    installed = property(lambda self: self.kind in ("stdlib", "chats"))  # changes with Python
    conversations = property(lambda self: reading.is_turns(self.fields))


INSTALLED = {  # word -> its source
    "stdlib": Source("stdlib", "stdlib", "stdlib"),
    "stdlib+site": Source("stdlib", "stdlib", "stdlib+site"),
    "chats:stdlib": Source("chats", "chats", "stdlib", ("messages",)),
}


def parse(spec: str, encoding: str = "utf-8") -> Source:
    """'code=files:src#body' -> Source(name='code', kind='files', place='src', fields=('body',))"""
    name, text = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", spec, re.DOTALL).groups()
    if os.path.exists(spec):  # a=b.txt
        name = None
        text = spec
    source = INSTALLED.get(text) or of_path(text) or of_hub(text)
    if source is None:
        raise UsageError(
            "a source is a path that is there, or stdlib, stdlib+site, chats:stdlib, files:PATH, "
            f"hf:REPO[:CONFIG[:SPLIT]][@REVISION]; not {spec!r} (a path with spaces needs quotes)"
        )
    # the name of a folder, below train/; no file system takes more than 255 bytes
    name = re.sub(r"[^\w.-]", "_", name or source.name).lstrip(".") or source.kind
    name = name.encode()[:200].decode(errors="ignore")
    unpinned = spec.replace(f"@{source.revision}", "") if source.revision else spec
    return replace(source, name=name, encoding=encoding, spec=public(unpinned))


def of_path(text: str) -> Source | None:
    """'notes #2/*.txt#body', with files: before it or not -> files that are there. With files:, it
    is a path in any case."""
    path = text.removeprefix("files:")
    found = find_place(path)
    if found is None and path in ("", text):  # nothing is there, and no files: says that it is
        return None
    if "://" in path:
        raise UsageError(f"source {text!r} is a URL; files: takes a path")
    place, fields = found or (os.path.expanduser(path), "")
    return Source(Path(place).stem, "files", os.path.abspath(place), *fields_of(fields))


def of_hub(text: str) -> Source | None:
    """'hf:REPO:CONFIG:SPLIT@REVISION#FIELD' or 'hf:URL' -> a dataset."""
    word, _, fields = text.partition("#")
    found = re.fullmatch(r"hf:(.*://.*|[^:@]+)(?::([^:@]*))?(?::([^@]*))?(?:@(.*))?", word)
    if found is None:
        return None
    place, config, split, revision = found.groups()
    return Source(
        public(place).rstrip("/").split("/")[-1],
        "hf",
        place,
        *fields_of(fields),
        config=config or None,
        split=split or "train",
        revision=revision or None,
    )


def fields_of(text: str) -> tuple[tuple[str, ...], bool]:
    """'question+answer' -> the fields of a Source, and whether they were named."""
    return tuple((text or "text").split("+")), bool(text)


def encoding_of(name: str) -> str:
    """The encoding that is meant: 'UTF8' -> 'utf-8'; UsageError if files in it cannot be read."""
    try:
        b"\xff".decode(name, errors="as_latin1")  # a handler of reading.py
        encoding = codecs.lookup(name).name
        if "\n".encode(name) == b"\n" and encoding != "iso2022_kr":  # lines are read one by one
            return encoding
    except (LookupError, UnicodeError):
        pass
    raise UsageError(
        f"--encoding {name} is none that can be read here; try gb18030, big5, cp1251 or latin-1; "
        "iconv -f UTF-16 -t UTF-8 converts UTF-16"
    )


def find_place(text: str) -> tuple[str, str] | None:
    """'notes #2/*.txt#body' -> ('notes #2/*.txt', 'body'): the path that is there, or the pattern
    that some file matches, and the fields after it. A path is taken as it is named, even one with
    a # or a bracket. None if nothing is there."""
    path = text
    while path:
        place = os.path.expanduser(path)
        if any(matches(place)):
            return place, text[len(path) + 1 :]
        path = path.rpartition("#")[0]
    return None


def literal_part(place: str | Path) -> tuple[Path, str]:
    """'notes [1]/*.txt' -> the folder 'notes [1]', as it is there, and '*.txt'."""
    path = Path(os.path.abspath(place))
    root = next(p for p in (path, *path.parents) if os.path.lexists(p))
    return root, str(path.relative_to(root))


def matches(place: str | Path) -> Iterator[Path]:
    """What a path or pattern names, perhaps twice. Beside *, **, ? and [, a pattern may have {c,h}:
    c, h, C or H. Folders that are there stand for themselves, whatever is in their names."""
    root, rest = literal_part(place)
    pattern = Path(glob.escape(str(root))) / rest
    yield from map(Path, glob.iglob(str(pattern), recursive=True))
    braces = re.search(r"\{([^{}]*)\}", rest)
    for word in f"{braces[1]},{braces[1].upper()}".split(",") if braces else []:
        yield from matches(root / rest.replace(braces[0], word.strip(), 1))


def list_units(source: Source) -> tuple[list[dict], dict]:
    """The units of a source, and facts for the manifest (revision, or files and bytes).

    Local unit: {"bytes": 123, "pieces": [[name, start, end], ...]}, start and end in bytes, or in
    row groups for parquet. Hub unit: {"shard": 3, "of": 100}: one of the dataset's own files.
    """
    if source.remote:
        return _hf_units(source)
    files, skipped = find_files(source)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    target = min(LARGEST_UNIT, max(SMALLEST_UNIT, total // 64))
    pieces = []
    unreadable = defaultdict(list)
    for name, path in files.items():
        try:
            pieces += _pieces(name, path, sizes[name], target)
        except DataError as error:
            unreadable[str(error).removeprefix(f"{path}: ")].append(str(path))
    if unreadable:
        lines = []
        for fault, paths in unreadable.items():
            others = f" and {len(paths[10:]):,} others" if paths[10:] else ""
            mended = fault.replace("{}", shlex.join(paths))  # in reading.ICONV, a line for a shell
            lines.append(f"{', '.join(paths[:10])}{others}: {mended}")
        raise DataError("\n".join(lines))
    pieces.sort(key=lambda p: hashlib.blake2b(f"{p[0]}:{p[1]}".encode()).digest())
    units = []
    for name, start, end, size in pieces:
        if not units or units[-1]["bytes"] + size > target:
            units.append({"bytes": 0, "pieces": []})
        units[-1]["pieces"].append([name, start, end])
        units[-1]["bytes"] += size
    facts = {"files": len(files), "bytes": total}
    if skipped:
        facts["not_read"] = dict(skipped.most_common(20))
    return units, facts


def documents(source: Source, unit: dict, notes: Notes) -> Iterator[str | list[chat.Turn]]:
    """The texts of a unit, or its conversations, but for duplicates of other documents
    (duplicates.py). `notes` counts what is odd or left out."""
    for i, document in enumerate(filter(None, _all_of(source, unit, notes))):
        if i in unit.get("duplicates", ()):
            notes["copies of other documents, left out"] += 1
        else:
            yield document


def _all_of(source: Source, unit: dict, notes: Notes) -> Iterator[str | list[chat.Turn] | None]:
    """The document of each record, or piece of plain text; "" if it is empty, None if it is left
    out: so that `probe` need not read on and on."""
    read = _hf_documents if source.remote else _local_documents
    for document in read(source, unit, notes):
        if document == "":
            notes["empty documents"] += 1
        elif document is not None and source.conversations:
            try:
                document = chat.read_example(document, notes)
            except chat.TurnsError as error:
                notes.leave_out(f"conversations left out, with {error.reason}", document)
                document = None
        elif document is not None and "\r\n" in document:
            notes[reading.CRLF] += 1
        yield document


def probe(source: Source, units: list[dict]) -> None:
    """Read the beginning of a source, before hours of work: UsageError if it has no document, lacks
    a field that is asked for, or is in another encoding."""
    notes = Notes()
    found = 0
    size = 0
    lacking = []
    for document in (d for unit in units for d in _all_of(source, unit, notes)):
        found += bool(document)
        size += len(document or "")
        lacking = [f for f in source.fields if notes[f"{reading.WITHOUT} {f!r}"] == notes.read]
        is_enough = (found >= SAMPLE or size > LARGEST_UNIT) and not lacking
        if is_enough or notes.read >= FIRST_RECORDS:
            break
    where = f"{source.kind}:{source.place}"
    if notes.names and lacking:
        raise UsageError(
            f"{where} has no field {lacking[0]!r} in the first {notes.read:,} records, which have "
            f"{', '.join(notes.names)[:300]}; name one after the source: #FIELD"
        )
    if not found:
        raise UsageError(f"{where} has no text that can be used{left_out(notes)}")
    if notes.foreign > notes.bytes / 2:
        raise UsageError(
            f"{notes.foreign / notes.bytes:.0%} of the first {notes.bytes:,} bytes of {where} are "
            f"not {source.encoding.upper()}; name their encoding, as in --encoding gb18030, big5, "
            "cp1251, cp1252, iso2022_jp or hz, or convert them to UTF-8 with iconv"
        )


def left_out(notes: Notes) -> str:
    """What of a text is not used, and why: for an error."""
    return f" ({'; '.join(notes.lines())})" if notes else ""


# ----------------------------------------------------------------------------------- local files


def has_records(source: Source) -> bool:
    """Whether somebody wrote its documents as they are: not all are pieces of plain text."""
    return any(kind_of(name) in RECORDS for name in find_files(source)[0])


@lru_cache(maxsize=16)  # a worker needs them once per unit
def find_files(source: Source) -> tuple[dict[str, Path], Counter]:
    """The files of a local source, name (the same on every machine) -> path, sorted by name; and of
    what kinds others are, which are not read. DataError if a folder cannot be read; UsageError if a
    field is named and a file has none."""
    place = Path(source.place)
    skipped = Counter()
    with reading.readable(place):
        if source.installed:
            found = _installed_files(source.place)
        else:
            found = _named_files(place, source.named, skipped)
    for name, path in found.items():
        if name.encode("utf-8", "ignore").decode() != name:  # other bytes are read as surrogates
            raise UsageError(f"the name of {str(path)!r} is not UTF-8; rename the file")
        if source.named and kind_of(name) not in RECORDS:
            raise UsageError(
                f"{path} is plain text, which has no field {source.fields[0]!r}; leave out the #, "
                f"or name files of records ({' '.join(RECORDS)})"
            )
    return dict(sorted(found.items())), skipped


def _installed_files(place: str) -> dict[str, Path]:
    """The .py files of Python's standard library, and with +site of the installed packages."""
    paths = sysconfig.get_paths()
    roots = {"stdlib": paths["stdlib"], "site": paths["purelib"]}
    found = {}
    for part in place.split("+"):
        for path in _walk(Path(roots[part]), [".py"], Counter()):
            name = path.relative_to(roots[part])
            if not {"site-packages", "dist-packages"} & set(name.parts):
                found[f"{part}/{name}"] = path
    return found


def _named_files(place: Path, named: bool, skipped: Counter) -> dict[str, Path]:
    """The files of a folder, one file, or those of a pattern; counts what a folder has beside."""
    if place.is_dir():
        kinds = RECORDS if named else [*TEXTS, *reading.IN_A_FOLDER]
        files = _walk(place, kinds, skipped)
        found = {path.relative_to(place).as_posix(): path for path in files}
        if not found:
            raise UsageError(
                f"files:{place} has no file that ends in {' '.join(kinds)} (or these and "
                f"{' '.join(reading.COMPRESSIONS)}), but {unread(place, skipped) or 'none at all'}"
            )
    elif place.is_file():  # a pipe is not: it can be read only once
        found = {place.name: place}
    else:
        root, _ = literal_part(place)
        found = {}
        for path in {*matches(place)}:
            if path.is_file():
                found[path.relative_to(root).as_posix()] = path
            elif not path.is_dir():
                skipped["no regular file"] += 1
            elif "**" not in place.parts:  # which matches each folder on the way
                skipped["folders"] += 1
        if not found:
            raise UsageError(f"files:{place}: no such file or folder")
    return found


def unread(place: str | Path, kinds: dict[str, int]) -> str:
    """What a folder has beside the files that are read, by kind, and the pattern that names it."""
    counts = ", ".join(f"{n:,} {kind}" for kind, n in kinds.items())
    endings = ",".join(kind for kind in kinds if kind.startswith("."))
    pattern = shlex.quote(f"files:{place}/**/*{{{endings}}}")
    return f"{counts}; if they are text, a pattern names them: {pattern}" if endings else counts


def _walk(root: Path, kinds: tuple[str, ...], skipped: Counter) -> Iterator[Path]:
    """The files of these kinds in a folder and below, but hidden ones; counts others by kind.
    OSError if a folder cannot be read."""

    def refuse(error):
        raise error

    seen = set()  # a link may lead back to a folder above
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(d for d in folders if d != "__pycache__" and not d.startswith("."))
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            kind = kind_of(path.name)
            if kind not in kinds:
                skipped[kind or "without an ending"] += 1
            elif path.is_file():
                yield path
            else:
                skipped["no regular file"] += 1


def _pieces(name: str, path: Path, size: int, target: int) -> Iterator[tuple]:
    """(name, start, end, bytes) of each piece of a file; one piece if the file cannot be cut. Bytes
    are cut anywhere: read_file moves both ends to the next start of a line. DataError if it is of
    a kind that cannot be read."""
    kind = kind_of(name)
    with reading.readable(path):
        if kind == ".parquet":
            metadata = pq.ParquetFile(path).metadata
            for i in range(metadata.num_row_groups):
                yield name, i, i + 1, metadata.row_group(i).total_byte_size
            return
        with reading.open_file(path) as file:
            reading.refuse(path, file.peek(4096))
    if path.suffix.lower() in reading.COMPRESSIONS or kind in (".json", ".csv", ".tsv"):
        yield name, 0, -1, size  # to its end
    else:
        count = max(1, -(-size // target))
        for start, end in pairwise(size * i // count for i in range(count + 1)):
            yield name, start, end, end - start


def _local_documents(source: Source, unit: dict, notes: Notes):
    """The documents of each piece of a unit."""
    for name, start, end in unit["pieces"]:
        path = find_files(source)[0][name]
        if source.kind == "chats":
            with reading.readable(path), reading.open_file(path) as file:
                for turns in stdlib_chats.conversations(name, file.read()):
                    notes.read += 1
                    yield turns
        else:
            yield from read_file(path, start, end, source, notes)


# ---------------------------------------------------------------------------------- Hugging Face


@contextmanager
def _reachable(source: Source) -> Iterator[None]:
    """An error of the Hub's library becomes one sentence, a DataError: for a name that is not
    there, as for a network that is down."""
    try:
        yield
    except Exception as error:
        raise DataError(
            f"hf:{source.place} cannot be read ({reason_of(error)}); mend its name, or {AGAIN}"
        ) from None


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


def _hf_documents(source: Source, unit: dict, notes: Notes):
    return (document_of(row, source.fields, notes) for row in _hf_records(source, unit))


def _hf_records(source: Source, unit: dict) -> Iterator[dict]:
    with _reachable(source):
        yield from _hf_load(source).shard(unit["of"], unit["shard"])
