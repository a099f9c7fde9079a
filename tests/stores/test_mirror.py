"""mirror.py against a real S3 server, folders and kills: what is whole outlives its machine, and of
several machines only one goes on."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import flip, losses, metrics, parameters, read_json, until, write_json
from faults import start
from store_helpers import s3, url  # noqa: F401
from test_checkpoint import TENSORS, assert_same, at, build, names, snapshot, steps_in, train

from config import UsageError
from machinery import disk
from machinery.checkpoint import Checkpointer, why_invalid
from machinery.errors import CheckpointError, DataError, StorageError
from machinery.shards import Manifest
from stores import mirror, stage
from stores.mirror import Lease, Mirror
from stores.store import Store

BIG = f"dcp/{TENSORS}"  # the tensors of a checkpoint
LINE = '{"step": 1}\n'  # of metrics.jsonl


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A lease that is watched for a moment, and renewed no longer than the test lasts."""
    monkeypatch.setattr(mirror, "RENEW_S", 0.05)
    monkeypatch.setattr(mirror, "WATCH_S", 1.0)
    taken = []
    honest = Lease._renew_often
    monkeypatch.setattr(Lease, "_renew_often", lambda own: taken.append(own) or honest(own))
    yield
    for own in taken:
        own._over.set()


class Toy:
    """A model of one matrix and its checkpoints, saved here and in a mirror; by default, in the
    folder `far` beside it."""

    def __init__(self, folder: Path, url=None):  # noqa: F811
        url = folder / "far" if url is None else url
        self.where = (folder, url)
        self.root = folder / "run" / "checkpoints"
        self.log = []
        self.root.mkdir(parents=True, exist_ok=True)
        notes = SimpleNamespace(run_dir=folder / "run", print=self.log.append)
        self.mirror = Mirror(str(url), notes)
        self.store = self.mirror.store
        self.model, self.optimizers = build()
        self.saver = Checkpointer(self.root, mirror=self.mirror, log=self.log.append)

    def save(self, step: int) -> dict:
        train(self.model, self.optimizers, 1)
        self.saver.save(at(step), self.model, self.optimizers)
        self.saver.join(raises=True)
        return snapshot(self.model, self.optimizers)

    def load(self) -> tuple[int, dict]:
        """Into another model: the step, and its state."""
        model, optimizers = build(seed=1)
        trainer = self.saver.resume(model, optimizers)
        return trainer.step, snapshot(model, optimizers)

    def replaced(self) -> "Toy":
        """The machine is gone, its lease has run out; another one knows only the mirror."""
        self.mirror.lease.give_back()
        shutil.rmtree(self.root.parent)
        return Toy(*self.where)

    @property
    def lines(self) -> Path:
        return self.root.parent / "metrics.jsonl"

    def far_steps(self) -> list[int]:
        return sorted(int(n[5:]) for n in self.store.names() if n.startswith("step_"))

    def place(self, step: int) -> str:
        """The folder of a whole checkpoint in the store."""
        name = f"step_{step:08d}"
        return f"{name}/{json.loads(self.store.read(f'{name}/MANIFEST.json'))['copy']}"

    @property
    def text(self) -> str:
        return "\n".join(self.log)


# ------------------------------------------------------------------------------- what it promises
def test_a_checkpoint_outlives_its_machine(url, tmp_path):  # noqa: F811
    """In every kind of store: the newest is restored to the same bits, small files with it; a
    damaged or half copied one is not; retention is as on the disk; and `best` is kept."""
    toy = Toy(tmp_path, url)
    for step in (1, 2, 3, 4):
        toy.lines.write_text(LINE * step)
        state = toy.save(step)
        if step == 1:
            toy.saver.mark_best(1)  # known only after the upload
            if "://" not in url:  # a folder there is a checkpoint for a person, too
                assert why_invalid(tmp_path / "far" / "run" / toy.place(1)) is None
    assert toy.far_steps() == [1, 3, 4] and steps_in(toy.root) == [1, 3, 4]
    assert toy.store.read("best") == b"step_00000001"

    toy = toy.replaced()
    step, found = toy.load()
    assert step == 4 and steps_in(toy.root) == [4]
    assert_same(found, state)
    assert toy.lines.read_text() == LINE * 4

    assert toy.load()[0] == 4 and toy.text.count("restored from") == 1  # the near one is as good
    flip(toy.root / "step_00000004" / BIG, 5)
    toy.lines.write_text(LINE * 9)  # longer than the store's: it stays
    assert toy.load()[0] == 4 and toy.text.count("restored from") == 2
    assert toy.lines.read_text() == LINE * 9

    place = toy.place(4)
    raw = bytearray(toy.store.read(f"{place}/{BIG}"))
    raw[7] ^= 1
    toy.store.write(f"{place}/{BIG}", bytes(raw))
    toy = toy.replaced()
    assert toy.load()[0] == 3 and names(toy.root) == ["step_00000003"]
    toy.store.remove("step_00000003/MANIFEST.json")  # killed while it was copied
    toy.store.remove(f"{place}/{BIG}")
    toy = toy.replaced()
    toy.saver.keep_every = 5
    assert toy.far_steps() == [1, 3, 4] and toy.load()[0] == 1
    for step in (5, 6, 7):
        toy.save(step)
    assert toy.far_steps() == [1, 5, 6, 7]  # what was half copied is gone


