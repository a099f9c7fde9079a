"""prepare_data.py as a user runs it; reliability cases 22 (kills, connections), 25 (bad text)."""

import contextlib
import errno
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, environment, flip, read_json, read_lines, until, write_lines
from data_helpers import (
    command,
    documents_of,
    fingerprint,
    pieces_of,
    prepare,
    prepared,
    write_jsonl,
    write_texts,
)
from table import read_table

import config
import prepare_data
from config import DataConfig
from machinery import cli, disk, plan
from machinery.errors import DataError
from machinery.shards import Manifest
from model import GPT
from preparation import job, pool, reading, sources, worker
from preparation.reading import Notes
from tokenizer import SPLIT, Tokenizer, split_of


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("text") / "docs.jsonl", 320)


@pytest.fixture(scope="module")
def source(jsonl) -> tuple[str, str]:
    """As options."""
    return "--source", f"files:{jsonl}"


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "d"
    prepared(folder, *source, "--workers", "1")
    return folder


@pytest.fixture
def own(undisturbed, tmp_path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(undisturbed, tmp_path / "d")


def assert_same_data(a: Path, b: Path) -> None:
    assert fingerprint(a) == fingerprint(b) and beginnings(a) == beginnings(b)
    Manifest.load(a).verify()


def beginnings(folder: Path) -> list[str]:
    return Manifest.load(folder).facts.made["beginnings"].splitlines()


def rows_of(folder: Path, split: str) -> np.ndarray:
    """As numpy reads them."""
    return np.concatenate(
        [np.load(folder / s.file) for s in Manifest.load(folder).shards(split, 0)]
    )


def pieces(folder: Path, split: str) -> list[str]:
    """What stands between two BOS in the rows of a split, decoded."""
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    found = [piece[1:] for row in rows_of(folder, split) for piece in pieces_of(row)]
    return [tokenizer.decode(piece) for piece in found if piece]


def refusal(folder: Path, *options: str, code: int = 2, **how) -> str:
    """The one sentence of a preparation that fails."""
    done = prepare(folder, *options, **how)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    (line,) = re.findall("^error: .*", done.stderr, re.MULTILINE)
    return line


# ------------------------------------------------------------------------------- the whole
def test_what_is_prepared_is_the_text(jsonl, undisturbed):
    """Every character of every document is in a row, but for the last partial row of each split."""
    manifest = Manifest.load(undisturbed)
    manifest.verify()
    texts = [record["text"] for record in read_lines(jsonl)]
    tokenizer = Tokenizer.load(undisturbed / "tokenizer.json")
    assert (manifest.token_bytes() == tokenizer.token_bytes).all()
    in_text = Counter(i for t in texts for i in tokenizer.encode(t))
    in_rows = Counter()
    documents = size = lost = 0
    for split, by_source in manifest.facts.splits.items():
        facts = by_source["docs"]
        dropped = facts.packing["dropped"]
        assert 0 <= dropped < manifest.row_len
        assert manifest.rows(split) * 65 == facts.tokens - dropped + facts.packing["bos"]
        whole = [p for p in pieces(undisturbed, split) if "\ufffd" not in p]
        assert all(p in "\x00".join(texts) for p in whole)
        documents += facts.documents
        size += facts.bytes
        lost += dropped
        in_rows.update(rows_of(undisturbed, split).ravel().tolist())
    assert documents == 320 and size == sum(len(t.encode()) for t in texts)
    trained = pieces(undisturbed, "train")
    for begin in beginnings(undisturbed):
        assert any(re.match(rf"{begin}\s", text) for text in texts)
        assert not any(piece.startswith(begin) for piece in trained)
    del in_rows[0]  # BOS
    assert not in_rows - in_text and (in_text - in_rows).total() == lost


def test_first_words_are_whole():
    for text, words in (
        ("\ufeff\n \t Era uma vez um rei, que morava\nlonge", "Era uma vez um rei, que morava"),
        ("Era uma vez um rei, que morava longe", "Era uma vez um rei, que morava"),
        ("今天🎉天" * 10**6, "今天🎉天" * 8),
        ("\n" * 10**6, ""),
    ):
        assert worker.first_words(text) == words


def test_a_finished_folder_is_left_alone_and_one_program_at_a_time_prepares_it(source, own):
    with disk.lock(own, "--data_dir"):
        before = {p: p.stat().st_mtime_ns for p in own.rglob("*")}
        assert "up to date" in prepared(own, *source)
        assert {p: p.stat().st_mtime_ns for p in own.rglob("*")} == before
        (own / "manifest.json").unlink()
        (own / ".tmp-of_the_other").touch()
        message = refusal(own, *source)
        assert f"{own} is in use by process" in message and "another --data_dir" in message
        assert (own / ".tmp-of_the_other").exists()


def test_the_split_is_a_choice_and_makes_other_data(source, undisturbed, tmp_path):
    """Of a tokenizer that is given it is none: test_mistakes.py."""
    for words in ("--digits 1", "--nfc"):
        said = refusal(undisturbed, *source, *words.split())
        assert "holds other data" in said and "rm -r" in said
    text = write_texts(tmp_path / "text")
    (text / "hindi.txt").write_text("नमस्ते दुनिया\n" * 1000, encoding="utf-8")
    prepared(tmp_path / "marks", "--source", f"files:{text}")
    assert Tokenizer.load(tmp_path / "marks" / "tokenizer.json").split == SPLIT
    prepared(tmp_path / "one", *source, "--digits", "1")
    tokenizer = tmp_path / "one" / "tokenizer.json"
    assert Tokenizer.load(tokenizer).split == split_of(digits=1, combining=False)
    prepared(tmp_path / "same", *source, "--digits", "1", "--tokenizer", str(tokenizer))
    assert (tmp_path / "same" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def test_data_of_an_older_library_is_kept_while_it_is_whole(tmp_path, monkeypatch):
    """Its text is gone, so what is missing of it cannot be made again: all of it is made anew."""
    folder = tmp_path / "d"
    source = ("--source", "stdlib")
    texts = write_texts(tmp_path / "library")
    library = {path.name: path for path in texts.iterdir()}
    monkeypatch.setattr(sources, "_installed_files", lambda place: library)
    prepared(folder, *source)
    made = fingerprint(folder)
    (texts / "0000.txt").write_text("another Python")
    assert "have changed since" in prepared(folder, *source)
    assert fingerprint(folder) == made
    path = folder / Manifest.load(folder).shards("train", 0)[0].file
    flip(path)
    assert path.name in refusal(folder, code=3, program=("verify",))
    path.unlink()
    assert f"{path} cannot be read" in prepare(folder, *source).stderr
    assert fingerprint(folder) != made
    prepared(folder, program=("verify",))


# ----------------------------------------------------------------------- case 22: any history
KILLED = """
import os, signal
from preparation import pool
honest = pool.next_unit
def next_unit(job, done, running):
    return os.kill(os.getpid(), signal.SIGKILL) if len(done) >= %d else honest(job, done, running)
pool.next_unit = next_unit
"""
BUSY = """
from preparation import pool
code = "import os, time; open('%s/' + str(os.getpid()), 'w'); time.sleep(600)"
pool.work, pool.task_of = exec, lambda *unit: (code,)
"""


def test_case_22_killed_among_its_units_and_rerun(source, undisturbed, tmp_path):
    """SIGKILL after 1 and after 6 finished units, with 1 process and with 2: the same bytes."""
    folder = tmp_path / "d"
    for processes, finished in ((1, 1), (2, 6)):
        words = command(folder, *source, "--workers", str(processes), spoil=KILLED % finished)
        done = subprocess.run(words, cwd=ROOT, capture_output=True, env=environment())
        assert done.returncode == -signal.SIGKILL and not (folder / "manifest.json").exists()
    prepared(folder, *source, processes=True)
    assert_same_data(folder, undisturbed)


@pytest.mark.parametrize("is_parent", [False, True])
def test_case_22_a_killed_program_leaves_no_process_and_a_killed_process_is_named(
    is_parent, source, tmp_path
):
    pids = tmp_path / "pids"
    pids.mkdir()
    words = command(tmp_path / "d", *source, "--workers", "2", spoil=BUSY % pids)
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), **pipes)
    until(lambda: len([*pids.iterdir()]) == 2)
    # The first is killed: that the last one has ended, the pool sees only after another's result.
    children = sorted(int(path.name) for path in pids.iterdir())
    os.kill(process.pid if is_parent else children[0], signal.SIGKILL)
    said = process.communicate(timeout=60)[1]
    until(lambda: not any(map(command_of, children)))
    assert process.returncode == (-signal.SIGKILL if is_parent else 3), said
    assert "Traceback" not in said and ("a process of the pool died" in said) != is_parent


