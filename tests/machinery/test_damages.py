"""Every file that a program opens, damaged in every way: the program succeeds, or says in one
sentence which file it is, with a documented exit code. Never a traceback.

The programs run in this process. Each pair of a file and a program meets three of the damages,
chosen by their names; all of them in the slow tests. What a run's checkpoints say can be made
again: with those whole, it resumes.
"""

import importlib
import io
import os
import shutil
import signal
import tempfile
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT, SMALL, write_lines
from damages import DAMAGES
from table import read_table
from test_checkpoint import TENSORS

from hf import parity
from machinery import cli
from preparation import pool

STEP = "run/checkpoints/step_00000002"
CODES = {0, 2, 3, 4, 7}
WORDS = dict(
    cpu="--device cpu --dtype fp32",
    small=" ".join([*SMALL, "--n_layer 1 --steps 3 --keep 3 --save_every 1"]),
    rows="--vocab_size 300 --row_len 33 --val_fraction 0.2 --workers 1",
    step=STEP,
)

# name -> the command; {here}: the folder that holds data, run and export
PROGRAMS = r"""
resume => train tiny {small} --data_dir {here}/data --run_dir {here}/run
tune => train tiny {small} --data_dir {here}/data --run_dir {here}/new --init_from {here}/{step}
loss => eval loss {here}/run {cpu} --data_dir {here}/data --rows 2
sample => eval sample {here}/run {cpu} --max_new_tokens 2 --prompt a
choice => eval choice {here}/run {cpu} --task {here}/task.jsonl
report => eval report {here}/run
look => eval look {here}/run {cpu} --prompt a
compare => eval compare {here}/run {here}/other
export => export {here}/run --out {here}/exported
prepare => prepare_data tiny {rows} --source files:{whole}/written --data_dir {here}/data
verify => prepare_data verify tiny --data_dir {here}/data
loss_of_export => eval loss {here}/export {cpu} --data_dir {here}/data
sample_of_export => eval sample {here}/export {cpu} --max_new_tokens 2 --prompt a
"""
PROGRAMS = {name: command for name, (command,) in read_table(PROGRAMS)}

# in a folder, files => the programs that open them, or might
OPENED = f"""
run: config.json status.json metrics.jsonl samples.jsonl tokenizer.json eval.jsonl .lock \
    => resume loss sample report compare export
{STEP}: MANIFEST.json trainer.json dcp/{TENSORS} \
    => resume tune loss sample choice look report export
run/checkpoints: best => resume loss report
data: manifest.json tokenizer.json SHARD CRC => resume loss report export prepare verify
data: RECORD RECORDED_TOKENIZER => prepare
.: task.jsonl => choice
export: config.json model.safetensors tokenizer.json generation_config.json \
    => loss_of_export sample_of_export
"""
CELLS = [
    (f"{folder}/{name}".removeprefix("./"), program)
    for files, (programs,) in read_table(OPENED)
    for folder, names in [files.split(": ")]
    for name in names.split()
    for program in programs.split()
]
APPENDED = {".jsonl", ".lock"}  # a program writes into these: a link would change the original


def three_of(file: str, program: str) -> list[str]:
    return sorted(DAMAGES, key=lambda damage: zlib.crc32(f"{file},{program},{damage}".encode()))[:3]


@pytest.fixture(scope="module")
def whole():
    """data, run (two of three steps done), other, export, task.jsonl, in a folder open to all."""
    folder = Path(tempfile.mkdtemp(prefix="whole"))
    folder.chmod(0o755)
    texts = folder / "written"
    texts.mkdir()
    for i in range(60):
        (texts / f"{i}.txt").write_text(f"def note_{i}(x):\n    return x + {i}\n" * 4)
    WORDS["whole"] = folder
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert ends("prepare", folder)[0] == 0
    assert ends("resume", folder) == (0, "")
    run_dir = folder / "run"
    write_lines(run_dir / "samples.jsonl", [dict(step=1, tokens=512, prompt="a", text="b")])
    shutil.copytree(run_dir, folder / "other")
    assert ends("export", folder)[0] == 0
    (folder / "exported").rename(folder / "export")
    question = dict(query="a", choices=["b", "c"], gold=1)
    write_lines(folder / "task.jsonl", [question] * 2)
    shutil.rmtree(run_dir / "checkpoints/step_00000003")
    assert (folder / STEP).exists()
    yield folder
    shutil.rmtree(folder)
    for s, handler in zip((signal.SIGINT, signal.SIGTERM), handlers):
        signal.signal(s, handler)


