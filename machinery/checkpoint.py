"""Checkpoints: a run that is killed at any moment resumes from the newest valid one, bit for bit.

Writes and reads ROOT/step_00001000/{MANIFEST.json, trainer.json, dcp/}, tensors through DCP
(torch.distributed.checkpoint): one process, DDP and FSDP2 load what any of them saved, on any
number of ranks, which must all see ROOT. A checkpoint is valid only if every file in its MANIFEST
has its sha256. ROOT/best names the best one; `.tmp-*` and `.trash-*` never count, and the next
start removes them. Random states are not saved: training seeds from the position. Start at
`_publish`, the protocol. Next: disk.py.
"""

import itertools
import json
import os
import pickle
import re
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.tensor import DTensor

from config import UsageError
from machinery.disk import check_room, fsync, read_json, sha256_of, write_json, write_text
from machinery.errors import CheckpointError, DataError, NonFiniteError, StorageError
from optim import local

Optimizers = list[torch.optim.Optimizer]
FORMAT = 2  # 1 also held random states
MANIFEST = "MANIFEST.json"
MILESTONES = "milestones"  # ROOT/milestones/step_00001000: weights alone, never deleted
MAX_FAILURES = 3  # failed saves in a row that end the run
METADATA = (  # the classes of DCP's metadata
    "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unini")


def _stage(name: str) -> None:
    """Called by name at every stage of a save: tests replace it to kill the process there."""


class _Team:
    """The ranks that save together, in a gloo group of their own: a save in the background must
    not mix with the collectives of training. alone: this process only."""

    def __init__(self, alone: bool = False):
        together = dist.is_initialized() and not alone
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self.group = dist.new_group(backend="gloo") if together else None
        self.for_dcp = {"process_group": self.group, "no_dist": self.size == 1}

    def on_all(self, work: Callable[[], Any], otherwise: type = StorageError) -> list:
        """Run work() on every rank; returns the results by rank. If one rank fails, all ranks raise
        the same error, so that none waits for it: of class `otherwise` unless from errors.py."""
        try:
            own = (work(), None)
        except (Exception, dcp.CheckpointException) as e:  # DCP's is a BaseException
            own = (None, self._as_value(e, otherwise))
        results = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(results, own, group=self.group)
        errors = [error for _, error in results if error]
        if errors:
            raise errors[0][0]("; ".join(dict.fromkeys(text for _, text in errors)))
        return [result for result, _ in results]

    def on_first(self, work: Callable[[], Any], otherwise: type = StorageError) -> Any:
        """Run work() on rank 0 only; every rank gets its result, or its error."""
        return self.on_all(lambda: work() if self.rank == 0 else None, otherwise)[0]

    def _as_value(self, e: BaseException, otherwise: type) -> tuple[type, str]:
        if hasattr(e, "exit_code"):
            return type(e), f"rank {self.rank}: {e}" if self.size > 1 else str(e)
        failures = getattr(e, "failures", {self.rank: (e, None)})  # DCP's are those of all ranks
        texts = (f"rank {rank}: {type(why).__name__}: {why}" for rank, (why, _) in failures.items())
        return otherwise, "; ".join(texts)


# ------------------------------------------------------------------------ the folders on disk