def command_of(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_case_22_done_units_are_not_redone(source, undisturbed, own):
    """The manifest goes before its data changes."""
    os.truncate(own / "train/docs/unit_00004_00.npy", 200)
    with mock.patch.object(pool, "run_units", side_effect=DataError("stopped")):
        assert "stopped" in refusal(own, *source, code=3)
    files = sorted((own / ".units").glob("*/docs_*.json"))
    assert len(files) > 5 and not (own / "manifest.json").exists()
    files[3].unlink()
    for file, damaged in zip(files, (files[0].read_text()[:100], "{}", '{"splits": 0}')):
        file.write_text(damaged)
    times = {p: p.stat().st_mtime_ns for p in own.glob("*/*/unit_*.npy")}
    prepared(own, *source)
    redone = {p.name for p in times if p.stat().st_mtime_ns != times[p]}
    ends = ("npy", "crc32.npy")
    assert redone == {f"unit_{i:05d}_00.{end}" for i in range(5) for end in ends}
    assert fingerprint(own) == fingerprint(undisturbed)


def test_two_unfinished_preparations_in_one_folder_do_not_mix(tmp_path, monkeypatch):
    """Of other options, or of another text of the same size and with an old time, as a copy may
    keep it. Their shards have the same names, and most of them the same size."""
    monkeypatch.setattr(job, "SMALL", 0)  # what is held out is not fitted to the text
    path = tmp_path / "a.txt"
    folder = tmp_path / "d"
    text = {0: "the cat sat on the mat ", 9: "she had few big red dog"}
    now = time.time()
    found = []
    for vocab_size, age_s in (("270", 0), ("270", 9), ("271", 9), ("270", 0)):
        path.write_text(text[age_s] * 400)
        os.utime(path, (now, now - age_s))
        (folder / "manifest.json").unlink(missing_ok=True)  # as if killed before it was written
        options = ("--val_fraction", "0.3", "--vocab_size", vocab_size)
        prepared(folder, "--source", f"files:{path}", *options)
        found.append(fingerprint(folder))
    prepared(folder, program=("verify",))
    first, second, third, fourth = found
    assert first == fourth and first != second != third


def test_sixteen_units_begin_before_the_size_of_one_is_known():
    job = SimpleNamespace(tokens=10**9, shares=(1.0,), units=[(0, u) for u in range(6000)])
    known = {(0, 0): SimpleNamespace(tokens=5 * 10**8)}
    for done, count in (({}, 16), (known, 2)):  # two of that size
        assert [*pool.wanted_units(job, done)] == job.units[:count]


@pytest.fixture
def dask():
    """A function that starts a scheduler, or a worker of one."""
    processes = []

    def start(what: str, *options) -> subprocess.Popen:
        words = [sys.executable, "-m", f"distributed.cli.dask_{what}", "--no-dashboard", *options]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        env = environment(PYTHONPATH=str(ROOT))
        processes.append(subprocess.Popen(words, cwd=ROOT, env=env, **quiet))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_case_26_a_cluster_gives_the_same_bytes_if_a_worker_dies(
    source, undisturbed, tmp_path, dask
):
    """Two worker processes; one is stopped with a unit in hand, and then killed by SIGKILL. Before
    there are any, that is said."""
    distributed = pytest.importorskip("distributed")
    folder = tmp_path / "d"
    file = tmp_path / "scheduler.json"
    dask("scheduler", "--host=127.0.0.1", "--port=0", f"--scheduler-file={file}")
    until(lambda: file.exists() and file.read_text().strip().endswith("}"))
    address = read_json(file)["address"]
    assert f"dask worker {address}" in refusal(folder, *source, "--cluster", address)
    here = f"--local-directory={tmp_path}"
    workers = [dask("worker", address, "--nthreads=1", "--no-nanny", here) for _ in range(2)]
    with distributed.Client(address) as client:
        client.wait_for_workers(2, timeout=60)
    workers[0].send_signal(signal.SIGSTOP)
    killer = threading.Timer(3, workers[0].kill)  # the other one takes less
    killer.start()
    prepared(folder, *source, "--cluster", address)
    assert not killer.is_alive()  # the first one held a unit
    assert_same_data(folder, undisturbed)


def test_without_dask_its_requirements_are_named(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "requirements-cluster.txt" in refusal(tmp_path, *source, "--cluster", "tcp://h:1")


def test_tokens_stops_after_enough_units_and_extends(source, undisturbed, tmp_path):
    folder = tmp_path / "d"
    prepared(folder, *source, "--tokens", "30k")
    smaller = Manifest.load(folder)
    facts = smaller.facts
    assert facts.sources[0].units < facts.sources[0].units_in_source
    assert 30_000 <= facts.splits["train"]["docs"].tokens < 45_000
    said = prepared(folder, *source)  # and now everything
    assert "--tokens 30000" in said and fingerprint(folder) == fingerprint(undisturbed)
    smaller.check()  # a run may be reading all of its rows
    prepared(folder, *source, "--tokens", "30k")
    assert Manifest.load(folder).fingerprint == smaller.fingerprint  # it can go on


# ------------------------------------------------------------------------------ the formats
def test_parquet_is_read_by_its_row_groups_and_from_the_hub(tmp_path):
    """Text, its bytes, or conversations, which may be JSON. The other formats: test_reading.py."""
    texts = [f"ação {i}" for i in range(10, 60)]
    chats = [[], *([{"from": "user", "value": text}] for text in texts[1:])]
    said = ["", *map(json.dumps, chats[1:])]
    for column, turns in (([t.encode() for t in texts], chats), (texts, said)):
        table = pa.table(dict(text=column, messages=turns))
        pq.write_table(table, tmp_path / "d.parquet", 20)
        for kind in ("files:", "hf:file://"):
            place = f"{kind}{tmp_path}/d.parquet"
            assert documents_of(place) == (texts, {})
            found = [[("user", text)] for text in texts[1:]]
            assert documents_of(f"{place}#messages") == (found, {"empty documents": 1})


def test_hidden_files_and_loops_are_left_out_and_a_locked_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "._a.txt").write_bytes(b"\0\5\x16\7 of a Mac")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert documents_of(f"files:{tmp_path}")[0] == ["text"]
    # root may read a locked folder, so the refusal is put in
    locked = PermissionError(errno.EACCES, "locked")
    monkeypatch.setattr(os, "scandir", mock.Mock(side_effect=locked))
    with pytest.raises(DataError, match="locked"):
        documents_of(f"files:{tmp_path}")


@mock.patch.multiple(sources, SMALLEST_UNIT=1000, LARGEST_UNIT=1000)
@mock.patch.multiple(reading, LARGEST_UNIT=1000, MB=300, DOCUMENT=300)
def test_plain_text_of_any_size_is_read_whole(tmp_path):
    """Without line ends as well: in pieces of a few units, whatever the size."""
    rng = random.Random(0)
    for trial in range(40):
        size = rng.choice([0, 1, 299, 300, 301, 5000])
        text = "".join(rng.choices("aé汉👍 " + ("\n" if trial % 3 else "-"), k=size))
        path = tmp_path / (f"{trial}.txt" if trial % 4 else f"{trial}.txt.gz")
        path.write_bytes(text.encode() if trial % 4 else gzip.compress(text.encode()))
        source = sources.parse(f"files:{path}")
        notes = Notes()
        units, _ = sources.list_units(source)
        units.sort(key=lambda unit: unit["pieces"][0][1])
        parts = [[*sources.documents(source, unit, notes)] for unit in units]
        assert "".join(map("".join, parts)) == text and {*notes} <= {"empty files"}
        assert all(len(document) <= 300 for part in parts for document in part)
        assert trial % 4 == 0 or max(len("".join(p).encode()) for p in parts) <= 3 * 1000


def key_of(spec: str, folder: Path) -> str:
    """Of the job that prepares this source."""
    options = dict(data_dir=str(folder), tokens="1M", vocab_size=400, row_len=65)
    return job.plan_job(DataConfig((spec,), **options)).key


def test_the_split_of_a_hub_source_can_be_named(tmp_path, monkeypatch):
    """Of a dataset as the Hub has it, with the splits train and train_sft, in a folder. A bug in
    what reads a record is no mistake of the user, nor a source that cannot be read."""
    import huggingface_hub

    (tmp_path / "chat" / "data").mkdir(parents=True)
    for split in ("train", "train_sft"):
        path = tmp_path / "chat" / "data" / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.table({"text": [f"{split} {i}" for i in range(5)]}), path)
    found = lambda *args, **kwargs: SimpleNamespace(sha=None)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", found)
    spec = f"hf:{tmp_path}/chat"
    for end, split in (("", "train"), ("::train_sft", "train_sft"), (":default:train", "train")):
        assert documents_of(spec + end)[0] == [f"{split} {i}" for i in range(5)]
    with pytest.raises(DataError, match="nothere.*train_sft.* name"):
        documents_of(f"{spec}::nothere")
    assert key_of(spec, tmp_path) != key_of(f"{spec}::train_sft", tmp_path)
    monkeypatch.setattr(sources, "document_of", mock.Mock(side_effect=ValueError("a bug")))
    with pytest.raises(ValueError, match="^a bug$"):
        documents_of(spec)


