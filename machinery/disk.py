"""Files that survive a crash: written through to the disk, replaced as a whole, and hashed.

A file written with `replacing` is either whole or not there: a killed program leaves only `.tmp-*`
files behind. Files that only grow (.jsonl) are appended to instead.
"""

import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from config import UsageError
from machinery.errors import DISK_FAILS, DataError, StorageError


def fsync(path: Path) -> None:
    """Force a file's bytes, or a folder's list of names, onto the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def writable(folder: str | Path, remedy: str) -> Iterator[None]:
    """UsageError in place of an OSError, unless the disk is full or fails."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FAILS:
            raise
        where = error.filename or folder
        raise UsageError(f"{where} cannot be written ({error.strerror}); {remedy}") from None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """`with replacing(path) as file:` write the new content, which replaces the old at the end of
    the block. A reader sees the old file or the new one, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            yield file
        fsync(temporary)
        if path.is_dir():
            make_way(path)
        temporary.replace(path)
        fsync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names none
        raise
    finally:  # once it is replaced, there is nothing left to remove
        temporary.unlink(missing_ok=True)


@contextmanager
def creating(folder: Path) -> Iterator[Path]:
    """`with creating(folder) as temporary:` fill a new folder, which gets its name at the end of
    the block. If the block raises, nothing is left. UsageError if the folder is there already."""
    if os.path.lexists(folder):
        raise UsageError(f"{folder} exists already; remove it, or give another folder")
    for stale in folder.parent.glob(f".tmp-{glob.escape(folder.name)}-{8 * '[0-9a-f]'}"):
        shutil.rmtree(stale)  # of a program that was killed
    temporary = folder.with_name(f".tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        with writable(folder, "give another folder"):
            temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            fsync(path)
        temporary.rename(folder)
        fsync(folder.parent)
    finally:  # once it is renamed, there is nothing left to remove
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a whole file by `text` in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # a path may hold any bytes


def write_json(path: Path, tree: dict) -> None:
    """Replace a whole file by `tree` as JSON."""
    write_text(path, json.dumps(tree, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict:
    """The JSON object that a file holds; DataError, which names the file, if it cannot be read."""
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # no JSON, not UTF-8, or nested too deeply
        tree = None
    if not isinstance(tree, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object")
    return tree


def make_way(path: Path) -> None:
    """Set aside what stands in the place of a file to be written, and cannot be read as one."""
    try:
        path.read_bytes()
    except FileNotFoundError:  # a link to nowhere, too, which the file will replace
        path.unlink(missing_ok=True)
    except OSError as error:
        aside = path.with_name(f"{path.name}.aside-{uuid.uuid4().hex[:8]}")
        path.rename(aside)
        print(f"warning: {path} cannot be read ({error.strerror}): it is {aside.name} now")


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal; read in blocks of 4 MB."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 22))
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(buffer):
            digest.update(buffer[:n])
    return digest.hexdigest()


def has_sha256(path: Path, expected: str) -> bool:
    """Whether the file is there, can be read, and has this sha256."""
    try:
        return sha256_of(path) == expected
    except OSError:
        return False


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of `folder`, which need not exist yet."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free


def check_room(folder: Path, need: float, remedy: str) -> None:
    """StorageError if `need` bytes do not fit on the disk of `folder`."""
    if need > (free := free_bytes(folder)):
        size = lambda n: f"{n / 1e9:.1f} GB" if n >= 1e8 else f"{n / 1e6:,.3f} MB"
        missing = f"about {size(need)} more are needed, {size(free)} are free"
        raise StorageError(f"{missing} in {folder}; {remedy}")


def lock(folder: str | Path, option: str) -> Any:
    """Lock a folder until the returned file is closed or this process ends, however it ends.
    UsageError if another process has it. option: the one that names the folder."""
    with writable(folder, f"choose another {option}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = open(Path(folder) / ".lock", "a+", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = f"in use by {file.read().strip() or 'another program'}"
            raise UsageError(f"{folder} is {owner}; stop it, or choose another {option}") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
