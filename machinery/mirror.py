"""A run outlives its machine: its checkpoints go to a store, behind the training.

Writes MIRROR/NAME, a folder or a URL (store.py), in which
    step_00001000/  is a checkpoint as on the disk; MANIFEST.json comes last, after every file has
                    been read back and hashed, and without it there is no checkpoint
    newest, best    name checkpoints
    lease.json      says which process writes here; it runs out when that process is gone
    metrics.jsonl   and the other small files of the run (SMALL) lie beside them
Guarantees: a store that is slow, full or gone does not stop a run, and never makes one resume from
what is not whole; two machines do not write one run. Next: checkpoint.py.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from config import RunConfig, UsageError
from machinery.checkpoint import MANIFEST, _trash, checkpoints, read_trainer, why_invalid
from machinery.disk import fsync
from machinery.errors import CheckpointError, StorageError
from machinery.log import Log, duration
from machinery.store import Store

SMALL = (
    "metrics.jsonl", "config.json", "tokenizer.json", "status.json", "samples.jsonl", "eval.jsonl",
    "report.html", "report.md", "loss.png",
)  # fmt: skip
MILESTONES = "milestones"
LEASE_S, RENEW_S, SETTLE_S = 180.0, 30.0, 0.3
TRIES = 3  # of the last upload of a run
LAST_UPLOAD_S = 3600.0  # the end of a run waits no longer for it


def open_mirror(options: RunConfig, log: Log):
    """`with open_mirror(...) as mirror:` the run's place in the store; None without --mirror, and
    on all ranks but the first."""
    if not options.mirror or not log.is_first:
        return contextlib.nullcontext()
    return Mirror(options.mirror, log, options.mirror_minutes)


class Lease:
    """The right to write under a store's URL. UsageError while another process has it."""

    def __init__(self, store: Store):
        self.store, here = store, socket.gethostname()
        with contextlib.suppress(OSError):  # the container, in which a process id is one process
            here += f" {os.readlink('/proc/self/ns/pid')}"
        self.own = dict(id=uuid.uuid4().hex, host=here, process=os.getpid())
        if not self._is_alive(lease := self.read()):
            self.renew()
            time.sleep(SETTLE_S)  # has another one taken it in the same moment?
            lease = self.read()
        if self._is_alive(lease):
            age_s = time.time() - lease["time"]
            raise UsageError(
                f"{store.url} is in use by {self.holder(lease)} (lease renewed {age_s:.0f} s ago); "
                f"stop it, wait {LEASE_S:.0f} s if its machine is gone, or choose another --mirror"
            )

    def read(self) -> dict:
        """The lease in the store; {} if there is none, or none that can be read."""
        with contextlib.suppress(ValueError, TypeError):
            lease = json.loads(self.store.read("lease.json"))
            if isinstance(lease, dict) and isinstance(lease.get("time"), (int, float)):
                return lease
        return {}

    def renew(self) -> None:
        self.store.write("lease.json", json.dumps(self.own | {"time": time.time()}).encode())

    def taken_by(self) -> str:
        """Who else has it by now; empty: nobody."""
        lease = self.read()
        return self.holder(lease) if lease and lease.get("id") != self.own["id"] else ""

    @staticmethod
    def holder(lease: dict) -> str:
        host = str(lease.get("host")).partition(" ")[0]
        return f"process {lease.get('process')} on {host}"

    def _is_alive(self, lease: dict) -> bool:
        """Whether it is another's, whose process is seen on this host, or has renewed it lately."""
        if not lease or lease.get("id") == self.own["id"]:
            return False
        if lease.get("host") == self.own["host"]:
            try:
                os.kill(lease.get("process"), 0)
            except PermissionError:  # another user's
                return True
            except (OSError, TypeError, OverflowError):
                return False
            return True
        return time.time() - lease["time"] < LEASE_S