def copy(whole: Path, folder: Path, file: str) -> Path:
    """Links to the files, but copies of what is appended to, and of `file`; the path of that."""

    def link(source, target):
        is_copied = APPENDED & {Path(source).suffix, Path(source).name}
        shutil.copy2(source, target) if is_copied else os.link(source, target)

    texts_stay = lambda path, names: ["written"] if Path(path) == whole else []
    shutil.copytree(whole, folder, dirs_exist_ok=True, ignore=texts_stay, copy_function=link)
    path = find(folder, file)
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return path


def ends(program: str, folder: Path) -> tuple[int, str]:
    """The program's exit code, and what it says if that is not 0. A bug raises."""
    main, line = PROGRAMS[program].split(" ", 1)
    out = io.StringIO()
    error_text = ""
    # the pool is a thread; transformers does not compare, and may be missing
    no_check = mock.patch.multiple(
        parity, check=lambda *args: "not at all", need_transformers=lambda: None
    )
    thread = mock.patch.object(pool, "open_pool", lambda n: nullcontext((ThreadPoolExecutor(1), 1)))
    with redirect_stdout(out), redirect_stderr(out), no_check, thread:
        try:
            argv = line.format(here=folder, **WORDS).split()
            code = importlib.import_module(main).main(argv) or 0
        except Exception as error:
            code = cli.exit_code(error)
            if code == 1:
                raise
            error_text = str(error)
    return code, error_text


PATTERNS = {
    "SHARD": "train/*/unit_00000_00.npy",
    "CRC": "train/*/unit_00000_00.crc32.npy",
    "RECORD": ".units/*/*_00000.json",
    "RECORDED_TOKENIZER": ".units/*/tokenizer.json",
}


def find(folder: Path, name: str) -> Path:
    root, _, last = name.rpartition("/")
    return next((folder / root).glob(PATTERNS[last])) if last in PATTERNS else folder / name


EVERY = pytest.param(lambda file, program: DAMAGES, marks=pytest.mark.slow)


@pytest.mark.parametrize("damages", [three_of, EVERY], ids=["three", "all"])
@pytest.mark.parametrize("file, program", CELLS, ids=[f"{f}, {p}" for f, p in CELLS])
def test_a_damaged_file_is_survived_or_named(file, program, damages, whole):
    wrong = {}
    for damage in damages(file, program):
        folder = Path(tempfile.mkdtemp(prefix="cell"))
        try:
            DAMAGES[damage](copy(whole, folder, file))
            code, said = ends(program, folder)
            wrong[damage] = problem(file, program, code, said)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            last = [f for f in frames if str(ROOT) in f.filename and ".venv" not in f.filename][-1]
            wrong[damage] = (
                f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: "
                f"{str(error)[:200]}"
            )
        finally:
            shutil.rmtree(folder)
    wrong = [f"{damage}: {what}" for damage, what in wrong.items() if what]
    assert not wrong, "\n".join(wrong)


def problem(file: str, program: str, code: int, said: str) -> str:
    """How the end is not as promised; empty if it is."""
    must_resume = program == "resume" and file.startswith("run/") and ".lock" not in file
    if code not in CODES:
        return f"exit code {code}: {said}"
    if code == 0:
        return ""
    if "\n" in said:
        return f"not one sentence: {said}"
    if must_resume:
        return f"should resume: {said}"
    folder, _, name = file.rpartition("/")
    named = Path(PATTERNS[name]).suffix if name in PATTERNS else name
    found = named in said or bool(folder) and f"{folder} " in said
    return "" if found else f"names neither the file nor its folder: {said}"
