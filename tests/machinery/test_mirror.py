"""mirror.py and store.py against a real S3 server that fails in every way, and against kills of
trainers whose machine is lost with them."""

import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import flip, losses, metrics, parameters, run, starts
from faults import start
from store_helpers import error, open_mirror, s3_server, until
from test_checkpoint import assert_same, build, names, snapshot, steps_in, train

from config import UsageError
from machinery import checkpoint, cli, mirror, ranks, store
from machinery.checkpoint import Checkpointer
from machinery.errors import CheckpointError, StorageError

BIG = "dcp/__0_0.distcp"  # the tensors of a checkpoint
pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server, monkeypatch, request):
    """The server, in working order and for this process too; `.url` is this test's own folder."""
    import s3fs

    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "s3", json.loads(server.env()["FSSPEC_S3"]))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(store, "PAUSES_S", (0.05, 0.05))
    monkeypatch.setattr(mirror, "SETTLE_S", 0.02)
    server.spoil = None
    server.folder = request.node.name.partition("[")[0] + str(random.random())[2:8]
    server.url = f"s3://runs/{server.folder}"
    yield server
    server.spoil = None


@pytest.fixture(params=["s3", "folder", "memory"])
def url(request, tmp_path, monkeypatch):
    """The URL of a folder in each kind of store."""
    monkeypatch.setattr(mirror, "SETTLE_S", 0.02)
    if request.param == "s3":
        return request.getfixturevalue("s3").url
    return {"folder": str(tmp_path / "far"), "memory": f"memory://{tmp_path.name}"}[request.param]


class Toy:
    """A model of one matrix and its checkpoints, saved here and in a mirror."""

    def __init__(self, folder: Path, url: str, log: list, minutes: float = 0.0):
        self.root, self.log = folder / "run" / "checkpoints", log
        self.root.mkdir(parents=True, exist_ok=True)
        self.mirror = open_mirror(url, log, minutes, folder / "run")
        self.model, self.optimizers = build()
        self.saver = Checkpointer(self.root, mirror=self.mirror, log=log.append)

    def save(self, step: int, flush: bool = True) -> dict:
        train(self.model, self.optimizers, 1)
        self.saver.save(step, self.model, self.optimizers, {}, wait=True)
        if flush:
            self.mirror.flush(20)
        return snapshot(self.model, self.optimizers)

    def load(self) -> tuple[int, dict]:
        """Into another model: the step, and its state."""
        model, optimizers = build(seed=1)
        trainer = self.saver.resume(model, optimizers)
        return trainer["step"], snapshot(model, optimizers)

    def lose(self) -> None:
        """The machine is gone, and so is its process."""
        self.mirror._over.set()
        self.mirror._renewer.join(10)
        self.mirror.store.remove("lease.json")
        shutil.rmtree(self.root.parent)


def far_steps(toy: Toy) -> list[int]:
    return sorted(int(n[5:]) for n in toy.mirror.store.sizes() if n.startswith("step_"))


# ------------------------------------------------------------------------------- what it promises


def test_a_checkpoint_outlives_its_machine(url, tmp_path):
    """In every kind of store: the newest is restored to the same bits, small files with it; a
    damaged or half copied one is not; retention is as on the disk; and `best` is kept."""
    log: list[str] = []
    toy = Toy(tmp_path, url, log)
    lines = toy.root.parent / "metrics.jsonl"
    for step in (1, 2, 3, 4):
        lines.write_text("".join(f'{{"step": {s}}}\n' for s in range(1, step + 1)))
        state = toy.save(step)
        if step == 1:
            toy.saver.mark_best(1)
    assert far_steps(toy) == [1, 3, 4] and steps_in(toy.root) == [1, 3, 4]
    assert toy.mirror.store.read("best") == b"step_00000001"
    assert "step_00000004 is in" in "".join(log) and "after a notice to stop takes" in "".join(log)
    assert toy.mirror.log.facts["durable"]["step"] == 4 and "step 4, " in toy.mirror.age()

    toy.lose()
    toy = Toy(tmp_path, url, log)
    step, found = toy.load()
    assert step == 4 and steps_in(toy.root) == [4]
    assert_same(found, state)
    assert len(lines.read_text().splitlines()) == 4 and "restored from" in "".join(log)

    toy.load()
    assert "".join(log).count("restored from") == 1  # the near one is as good
    flip(toy.root / "step_00000004" / BIG, 5)
    assert toy.load()[0] == 4 and "".join(log).count("restored from") == 2

    raw = bytearray(toy.mirror.store.read(f"step_00000004/{BIG}"))
    raw[7] ^= 1
    toy.mirror.store.write(f"step_00000004/{BIG}", bytes(raw))
    toy.lose()
    toy = Toy(tmp_path, url, log)
    assert toy.load()[0] == 3 and "step_00000004 is not used: " in log[-2] and BIG in log[-2]
    assert names(toy.root) == ["step_00000003"]
    toy.mirror.store.remove("step_00000003/MANIFEST.json")  # killed while it was copied
    toy.lose()
    toy = Toy(tmp_path, url, log)
    assert far_steps(toy) == [1, 4] and toy.load()[0] == 1
    toy.lose()