class Mirror:
    """The checkpoints of a run in a store. One thread uploads the newest, another renews the
    lease. log (machinery/log.py): its run_dir, print and note are used."""

    def __init__(self, url: str, log: Log, minutes: float = 0.0):
        head, mark, query = url.partition("?")
        self.store = Store(f"{head.rstrip('/')}/{log.run_dir.name}{mark}{query}")
        self.log, self.every_s = log, 60 * minutes
        self.keep, self.best = 2, ""  # how many stay, and the name of the best
        self.stays: Callable[[str], bool] = lambda name: False  # and which others
        self._changed = threading.Condition()  # what follows:
        self._pending: Path | None = None  # the newest checkpoint that is not uploaded yet
        self._uploading = ""  # the name of the one that is on its way
        self._due, self._failed = 0.0, 0  # when the next may begin; failures in a row
        self._begun = self._closing = False
        self._over = threading.Event()  # nothing is written any more
        self._saved_s, self._measured = 0.0, False
        self._milestones: set[str] = set()  # those that are in the store
        self._durable: tuple[str, float] | None = None  # the newest in the store; since when
        self._lease = Lease(self.store)
        for name in self.checkpoints():  # remove what a killed upload or deletion has left
            if not self._is_whole(name):
                self.store.remove(name, recursive=True)
            elif not self._durable:
                self._durable = name, self.store.modified(f"{name}/{MANIFEST}")
        try:
            self.store.drop_parts()
        except StorageError as error:  # another right, which not every store knows
            log.print(f"warning: the rest of uploads that were killed is left there: {error}")
        self._renewer = threading.Thread(target=self._renew, daemon=True)
        for thread in (threading.Thread(target=self._upload_all, daemon=True), self._renewer):
            thread.start()

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            with contextlib.suppress(StorageError):  # it is tried again soon
                self._check_lease()
                self._lease.renew()

    def _check_lease(self) -> None:
        """StorageError, and the end of this run, if another machine has taken it over."""
        if not (other := self._lease.taken_by()):
            return
        if not self._over.is_set():
            self._over.set()
            self.log.print(f"{self.store.url} was taken over by {other}: this run stops")
            os.kill(os.getpid(), signal.SIGTERM)
        raise StorageError(f"{self.store.url} belongs to {other} by now")

    # ----------------------------------------------------------------------- what is there

    def checkpoints(self) -> list[str]:
        """The names of those there are, newest first; not all need be whole. `newest` names one
        that a listing may still lack."""
        names = {*self.store.sizes(), (self.store.read("newest") or b"").decode(errors="replace")}
        names = (name for name in names if re.fullmatch(r"step_\d{1,15}", name))
        return sorted(names, key=lambda name: int(name[5:]), reverse=True)

    def _is_whole(self, name: str) -> bool:
        return self.store.read(f"{name}/{MANIFEST}") is not None

    def restore(self, name: str, root: Path, check: Callable | None = None) -> Path:
        """Download a checkpoint into `root`; and the run's small files, where they reach further
        than those that are here. CheckpointError if it is not whole, StorageError if the store
        fails. check(path, trainer) may raise before the tensors come."""
        began, tmp = time.monotonic(), root / f".tmp-{name[5:]}-{uuid.uuid4().hex[:8]}"
        try:
            for file in (MANIFEST, "trainer.json"):
                self.store.fetch(f"{name}/{file}", tmp / file)
            if why := why_invalid(tmp, only="trainer.json"):
                raise CheckpointError(why)
            if check:
                check(f"{self.store.url}/{name}", read_trainer(tmp))
            for file, sha256 in json.loads((tmp / MANIFEST).read_bytes())["files"].items():
                self.store.fetch(f"{name}/{file}", tmp / file, sha256)
            for folder in (tmp / "dcp", tmp):
                fsync(folder)
            if (root / name).exists():
                _trash(root / name)  # a damaged one of the same step
            tmp.rename(root / name)
            fsync(root)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        for small in SMALL:
            content, own = self.store.read(small), self.log.run_dir / small
            if content and (not own.is_file() or own.stat().st_size < len(content)):
                own.write_bytes(content)
        took_s = time.monotonic() - began
        self.log.print(f"{name} is restored from {self.store.url} in {took_s:.1f} s")
        self._note_durable(name)
        return root / name

    def _note_durable(self, name: str) -> None:
        self._durable = name, time.time()
        with contextlib.suppress(OSError):  # a full disk
            self.log.note(durable=dict(step=int(name[5:]), time=time.time()))

    def age(self) -> str:
        """How far back the loss of this machine would throw the run, in words."""
        if not self._durable:
            return "nothing durable yet"
        name, at = self._durable
        return f"newest durable: step {int(name[5:]):,}, {duration(time.time() - at)} ago"

    # --------------------------------------------------------------------------- uploading

    def begin(self, path: Path | None = None) -> None:
        """The run is taken up, from this checkpoint in its folder if there is one: from now on the
        store's folder is this run's to write."""
        self._begun = True
        if path and (not self._durable or self._durable[0] != path.name):
            self.offer(path)

    def offer(self, path: Path, saved_s: float = 0.0) -> None:
        """A checkpoint has been published, which took `saved_s`: upload it when its turn comes."""
        with self._changed:
            if self._pending and self._due <= time.monotonic():
                self._say_skipped(self._pending.name)
            self._pending, self._saved_s, self._begun = path, saved_s, True
            self._changed.notify_all()

    def needs(self, path: Path) -> bool:
        """Whether it is being read for an upload, or will be."""
        with self._changed:
            return path.name == self._uploading or path == self._pending

    def flush(self, timeout_s: float = LAST_UPLOAD_S) -> None:
        """Upload what is left, without regard to the interval, and wait for it."""
        with self._changed:
            self._due, self._failed = 0.0, 0
            self._changed.notify_all()
            idle = lambda: not self._pending and not self._uploading or self._over.is_set()
            self._changed.wait_for(idle, timeout_s)

    def _next(self) -> Path | None:
        """Wait for a checkpoint whose turn has come; None: the run has ended, and nothing is
        left."""
        with self._changed:
            while not self._over.is_set():
                wait_s = self._due - time.monotonic()
                if self._pending and wait_s <= 0:
                    path, self._pending = self._pending, None
                    self._uploading, self._due = path.name, time.monotonic() + self.every_s
                    return path
                if self._closing and not self._pending:
                    return None
                self._changed.wait(wait_s if self._pending else None)
        return None

    def _upload_all(self) -> None:
        while path := self._next():
            try:
                self._upload(path)
                self._failed = 0
            except Exception as error:
                self._put_back(path, error)
            with self._changed:
                self._uploading = ""
                self._changed.notify_all()

    def _put_back(self, path: Path, error: Exception) -> None:
        """After a failure: it is tried again later, or a newer one; at the end of a run, soon."""
        self._failed += 1
        pause_s = 1 if self._closing else min(2**self._failed, 300)
        gives_up = self._over.is_set() or self._closing and self._failed >= TRIES
        with self._changed:
            self._pending = None if gives_up else self._pending or path
            self._due = time.monotonic() + pause_s
        said = error if isinstance(error, StorageError) else repr(error)
        then = "and is given up" if gives_up else f"again in {pause_s} s"
        self.log.print(f"warning: {path.name} is not uploaded, {then}: {said}; {self.age()}")

    def _upload(self, path: Path) -> None:
        """Send a checkpoint, then the run's small files, then MANIFEST.json."""
        began, name = time.monotonic(), path.name
        manifest = (path / MANIFEST).read_bytes()
        files = json.loads(manifest)["files"]
        self.store.remove(f"{name}/{MANIFEST}")  # of one with the same step: it is replaced
        for file, sha256 in files.items():
            if self._closing and self._pending:  # a machine that is taken away has no time for both
                return self._say_skipped(name)
            self.store.send(path / file, f"{name}/{file}", sha256)
        self._send_small()  # metrics.jsonl must reach as far as the checkpoint
        self._check_lease()
        self.store.send(path / MANIFEST, f"{name}/{MANIFEST}", hashlib.sha256(manifest).hexdigest())
        self.store.write("newest", name.encode())
        took_s, size = time.monotonic() - began, sum((path / file).stat().st_size for file in files)
        self._note_durable(name)
        said = f"{name} is in {self.store.url}: {size / 1e6:,.1f} MB in {took_s:.1f} s"
        if not self._measured:
            both_s, grace = self._saved_s + took_s, os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
            said += f"; to save and upload after a notice to stop takes {both_s:.1f} s"
            if "TORCHELASTIC_RUN_ID" in os.environ and both_s > float(grace or 30):
                said += f", but torchrun kills after {grace or 30} s: before you start, "
                said += f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * both_s:.0f}"
            self._measured = True
        self.log.print(said)
        try:
            self._send_milestones()
            self._tidy()
        except StorageError as error:
            self.log.print(f"warning: after the upload of {name}: {error}")

    def _send_milestones(self) -> None:
        """Those that the store lacks, each with its MANIFEST.json last."""
        for path in reversed(checkpoints(self.log.run_dir / "checkpoints" / MILESTONES)):
            name = f"{MILESTONES}/{path.name}"
            if name not in self._milestones and not self._is_whole(name):
                manifest = (path / MANIFEST).read_bytes()
                files = json.loads(manifest)["files"]
                for file, sha256 in [
                    *files.items(),
                    (MANIFEST, hashlib.sha256(manifest).hexdigest()),
                ]:
                    self.store.send(path / file, f"{name}/{file}", sha256)
            self._milestones.add(name)

    def _say_skipped(self, name: str) -> None:
        self.log.print(f"{self.store.url} is slower than the saves: {name} is skipped")

    def _send_small(self) -> None:
        for file in (self.log.run_dir / name for name in SMALL):
            if file.is_file():
                self.store.write(file.name, file.read_bytes())

    def _tidy(self) -> None:
        """Name the best one, if it is there, and delete those that need not stay."""
        names = self.checkpoints()
        if self.best in names:
            self.store.write("best", self.best.encode())
        best = (self.store.read("best") or b"").decode(errors="replace")
        for name in list(filter(self._is_whole, names))[self.keep :]:
            if name != best and not self.stays(name):
                self.store.remove(f"{name}/{MANIFEST}")  # half deleted, it is no checkpoint
                self.store.remove(name, recursive=True)

    # ------------------------------------------------------------------------------ the end

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, kind, *_) -> None:
        """Upload what is left, and the small files as they are now; give the lease back."""
        self._closing = True
        if kind is not KeyboardInterrupt:
            self.flush()
        if self._over.is_set():
            return
        try:
            if self._begun:  # else it was refused, and its files are another run's
                self._tidy()
                self._send_small()
            self._over.set()
            self._renewer.join(10)
            self._check_lease()
            self.store.remove("lease.json")
        except StorageError as error:
            self.log.print(f"warning: {error}; {self.age()}")
        finally:
            self._over.set()
