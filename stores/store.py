"""Objects under a URL: a folder, or a store that fsspec knows (s3://, gs://, hf://).

A download is checked against its sha256, an upload by the store's own checksum. No name leads out
of the URL. Whatever a store's library raises becomes a StorageError that names the URL, without its
password; each library finds credentials in its own places. Next: mirror.py, stage.py.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from config import UsageError, install
from machinery import disk
from machinery.errors import DataError, StorageError
from machinery.output import public

PROTOCOLS = {"s3", "gs", "hf", "file"}
PAUSES_S = 1.0, 4.0, 16.0  # between the four attempts of one request
BLOCK = 1 << 24  # bytes read at a time


def patient(work: Callable) -> Callable:
    """A decorator that repeats a request, after a pause, if the store fails, lacks what should be
    there, or returns it damaged; but not if it denies permission."""

    @functools.wraps(work)
    def tried(*args, **kwargs):
        for pause_s in (*PAUSES_S, None):
            try:
                return work(*args, **kwargs)
            except (StorageError, DataError) as error:
                if pause_s is None or isinstance(error.__cause__, PermissionError):
                    raise
                time.sleep(pause_s)

    return tried


class Store:
    """The objects under a URL, by name. DataError for a name that is absolute or has `..` in it."""

    def __init__(self, url: str, folder: str = ""):
        """The objects under URL/FOLDER. UsageError for a URL of another protocol, or if the library
        for it is not installed."""
        from fsspec.core import url_to_fs

        self.url = f"{public(url).rstrip('/')}/{folder}".rstrip("/")  # to be shown
        self._is_secretive = any(mark in url for mark in "@?#;")
        url = url if "://" in url else f"file://{os.path.abspath(url)}"
        protocol = url.partition("://")[0]
        self.is_local = protocol == "file"
        # fsspec formats and runs what a chained URL (::) names; its rm takes *?[] as a pattern.
        odd = "::" in url or not self.is_local and set("*?[]") & set(url + folder)
        if protocol not in PROTOCOLS or odd:
            raise UsageError(
                f"{self.url}: give a folder, or a URL of {', '.join(sorted(PROTOCOLS))} without "
                ":: * ? [ ]"
            )
        try:
            self.fs, root = url_to_fs(url)
        except (ImportError, ValueError, TypeError) as error:
            raise UsageError(
                f"{self.url}: {self._said(error)}; {install('requirements-store.txt')} "
                "(docs/store.md)"
            ) from None
        self.root = f"{root.rstrip('/')}/{folder}".rstrip("/")

    @contextlib.contextmanager
    def _reaching(self, name: str, what: str, passing: tuple = ()):
        """`with self._reaching(...) as path:` one request, without what fsspec has cached."""
        try:
            self.fs.invalidate_cache()
            yield self.root if what == "listed" else self._path(name)
        except (DataError, *passing):
            raise
        except Exception as error:  # each library has its own error classes
            raise StorageError(
                f"{self.url}/{name} cannot be {what} ({self._said(error)})"
            ) from error

    def _path(self, name: str) -> str:
        if not self.is_local:
            return "/".join((self.root, *disk.parts_of(name)))
        path = disk.inside(self.root, name)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(f"{path} is no regular file")
        return str(path)

    def _said(self, error: Exception) -> str:
        """An error in one line; only its class if its text may quote secret parts of the URL."""
        text = "" if self._is_secretive else " ".join(str(error).split())
        return public(f"{type(error).__name__}: {text}")[:300].rstrip(": ")

    @patient
    def read(self, name: str, most: int = disk.LARGEST_SMALL) -> bytes | None:
        """The whole object; None if there is none. DataError if it has more than `most` bytes."""
        with self._reaching(name, "read") as path:
            try:
                with self.fs.open(path, "rb") as file:
                    content = file.read(most + 1)
            except (FileNotFoundError, NotADirectoryError):
                return None
            if len(content) > most:
                raise DataError(f"{self.url}/{name} is larger than {most >> 20} MB")
            return content

    def find(self, name: str) -> bytes | None:
        """`read`; a miss is tried once more, as a store may miss what it has."""
        return self.read(name) or self.read(name)

    @patient
    def names(self) -> list[str]:
        """The names of what is directly under the URL."""
        with self._reaching("", "listed") as path:
            try:
                return [PurePosixPath(o["name"]).name for o in self.fs.ls(path, detail=True)]
            except (FileNotFoundError, NotADirectoryError):
                return []

    @patient
    def write(self, name: str, content: bytes, new: bool = False) -> None:
        """Replace an object. new: FileExistsError if it exists; at most one of several wins."""
        with self._reaching(name, "written", (FileExistsError,) if new else ()) as path:
            if self.is_local and not new:
                return disk.write_bytes(Path(path), content)
            if self.is_local:  # fsspec would look first and create then: two could win
                folder = Path(path).parent
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except FileExistsError:  # the caller would take it for the object's
                    raise NotADirectoryError(f"{folder} is no folder") from None
                with disk.open_file(path, "xb") as file:
                    file.write(content)
                return
            self.fs.pipe_file(path, content, mode="create" if new else "overwrite")

    @patient
    def send(self, name: str, file: Path) -> None:
        """Upload a regular file."""
        with self._reaching(name, "written") as path, disk.open_file(file) as source:
            if not self.is_local:
                return self.fs.put_file(str(file), path)
            with disk.replacing(Path(path)) as target:
                shutil.copyfileobj(source, target, BLOCK)

    @patient
    def fetch(self, name: str, file: Path, sha256: str = "", most: int = sys.maxsize) -> None:
        """Download to `file`, which is complete or absent. DataError for an object that is missing,
        has more than `most` bytes, or, if `sha256` is given, another hash."""
        digest = hashlib.sha256()
        size = 0
        with self._reaching(name, "read") as path, disk.replacing(file) as target:
            try:
                source = self.fs.open(path, "rb", block_size=BLOCK)
            except (FileNotFoundError, NotADirectoryError):
                raise DataError(f"{self.url}/{name} is missing") from None
            with source:
                while size <= most and (block := source.read(BLOCK)):
                    target.write(block)
                    digest.update(block)
                    size += len(block)
            if size > most or sha256 not in ("", digest.hexdigest()):
                fault = f"over {most:,} bytes" if size > most else f"its sha256 is not {sha256}"
                raise DataError(f"{self.url}/{name} is damaged: {fault}")

    def sweep(self, *folders: str) -> None:
        """Remove what killed programs have left half written in these folders (patterns of glob),
        if the store is a folder."""
        if self.is_local:
            for folder in folders:
                disk.sweep(Path(self.root).glob(f"{folder}{disk.TEMPORARY}"))

    @patient
    def remove(self, name: str, recursive: bool = False) -> None:
        """Remove an object, or all under it; nothing happens if there is none."""
        with self._reaching(name, "removed") as path, contextlib.suppress(FileNotFoundError):
            self.fs.rm(path, recursive=recursive)
