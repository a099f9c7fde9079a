"""The shape of the project: who may import whom, one style, and the first lesson's promise."""

import ast
import graphlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment, losses

IDEAS = {"model", "data", "tokenizer", "optim", "flops"}
PROGRAMS = {"train", "eval", "export", "prepare_data"}
ROOMS = {"machinery", "preparation", "instruments", "hf"}
BESIDE = {"course", "tests", "benchmarks"}  # import anything; nothing imports them
BELOW = IDEAS | {"config", "machinery"}
# What a file of the root, or the files of a room, may import of ours; the programs, instruments
# only inside a function.
MAY_IMPORT = {
    "config": set(),
    **dict.fromkeys(IDEAS, {"config"}),
    "machinery": BELOW,
    "preparation": BELOW | {"preparation"},
    "instruments": BELOW | {"preparation", "instruments"},
    "hf": BELOW | {"hf"},
    **dict.fromkeys(PROGRAMS, BELOW | {"preparation", "instruments", "hf"}),
}


def our_files() -> list[Path]:
    return [*ROOT.glob("*.py"), *(path for room in ROOMS for path in ROOT.glob(f"{room}/*.py"))]


def imports(path: Path):
    """("machinery.disk", whether that happens as soon as the file is imported) for each import of
    ours; of a name in a file, the file."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    later = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            names = [node.module] if "." in node.module or node.module not in ROOMS else []
            names = names or [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            if name.split(".")[0] in MAY_IMPORT.keys() | BESIDE:
                yield ".".join(name.split(".")[:2]), node not in later


def test_imports_go_down_the_floors():
    for path in our_files():
        owner = path.stem if path.parent == ROOT else path.parent.name
        for name, at_once in imports(path):
            room = name.split(".")[0]
            assert room in MAY_IMPORT[owner], f"{path.relative_to(ROOT)} imports {name}"
            if room == "instruments" and owner in PROGRAMS:
                assert not at_once, f"{path.relative_to(ROOT)} imports {name} outside a function"


def test_no_file_imports_itself_through_others():
    """But for imports within functions. graphlib's CycleError names the circle."""
    graph = {}
    for path in our_files():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        graph[name] = {imported for imported, at_once in imports(path) if at_once}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("config") < order.index("model") < order.index("machinery.build")
    assert order.index("machinery.build") < order.index("train")


@pytest.mark.parametrize("name", ["config", "prepare_data"])
def test_what_needs_no_torch_does_not_wait_for_it(name):
    """Options and their help come at once, and the workers of a preparation need little memory."""
    code = f"import sys, {name}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=environment())


# A promise to readers: these numbers only go down. Lines of .py files, by room.
BUDGETS = {
    "train.py model.py data.py": 1404,  # the first evening
    "*.py": 3436,
    "machinery/**/*.py": 3579,
    "preparation/**/*.py": 1254,
    "hf/**/*.py": 1440,
    "instruments/**/*.py": 5260,
    "benchmarks/**/*.py": 3490,
    "tests/**/*.py": 20144,
}


@pytest.mark.parametrize("patterns, most", BUDGETS.items())
def test_files_stay_as_short_as_promised(patterns, most):
    files = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert 0 < sum(lines.values()) <= most, lines


def test_training_runs_without_the_instruments():
    """Deleting the optional folder breaks nothing: importing train.py does not touch it."""
    code = "import sys, train; assert not [m for m in sys.modules if m.startswith('instruments')]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=environment())


@pytest.mark.parametrize("check", [("check",), ("format", "--check")])
def test_one_style(check):
    ruff = Path(sys.executable).parent / "ruff"
    done = subprocess.run([ruff, *check, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_tables_are_laid_out_by_hand():
    """`# fmt: skip` stands at the end of a module's list, tuple or dict, and nowhere else."""
    for path in [*our_files(), *(p for room in BESIDE for p in ROOT.glob(f"{room}/**/*.py"))]:
        assigned = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Assign)]
        tables = [n for n in assigned if isinstance(n.value, (ast.List, ast.Tuple, ast.Dict))]
        ends = {n.end_lineno for n in tables}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not line.endswith("# fmt: skip") or number in ends, f"{path}:{number}"