def test_no_checkpoint_of_another_run_is_copied(tmp_path, s3):  # noqa: F811
    toy = Toy(tmp_path, s3.url)
    toy.save(1)

    def refuse(path, trainer):
        raise UsageError(f"{path} is another run's, {trainer.step}")

    toy = toy.replaced()
    before = len(s3.requests)
    with pytest.raises(UsageError, match=f"{s3.url}/run/step_00000001"):
        toy.saver.resume(toy.model, toy.optimizers, check=refuse)
    assert names(toy.root) == []
    assert not [path for _, path in s3.requests[before:] if path.endswith(TENSORS)]
    for name in (f"{toy.place(1)}/{BIG}", "step_00000001/MANIFEST.json"):
        toy.store.write(name, b"{}")
        with pytest.raises(CheckpointError):  # all are damaged: never a silent fresh start
            toy.load()
    toy.store.remove("step_00000001/MANIFEST.json")  # its upload was cut short: nothing to lose
    assert toy.saver.resume(toy.model, toy.optimizers) is None and names(toy.root) == []


def test_nothing_outside_the_run_is_sent_or_written(tmp_path):
    """A folder of a stranger's run: what its manifest names, and small files that are links; and
    links in the place of what is restored."""
    toy = Toy(tmp_path)
    mine = tmp_path / "id_rsa"
    mine.write_bytes(b"SECRETKEY")
    toy.save(1)
    path = toy.root / "step_00000001"
    tree = read_json(path / "MANIFEST.json")
    (path / "link").symlink_to(mine)
    tree["files"]["link"] = disk.sha256_of(mine)
    write_json(path / "MANIFEST.json", tree)
    with pytest.raises(DataError):
        toy.mirror.upload(path)
    (toy.root.parent / "config.json").symlink_to(mine)
    os.mkfifo(toy.root.parent / "report.html")
    toy.lines.write_text(LINE * 99)
    toy.saver.finish()
    sent = [p.read_bytes() for p in (tmp_path / "far").rglob("*") if p.is_file()]
    assert not any(b"SECRETKEY" in content for content in sent)

    toy = toy.replaced()
    toy.lines.symlink_to(mine)
    (toy.root / path.name).symlink_to(tmp_path)
    assert toy.load()[0] == 1 and mine.read_bytes() == b"SECRETKEY"
    assert toy.lines.read_text() == LINE * 99


def test_what_a_killed_upload_left_in_a_folder_is_removed(tmp_path):
    """What a machine that lives is writing stays: test_disk.py."""
    toy = Toy(tmp_path)
    toy.save(1)
    far = tmp_path / "far" / "run"
    left = [far / ".tmp-lease-0a1b2c3d", far / toy.place(1) / "dcp" / ".tmp-x-0a1b2c3d"]
    for path in left:
        path.touch()
    assert toy.replaced().load()[0] == 1 and not any(path.exists() for path in left)


def test_a_store_that_fails(tmp_path, s3):  # noqa: F811
    """Saves go on, nothing that is not whole counts, and once it works again, so does the mirror.
    A start stops with one sentence instead of forking the run's history."""
    toy = Toy(tmp_path, s3.url)
    toy.save(1)
    s3.spoil = lambda method, path: "403 AccessDenied"
    toy.save(2)
    (text,) = (line for line in toy.log if "could not upload step_00000002" in line)
    assert s3.url in text and "\n" not in text
    assert steps_in(toy.root) == [1, 2]
    with pytest.raises(StorageError, match=r"\A.+\Z"):
        lease(s3.url)
    toy.saver.root = tmp_path / "elsewhere"
    with pytest.raises(StorageError, match=r"\A.+\Z"):
        toy.load()
    toy.saver.root = toy.root
    s3.spoil = None
    assert toy.mirror.checkpoints() == ["step_00000001"]
    newer = toy.save(3)
    step, found = toy.replaced().load()
    assert step == 3
    assert_same(found, newer)


