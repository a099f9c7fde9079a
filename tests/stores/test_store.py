"""store.py: names stay under the URL, other protocols are refused, and what is fetched is whole; in
a folder and on a real S3 server that fails."""

import hashlib
import os

import pytest
from store_helpers import s3, url  # noqa: F401

from config import UsageError
from machinery.errors import DataError, StorageError
from machinery.output import public
from stores.store import Store


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_what_is_written_is_read_back_and_fetched_whole(url, tmp_path):  # noqa: F811
    far = Store(url)
    big = os.urandom(3 << 20)
    copy = tmp_path / "in" / "copy"
    assert far.read("a/x") is None and far.names() == []
    far.remove("a/x")
    for name, content in {"x": b"one", "a/x": b"", "a/b/big": big}.items():
        far.write(name, content)
        assert far.read(name) == content
    far.write("x", b"two")
    assert Store(f"{url}/").read("x") == b"two" and sorted(far.names()) == ["a", "x"]
    for name, wanted in (("none", sha(b"")), ("a/b/big", sha(b"other"))):
        with pytest.raises(DataError, match=name):
            far.fetch(name, copy, wanted)
        assert not copy.exists()
    far.fetch("a/b/big", copy, sha(big))
    assert copy.read_bytes() == big
    far.remove("a")
    assert far.names() == ["x"]


@pytest.mark.parametrize("name", ["../mine", "/etc/passwd", "", "pipe", "link", "out/mine"])
def test_a_name_stays_under_the_url(name, tmp_path):
    """Others: test_disk.py. Of a folder that somebody has sent, no link or pipe is opened: to read
    a pipe would wait for ever."""
    far = Store(str(tmp_path / "far"))
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    far.write("x", b"theirs")
    os.mkfifo(tmp_path / "far" / "pipe")
    (tmp_path / "far" / "link").symlink_to(mine)
    (tmp_path / "far" / "out").symlink_to(tmp_path)
    works = [lambda: far.read(name), lambda: far.fetch(name, tmp_path / "copy", sha(b"mine"))]
    if name != "pipe":
        works += [lambda: far.write(name, b"theirs"), lambda: far.remove(name)]
    for work in works:
        with pytest.raises((DataError, StorageError)):
            work()
    assert mine.read_bytes() == b"mine" and not (tmp_path / "copy").exists()


def test_a_name_stays_under_the_url_of_a_store(s3):  # noqa: F811
    with pytest.raises(DataError):
        Store(s3.url).read("../x")


REFUSED = (
    "reference::memory://x", "s3://b/x::file://y", "http://h/x", "s3://b/x*",
    "s3://someone:hunter2@bucket/x", "gs://b/x?key=hunter2",
)  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_of_another_protocol_or_with_a_password_is_refused(url):  # noqa: F811
    """A chain may run, format and send what its parts name. A password is not repeated."""
    with pytest.raises(UsageError) as refusal:
        Store(url)
    said = public(str(refusal.value))  # as it is printed
    assert "/x" in said and ": give a folder, or" in said and "hunter2" not in said
