"""disk.py, the one door to files: links, pipes, devices, names and sizes that a stranger chose; a
file is whole or not there."""

import errno
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from config import UsageError
from machinery import cli, disk
from machinery.errors import DataError

NAMES = ["/etc/passwd", "..", "a/../../x", "", ".", "x\0y", "\ud800", None, b"x"]


@pytest.fixture
def mine(tmp_path):
    """A file of the user's, outside of the folder that a stranger has sent."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    return tmp_path / "mine"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_leads_out_of_no_folder(name, tmp_path):
    with pytest.raises(DataError, match=re.escape(repr(name))):
        disk.inside(tmp_path, name)


def test_a_name_leads_through_no_link(mine, tmp_path):
    folder = tmp_path / "theirs"
    (folder / "real" / "b").mkdir(parents=True)
    (folder / "file").symlink_to(mine)
    (folder / "up").symlink_to("..")
    (folder / "real" / "same").symlink_to("b")  # within the folder: it may be moved meanwhile
    (folder / "nowhere").symlink_to("none")
    for name in ("file", "up/mine", "up", "real/same/x", "nowhere"):
        with pytest.raises(DataError):
            disk.inside(folder, name)
    (tmp_path / "way").symlink_to(folder)  # how the user calls the folder is the user's matter
    for there in (folder, tmp_path / "way"):
        assert disk.inside(there, "real/b/new") == there / "real" / "b" / "new"
        assert disk.inside(there, "./real//b") == there / "real" / "b"


def things(folder, mine) -> dict:
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(mine)
    (folder / "nowhere").symlink_to(folder / "new")
    (folder / "zeros").symlink_to("/dev/zero")
    return {path.name: path for path in folder.iterdir()}


def test_only_a_regular_file_is_opened_and_nothing_waits(mine, tmp_path):
    for path in [*things(tmp_path / "theirs", mine).values(), "/dev/zero", "/dev/null"]:
        for work in (
            disk.open_file,
            disk.read_bytes,
            disk.read_text,
            disk.sha256_of,
            lambda path: disk.open_file(path, "ab"),
            lambda path: disk.append(path, "theirs"),
        ):
            with pytest.raises(OSError):
                work(path)
        assert not disk.has_sha256(path, disk.sha256_of(mine))
        with pytest.raises(DataError):
            disk.read_json(path)
    assert mine.read_bytes() == b"mine" and not (tmp_path / "theirs" / "new").exists()


def test_what_is_written_replaces_a_link_and_follows_none(mine, tmp_path):
    for name, path in things(tmp_path / "theirs", mine).items():
        disk.write_text(path, name)
        assert path.read_text() == name and not path.is_symlink()
    assert mine.read_bytes() == b"mine" and not (tmp_path / "theirs" / "new").exists()
    assert [p.is_dir() for p in (tmp_path / "theirs").glob(".trash-folder-*")] == [True]


@pytest.mark.parametrize("make", [os.symlink, os.link, lambda mine, path: os.mkfifo(path)])
def test_a_lock_that_is_no_file_of_its_own_is_refused(make, mine, tmp_path):
    make(mine, tmp_path / "theirs" / ".lock")
    with pytest.raises(OSError) as caught:
        disk.lock(tmp_path / "theirs", "--run_dir")
    assert cli.exit_code(caught.value) == 2 and mine.read_bytes() == b"mine"


WRITES = """if 1:
    import os, signal, sys
    from pathlib import Path
    from machinery import cli, disk
    def main(argv):
        with disk.{}(Path(argv[0])) as new:
            file = new if "{}" == "replacing" else open(new / "file", "wb")
            file.write(b"whole")
            file.flush()
            print("here", flush=True)
            sys.stdin.read(1) or os.kill(os.getpid(), signal.SIGKILL)
        return 0
    cli.run(main)
