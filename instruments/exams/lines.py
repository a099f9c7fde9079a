"""JSONL files that a user names: an error gives the number of the bad line, and its reason."""

from pathlib import Path
from typing import Any

from config import UsageError
from machinery import disk
from machinery.errors import DataError
from machinery.formats import parse

LARGEST = 1 << 30  # bytes of a file of questions or prompts


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8; UsageError if it cannot be read."""
    try:
        return disk.read_bytes(path, LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error})") from None


def read_lines(path: str | Path, kind: Any) -> list[Any]:
    """The lines of a JSONL file in UTF-8, each as the first of the kinds that it fits; blank lines
    are left out. UsageError if it cannot be read; DataError, which names the line, if one fits none
    of the kinds, or there is no line."""
    found = [  # splitlines breaks at U+2028 as well
        parse(line.encode(), kind, f"{path}, line {number}")
        for number, line in enumerate(read_text(path).split("\n"), 1)
        if line.strip()
    ]
    if not found:
        raise DataError(f"{path} is empty")
    return found
