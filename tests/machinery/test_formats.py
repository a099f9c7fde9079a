"""machinery/formats.py: every class refuses a wrong value in every field, by the names of file and
field; what a class writes, it reads; docs/disk.md lists the fields.

    python tests/machinery/test_formats.py      that part of docs/disk.md
"""

import ast
import copy
import inspect
import json
import math
import os
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from config import GPTConfig  # noqa: E402
from machinery import formats  # noqa: E402
from machinery.errors import DataError  # noqa: E402
from machinery.formats import checked, hints_of  # noqa: E402
from machinery.output import tree_of  # noqa: E402

KINDS = [x for x in vars(formats).values() if getattr(x, "__module__", "") == formats.__name__]
KINDS = [kind for kind in KINDS if is_dataclass(kind)]
FILES = {"trainer.json": "0a" * 32, "model.safetensors": "0a" * 32}
VALUES = r"""[null, true, 0, 1, -1, 7.5, NaN, Infinity, 1e300, 1152921504606846976, "", "a",
    "\u001b[2J", [], [[]], ["a"], {}, {"x": []}]"""
VALUES = [*json.loads(VALUES), "a" * 5000, "A" * 64, "../" + "a" * 61]


def needed_by(kind) -> list[str]:
    return [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]


def example(kind) -> Any:
    """JSON that fits."""
    origin = get_origin(kind)
    args = get_args(kind)
    if kind is GPTConfig:
        return tree_of(GPTConfig(extras=("key_offset",)))
    if is_dataclass(kind):
        return {name: example(hint) for name, hint in hints_of(kind).items()}
    if origin is dict:
        names = FILES if args[1] == formats.Sha256 else ("train", "val", "a")
        return {name: example(args[1]) for name in names}
    if origin in (list, tuple):
        return [example(args[0])] * (3 if origin is tuple else 1)
    if kind == formats.Sha256:
        return "0a" * 32
    if origin is Annotated:
        return "a" if args[0] is str else args[1]
    if args:  # of a Literal or a union, the first
        return args[0] if origin is Literal else example(args[0])
    return {int: 1, float: 0.5, str: "a", bool: True, Any: "a"}[kind]


def places(kind, path=()):
    """(keys, type) of all that is in an example."""
    origin = get_origin(kind)
    args = get_args(kind)
    if path:
        yield path, kind
    if is_dataclass(kind):
        for name, hint in hints_of(kind).items():
            yield from places(hint, (*path, name))
    elif origin in (list, tuple):
        yield from places(args[0], (*path, 0))
    elif origin is dict:
        yield from places(args[1], (*path, next(iter(example(kind)))))
    elif origin in (Union, UnionType):
        yield from list(places(args[0], path))[1:]