SPECS = """
files:a/b c.txt => name b_c
no folder above:
files:.. => name files
..=files:x => name files
math=hf:Org/set:four@abc#q+a => name math | place Org/set | config four | revision abc
hf:Org/set#q+a => fields ('q', 'a')
hf:Org/set::train_sft@refs/pr/1 => name set | config None | split train_sft | revision refs/pr/1
a password is needed to read it, but kept nowhere:
hf:https://me:pw@host/x.parquet?sig=pw => place https://me:pw@host/x.parquet?sig=pw
hf:https://me:pw@host/x.parquet?sig=pw => name x.parquet | spec hf:https://host/x.parquet
"""


def test_specs():
    for spec, facts in read_table(SPECS):
        source = sources.parse(spec)
        for name, value in (fact.split(" ", 1) for fact in facts):
            assert str(getattr(source, name)) == value, spec
    assert sources.parse("files:" + "x" * 300).name == "x" * 200  # a folder's name as well


def test_the_list_of_a_hub_source_is_kept(tmp_path):
    """So a preparation goes on without a network, as far as it needs no text."""
    spec = f"hf:file://{write_jsonl(tmp_path / 'a.jsonl', 1)}"
    key = key_of(spec, tmp_path)
    with mock.patch.object(sources, "_hf_load", side_effect=OSError("no network")):
        assert key_of(spec, tmp_path) == key
        with pytest.raises(DataError, match="a.jsonl cannot be read .*no network"):
            [*sources.documents(sources.parse(spec), {"shard": 0, "of": 1}, Notes())]
    [listing] = (tmp_path / ".units").iterdir()
    listing.write_text("{")  # damaged
    assert key_of(spec, tmp_path) == key
    found = [{"shard": 0, "of": 1}], {"revision": "abc", "shards": 1}
    hub = dict(_hf_units=lambda source: found, probe=mock.DEFAULT)
    with mock.patch.multiple(sources, **hub):  # its revision may be named
        assert len({key_of(f"hf:a/b{at}#text", tmp_path) for at in ("", "@abc", "@main")}) == 1


