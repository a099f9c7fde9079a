"""Objects under a URL: a folder, or a store that fsspec knows (s3://, gs://, hf://).

A download is checked against its sha256, an upload by the store's own checksum. The store's library
repeats a failed request (AWS_MAX_ATTEMPTS for S3) and finds credentials in its own places. No name
leads out of the URL. Whatever that library raises becomes a StorageError that names the URL,
without its password. Next: mirror.py, stage.py.
"""

import contextlib
import hashlib
import os
from pathlib import Path, PurePosixPath

from config import UsageError, install
from machinery import disk
from machinery.errors import DataError, StorageError, reason_of
from machinery.output import public

PROTOCOLS = {"s3", "gs", "hf", "file"}
LARGEST = 1 << 33  # bytes of an object: it is in memory on its way


class Store:
    """The objects under a URL, by name. DataError for a name that is absolute or has `..` in it."""

    def __init__(self, url: str):
        """UsageError for a URL of another protocol, with a password, or if the library for it is
        not installed."""
        from fsspec.core import url_to_fs

        self.url = public(url).rstrip("/")  # to be shown
        url = url if "://" in url else f"file://{os.path.abspath(url)}"
        protocol = url.partition("://")[0]
        self.is_local = protocol == "file"
        # fsspec formats and runs what a chained URL (::) names; its rm takes *?[] as a pattern.
        odd = "::" in url or not self.is_local and set("*?[]@#;") & set(url)
        if protocol not in PROTOCOLS or odd:
            raise UsageError(
                f"{self.url}: give a folder, or a URL of {', '.join(sorted(PROTOCOLS))} without a "
                "user and any of :: * ? [ ] # ;"
            )
        try:
            self.fs, root = url_to_fs(url)
        except ImportError:
            raise UsageError(
                f"{self.url} needs: {install('requirements-store.txt')} (docs/store.md)"
            ) from None
        self.root = root.rstrip("/")

    @contextlib.contextmanager
    def _reaching(self, name: str, what: str):
        """`with self._reaching(...) as path:` one request, without what fsspec has cached."""
        try:
            self.fs.invalidate_cache()
            if what == "listed":
                yield self.root
            elif self.is_local:
                yield str(disk.inside(self.root, name))
            else:
                yield "/".join((self.root, *disk.parts_of(name)))
        except DataError:
            raise
        except Exception as error:  # each library has its own error classes
            raise StorageError(
                f"{self.url}/{name} cannot be {what} ({public(reason_of(error))})"
            ) from error

    def names(self) -> list[str]:
        """The names of what is directly under the URL."""
        with self._reaching("", "listed") as path, contextlib.suppress(FileNotFoundError):
            return [PurePosixPath(found).name for found in self.fs.ls(path, detail=False)]
        return []

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """An object, or its first `most` bytes, if it may not be empty; None if there is none."""
        with self._reaching(name, "read") as path, contextlib.suppress(FileNotFoundError):
            if self.is_local:  # never a pipe, which would be waited for
                return disk.read_bytes(path, most or LARGEST)
            return self.fs.cat_file(path, end=most)
        return None

    def fetch(self, name: str, file: Path, sha256: str, most: int = LARGEST) -> None:
        """Download to `file`, which is complete or absent. DataError for an object that is missing,
        or has another hash."""
        content = self.read(name, most)
        if content is None:
            raise DataError(f"{self.url}/{name} is missing")
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DataError(f"{self.url}/{name} is damaged: its sha256 is not {sha256}")
        disk.write_bytes(file, content)

    def write(self, name: str, content: bytes) -> None:
        """Replace an object."""
        with self._reaching(name, "written") as path:
            if self.is_local:
                disk.write_bytes(Path(path), content)
            else:
                self.fs.pipe_file(path, content)

    def remove(self, name: str) -> None:
        """Remove an object, or all under it; nothing happens if there is none."""
        with self._reaching(name, "removed") as path, contextlib.suppress(FileNotFoundError):
            self.fs.rm(path, recursive=True)

    def sweep(self) -> None:
        """Remove what killed programs have left half written, if the store is a folder."""
        if self.is_local:
            disk.sweep(Path(self.root).rglob(disk.TEMPORARY))