def fits(kind, x) -> bool:
    """The obvious way to tell."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        if not fits(args[0], x):
            return False
        return bool(re.fullmatch(args[1], x)) if args[0] is str else args[1] <= x <= args[2]
    if origin is Literal:
        return x in args
    if origin in (Union, UnionType):
        return any(fits(arm, x) for arm in args)
    if origin in (list, tuple):
        return type(x) is list and all(fits(args[0], one) for one in x)
    if origin is dict:
        return type(x) is dict and all(fits(args[1], one) for one in x.values())
    if is_dataclass(kind):
        return type(x) is dict and not needed_by(kind) and (kind is not GPTConfig or not x)
    return kind is Any or type(x) is kind or kind is float and type(x) is int


def replaced(tree, path, value):
    tree = at = copy.deepcopy(tree)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return tree


def count_refused(kind) -> int:
    """Put every value into every place; how many are refused."""
    refused = 0
    for path, hint in places(kind):
        name = "".join(f"[{key}]" if key == 0 else f", {key}" for key in path)
        for value in VALUES:
            tree = replaced(example(kind), path, value)
            try:
                checked(kind, tree, "a.json")
                assert fits(hint, value), (name, value)
            except DataError as error:
                if not fits(hint, value):
                    assert f"a.json{name}" in str(error), (name, value, str(error))
                    refused += 1
                else:  # it does not go with the others
                    assert "cannot be used" in str(error), (name, value, str(error))
                assert "\n" not in str(error) and len(str(error)) < 300
    return refused


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wrong_value_is_one_sentence_with_file_and_field(kind):
    assert count_refused(kind) > 5 * len(fields(kind)) or kind is formats.Stamp
    for name in needed_by(kind):
        tree = example(kind)
        del tree[name]
        with pytest.raises(DataError, match=f"a.json, {name} is missing"):
            checked(kind, tree, "a.json")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_written_is_read(kind):
    """Unknown fields, of a later version, are left out: but none of an architecture."""
    one = checked(kind, example(kind), "a.json")
    assert checked(kind, json.loads(json.dumps(tree_of(one))), "a.json") == one
    assert checked(kind, example(kind) | {"later": 1}, "a.json") == one
    if "model" in hints_of(kind):
        with pytest.raises(DataError, match="model, later"):
            checked(kind, replaced(example(kind), ("model", "later"), 1), "a.json")


SHORT = r"\A.{0,300}\Z"


def test_a_name_that_is_none_does_not_fill_the_screen():
    with pytest.raises(DataError, match=SHORT):
        checked(dict[str, formats.Whole], {"x" * 10_000: "y" * 10_000}, "a.json")


def test_a_value_at_any_depth_is_one_sentence():
    """json.loads may have come close to the limit of recursion."""
    for depth in range(800, 1000):
        content = b'{"step": %s}' % (b"[" * depth + b"]" * depth)
        with pytest.raises(DataError, match=SHORT):
            formats.parse(content, formats.METRICS, "a.json")


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "\u202e", "\ud800"])
def test_a_name_is_one_line(name):
    with pytest.raises(DataError, match="files is"):
        checked(formats.FileList, dict(format=3, files=FILES | {name: "0a" * 32}), "a.json")


def test_a_folder_whose_name_is_not_utf8_can_be_named():
    name = os.fsdecode(b"caf\xe9")
    assert checked(formats.Line, name, "a.json") == name


def test_of_several_kinds_the_reason_is_that_of_the_one_that_was_meant():
    with pytest.raises(DataError, match="step is '3'"):
        checked(formats.ValidationLine | formats.Stamp, dict(step="3"), "a.json")
    with pytest.raises(DataError, match="val_bpb is 'x'"):
        checked(formats.METRICS, dict(step=1, tokens=1, val_loss=1.0, val_bpb="x"), "a.json")


def test_validations_before_val_rows_are_read():
    line = dict(step=1, tokens=2, val_loss=3.0, val_bpb=1.0, epochs={"a": 0.1})
    assert checked(formats.METRICS, line, "a.json").val_rows == 0


def test_what_json_lacks_is_left_out():
    assert tree_of(dict(a=math.nan, b=-math.inf, c=None, d=[1.5], e=0)) == dict(d=[1.5], e=0)


# ------------------------------------------------------------------------------------ docs/disk.md
def rows_of(kind) -> list[list[str]]:
    """Each field as it is written, and what stands below it."""
    rows = []
    for node in ast.parse(inspect.getsource(kind)).body[0].body:
        if isinstance(node, ast.AnnAssign):
            rows.append([f"`{ast.unparse(node)}`", ""])
        elif isinstance(node, ast.Expr) and rows:
            rows[-1][1] = " ".join(node.value.value.split())
    return rows


def described() -> str:
    """The classes of formats.py as a part of a page."""
    text = ""
    for kind in KINDS:
        if kind is formats.Stamp:  # it reads what others write
            continue
        bases = " and ".join(f"`{b.__name__}`" for b in kind.__bases__ if is_dataclass(b))
        also = f" Also the fields of {bases}." if bases else ""
        text += f"\n**`{kind.__name__}`** {' '.join(inspect.getdoc(kind).split())}{also}\n\n"
        text += "| field | |\n| --- | --- |\n"
        for cells in rows_of(kind):
            field, note = (cell.replace("|", r"\|") for cell in cells)
            text += f"| {field} | {note} |\n"
    return text


def test_the_page_lists_what_the_classes_say():
    assert described() in (ROOT / "docs" / "disk.md").read_text(), "python " + __file__


if __name__ == "__main__":
    print(described(), end="")
