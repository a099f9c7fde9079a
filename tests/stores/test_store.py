"""store.py: names stay under the URL, other protocols are refused, and what is fetched is whole; in
a folder and on a real S3 server that fails."""

import hashlib
import os
import re

import pytest
from store_helpers import error, quick, refuses_a_quarter, s3, server, url  # noqa: F401

from config import UsageError
from machinery.errors import DataError, StorageError
from stores.store import Store


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_what_is_written_is_read_back_and_fetched_whole(url, tmp_path):  # noqa: F811
    far = Store(url)
    big = os.urandom(3 << 20)
    copy = tmp_path / "in" / "copy"
    assert far.read("a/x") is None and far.names() == []
    far.remove("a/x")
    far.write("a/x", b"one")
    far.write("a/x", b"two")
    far.write("a/empty", b"")
    far.write("a/b/big", big)
    assert far.read("a/x") == b"two" == Store(f"{url}/a/").read("x") and far.read("a/empty") == b""
    assert far.names() == ["a"] and sorted(Store(f"{url}/a").names()) == ["b", "empty", "x"]
    for name, wanted in (("none", sha(b"")), ("a/b/big", sha(b"other"))):
        with pytest.raises(DataError, match=name):
            far.fetch(name, copy, wanted)
        assert not copy.exists()
    far.fetch("a/b/big", copy, sha(big))
    assert copy.read_bytes() == big
    far.remove("a/x")
    assert far.read("a/x") is None and far.read("a/b/big") == big
    far.remove("a")
    assert far.names() == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", ""])
def test_a_name_stays_under_the_url(name, url, tmp_path):  # noqa: F811
    """Others: test_disk.py. Nothing is read, written or deleted elsewhere."""
    far = Store(f"{url}/in")
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    for work in (
        lambda: far.read(name),
        lambda: far.write(name, b"theirs"),
        lambda: far.fetch(name, tmp_path / "copy", sha(b"mine")),
        lambda: far.remove(name),
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
        with pytest.raises((DataError, StorageError)):
            far.read(name)
    with pytest.raises(DataError):
        far.write("out/new", b"")
    assert mine.read_bytes() == b"mine" and not (tmp_path / "new").exists()


REFUSED = (
    "reference::memory://x", "simplecache::s3://b/x", "s3://b/x::file://y", "http://h/x",
    "memory2://x", "ssh://h/x", "s3://b/x*", "s3://b/[x]",
)  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_of_another_protocol_is_refused(url):  # noqa: F811
    """A chain may run, format and send what its parts name."""
    with pytest.raises(UsageError, match=re.escape(url)):
        Store(url)


def test_a_url_with_a_password_is_refused_and_not_repeated():
    for url in ("s3://someone:hunter2@bucket/far", "gs://b/far?key=hunter2"):  # noqa: F402
        with pytest.raises(UsageError, match=r"\A(?!.*hunter2)"):
            Store(url)


def cuts(method, path, body, answer):
    """Bodies end before their announced length."""
    status, headers, content = answer(body)
    return status, headers, content[: len(content) // 2] if method == "GET" else content


FAILING = {"denies": lambda *_: error("403 Forbidden", "AccessDenied"), "cuts": cuts}


@pytest.mark.parametrize("how", FAILING)
def test_a_store_that_fails(how, s3, tmp_path):  # noqa: F811
    """One line that names the URL, and nothing half."""
    far = Store(s3.url)
    content = os.urandom(1000)
    far.write("x", content)
    s3.spoil = FAILING[how]
    with pytest.raises(StorageError, match=rf"\A{s3.url}/x .*\Z"):
        far.fetch("x", tmp_path / "copy", sha(content))
    assert not (tmp_path / "copy").exists()
    s3.spoil = None
    far.fetch("x", tmp_path / "copy", sha(content))
    assert (tmp_path / "copy").read_bytes() == content


def test_a_store_that_is_busy_is_asked_again(s3, tmp_path):  # noqa: F811
    """By its own library."""
    s3.spoil = refuses_a_quarter
    far = Store(s3.url)
    for k in range(4):
        far.write(f"{k}", bytes([k]))
        assert far.read(f"{k}") == bytes([k])
