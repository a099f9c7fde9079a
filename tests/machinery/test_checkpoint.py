"""checkpoint.py against real full files, real flipped bytes and real processes, which take up one
of the scenarios below. Kills: test_faults.py."""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from conftest import flip, read_json, write_json
from faults import start
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import optim
from config import GPTConfig
from machinery import checkpoint, disk
from machinery.checkpoint import Checkpointer
from machinery.errors import CheckpointError, DataError, NonFiniteError, StorageError
from machinery.formats import Trainer

TENSORS = "shard-00001-model-00001-of-00001.safetensors"  # of the first rank
TENSORS_FAIL = 2_000  # bytes that a file may have: one of tensors is longer


class Toy(nn.Module):
    """Sizes that ranks cannot share evenly, a matrix for Muon, a buffer."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.body = nn.Linear(7, 9, bias=False)
        self.out = nn.Linear(9, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.out(torch.tanh(self.body(torch.tanh(self.inp(x))))) * self.scale


def build(seed=0, shard=False):
    torch.manual_seed(seed)
    model = Toy()
    if shard:
        fully_shard(model)
    rest = [p for name, p in model.named_parameters() if name != "body.weight"]
    muon = optim.Muon([model.body.weight], lr=0.02, weight_decay=0.1)
    return model, [muon, optim.adamw([{"params": rest, "lr": 0.01, "weight_decay": 0.1}])]


def train(model, optimizers, steps):
    """`steps` updates, always on the same batches."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        model(torch.randn(4, 5, generator=draw)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def snapshot(model, optimizers):
    """Whole copies of everything that a checkpoint must hold."""

    def full(t):
        return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()

    names = {p: name for name, p in model.named_parameters()}
    state = {name: full(t) for name, t in model.state_dict().items()}
    for optimizer in optimizers:
        for p, slots in optimizer.state.items():
            state |= {f"{names[p]}/{slot}": full(t) for slot, t in slots.items()}
    return state


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


def names(root):
    return sorted(os.listdir(root))


def steps_in(root):
    return sorted(int(p.name[5:]) for p in Path(root).glob("step_*"))


def rehash(path, **files):
    """Give files another content, and MANIFEST their hashes, as a stranger would."""
    manifest = read_json(path / "MANIFEST.json")
    for name, content in files.items():
        (path / name).write_bytes(content)
        manifest["files"][name] = hashlib.sha256(content).hexdigest()
    write_json(path / "MANIFEST.json", manifest)


def at(step, identity=None, **facts):
    """What train.py saves beside the tensors."""
    return Trainer(step=step, tokens=0, identity=identity or {}, model=GPTConfig(), **facts)


def save(saver, step, *toy):
    """Save a toy, and wait until that is done."""
    saver.save(at(step), *toy)
    saver.join(raises=True)


def files_of(path):
    return sorted(p for p in path.rglob("*") if p.is_file())


@contextmanager
def largest_file(size):
    """Writes beyond `size` bytes fail in the kernel, as on a full disk, also inside C++."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def log():
    return []


@pytest.fixture
def run(tmp_path, log):
    """A toy trained two steps, and saved at 10 and 20 with two steps in between."""
    model, optimizers = build()
    saver = Checkpointer(tmp_path / "c", log=log.append)
    for step in (10, 20):
        train(model, optimizers, 2)
        save(saver, step, model, optimizers)
    return saver


def resume(root):
    """Build another toy and load the newest valid checkpoint into it."""
    model, optimizers = build(seed=1)
    trainer = Checkpointer(root).resume(model, optimizers)
    return trainer, model, optimizers


# ------------------------------------------------------------------------------ same bits
def test_every_kind_of_tensor_in_several_files(tmp_path, monkeypatch):
    """Which bounds the memory that the writer takes; and any tool reads them."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 300)
    model, optimizers = build()
    train(model, optimizers, 1)
    model.register_buffer("none_", torch.tensor(3.5))
    model.register_buffer("half_", torch.randn(3, 5).bfloat16())
    model.register_buffer("turned_", torch.randn(3, 5).T)
    model.register_buffer("part_", model.half_[1:])
    save(Checkpointer(tmp_path), 1, model, optimizers)
    expected = snapshot(model, optimizers)
    with torch.no_grad():
        for t in model.state_dict().values():
            t.zero_()
    Checkpointer(tmp_path).resume(model, optimizers)
    assert_same(snapshot(model, optimizers), expected)
    files = [*tmp_path.rglob("*.safetensors")]
    assert len(files) > 3
    found = {name: t for file in files for name, t in safetensors.torch.load_file(file).items()}
    assert all(torch.equal(found[f"model.{k}"], t) for k, t in model.state_dict().items())


