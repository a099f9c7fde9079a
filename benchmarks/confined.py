"""Runs a program that is not trusted, and all that it starts: for trials.py.

    python benchmarks/confined.py '{"read": [...], "write": [...], "seconds": 60, "end": FILE}' ...

By Landlock, where Linux has it (5.13 and up), the command can read and write below these folders
alone, and connect to nothing; elsewhere it is not confined. No file of it is larger than 2 GB. It
is ended after so many seconds; and what it leaves running, when it ends. FILE then says: its exit
code (null: it was ended), the seconds by the clock and of all its processes on the CPU, how many
were left, whether it was confined. Source: man 7 landlock.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
CREATE = 444  # numbers of system calls, on every processor
ADD = 445
RESTRICT = 446
DEATH_SIGNAL = 1  # options of prctl
SUBREAPER = 36
NO_NEW_PRIVILEGES = 38
READ = 1 | 4 | 8  # execute, read a file, list a folder
OF_A_FILE = 1 | 2 | 4 | 1 << 14  # execute, write, read, truncate; the other rights are of folders
RIGHTS = (0, 13, 14, 15, 15, 16)  # by version of Landlock: its first so many bits are rights
LARGEST = 2 << 30  # bytes


def landlock() -> int:
    """Its version; below 1: there is none."""
    return LIBC.syscall(CREATE, None, 0, 1) if sys.platform == "linux" else 0


def confine(read: list[str], write: list[str]) -> None:
    """From here on, for this process and those that it starts."""
    version = landlock()
    if version < 1:
        return
    every = (1 << RIGHTS[min(version, 5)]) - 1
    # Forbidden unless allowed: uses of files, of TCP, of sockets and signals of other processes.
    rules = struct.pack("QQQ", every, 3, 3)[: 8 * (1 + (version > 3) + (version > 5))]
    ruleset = LIBC.syscall(CREATE, rules, len(rules), 0)
    done = [ruleset]
    for names, rights in ((read, READ), (write, every)):
        for name in filter(os.path.exists, names):
            allowed = every & rights & (-1 if os.path.isdir(name) else OF_A_FILE)
            rule = struct.pack("=Qi", allowed, os.open(name, os.O_PATH))
            done.append(LIBC.syscall(ADD, ruleset, 1, rule, 0))
    LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    done.append(LIBC.syscall(RESTRICT, ruleset, 0))
    if min(done) < 0:
        raise OSError(ctypes.get_errno(), "Landlock")


def begin(spec: dict) -> None:
    """In the process that becomes the command."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    if sys.platform == "linux":
        LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # with its parent
        LIBC.unshare(0x58000000)  # a network and shared memory of its own, where that is allowed
    confine(spec["read"], spec["write"])


def children() -> list[int]:
    """The processes whose parent is this one."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = file.read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(file.parent.name))
    return found


def end_all() -> int:
    """End what is left, and what that has started; returns how many had not ended by themselves a
    second later."""
    time.sleep(1 if children() else 0)
    left = 0
    while pids := children():
        for pid in pids:
            left += os.waitpid(pid, os.WNOHANG)[0] == 0
            with suppress(ProcessLookupError, ChildProcessError):  # it has
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return left


def main(spec: dict, command: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if sys.platform == "linux":
        LIBC.prctl(SUBREAPER, 1, 0, 0, 0)  # the parent of what its children leave
        LIBC.prctl(DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    began = time.monotonic()
    process = subprocess.Popen(command, preexec_fn=lambda: begin(spec))
    for fd in (0, 1):  # the command's alone, so that their other ends see when it ends
        os.close(fd)
    code = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(spec["seconds"])
    finally:
        process.kill()  # if it has not ended
        process.wait()
        left = end_all()
    facts = dict(code=code, wall=time.monotonic() - began, left=left)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts |= dict(cpu=used.ru_utime + used.ru_stime, confined=landlock() > 0)
    Path(spec["end"]).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
