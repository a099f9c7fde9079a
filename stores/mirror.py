"""A run outlives its machine: the thread that saves a checkpoint also copies it to a store.

Writes MIRROR/NAME, a folder or a URL (store.py), in which
    step_00001000/ID/...         is a checkpoint as on the disk, under the ID of its sender
    step_00001000/ID.run/...     the small files of the run (SMALL) at that time
    step_00001000/MANIFEST.json  its manifest, with the IDs of both: it comes last, and without it
                                 there is no checkpoint
    best                         names the best checkpoint
    lease                        says which process writes here
A store that is slow, full or gone does not stop a run that has begun, and no run resumes from an
incomplete copy; two machines never write the same file of a checkpoint. Next: checkpoint.py.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from config import RunConfig, UsageError
from machinery import disk, formats
from machinery.checkpoint import MANIFEST, newest_first, read_trainer
from machinery.errors import CheckpointError, DataError, StorageError
from machinery.formats import FileList
from machinery.log import Log
from stores.store import Store

SMALL = (
    "metrics.jsonl", "config.json", "code.diff", "tokenizer.json", "status.json", "samples.jsonl",
    "eval.jsonl", "report.html", "wandb_id",
)  # fmt: skip
LARGEST_SMALL = 1 << 30  # bytes of one of these
RENEW_S = 15.0  # of the lease
WATCH_S = 60.0  # of the lease


@contextlib.contextmanager
def open_mirror(options: RunConfig, log: Log) -> Iterator["Mirror"]:
    """The run's mirror, whose lease is given back however the run ends."""
    mirror = Mirror(options.mirror, log)
    try:
        yield mirror
    finally:
        with contextlib.suppress(StorageError):
            mirror.lease.give_back()


def text_of(content: bytes | None) -> str:
    return (content or b"").decode(errors="replace")


class Lease:
    """The right to write under a store's URL: a file that its owner changes every RENEW_S. Another
    process that wants it watches the file, and takes over if nothing has changed for WATCH_S: this
    relies on no other machine's clock or name."""

    def __init__(self, store: Store, log: Log):
        """UsageError while another process has it."""
        self.store = store
        self.log = log
        self.id = uuid.uuid4().hex
        while not self._is_ours():  # again if a lost machine's last write came in between
            before = store.read("lease")
            if before is not None:  # an empty one is a lease as well
                log.print(f"{store.url} has a lease: watching it for {WATCH_S:.0f} s for a change")
                end = time.monotonic() + WATCH_S
                while (now := store.read("lease")) == before and time.monotonic() < end:
                    time.sleep(RENEW_S / 5)
                if now not in (before, None):
                    owner = " ".join(text_of(now).split()[2:])[:100]
                    raise UsageError(f"{store.url} is in use by {owner}; choose another --mirror")
                store.remove("lease")
            with contextlib.suppress(FileExistsError):  # another's; or ours, and an answer was lost
                self._write(new=True)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew_often, daemon=True)
        self._thread.start()

    def _write(self, new: bool = False) -> None:
        """With new bytes each time, so that those who watch it see a change."""
        content = f"{self.id} {uuid.uuid4().hex} process {os.getpid()} on {socket.gethostname()}"
        self.store.write("lease", content.encode(), new)

    def _is_ours(self) -> bool:
        return text_of(self.store.find("lease")).startswith(self.id)

    def _renew_often(self) -> None:
        while not self._over.wait(RENEW_S):
            with contextlib.suppress(StorageError, DataError):  # the next renewal is soon
                self.renew()

    def renew(self) -> None:
        """Change the lease, or write it again if the store has lost it. StorageError if the store
        fails, or if another machine has taken over: then this run is stopped by SIGTERM."""
        if not self._over.is_set():
            lease = self.store.find("lease")
            if lease is None or text_of(lease).startswith(self.id):
                try:
                    return self._write(new=lease is None)
                except FileExistsError:  # it is there: the next renewal will see whose it is
                    raise StorageError(f"{self.store.url}/lease was missed") from None
            self._over.set()
            self.log.print(f"{self.store.url} was taken over by another machine: the run stops")
            os.kill(os.getpid(), signal.SIGTERM)
        raise StorageError(f"{self.store.url} is not this run's to write")

    def give_back(self) -> None:
        self._over.set()
        self._thread.join()
        if self._is_ours():
            self.store.remove("lease")