def test_stdlib_leaves_installed_packages_out(tmp_path, monkeypatch):
    for name in ("json/decoder.py", "site-packages/numpy/core.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    paths = {"stdlib": tmp_path, "purelib": tmp_path / "site-packages"}
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: paths)
    assert [*sources._installed_files("stdlib")] == ["stdlib/json/decoder.py"]
    both = ["stdlib/json/decoder.py", "site/numpy/core.py"]
    assert [*sources._installed_files("stdlib+site")] == both


# --------------------------------------------------------------------- case 25: bad text


@pytest.mark.parametrize(
    "text, named",
    [("um dois", "less than one row of 65"), ("um dois tres " * 300, "the val split has")],
)
def test_case_25_too_little_text_is_one_sentence(text, named, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "SMALL", 0)  # else a small corpus holds out a row at least
    (tmp_path / "a.txt").write_text(text)
    words = ("--source", f"files:{tmp_path}/a.txt", "--val_fraction", "0.00001")
    assert named in refusal(tmp_path / "d", *words)
    assert not (tmp_path / "d" / "manifest.json").exists()


def test_a_larger_text_holds_out_a_row_at_least(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "SMALL", 100_000)
    dialogue(tmp_path / "input.txt", 160_000)
    config = DataConfig((str(tmp_path / "input.txt"),), val_fraction=1e-4, row_len=65)
    assert job.plan_job(config).val_below > 1e-3 * 2**64