def _trash(path: Path) -> None:
    """Rename a folder, then delete it: a kill never leaves half a checkpoint under its name."""
    trash = path.with_name(f".trash-{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(trash)
    _stage("trash")
    shutil.rmtree(trash)


def checkpoints(root: str | Path) -> list[Path]:
    """The checkpoint folders in a root, valid or not, newest first."""
    try:
        found = [Path(root, n) for n in os.listdir(root) if re.fullmatch(r"step_\d+", n)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read ({error.strerror})") from None
    return sorted(found, key=step_of, reverse=True)


def with_milestones(root: Path) -> list[Path]:
    """The checkpoints and the milestones, newest first; of a step that has both, the former."""
    found = [*checkpoints(root / MILESTONES), *checkpoints(root)]
    return sorted({step_of(p): p for p in found}.values(), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name[5:])


def why_invalid(path: str | Path, only: str = "") -> str | None:
    """Read and hash the whole checkpoint, or `only` one file: None if it is as published, else its
    first fault. MANIFEST holds only names and hashes, so a wrong byte in it is found as well."""
    if not Path(path).is_dir():
        return "there is no such folder"
    try:
        manifest = read_json(Path(path) / MANIFEST)
    except DataError as error:
        return str(error)
    if (found := manifest.get("format")) != FORMAT:
        return f"it has format {found}, another version's; this program reads format {FORMAT}"
    if not isinstance(files := manifest.get("files"), dict) or "trainer.json" not in files:
        return f"{MANIFEST} does not name its files"
    for name, expected in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{MANIFEST} names {name}, which is not in this folder"
        if only not in ("", name):
            continue
        try:
            actual = sha256_of(Path(path) / name)
        except (OSError, ValueError) as e:
            return f"{name} is missing or unreadable ({type(e).__name__})"
        if actual != expected:
            return f"{name} has sha256 {actual}, the manifest says {expected}"
    return None


def latest_valid(
    root: str | Path, log: Callable = print, mirror: Any = None, check: Callable | None = None
) -> Path | None:
    """The newest valid checkpoint in root; None if there is none at all. One that mirror
    (mirror.py) has and root has not is restored first, and `check` may refuse it. CheckpointError
    if none is valid, since training must not start over in silence."""
    own = {path.name: path for path in checkpoints(root)}
    far = mirror.checkpoints() if mirror else []
    names = sorted({*own, *far}, key=lambda name: int(name[5:]), reverse=True)
    for name in names:
        if name in own:
            if (why := why_invalid(own[name])) is None:
                return own[name]
            log(f"warning: {own[name]} is not used: {why}")
        if name in far:
            try:
                return mirror.restore(name, Path(root), check)
            except CheckpointError as error:
                log(f"warning: {mirror.store.url}/{name} is not used: {error}")
    if names:
        raise CheckpointError(
            f"none of the {len(names)} checkpoints in {root} is valid; restore one from a "
            "copy, or move them away to start over"
        )
    return None


def _verify(path: Path, only: str = "") -> Path:
    if why := why_invalid(path, only):
        raise CheckpointError(f"{path} cannot be used: {why}")
    return path


def read_trainer(path: str | Path) -> dict:
    """The trainer's own record, beside the tensors: step, world_size, configuration, ...
    CheckpointError unless it is as it was published."""
    return read_json(_verify(Path(path), only="trainer.json") / "trainer.json")


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


def _own(state: dict[str, Tensor], team: _Team) -> dict[str, Tensor]:
    """What this rank copies and writes: its shards, and its share of the tensors that every rank
    holds whole, dealt out by size."""
    whole = sorted((t.nbytes, name) for name, t in state.items() if not isinstance(t, DTensor))
    others = {name for i, (_, name) in enumerate(whole) if i % team.size != team.rank}
    return {name: t for name, t in state.items() if name not in others}


def _check_finite(state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        part = local(tensor)  # its least and greatest are NaN if one element is
        if part.numel() and not torch.stack(part.aminmax()).isfinite().all():
            raise NonFiniteError(f"{name} holds non-finite numbers; it was not saved")


class _Unpickler(pickle.Unpickler):
    """Reads DCP's metadata, which is a pickle, and refuses whatever is not part of it: a pickle may
    name any function, and calls it while it is read."""

    KNOWN = {
        *(("torch.distributed.checkpoint.metadata", name) for name in METADATA),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    }

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in self.KNOWN or dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")


class _Reader(dcp.FileSystemReader):
    """DCP's reader, but for the metadata."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _check_fits(path: Path, state: dict[str, Tensor], prefix: str) -> None:
    """Compare names, dtypes and shapes: DCP would cast dtypes and ignore extra keys."""
    try:
        saved = _Reader(path / "dcp").read_metadata().state_dict_metadata
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise CheckpointError(f"{path / 'dcp' / '.metadata'} cannot be used: {error}") from None
    saved = {k: (str(v.properties.dtype), tuple(v.size)) for k, v in saved.items()}
    wanted = {k: (str(v.dtype), tuple(v.shape)) for k, v in state.items()}
    for key in sorted(saved.keys() | wanted.keys()):
        there, here = saved.get(key, "not there"), wanted.get(key, "not there")
        if there != here and key.startswith(prefix):
            raise CheckpointError(
                f"{path} does not fit this model: {key} is {there} in the checkpoint and {here} "
                "here; use the configuration in its trainer.json and the model.py of that time, or "
                "another run directory"
            )


def _read_into(team: _Team, path: Path, state: dict[str, Tensor], prefix: str = "") -> None:
    team.on_all(lambda: _check_fits(path, state, prefix), CheckpointError)
    reader = _Reader(path / "dcp")
    team.on_all(lambda: dcp.load(state, storage_reader=reader, **team.for_dcp), CheckpointError)


def load_model(path: str | Path, model: nn.Module, verified: bool = False) -> dict:
    """Load only the weights, or this rank's shards of them; returns `trainer`. A damaged
    file or a tensor that does not fit is a CheckpointError, and nothing is loaded. verified:
    `latest_valid` has just hashed every file."""
    path = Path(path) if verified else _verify(Path(path))
    state = {f"model.{name}": t for name, t in model.state_dict().items()}
    _read_into(_Team(alone=True), path, state, prefix="model.")
    return read_trainer(path)


# ------------------------------------------------------------------------------ the protocol


def _publish(team: _Team, root: Path, step: int, state: dict[str, Tensor], record: str) -> Path:
    """Write the checkpoint of `step`, which exists if and only if the rename (5) has happened.
    state: this rank's part (see _own); record: the text of trainer.json. All ranks raise the same
    StorageError or NonFiniteError."""
    path = root / f"step_{step:08d}"
    sizes = team.on_all(lambda: sum(local(t).nbytes for t in state.values()))
    tmp = team.on_first(lambda: _begin(path, sum(sizes)))  # (1) enough room? a temporary folder
    if tmp is None:
        return path  # published before, and still valid
    try:
        team.on_all(lambda: _check_finite(state))
        # The state is in host memory already: DCP's copy-ahead would synchronize with the GPU
        # every few tensors, that is, wait for training.
        writer = dcp.FileSystemWriter(tmp / "dcp", sync_files=True, per_thread_copy_ahead=0)
        team.on_all(lambda: dcp.save(state, storage_writer=writer, **team.for_dcp))  # (2) write
        _stage("write")
        hashes = team.on_all(lambda: _hash_own(team, tmp))  # (3) each rank re-reads its files
        _stage("hash")
        team.on_first(lambda: _commit(tmp, path, record, hashes))  # (4) MANIFEST (5) rename
    except Exception:
        if team.rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    return path


def _begin(path: Path, nbytes: int) -> Path | None:
    if why_invalid(path) is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    check_room(path.parent, 1.02 * nbytes + (1 << 20), "a checkpoint must fit")
    tmp = path.parent / f".tmp-{path.name[5:]}-{uuid.uuid4().hex[:8]}"
    (tmp / "dcp").mkdir(parents=True)
    _stage("begin")
    return tmp


def _hash_own(team: _Team, tmp: Path) -> dict[str, str]:
    """{name: sha256} of the files that this rank has written; DCP has forced them onto the disk."""
    own = list(tmp.glob(f"dcp/__{team.rank}_*"))
    if team.rank == 0:
        own.append(tmp / "dcp" / ".metadata")
    return {str(file.relative_to(tmp)): sha256_of(file) for file in own}


def _commit(tmp: Path, path: Path, record: str, hashes: list[dict[str, str]]) -> None:
    fsync(tmp / "dcp")
    write_text(tmp / "trainer.json", record)
    files = {name: sha for own in hashes for name, sha in own.items()}
    files["trainer.json"] = sha256_of(tmp / "trainer.json")
    write_json(tmp / MANIFEST, {"format": FORMAT, "files": files})  # (4)
    _stage("manifest")
    if path.exists():
        _trash(path)  # a damaged one of the same step
    tmp.rename(path)  # (5) the one moment at which the checkpoint comes into being
    fsync(path.parent)
    _stage("rename")


class Checkpointer:
    """All checkpoints of a run: background saves, retention, resume. Every rank calls every
    method. root: the folder of checkpoints, which this run owns (disk.lock). keep: how many of
    the newest valid ones stay, apart from the best, that of `keep_step` and the one resumed from.
    mirror: gets a copy of each on the first rank, the only one that needs it (mirror.py).
    keep_every: steps between milestones, of weights alone, which stay too (0: none)."""

    def __init__(
        self, root, keep: int = 2, keep_step: int = 0, mirror=None, log=print, keep_every: int = 0
    ):
        self.root, self.mirror, self.log = root, mirror, log
        self.keep, self.keep_step, self.keep_every = keep, keep_step, keep_every
        if mirror:
            mirror.keep, mirror.stays = keep, self._stays
        self._team = _Team()
        self._resumed_from = self._best = ""  # names of checkpoints
        cuda = torch.cuda.is_available()  # then the copy that a save writes is in pinned memory
        self._stager = staging.BlockingAsyncStager(cache_staged_state_dict=cuda)
        self._thread: threading.Thread | None = None
        self._saving = False  # at any time since the last call of was_saving
        self._error: Exception | None = None  # of the last save
        self._failures = 0  # in a row
        self._warned = False
        self._team.on_first(self._sweep)

    def _sweep(self) -> None:
        """Remove everything that a killed run has left half written or half deleted."""
        self.root.mkdir(parents=True, exist_ok=True)
        for root in (self.root, self.root / MILESTONES):
            for junk in [*root.glob(".tmp-*"), *root.glob(".trash-*")]:
                shutil.rmtree(junk) if junk.is_dir() else junk.unlink()

    def resume(
        self, model: nn.Module, optimizers: Optimizers, path: Path | None = None, check=None
    ) -> dict | None:
        """Load the checkpoint at `path`, or else the newest valid one of root and mirror; returns
        its `trainer`, or None if there is none. check(path, trainer) may raise before anything is
        copied or loaded."""
        state = _state(model, optimizers)
        found, trainer = self._team.on_first(lambda: self._find(path, check), CheckpointError)
        if found:
            if check:
                check(found, trainer)
            self._resumed_from = found.name
            _read_into(self._team, found, state)
        # Every save copies into this memory: faulting in new pages would take longer than the copy.
        self._stager.state_dict_cache = self._stager.stage(_own(state, self._team))
        self._stager.cache_staged_state_dict = True
        return trainer

    def _find(self, path: Path | None, check) -> tuple[Path | None, dict | None]:
        """The checkpoint to resume from, and its `trainer`; both None if there is none. Runs on
        rank 0, the only one that needs to see the mirror. UsageError if this run has a newer one
        than `path`: the checkpoints of two histories would lie in one folder."""
        own = self.root.resolve()
        if path and path.resolve().parent.name == MILESTONES:
            raise UsageError(f"{path} has no optimizer to resume; give it to --init_from")
        far = self.mirror.checkpoints() if self.mirror else []
        if path and path.resolve().parent != own and (checkpoints(own) or far):
            path = None  # only the starting point, of another run: this one has its own by now
        if not path:
            path = latest_valid(self.root, self.log, self.mirror, check)
            return path, path and read_trainer(path)
        _verify(path)
        newer = (p for p in checkpoints(own) if step_of(p) > step_of(path))
        if newest := next((p for p in newer if why_invalid(p) is None), None):
            raise UsageError(
                f"{path} is not the newest checkpoint of its run ({newest.name} is); leave out "
                "--resume, or choose another --run_dir to go back to it"
            )
        return path, read_trainer(path)

    def save(
        self, step: int, model: nn.Module, optimizers: Optimizers, trainer: dict, wait: bool = False
    ) -> None:
        """Save the state after `step` steps: wait for the previous save if it is still running,
        copy the state to host memory, and write it in the background. A failed write is logged and
        training continues; the third in a row raises StorageError. wait: return when it is
        published, and raise any failure."""
        start = time.perf_counter()
        if self._thread and self._thread.is_alive():
            self.join()
            self.log(f"step {step}: waited {time.perf_counter() - start:.1f} s for the last save")
        self.wait()
        state = _own(_state(model, optimizers), self._team)
        record = json.dumps(trainer | {"step": step, "world_size": self._team.size}, indent=1)
        self._saving = True
        if wait or self._failures == MAX_FAILURES - 1:  # a third failure must raise here and now
            self._run(step, state, record, start)
            self.wait(final=wait)
        else:
            state = self._stager.stage(state)
            args = (step, state, record, start, time.perf_counter() - start)
            self._thread = threading.Thread(target=self._run, args=args)  # outlives a failing main
            self._thread.start()

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of `step`, even if still being saved, until there is a better one."""
        self._best = f"step_{step:08d}"
        if self._team.rank == 0 and (self.root / self._best).exists():
            self._tidy(self.root / self._best)

    def was_saving(self) -> bool:
        """Whether a save was in flight at any time since the last call."""
        before, self._saving = self._saving, bool(self._thread and self._thread.is_alive())
        return before or self._saving

    def join(self) -> None:
        """Wait for the save in flight; its outcome stays for `wait`."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def wait(self, final: bool = False) -> None:
        """Wait for the save in flight. Raises its error if training must not continue after it;
        final: any error."""
        self.join()
        error = self._error
        if error and (final or self._failures >= MAX_FAILURES):
            self._error, self._failures = None, 0
            raise error

    def close(self) -> None:
        """The end of the run: wait for the save in flight. Raises if the last save failed."""
        self.wait(final=True)

    def finish(self) -> None:
        """The last files go to the mirror, while every rank waits: its launcher kills them all soon
        after the first of them has ended."""
        self._team.on_first(lambda: self.mirror and self.mirror.close())

    def _run(self, step, state, record, start, stall_s=None) -> None:
        """Publish and tidy up, in the background or not, and leave the outcome in self._error: the
        same on all ranks, which read it at the same step in wait()."""
        try:
            if self.keep_every and step % self.keep_every == 0:  # first: a kill leaves no gap
                weights = {name: t for name, t in state.items() if name.startswith("model.")}
                _publish(self._team, self.root / MILESTONES, step, weights, record)
            path = _publish(self._team, self.root, step, state, record)
        except NonFiniteError as e:
            self._error, self._failures = e, MAX_FAILURES  # training must not continue
            return
        except Exception as e:
            self._failures += 1
            self._error = StorageError(
                f"step {step} could not be saved ({self._failures} in a row): {e}; "
                f"the checkpoints in {self.root} are intact; is there space for another?"
            )
            self.log(f"warning: {self._error}")
            return
        self._error, self._failures = None, 0
        # The others wait here: in a collective of training they would soon give up.
        took_s = time.perf_counter() - start
        self._team.on_first(lambda: self._tidy(path, took_s))
        paused = f"training paused {stall_s or took_s:.2f} s"
        self.log(f"saved {path} in {took_s:.2f} s, {paused}")
        grace_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        if "TORCHELASTIC_RUN_ID" in os.environ and took_s > grace_s and not self._warned:
            self._warned = True
            self.log(
                f"warning: a save takes {took_s:.0f} s, but torchrun kills {grace_s:.0f} s after "
                f"SIGTERM; before you start, export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * took_s:.0f}"
            )

    def _tidy(self, path: Path, saved_s: float | None = None) -> None:
        """Mirror, `best`, and, after a save, retention. A failure here is a warning: the checkpoint
        itself is safe."""
        try:
            if self._best == path.name:
                write_text(self.root / "best", path.name)
            if saved_s is not None:
                if self.mirror:
                    self.mirror.upload(path, best=self._best == path.name)
                self._retain(path)
        except Exception as e:
            self.log(f"warning: after the save of {path.name}: {type(e).__name__}: {e}")

    def _retain(self, new: Path) -> None:
        """Delete all but the newest `keep` valid ones, the best, and those that stay. `new` has
        just been written; the others count only after they have been read and hashed."""
        found = checkpoints(self.root)
        valid = (path for path in found if path == new or why_invalid(path) is None)
        kept = list(itertools.islice(valid, self.keep))
        if len(kept) < self.keep:
            return  # nothing to spare
        if (best := self.root / "best").exists():
            name = best.read_text(errors="replace").strip()
            if self.root / name not in found:
                why = f"{best} names {name[:80]!r}, which is no checkpoint"
                self.log(f"warning: {why}; until the next better one, nothing is deleted")
                return
            kept.append(self.root / name)
        for path in found:
            if path not in kept and not self._stays(path.name):
                _trash(path)

    def _stays(self, name: str) -> bool:
        """Whether it is kept whatever its age, here and in the mirror."""
        return name in (self._resumed_from, f"step_{self.keep_step:08d}")
