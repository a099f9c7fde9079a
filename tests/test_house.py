"""The shape of the project: budgets, who may import whom, one door to files, one style."""

import ast
import dataclasses
import functools
import graphlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, ended, losses, metrics, run_code, succeeded
from tokens import count_tokens

import config

ROOMS = ("machinery", "stores", "preparation", "hf", "instruments")
# Each imports from the floors below it, and within its own folder.
FLOORS = """config
model data tokenizer optim flops bits_per_byte
machinery
stores*
preparation
instruments* hf*
session
train eval export prepare_data"""
FLOORS = [floor.split() for floor in FLOORS.splitlines()]
FLOOR = {room.rstrip("*"): n for n, rooms in enumerate(FLOORS) for room in rooms}
# Imported only where they are asked for, so that each can be deleted.
OPTIONAL = {room.rstrip("*") for rooms in FLOORS for room in rooms if room.endswith("*")}

# Lexical tokens of .py files, by room: what there is to read, however it is laid out (tokens.py).
# No number in this table is ever raised: what needs more takes away elsewhere in the same change.
BUDGETS = {
    "train.py model.py data.py": 8666,  # the first evening
    "*.py": 20960,
    "machinery/**/*.py stores/**/*.py": 22469,  # 2246 of them in formats.py, for all rooms
    "preparation/**/*.py": 12409,
    "hf/**/*.py": 10649,  # 1904 of them in llama_cpp.py
    "instruments/**/*.py": 21854,
    "*.py machinery/*.py stores/*.py preparation/*.py hf/*.py instruments/**/*.py": 88340,
    "benchmarks/**/*.py": 15854,
    "tests/**/*.py": 121602,
    "course/**/*.py": 119997,
}


def our_files(rooms=ROOMS):
    return [*ROOT.glob("*.py"), *(path for room in rooms for path in ROOT.glob(f"{room}/**/*.py"))]


@functools.cache
def nodes_of(path):
    return [*ast.walk(ast.parse(path.read_text()))]


def calls(path):
    """(what is called, its arguments, where it stands) for each call in a file."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.args, f"{path}:{node.lineno}: {ast.unparse(node)}"


def imports(path, base=ROOT):
    """("machinery.disk", whether that happens as soon as the file is imported) for each import of
    a file in the folder `base`; of a name in a file, the file."""
    nodes = nodes_of(path)
    later = {n for f in nodes if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in nodes:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            place = base.joinpath(*name.split("."))
            while place != base and not (place.is_dir() or place.with_suffix(".py").exists()):
                place = place.parent
            if place != base:
                yield ".".join(place.relative_to(base).parts), node not in later


@pytest.mark.parametrize("patterns, most", BUDGETS.items())
def test_rooms_stay_as_small_as_promised(patterns, most):
    files = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    found = {str(path): count_tokens(path) for path in files}
    assert 0 < sum(found.values()) <= most, found


def test_tokens_are_those_of_the_code_alone(tmp_path):
    """Laid out in another way, and for any Python, they are as many."""
    text = '"""Three\nlines."""\n\nx = 1  # one\ny = f"{x:{x}} {f(x)}"\n'
    (tmp_path / "long.py").write_text(text)
    (tmp_path / "packed.py").write_text("x = 1; y = 'two'")
    assert [count_tokens(tmp_path / name) for name in ("long.py", "packed.py")] == [6, 6]


def is_packed(node):
    """True for a tuple of things that have nothing to do with each other, assigned at once. Allowed
    are a swap, one expression over several names, and parts of one object."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    names = [ast.unparse(name) for name in getattr(node.targets[0], "elts", [])]
    values = [ast.unparse(value) for value in node.value.elts]
    forms = {re.sub(rf"\b{re.escape(n)}\b", "_", v) for n, v in zip(names, values)}
    wholes = {re.sub(r"[.[][^(]*$", "", v) for v in values}
    if sorted(names) == sorted(values) or len(forms) < 2 and forms.isdisjoint(values):
        return False
    return len(wholes) > 1 or wholes <= {*values} or "(" in str(wholes)


