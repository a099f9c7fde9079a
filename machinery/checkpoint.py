"""Checkpoints: killed at any moment, a run goes on from the newest whole one, to the same bits.

Writes and reads ROOT/step_00001000/{MANIFEST.json, trainer.json, dcp/, rng/rank_0.pt}. Tensors go
through torch.distributed.checkpoint (DCP): one process, DDP and FSDP2 on any number of ranks load
what any other saved. ROOT/latest and ROOT/best name a checkpoint; `.tmp-*`, `.trash-*` never count.
ROOT must be one file system that all ranks see.

A folder is a checkpoint only if every file in its MANIFEST is there with its sha256: bytes that rot
on a disk load silently otherwise. Read `_publish` first: it is the protocol. Next: eval.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor

from machinery.durable import fsync, sha256_of, write_text
from machinery.errors import CheckpointError, NonFiniteError, StorageError

Optimizers = list[torch.optim.Optimizer]
FORMAT = 1
MANIFEST = "MANIFEST.json"
MAX_FAILURES = 3  # saves in a row that may fail before training stops
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unini")


class SaveTime(NamedTuple):
    stall_s: float
    """Seconds that training stood still."""
    total_s: float
    """Seconds until the checkpoint was published and the old ones were cleared away."""


def _stage(name: str) -> None:
    """Every stage of a save passes here by name, so that tests can kill it right there."""


# ------------------------------------------------------------------------- ranks that agree


class _Team:
    """The ranks that save together. A failure on one is gathered as a value and raised on all:
    nobody waits for a rank that has given up. Has its own gloo group, so that saving in the
    background never mixes with the collectives of training. alone: this process only."""

    def __init__(self, alone: bool = False):
        together = dist.is_available() and dist.is_initialized() and not alone
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self.group = dist.new_group(backend="gloo") if self.size > 1 else None
        self.for_dcp = {"process_group": self.group, "no_dist": self.size == 1}

    def all(self, work: Callable[[], Any], otherwise: type = StorageError) -> list:
        """Run work() on every rank; its results, by rank. Errors not ours become `otherwise`."""
        try:
            mine = (work(), None)
        except (Exception, dcp.CheckpointException) as e:  # DCP's is no Exception
            mine = (None, self._as_value(e, otherwise))
        results = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(results, mine, group=self.group)
        errors = [error for _, error in results if error]
        if errors:
            raise errors[0][0]("; ".join(dict.fromkeys(text for _, text in errors)))
        return [result for result, _ in results]

    def first(self, work: Callable[[], Any], otherwise: type = StorageError) -> Any:
        """Run work() on rank 0 only; every rank gets its result."""
        return self.all(lambda: work() if self.rank == 0 else None, otherwise)[0]

    def _as_value(self, e: BaseException, otherwise: type) -> tuple[type, str]:
        if isinstance(e, (CheckpointError, NonFiniteError, StorageError)):
            return type(e), f"rank {self.rank}: {e}" if self.size > 1 else str(e)
        failures = {self.rank: (e, None)}
        if isinstance(e, dcp.CheckpointException):  # it has gathered those of all ranks itself
            failures = e.failures
        return otherwise, "; ".join(
            f"rank {rank}: {type(why).__name__}: {why}" for rank, (why, _) in failures.items()
        )


# ------------------------------------------------------------------------ files that survive


def _trash(path: Path) -> None:
    """Delete a folder in two steps: a kill never leaves half a checkpoint under its name."""
    trash = path.with_name(f".trash-{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(trash)
    _stage("trash")
    shutil.rmtree(trash)


def _copy(source: Path, root: Path) -> Path:
    """Copy a published checkpoint to another root, MANIFEST last: until then it is not valid."""
    target = root / source.name
    shutil.rmtree(target, ignore_errors=True)
    for name in [*json.loads((source / MANIFEST).read_text())["files"], MANIFEST]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
        fsync(target / name)
    for folder in (target / "dcp", target / "rng", target, root):
        fsync(folder)
    return target


# ------------------------------------------------------------------------- what counts as one


def checkpoints(root: str | Path) -> list[Path]:
    """The checkpoint folders in root, newest first, valid or not."""
    folders = (p for p in Path(root).glob("step_*") if re.fullmatch(r"step_\d{8,}", p.name))
    return sorted(folders, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def why_invalid(path: str | Path) -> str | None:
    """Read and hash the whole checkpoint: None if it is as published, else what is wrong with it.

    The MANIFEST holds nothing but names and hashes, so a wrong byte in itself shows up as well."""
    try:
        manifest = json.loads((Path(path) / MANIFEST).read_text())
        files = dict(manifest["files"])
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this program reads {FORMAT}"
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"{MANIFEST} is missing or damaged ({type(e).__name__})"
    for name, expected in files.items():
        try:
            actual = sha256_of(Path(path) / name)
        except (OSError, ValueError) as e:
            return f"{name} is missing or unreadable ({type(e).__name__})"
        if actual != expected:
            return f"{name} has sha256 {actual}, the manifest says {expected}"
    return None


def latest_valid(
    root: str | Path, mirror: str | Path | None = None, *, log: Callable = print
) -> Path | None:
    """The newest valid checkpoint in root (or mirror); None if there is none at all.

    CheckpointError if there are some but all are bad: a silent fresh start would be worse."""
    root = Path(root)
    found = checkpoints(root) + (checkpoints(mirror) if mirror else [])
    if not found:
        return None
    for path in sorted(found, key=_step_of, reverse=True):  # stable: of two, the one in root first
        if (why := why_invalid(path)) is None:
            break
        log(f"warning: {path} is not used: {why}")
    else:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {root} is valid; restore one from a copy, or "
            "move them away to start afresh"
        )
    try:
        hint = (root / "latest").read_text(errors="replace").strip()[:80]
    except OSError:
        hint = ""
    if hint != path.name:
        log(f"warning: {root}/latest says {hint!r}; the newest valid one is {path.name}, used")
    return path


def read_trainer(path: str | Path) -> dict:
    """What the trainer saved beside the tensors: step, position, configuration, ..."""
    return json.loads((Path(path) / "trainer.json").read_text())


# -------------------------------------------------------------------------------- the state


def _state(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """name -> the live tensor, sharded or not: `model.*` and `optim.state.*`, by parameter name.

    A load writes into these very tensors. Hyperparameters are left out: the schedule sets them."""
    for optimizer in optimizers:
        if not optimizer.state:  # the first step makes it; DCP takes one with gradients and lr 0
            dcp_state.get_optimizer_state_dict(model, optimizer)
            for slots in optimizer.state.values():
                for tensor in slots.values():
                    tensor.zero_()  # as if it had not been (AdamW counts its steps)
    flat = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)
    weights = dcp_state.get_model_state_dict(model)
    moments = dcp_state.get_optimizer_state_dict(model, optimizers, options=flat)
    state = {f"model.{name}": t for name, t in weights.items()}
    state |= {f"optim.{name}": t for name, t in moments.items() if name.startswith("state.")}
    assert all(isinstance(t, Tensor) for t in state.values()), "optimizer state must be tensors"
    return state


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_finite(state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        part = _local(tensor.detach())
        if part.is_floating_point() and part.numel():
            low, high = part.aminmax()  # both are NaN if one element is
            if not (low.isfinite() & high.isfinite()):
                raise NonFiniteError(f"{name} holds non-finite numbers; it was not saved")


def _check_fits(path: Path, state: dict[str, Tensor], prefix: str) -> None:
    """DCP would cast other dtypes and ignore extra keys without a word."""
    saved = dcp.FileSystemReader(path / "dcp").read_metadata().state_dict_metadata
    saved = {k: (str(v.properties.dtype), tuple(v.size)) for k, v in saved.items()}
    saved = {k: v for k, v in saved.items() if k.startswith(prefix)}
    wanted = {k: (str(v.dtype), tuple(v.shape)) for k, v in state.items()}
    for key in sorted(saved.keys() | wanted.keys()):
        there, here = saved.get(key, "not there"), wanted.get(key, "not there")
        if there != here:
            raise CheckpointError(
                f"{path} does not fit this model: {key} is {there} in the checkpoint and {here} "
                "here; use the configuration in its trainer.json, or another run directory"
            )


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(path: Path, step: int, rank: int, log: Callable) -> None:
    file = path / "rng" / f"rank_{rank}.pt"
    if not file.exists():  # more ranks than at the save: a seed that any restart would give
        torch.manual_seed(int(hashlib.sha256(f"{step}/{rank}".encode()).hexdigest()[:12], 16))
        log(f"rank {rank} has no random state in {path.name}: seeded from step and rank")
        return
    state = torch.load(file, weights_only=True)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# ------------------------------------------------------------------------------ the protocol


def _publish(
    team: _Team, root: Path, step: int, state: dict[str, Tensor], record: str, rng: dict
) -> Path:
    """Write the checkpoint of `step`; it exists when, and only when, step (5) has happened.

    record: the text of trainer.json. Raises the same StorageError or NonFiniteError everywhere."""
    path = root / f"step_{step:08d}"
    tmp = team.first(lambda: _begin(path, state))  # (1) room enough? then a temporary folder
    if tmp is None:
        return path  # published before, and still valid
    try:
        team.all(lambda: _write_own(team, tmp, state, record, rng))  # (2) all but tensors
        # ... each rank its part. Copying ahead is for tensors on a GPU: here it would only wait, at
        # every few tensors, for what training has put on the GPU meanwhile.
        writer = dcp.FileSystemWriter(tmp / "dcp", sync_files=True, per_thread_copy_ahead=0)
        team.all(lambda: dcp.save(state, storage_writer=writer, **team.for_dcp))
        _stage("write")
        hashes = team.all(lambda: _hash_own(team, tmp))  # (3) each rank re-reads what it wrote
        _stage("hash")
        files = {name: sha for own in hashes for name, sha in own.items()}
        team.first(lambda: _commit(tmp, path, files))  # (4) MANIFEST (5) rename (6) latest
    except Exception:
        if team.rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    return path


def _begin(path: Path, state: dict[str, Tensor]) -> Path | None:
    if path.exists() and why_invalid(path) is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    need = int(1.02 * sum(t.numel() * t.element_size() for t in state.values())) + (1 << 20)
    free = shutil.disk_usage(path.parent).free
    if free < need:
        raise StorageError(
            f"{path.parent} has {free / 1e9:.3f} GB free, a checkpoint takes {need / 1e9:.3f} GB"
        )
    tmp = path.parent / f".tmp-{_step_of(path):08d}-{uuid.uuid4().hex[:8]}"
    (tmp / "rng").mkdir(parents=True)
    (tmp / "dcp").mkdir()
    _stage("begin")
    return tmp


def _write_own(team: _Team, tmp: Path, state: dict, record: str, rng: dict) -> None:
    _check_finite(state)
    torch.save(rng, tmp / "rng" / f"rank_{team.rank}.pt")
    if team.rank == 0:
        (tmp / "trainer.json").write_text(record)


def _hash_own(team: _Team, tmp: Path) -> dict[str, str]:
    """{name: sha256} of the files this rank wrote, all forced onto the disk."""
    own = [*tmp.glob(f"dcp/__{team.rank}_*"), tmp / "rng" / f"rank_{team.rank}.pt"]
    if team.rank == 0:
        own += [tmp / "dcp" / ".metadata", tmp / "trainer.json"]
    for file in own:
        fsync(file)
    return {str(file.relative_to(tmp)): sha256_of(file) for file in sorted(own)}


def _commit(tmp: Path, path: Path, files: dict[str, str]) -> None:
    write_text(tmp / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1))  # (4)
    for folder in (tmp / "dcp", tmp / "rng", tmp):
        fsync(folder)
    _stage("manifest")
    if path.exists():
        _trash(path)  # a damaged one of the same step
    tmp.rename(path)  # (5) the one moment at which the checkpoint comes into being
    fsync(path.parent)
    _stage("rename")
    write_text(path.parent / "latest", path.name)  # (6) a hint for people
    _stage("latest")


def _record(trainer: dict, step: int, team: _Team) -> str:
    return json.dumps(trainer | {"step": step, "world_size": team.size}, indent=1)


def save(
    root: str | Path, step: int, model: nn.Module, optimizers: Optimizers, trainer: dict
) -> Path:
    """Save now, on all ranks together; returns the checkpoint's path. See also Checkpointer."""
    team = _Team()
    state = _state(model, optimizers)
    return _publish(team, Path(root), step, state, _record(trainer, step, team), _rng_state())


