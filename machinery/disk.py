"""Safe access to files: naming, reading, writing, locking and hashing.

A run, a data folder or an export may come from a stranger: no name or link in it may lead out of
its folder. So `inside` turns a name that was read from a file into a path; `open_file` follows no
link and opens regular files only; files that are read whole have a size limit. A file written with
`replacing` is complete or absent: a killed program leaves no more than a `.tmp-*`, which `sweep`
removes. Files that only grow (.jsonl) are appended to instead. Next: errors.py, the exit codes.
"""

import errno
import fcntl
import glob
import hashlib
import io
import json
import os
import shutil
import socket
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from config import UsageError
from machinery.errors import DataError, StorageError
from machinery.output import json_of, say

LARGEST_SMALL = 64 << 20  # bytes: the size limit of a file that is read whole
DEEPEST = 64  # levels of a JSON object, so that all of our recursions end
FLAGS = {
    "rb": os.O_RDONLY,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


def parts_of(name: str) -> tuple[str, ...]:
    """The parts of a name that was read from a file: ("train", "web", "unit_00.npy"). DataError
    unless it is a relative name that stays in its folder."""
    try:
        os.fsencode(name)
        path = PurePosixPath(name)
    except (TypeError, UnicodeEncodeError):  # not a str; a lone surrogate from JSON
        path = PurePosixPath("..")
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise DataError(f"{name!r} is not the name of a file inside the folder")
    return path.parts


def inside(folder: str | Path, name: str) -> Path:
    """FOLDER/name, for a name that was read from a file. DataError unless it is a relative name
    that stays in the folder, with no symbolic link on the way."""
    parts = parts_of(name)
    path = Path(folder, *parts)
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), *parts):
        raise DataError(f"{path} is behind a link; only what lies in {folder} itself is used")
    return path


def open_file(path: str | Path, mode: str = "rb") -> BinaryIO:
    """A regular file, opened unbuffered in binary; OSError for a symbolic link, a device or a pipe,
    and for appending to a file that has a second name (a hard link)."""
    # O_NONBLOCK: else opening a pipe that has no writer would block forever
    fd = os.open(path, FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or mode == "ab" and found.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EPERM, "not a regular file of its own", str(path))
    return open(fd, mode, buffering=0)


def read_bytes(path: str | Path, most: int = LARGEST_SMALL) -> bytes:
    """A whole small file; OSError if it cannot be read, or has more than `most` bytes."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most >> 20} MB", str(path))
        return file.readall()


def read_text(path: str | Path) -> str:
    """A whole small file in UTF-8; bytes that are not valid UTF-8 become surrogates."""
    return read_bytes(path).decode("utf-8", "surrogateescape")


def read_json(path: str | Path) -> dict:
    """The JSON object that a file holds; DataError, which names the file, if it cannot be read."""
    try:
        return parse_json(read_bytes(path), path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def parse_json(content: bytes, where: str | Path) -> dict:
    """The JSON object in `content`, which is from `where`; DataError if it is not one."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        tree = None
    if not isinstance(tree, dict):
        raise DataError(f"{where} is damaged: it holds no JSON object")
    level = [tree]
    for _ in range(DEEPEST):
        level = [
            value
            for part in level
            if isinstance(part, dict | list)
            for value in (part.values() if isinstance(part, dict) else part)
        ]
    if level:
        raise DataError(f"{where} is damaged: it is nested more than {DEEPEST} deep")
    return tree


def sha256_of(path: str | Path) -> str:
    """The sha256 of a file, in hexadecimal; read in blocks of 4 MB."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 22))
    with open_file(path) as file:
        while n := file.readinto(buffer):
            digest.update(buffer[:n])
    return digest.hexdigest()


def sha256_of_tree(tree: object) -> str:
    """The sha256 of what JSON can hold, whatever the order of its keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def has_sha256(path: str | Path, expected: str) -> bool:
    """Whether the file is there, can be read, and has this sha256."""
    try:
        return sha256_of(path) == expected
    except OSError:
        return False


