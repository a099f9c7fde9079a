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
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from config import UsageError
from machinery import disk, formats
from machinery.checkpoint import MANIFEST, Checkpointer, newest_first, read_trainer
from machinery.errors import DataError, StorageError
from machinery.formats import FileList
from machinery.log import Log
from machinery.output import json_of
from stores.store import LARGEST, Store

SMALL = (
    "metrics.jsonl", "config.json", "code.diff", "tokenizer.json", "status.json", "samples.jsonl",
    "eval.jsonl", "report.html",
)  # fmt: skip
RENEW_S = 15.0  # of the lease
WATCH_S = 60.0  # of the lease


class Lease:
    """The right to write under a store's URL: an object that its owner changes every RENEW_S. Who
    finds one takes over if it has not changed after WATCH_S: this relies on no other machine's
    clock or name. Of two that take over at once, the last to write has it, and the other stops."""

    def __init__(self, store: Store, log: Log):
        """UsageError while another process has it."""
        self.store = store
        self.log = log
        self.id = uuid.uuid4().hex
        before = store.read("lease")
        if before is not None:
            log.print(f"{store.url} has a lease: watching it for {WATCH_S:.0f} s for a change")
            time.sleep(WATCH_S)
            now = store.read("lease")
            if now not in (before, None):
                owner = now[66:166].decode(errors="replace")  # after two IDs of 32 digits
                raise UsageError(f"{store.url} is in use by {owner}; choose another --mirror")
        self._write()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew_often, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        """With new bytes each time, so that those who watch it see a change."""
        content = f"{self.id} {uuid.uuid4().hex} process {os.getpid()} on {socket.gethostname()}"
        self.store.write("lease", content.encode())

    def is_ours(self) -> bool:
        """Whether no other process has it; one that the store has lost is written again."""
        content = self.store.read("lease")
        return content is None or content.startswith(self.id.encode())

    def _renew_often(self) -> None:
        """Until it is another's: then this run is stopped by SIGTERM."""
        while not self._over.wait(RENEW_S):
            with contextlib.suppress(StorageError):  # the next renewal is soon
                if not self.is_ours():
                    self.log.print(f"{self.store.url} is another machine's now: the run stops")
                    return os.kill(os.getpid(), signal.SIGTERM)
                self._write()

    def give_back(self) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(StorageError):
            if self.is_ours():
                self.store.remove("lease")


class Mirror(contextlib.AbstractContextManager):
    """The checkpoints of a run in a store. The Checkpointer that it is given to sets
    `checkpointer`, itself: what it keeps on the disk is kept here, too."""

    checkpointer: Checkpointer

    def __init__(self, url: str, log: Log):
        """UsageError if another process writes there."""
        self.store = Store(f"{url.rstrip('/')}/{Path(os.path.abspath(log.run_dir)).name}")
        self.log = log
        self.lease = Lease(self.store, log)
        self.store.sweep()

    def __exit__(self, *error) -> None:
        """However the run ends, give the lease back."""
        self.lease.give_back()

    def checkpoints(self) -> list[str]:
        """The names of the complete checkpoints in the store, newest first."""
        names = newest_first(self.store.names())
        return [name for name in names if self.store.read(f"{name}/{MANIFEST}")]

    def upload(self, path: Path) -> None:
        """Copy a published checkpoint: its files, the run's small files, its manifest. If that
        fails, the next checkpoint is another attempt."""
        began = time.monotonic()
        listed = formats.read(path / MANIFEST, FileList)
        for file in (*listed.files, MANIFEST):
            content = disk.read_bytes(disk.inside(path, file), LARGEST)
            self.store.write(f"{path.name}/{self.lease.id}/{file}", content)
        self._commit(path.name, replace(listed, copy=self.lease.id))
        self.log.print(f"{path.name} is in {self.store.url} after {time.monotonic() - began:.1f} s")

    def finish(self, newest: Path) -> None:
        """End: upload the newest checkpoint if it is missing, else the small files as they are."""
        name = f"{newest.name}/{MANIFEST}"
        content = self.store.read(name)
        if content is None:
            self.upload(newest)
        else:
            self._commit(newest.name, formats.parse(content, FileList, name))

    def _commit(self, name: str, listed: FileList) -> None:
        """Copy the run's small files, under this process's ID, since another machine's may be of a
        later step; then write the manifest, which names them. Delete what need not be kept."""
        run = f"{self.lease.id}.run"
        for small in SMALL:
            with contextlib.suppress(OSError):  # missing, or not a regular file
                content = disk.read_bytes(self.log.run_dir / small, LARGEST)
                self.store.write(f"{name}/{run}/{small}", content)
        content = json_of(replace(listed, run=run))
        if not self.lease.is_ours():
            raise StorageError(f"{self.store.url} is another machine's now")
        self.store.write(f"{name}/{MANIFEST}", content.encode())
        self._tidy()

    def _tidy(self) -> None:
        """Name the best one, and delete the older ones that need not be kept, complete or not."""
        whole = self.checkpoints()
        if self.checkpointer.best in whole:
            self.store.write("best", self.checkpointer.best.encode())
        best = self.store.read("best")
        newest = whole[: self.checkpointer.keep]
        names = newest_first(self.store.names())
        for name in names[names.index(whole[0]) :]:  # a newer one may be half uploaded
            is_kept = name in newest or name.encode() == best
            file = f"{name}/{MANIFEST}"
            content = self.store.read(file)
            if content and not is_kept:
                write = lambda text, file=file: self.store.write(file, text.encode())
                is_kept = True  # if it is damaged, and cannot say so
                with contextlib.suppress(DataError):
                    listed = formats.parse(content, FileList, file)
                    is_kept = self.checkpointer.stays(name, listed, write)
            if not is_kept and self.lease.is_ours():
                self.store.remove(file)  # first: half deleted, it does not count
                self.store.remove(name)

    def restore(self, path: Path, check: Callable | None) -> None:
        """Download the checkpoint that `path` names, and the run's small files that are missing or
        shorter here. DataError if it is damaged. check(url, trainer) may raise before the tensors
        are downloaded."""
        name = path.name
        far = f"{self.store.url}/{name}"
        tmp = disk.temporary(path)
        content = self.store.read(f"{name}/{MANIFEST}") or b""
        listed = formats.parse(content, FileList, f"{far}/{MANIFEST}")
        try:
            disk.write_bytes(tmp / MANIFEST, content)
            for file, sha256 in listed.files.items():  # trainer.json is the first
                there = f"{name}/{listed.copy or ''}/{file}"
                self.store.fetch(there, disk.inside(tmp, file), sha256)
                if check and file == "trainer.json":
                    check(far, read_trainer(tmp))
            for small in SMALL:
                content = self.store.read(f"{name}/{listed.run or ''}/{small}")
                own = self.log.run_dir / small
                if content and (not os.path.lexists(own) or own.lstat().st_size < len(content)):
                    disk.write_bytes(own, content)
            disk.put_in_place(tmp, path)  # a damaged one of the same step is set aside
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        self.log.print(f"{name} is restored from {far}")