class Mirror:
    """The checkpoints of a run in a store. The Checkpointer that it is given to sets `keep`, how
    many of the newest are kept, and `stays`: stays(name) is true of others that are."""

    def __init__(self, url: str, log: Log):
        self.store = Store(url, Path(os.path.abspath(log.run_dir)).name)
        if self.store.is_local:
            ours, far = (os.path.realpath(p) for p in (log.run_dir, self.store.root))
            if os.path.commonpath([ours, far]) in (ours, far):
                raise UsageError(f"--mirror {url} would copy {log.run_dir} onto or into itself")
        self.log = log
        self.lease = Lease(self.store, log)
        self.store.sweep("", "step_*/**/")

    def checkpoints(self) -> list[str]:
        """The names of the checkpoints in the store, newest first; some may be incomplete."""
        return newest_first(self.store.names())

    def upload(self, path: Path) -> None:
        """Copy a published checkpoint: its files, the run's small files, its manifest. If that
        fails, the next checkpoint is another attempt."""
        began = time.monotonic()
        name = path.name
        listed = formats.read(path / MANIFEST, FileList)
        for file in (*listed.files, MANIFEST):
            self.lease.renew()
            self.store.send(f"{name}/{self.lease.id}/{file}", disk.inside(path, file))
        self._commit(name, replace(listed, copy=self.lease.id))
        self.log.print(f"{name} is in {self.store.url} after {time.monotonic() - began:.1f} s")
        self._tidy(path.with_name("best"))

    def _commit(self, name: str, listed: FileList) -> None:
        """Copy the run's small files, under this process's ID, since another machine's may be of a
        later step; then write the manifest, which names them."""
        for small, content in self._small():
            self.store.write(f"{name}/{self.lease.id}.run/{small}", content)
        self.lease.renew()
        listed = replace(listed, run=f"{self.lease.id}.run")
        content = json.dumps(formats.tree_of(listed))
        self.store.write(f"{name}/{MANIFEST}", content.encode())

    def _small(self) -> Iterator[tuple[str, bytes]]:
        for name in SMALL:
            with contextlib.suppress(OSError):  # missing, or not a regular file
                yield name, disk.read_bytes(self.log.run_dir / name, LARGEST_SMALL)

    def _tidy(self, named: Path) -> None:
        """Name the best one, as the local file `named` does, and delete the older ones that need
        not be kept, complete or not."""
        names = self.checkpoints()
        whole = 0
        with contextlib.suppress(OSError):  # there is no best one yet
            best = disk.read_text(named).strip()
            if best in names:
                self.store.write("best", best.encode())
        best = text_of(self.store.find("best"))
        for name in names:
            if whole >= self.keep and name != best and not self.stays(name):
                self.lease.renew()
                self.store.remove(f"{name}/{MANIFEST}")  # first: half deleted, it does not count
                self.store.remove(name, recursive=True)
            whole += self.store.read(f"{name}/{MANIFEST}") is not None

    def close(self, newest: Path) -> None:
        """End: upload the newest checkpoint if it is missing, else the small files if they are not
        as there; return the lease."""
        self.lease.renew()
        name = newest.name
        content = self.store.find(f"{name}/{MANIFEST}")
        if content is None:
            self.upload(newest)
        else:
            listed = formats.parse(content, FileList, f"{self.store.url}/{name}/{MANIFEST}")
            beside = f"{name}/{listed.run or ''}"
            if any(self.store.read(f"{beside}/{small}") != now for small, now in self._small()):
                self._commit(name, listed)
            self._tidy(newest.with_name("best"))
        self.lease.give_back()

    def restore(self, path: Path, check: Callable | None = None) -> bool:
        """Download the checkpoint that `path` names, and the run's small files that are missing or
        shorter here. False if its upload was cut short; CheckpointError if it is damaged.
        check(url, trainer) may raise before the tensors are downloaded."""
        began = time.monotonic()
        name = path.name
        tmp = disk.temporary(path)
        far = f"{self.store.url}/{name}"
        try:
            content = self.store.find(f"{name}/{MANIFEST}")
            if content is None:
                self.log.print(f"{far} is passed over: its upload was not completed")
                return False
            listed = formats.parse(content, FileList, f"{far}/{MANIFEST}")
            folder = f"{name}/{listed.copy or ''}"
            near = replace(listed, copy=None, run=None)
            disk.write_json(tmp / MANIFEST, formats.tree_of(near))
            self.store.fetch(
                f"{folder}/trainer.json", tmp / "trainer.json", most=disk.LARGEST_SMALL
            )
            trainer = read_trainer(tmp)
            if check:
                check(far, trainer)
            for file, sha256 in listed.files.items():
                self.store.fetch(f"{folder}/{file}", disk.inside(tmp, file), sha256)
            for small in SMALL:
                content = self.store.read(f"{name}/{listed.run or ''}/{small}", LARGEST_SMALL)
                own = self.log.run_dir / small
                if content and (not os.path.lexists(own) or own.lstat().st_size < len(content)):
                    disk.write_bytes(own, content)
            disk.put_in_place(tmp, path)  # a damaged one of the same step is set aside
        except DataError as error:
            raise CheckpointError(str(error)) from None
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        self.log.print(f"{name} is restored from {far} in {time.monotonic() - began:.1f} s")
        return True
