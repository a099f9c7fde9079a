"""Checkpoints: a run that is killed at any moment resumes from the newest valid one, bit for bit.

Writes and reads ROOT/step_00001000/{MANIFEST.json, trainer.json, dcp/*.safetensors}, tensors by DCP
(torch.distributed.checkpoint): one process, DDP and FSDP2 load what any of them saved, on any
number of ranks. A checkpoint is valid only if its files are those in its MANIFEST, with their
sha256. ROOT/best names the best one; `.tmp-*` and `.trash-*` never count, and the next start
removes them. RNG states are not saved: each step sets the seed. Start at `_publish`. Next: disk.py.
"""

import itertools
import math
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor

from config import UsageError
from machinery import disk, formats
from machinery.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    StorageError,
    is_lost_rank,
    reason_of,
)
from machinery.formats import CHECKPOINT_FORMAT, FileList, Trainer
from machinery.output import json_of, say
from machinery.ranks import DAY_S, Team
from optim import local

Optimizers = list[torch.optim.Optimizer]
MANIFEST = "MANIFEST.json"
MAX_FAILURES = 3  # failed saves in a row that end the run
FILE_BYTES = 1 << 30  # a file's size, roughly; the writer holds it in memory twice
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unini")


# ------------------------------------------------------------------------ the folders on disk


def newest_first(names: Iterable[str]) -> list[str]:
    """Those of `names` that are names of checkpoints, the latest step first."""
    names = (name for name in names if re.fullmatch(r"step_\d{1,15}", name, re.ASCII))
    return sorted(names, key=lambda name: int(name[5:]), reverse=True)


