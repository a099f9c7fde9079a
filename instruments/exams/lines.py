"""JSONL files that a user names: an error gives the number of the bad line."""

import json
from collections.abc import Callable
from pathlib import Path

from config import UsageError
from machinery import disk
from machinery.errors import DataError

LARGEST = 1 << 30  # bytes of a file of questions or prompts


def read_lines(path: str | Path, is_one: Callable[[object], bool], shape: str) -> list[dict]:
    """The objects of a JSONL file in UTF-8, blank lines left out. UsageError if it cannot be read;
    DataError, which names the line, for what `is_one` refuses. shape: what a line should be."""
    try:
        lines = disk.read_bytes(path, LARGEST).split(b"\n")  # splitlines breaks at U+2028 as well
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, not UTF-8, or nested too deeply
            row = None
        if not is_one(row):
            raise DataError(f"{path}, line {number} is not {shape}: {str(line[:80])[2:-1]}")
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no line that is {shape}")
    return rows


def has_fields(row: object, texts: list[str], options: str = "") -> bool:
    """Whether a line has these fields, which are texts; and, if `options` names one, a list of 2 to
    26 texts there, and `gold`, the place of the right one."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in texts):
        return False
    if not options:
        return True
    choices = row.get(options)
    gold = row.get("gold")
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        return False
    return 2 <= len(choices) <= 26 and type(gold) is int and 0 <= gold < len(choices)
