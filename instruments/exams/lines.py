"""JSONL files that a user names: an error gives the number of the bad line, and its reason."""

from pathlib import Path
from typing import Any

from config import UsageError
from machinery import disk
from machinery.errors import DataError
from machinery.formats import parse

LARGEST = 1 << 30  # bytes of a file of questions or prompts


def read_file(path: str | Path) -> bytes:
    """The file; UsageError if it cannot be read."""
    try:
        return disk.read_bytes(path, LARGEST)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8; UsageError if it cannot be read."""
    try:
        return read_file(path).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not in UTF-8") from None


def read_lines(path: str | Path, kind: Any) -> list[Any]:
    """The lines of a JSONL file in UTF-8, each as the first of the kinds that it fits; blank lines
    are left out. UsageError if it cannot be read; DataError, which names the line, if one fits none
    of the kinds, or there is no line."""
    lines = read_file(path).split(b"\n")  # splitlines breaks at U+2028 as well
    found = [
        parse(line, kind, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise DataError(f"{path} is empty")
    return found


def check_options(options: tuple[str, ...], gold: int) -> None:
    """ValueError unless there are 2 to 26, and `gold` is the place of one of them."""
    if not 2 <= len(options) <= 26:
        raise ValueError(f"it has {len(options)} options, not 2 to 26")
    if gold >= len(options):
        raise ValueError(f"gold is {gold}, but the last of {len(options)} is {len(options) - 1}")
