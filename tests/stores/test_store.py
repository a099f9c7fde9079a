"""store.py: names stay under the URL, other protocols are refused, and what is fetched is whole; in
a folder and on a real S3 server that fails in every way."""

import hashlib
import os
import re

import pytest
from store_helpers import error, quick, s3, server, url  # noqa: F401

from config import UsageError
from machinery.errors import DataError, StorageError
from stores import store
from stores.store import Store

pytestmark = pytest.mark.usefixtures("quick")


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_what_is_written_is_read_back(url, tmp_path):  # noqa: F811
    far = Store(url)
    big = os.urandom(3 << 20)
    (tmp_path / "big").write_bytes(big)
    assert far.read("a/x") is None and far.names() == []
    far.remove("a/x")
    far.write("a/x", b"one")
    far.write("a/x", b"two")
    far.send("a/b/big", tmp_path / "big")
    assert far.read("a/x") == b"two" == Store(url, "a").read("x")
    assert far.names() == ["a"] and sorted(Store(url, "a").names()) == ["b", "x"]
    far.fetch("a/b/big", tmp_path / "in" / "copy", sha(big), most=len(big))
    assert (tmp_path / "in" / "copy").read_bytes() == big
    with pytest.raises(FileExistsError):
        far.write("a/x", b"three", new=True)
    far.write("a/new", b"first", new=True)
    assert (far.read("a/x"), far.read("a/new")) == (b"two", b"first")
    far.remove("a", recursive=True)
    assert far.read("a/x") is None and far.read("a/b/big") is None


def test_what_is_fetched_is_whole_or_not_there(url, tmp_path):  # noqa: F811
    far = Store(url)
    copy = tmp_path / "in" / "copy"
    far.write("x", bytes(1000))
    cases = [("none", sha(b""), 10, "none"), ("x", sha(b"other"), 1000, sha(b"other"))]
    for name, wanted, most, said in [*cases, ("x", sha(bytes(1000)), 999, "999 bytes")]:
        with pytest.raises(DataError, match=said):
            far.fetch(name, copy, wanted, most)
        assert not copy.exists() and not list(copy.parent.glob(".tmp-*"))
    with pytest.raises(DataError):
        far.read("x", most=999)
    assert far.read("x", most=1000) == bytes(1000)


@pytest.mark.parametrize("name", ["../x", "/etc/x", ""])
def test_a_name_stays_under_the_url(name, url, tmp_path):  # noqa: F811
    """Others: test_disk.py. Nothing is read, written or deleted elsewhere."""
    far = Store(f"{url}/in")
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    for work in (
        lambda: far.read(name),
        lambda: far.write(name, b"theirs"),
        lambda: far.send(name, mine),
        lambda: far.fetch(name, tmp_path / "copy"),
        lambda: far.remove(name, recursive=True),
    ):
        with pytest.raises(DataError):
            work()
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["mine"]


def test_a_link_or_a_pipe_in_a_folder_is_not_opened(tmp_path):
    """A folder that somebody has sent: to read a pipe would wait for ever."""
    far = Store(str(tmp_path / "far"))
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    far.write("x", b"theirs")
    os.mkfifo(tmp_path / "far" / "pipe")
    (tmp_path / "far" / "link").symlink_to(mine)
    (tmp_path / "far" / "out").symlink_to(tmp_path)
    for name in ("pipe", "link", "out/mine"):
        for work in (far.read, lambda name: far.fetch(name, tmp_path / "copy")):
            with pytest.raises(DataError):
                work(name)
    with pytest.raises(DataError):
        far.write("out/new", b"")
    with pytest.raises(StorageError):
        far.send("copy", tmp_path / "far" / "link")
    assert mine.read_bytes() == b"mine" and not (tmp_path / "new").exists()


REFUSED = (
    "reference::memory://x", "simplecache::s3://b/x", "s3://b/x::file://y", "http://h/x",
    "zip://x", "nofs://x", "memory2://x", "ssh://h/x", "dask://x", "s3://b/x*", "s3://b/[x]",
)  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_of_another_protocol_is_refused(url):  # noqa: F811
    """A chain may run, format and send what its parts name."""
    with pytest.raises(UsageError, match=re.escape(url)):
        Store(url)


def flips(method, path, body, answer):
    status, headers, content = answer(body)
    return status, headers, bytes([content[0] ^ 1]) + content[1:] if method == "GET" else content


FAILING = {
    "500": lambda *_: error("500 Internal Server Error", "X"),
    "403": lambda *_: error("403 Forbidden", "AccessDenied"),
    "cuts": lambda method, path, body, answer: (*answer(body)[:2], answer(body)[2][:9]),
    "flips": flips,
}


@pytest.mark.parametrize("how", FAILING)
def test_a_store_that_fails(how, s3, tmp_path):  # noqa: F811
    """One line that names the URL, and nothing half; tried again, unless it refuses."""
    far = Store(s3.url)
    content = os.urandom(1000)
    far.write("x", content)
    s3.spoil = FAILING[how]
    before = len(s3.requests)
    with pytest.raises((StorageError, DataError), match=rf"\A{s3.url}/x .*\Z"):
        far.fetch("x", tmp_path / "copy", sha(content))
    assert not (tmp_path / "copy").exists() and len(s3.requests) > before
    s3.spoil = None
    far.fetch("x", tmp_path / "copy", sha(content))
    assert (tmp_path / "copy").read_bytes() == content


def test_a_store_that_fails_now_and_then(s3, tmp_path):  # noqa: F811
    count = iter(range(10**6))
    s3.spoil = lambda method, path, body, answer: (
        error("503 Slow Down", "SlowDown") if next(count) % 3 == 0 else answer(body)
    )
    far = Store(s3.url)
    for k in range(5):
        far.write(f"{k}", bytes([k]))
        far.fetch(f"{k}", tmp_path / f"{k}", sha(bytes([k])))
    assert next(count) > 10


def test_only_one_of_two_writers_makes_a_new_object(s3, monkeypatch):  # noqa: F811
    """Also if both have looked before: the store decides, by If-None-Match."""
    seen = []
    s3.spoil = lambda method, path, body, answer: (seen.append(method), answer(body))[1]
    Store(s3.url).write("x", b"first", new=True)
    with pytest.raises(FileExistsError):
        Store(s3.url).write("x", b"second", new=True)
    assert seen == ["PUT", "PUT"] and Store(s3.url).read("x") == b"first"


def test_the_text_of_an_error_has_no_secret(monkeypatch):
    monkeypatch.setattr(store, "PROTOCOLS", {"memory"})
    far = Store("memory://someone:hunter2@host/far;token=hunter3")

    def fail(*args, **kwargs):
        raise RuntimeError("someone:hunter2 and ;token=hunter3 and hunter2/")

    monkeypatch.setattr(far.fs, "ls", fail)
    with pytest.raises(StorageError, match=r"\A(?!.*hunter).*RuntimeError"):
        far.names()
