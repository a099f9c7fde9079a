"""Text on its way out: to the screen, and into the records that a run keeps and a mirror copies.

What is printed may come from a stranger's file, and what is recorded may be a URL with a password:
`say` prints, `json_of` writes. What a model wrote is no record of ours; it is only made
`printable`. Next: disk.py, which writes the records.
"""

import json
import math
import re
from dataclasses import is_dataclass
from typing import Any


def public(text: str) -> str:
    """`text` without what may be secret in its URLs: all that a line has between a scheme and the
    last @ (user and password, in any characters), and parameters, query and fragment."""
    user = r"(?:(?:(?!://).)*@)?"
    rest = r"(?:[?#;](?(1)(?:.*?\1)?)\S*)?"  # group 1: its quote
    return re.sub(rf"(['\"])?(?<!\w)(\w+://){user}([^\s?#;]*){rest}", r"\1\2\3", text)


def printable(text: str) -> str:
    """`text` for a terminal: control characters are escaped, except tabs and newlines."""
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


def brief(text: str) -> str:
    """`text` with only the first digits of its hashes."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,}", r"\1", text)


def say(text: object, **options: Any) -> None:
    """Print `text`, public and printable. options: those of print."""
    print(printable(public(str(text))), **options)


def json_of(record: Any, indent: int | None = None) -> str:
    """A dataclass or a dict as JSON; see tree_of."""
    return json.dumps(tree_of(record), indent=indent, ensure_ascii=False)


def tree_of(value: Any) -> Any:
    """`value` for json.dumps: a dataclass becomes a dict, texts become public. Keys whose value is
    None are left out, and those with NaN or an infinity, which JSON cannot hold."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        absent = lambda x: x is None or isinstance(x, float) and not math.isfinite(x)
        return {key: tree_of(x) for key, x in value.items() if not absent(x)}
    if isinstance(value, list | tuple):
        return [*map(tree_of, value)]
    return public(value) if isinstance(value, str) else value