def load(path: str | Path, model: nn.Module, optimizers: Optimizers, log: Callable = print) -> dict:
    """Load this very checkpoint, random states included, on all ranks together; returns what
    `trainer` was. Raises CheckpointError naming the file or the key, before anything is loaded."""
    team = _Team()
    team.first(lambda: _verify(Path(path)), CheckpointError)
    return _load(team, Path(path), model, optimizers, log)


def load_model(path: str | Path, model: nn.Module, verified: bool = False) -> dict:
    """Load only the weights, into a plain module, on this process alone; returns `trainer`.
    verified: somebody has just read and hashed all of it (`latest_valid` does)."""
    if not verified:
        _verify(Path(path))
    state = {f"model.{name}": t for name, t in model.state_dict().items()}
    _read_into(_Team(alone=True), Path(path), state, prefix="model.")
    return read_trainer(path)


def _verify(path: Path) -> Path:
    if why := why_invalid(path):
        raise CheckpointError(f"{path} cannot be used: {why}")
    return path


def _load(team: _Team, path: Path, model: nn.Module, optimizers: Optimizers, log: Callable) -> dict:
    _read_into(team, path, _state(model, optimizers))
    trainer = read_trainer(path)
    _restore_rng(path, trainer["step"], team.rank, log)
    return trainer