# ------------------------------------------------------------------------------------- the lease
@pytest.fixture
def stops(monkeypatch):
    """The signals that this process sends itself."""
    sent = []
    monkeypatch.setattr(mirror.os, "kill", lambda pid, signum: sent.append(signum))
    return sent


def lease(url, say=print) -> Lease:  # noqa: F811
    return Lease(Store(str(url)), SimpleNamespace(print=say))


def test_the_second_machine_is_refused_until_the_first_gives_back(tmp_path):
    """Whatever it is called: a host's name and a process id say nothing, and these are one."""
    first = lease(tmp_path)
    with pytest.raises(UsageError, match=f"process {os.getpid()} on"):
        lease(tmp_path)
    first.give_back()
    log = []
    second = lease(tmp_path, log.append)
    assert not log  # it watched nothing
    first.give_back()  # again, and too late: it is another's
    assert first.store.read("lease").startswith(second.id.encode())
    second.give_back()
    assert first.store.read("lease") is None


def test_a_lease_that_nobody_renews_is_taken_over(tmp_path):
    """Whatever it says: there is no refusal for ever, and none by another machine's clock."""
    (tmp_path / "lease").write_bytes(b'\xff {"time": 4e9}')
    log = []
    lease(tmp_path, log.append).give_back()
    assert len(log) == 1 and not (tmp_path / "lease").exists()


