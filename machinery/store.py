"""Objects under a URL: a folder, or any store that fsspec knows (s3://, gs://, hf://, ssh://).

Guarantees: what is sent is read back and hashed before it counts, what is fetched has its hash, and
whatever a store's library raises is a StorageError that names the URL, without its password.
Credentials are found by each library in its own places. Next: mirror.py, cache.py.
"""

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from config import UsageError
from machinery.cli import public
from machinery.disk import fsync, sha256_of
from machinery.errors import CheckpointError, StorageError

WITH_FOLDERS = {"file", "local", "ssh", "sftp", "smb"}  # a store of objects has none to make
PAUSES_S = 1.0, 2.0  # between the attempts of one request
BLOCK = 1 << 24  # bytes read at a time


def patient(work: Callable) -> Callable:
    """The same function, tried again after a pause, twice, while the store fails."""

    @functools.wraps(work)
    def tried(*args, **kwargs):
        for pause_s in (*PAUSES_S, None):
            try:
                return work(*args, **kwargs)
            except StorageError:
                if pause_s is None:
                    raise
                time.sleep(pause_s)

    return tried


class Store:
    """The objects under a URL, by name."""

    def __init__(self, url: str):
        """UsageError for a URL of which fsspec knows no protocol, or lacks the library."""
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        self.url = public(url).rstrip("/")  # to be shown
        parts = urlsplit(url if "://" in url else "")
        self._secrets = [text for text in (parts.netloc.rpartition("@")[0], parts.query) if text]
        if "://" not in url:
            self.fs, self.root = LocalFileSystem(), os.path.abspath(url)
        else:
            try:
                self.fs, self.root = url_to_fs(url)
            except (ImportError, ValueError, TypeError) as error:
                raise UsageError(
                    f"{self.url} cannot be opened ({self._said(error)}); for s3:// and gs://: "
                    "pip install -r requirements-store.txt (docs/store.md)"
                ) from None
        self.root = self.root.rstrip("/")
        kinds = {self.fs.protocol} if isinstance(self.fs.protocol, str) else {*self.fs.protocol}
        self.has_folders, self.is_disk = bool(kinds & WITH_FOLDERS), "file" in kinds

    @contextlib.contextmanager
    def _reaching(self, name: str, what: str):
        """`with self._reaching(...) as path:` one request, of which nothing is remembered."""
        self.fs.invalidate_cache()
        try:
            yield f"{self.root}/{name}".rstrip("/")
        except (CheckpointError, StorageError):
            raise
        except Exception as error:  # each library has errors of its own
            said = f"{type(error).__name__}: {self._said(error)}"
            raise StorageError(f"{self.url}/{name} cannot be {what} ({said})") from error

    def _said(self, error: Exception) -> str:
        """An error's text in one line, without what is secret in the URL."""
        said = public(" ".join(str(error).split()))
        for secret in self._secrets:
            said = said.replace(secret, "...")
        return said[:300]

    @patient
    def read(self, name: str) -> bytes | None:
        """The whole object; None if there is none."""
        with self._reaching(name, "read") as path:
            try:
                return self.fs.cat_file(path)
            except (FileNotFoundError, NotADirectoryError):
                return None

    @patient
    def sizes(self, folder: str = "") -> dict[str, int]:
        """name -> bytes of what is in a folder. Some stores list a new object late."""
        with self._reaching(folder, "listed") as path:
            try:
                return {Path(o["name"]).name: o["size"] for o in self.fs.ls(path, detail=True)}
            except FileNotFoundError:
                return {}

    @patient
    def modified(self, name: str) -> float:
        """When an object was written, in seconds since 1970; now, if the store does not say."""
        with self._reaching(name, "read") as path, contextlib.suppress(NotImplementedError):
            return self.fs.modified(path).timestamp()
        return time.time()

    @patient
    def write(self, name: str, content: bytes) -> None:
        """Replace an object."""
        with self._writing(name) as path:
            self.fs.pipe_file(path, content)

    @patient
    def send(self, file: Path, name: str, sha256: str) -> None:
        """Upload a file, read the copy back and compare its hash."""
        with self._writing(name) as path:
            self.fs.put_file(str(file), path)
        if (found := self.sha256(name)) != sha256:
            raise StorageError(f"{self.url}/{name} was sent, but has sha256 {found}, not {sha256}")

    def sha256(self, name: str) -> str:
        """The sha256 of an object, which is read as a whole."""
        with self._reaching(name, "read back") as path:
            digest = hashlib.sha256()
            with self.fs.open(path, "rb", block_size=BLOCK) as copy:
                while block := copy.read(BLOCK):
                    digest.update(block)
        return digest.hexdigest()

    @patient
    def ranges(self, wanted: list[tuple[str, int]], nbytes: int) -> list[bytes]:
        """`nbytes` of each object, from a first byte on: (name, first byte) -> bytes. Stores that
        can, answer many at once."""
        if not wanted:
            return []
        with self._reaching("objects", "read") as _:
            paths = [f"{self.root}/{name}" for name, _ in wanted]
            starts = [first for _, first in wanted]
            ends = [first + nbytes for first in starts]
            return self.fs.cat_ranges(paths, starts, ends, on_error="raise")

    @patient
    def fetch(self, name: str, file: Path, sha256: str = "") -> None:
        """Download to `file`. CheckpointError if there is no such object, or if it has another
        hash, the second time too."""
        file.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            with self._reaching(name, "read") as path:
                try:
                    self.fs.get_file(path, str(file))
                except FileNotFoundError:
                    raise CheckpointError(f"{name} is missing") from None
            if (actual := sha256_of(file)) == sha256 or not sha256:
                return fsync(file)
        raise CheckpointError(f"{name} has sha256 {actual}, not {sha256}")

    @patient
    def remove(self, name: str, recursive: bool = False) -> None:
        """Nothing happens if there is no such object."""
        with self._reaching(name, "removed") as path, contextlib.suppress(FileNotFoundError):
            self.fs.rm(path, recursive=recursive)

    @patient
    def drop_parts(self) -> None:
        """End the uploads in parts that a kill has cut short: S3 keeps, and bills, the parts."""
        if not hasattr(self.fs, "list_multipart_uploads"):
            return
        bucket, _, prefix = self.root.partition("/")
        with self._reaching("", "listed"):
            for part in self.fs.list_multipart_uploads(bucket):
                if part["Key"].startswith(f"{prefix}/"):
                    which = dict(Bucket=bucket, Key=part["Key"], UploadId=part["UploadId"])
                    self.fs.call_s3("abort_multipart_upload", **which)

    @contextlib.contextmanager
    def _writing(self, name: str):
        with self._reaching(name, "written") as path:
            if self.has_folders:
                self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            yield path
            if self.is_disk:
                fsync(Path(path))
                fsync(Path(path).parent)
