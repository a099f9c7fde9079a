"""Objects under a URL: a folder, or a store that fsspec knows (s3://, gs://, hf://, ssh://).

What is fetched has its hash; what is sent is checked by the store's own checksum. Names stay under
the URL. Whatever a store's library raises is a StorageError that names the URL, without its
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
from machinery.cli import public
from machinery.errors import DataError, StorageError

PROTOCOLS = {"s3", "gs", "hf", "file", "ssh", "sftp"}
WITH_FOLDERS = {"file", "ssh", "sftp"}  # a store of objects has none to make
PAUSES_S = 1.0, 4.0, 16.0  # between the attempts of one request
BLOCK = 1 << 24  # bytes read at a time


def patient(work: Callable) -> Callable:
    """The same function, tried again after a pause while the store fails, lacks what should be
    there, or gives it damaged; but not if it refuses."""

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
    """The objects under a URL, by name. A name is relative, and has no `..`: DataError."""

    def __init__(self, url: str):
        """UsageError for a URL of another protocol, or if the library for it is not installed."""
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        self.url = public(url).rstrip("/")  # to be shown
        self._is_secretive = any(mark in url for mark in "@?#;")
        protocol, is_url, _ = url.partition("://")
        if not is_url:
            protocol, self.fs, root = "file", LocalFileSystem(), os.path.abspath(url)
        # A chain may format and run what it names; and fsspec's rm would take *[] for a pattern.
        elif protocol not in PROTOCOLS or "::" in url or set("*[]") & set(url):
            known = ", ".join(sorted(PROTOCOLS))
            raise UsageError(f"{self.url}: give a folder, or a URL of {known} without * [ ]")
        else:
            try:
                self.fs, root = url_to_fs(url)
            except (ImportError, ValueError, TypeError) as error:
                remedy = f"{install('requirements-store.txt')} (docs/store.md)"
                raise UsageError(f"{self.url}: {self._said(error)}; {remedy}") from None
        self.root = root.rstrip("/")
        self.is_local, self._has_folders = protocol == "file", protocol in WITH_FOLDERS

    @contextlib.contextmanager
    def _reaching(self, name: str, what: str, passing: tuple = ()):
        """`with self._reaching(...) as path:` one request, of which nothing is remembered."""
        try:
            self.fs.invalidate_cache()
            yield self._path(name) if name or what != "listed" else self.root
        except (DataError, *passing):
            raise
        except Exception as error:  # each library has errors of its own
            said = f"{self.url}/{name} cannot be {what} ({self._said(error)})"
            raise StorageError(said) from error

    def _path(self, name: str) -> str:
        if not self.is_local:
            return "/".join((self.root, *disk.parts_of(name)))
        path = disk.inside(self.root, name)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(f"{path} is no regular file")
        return str(path)

    def _said(self, error: Exception) -> str:
        """An error in one line; its class alone if its text may quote what is secret in the URL."""
        text = "" if self._is_secretive else " ".join(str(error).split())
        return public(f"{type(error).__name__}: {text}"[:300]).rstrip(": ")

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

    @patient
    def names(self, folder: str = "") -> dict[str, int]:
        """name -> bytes of what is in a folder."""
        with self._reaching(folder, "listed") as path:
            try:
                found = self.fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            return {PurePosixPath(o["name"]).name: o["size"] for o in found}

    @patient
    def write(self, name: str, content: bytes, new: bool = False) -> None:
        """Replace an object. new: FileExistsError if there is one; of several, one can succeed."""
        with self._reaching(name, "written", (FileExistsError,) if new else ()) as path:
            self._make_folder(path)
            if not self.is_local:
                self.fs.pipe_file(path, content, mode="create" if new else "overwrite")
            elif new:
                with disk.open_file(path, "xb") as file:
                    file.write(content)
            else:
                disk.write_bytes(Path(path), content)

    @patient
    def send(self, file: Path, name: str) -> None:
        """Upload a regular file."""
        with self._reaching(name, "written") as path, disk.open_file(file) as source:
            self._make_folder(path)
            if self.is_local:
                with disk.replacing(Path(path)) as target:
                    shutil.copyfileobj(source, target, BLOCK)
            else:
                self.fs.put_file(str(file), path)

    def _make_folder(self, path: str) -> None:
        if self._has_folders:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    @patient
    def fetch(self, name: str, file: Path, sha256: str = "", most: int = sys.maxsize) -> None:
        """Download to `file`, which is whole or not there. DataError for an object that is missing,
        has another hash or more than `most` bytes."""
        digest, size = hashlib.sha256(), 0
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
                found = f"sha256 {digest.hexdigest()}" if size <= most else f"over {most:,} bytes"
                raise DataError(f"{self.url}/{name} is damaged: {found}, not sha256 {sha256}")

    @patient
    def remove(self, name: str, recursive: bool = False) -> None:
        """Nothing happens if there is no such object."""
        with self._reaching(name, "removed") as path, contextlib.suppress(FileNotFoundError):
            self.fs.rm(path, recursive=recursive)