def fsync(path: str | Path) -> None:
    """Force a file's bytes, or a folder's list of names, onto the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


TEMPORARY = ".tmp-*-" + "[0-9a-f]" * 8  # a pattern of glob: what `temporary` returns


def temporary(path: Path) -> Path:
    """A name beside `path` for what will replace it."""
    return path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")


def put_in_place(written: Path, path: Path) -> None:
    """Rename `written`, which is safely on the disk, to `path`. A file replaces a file or a link;
    if either is a folder, what was at `path` is set aside first."""
    if path.is_dir() or written.is_dir() and os.path.lexists(path):
        set_aside(path)
    written.replace(path)
    fsync(path.parent)


def set_aside(path: Path) -> None:
    """Rename to `.trash-*`, to be deleted later: no kill leaves half a folder under its name."""
    path.rename(path.with_name(f".trash-{path.name}-{uuid.uuid4().hex[:8]}"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """`with replacing(path) as file:` write the new content, which replaces the old at the end of
    the block. A reader sees the old file or the new one, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = temporary(path)
    try:
        with io.BufferedWriter(open_file(written, "xb")) as file:  # raw writes may be partial
            with suppress(OSError):  # Lustre without -o flock
                fcntl.flock(file, fcntl.LOCK_EX)  # tells `sweep` that it is being written
            yield file
        fsync(written)
        put_in_place(written, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk gives none
        raise
    finally:  # once it is in place, there is nothing left to remove
        written.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """`with new_folder(path) as folder:` write into `folder`, which gets its name at the end of the
    block, and is removed if that fails. UsageError if there is something at `path`, then or now:
    of several programs that write it at once, the first to end has the name."""
    sweep(path.parent.glob(TEMPORARY.replace("*", glob.escape(path.name), 1)))
    taken = UsageError(f"{path} exists already; remove it, or choose another name")
    if os.path.lexists(path):
        raise taken
    folder = temporary(path)
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)  # once renamed, it is not there
        with suppress(OSError):  # Lustre without -o flock
            stack.enter_context(locked(folder))  # tells `sweep` that it is being written
        yield folder
        try:
            folder.rename(path)
        except OSError:
            if os.path.lexists(path):
                raise taken from None
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have a file or a folder locked; OSError if another process has, or it is a link."""
    kind = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_WRONLY  # as NFS needs it
    descriptor = os.open(path, kind | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def sweep(paths: Iterable[Path]) -> None:
    """Remove those of these TEMPORARY files and folders whose writers are gone: a writer has its
    own locked. Links stay; where nothing can be locked, so does everything."""
    for path in paths:
        with suppress(OSError), locked(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a whole file."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replace a whole file by `text` in UTF-8."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))  # a path may hold any bytes


def write_json(path: Path, record: Any) -> None:
    """Replace a whole file by a record as JSON, without what is secret in its URLs."""
    write_text(path, json_of(record, indent=1) + "\n")


def append(path: Path, text: str) -> None:
    """Append to a file that only grows: all of `text`, or if the disk is full, none of it."""
    with open_file(path, "ab") as file:
        size = os.fstat(file.fileno()).st_size
        content = text.encode("utf-8", "backslashreplace")
        if file.write(content) < len(content):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def check_room(folder: Path, need: float, remedy: str) -> None:
    """StorageError if `need` bytes do not fit on the disk of `folder`, which need not exist yet."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        raise StorageError(
            f"about {need / 1e6:,.3f} MB are needed, but {free / 1e6:,.3f} MB are free in "
            f"{folder}; {remedy}"
        )


def lock(folder: str | Path, option: str) -> BinaryIO:
    """Lock a folder until the returned file is closed or this process ends, however it ends.
    UsageError if another process has it. option: the option that names the folder."""
    path = Path(folder, ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_file(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(
            f"{folder} is in use by {read_text(path) or 'another program'}; stop it, or choose "
            f"another {option}"
        ) from None
    except OSError as error:  # Lustre without -o flock
        say(f"warning: {folder} cannot be locked ({error.strerror}); run one program only")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return file
