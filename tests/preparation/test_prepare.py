"""prepare_data.py as a user runs it; reliability cases 22 (kills, connections), 25 (bad text)."""

import contextlib
import errno
import gzip
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, environment, flip, read_json, read_lines, until, write_lines
from data_helpers import (
    command,
    documents_of,
    fingerprint,
    hashes,
    in_process,
    manifest_of,
    pieces_of,
    prepare,
    prepare_tiny,
    prepared,
    write_jsonl,
    write_manifest,
    write_parquet,
    write_texts,
)

import config
import prepare_data
from config import DataConfig, UsageError
from machinery import cli, disk, errors, plan
from machinery.shards import Manifest
from model import GPT
from preparation import job, pool, reading, sources, worker
from preparation.reading import Notes
from tokenizer import Tokenizer, split_of


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
    assert hashes(a) == hashes(b) and fingerprint(a) == fingerprint(b)
    assert beginnings(a) == beginnings(b)


def beginnings(folder: Path) -> list[str]:
    return Manifest.load(folder).facts.made["beginnings"].splitlines()


def texts_of(path: Path) -> list[str]:
    return [line["text"] for line in read_lines(path)]


def pieces(folder: Path, split: str) -> list[str]:
    """What stands between two BOS in the rows of a split, decoded."""
    manifest = Manifest.load(folder)
    found = []
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    assert (manifest.token_bytes() == tokenizer.token_bytes).all()
    for shard in manifest.shards(split, 0):
        for row in np.load(folder / shard.file):
            found += [tokenizer.decode(piece[1:]) for piece in pieces_of(row)]
    return [p for p in found if p]


def ids_in(folder: Path, split: str) -> Counter:
    """How often each token is in the rows of a split."""
    files = [folder / shard.file for shard in Manifest.load(folder).shards(split, 0)]
    return Counter(i for file in files for i in np.load(file).ravel().tolist())


def refusal(folder: Path, *options: str, code: int = 2, **how) -> str:
    """The one sentence of a preparation that fails."""
    done = prepare(folder, *options, **how)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    line = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
    assert len(line) == 1, done.stderr
    return line[0]


# ------------------------------------------------------------------------------- the whole
def test_what_is_prepared_is_the_text(jsonl, undisturbed):
    """Every character of every document is in a row, but for the last partial row of each split."""
    manifest = Manifest.load(undisturbed)
    manifest.verify()
    texts = texts_of(jsonl)
    tokenizer = Tokenizer.load(undisturbed / "tokenizer.json")
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
        in_rows += ids_in(undisturbed, split)
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


