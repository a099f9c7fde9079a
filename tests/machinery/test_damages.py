"""Every file that a program opens, damaged in every way: the program succeeds, or says in one
sentence which file it is, with a documented exit code. Never a traceback.

The programs run in this process. Each pair of a file and a program meets three of the damages,
chosen by their names; all of them in the slow tests. What a run's checkpoints say can be made
again: with those whole, it resumes.
"""

import importlib
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
from conftest import SMALL, flip, write_lines
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
prepare => prepare_data tiny {rows} --source files:{texts} --data_dir {here}/data
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


def flipped(path: Path, at: int | None = None):
    """One bit, by default in the middle."""
    size = path.stat().st_size
    if size:
        flip(path, at=size // 2 if at is None else min(at, size - 1))


def not_utf8(path: Path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3] + b"\xff\xfe" + content[len(content) // 3 :])


def a_folder(path: Path):
    path.unlink()
    path.mkdir()


def a_dangling_link(path: Path):
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


DAMAGES = {
    "flipped": flipped,
    "flipped near the start": lambda path: flipped(path, at=9),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "a list": lambda path: path.write_text("[]"),
    "an empty object": lambda path: path.write_text("{}"),
    "nested too deeply": lambda path: path.write_text("[" * 100_000),
    "not UTF-8": not_utf8,
    "a folder": a_folder,
    "a dangling link": a_dangling_link,
    "deleted": Path.unlink,
}


def cases():
    """Of each file and program three of the damages, which their names choose; the others: slow."""
    for cell in CELLS:
        chosen = sorted(DAMAGES, key=lambda damage: zlib.crc32(",".join([*cell, damage]).encode()))
        for damage in DAMAGES:
            marks = [pytest.mark.slow] if damage not in chosen[:3] else []
            yield pytest.param(*cell, damage, marks=marks)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """data, run (two of three steps done), other, export, task.jsonl."""
    folder = tmp_path_factory.mktemp("whole")
    WORDS["texts"] = tmp_path_factory.mktemp("texts")
    for i in range(60):
        text = f"def note_{i}(x):\n    return x + {i}\n" * 4
        (WORDS["texts"] / f"{i}.txt").write_text(text)
    assert ends("prepare", folder)[0] == 0
    assert ends("resume", folder) == (0, "")
    run_dir = folder / "run"
    (run_dir / "eval.jsonl").touch()
    write_lines(run_dir / "samples.jsonl", [dict(step=1, tokens=512, prompt="a", text="b")])
    shutil.copytree(run_dir, folder / "other")
    assert ends("export", folder)[0] == 0
    (folder / "exported").rename(folder / "export")
    question = dict(query="a", choices=["b", "c"], gold=1)
    write_lines(folder / "task.jsonl", [question] * 2)
    shutil.rmtree(run_dir / "checkpoints/step_00000003")
    return folder


def link(source, target):
    """But .jsonl and .lock, into which a program writes, are copied."""
    (shutil.copy if Path(source).suffix in ("", ".jsonl") else os.link)(source, target)


def ends(program: str, folder: Path) -> tuple[int, str]:
    """The program's exit code, and what it says if that is not 0. A bug raises."""
    main, line = PROGRAMS[program].split(" ", 1)
    # the pool is a thread; transformers does not compare, and may be missing
    no_check = mock.patch.multiple(
        parity, check=lambda *args: "not at all", need_transformers=lambda: None
    )
    thread = mock.patch.object(pool, "open_pool", lambda n: nullcontext((ThreadPoolExecutor(1), 1)))
    with no_check, thread:
        try:
            argv = line.format(here=folder, **WORDS).split()
            return importlib.import_module(main).main(argv) or 0, ""
        except Exception as error:
            code = cli.exit_code(error)
            if code == 1:
                raise
            return code, str(error)


PATTERNS = {
    "SHARD": "train/*/unit_00000_00.npy",
    "CRC": "train/*/unit_00000_00.crc32.npy",
    "RECORD": ".units/*/*_00000.json",
    "RECORDED_TOKENIZER": ".units/*/tokenizer.json",
}


@pytest.mark.parametrize("file, program, damage", cases())
def test_a_damaged_file_is_survived_or_named(file, program, damage, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True, copy_function=link)
    folder, _, name = file.rpartition("/")
    path = next((tmp_path / folder).glob(PATTERNS.get(name, name)))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)  # no longer a link
    DAMAGES[damage](path)
    code, said = ends(program, tmp_path)
    assert code in CODES and "\n" not in said, said
    if code:
        resumes = program == "resume" and file.startswith("run/") and file != "run/.lock"
        assert not resumes, said
        named = path.suffix if name in PATTERNS else name
        assert named in said or folder and f"{folder} " in said, said
