"""Small data folders, and prepare_data.py as a process, for the tests of the data path."""

import io
import json
import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from conftest import environment, read_json, write_json

WORDS = (
    "o a de que e do da em um para com não uma os no se na por mais as dos como mas ao ele "
    "das à seu sua ou quando muito nos já eu também só pelo pela até isso ela entre depois "
    "sem mesmo coração água pão João ação música árvore república você açúcar 1822 1988 "
    "42"
).split()


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize() + ".\n"


def write_texts(folder: Path, count: int = 60, seed: int = 0) -> Path:
    """A folder of `count` small Portuguese-like .txt files, about 4 KB each."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        text = "".join(sentence(rng, rng.randrange(5, 30)) for _ in range(rng.randrange(10, 80)))
        (folder / f"{i:04d}.txt").write_text(text, encoding="utf-8")
    return folder


def write_jsonl(path: Path, count: int, seed: int = 0) -> Path:
    """`count` documents, about 1.2 KB each, in one .jsonl file."""
    rng = random.Random(seed)
    with open(path, "w", encoding="utf-8") as f:
        for i in range(count):
            text = "".join(sentence(rng, 12) for _ in range(rng.randrange(2, 30)))
            f.write(json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) + "\n")
    return path


def write_parquet(path: Path, row_group_size: int | None = None, **columns: list):
    import pyarrow.parquet

    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)


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
        return in_process(*program, *command(folder, *options)[3:], processes=processes)


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


def in_process(*argv, processes: bool = False) -> subprocess.CompletedProcess:
    """`prepare_data.py ARGV` within this process."""
    import prepare_data
    from machinery import cli
    from preparation import pool, sources

    out = io.StringIO()
    err = io.StringIO()
    code = None
    sources.find_files.cache_clear()
    with ExitStack() as stack:
        if not processes:
            thread = stack.enter_context(ThreadPoolExecutor(1))
            opened = lambda workers: nullcontext((thread, workers))
            stack.enter_context(mock.patch.object(pool, "open_pool", opened))
        stack.enter_context(mock.patch.dict(os.environ, environment(RAYON_NUM_THREADS="1")))
        stack.enter_context(mock.patch.object(sys, "argv", ["prepare_data.py", *map(str, argv)]))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            cli.run(prepare_data.main)
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


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
    ids = [int(i) for i in row]
    starts = [i for i, t in enumerate(ids) if t == 0]
    assert starts[0] == 0
    return [tuple(ids[a:b]) for a, b in zip(starts, [*starts[1:], len(ids)])]


def fingerprint(folder: Path) -> str:
    return read_json(folder / "manifest.json")["fingerprint"]


def hashes(folder: Path) -> dict[str, str]:
    """file -> sha256 of all shards, from the bytes on disk."""
    from machinery import disk

    return {
        p.relative_to(folder).as_posix(): disk.sha256_of(p)
        for p in sorted(folder.glob("*/*/*.npy"))
    }


ROW_LEN = 9  # of the rows that `make_folder` writes
VOCAB = 50
SIZES = {"train": {"a": 230, "b": 90}, "val": {"a": 21, "b": 5}}


def make_folder(folder: Path, rows: dict, shard_rows=100, dtype="<u2"):
    """A data folder without text: rows[split][source] rows; row i of a source holds BOS, then
    tokens that say which row it is. Returns its Manifest."""
    from machinery import disk, formats, output, shards

    folder.mkdir(parents=True, exist_ok=True)
    names = list(rows["train"])
    splits = {"train": {}, "val": {}}
    for split in splits:
        for s, name in enumerate(names):
            entries = []
            total = rows[split].get(name, 0)
            for start in range(0, total, shard_rows):
                rows_here = range(start, min(total, start + shard_rows))
                made = (row_of(i, s) for i in rows_here)
                stem = f"{split}/{name}/unit_{start // shard_rows:05d}"
                entries += shards.write_shards(made, folder, stem, dtype)
            splits[split][name] = {"rows": total, "shards": entries}
    (folder / "tokenizer.json").write_text("{}")
    tree = dict(format=formats.DATA_FORMAT, row_len=ROW_LEN, dtype=dtype)
    sha256 = disk.sha256_of(folder / "tokenizer.json")
    tree["tokenizer"] = dict(vocab_size=VOCAB, bos_id=0, sha256=sha256)
    tree["sources"] = [{"name": name} for name in names]
    tree["splits"] = output.tree_of(splits)
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

    row = np.zeros(ROW_LEN, np.uint16)
    row[1] = source + 1
    for k in range(2, ROW_LEN):
        row[k] = 1 + i % (VOCAB - 1)
        i //= VOCAB - 1
    return row