def test_shares_of_the_tokens_wanted_with_an_existing_tokenizer(jsonl, undisturbed, tmp_path):
    write_jsonl(tmp_path / "books.jsonl", 320, seed=1)
    places = f"web=files:{jsonl}", f"books=files:{tmp_path / 'books.jsonl'}"
    asked = ("--tokens", "60k", "--tokenizer", str(undisturbed / "tokenizer.json"))
    prepared(tmp_path / "d", *asked, "--source", *places, "--mixture", "web=3", "books=1")
    manifest = Manifest.load(tmp_path / "d")
    assert manifest.sources == ["web", "books"] and manifest.rows("val", 0) > 0
    for name, wanted in (("web", 45_000), ("books", 15_000)):
        # at least, and a source goes on to the end of its last unit
        assert wanted <= manifest.facts.splits["train"][name].tokens < wanted + 15_000


def test_a_presets_mixture_shares_its_own_sources_only(monkeypatch):
    asked = []
    mixture = config.PRESETS["biatron-345m"].train.mixture
    monkeypatch.setattr(prepare_data, "prepare", asked.append)
    for words in ([], ["--mixture", "a=1"], ["--source", "stdlib"]):
        prepare_data.main(["biatron-345m", *words])
    assert [c.mixture for c in asked] == [mixture, ("a=1",), ()]