"""


def writing(how: str, path: Path) -> subprocess.Popen:
    """A process that stands in the middle of writing `path`."""
    command = [sys.executable, "-c", WRITES.format(how, how), str(path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    assert process.stdout.readline() == "here\n"
    return process


@pytest.mark.parametrize("how, inside", [("replacing", ""), ("new_folder", "file")])
def test_only_what_a_killed_program_left_is_swept(mine, tmp_path, how, inside):
    """Not what is being written by another process, nor a link."""
    link = tmp_path / ".tmp-link"
    link.symlink_to(mine)
    far = tmp_path / "far"
    for word, ends in (("x", 0), ("", -9)):
        shutil.rmtree(far, ignore_errors=True)
        (tmp_path / ".tmp-left").touch()
        (tmp_path / ".tmp-folder").mkdir()
        other = writing(how, far)
        disk.sweep(tmp_path.glob(".tmp-*"))
        assert len([*tmp_path.glob(".tmp-*")]) == 2
        other.communicate(word)
        assert other.returncode == ends
        disk.sweep(tmp_path.glob(".tmp-*"))
        assert [*tmp_path.glob(".tmp-*")] == [link]
        assert ends or (far / inside).read_bytes() == b"whole"
    assert mine.read_bytes() == b"mine"


@pytest.mark.parametrize("word, ends", [("x", 2), ("", -9)])
def test_of_two_that_write_one_folder_the_first_to_end_has_it(tmp_path, word, ends):
    """The other is refused in a sentence, or killed; a third sweeps what it left."""
    far = tmp_path / "far"
    first, second = (writing("new_folder", far) for _ in range(2))
    assert first.communicate("x")[1] == ""
    said = second.communicate(word)[1]
    assert second.returncode == ends and "Traceback" not in said
    assert (far / "file").read_bytes() == b"whole"
    with pytest.raises(UsageError), disk.new_folder(far):
        pass
    assert os.listdir(tmp_path) == ["far"]


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch, capsys):
    """Lustre without -o flock."""

    def flock(file, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(disk.fcntl, "flock", flock)
    disk.lock(tmp_path, "--run_dir").close()
    assert str(tmp_path) in capsys.readouterr().out
    disk.write_text(tmp_path / "a", "whole")
    (tmp_path / ".tmp-b").touch()  # whose it is cannot be told
    disk.sweep(tmp_path.glob(".tmp-*"))
    assert (tmp_path / "a").read_text() == "whole" and (tmp_path / ".tmp-b").exists()


def test_what_is_read_as_a_whole_is_bounded(tmp_path):
    path = tmp_path / "big"
    with open(path, "wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(DataError):
        disk.read_json(path)
    path.write_bytes(bytes(100))
    with pytest.raises(OSError):
        disk.read_bytes(path, most=99)
    assert disk.read_bytes(path, most=100) == bytes(100)


class Takes(io.FileIO):
    """A file of a disk on which there is little room: each write takes a part."""

    room = 10**6

    def write(self, content):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = super().write(bytes(content)[: min(self.room, 7)])
        self.room -= taken
        return taken


def test_a_file_is_written_as_a_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "open_file", Takes)
    with disk.replacing(tmp_path / "x") as file:
        file.write(memoryview(bytes(range(100))))
    assert (tmp_path / "x").read_bytes() == bytes(range(100))
    with pytest.raises(RuntimeError), disk.replacing(tmp_path / "x") as file:
        file.write(b"half")
        raise RuntimeError
    monkeypatch.setattr(Takes, "room", 50)
    with pytest.raises(OSError) as caught:
        disk.write_bytes(tmp_path / "x", bytes(100))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == bytes(range(100)) and len(list(tmp_path.iterdir())) == 1


def test_a_line_is_appended_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    disk.append(path, "one\n")
    monkeypatch.setattr(disk, "open_file", Takes)
    disk.append(path, "two\n")  # as much as one write takes
    with pytest.raises(OSError):
        disk.append(path, "and three\n")
    assert path.read_text() == "one\ntwo\n"