def test_no_checkpoint_of_another_run_is_copied(tmp_path, s3):
    toy = Toy(tmp_path, s3.url, [])
    toy.save(1)

    def refuse(path, trainer):
        raise UsageError(f"{path} is another run's, {trainer['step']}")

    toy.lose()
    toy = Toy(tmp_path, s3.url, [])
    (toy.root.parent / "config.json").write_text("{}")
    with toy.mirror:
        with pytest.raises(UsageError, match=f"{s3.url}/run/step_00000001 is another run's, 1"):
            toy.saver.resume(toy.model, toy.optimizers, check=refuse)
    assert names(toy.root) == [] and toy.mirror.store.read("config.json") is None
    toy = Toy(tmp_path, s3.url, [])
    for name in (BIG, "MANIFEST.json"):  # all are damaged: never a silent fresh start
        toy.mirror.store.write(f"step_00000001/{name}", b"{}")
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
            toy.load()
    toy.lose()


def test_a_manifest_names_no_file_outside_its_folder(tmp_path, s3):
    toy = Toy(tmp_path, s3.url, [])
    toy.save(1)
    tree = json.loads(toy.mirror.store.read("step_00000001/MANIFEST.json"))
    tree["files"]["../../../escaped"] = tree["files"]["trainer.json"]
    toy.mirror.store.write("step_00000001/MANIFEST.json", json.dumps(tree).encode())
    shutil.rmtree(toy.root / "step_00000001")
    with pytest.raises(CheckpointError):
        toy.load()
    assert not list(tmp_path.rglob("escaped")) and names(toy.root) == []
    toy.lose()


def test_a_slow_store_skips_to_the_newest_and_the_local_one_waits(tmp_path, s3):
    """--keep 2 would delete a checkpoint that is still being uploaded."""
    log: list[str] = []
    toy = Toy(tmp_path, s3.url, log)
    s3.spoil = lambda method, path, body, answer: (
        time.sleep(1.5 if method == "PUT" and BIG in path and "00000001" in path else 0),
        answer(body),
    )[1]
    toy.save(1, flush=False)
    until(lambda: toy.mirror._uploading)
    for step in (2, 3, 4, 5):
        toy.save(step, flush=False)
    assert steps_in(toy.root) == [1, 4, 5] and toy.mirror.age() == "nothing durable yet"
    toy.mirror.flush(20)
    assert far_steps(toy) == [1, 5] and "step_00000004 is skipped" in "".join(log)
    toy.save(6)
    assert steps_in(toy.root) == [5, 6]
    toy.lose()


def test_what_was_not_uploaded_is_uploaded_by_the_next_start(tmp_path, url):
    """The same command does, also that of a run that is finished."""
    toy = Toy(tmp_path, url, log := [])
    toy.save(1)
    toy.mirror._over.set()
    toy.mirror._renewer.join(10)
    toy.save(2, flush=False)
    toy.mirror.store.remove("lease.json")
    toy = Toy(tmp_path, url, log)
    assert toy.mirror.age().startswith("newest durable: step 1, ") and toy.load()[0] == 2
    with toy.mirror:
        pass
    assert far_steps(toy) == [1, 2] and "restored" not in "".join(log)
    toy = Toy(tmp_path, url, log)
    assert toy.load()[0] == 2 and "".join(log).count("step_00000002 is in") == 1
    toy.lose()