def test_too_little_disk_is_said_before_any_work(source, tmp_path, full_disk):
    pq.write_table(pa.table({"text": ["um dois"] * 9}), tmp_path / "a.parquet")
    hub = ("--source", f"hf:file://{tmp_path / 'a.parquet'}")
    much = ("--tokens", "900T")
    assert "1,890,000,000.000 MB" in refusal(tmp_path / "d", *hub, *much, code=6)  # 5% of slack
    prepared(tmp_path / "e", *source, *much)  # it has a size, whatever is wanted of it
    full_disk(100_000)
    assert "are free" in refusal(tmp_path / "f", *source, code=6)


def test_each_preset_prepares_what_it_trains_on():
    for name, preset in config.PRESETS.items():
        assert preset.model.vocab_size == preset.data.vocab_size, name
        assert preset.model.seq_len == preset.data.row_len - 1, name
        with torch.device("meta"):
            groups = GPT(preset.model).param_groups()
        params = {kind: sum(p.numel() for p in ps) for kind, ps in groups.items()}
        trained = plan.steps_for(preset.train, params) * preset.train.tokens_per_step
        prepared = cli.count(preset.data.tokens)
        remote = any(sources.parse(spec).remote for spec in preset.data.source)
        assert trained <= prepared < 1.05 * trained if remote else not prepared, name


