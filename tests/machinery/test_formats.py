"""machinery/formats.py: every class refuses a wrong value in every field, by the names of file and
field; what a class writes, it reads; docs/disk.md lists the fields.

    python tests/machinery/test_formats.py      that part of docs/disk.md
"""

import ast
import inspect
import json
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from table import read_table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from config import GPTConfig  # noqa: E402
from machinery import formats  # noqa: E402
from machinery.errors import DataError  # noqa: E402
from machinery.formats import checked, hints_of  # noqa: E402
from machinery.output import json_of, tree_of  # noqa: E402

KINDS = [x for x in vars(formats).values() if getattr(x, "__module__", "") == formats.__name__]
KINDS = [kind for kind in KINDS if is_dataclass(kind)]
# kind => values that fit it, values that do not
TABLE = r"""
Whole => [0, 1, 1000000000000000] | [-1, 1.0, true, "1", null, 1152921504606846976]
Number => [0.5, 1, -1e15] | [NaN, Infinity, 1e300, true, "1", null, [], {}]
float => [0.5, 1, Infinity] | [true, "1", null]
int => [7, -7] | [7.0, true, "7"]
bool => [true, false] | [0, 1, null, "true"]
str => ["", "a\nb"] | [1, null, ["a"]]
Any => [null, 1, "a", [], {"x": []}] | []
Line => ["", "a b", "caf\udce9"] | ["a\nb", "a\u001b[2J", "\u202e", "\ud800", null, 7]
Sha256 => ["LONG"] | ["LONGa", "", "../LONG", 7, null]
Literal[3] => [3] | [4, "3", null]
Literal["<u2", "<u4"] => ["<u2", "<u4"] | ["<i2", [], {}, null]
str | None => ["a", null] | [1, []]
list[Whole] => [[], [1, 2]] | [{}, "ab", [1, -1], [[1]], null]
dict[Line, Sha256] => [{}, {"a": "LONG"}] | [[], {"a\nb": "LONG"}, {"\ud800": "LONG"}, {"a": 1}]
dict[str, list[Whole]] => [{}, {"b": [1]}] | [{"b": 1}, {"a": [-1]}, null]
""".replace("LONG", "0a" * 32)
# What may stand in any field.
VALUES = r"""[null, true, 0, 1, -1, 7.5, NaN, Infinity, 1e300, 1152921504606846976, "", "a",
    "\u001b[2J", [], [[]], ["a"], {}, {"x": []}]"""
VALUES = [*json.loads(VALUES), "a" * 5000, {"x" * 5000: "y" * 5000}, object()]
EXAMPLES = {int: 1, float: 0.5, str: "a", bool: True, Any: "a", formats.Sha256: "0a" * 32}
EXAMPLES[GPTConfig] = tree_of(GPTConfig(extras=("key_offset",)))


def example(kind) -> Any:
    """JSON that fits."""
    origin = get_origin(kind)
    args = get_args(kind)
    if kind in EXAMPLES:
        return EXAMPLES[kind]
    if is_dataclass(kind):
        return {name: example(hint) for name, hint in hints_of(kind).items()}
    if origin is dict:
        names = ("train", "val", "a", "trainer.json", "model.safetensors")
        return {name: example(args[1]) for name in names}
    if origin in (list, tuple):
        return [example(args[0])] * (3 if origin is tuple else 1)
    if origin is Annotated:
        return "a" if args[0] is str else args[1]
    return args[0] if origin is Literal else example(args[0])  # the first of several


@pytest.mark.parametrize("kind, values", read_table(TABLE))
def test_what_fits_a_kind_is_taken_and_no_other(kind, values):
    kind = eval(kind, vars(formats))
    fit, others = map(json.loads, values)
    for value in fit:
        assert tree_of(checked(kind, value, "a.json")) == tree_of(value)
    for value in others:
        with pytest.raises(DataError, match=r"\Aa.json.{0,300}\Z"):
            checked(kind, value, "a.json")


@pytest.mark.parametrize("kind", [*KINDS, GPTConfig], ids=lambda kind: kind.__name__)
def test_a_wrong_value_is_one_sentence_with_file_and_field(kind):
    for name, hint in hints_of(kind).items():
        for value in VALUES:
            try:
                checked(kind, example(kind) | {name: value}, "a.json")
                assert hint is Any or value is not VALUES[-1]
            except DataError as error:
                said = rf"a.json(, {name}.{{0,120}} is | cannot be used: ).{{1,200}}"
                assert re.fullmatch(said, str(error)), str(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_written_is_read(kind):
    """Unknown fields, of a later version, are left out: but none of an architecture."""
    tree = example(kind)
    one = checked(kind, tree, "a.json")
    assert checked(kind, json.loads(json_of(one)) | {"later": 1}, "a.json") == one
    if "model" in tree:
        with pytest.raises(DataError, match="model, later"):
            checked(kind, tree | {"model": {"later": 1}}, "a.json")
    for needed in fields(kind):
        if needed.default is needed.default_factory is MISSING:
            with pytest.raises(DataError, match=f"a.json, {needed.name} is missing"):
                checked(kind, {k: x for k, x in tree.items() if k != needed.name}, "a.json")


def test_a_value_at_any_depth_is_one_sentence():
    """json.loads may have come close to the limit of recursion."""
    for depth in range(800, 1000):
        content = b'{"step": %s}' % (b"[" * depth + b"]" * depth)
        with pytest.raises(DataError, match=r"\A.{0,300}\Z"):
            formats.parse(content, formats.METRICS, "a.json")


def test_of_several_kinds_the_reason_is_that_of_the_one_that_was_meant():
    with pytest.raises(DataError, match="step is '3'"):
        checked(formats.ValidationLine | formats.Stamp, dict(step="3"), "a.json")
    with pytest.raises(DataError, match="val_bpb is 'x'"):
        checked(formats.METRICS, dict(step=1, tokens=1, val_loss=1.0, val_bpb="x"), "a.json")
    with pytest.raises(DataError, match=r"a.json, x\[1\] is -1"):
        checked(dict[str, list[formats.Whole]], dict(x=[1, -1]), "a.json")


def test_validations_before_val_rows_are_read():
    line = dict(step=1, tokens=2, val_loss=3.0, val_bpb=1.0)
    assert checked(formats.METRICS, line, "a.json").val_rows == 0


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