# ------------------------------------------------------------------------------- damage
def test_any_flipped_byte_is_found(run, monkeypatch):
    path = checkpoint.checkpoints(run.root)[0]
    assert checkpoint.why_invalid(path) is None
    for file in files_of(path):
        size = file.stat().st_size
        for at in range(size) if file.name == "MANIFEST.json" else (0, size // 2, size - 1):
            flip(file, at)
            assert checkpoint.why_invalid(path) is not None, (file, at)
            flip(file, at)
    assert checkpoint.why_invalid(path) is None
    monkeypatch.setattr(Path, "rglob", mock.Mock(side_effect=OSError(5, "the disk fails")))
    assert "the disk fails" in checkpoint.why_invalid(path)


def test_what_does_not_fit_is_refused_by_name(run):
    path = checkpoint.checkpoints(run.root)[0]

    def refused(name, change):
        model, optimizers = build()
        optimizers = change(model) or optimizers
        before = snapshot(model, optimizers)
        with pytest.raises(CheckpointError, match=name):
            Checkpointer(run.root).resume(model, optimizers, path)
        assert_same(snapshot(model, optimizers), before)  # nothing was loaded

    refused("model.scale.*float32.*float64", lambda m: setattr(m, "scale", m.scale.double()))
    refused("model.scale.*4.*5", lambda m: setattr(m, "scale", torch.ones(5)))
    refused("model.more", lambda m: m.register_buffer("more", torch.ones(1)))
    refused("model.scale", lambda m: delattr(m, "scale"))
    refused("body.weight.exp_avg", lambda m: [optim.adamw([{"params": [*m.parameters()]}])])
    with pytest.raises(CheckpointError, match="bfloat16"):
        checkpoint.load_model(path, build()[0].bfloat16())


def test_non_finite_state_is_not_saved(run):
    model, optimizers = build()
    train(model, optimizers, 1)
    moment = optimizers[1].state[model.out.bias]["exp_avg_sq"]
    for value in (float("nan"), -float("inf")):
        moment[1] = value
        run.save(at(30), model, optimizers)
        with pytest.raises(NonFiniteError, match="out.bias.exp_avg_sq"):
            run.save(at(40), model, optimizers)
    run.save(at(30), model, optimizers)
    run._thread.join()
    assert isinstance(run.error, NonFiniteError)  # which the loop looks at in every step
    with pytest.raises(NonFiniteError):
        run.finish()
    run.finish()  # said once
    assert names(run.root) == ["step_00000010", "step_00000020"]


# ------------------------------------------------------------------------------- strangers
def test_files_of_a_stranger_are_refused(run, tmp_path):
    """In a checkpoint whose hashes are right, since a stranger has written them."""
    path = run.root / "step_00000020"
    whole = lambda: checkpoint.why_invalid(path) is None
    as_published = (path / "MANIFEST.json").read_bytes()
    rehash(path, **{"../../secret": b"secret"})
    assert not whole()  # other names: test_disk.py
    (path / "MANIFEST.json").write_bytes(as_published)
    extra = path / "dcp" / "more.safetensors"
    for make in (extra.touch, lambda: extra.symlink_to(tmp_path)):  # to a folder
        assert whole()
        make()
        assert not whole()
        extra.unlink()
    (path / "trainer.json").rename(tmp_path / "secret")
    (path / "trainer.json").symlink_to(tmp_path / "secret")
    assert not whole()
    with pytest.raises(CheckpointError):
        checkpoint.read_trainer(path)


def test_tensors_of_a_stranger_are_one_sentence(run):
    """A file that is no safetensors, and such whose places within the tensors are wrong."""
    path = run.root / "step_00000020"
    with safetensors.safe_open(path / "dcp" / TENSORS, "pt") as file:
        metadata = file.metadata()
    key = "DCP_SHARDING_INFO"
    places = json.loads(metadata[key])
    far = {n: {"saved_offsets": [10**6] * len(at["saved_offsets"])} for n, at in places.items()}
    whole = safetensors.torch.load_file(path / "dcp" / TENSORS)
    name = "model.body.weight"
    part = whole | {name: whole[name][1:].contiguous()}  # its first row is in no file
    part_places = places | {name: {"saved_offsets": [1, 0]}}
    forged = lambda tensors, at: safetensors.torch.save(tensors, metadata | {key: json.dumps(at)})
    for content in (b"", forged(whole, far), forged(part, part_places)):
        rehash(path, **{f"dcp/{TENSORS}": content})
        for load in (lambda: checkpoint.load_model(path, build()[0]), lambda: resume(run.root)):
            with pytest.raises(CheckpointError):
                load()


# --------------------------------------------------------------------------------- kills
def test_everything_is_on_the_disk_before_the_rename(run, monkeypatch):
    """What a power cut would show: every file and folder was fsynced after its last change."""
    synced = {}  # inode -> when its content had last changed
    real = os.fsync
    put_in_place = disk.put_in_place

    def fsync(fd):
        real(fd)
        synced[os.fstat(fd).st_ino] = os.fstat(fd).st_mtime_ns

    def is_safe(path):
        return synced.get(path.stat().st_ino) == path.stat().st_mtime_ns

    def rename(written, path):
        assert [p for p in [written, *written.rglob("*")] if not is_safe(p)] == []
        put_in_place(written, path)
        assert is_safe(path.parent)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(disk, "put_in_place", rename)
    save(run, 30, *build())
    assert len(synced) >= 6  # a folder in a folder with three files, and where it lies


# ------------------------------------------------------------------------------- storage
def test_a_save_that_waits_for_a_lost_rank_holds_no_other(run):
    end = threading.Event()
    run._thread = threading.Thread(target=end.wait, args=[60])
    run._thread.start()
    run.leave(None, RuntimeError("Timed out waiting 600000ms for recv"), None)
    assert run.busy
    end.set()


def test_a_disk_too_small_is_seen_before_writing(run, full_disk):
    full_disk(1 << 20)
    before = names(run.root)
    with pytest.raises(StorageError, match=f"1.050 MB .* 1.049 MB .* {run.root}"):
        save(run, 30, *build())
    assert names(run.root) == before


# ----------------------------------------------------------------------------- retention
def test_retention_keeps_exactly_what_it_says(tmp_path):
    model, optimizers = build()
    first = Checkpointer(tmp_path)
    for step in (1, 2):
        save(first, step, model, optimizers)
    saver = Checkpointer(tmp_path, keep=3)
    assert saver.resume(model, optimizers).step == 2
    for step in range(3, 13):
        if step in (4, 7):
            saver.mark_best(step)
        save(saver, step, model, optimizers)
        best = {7} if step >= 7 else {4} if step >= 4 else set()
        assert set(steps_in(tmp_path)) == {step - 2, step - 1, step, 2} | best, step
    assert (tmp_path / "best").read_text() == "step_00000007" and not [*tmp_path.glob(".*")]


def test_what_is_kept_for_good_outlives_its_options(tmp_path, log):
    """Seven starts, each with other options. One that cannot say whether it is kept, is."""
    options = [(2, 4), (0, 7), (3, 0), (0, 0), (0, 0), (5, 0), (0, 0)]  # keep_every, keep_step
    for i, (every, step) in enumerate(options):
        saver = Checkpointer(tmp_path, 1, step, None, log.append, every)
        saver.resume(*build())
        for step in range(3 * i + 1, 3 * i + 4):
            save(saver, step, *build())
        if i == 3:
            flip(tmp_path / "step_00000002/MANIFEST.json", 3)
    assert steps_in(tmp_path) == [2, 3, 6, 9, 15, 18, 21]


def test_one_that_cannot_be_deleted_keeps_no_other(tmp_path, log, monkeypatch):
    """Nor what is half deleted: overlayfs says so of a folder of its image."""
    stay = ("step_00000001", ".trash-a")

    def refusing(work):
        def refuse(path):
            if path.name in stay:
                raise OSError(errno.EXDEV, "refused")
            work(path)

        return refuse

    monkeypatch.setattr(disk, "set_aside", refusing(disk.set_aside))
    monkeypatch.setattr(shutil, "rmtree", refusing(shutil.rmtree))
    (tmp_path / ".trash-a").mkdir()
    (tmp_path / ".trash-b").mkdir()
    saver = Checkpointer(tmp_path, log=log.append)
    for step in range(1, 7):
        save(saver, step, *build())
    assert names(tmp_path) == [".trash-a", *(f"step_{step:08d}" for step in (1, 5, 6))]
    for name in stay:
        assert sum(f"could not delete {name}: " in text for text in log) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\x00garbage", b"../c"])
def test_a_damaged_best_deletes_nothing(run, log, content):
    """Any checkpoint may be the best one then; the next better one puts it right."""
    toy = build()
    (run.root / "best").write_bytes(content)
    for step in (30, 40):
        save(run, step, *toy)
    assert steps_in(run.root) == [10, 20, 30, 40]
    assert sum("warning" in text and "best names" in text for text in log) == 2
    run.mark_best(40)
    save(run, 50, *toy)
    assert steps_in(run.root) == [40, 50]


def test_the_next_start_sweeps(tmp_path):
    """Also the file of a `best` that a kill has left half written; of a link, the link alone, and
    nothing if the folder itself is one."""
    root = tmp_path / "c"
    (root / ".tmp-00000007-0a").mkdir(parents=True)
    (root / ".trash-step_00000001-0a").mkdir()
    (root / ".trash-step_00000001-0a" / "trainer.json").touch()
    (root / ".tmp-best-0a").write_text("step_0")
    (tmp_path / "theirs").mkdir()
    (root / ".tmp-link").symlink_to(tmp_path / "theirs")
    Checkpointer(root)
    assert names(root) == [] and (tmp_path / "theirs").exists()
    (tmp_path / "theirs" / ".tmp-mine").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "theirs")
    with pytest.raises(DataError, match="linked"):
        Checkpointer(tmp_path / "linked")
    assert names(tmp_path / "theirs") == [".tmp-mine"]