# --------------------------------------------------------------------------- one text file
def dialogue(path: Path, size: int):
    """A play in one file, as people bring it first: invented words, each speech with a number."""
    rng = random.Random(size)
    words = ["".join(rng.choices("aeioudglmnprst", k=rng.randint(2, 9))) for _ in range(3000)]
    text = ""
    while len(text) < size:
        number = rng.randrange(10**11, 10**12)
        text += f"ROMEO:\n{number} {' '.join(rng.choices(words, k=40))}.\n\n"
    path.write_text(text[:size])


@pytest.mark.parametrize("size, fraction", [(200_000, "0.1"), (30_000, "0.05")])
def test_case_28_one_text_file_is_divided_and_too_little_of_it_is_a_warning(
    size, fraction, tmp_path
):
    """With the sizes of tiny. The warning's remedies work: more text; or a larger share, unless
    that were most of the text."""
    path = tmp_path / "input.txt"

    def held_out(folder: Path) -> tuple[int, str]:
        sizes = ("--row_len", "257", "--vocab_size", "2048", "--val_fraction", fraction)
        said = prepared(folder, "--source", f"files:{path}", *sizes)
        text = path.read_text()
        manifest = Manifest.load(folder)
        train, val = (manifest.facts.splits[split]["input"] for split in ("train", "val"))
        assert manifest.vocab_size == 2048 and "note" not in said
        assert f"{val.tokens:,} tokens, {val.tokens / (val.tokens + train.tokens):.1%} |" in said
        assert said.count(" texts |") == 2
        share = max(float(fraction), 8 * 257 / len(text))  # a row at least
        assert share <= val.bytes / len(text) < share + 1 / 32
        assert train.bytes + val.bytes == len(text)
        # training text is cut only where a piece is held out, and into the pieces that are read
        assert train.documents <= val.documents + 1 + len(text) // 40_000
        begins = beginnings(folder)  # of lines
        assert begins and all(f"\n{begin}" in text for begin in begins)
        found = [pieces(folder, split) for split in ("train", "val")]
        assert all(p in text for both in found for p in both[:500] if "\ufffd" not in p)
        in_train, in_val = (set(re.findall(r"\b\d{12}\b", "\x00".join(part))) for part in found)
        assert len(in_val) > 3 and not in_train & in_val
        return val.tokens, said.partition("warning: only")[2]

    dialogue(path, size)
    held, warning = held_out(tmp_path / "as asked")
    assert held < prepare_data.ENOUGH and f" {held:,} tokens" in warning
    larger = re.search(r"--val_fraction (\S+)", warning)
    assert bool(larger) == (size > 50_000)
    if larger:
        fraction = larger[1]
    else:
        times = re.search(r"give ([\d,]+) times", warning)[1]
        dialogue(path, int(times.replace(",", "")) * size)
    held, warning = held_out(tmp_path / "as told")
    assert held >= prepare_data.ENOUGH and not warning


