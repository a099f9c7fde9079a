"""Small data folders, and prepare_data.py as a process, for the tests of the data path."""

import io
import json
import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from conftest import environment, read_json, write_json

WORDS = (
    "o a de que e do da em um para com não uma os no se na por mais as dos como mas ao ele "
    "das à seu sua ou quando muito nos já eu também só pelo pela até isso ela entre depois "
    "sem mesmo coração água pão João ação música árvore república você açúcar 1822 1988 "
    "42"
).split()


def invented(count: int, seed: int) -> list[str]:
    """Texts of Portuguese-like sentences, about 1.2 KB each."""
    rng = random.Random(seed)
    sentence = lambda: " ".join(rng.choices(WORDS, k=12)).capitalize() + ".\n"
    return ["".join(sentence() for _ in range(rng.randrange(2, 30))) for _ in range(count)]


def write_texts(folder: Path) -> Path:
    """A folder of 60 .txt files."""
    folder.mkdir()
    for i, text in enumerate(invented(60, 0)):
        (folder / f"{i:04d}.txt").write_text(text, "utf-8")
    return folder


def write_jsonl(path: Path, count: int, seed: int = 0) -> Path:
    """`count` documents in one .jsonl file."""
    rows = [dict(id=i, text=text) for i, text in enumerate(invented(count, seed))]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


# The units of the tests are small, so that there are several: 40 KB, not 4 MB.
DRIVER = (
    "from machinery import cli; from preparation import sources; sources.SMALLEST_UNIT = 40_000; "
    "import prepare_data; cli.run(prepare_data.main)"
)


def command(folder: Path, *options: str, spoil: str = "") -> list[str]:
    """spoil: code that runs in it first."""
    small = ["--data_dir", str(folder), "--vocab_size", "400", "--row_len", "65"]
    return [sys.executable, "-c", spoil + DRIVER, *small, *options]


def prepare(folder: Path, *options: str, program: tuple = (), processes: bool = False):
    """Run `command` within this process, to save its start. The units are prepared by a thread;
    processes: by those of a pool, as without a test."""
    from preparation import sources

    with mock.patch.object(sources, "SMALLEST_UNIT", 40_000):
        words = ["--data_dir", folder] if program else command(folder)[3:]
        return in_process(*program, *words, *options, processes=processes)


def prepared(folder: Path, *options: str, **how) -> str:
    """`prepare`, which must succeed; what it prints."""
    done = prepare(folder, *options, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def prepare_tiny(folder: Path, *options, **how) -> str:
    """What `prepare_data.py tiny` prints, in this process, with short rows, many held out."""
    small = "tiny --vocab_size 300 --row_len 65 --val_fraction 0.2 --workers 1".split()
    done = in_process(*small, "--data_dir", folder, *options, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def called(main, *argv) -> subprocess.CompletedProcess:
    """A program's `main` within this process, as from the command line."""
    from machinery import cli

    out = io.StringIO()
    err = io.StringIO()
    words = [f"{main.__module__}.py", *map(str, argv)]
    with mock.patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(err):
        try:
            cli.run(main)
        except SystemExit as end:
            return subprocess.CompletedProcess(argv, end.code, out.getvalue(), err.getvalue())


def in_process(*argv, processes: bool = False) -> subprocess.CompletedProcess:
    """`prepare_data.py ARGV` within this process."""
    import prepare_data
    from preparation import pool, sources

    sources.find_files.cache_clear()
    with (
        ThreadPoolExecutor(1) as thread,
        mock.patch.dict(os.environ, environment(RAYON_NUM_THREADS="1")),
        mock.patch.object(pool, "open_pool", pool.open_pool),
    ):
        if not processes:
            pool.open_pool = lambda workers: nullcontext((thread, workers))
        return called(prepare_data.main, *argv)


def documents_of(spec: str, encoding: str = "utf-8") -> tuple[list, Counter]:
    """The documents of a source, sorted, and the notes made; checked as at a start."""
    from preparation import reading, sources

    source = sources.parse(spec, encoding)
    sources.find_files.cache_clear()
    units, _ = sources.list_units(source)
    sources.probe(source, units)
    notes = reading.Notes()
    return sorted(d for unit in units for d in sources.documents(source, unit, notes)), notes


def pieces_of(row) -> list[tuple[int, ...]]:
    """A row, which begins with BOS (0), cut at its BOS tokens: each piece with its own."""
    pieces = []
    for i in map(int, row):
        if i == 0:
            pieces.append(())
        pieces[-1] += (i,)
    return pieces


def fingerprint(folder: Path) -> str:
    return read_json(folder / "manifest.json")["fingerprint"]


ROW_LEN = 9  # of the rows that `make_folder` writes
VOCAB = 50
SIZES = {"train": {"a": 230, "b": 90}, "val": {"a": 21, "b": 5}}


def make_folder(folder: Path, rows: dict, shard_rows=100, dtype="<u2"):
    """A data folder without text: rows[split][source] rows; row i of a source holds BOS, then
    tokens that say which row it is. Returns its Manifest."""
    from machinery import disk, formats, output, shards

    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": {}, "val": {}}
    for split, by_source in splits.items():
        for s, name in enumerate(rows["train"]):
            count = rows[split].get(name, 0)
            made = (row_of(i, s) for i in range(count))
            with mock.patch.object(shards, "SHARD_ROWS", shard_rows):
                entries = shards.write_shards(made, folder, f"{split}/{name}/unit_00000", dtype)
            by_source[name] = {"rows": count, "shards": entries}
    (folder / "tokenizer.json").write_text("{}")
    sha256 = disk.sha256_of(folder / "tokenizer.json")
    tree = dict(
        format=formats.DATA_FORMAT,
        row_len=ROW_LEN,
        dtype=dtype,
        tokenizer=dict(vocab_size=VOCAB, bos_id=0, sha256=sha256),
        sources=[{"name": name} for name in rows["train"]],
        splits=output.tree_of(splits),
    )
    write_manifest(folder, tree)
    return shards.Manifest.load(folder)


def manifest_of(folder: Path) -> dict:
    """manifest.json, as it is written."""
    return read_json(folder / "manifest.json")


def write_manifest(folder: Path, tree: dict):
    """With the fingerprint that fits it: a stranger computes that, too."""
    from machinery import shards

    tree["fingerprint"] = shards.fingerprint(tree)
    write_json(folder / "manifest.json", tree)


def row_of(i: int, source: int):
    """BOS, the source, then i in base VOCAB - 1: distinct rows, readable back."""
    import numpy as np

    base = VOCAB - 1
    digits = [1 + i // base**k % base for k in range(ROW_LEN - 2)]
    return np.array([0, source + 1, *digits], np.uint16)
