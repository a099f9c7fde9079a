"""Wrong answers in a line each: the right one of a solution file, with a piece of it replaced."""

from collections.abc import Callable
from pathlib import Path


def edits(path: str) -> Callable[..., dict]:
    """The file of a solution -> edit(old, new[, old, new, ...]), for its WRONG: the definitions of
    the file as they would be with each `old`, which stands there once, replaced by `new`."""
    source = Path(path).read_text().split("\nedit = edits(")[0]

    def edit(*pairs: str) -> dict:
        text = source
        for old, new in zip(pairs[::2], pairs[1::2]):
            if text.count(old) != 1:
                raise ValueError(f"{path}: {old!r} stands there {text.count(old)} times, not once")
            text = text.replace(old, new)
        names: dict = {"__name__": "edited"}
        exec(compile(text, path, "exec"), names)
        return {name: value for name, value in names.items() if not name.startswith("__")}

    return edit