def test_a_tokenizer_reads_all_of_a_few_files_and_a_page_of_each_of_many(tmp_path, monkeypatch):
    for i in range(4):
        dialogue(tmp_path / f"{i}.txt", 15_000 + i)
    monkeypatch.setattr(prepare_data, "TOKENIZER_DOC_CHARS", 1000)
    asked = DataConfig((f"files:{tmp_path}",), vocab_size=4096, row_len=513)
    read = lambda: sum(map(len, prepare_data.tokenizer_sample(job.plan_job(asked))))
    assert 0.85 * 60_000 < read() < 0.98 * 60_000  # what is held out it does not see
    monkeypatch.setattr(prepare_data, "TOKENIZER_CHARS", 20_000)
    assert 20_000 <= read() < 20_010
    monkeypatch.setattr(job, "FEW_FILES", 4)
    assert read() == 3 * 1000  # of four documents, one is held out


@pytest.mark.parametrize("name", [".units", "train", "train/docs", ".units/x", ".tmp-x"])
def test_a_link_in_the_folder_leads_nowhere(name, source, tmp_path):
    """A data folder may be a stranger's: nothing behind a link is deleted or written."""
    mine = tmp_path / "mine"
    folder = tmp_path / "d"
    (mine / "docs").mkdir(parents=True)
    (mine / "leftover_00.npy").touch()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(mine)
    done = prepare(folder, *source)
    assert done.returncode == (0 if name.endswith("x") else 3), done.stderr
    if name == ".units":  # nor is the list of a Hub source
        with mock.patch.object(sources, "_hf_units", lambda source: ([{}], {})):
            refusal(folder, "--source", "hf:a/b", "--tokens", "1M", code=3)
    assert sorted(p.name for p in mine.rglob("*")) == ["docs", "leftover_00.npy"]


def test_a_start_removes_nothing_of_others(source, tmp_path):
    """The folder holds another preparation, a run that saves, somebody's pictures."""
    folder = tmp_path / "data"
    digits = "0123456789abcdef"
    others = f"""other/.tmp-manifest.json-0a1b2c3d other/train/docs/.tmp-unit.npy-0a1b2c3d
        other/.units/{digits}/.tmp-docs_00000.json-0a1b2c3d runs/x/.tmp-step_1-0a1b2c3d/dcp
        train/cats/leftover_1.jpg train/docs/.tmp-mine train/docs/leftover_mine .tmp-1 .units/mine/x
        train/docs/leftover_of/mine videos/docs/leftover_2 .units_of_mine/x
        val/docs/leftover_0a1b2c3d_00001_00.npy"""
    left = f""".tmp-manifest.json-0a1b2c3d train/docs/.tmp-unit_00000_00.npy-0a1b2c3d
        .units/{digits}/docs_00000.json .units/.tmp-remote-0a1b2c3d"""
    for name in (others + " " + left).split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    prepared(folder, *source)
    assert [name for name in others.split() if not (folder / name).exists()] == []
    assert [name for name in left.split() if (folder / name).exists()] == []


# ------------------------------------------------------------------------------ duplicates: --dedup


def test_a_preparation_leaves_duplicates_out(tmp_path):
    texts = [f"document {i % 50}: {'word ' * (300 + i % 50)}" for i in range(75)]
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(6):
        write_lines(folder / f"{i}.jsonl", [{"text": text} for text in texts[i::6]])
    words = ("--source", f"files:{folder}", "--val_fraction", "0.2", "--workers", "2")
    for name, processes in (("one", False), ("two", True)):
        prepared(tmp_path / name, *words, "--dedup", "exact", processes=processes)
    facts = Manifest.load(tmp_path / "one").facts
    assert sum(facts.notes.values()) == 25 and facts.sources[0].units > 1
    assert "holds other data" in refusal(tmp_path / "one", *words)
    size = sum(by_source["texts"].bytes for by_source in facts.splits.values())
    assert size == sum(len(text.encode()) for text in set(texts))
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