def _read_into(team: _Team, path: Path, state: dict[str, Tensor], prefix: str = "") -> None:
    team.all(lambda: _check_fits(path, state, prefix), CheckpointError)
    reader = dcp.FileSystemReader(path / "dcp")
    team.all(lambda: dcp.load(state, storage_reader=reader, **team.for_dcp), CheckpointError)


# ------------------------------------------------------------------------- over a whole run


class Checkpointer:
    """Saves behind the training, keeps the checkpoints worth keeping, and finds the one to resume.

    root: where they live; this run must own it (durable.lock). keep: how many of the newest valid
    ones stay; also kept: every `milestone_every` steps, the best, the one resumed from.
    mirror: a second folder, better on another disk, that gets a copy of each.
    asynchronous: copy the state to memory, then write it while training goes on.
    last_save_s: (stall_s, total_s) of the last save that ended. Call every method on all ranks."""

    def __init__(
        self, root: str | Path, *, keep: int = 2, milestone_every: int = 0,
        mirror: str | Path | None = None, asynchronous: bool = True, log: Callable = print,
    ):  # fmt: skip
        if keep < 2:
            raise ValueError(f"keep {keep}: give 2 or more, so that one bad file cannot end a run")
        self.root, self.mirror = Path(root), Path(mirror) if mirror else None
        self.keep, self.milestone_every, self.log = keep, milestone_every, log
        self.asynchronous = asynchronous
        self.last_save_s: SaveTime | None = None
        self._team = _Team()
        self._resumed_from: str | None = None
        self._best: str | None = None
        self._buffers: dict[str, Tensor] | None = None  # the copy that is being written
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # of the last save
        self._failures = 0  # in a row
        self._team.first(self._sweep)

    def _sweep(self) -> None:
        """Clear away what a killed run left half written or half deleted."""
        self.root.mkdir(parents=True, exist_ok=True)
        for root in filter(None, (self.root, self.mirror)):
            for junk in [*root.glob(".tmp-*"), *root.glob(".trash-*")]:
                shutil.rmtree(junk) if junk.is_dir() else junk.unlink()

    def resume(
        self, model: nn.Module, optimizers: Optimizers, path: str | Path | None = None,
        check: Callable[[Path, dict], None] = lambda path, trainer: None,
    ) -> dict | None:  # fmt: skip
        """Load the newest valid checkpoint, here or in the mirror (or the one at `path`); returns
        its `trainer`, or None if there is none. check(path, trainer) may raise before anything is
        copied or loaded. Also sets aside the memory that saves copy into."""
        trainer = None
        find = (lambda: _verify(Path(path))) if path else self._find
        if path := self._team.first(find, CheckpointError):
            check(path, read_trainer(path))
            path = self._team.first(lambda: self._bring_home(path), CheckpointError)
            self._resumed_from = path.name
            trainer = _load(self._team, path, model, optimizers, self.log)
        if self.asynchronous:
            self._copy_state(_state(model, optimizers))
        return trainer

    def _find(self) -> Path | None:
        return latest_valid(self.root, self.mirror, log=self.log)

    def _bring_home(self, found: Path) -> Path:
        if found.parent != self.mirror:
            return found
        self.log(f"{found.name} is restored from {self.mirror}")
        return _copy(found, self.root)

    def save(
        self, step: int, model: nn.Module, optimizers: Optimizers, trainer: dict,
        *, wait: bool = False,
    ) -> None:  # fmt: skip
        """Save the state after `step` steps.

        wait: return when it is published; any failure is raised. Otherwise a failure to write is
        logged and training goes on, until the third in a row: StorageError."""
        start = time.perf_counter()
        busy = self._thread and self._thread.is_alive()
        self.wait()
        if busy:
            waited = time.perf_counter() - start
            self._say(f"step {step}: waited {waited:.1f} s for the save before to end")
        state, rng = _state(model, optimizers), _rng_state()
        work = (step, _record(trainer, step, self._team), rng, start)
        if self.asynchronous and not wait and self._failures < MAX_FAILURES - 1:
            self._copy_state(state)
            stall_s = time.perf_counter() - start
            args = (self._buffers, *work, stall_s)
            self._thread = threading.Thread(target=self._run, args=args)  # outlives a failing main
            self._thread.start()
        else:  # also before the last failure allowed: training must not go on after it
            self._run(state, *work)
            self.wait()
            if wait and self._error:
                raise self._error

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of `step`, also if it is still being saved, until a better one."""
        self._best = f"step_{step:08d}"
        if self._team.rank == 0 and (self.root / self._best).exists():
            self._tidy(self.root / self._best)

    def join(self) -> None:
        """Let the save in flight end, whatever comes of it: for when training has failed."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Let the save in flight end. Raises what training must not go on after."""
        self.join()
        error = self._error
        if isinstance(error, NonFiniteError) or self._failures >= MAX_FAILURES:
            self._error, self._failures = None, 0
            raise error

    def close(self) -> None:
        """The end of the run: let the save in flight end. Raises if the last save failed."""
        self.wait()
        if self._error:
            raise self._error

    def _copy_state(self, state: dict[str, Tensor]) -> None:
        """Copy the state to CPU memory, pinned if there is a GPU, that is kept from save to save:
        touching a page for the first time takes longer than copying into it."""
        cuda = torch.cuda.is_available()
        if self._buffers is None or self._buffers.keys() != state.keys():
            self._buffers = staging.BlockingAsyncStager(cache_staged_state_dict=cuda).stage(state)
            return
        for name, tensor in state.items():
            _local(self._buffers[name]).copy_(_local(tensor.detach()), non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize()

    def _run(self, state, step, record, rng, start, stall_s=None) -> None:
        """Publish and clean up, in the background or not; leave the outcome in self._error. All
        ranks have the same outcome, and look at it only in save() and wait(), at the same step."""
        try:
            path = _publish(self._team, self.root, step, state, record, rng)
            self._error, self._failures = None, 0
        except NonFiniteError as e:
            self._error = e
        except Exception as e:
            self._failures += 1
            self._error = StorageError(
                f"step {step} could not be saved ({self._failures} in a row): {e}; "
                f"make room for {self.root}, the checkpoints there are intact"
            )
            self.log(f"warning: {self._error}")
        if self._error is None and self._team.rank == 0:
            self._tidy(path, published=True)
        total_s = time.perf_counter() - start
        self.last_save_s = SaveTime(stall_s or total_s, total_s)
        if self._error is None:
            stood = f"training stood still {self.last_save_s.stall_s:.2f} s"
            self._say(f"saved {path} in {total_s:.2f} s, {stood}")

    def _tidy(self, path: Path, published: bool = False) -> None:
        """What follows a publish; if it goes wrong, that is a warning: the checkpoint is safe."""
        try:
            for root in filter(None, (self.root, self.mirror)):
                if published and root == self.mirror:
                    _copy(path, root)
                if self._best == path.name and (root / path.name).exists():
                    write_text(root / "best", path.name)
                if published:
                    self._retain(root, root / path.name)
        except Exception as e:
            self.log(f"warning: after the save of {path.name}: {type(e).__name__}: {e}")

    def _retain(self, root: Path, new: Path) -> None:
        """Delete all but the newest `keep` valid ones, milestones, the best, the resumed-from.
        new: has just been written; the others are read and hashed before they count."""
        found = checkpoints(root)
        kept: list[Path] = []
        for path in found:
            if len(kept) < self.keep and (path == new or why_invalid(path) is None):
                kept.append(path)
        if len(kept) < self.keep:
            return  # nothing to spare
        best = root / "best"
        protected = {self._resumed_from, best.read_text().strip() if best.exists() else None}
        for path in found:
            milestone = self.milestone_every and _step_of(path) % self.milestone_every == 0
            if path not in kept and path.name not in protected and not milestone:
                _trash(path)

    def _say(self, text: str) -> None:
        if self._team.rank == 0:
            self.log(text)