def test_the_one_file_run_has_the_losses_of_train(tmp_path):
    """The first 20 of tiny, compiled, to the bit; and of ours it imports what it says."""
    from tokenizer import Tokenizer

    tree = ast.parse((ROOT / "course/05_one_file.py").read_text())
    names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    ours = {name for name in names if name.split(".")[0] in MAY_IMPORT.keys() | BESIDE}
    assert ours == {"model", "optim", "data", "config"}
    data, steps = tmp_path / "data", 20
    env = environment(OMP_NUM_THREADS="2")
    tools = dict(cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    text = tmp_path / "text"
    text.mkdir()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]:
        (text / f"{path.parent.name}_{path.name}.txt").write_text(path.read_text())
    prepare = ["prepare_data.py", "--source", f"files:{text}", "--data_dir", data]
    subprocess.run([sys.executable, *prepare, "--vocab_size", "4096"], **tools)
    driver = (
        "import signal, sys, train\n"
        "honest = train.log_step\n"
        "def log_step(run, progress, numbers):\n"
        "    honest(run, progress, numbers)\n"
        f"    if progress.step == {steps - 1}: run.signals.received = signal.SIGTERM\n"
        "train.log_step = log_step\n"
        "sys.exit(train.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", driver, "--data_dir", data, "--run_dir", tmp_path / "run"]
    ours = subprocess.run(
        [*command, "--device", "cpu", "--eval_tokens", "2048"], **{**tools, "check": False}
    )
    assert ours.returncode == 128 + signal.SIGTERM, ours.stderr
    code = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('lesson', 'course/05_one_file.py')\n"
        "lesson = importlib.util.module_from_spec(spec); spec.loader.exec_module(lesson)\n"
        "import config; from pathlib import Path\n"
        f"data = Path({str(data)!r})\n"
        f"losses = lesson.train(config.PRESETS['tiny'], data, {steps}, True, 1)\n"
        "print(json.dumps([losses, [*map(len, lesson.read_tokens(data))]]))\n"
    )
    theirs = subprocess.run([sys.executable, "-c", code], **tools)
    bare, sizes = json.loads(theirs.stdout.splitlines()[-1])
    assert sizes == Tokenizer.load(data / "tokenizer.json").token_bytes.tolist()
    full = losses(tmp_path / "run")
    assert [full[s] for s in range(1, steps + 1)] == bare
    assert bare[-1] < bare[0] - 1 and os.path.exists(tmp_path / "run" / "metrics.jsonl")


def test_the_gpt_of_lesson_4_is_that_of_model_py():
    """With plain options: the same scores and loss on the same weights, and initial values of the
    same size. The lesson's definitions run, not its cells."""
    import torch

    from config import GPTConfig
    from model import GPT

    tree = ast.parse((ROOT / "course/04_gpt.py").read_text())
    keep = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    tree.body = [node for node in tree.body if isinstance(node, keep)]
    theirs: dict = {"__name__": "lesson_4"}
    exec(compile(tree, "04_gpt.py", "exec"), theirs)
    torch.manual_seed(0)
    small = theirs["GPT"](width=64, blocks=3, heads=4, base=100.0)
    shape = dict(n_layer=3, n_head=4, n_kv_head=4, head_dim=16, n_embd=64, mlp_hidden=256)
    plain = dict(qk_norm=False, embed_norm=False, logit_softcap=0.0, rope_theta=100.0)
    ours = GPT(GPTConfig(seq_len=64, vocab_size=256, **shape, **plain))
    ours.init_weights()
    assert [*small.state_dict()] == [*ours.state_dict()]
    for name, weight in small.state_dict().items():
        size = float(ours.state_dict()[name].std())
        assert abs(float(weight.std()) - size) <= 0.1 * size, f"{name} begins with another size"
    with torch.no_grad():
        for weight in small.parameters():  # all at work: none at 0
            weight.copy_(torch.randn_like(weight) * weight.size(1) ** -0.5)
        ours.load_state_dict(small.state_dict())
        pieces = torch.randint(256, (4, 65))
        scores, logits = small(pieces[:, :-1]), ours(pieces[:, :-1])
        bits = float(theirs["bits"](small, pieces))
        loss = float(ours(pieces[:, :-1], pieces[:, 1:]))
    assert scores.std() > 0.5 and float((scores - logits).abs().max()) < 1e-5
    assert abs(bits * math.log(2) - loss) < 1e-5


def test_the_line_counts_of_the_readme_are_true():
    """Within 3%, as a small change should not have to touch the table; wherever that stands."""
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    rows = re.findall(r"^[ |`]*(\w+\.py)[ |`]+(\d+)[ |]", text, re.MULTILINE)
    assert len(rows) > 20
    for name, promised in rows:
        paths = [ROOT / room / name for room in (".", *ROOMS, *BESIDE)]
        found = [len(p.read_text().splitlines()) for p in paths if p.exists()]  # of any room
        assert any(abs(lines - int(promised)) <= max(3, 0.03 * lines) for lines in found), (
            f"{name} has {found} lines: write that in README.md (The house) or docs/house.md"
        )