def test_best_may_be_known_only_while_it_is_being_saved(tmp_path, log, monkeypatch):
    model, optimizers = build()
    saver = Checkpointer(tmp_path, log=log.append)
    go = threading.Event()
    begin = checkpoint._begin
    monkeypatch.setattr(checkpoint, "_begin", lambda *args: go.wait(30) and begin(*args))
    saver.save(at(4), model, optimizers)
    saver.mark_best(4)  # in flight
    assert not (tmp_path / "best").exists()
    go.set()
    for step in (5, 6):
        save(saver, step, model, optimizers)
    assert (tmp_path / "best").read_text() == "step_00000004"
    with largest_file(TENSORS_FAIL):
        saver.save(at(7), model, optimizers)
        saver.mark_best(7)
        with pytest.raises(StorageError):
            saver.finish()
    # A best that was never published takes nothing away.
    save(saver, 8, model, optimizers)
    assert steps_in(tmp_path) == [4, 6, 8] and not any("could not delete" in x for x in log)


def test_retention_counts_what_this_process_has_written_or_verified(run):
    """It deletes nothing for the sake of one that nobody has read since it was written."""
    flip(run.root / "step_00000020" / "trainer.json", 3)
    model, optimizers = build(seed=1)
    saver = Checkpointer(run.root, keep=3)
    older = run.root / "step_00000010"
    assert saver.resume(model, optimizers, older).step == 10  # none that is valid is newer
    for step, left in ((30, [10, 20, 30]), (40, [10, 30, 40]), (50, [10, 30, 40, 50])):
        save(saver, step, model, optimizers)
        assert steps_in(run.root) == left