def test_of_two_that_start_at_once_one_goes_on(tmp_path, stops, monkeypatch):
    """Both have seen no lease before either writes."""
    pair = [lease(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "read", lambda *args: None)
        pair.append(lease(tmp_path))
    until(lambda: stops)
    time.sleep(5 * mirror.RENEW_S)  # the other goes on
    assert stops == [signal.SIGTERM] and sorted(own.is_ours() for own in pair) == [False, True]


def test_a_checkpoint_counts_last_and_stops_counting_first(tmp_path, monkeypatch):
    """Killed in between, it would else be taken for a whole one."""
    toy = Toy(tmp_path)
    done = []
    for work in (Store.write, Store.remove):
        noting = lambda s, name, *more, work=work: done.append(name) or work(s, name, *more)
        monkeypatch.setattr(Store, work.__name__, noting)
    for step in (1, 2, 3):
        toy.save(step)
    *_, counts, first, last = (name for name in done if name != "lease")
    assert counts == "step_00000003/MANIFEST.json"
    assert (first, last) == ("step_00000001/MANIFEST.json", "step_00000001")


def test_a_store_that_has_lost_the_lease_gets_it_again(tmp_path, stops):
    """With all else, as when a disk is exchanged; nobody has taken over, and the run goes on."""
    toy = Toy(tmp_path)
    toy.save(1)
    (tmp_path / "far" / "run").rename(tmp_path / "away")
    until(lambda: toy.store.read("lease"))
    assert toy.save(2) and stops == [] and toy.far_steps() == [2]


@pytest.mark.parametrize("part", [TENSORS, "run/metrics.jsonl", "step_00000002/MANIFEST.json"])
def test_a_machine_that_wakes_up_damages_nothing(part, tmp_path, monkeypatch):
    """Stopped in mid-upload, before one of its requests, until its successor has published the same
    step: what that has published stays whole, and the newest."""
    monkeypatch.setattr(mirror, "RENEW_S", 60.0)  # the pause holds both threads of a machine
    far = tmp_path / "far"
    old = Toy(tmp_path / "old", far)
    old.lines.write_text("a stale line")
    old.save(1)
    published = []
    honest = Store.write

    def write(store, name, content):
        if store is old.store and part in name and not published:  # it sleeps
            store.remove("lease")  # as a successor does that has watched for long enough
            successor = Toy(tmp_path / "new", far)
            assert successor.load()[0] == 1
            successor.lines.write_text("the line of the successor")
            published.extend([successor, successor.save(2)])
        honest(store, name, content)

    monkeypatch.setattr(Store, "write", write)
    late = old.save(2)
    old.save(3)
    successor, state = published
    whole = [s for s in (1, 2, 3) if old.store.read(f"step_{s:08d}/MANIFEST.json")]
    assert whole == [1, 2]  # of the third there may be files, which nobody reads
    shutil.rmtree(successor.root)
    successor.lines.unlink()
    step, found = successor.load()
    assert step == 2
    line = "the line of the successor"
    if part.endswith("MANIFEST.json"):
        # only the last request makes the late one's copy count, which is whole, too, with its log
        state = late
        line = "a stale line"
    assert_same(found, state)
    assert successor.lines.read_text() == line
    assert successor.save(3) and successor.far_steps()[-1] == 3


# ------------------------------------------------------------------------- machines that are lost

SHORT = ("lease", 0.1, 0.6)  # the lease of the runs below


def newest_in(s3) -> int:  # noqa: F811
    """The step of the newest whole checkpoint in the store; 0: none."""
    far = Store(f"{s3.url}/run")
    return max((int(n[5:]) for n in far.names() if far.read(f"{n}/MANIFEST.json")), default=0)


LIVES = [(1, 12), pytest.param(20, 40, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kills, steps", LIVES)
def test_the_machine_is_lost_at_any_moment(kills, steps, small_data, tmp_path, s3):  # noqa: F811
    """SIGKILL, and run folder and data are gone; the same command elsewhere goes on from the newest
    whole checkpoint in the store, if there is one, and ends with the same bits."""
    draw = random.Random(kills)
    resumed_from = []
    args = ["--steps", steps, "--save_every", 2, "--eval_every", 5]
    plain = tmp_path / "plain" / "run"
    start(small_data, plain, *args).end(0)
    stage.publish(Manifest.load(small_data), f"{s3.url}/data")
    for left in range(kills, -1, -1):  # kills to come
        machine = tmp_path / f"machine_{left}"
        durable = newest_in(s3)
        options = [*args, "--mirror", s3.url, "--stage", machine / "cache"]
        spoil = [SHORT, ("slow", 0.05), ("hold", steps - 1)] if left else [SHORT]
        alive = start(f"{s3.url}/data", machine / "run", *options, spoil=spoil, env=s3.env())
        if left:
            waits = left == 1 or draw.random() < 0.7  # else perhaps before anything is whole
            if waits and durable < steps - 2:
                alive.until(lambda a=alive: " is in s3://" in a.text)
            time.sleep(draw.uniform(0, 1.0))
            alive.kill()
        alive.end(-signal.SIGKILL if left else 0)
        assert "is not used" not in alive.text and "none of the" not in alive.text
        if "resumed at" in alive.text:
            assert f"resumed at step {durable:,} " in alive.text
            taken = [r["step"] for r in metrics(machine / "run", "loss")]
            assert taken == list(range(1, len(taken) + 1)), "the log is whole from the first step"
            resumed_from.append(durable)
        time.sleep(0.1)  # a request that was on its way still arrives
    assert_same(parameters(machine / "run", steps), parameters(plain, steps))
    assert losses(machine / "run") == losses(plain)
    assert resumed_from == sorted(resumed_from) and resumed_from[-1] > 0
    assert newest_in(s3) == steps and Store(s3.url).read("run/lease") is None


def test_a_notice_saves_and_uploads(small_data, tmp_path, s3):  # noqa: F811
    """And the next machine goes on there; not before. Every rank waits for the last upload: a
    launcher kills them all soon after the first has ended."""
    options = ["--save_every", 0, "--mirror", s3.url]
    spoil = [SHORT, ("hold", 3)]
    alive = start(small_data, tmp_path / "a" / "run", *options, world=2, spoil=spoil, env=s3.env())
    alive.until_step(3)
    second = start(small_data, tmp_path / "b" / "run", *options, spoil=[SHORT], env=s3.env())
    assert "is in use by process" in second.end(2)
    codes = []

    def slow(method, path):
        if method == "PUT" and path.endswith("status.json"):
            time.sleep(1)  # a rank that does not wait has ended by now
            codes.extend(alive.codes())

    s3.spoil = slow
    alive.kill(signal.SIGTERM).end(143)
    s3.spoil = None
    assert codes and {*codes} == {None}
    step = newest_in(s3)
    assert 3 <= step < 12
    far = Store(f"{s3.url}/run")
    name = f"step_{step:08d}"
    run = json.loads(far.read(f"{name}/MANIFEST.json"))["run"]
    assert json.loads(far.read(f"{name}/{run}/status.json"))["state"] == "preempted"
    assert far.read("lease") is None
    text = start(small_data, tmp_path / "b" / "run", *options, env=s3.env()).end(0)
    assert f"resumed at step {step}" in text and newest_in(s3) == 12
    # Nowhere, here or in the store, is a secret.
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    contents += far.fs.cat(far.fs.find(far.root)).values()
    assert s3.env()["AWS_SECRET_ACCESS_KEY"].encode() not in b"".join(contents)