def test_a_finished_folder_is_left_alone(source, undisturbed):
    before = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")}
    (line,) = prepared(undisturbed, *source).splitlines()
    assert "up to date" in line
    assert {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")} == before


def test_the_split_is_a_choice_and_makes_other_data(source, undisturbed, tmp_path):
    """Of a tokenizer that is given it is none: test_mistakes.py."""
    for words in ("--digits 1", "--keep_marks", "--nfc"):
        said = refusal(undisturbed, *source, *words.split())
        assert "holds other data" in said and "rm -r" in said
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


def test_case_22_a_killed_program_leaves_no_process_and_a_killed_process_is_named(source, tmp_path):
    words = command(tmp_path / "d", *source, "--workers", "2", spoil=BUSY % tmp_path)
    for is_parent in (False, True):
        pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(words, cwd=ROOT, env=environment(), **pipes)
        children = lambda of=process.pid: [
            p for p in children_of(of) if (tmp_path / str(p)).exists()
        ]
        until(lambda found=children: len(found()) == 2)
        children = children()
        os.kill(process.pid if is_parent else children[0], signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
        until(lambda pids=children: not any(map(command_of, pids)))
        assert process.returncode == (-signal.SIGKILL if is_parent else 3), said
        assert "Traceback" not in said and ("a process of the pool died" in said) != is_parent


def children_of(pid: int) -> list[int]:
    """The processes of its pool."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [p for p in found if b"spawn_main" in command_of(p)]


def command_of(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_manifest_that_does_not_say_how_rows_were_packed_is_read(own):
    """It may be of another version: a field that is missing takes its default."""
    tree = manifest_of(own)
    for split in tree["splits"].values():
        for part in split.values():
            del part["packing"]
    write_manifest(own, tree)
    assert "cut 0.00% of them" in prepare_data.report(Manifest.load(own), Notes(), 0.0)


def test_a_manifest_goes_before_its_data_changes(source, own, monkeypatch):
    (own / Manifest.load(own).all_shards()[0].file).unlink()
    stop = mock.Mock(side_effect=errors.DataError("stopped"))
    monkeypatch.setattr(pool, "run_units", stop)
    assert "stopped" in refusal(own, *source, code=3)
    assert not (own / "manifest.json").exists()


def test_case_22_done_units_are_not_redone(source, undisturbed, own):
    (own / "manifest.json").unlink()
    files = sorted((own / ".units").glob("*/docs_*.json"))
    assert len(files) == Manifest.load(undisturbed).facts.sources[0].units > 4
    files[3].unlink()
    for file, damaged in zip(files, (files[0].read_text()[:100], "{}", '{"splits": 0}')):
        file.write_text(damaged)
    os.truncate(own / "train/docs/unit_00004_00.npy", 200)
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
    now = time.time_ns()
    found = []
    for vocab_size, age_s in (("270", 0), ("270", 9), ("271", 9), ("270", 0)):
        path.write_text(text[age_s] * 400)
        os.utime(path, ns=(now, now - age_s * 10**9))
        (folder / "manifest.json").unlink(missing_ok=True)  # as if killed before it was written
        options = ("--val_fraction", "0.3", "--vocab_size", vocab_size)
        prepared(folder, "--source", f"files:{path}", *options)
        found.append(hashes(folder))
    prepared(folder, program=("verify",))
    first, second, third, fourth = found
    assert first == fourth and first != second != third


def test_a_folder_is_prepared_by_one_program_at_a_time(source, own):
    with disk.lock(own, "--data_dir"):
        prepared(own, *source)  # up to date: nothing is changed
        (own / "manifest.json").unlink()
        (own / ".tmp-of_the_other").touch()
        message = refusal(own, *source)
        assert f"{own} is in use by process" in message and "another --data_dir" in message
        assert (own / ".tmp-of_the_other").exists()


def test_sixteen_units_begin_before_the_size_of_one_is_known():
    job = SimpleNamespace(tokens=10**9, shares=(1.0,), units=[(0, u) for u in range(6000)])
    assert [u for _, u in pool.wanted_units(job, {})] == [*range(16)]
    known = {(0, 0): SimpleNamespace(tokens=5 * 10**8)}
    assert [u for _, u in pool.wanted_units(job, known)] == [0, 1]  # two of that size


@contextlib.contextmanager
def cluster(tmp_path: Path, workers: int):
    distributed = pytest.importorskip("distributed")
    file = tmp_path / f"scheduler{time.monotonic_ns()}.json"
    processes = []

    def start(what: str, *options) -> None:
        words = [sys.executable, "-m", f"distributed.cli.dask_{what}", "--no-dashboard", *options]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        env = environment(PYTHONPATH=str(ROOT))
        processes.append(subprocess.Popen(words, cwd=ROOT, env=env, **quiet))

    try:
        start("scheduler", "--host=127.0.0.1", "--port=0", f"--scheduler-file={file}")
        until(lambda: file.exists() and file.read_text().strip().endswith("}"))
        address = read_json(file)["address"]
        for _ in range(workers):
            here = f"--local-directory={tmp_path}"
            start("worker", address, "--nthreads=1", "--no-nanny", here)
        if workers:
            with distributed.Client(address) as client:
                client.wait_for_workers(workers, timeout=60)
        yield address, processes[1:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_case_26_a_cluster_gives_the_same_bytes_if_a_worker_dies(source, undisturbed, tmp_path):
    """Two worker processes; one is stopped with a unit in hand, and then killed by SIGKILL."""
    folder = tmp_path / "d"
    killed = []
    units = Manifest.load(undisturbed).facts.sources[0].units

    def finished() -> int:
        return len(list(folder.glob(".units/*/docs_*.json")))

    with cluster(tmp_path, 2) as (address, workers):

        def kill_one() -> None:
            with contextlib.suppress(AssertionError):  # the other worker does all that it gets
                until(lambda: finished() == units - 1)
            killed.append(finished())
            workers[0].send_signal(signal.SIGKILL)

        workers[0].send_signal(signal.SIGSTOP)
        threading.Thread(target=kill_one, daemon=True).start()
        prepared(folder, *source, "--cluster", address)
    assert killed == [units - 1]  # it held one
    assert_same_data(folder, undisturbed)


def test_a_cluster_that_cannot_be_had_is_one_sentence(source, tmp_path, monkeypatch):
    def refused(address: str) -> str:
        return refusal(tmp_path / "d", *source, "--cluster", address)

    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "requirements-cluster.txt" in refused("tcp://127.0.0.1:1")
    monkeypatch.undo()
    with cluster(tmp_path, 0) as (address, _):
        assert f"dask worker {address}" in refused(address)


def test_tokens_stops_after_enough_units_and_extends(source, undisturbed, tmp_path):
    folder = tmp_path / "d"
    whole = Manifest.load(undisturbed).facts.splits["train"]["docs"].tokens
    prepared(folder, *source, "--tokens", "30k")
    smaller = Manifest.load(folder)
    facts = smaller.facts
    assert facts.sources[0].units < facts.sources[0].units_in_source
    assert 30_000 <= facts.splits["train"]["docs"].tokens < 30_000 + whole / 6
    said = prepared(folder, *source)  # and now everything
    assert hashes(undisturbed).items() <= hashes(folder).items() and "--tokens 30000" in said
    smaller.check()  # a run may be reading all of its rows
    prepared(folder, *source, "--tokens", "30k")
    assert Manifest.load(folder).fingerprint == smaller.fingerprint  # it can go on


# ------------------------------------------------------------------------------ the formats
def test_parquet_is_read_by_its_row_groups_and_from_the_hub(tmp_path):
    """Text, its bytes, or conversations, which may be JSON. The other formats: test_reading.py."""
    texts = texts_of(write_jsonl(tmp_path / "a.jsonl", 150))
    chats = [[{"from": "user", "value": text}] for text in texts]
    lists = [[], *chats[1:]]
    said = ["", *map(json.dumps, chats[1:])]
    for column, turns in (([t.encode() for t in texts], lists), (texts, said)):
        write_parquet(tmp_path / "d.parquet", 20, text=column, messages=turns)
        for kind in ("files:", "hf:file://"):
            place = f"{kind}{tmp_path}/d.parquet"
            assert documents_of(place) == (sorted(texts), {})
            found = sorted([("user", text)] for text in texts[1:])
            assert documents_of(f"{place}#messages") == (found, {"empty documents": 1})


def test_hidden_files_and_loops_are_left_out_and_a_locked_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "._a.txt").write_bytes(b"\0\5\x16\7 of a Mac")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert documents_of(f"files:{tmp_path}")[0] == ["text"]
    (tmp_path / "loop").unlink()
    (tmp_path / "locked").mkdir()
    scandir = os.scandir  # root may read a locked folder, so the refusal is put in

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(errors.DataError, match="locked"):
        documents_of(f"files:{tmp_path}")


@mock.patch.multiple(sources, SMALLEST_UNIT=1000, LARGEST_UNIT=1000)
@mock.patch.multiple(reading, LARGEST_UNIT=1000, MB=300, DOCUMENT=300)
def test_plain_text_of_any_size_is_read_whole(tmp_path):
    """Without line ends as well: in pieces of a few units, whatever the size."""
    rng = random.Random(0)
    for trial in range(40):
        size = rng.choice([0, 1, 299, 300, 301, 5000])
        text = "".join(rng.choices("aé汉👍 " + ("\n" if trial % 3 else "-"), k=size))
        name = tmp_path / (f"{trial}.txt" if trial % 4 else f"{trial}.txt.gz")
        with gzip.open(name, "w") if name.suffix == ".gz" else open(name, "wb") as file:
            file.write(text.encode())
        source = sources.parse(f"files:{name}")
        notes = Notes()
        units, _ = sources.list_units(source)
        units.sort(key=lambda unit: unit["pieces"][0][1])
        parts = [[*sources.documents(source, unit, notes)] for unit in units]
        assert "".join(map("".join, parts)) == text
        assert all(len(document) <= 300 for part in parts for document in part)
        assert name.suffix == ".gz" or max(len("".join(p).encode()) for p in parts) <= 3 * 1000
        assert not [note for note in notes if "UTF-8" in note]


def test_a_long_json_line_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LARGEST_LINE", 5000)
    write(tmp_path / "a.jsonl", ["one", "y" * 30_000, "two", "z" * 4000])
    texts, notes = documents_of(f"files:{tmp_path}/a.jsonl")
    assert texts == ["one", "two", "z" * 4000] and [*notes.values()] == [1]


@pytest.fixture
def chat_set(tmp_path, monkeypatch) -> str:
    """A dataset as the Hub has it, with the splits train and train_sft, in a folder."""
    import huggingface_hub

    (tmp_path / "chat" / "data").mkdir(parents=True)
    for split in ("train", "train_sft"):
        path = tmp_path / "chat" / "data" / f"{split}-00000-of-00001.parquet"
        write_parquet(path, text=[f"{split} {i}" for i in range(5)])
    found = lambda *args, **kwargs: SimpleNamespace(sha=None)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", found)
    return f"hf:{tmp_path}/chat"


def test_the_split_of_a_hub_source_can_be_named(chat_set, tmp_path):
    for end, split in (("", "train"), ("::train_sft", "train_sft"), (":default:train", "train")):
        assert documents_of(chat_set + end)[0] == [f"{split} {i}" for i in range(5)]
    with pytest.raises(errors.DataError, match="nothere.*train_sft.* name"):
        documents_of(f"{chat_set}::nothere")
    options = {"data_dir": str(tmp_path / "d"), "tokens": "1M", "vocab_size": 400, "row_len": 9}
    jobs = [job.plan_job(DataConfig((chat_set + end,), **options)) for end in ("", "::train_sft")]
    assert jobs[0].key != jobs[1].key


def test_a_bug_in_what_reads_a_hub_record_is_no_mistake_of_the_user(chat_set, monkeypatch):
    """Nor is it a source that cannot be read; the library's own errors are."""
    monkeypatch.setattr(sources, "document_of", mock.Mock(side_effect=ValueError("a bug")))
    with pytest.raises(ValueError, match="^a bug$"):
        documents_of(chat_set)


def test_specs():
    parse = sources.parse
    assert parse("files:a/b c.txt").name == "b_c"
    assert parse("files:..").name == parse("..=files:x").name == "files"  # not a folder above
    assert parse("files:" + "x" * 300).name == "x" * 200  # a folder's name as well
    hf = parse("math=hf:Org/set:four@abc#q+a")
    found = (hf.name, hf.place, hf.config, hf.revision, hf.fields)
    assert found == ("math", "Org/set", "four", "abc", ("q", "a"))
    hf = parse("hf:Org/set::train_sft@refs/pr/1")
    assert (hf.name, hf.config, hf.split, hf.revision) == ("set", None, "train_sft", "refs/pr/1")
    hf = parse("hf:https://me:hunter2@host/x.parquet?sig=hunter2")
    assert "hunter2" in hf.place  # it is needed to read it, but kept nowhere
    assert (hf.name, hf.spec) == ("x.parquet", "hf:https://host/x.parquet")


def test_the_list_of_a_hub_source_is_kept(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", 1)
    options = dict(data_dir=str(tmp_path), tokens="1M", vocab_size=400, row_len=65)
    config = DataConfig((f"hf:file://{path}",), **options)
    key = job.plan_job(config).key
    with mock.patch.object(sources, "_hf_load", side_effect=OSError("no network")):
        assert job.plan_job(config).key == key
    [listing] = (tmp_path / ".units").iterdir()
    listing.write_text("{")  # damaged
    assert job.plan_job(config).key == key
    found = [{"shard": 0, "of": 1}], {"revision": "abc", "shards": 1}
    hub = dict(_hf_units=lambda source: found, probe=mock.DEFAULT)
    with mock.patch.multiple(sources, **hub):  # its revision may be named
        named = (replace(config, source=(f"hf:a/b{at}#text",)) for at in ("", "@abc", "@main"))
        assert len({job.plan_job(one).key for one in named}) == 1


def test_stdlib_leaves_installed_packages_out(tmp_path, monkeypatch):
    for name in ("abc.py", "json/decoder.py", "site-packages/numpy/core.py", "page.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    paths = {"stdlib": tmp_path, "purelib": tmp_path / "site-packages"}
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: paths)
    library = {"stdlib/abc.py", "stdlib/json/decoder.py"}
    for place, more in (("stdlib", set()), ("stdlib+site", {"site/numpy/core.py"})):
        assert sources._installed_files(place).keys() == library | more


def test_case_22_a_source_that_stays_away(monkeypatch):
    """The Hub's library tries again, and so do we no more; then a sentence."""
    import datasets

    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 1)
    monkeypatch.setattr(datasets.config, "STREAMING_OPEN_MAX_RETRIES", 1)
    source = sources.parse("hf:http://127.0.0.1:1/a.parquet")
    with pytest.raises(errors.DataError, match=source.place):
        list(sources.documents(source, {"shard": 0, "of": 1}, Notes()))


def test_a_folder_says_what_else_is_in_it_and_the_pattern_that_reads_it(tmp_path):
    folder = tmp_path / "it's {c,h} [1]"
    folder.mkdir()
    for ending in ("c", "h", "R"):
        (folder / f"a.{ending}").write_text(ending)
    (folder / "Makefile").touch()
    with pytest.raises(UsageError, match=r"1 \.h.* names them") as error:
        documents_of(f"files:{folder}")
    write_texts(folder / "texts", 60)
    note = prepare_tiny(tmp_path / "d", "--source", f"x=files:{folder}")
    for said in (str(error.value), note):
        (spec,) = shlex.split(re.search("names them: (.*)", said)[1])
        assert documents_of(spec)[0] == ["R", "c", "h"], said
    assert documents_of(f"files:{folder}/{{.,no}}/*.{{c,md}}")[0] == ["c"]


# --------------------------------------------------------------------- case 25: bad text
NOISE = gzip.compress(random.Random(0).randbytes(20_000))
TEXT = {"a.txt": b"um dois tres " * 300}
CASES = {  # name -> (files, exit code, what the error names, options)
    "deep json": ({"a.jsonl": b'{"text": ' + 100_000 * b"[" + b"\n"}, 3, "a.jsonl", []),
    "bad name": ({os.fsdecode(b"caf\xe9.txt"): b"text"}, 2, "caf\\udce9.txt", []),
    "damaged gz": (
        {"a.txt.gz": NOISE[:10] + bytes(x ^ 255 for x in NOISE[10:])}, 3, "a.txt.gz", []
    ),
    "little text": ({"a.txt": b"um dois"}, 2, "less than one row of 65", []),
    "no validation": (TEXT, 2, "the val split has", ["--val_fraction", "0.00001"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case_25_what_cannot_be_read_is_one_sentence(case, tmp_path, monkeypatch):
    if case == "no validation":
        monkeypatch.setattr(job, "SMALL", 0)  # else a small corpus holds out a row at least
    files, code, named, options = CASES[case]
    folder = tmp_path / "t"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert named in refusal(tmp_path / "d", "--source", f"files:{folder}", *options, code=code)
    assert not (tmp_path / "d" / "manifest.json").exists()


@pytest.mark.parametrize("size, fraction", [(160_000, "0.02"), (90_000, "0.1"), (30_000, "0.02")])
def test_too_little_held_out_is_a_warning_with_remedies_that_work(tmp_path, size, fraction):
    """More text; or a larger share, unless that were most of the text."""
    text = dialogue(tmp_path / "input.txt", size)

    def held_out(folder, fraction) -> tuple[int, str]:
        source = ("--source", f"files:{tmp_path / 'input.txt'}", "--val_fraction", fraction)
        said = prepared(tmp_path / folder, *source)
        parts = Manifest.load(tmp_path / folder).facts.splits
        held, rest = (parts[split]["input"].tokens for split in ("val", "train"))
        assert f"{held:,} tokens, {held / (held + rest):.1%} |" in said
        begins = beginnings(tmp_path / folder)  # of lines, since the only document is divided
        assert begins and all(f"\n{begin}" in text for begin in begins)
        return held, said.partition("warning: only")[2]

    held, warning = held_out("as asked", fraction)
    assert held < prepare_data.ENOUGH and f" {held:,} tokens" in warning
    larger = re.search(r"--val_fraction (\S+)", warning)
    assert bool(larger) == (size > 50_000)
    if larger:
        held, warning = held_out("larger", larger[1])
        assert held >= prepare_data.ENOUGH and not warning
    times = int(re.search(r"give ([\d,]+) times", warning or "give 2 times")[1].replace(",", ""))
    text = dialogue(tmp_path / "input.txt", times * size)
    assert larger or held_out("more", fraction)[0] >= prepare_data.ENOUGH


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
    assert manifest.tokenizer_sha256 == Manifest.load(undisturbed).tokenizer_sha256
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


def test_too_little_disk_is_said_before_any_work(jsonl, source, tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", text=texts_of(jsonl))
    hub = ("--source", f"hf:file://{tmp_path / 'a.parquet'}")
    much = ("--tokens", "900T")
    assert "1,890,000,000.000 MB" in refusal(tmp_path / "d", *hub, *much, code=6)  # 5% of slack
    prepared(tmp_path / "e", *source, *much)  # it has a size, whatever is wanted of it
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
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
def dialogue(path: Path, size: int) -> str:
    """A play in one file, as people bring it first: invented words, each speech with a number."""
    rng = random.Random(size)
    words = ["".join(rng.choices("aeioudglmnprst", k=rng.randint(2, 9))) for _ in range(3000)]
    text = ""
    while len(text) < size:
        number = rng.randrange(10**11, 10**12)
        text += f"ROMEO:\n{number} {' '.join(rng.choices(words, k=40))}.\n\n"
    path.write_text(text[:size])
    return text[:size]


@pytest.mark.parametrize("size", [100_000, 1_100_000])
def test_case_28_one_text_file_gets_a_vocabulary_and_validation_text_of_its_own(size, tmp_path):
    """With the sizes of tiny: rows of 257 tokens, a vocabulary of 2,048."""
    text = dialogue(tmp_path / "input.txt", size)
    options = "--row_len", "257", "--vocab_size", "2048"
    said = prepared(tmp_path / "d", "--source", f"files:{tmp_path / 'input.txt'}", *options)
    manifest = Manifest.load(tmp_path / "d")
    assert manifest.vocab_size == 2048 and "note" not in said
    assert len(re.findall(r"^(?:train|val  ) [\d,]+ pieces of documents \|", said, re.M)) == 2
    train, val = (manifest.facts.splits[split]["input"] for split in ("train", "val"))
    assert 0.02 <= val.bytes / size <= 0.10 and manifest.rows("val") >= 1
    assert train.bytes + val.bytes == size
    # training text is cut only where a piece is held out, and into the pieces that are read
    assert train.documents <= val.documents + 1 + size // 40_000
    found = ["\x00".join(pieces(tmp_path / "d", split)) for split in ("train", "val")]
    assert all(p in text for both in found for p in both.split("\x00") if "\ufffd" not in p)
    in_train, in_val = (set(re.findall(r"\b\d{12}\b", part)) for part in found)
    assert len(in_val) > 5 and not in_train & in_val


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
    (folder / ".tmp-folder" / ".tmp-file").mkdir(parents=True)
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
    assert (folder / ".tmp-folder" / ".tmp-file").is_dir()  # whoever's it is


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
def write(path, texts) -> str:
    write_lines(path, [{"text": text} for text in texts])
    return f"files:{path}"


def test_a_preparation_leaves_duplicates_out(tmp_path):
    texts = [f"document {i % 50}: {'word ' * (20 + i % 50)}" for i in range(75)]
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(6):  # several units
        write(folder / f"{i}.jsonl", texts[i::6])
    words = ("--source", f"files:{folder}", "--dedup", "exact")
    for name, processes in (("one", False), ("two", True)):
        prepare_tiny(tmp_path / name, *words, processes=processes)
    facts = Manifest.load(tmp_path / "one").facts
    assert sum(facts.notes.values()) == 25
    every = in_process("tiny", "--data_dir", tmp_path / "one", *words[:2])
    assert every.returncode == 2 and "holds other data" in every.stderr
    size = sum(by_source["texts"].bytes for by_source in facts.splits.values())
    assert size == sum(len(text.encode()) for text in set(texts))
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