def test_one_statement_a_line():
    """A name gets its value on a line of its own; `while` alone may name what it asks for."""
    lines = """B, T = x.shape; q, k = norm(q), norm(k); a.x, b[0] = b[0], a.x; pair = 1, []
x, y = rows[:, :-1], rows[:, 1:]; plan, n = run.plan, run.preset.train.steps
q, k = norm(q), norm(q); n, found = 0, []; plan, world = run.plan, here.world
run, plan = run, run.plan; x, y = f(a).b, f(a).c"""
    assert [*map(is_packed, ast.parse(lines).body)] == 6 * [False] + 5 * [True]
    for path in our_files((*ROOMS, "benchmarks", "course", "tests")):
        nodes = nodes_of(path)
        loops = {n for loop in nodes if isinstance(loop, ast.While) for n in ast.walk(loop.test)}
        for node in nodes:
            named = isinstance(node, ast.NamedExpr) and node not in loops
            assert not named and not is_packed(node), f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_imports_go_down_the_floors():
    for path in our_files():
        file = path.relative_to(ROOT)
        own = file.parts[0].removesuffix(".py")
        for name, at_once in imports(path):
            room = name.split(".")[0]
            down = FLOOR.get(room, 99) < FLOOR[own] or room == own != path.stem
            assert down, f"{file} imports {name}"
            needs = at_once and room in OPTIONAL - {own}
            assert not needs or own == "export", f"{file} needs {name}"


def test_the_page_draws_the_floors_and_names_every_file():
    page = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    drawn = "\n  v\n".join("   ".join(rooms) for rooms in reversed(FLOORS))
    assert f"```\n{drawn}\n```" in page
    named = set(re.findall(r"^  ([\w/.]+)\s", page, re.MULTILINE))
    files = our_files((*ROOMS, "benchmarks"))
    files = {str(path.relative_to(ROOT)).removeprefix("instruments/") for path in files}
    missing = {f for f in files if not {f, f.rpartition("/")[2]} & named}
    assert {Path(f).name for f in missing} <= {"__init__.py"}
    gone = {f for f in named if not any(name.endswith(f) for name in files) and f[-3:] == ".py"}
    assert not gone


def test_no_file_imports_itself_through_others():
    """Not by an import within a function either. graphlib's CycleError names the circle."""
    graph = {}
    for path in our_files():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        graph[name] = {imported for imported, _ in imports(path)}
    for path in ROOT.glob("course/*.py"):  # they import each other by their own names
        graph[path.stem] = {imported for imported, _ in imports(path, path.parent)}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("config") < order.index("machinery.build") < order.index("train")
    assert order.index("lesson") < order.index("judging") < order.index("check")


def test_each_file_names_the_next_one_to_read():
    """Through the root, in the order of docs/house.md, from the model to the options."""
    page = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    order = re.findall(r"^  (\w+\.py) ", page.partition("## The folders")[0], re.MULTILINE)
    order.remove("export.py")  # a door
    assert {*order, "export.py"} == {path.name for path in ROOT.glob("*.py")}
    for name, following in zip(order, order[1:]):
        about = ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8")))
        assert f"Next: {following}" in " ".join(about.split()), name


@pytest.mark.parametrize("name", ["config", "prepare_data"])
def test_what_needs_no_torch_does_not_wait_for_it(name):
    """Options and their help come at once, and the workers of a preparation need little memory."""
    run_code(f"import sys, {name}; assert 'torch' not in sys.modules")


@pytest.mark.parametrize("rooms", ["instruments", "hf stores"])
def test_rooms_that_are_optional_can_be_deleted(rooms, small_data, tmp_path):
    """In a copy: it trains and validates, the model is loaded and samples; and so do the commands
    of eval.py, unless they are what was deleted."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tree)
    for room in {*ROOMS} - {*rooms.split()}:
        shutil.copytree(ROOT / room, tree / room)
    run_dir = tmp_path / "run"
    words = ["tiny", *SMALL, "--data_dir", small_data, "--run_dir", run_dir]
    commands = ["sample", "loss"] if "instruments" not in rooms else []
    script = f"""