def test_the_interval_between_uploads(tmp_path, url):
    """The first at once, then none within the minutes; the end does not wait for them."""
    toy = Toy(tmp_path, url, log := [], minutes=10)
    toy.save(1, flush=False)
    until(lambda: toy.mirror._durable)
    for step in (2, 3):
        toy.save(step, flush=False)
    time.sleep(0.1)
    assert far_steps(toy) == [1] and "skipped" not in "".join(log)
    (toy.root.parent / "status.json").write_text('{"state": "done"}')
    with toy.mirror:
        pass
    assert far_steps(toy) == [1, 3] and b"done" in toy.mirror.store.read("status.json")
    assert toy.mirror.store.read("lease.json") is None


def test_a_kill_leaves_parts_of_uploads_which_the_next_start_ends(tmp_path, s3):
    client = s3.s3()
    for key in (f"{s3.folder}/run/step_00000001/{BIG}", f"{s3.folder}/another/file"):
        client.create_multipart_upload(Bucket="runs", Key=key)
    Toy(tmp_path, s3.url, []).lose()
    left = client.list_multipart_uploads(Bucket="runs").get("Uploads", [])
    assert [part["Key"] for part in left] == [f"{s3.folder}/another/file"]
    client.abort_multipart_upload(Bucket="runs", Key=left[0]["Key"], UploadId=left[0]["UploadId"])


# -------------------------------------------------------------------------------- stores that fail


def fails_with(status, code):
    return lambda method, path, body, answer: error(status, code)


def times_out(method, path, body, answer):
    time.sleep(4)
    return answer(body)


