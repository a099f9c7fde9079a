"""disk.py, the one door to files: links, pipes, devices, names and sizes that a stranger chose; a
file is whole or not there; and no other door is used."""

import ast
import errno
import io
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from config import UsageError
from machinery import disk
from machinery.errors import DataError, StorageError

NAMES = ["/etc/passwd", "..", "../x", "a/../../x", "", ".", "x\0y", "\ud800", None, 5, ["x"], b"x"]


@pytest.fixture
def mine(tmp_path):
    """A file of the user's, outside of the folder that a stranger has sent."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    return tmp_path / "mine"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_leads_out_of_no_folder(name, tmp_path):
    with pytest.raises(DataError) as caught:
        disk.inside(tmp_path, name)
    assert repr(name) in str(caught.value)


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
    return {name: folder / name for name in ("pipe", "folder", "link", "nowhere", "zeros")}


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
    assert [p.is_dir() for p in (tmp_path / "theirs").glob("folder.aside-*")] == [True]


def test_a_lock_that_is_a_link_is_refused(mine, tmp_path):
    (tmp_path / "theirs" / ".lock").symlink_to(mine)
    with pytest.raises(UsageError):
        disk.lock(tmp_path / "theirs", "--run_dir")
    assert mine.read_bytes() == b"mine"


def test_a_folder_has_one_owner_until_that_ends(tmp_path):
    folder = tmp_path / "run"
    lock = disk.lock(folder, "--run_dir")
    with pytest.raises(UsageError) as caught:
        disk.lock(folder, "--run_dir")
    assert f"process {os.getpid()}" in str(caught.value)
    lock.close()
    take = f"from machinery import disk; x = disk.lock({str(folder)!r}, '--run_dir'); print(1)"
    done = subprocess.run([sys.executable, "-c", take], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1\n"
    disk.lock(folder, "--run_dir").close()


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch, capsys):
    """Lustre without -o flock."""

    def flock(file, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(disk.fcntl, "flock", flock)
    disk.lock(tmp_path, "--run_dir").close()
    assert str(tmp_path) in capsys.readouterr().out


@pytest.mark.parametrize("how", ["renamed", "renamed and made anew", "another's lock"])
def test_a_locked_folder_that_was_renamed_is_noticed(how, tmp_path):
    folder = tmp_path / "run"
    with disk.lock(folder, "--run_dir") as lock:
        disk.check_locked(lock, folder)
        folder.rename(tmp_path / "other")
        if how != "renamed":
            folder.mkdir()
        if how == "another's lock":
            disk.lock(folder, "--run_dir").close()
        with pytest.raises(StorageError) as caught:
            disk.check_locked(lock, folder)
        assert str(folder) in str(caught.value)


def test_what_is_read_as_a_whole_is_bounded(tmp_path):
    path = tmp_path / "big"
    with open(path, "wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(OSError):
        disk.read_bytes(path)
    with pytest.raises(DataError):
        disk.read_json(path)
    path.write_bytes(bytes(100))
    with pytest.raises(OSError):
        disk.read_bytes(path, most=99)
    assert disk.read_bytes(path, most=100) == bytes(100)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff{}", b"[" * 100_000, b"null"])
def test_json_that_is_no_object_is_named(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError) as caught:
        disk.read_json(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "x"
    disk.write_json(path, {"ã": 1})
    assert disk.read_json(path) == {"ã": 1} and json.loads(path.read_text("utf-8")) == {"ã": 1}
    with pytest.raises(RuntimeError), disk.replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert disk.read_json(path) == {"ã": 1} and [p.name for p in path.parent.iterdir()] == ["x"]


class _Takes(io.RawIOBase):
    """A file of a disk on which there is little room: each write takes a part."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def writable(self):
        return True

    def write(self, content):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.file.write(bytes(content)[: min(self.room, 7)])
        self.room -= taken
        return taken

    def close(self):
        self.file.close()
        super().close()


def test_a_write_that_takes_a_part_loses_nothing(tmp_path, monkeypatch):
    honest, room = disk.open_file, [10**6]
    monkeypatch.setattr(disk, "open_file", lambda path, mode: _Takes(honest(path, mode), room[0]))
    with disk.replacing(tmp_path / "x") as file:
        file.write(memoryview(bytes(range(100))))
    assert (tmp_path / "x").read_bytes() == bytes(range(100))
    room[0] = 50
    with pytest.raises(OSError) as caught:
        disk.write_bytes(tmp_path / "x", bytes(100))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == bytes(range(100)) and len(list(tmp_path.iterdir())) == 1


def test_a_line_is_appended_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    disk.append(path, "one\n")
    honest = disk.open_file

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, content):
            return self.file.write(content[:3])

        fileno = property(lambda self: self.file.fileno)
        truncate = property(lambda self: self.file.truncate)

    monkeypatch.setattr(disk, "open_file", lambda *args: Full(honest(*args)))
    with pytest.raises(OSError):
        disk.append(path, "two\n")
    assert path.read_text() == "one\n"


def test_room_is_checked_on_the_disk_of_a_folder_that_is_not_there_yet(tmp_path):
    free = disk.free_bytes(tmp_path / "a" / "b")
    assert free > 0
    with pytest.raises(StorageError):
        disk.check_room(tmp_path / "a", 1e18, "choose another")
    disk.check_room(tmp_path / "a", 1, "choose another")


# ------------------------------------------------------------------------------- no other door

READS = {"read_text", "read_bytes", "write_text", "write_bytes"}
DOORS = {"open", "np.load", "numpy.load", "os.open", "os.replace", "np.save", "numpy.save"}
ALLOWED = {  # of files that ship with the program or with Python, pipes, source text
    "machinery/cli.py open",  # /dev/null, in place of a closed stream
    "machinery/cli.py os.open",
    "machinery/log.py open",
    "machinery/log.py os.open",
    "preparation/sources.py open",  # text files that the user names
    "preparation/sources.py read_bytes",
    "preparation/sources.py read_text",
}


def doors(text: str) -> list[str]:
    """The calls that open a file otherwise than by disk.py."""
    found = []
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name in DOORS:
            found.append(name)
        elif name.rpartition(".")[2] in READS and not name.startswith("disk.") and "." in name:
            found.append(name.rpartition(".")[2])
    return found


def test_what_counts_as_a_door():
    code = "open(x); Path(x).read_text(); a.b.write_bytes(c); np.load(x); os.replace(a, b)"
    assert sorted(doors(code)) == ["np.load", "open", "os.replace", "read_text", "write_bytes"]
    assert doors("disk.read_text(x); disk.open_file(x); webbrowser.open(x); read_text") == []


def test_every_file_is_opened_by_disk_py():
    rooms = ["*.py", "machinery/*.py", "preparation/*.py", "hf/**/*.py", "instruments/**/*.py"]
    found = {}
    for path in sorted({path for room in rooms for path in ROOT.glob(room)}):
        name = path.relative_to(ROOT).as_posix()
        if name != "machinery/disk.py":
            text = path.read_text("utf-8")
            for door in doors(text):
                if f"{name} {door}" not in ALLOWED:
                    found[f"{name} {door}"] = found.get(f"{name} {door}", 0) + 1
    assert not found, found