import sys, eval, torch, train
words = sys.argv[1:]
assert train.main(words) == 0
found = eval.load_model(eval.trained.EvalConfig(words[-1], device="cpu"))
found.model.generate(torch.tensor([[found.tokenizer.bos_id]]), max_new_tokens=5)
for command in {commands}:
    assert eval.main([command, words[-1], "--device", "cpu"]) == 0
"""
    succeeded(ended([sys.executable, "-c", script, *map(str, words)], cwd=tree))
    assert len(losses(run_dir)) == 12 and "full_val_bpb" in str(metrics(run_dir)[-1])
    for name in ("report.html", "eval.jsonl"):
        assert (run_dir / name).exists() == bool(commands)


def test_every_field_of_every_configuration_is_read_somewhere():
    # the names of a configuration where it is read
    owners = {"config", "c", "options", "preset", "train", "run", "model", "data", "self"}
    reads = set()
    for node in (node for path in our_files() for node in nodes_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if ast.unparse(node.value).split(".")[-1] in owners:
                reads.add(node.attr)
    kinds = filter(dataclasses.is_dataclass, vars(config).values())
    fields = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    assert len(fields) > 60 and not {*fields} - reads


# --------------------------------------------------------------------------- one door to files

# Files that have doors of their own, and where these lead.
OTHER_DOORS = {
    "disk.py": "it is the door",
    "tokenizer.py": "on the floor below it",
    "reading.py": "source text, which the user names",
    "cli.py": "torchrun's error file, and /dev/null",
    "log.py": "/dev/null, and ~/.netrc",
}


def doors(path):
    """Calls that open, read or write a file otherwise than by disk.py, and not beside the code."""
    functions = {"open", "np.load", "np.memmap", "os.open", "os.replace", "os.rename"}
    methods = {"read_text", "read_bytes", "write_text", "write_bytes", "open_memmap"}
    found = []
    for called, _, place in calls(path):
        owner, _, method = called.rpartition(".")
        bypass = called in functions or owner not in ("", "disk") and method in methods
        if bypass and "__file__" not in called:
            found.append(place)
    return found


def test_files_are_opened_through_one_door(tmp_path):
    """Of a run, a data folder, an export or a store: a name or a link of a stranger stays there."""
    for path in our_files():
        assert path.name in OTHER_DOORS or not doors(path), doors(path)
    (tmp_path / "a.py").write_text(
        "disk.read_text(p)\nread_json(p)\nPath(__file__).read_text()\nstore.open(p)\n"
        "p.read_text()\nwith open(p) as f: pass\nnp.load(p)\n"
    )
    assert {place.split(":")[1] for place in doors(tmp_path / "a.py")} == {"5", "6", "7"}


# --------------------------------------------------------------------------- one way to print


def raw_prints(path):
    """Calls of print with other arguments than constants and printable(...)."""
    found = []
    for called, args, place in calls(path):
        for arg in args if called == "print" else ():
            text = ast.unparse(arg)
            is_safe = isinstance(arg, ast.Constant) or text == "__doc__"
            if not is_safe and not text.startswith(("printable(", "*map(printable, ")):
                found.append(place)
    return found


def test_what_is_printed_is_printable(tmp_path):
    """A stranger's names, hashes and texts change neither the terminal nor its title."""
    for path in our_files():
        assert not raw_prints(path), raw_prints(path)
    (tmp_path / "a.py").write_text("print('a', end='')\nprint(x)\nprint(f'{x}')\nprint(*x)\n")
    assert len(raw_prints(tmp_path / "a.py")) == 3


# ----------------------------------------------------------------------------------------- style
@pytest.mark.parametrize("check", [("check",), ("format", "--check")])
def test_one_style(check):
    ruff = Path(sys.executable).parent / "ruff"
    done = ended([ruff, *check, "."])
    assert done.returncode == 0, done.stdout + done.stderr
