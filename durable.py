"""Files that survive a crash: forced onto the disk, replaced as a whole, known by their sha256.

A file that a program writes here is seen, under its name, either whole or not at all, whatever
kills the program. The lowest floor: data.py, checkpoint.py and the diary of a run stand on it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any


def fsync(path: Path) -> None:
    """Force a file's bytes, or a folder's list of names, onto the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(temporary: Path, path: Path) -> None:
    """Make a finished temporary file durable, then visible under its name."""
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: whoever reads it, even after a crash, sees the old or the new."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}-{threading.get_ident()}")
    temporary.write_text(text)
    publish(temporary, path)


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