def cuts(method, path, body, answer):
    """Bodies end before their announced length."""
    status, headers, content = answer(body)
    return status, headers, content[: len(content) // 2] if method == "GET" else content


def flips_what_it_takes(method, path, body, answer):
    if method == "PUT" and BIG in path:
        body = body[:3000] + bytes([body[3000] ^ 1]) + body[3001:]
    return answer(body)


def flips_what_it_gives(method, path, body, answer):
    status, headers, content = answer(body)
    if method == "GET" and BIG in path and len(content) > 3000:
        content = content[:3000] + bytes([content[3000] ^ 1]) + content[3001:]
    return status, headers, content


def loses_every_third(method, path, body, answer):
    loses_every_third.count += 1
    return error("503 Slow Down", "SlowDown") if loses_every_third.count % 3 == 0 else answer(body)


loses_every_third.count = 0
FAILING = {
    "500": fails_with("500 Internal Server Error", "InternalError"),
    "no rights": fails_with("403 Forbidden", "AccessDenied"),
    "full": lambda m, p, b, a: (
        error("507 Insufficient Storage", "QuotaExceeded") if m == "PUT" else a(b)
    ),
    "silent": times_out,
    "cut": cuts,
    "flips what it takes": flips_what_it_takes,
    "flips what it gives": flips_what_it_gives,
}


QUICK = [pytest.param(how, marks=pytest.mark.slow) if how == "silent" else how for how in FAILING]


@pytest.mark.parametrize("how", QUICK)
def test_a_store_that_fails(how, tmp_path, s3):
    """Saves go on, nothing that is not whole counts, and once it works again, so does the mirror.
    A start stops with one sentence instead of forking the run's history."""
    log: list[str] = []
    toy = Toy(tmp_path, s3.url, log)
    state = toy.save(1)
    s3.spoil = FAILING[how]
    before = time.monotonic()
    newer = toy.save(2, flush=False)
    assert time.monotonic() - before < 3  # behind the training
    until(lambda: any("step_00000002 is not uploaded, again in 2 s" in line for line in log))
    text = next(line for line in log if "is not uploaded" in line)
    assert s3.url in text and "newest durable: step 1" in text and "\n" not in text
    assert steps_in(toy.root) == [1, 2]
    if how == "flips what it takes":
        assert f"{s3.folder}/run/step_00000002/MANIFEST.json" not in s3.keys(s3.folder)
    if how not in ("full", "flips what it takes"):  # these can still be read
        toy.saver.root = tmp_path / "elsewhere"
        with pytest.raises((StorageError, CheckpointError)) as caught:
            toy.load()
        assert "\n" not in str(caught.value)
        assert not checkpoint.checkpoints(toy.saver.root)
        toy.saver.root = toy.root
    s3.spoil = None
    toy.mirror.flush(20)
    assert toy.mirror.age().startswith("newest durable: step 2")
    toy.lose()
    toy = Toy(tmp_path, s3.url, log)
    step, found = toy.load()
    assert step == 2
    assert_same(found, newer)
    assert state is not newer
    toy.lose()


@pytest.mark.slow
def test_a_store_that_fails_now_and_then(tmp_path, s3):
    s3.spoil = loses_every_third
    toy = Toy(tmp_path, s3.url, [])
    for step in (1, 2, 3):
        state = toy.save(step)
    toy.lose()
    toy = Toy(tmp_path, s3.url, [])
    step, found = toy.load()
    assert step == 3
    assert_same(found, state)
    toy.lose()


def test_a_store_that_lists_late(tmp_path, s3):
    """New objects are read at once, but listed only later: the newest is found all the same, and
    the sweep of the next start does not take it for the rest of a killed upload."""
    toy = Toy(tmp_path, s3.url, [])
    toy.save(1)
    late = []

    def lists_late(method, path, body, answer):
        if method == "GET" and path.rstrip("/") == "/runs" and late:
            return late[0]
        return answer(body)

    def remembers(method, path, body, answer):
        found = answer(body)
        if method == "GET" and path.rstrip("/") == "/runs":
            late.append(found)
        return found

    s3.spoil = remembers
    toy.mirror.store.sizes()
    s3.spoil = lists_late
    toy.save(2)
    state = toy.save(3)
    toy.lose()
    toy = Toy(tmp_path, s3.url, [])
    step, found = toy.load()
    assert step == 3
    assert_same(found, state)
    toy.lose()


def test_a_store_that_cannot_be_written_is_refused_at_the_start(tmp_path, s3):
    """In the first seconds, with the reason: no bucket, no rights, no library, no such protocol."""
    (tmp_path / "file").write_text("")
    for url, kind, words in (
        ("s3://no-such-bucket/x", StorageError, "s3://no-such-bucket/x/run.* cannot be .*"),
        ("nofs://x", UsageError, "nofs://x/run cannot be opened .*requirements-store"),
        (str(tmp_path / "file"), StorageError, "file/run/lease.json cannot be written"),
    ):
        with pytest.raises(kind, match=words):
            open_mirror(url)
    s3.spoil = FAILING["no rights"]
    with pytest.raises(StorageError, match="lease.json cannot be read .*(Forbidden|AccessDenied)"):
        open_mirror(s3.url)


# ------------------------------------------------------------------------------------- the lease


def test_the_second_machine_is_refused(tmp_path, url):
    first = open_mirror(url, [])
    with pytest.raises(UsageError, match=r"/run is in use by process \d+ on .* renewed \d+ s ago"):
        open_mirror(url, [])
    with first:
        pass
    open_mirror(url, [])._over.set()


def test_the_lease_of_a_lost_machine_runs_out(tmp_path, s3):
    key, far = f"{s3.folder}/run/lease.json", dict(id="0", host="far-away pid:[1]", process=1)
    s3.put(key, json.dumps(far | {"time": time.time() - 100}).encode())
    with pytest.raises(UsageError, match=r"by process 1 on far-away \(lease renewed 1\d\d s ago\)"):
        open_mirror(s3.url)
    s3.put(key, json.dumps(far | {"time": time.time() - 200}).encode())
    open_mirror(s3.url)._over.set()
    for junk in (b"", b"{", b"[]", b"null", b'{"time": null}', b"\xff"):
        s3.put(key, junk)
        open_mirror(s3.url)._over.set()


def test_a_run_that_is_taken_over_stops(tmp_path, s3, monkeypatch):
    """A machine that was cut off for longer than its lease comes back."""
    monkeypatch.setattr(mirror, "RENEW_S", 0.05)
    killed: list = []
    monkeypatch.setattr(mirror.os, "kill", lambda pid, signum: killed.append(signum))
    toy = Toy(tmp_path, s3.url, log := [])
    toy.save(1)
    other = dict(id="0", host="far-away", process=7, time=time.time())
    key = f"{s3.folder}/run/lease.json"
    until(lambda: killed or s3.put(key, json.dumps(other).encode()))  # it renews in between
    assert killed == [signal.SIGTERM]
    assert f"{s3.url}/run was taken over by process 7 on far-away" in "".join(log)
    toy.saver.save(2, toy.model, toy.optimizers, {}, wait=True)
    with toy.mirror:
        pass
    assert far_steps(toy) == [1] and json.loads(toy.mirror.store.read("lease.json")) == other


# ------------------------------------------------------------------------- machines that are lost

ARGS = ("--save_every", 2, "--eval_every", 5)


def newest_in(s3) -> int:
    """The step of the newest whole checkpoint in the store; 0: none."""
    marks = [key for key in s3.keys(s3.folder) if key.endswith("/MANIFEST.json")]
    return max([int(key.split("/")[-2][5:]) for key in marks], default=0)


@pytest.mark.parametrize("kills, steps", [(2, 12), pytest.param(20, 40, marks=pytest.mark.slow)])
def test_the_machine_is_lost_at_any_moment(kills, steps, small_data, tmp_path, s3):
    """SIGKILL, and run folder and data cache are gone; the same command elsewhere goes on from the
    newest whole checkpoint in the store, and ends with the same bits."""
    import torch

    draw, resumed_from, lost = random.Random(kills), [], []
    args = ["--steps", steps, *ARGS]
    start(small_data, tmp_path / "plain" / "run", *args).end(0)
    publish = [*prepared_as(small_data), "--publish", f"{s3.url}/data"]
    out = run("prepare_data.py", *publish, **s3.env())
    assert out.returncode == 0, out.stderr
    for life in range(kills + 1):
        machine, durable = tmp_path / f"machine_{life}", newest_in(s3)
        options = [*args, "--mirror", s3.url, "--stage", machine / "cache", "--cache_gb", 0.001]
        waits = [("slow", 0.05), ("hold", steps - 1, str(tmp_path / "never"))]  # never finishes
        spoil = waits if life < kills else []
        alive = start(f"{s3.url}/data", machine / "run", *options, spoil=spoil, env=s3.env())
        if life == kills:
            alive.end(0)
        else:
            if draw.random() < 0.7 or life == kills - 1 and not durable:  # else perhaps too early
                furthest = durable >= steps - 2
                alive.until(lambda a=alive, f=furthest: f or " is in s3://" in a.text)
            time.sleep(draw.uniform(0, 1.0))
            alive.kill().end()
        text, records = alive.text, machine / "run" / "metrics.jsonl"
        assert "is not used" not in text and "none of the" not in text, text
        if records.exists() and starts(machine / "run"):
            taken = [r["step"] for r in metrics(machine / "run") if "loss" in r]
            assert f"resumed at step {durable:,} " in text or durable == 0, text
            assert taken == list(range(1, len(taken) + 1)), "the log is whole from the first step"
            resumed_from.append(durable)
            lost.append(len(taken) - newest_in(s3))
        if life < kills:
            shutil.rmtree(machine)
            time.sleep(0.1)  # a request that was on its way still arrives
    found, expected = (parameters(d / "run", steps) for d in (machine, tmp_path / "plain"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert losses(machine / "run") == losses(tmp_path / "plain" / "run")
    assert resumed_from == sorted(resumed_from) and resumed_from[-1] > 0
    assert newest_in(s3) == steps and f"{s3.folder}/run/lease.json" not in s3.keys(s3.folder)
    print("resumed from", resumed_from, "steps lost by each kill", lost)


def prepared_as(folder: Path) -> list:
    """The options that find small_data as it is (see conftest.py)."""
    texts = folder.parent / "texts"
    options = "--vocab_size 512 --row_len 65 --val_fraction 0.2 --workers 1".split()
    return ["tiny", *options, "--source", f"files:{texts}", "--data_dir", folder]


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("file", marks=pytest.mark.slow)])
def test_a_notice_saves_and_uploads(how, small_data, tmp_path, s3):
    """Also from a cloud that says it by a file; and the next machine goes on there."""
    notice, url = tmp_path / "notice", ("--mirror", s3.url, "--mirror_minutes", 60)
    options = ["--save_every", 0, "--preempt_url", notice, *url]
    spoil = [("slow", 0.05), ("polls", 0.05)]
    alive = start(small_data, tmp_path / "a" / "run", *options, spoil=spoil, env=s3.env())
    alive.until_step(3)
    notice.touch() if how == "file" else alive.kill(signal.SIGTERM)
    text = alive.end(143)
    step = newest_in(s3)
    assert 3 <= step < 12 and f"stopped by SIGTERM after step {step}" in text
    assert "to save and upload after a notice to stop takes" in text
    status = json.loads(s3.content(f"{s3.folder}/run/status.json"))
    assert (status["state"], status["durable"]["step"]) == ("preempted", step)
    notice.unlink(missing_ok=True)
    text = start(small_data, tmp_path / "b" / "run", *options, env=s3.env()).end(0)
    assert f"resumed at step {step}" in text and newest_in(s3) == 12


def test_what_counts_as_a_notice(tmp_path, s3):
    """A file that exists; an address that answers, and not with the words for: no."""
    assert not ranks.is_preempted(str(tmp_path / "none")) and ranks.is_preempted(str(tmp_path))
    address = f"{s3.endpoint}/latest/meta-data"
    said = {"TRUE": True, '{"action": "stop"}': True, "FALSE": False, "NONE": False, "": False}
    said |= {'{"Events":[ ]}': False, '{"Events":[{"EventType":"Preempt"}]}': True}
    for text, expected in said.items():
        s3.spoil = lambda *_, text=text: ("200 OK", [], text.encode())
        assert ranks.is_preempted(address) == expected, text
    s3.spoil = lambda *_: error("404 Not Found", "NotFound")
    assert not ranks.is_preempted(address)
    assert not ranks.is_preempted("http://127.0.0.1:1/") and not ranks.is_preempted("nofs://x")


def test_a_second_trainer_is_refused_while_the_first_goes_on(small_data, tmp_path, s3):
    options = ("--mirror", s3.url, *ARGS)
    spoil = [("hold", 4, str(tmp_path / "go"))]
    first = start(small_data, tmp_path / "a" / "run", *options, spoil=spoil, env=s3.env())
    first.until_step(4)
    text = start(small_data, tmp_path / "b" / "run", *options, env=s3.env()).end(2)
    assert "is in use by process" in text and "Traceback" not in text
    (tmp_path / "go").touch()
    first.end(0)
    assert newest_in(s3) == 12


@pytest.mark.slow
def test_a_store_that_dies_does_not_stop_a_run(small_data, tmp_path, s3):
    """From step 5 on it refuses everything: the run ends well, and says what is not durable."""
    s3.spoil = None
    options = ("--mirror", s3.url, *ARGS)
    spoil = [("hold", 5, str(tmp_path / "go"))]
    alive = start(small_data, tmp_path / "a" / "run", *options, spoil=spoil, env=s3.env())
    alive.until(lambda: "step_00000004 is in s3://" in alive.text)
    s3.spoil = FAILING["no rights"]
    (tmp_path / "go").touch()
    text = alive.end(0, timeout_s=90)
    assert "is given up" in text and "newest durable: step 4" in text and "Traceback" not in text
    status = json.loads((tmp_path / "a" / "run" / "status.json").read_text())
    assert (status["state"], status["durable"]["step"]) == ("done", 4)


def test_no_secret_is_written_anywhere(small_data, tmp_path, s3):
    """Of a URL with a password, of the keys in the environment: in no file of the run, here or in
    the store, and in no output, that of failures included."""
    secret = "hunter2"
    url = f"memory://someone:{secret}@host/far?token={secret}"
    alive = start(small_data, tmp_path / "run", *ARGS, "--mirror", url, env=s3.env())
    text = alive.end(0)
    assert "memory://host/far/run" in text
    failing = [("--mirror", f"nofs://someone:{secret}@host/far")]
    failing += [("--data_dir", f"s3://someone:{secret}@no-such-bucket/x")]
    failing += [("--preempt_url", f"http://someone:{secret}@127.0.0.1:1/x", "--tokens_per_step", 7)]
    for k, options in enumerate(failing):
        text += start(small_data, tmp_path / f"{k}" / "run", *options, env=s3.env()).end()
    start(small_data, tmp_path / "b" / "run", *ARGS, "--mirror", s3.url, env=s3.env()).end(0)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    files += [s3.content(key) for key in s3.keys(s3.folder)]
    for word in (secret, s3.env()["AWS_SECRET_ACCESS_KEY"]):
        assert not any(word.encode() in content for content in files) and word not in text
    assert cli.public("ssh://a:b@h/c@d s3://b/c 'https://h/x?sig=1'") == (
        "ssh://h/c@d s3://b/c 'https://h/x'"
    )