# ---------------------------------------------------------------------------- many ranks
def spawn(scenario, out, world):
    """Run a scenario of this file in `world` processes that must all exit with 0."""
    here = dict(PYTHONPATH=str(Path(__file__).parent))
    main = "test_checkpoint:main"
    start(None, out / scenario, argv=[scenario, out], world=world, env=here, main=main).end(0)


def main(argv):
    scenario, out = argv
    dist.init_process_group("gloo")
    globals()[f"scenario_{scenario}"](Path(out))
    dist.barrier()


def test_from_shards_to_one_process_to_shards_and_replicas(tmp_path):
    spawn("fsdp_save", tmp_path, world=3)  # the last one has no row of some tensors
    expected = torch.load(tmp_path / "fsdp.pt", weights_only=True)
    trainer, model, optimizers = resume(tmp_path / "fsdp")
    assert trainer.step == 2 and trainer.world_size == 3
    assert_same(snapshot(model, optimizers), expected)
    train(model, optimizers, 1)
    torch.save(snapshot(model, optimizers), tmp_path / "single.pt")
    save(Checkpointer(tmp_path / "single"), 3, model, optimizers)
    spawn("load_on_two", tmp_path, world=2)


def scenario_fsdp_save(out):
    model, optimizers = build(shard=True)
    train(model, optimizers, 2)
    saver = Checkpointer(out / "fsdp")
    saver.resume(model, optimizers)  # makes the buffers
    saver.save(at(1), model, optimizers)
    train(model, optimizers, 1)
    state = snapshot(model, optimizers)
    # It reuses them, and runs while training's collectives do.
    saver.save(at(2, world_size=3), model, optimizers)
    train(model, optimizers, 20)
    saver.finish()
    if dist.get_rank() == 0:
        torch.save(state, out / "fsdp.pt")