def checkpoints(root: str | Path) -> list[Path]:
    """The checkpoint folders in a root, valid or not, newest first."""
    try:
        return [Path(root, name) for name in newest_first(os.listdir(root))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def why_invalid(path: str | Path, only: str = "") -> str | None:
    """Read and hash the whole checkpoint, or `only` one file: None if it is as published, else its
    first fault. MANIFEST holds only names and hashes, so a wrong byte in it is found as well."""
    path = Path(path)
    name = MANIFEST
    try:
        files = formats.read(path / MANIFEST, FileList).files
        found = [p for p in path.rglob("*") if p.is_symlink() or not p.is_dir()]
        odd = [p for p in found if p.is_symlink() or not p.is_file()]
        if odd:
            return f"{odd[0].name} is no regular file"
        extra = {str(p.relative_to(path)) for p in found} - {MANIFEST, *files}
        if extra:
            return f"{min(extra)!r} is in it, which {MANIFEST} does not name"
        for name in [only] if only else files:
            actual = disk.sha256_of(disk.inside(path, name))
            if actual != files[name]:
                return f"{name} has sha256 {actual}, the manifest says {files[name]}"
    except DataError as error:  # a damaged MANIFEST, or a name that leads elsewhere
        return str(error)
    except OSError as error:
        return f"{name} is missing or unreadable ({error.strerror})"
    return None


def latest_valid(
    root: str | Path, log: Callable = say, mirror: Any = None, check: Callable | None = None
) -> Path | None:
    """The newest valid checkpoint in root; None if there is none at all. One that is only in the
    mirror (mirror.py), or damaged here, is restored from there; `check` may refuse it first.
    CheckpointError if there are only damaged ones: training must not silently start over."""
    own = [path.name for path in checkpoints(root)]
    damaged = 0
    far = mirror.checkpoints() if mirror else []
    for name in newest_first({*own, *far}):
        path = Path(root, name)
        if name in own:
            reason = why_invalid(path)
            if reason is None:
                return path
            log(f"warning: {path} is not used: {reason}")
            damaged += 1
        if name in far:
            try:
                mirror.restore(path, check)
                return path
            except (CheckpointError, DataError) as error:
                log(f"warning: {mirror.store.url}/{name} is not used: {error}")
                damaged += 1
    if damaged:
        reason = f"none of the {damaged} checkpoints in {root} is valid"
        raise CheckpointError(f"{reason}; restore one from a copy, or move them away to start over")
    return None


def _verify(path: Path, only: str = "") -> Path:
    why = why_invalid(path, only)
    if why:
        own = checkpoints(path / "checkpoints")  # if it is a run
        newest = f"; its newest checkpoint is {own[0]}" if own else ""
        raise CheckpointError(f"{path} cannot be used: {why}{newest}")
    return path


def read_trainer(path: str | Path) -> Trainer:
    """trainer.json, what train.py records beside the tensors. CheckpointError unless it is as it
    was published, and its fields have the right types."""
    file = _verify(Path(path), only="trainer.json") / "trainer.json"
    try:
        return formats.read(file, Trainer)
    except DataError as error:
        raise CheckpointError(f"{error}; choose another checkpoint") from None


# ------------------------------------------------------------------ the state, and loading it


def _state(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """name -> the live tensor, sharded or not: `model.*` and `optim.state.*`, by parameter name.
    Loading writes into these tensors. Hyperparameters are left out, as the schedule sets them."""
    assert all(o.state for o in optimizers), "create the optimizer's state before the first save"
    flat = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)
    weights = dcp_state.get_model_state_dict(model)
    moments = dcp_state.get_optimizer_state_dict(model, optimizers, options=flat)
    state = {f"model.{name}": t for name, t in weights.items()}
    state |= {f"optim.{name}": t for name, t in moments.items() if name.startswith("state.")}
    assert all(isinstance(t, Tensor) for t in state.values()), "optimizer state must be tensors"
    return state


def _own(state: dict[str, Tensor], team: Team) -> dict[str, Tensor]:
    """What this rank copies and writes: its shards, and its share of the tensors that every rank
    holds whole, which are dealt out in order of size."""
    whole = sorted((t.nbytes, name) for name, t in state.items() if not isinstance(t, DTensor))
    others = {name for i, (_, name) in enumerate(whole) if i % team.size != team.rank}
    return {name: t.contiguous() for name, t in state.items() if name not in others}


@torch.no_grad()
def _host_memory(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tensor on the host for each of `state`, for all saves to copy into; pinned beside a GPU."""
    pin = torch.cuda.is_available()
    copies = {}
    for name, tensor in state.items():
        memory = torch.empty_like(local(tensor), device="cpu", pin_memory=pin)
        copies[name] = memory
        if isinstance(tensor, DTensor):
            copies[name] = tensor.to("cpu", copy=True)
            local(copies[name]).set_(memory)
    return copies


def _checksum(state: dict[str, Tensor]) -> int:
    """The bytes of the tensors that every rank holds whole, summed as integers: so the order of
    summation, in which GPUs differ, does not matter."""
    whole = [t.detach() for t in state.values() if not isinstance(t, DTensor)]
    return int(sum(t.flatten().view(torch.uint8).sum() for t in whole))


def check_finite(state: dict[str, Tensor], so: str = "it was not saved") -> None:
    """NonFiniteError if a tensor holds NaN or an infinity."""
    for name, tensor in state.items():
        part = local(tensor)  # both of aminmax are NaN if any element is
        if part.numel() and not torch.stack(part.aminmax()).isfinite().all():
            raise NonFiniteError(f"{name} holds non-finite numbers; {so}")


def check_fits(path: Path, state: dict[str, Tensor], prefix: str) -> None:
    """CheckpointError unless names (those that begin with `prefix`), dtypes and shapes are the
    checkpoint's: DCP itself would cast dtypes and ignore extra keys."""
    try:
        found = dcp.HuggingFaceStorageReader(path / "dcp").read_metadata().state_dict_metadata
    except Exception as error:  # a file from a stranger may have any header
        raise CheckpointError(f"{path / 'dcp'} cannot be used: {reason_of(error)}") from None
    saved = {}
    for key, tensor in found.items():
        saved[key] = (str(tensor.properties.dtype), tuple(tensor.size))
        if sum(math.prod(c.sizes) for c in tensor.chunks) != math.prod(tensor.size):
            saved[key] = "there in part"
    wanted = {k: (str(v.dtype), tuple(v.shape)) for k, v in state.items()}
    for key in sorted(saved.keys() | wanted.keys()):
        there = saved.get(key, "not there")
        here = wanted.get(key, "not there")
        if there != here and key.startswith(prefix):
            raise CheckpointError(
                f"{path} does not fit this model: {key} is {there} in the checkpoint and {here} "
                "here; use the configuration and model.py it was saved with, or another --run_dir"
            )


def _read_into(team: Team, path: Path, state: dict[str, Tensor], prefix: str = "") -> None:
    team.on_all(lambda: check_fits(path, state, prefix), CheckpointError)
    reader = dcp.HuggingFaceStorageReader(path / "dcp")
    team.on_all(lambda: dcp.load(state, storage_reader=reader, **team.for_dcp), CheckpointError)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights under the names that they have in a checkpoint."""
    return {f"model.{name}": t for name, t in model.state_dict().items()}


def load_model(path: str | Path, model: nn.Module, verified: bool = False) -> None:
    """Load only the weights, or this rank's shards of them. If they do not fit, CheckpointError
    before any is loaded. verified: every file has just been hashed."""
    path = Path(path) if verified else _verify(Path(path))
    _read_into(Team(alone=True), path, weights_of(model), prefix="model.")


# ------------------------------------------------------------------------------ the protocol


def _publish(
    team: Team, root: Path, step: int, state: dict[str, Tensor], trainer_json: str, kept: bool
) -> Path:
    """Write the checkpoint of `step`, which exists if and only if the rename (5) has happened.
    state: this rank's part (see _own); trainer_json: its text; kept: for good. All ranks raise the
    same StorageError or NonFiniteError."""
    path = root / f"step_{step:08d}"
    parts = team.on_all(lambda: {name: local(t).nbytes for name, t in state.items()})
    nbytes = sum(sum(part.values()) for part in parts)
    tmp = team.on_first(lambda: _begin(path, nbytes))  # (1) check free space, create tmp
    names = dict.fromkeys(name for part in parts for name in part)
    ends = itertools.accumulate(max(part.get(name, 0) for part in parts) for name in names)
    file_of = {name: 1 + end // FILE_BYTES for name, end in zip(names, ends)}
    try:
        team.on_all(lambda: check_finite(state))
        folder = str(tmp / "dcp")
        writer = dcp.HuggingFaceStorageWriter(folder, file_of, save_distributed=True)  # it fsyncs
        # The state is in host memory already: DCP's copy-ahead would only synchronize with the GPU
        # every few tensors, that is, wait for training.
        writer.per_thread_copy_ahead = 0
        team.on_all(lambda: dcp.save(state, storage_writer=writer, **team.for_dcp))  # (2) write
        hashes = team.on_all(lambda: _hash_own(team, tmp))  # (3) each rank re-reads its files
        team.on_first(
            lambda: _commit(tmp, path, trainer_json, hashes, kept)
        )  # (4) MANIFEST (5) rename
    except Exception:
        if team.rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    return path


def _begin(path: Path, nbytes: int) -> Path:
    disk.check_room(path.parent, 1.02 * nbytes + (1 << 20), "make room for a checkpoint")
    tmp = disk.temporary(path)
    tmp.mkdir()  # not its parents: a run whose folder was moved begins no second one
    (tmp / "dcp").mkdir()
    return tmp


def _hash_own(team: Team, tmp: Path) -> dict[str, str]:
    """{name: sha256} of the files that this rank has written; DCP has called fsync on them."""
    own = sorted(tmp.glob(f"dcp/shard-{team.rank + 1:05d}-*"))
    return {str(file.relative_to(tmp)): disk.sha256_of(file) for file in own}


def _commit(tmp: Path, path: Path, trainer_json: str, hashes: list[dict], kept: bool) -> None:
    disk.fsync(tmp / "dcp")
    disk.write_text(tmp / "trainer.json", trainer_json)
    files = {"trainer.json": disk.sha256_of(tmp / "trainer.json")}
    for own in hashes:
        files |= own
    listed = FileList(format=CHECKPOINT_FORMAT, files=files, kept=kept or None)
    disk.write_json(tmp / MANIFEST, listed)  # (4)
    disk.put_in_place(tmp, path)  # (5) its rename makes the checkpoint exist


@dataclass
class Checkpointer:
    """All checkpoints of a run, saved in the background; every rank calls every method. root: their
    folder, which this run owns (disk.lock). keep: how many of the newest stay, apart from the best,
    the one resumed from, and those that are kept for good: that of keep_step, and each whose step
    is a multiple of keep_every, now or when it was saved. mirror (mirror.py; first rank only):
    receives a copy of each."""

    root: Path
    keep: int = 2
    keep_step: int = 0
    mirror: Any = None
    log: Callable = say
    keep_every: int = 0

    def __post_init__(self):
        if self.mirror:
            self.mirror.checkpointer = self
        self.team = Team(others_s=DAY_S)  # the first may copy a checkpoint from or to the mirror
        self.writers = Team()  # in a save, no rank waits long for another
        self.best = ""  # the name of a checkpoint, as the next
        self._resumed_from = ""
        self._valid: set[str] = set()  # names of those that this process has written or verified
        self._memory: dict[str, Tensor] = {}  # what _copy writes to
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # of the last save
        self._failures = 0  # in a row
        self._warned: set[str] = set()  # what _try could not do
        self.team.on_first(self._open)

    def _open(self) -> None:
        """Remove what a killed run has left half written or half deleted."""
        self.root.mkdir(parents=True, exist_ok=True)
        disk.inside(self.root.parent, self.root.name)  # a link would lead the sweep elsewhere
        self._sweep(".tmp-*")
        self._sweep(".trash-*")

    def _sweep(self, pattern: str) -> None:
        for junk in self.root.glob(pattern):
            remove = shutil.rmtree if junk.is_dir() and not junk.is_symlink() else os.unlink
            self._try(f"delete {junk.name}", remove, junk)

    def resume(
        self, model: nn.Module, optimizers: Optimizers, path: Path | None = None, check=None
    ) -> Trainer | None:
        """Load the checkpoint at `path`, or else the newest valid one; returns its trainer.json,
        or None. check(path, trainer) may raise before anything is copied or loaded."""
        state = _state(model, optimizers)
        found, trainer = self.team.on_first(lambda: self._find(path, check), CheckpointError)
        if found:
            if check:
                check(found, trainer)
            self._resumed_from = found.name
            self._valid.add(found.name)
            _read_into(self.team, found, state)
        # A first copy, which faults the pages in: with new ones, each save would take longer.
        self._copy(_own(state, self.team))
        return trainer

    def _find(self, given: Path | None, check) -> tuple[Path | None, Trainer | None]:
        """The checkpoint to resume from, and its trainer.json; both None if there is none. One of
        another run is only a starting point: once this run has its own, the newest one is used."""
        path = latest_valid(self.root, self.log, self.mirror, check)
        is_own = given and given.resolve().parent == self.root.resolve()
        if path is None and given:
            path = _verify(given)
        elif is_own and path.name != given.name:  # else one folder would hold two histories
            _verify(given)  # if it was passed over, it says why
            raise UsageError(
                f"{given} is not the newest checkpoint of its run ({path.name} is); leave out "
                "--resume, or choose another --run_dir to go back to it"
            )
        return path, path and read_trainer(path)

    def save(self, trainer: Trainer, model: nn.Module, optimizers: Optimizers) -> None:
        """Save the state after `trainer.step` steps: wait for the save in flight, copy the state to
        host memory, write it in the background. A failed write is logged; after the third in a row,
        this raises StorageError."""
        self.join()
        self.join(raises=self.error is not None)
        state = _state(model, optimizers)
        if self.team.size > 1 and len(set(self.writers.on_all(lambda: _checksum(state)))) > 1:
            self.log(
                f"warning: step {trainer.step}: the ranks' replicas of the weights are not the same"
            )
        state = self._copy(_own(state, self.team))
        self._thread = threading.Thread(  # outlives a failing main
            target=self._run, args=(trainer.step, state, json_of(trainer, indent=1))
        )
        self._thread.start()

    @torch.no_grad()
    def _copy(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's part of the state to host memory, always the same."""
        if not self._memory:
            self._memory = _host_memory(state)
        for name, tensor in state.items():
            local(self._memory[name]).copy_(local(tensor))
        return self._memory

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of `step`, even while it is being saved, until another is better."""
        self.best = f"step_{step:08d}"
        if self.team.rank == 0 and (self.root / self.best).exists():
            self._try("name the best", disk.write_text, self.root / "best", self.best)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> Exception | None:
        """The error that must end training, if any: then all ranks call join(raises=True)."""
        return self._error if self._failures >= MAX_FAILURES else None

    def join(self, raises: bool = False) -> None:
        """Wait for the save in flight. raises: raise its error, or the last save's, once."""
        if self._thread:
            self._thread.join()
            self._thread = None
        error = self._error
        if raises and error:
            self._error = None
            self._failures = 0
            raise error

    def finish(self) -> None:
        """End the run: wait for the save in flight, raise its failure, and close the mirror. All
        ranks wait for the first: if one exits, the launcher soon kills those that still work."""
        self.join(raises=True)
        finish = lambda: self.mirror.finish(self.root / newest_first(self._valid)[0])
        self.team.on_first(lambda: self.mirror and self._try("finish the mirror", finish))

    def leave(self, kind, error, trace) -> None:
        """However a run ends, wait for a save in flight, unless it is waiting for a lost rank."""
        if not is_lost_rank(error):
            self.join()

    def _run(self, step, state, trainer_json) -> None:
        """Publish and tidy up; the outcome is left in self._error, the same on all ranks."""
        start = time.perf_counter()
        try:
            path = _publish(
                self.writers, self.root, step, state, trainer_json, self._for_good(step)
            )
        except NonFiniteError as e:
            self._error = e
            self._failures = MAX_FAILURES  # training must not continue
            return
        except Exception as e:
            self._failures += 1
            self._error = StorageError(
                f"step {step} could not be saved ({self._failures} in a row): {e}; the checkpoints "
                f"in {self.root} are intact"
            )
            self.log(f"warning: {self._error}")
            return
        self._error = None
        self._failures = 0
        self.log(f"saved {path} in {time.perf_counter() - start:.2f} s")
        self.team.on_first(lambda: self._tidy(path))  # the others wait for the upload here

    def _tidy(self, path: Path) -> None:
        """After a save: `best`, the mirror, retention."""
        self._valid.add(path.name)
        if self.best == path.name:
            self._try("name the best", disk.write_text, self.root / "best", path.name)
        if self.mirror:
            self._try(f"upload {path.name}", self.mirror.upload, path)
        self._try("delete old checkpoints", self._retain)

    def _try(self, what: str, work: Callable, *args) -> None:
        """Run work(*args); its failure is a warning, said once: the checkpoint itself is safe."""
        try:
            work(*args)
        except Exception as e:
            if what not in self._warned:
                self.log(f"warning: could not {what}: {reason_of(e)}")
            self._warned.add(what)

    def _retain(self) -> None:
        """Delete all but the newest `keep` that this process has written or verified, the best,
        and those that stay."""
        found = checkpoints(self.root)
        kept = [path.name for path in found if path.name in self._valid][: self.keep]
        if len(kept) < self.keep:
            return  # nothing to spare
        file = self.root / "best"
        if file.exists():
            best = disk.read_text(file).strip()
            if self.root / best not in found:
                return self.log(
                    f"warning: {file} names {best[:80]!r}, which is no checkpoint; nothing is "
                    "deleted until there is a better one"
                )
            kept.append(best)
        for path in found:
            if path.name not in kept:
                self._try(f"delete {path.name}", self._delete_old, path)
        self._sweep(".trash-*")

    def _delete_old(self, path: Path) -> None:
        """Delete a checkpoint, unless it stays, or cannot say so."""
        file = path / MANIFEST
        listed = formats.read(file, FileList)
        if not self.stays(path.name, listed, lambda text: disk.write_text(file, text)):
            disk.set_aside(path)

    def stays(self, name: str, listed: FileList, write: Callable) -> bool:
        """Whether this checkpoint is kept however old it is, here or in the mirror. If the options
        of today say so, `write` its MANIFEST anew, which says so to later starts with others."""
        if self._for_good(int(name[5:])) and not listed.kept:
            listed = replace(listed, kept=True)
            write(json_of(listed))
        return bool(listed.kept) or name == self._resumed_from

    def _for_good(self, step: int) -> bool:
        """Whether the options keep the checkpoint of this step for good."""
        return step == self.keep_step or bool(self.keep_every) and step % self.keep_every == 0
