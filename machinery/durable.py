"""Files that survive a crash: forced onto the disk, replaced as a whole, known by their sha256.

A file that a program writes here is seen, under its name, either whole or not at all, whatever
kills the program; what a killed one leaves behind is called `.tmp-*`. The lowest floor: every file
that writes something stands on it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def fsync(path: Path) -> None:
    """Force a file's bytes, or a folder's list of names, onto the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(path: Path) -> Path:
    """Where to write `path` until it is whole: beside it, a name that no other writer has."""
    return path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")


def publish(temporary: Path, path: Path) -> None:
    """Make a finished temporary file durable, then visible under its name."""
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """`with replacing(path) as file:` write the new content; at the end of the block it replaces
    the old as a whole: whoever reads the file, even after a crash, sees the one or the other."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            yield file
        publish(temporary, path)
    finally:  # published, it is gone
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole; in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def sha256_of(path: Path, pause: float = 0.0, stop: threading.Event | None = None) -> str:
    """sha256 of a file. After each block, sleep `pause` times what the block took."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 22))
    with open(path, "rb", buffering=0) as file:
        while True:
            began = time.perf_counter()
            if not (n := file.readinto(buffer)) or (stop and stop.is_set()):
                return digest.hexdigest()
            digest.update(buffer[:n])
            if stop and pause:
                stop.wait(pause * (time.perf_counter() - began))


def lock(folder: str | Path) -> Any:
    """Claim a folder for this process; keep the result: closing it lets go.

    The kernel drops the claim when the process ends, however it does. ValueError if taken."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = open(Path(folder) / ".lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"{folder} is in use by {file.read().strip() or 'another trainer'}; "
            "stop that one, or give this run another directory"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
