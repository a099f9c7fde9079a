"""The shape of the project: who may import whom, one style, and the first lesson's promise."""

import ast
import json
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
ROOMS = {"machinery", "instruments", "hf", "course"}
# what the files of a room, or a single file, may import of ours
MAY_IMPORT = {
    **dict.fromkeys(IDEAS, set()),
    "config": IDEAS,
    "machinery": IDEAS | {"config", "machinery", "instruments"},  # the last not at a file's top
    "instruments": IDEAS | {"config", "machinery", "instruments"},
    "hf": IDEAS | {"machinery", "hf"},
    **dict.fromkeys(PROGRAMS, IDEAS | {"config", "machinery", "instruments", "hf"}),
}
for program in ("train", "export"):  # the metric is eval's, and so is finding a model
    MAY_IMPORT[program] = MAY_IMPORT[program] | {"eval"}


def imports(path: Path):
    """(name of ours, whether it is imported at the top of the file) for each import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in (name.split(".")[0] for name in names):
            if name in IDEAS | PROGRAMS | ROOMS | {"config"}:
                yield name, node in tree.body


def test_imports_go_down_the_floors():
    files = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in ROOT.glob(f"{room}/*.py"))]
    for path in files:
        owner = path.stem if path.parent == ROOT else path.parent.name
        if owner == "course":
            continue  # imports everything, and nothing imports it
        for name, at_top in imports(path):
            assert name in MAY_IMPORT[owner], f"{path.relative_to(ROOT)} imports {name}"
            if name == "instruments" and owner != "instruments":
                assert not at_top, f"{path.relative_to(ROOT)} imports instruments at its top"


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
    rooms = ("benchmarks", "tests", *ROOMS)
    for path in [*ROOT.glob("*.py"), *(p for r in rooms for p in ROOT.glob(f"{r}/**/*.py"))]:
        assigned = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Assign)]
        tables = [n for n in assigned if isinstance(n.value, (ast.List, ast.Tuple, ast.Dict))]
        ends = {n.end_lineno for n in tables}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not line.endswith("# fmt: skip") or number in ends, f"{path}:{number}"


def test_the_one_file_run_has_the_losses_of_train(tmp_path):
    """The first 20 of tiny, compiled, to the bit."""
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
        "honest = train.Trainer.take_step\n"
        "def take_step(run):\n"
        "    honest(run)\n"
        f"    run.signal = signal.SIGTERM if run.step == {steps - 1} else run.signal\n"
        "train.Trainer.take_step = take_step\n"
        "sys.exit(train.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", driver, "--data_dir", data, "--run_dir", tmp_path / "run"]
    ours = subprocess.run(
        [*command, "--device", "cpu", "--eval_tokens", "2048"], **{**tools, "check": False}
    )
    assert ours.returncode == 128 + signal.SIGTERM, ours.stderr
    code = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('lesson', 'course/00_one_file.py')\n"
        "lesson = importlib.util.module_from_spec(spec); spec.loader.exec_module(lesson)\n"
        "import config; from pathlib import Path\n"
        f"data = Path({str(data)!r})\n"
        f"losses = lesson.train(config.PRESETS['tiny'], data, {steps}, True, 1)\n"
        "print(json.dumps(losses))\n"
    )
    theirs = subprocess.run([sys.executable, "-c", code], **tools)
    bare = json.loads(theirs.stdout.splitlines()[-1])
    full = losses(tmp_path / "run")
    assert [full[s] for s in range(1, steps + 1)] == bare
    assert bare[-1] < bare[0] - 1 and os.path.exists(tmp_path / "run" / "metrics.jsonl")


def test_the_line_counts_of_the_readme_are_true():
    """Within 3%, as a small change should not have to touch the README."""
    rows = re.findall(r"^  (\w+\.py) +(\d+)  ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for name, promised in rows:
        paths = [ROOT / room / name for room in (".", *ROOMS)]
        lines = len(next(p for p in paths if p.exists()).read_text().splitlines())
        assert abs(lines - int(promised)) <= max(3, 0.03 * lines), (
            f"{name} has {lines} lines: write that number in README.md, The house"
        )