def scenario_load_on_two(out):
    expected = torch.load(out / "single.pt", weights_only=True)
    for shard in (False, True):
        model, optimizers = build(seed=3, shard=shard)
        saver = Checkpointer(out / "single")
        assert saver.resume(model, optimizers).step == 3
        assert_same(snapshot(model, optimizers), expected)
        by_rank = [None, None]  # each copies only what it writes
        staged = sum(optim.local(t).nbytes for t in saver._memory.values())
        dist.all_gather_object(by_rank, staged)
        total = sum(t.nbytes for t in checkpoint._state(model, optimizers).values())
        assert sum(by_rank) == total and max(by_rank) < 0.75 * total


def test_failures_on_one_rank_reach_all(tmp_path):
    spawn("one_rank_fails", tmp_path, world=2)
    assert steps_in(tmp_path / "c") == [4, 5]


def scenario_one_rank_fails(out):
    rank = dist.get_rank()
    model, optimizers = build()
    train(model, optimizers, 1)
    log = []
    saver = Checkpointer(out / "c", log=log.append)
    save(saver, 1, model, optimizers)
    before = names(out / "c")
    nothing_new = lambda: rank or names(out / "c") == before  # the first rank tidies up
    with largest_file(TENSORS_FAIL if rank == 1 else 1 << 30):  # DCP's write fails on rank 1
        saver.save(at(2), model, optimizers)
        saver.join()
    assert nothing_new()

    for broken in ("_begin", "_commit"):  # on the first rank
        no = mock.patch.object(checkpoint, broken, side_effect=OSError("no"))
        with no, pytest.raises(StorageError, match="OSError: no"):
            save(saver, 3, model, optimizers)
        assert nothing_new()

    save(saver, 4, model, optimizers)
    with torch.no_grad():
        model.body.weight[1, 2] += 1e-6 * rank
    save(saver, 5, model, optimizers)
    said = "".join(log)
    assert re.search("step 2 could not be saved .*rank 1: ", said)
    assert "step 5: the ranks' replicas" in said and "step 4: the" not in said
    for p in model.parameters():  # all of them, as each rank checks its own
        p.data[0] = float("nan") if rank == 1 else p.data[0]
    with pytest.raises(NonFiniteError, match="^rank 1: model."):
        save(saver, 6, model, optimizers)
