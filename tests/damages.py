"""The ways in which the tests damage a file."""

import os
from pathlib import Path

from conftest import flip


def flipped(path: Path, at: int | None = None):
    """One bit, by default in the middle."""
    size = path.stat().st_size
    if size:
        flip(path, at=size // 2 if at is None else min(at, size - 1))


def not_utf8(path: Path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3] + b"\xff\xfe" + content[len(content) // 3 :])


def a_folder(path: Path):
    path.unlink()
    path.mkdir()


def a_dangling_link(path: Path):
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


DAMAGES = {
    "flipped": flipped,
    "flipped near the start": lambda path: flipped(path, at=9),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "a list": lambda path: path.write_text("[]"),
    "an empty object": lambda path: path.write_text("{}"),
    "nested too deeply": lambda path: path.write_text("[" * 100_000),
    "not UTF-8": not_utf8,
    "a folder": a_folder,
    "a dangling link": a_dangling_link,
    "deleted": Path.unlink,
}
