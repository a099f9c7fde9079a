"""A real S3 server on this machine, moto's, behind a middleware that can spoil what passes; and
mirrors for the tests."""

import io
import itertools
import logging
import random
import threading
from pathlib import Path

import pytest
from conftest import until  # noqa: F401

from stores import mirror
from stores.mirror import Mirror

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDfortests", "AWS_SECRET_ACCESS_KEY": "s3cr3t-of-the-tests"}


class Notes:
    """The part of a Log that a mirror needs."""

    def __init__(self, run_dir, lines):
        self.run_dir = Path(run_dir)
        self.print = lines.append


def open_mirror(url, log=None, run_dir="run") -> Mirror:
    """The mirror URL/run of a run of that name."""
    return Mirror(str(url), Notes(run_dir, [] if log is None else log))


class Server:
    """S3 at `.endpoint`, with a bucket `runs`. spoil(method, path, body, answer) sees each request
    and returns (status, body), or calls answer(body) for those of the real server."""

    def __init__(self):
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.app = DomainDispatcherApplication(create_backend_app)
        self.spoil = None
        self.requests = []  # method, path, bytes of the body
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __call__(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        self.requests.append((method, path, len(body)))

        def answer(body: bytes) -> tuple[str, list, bytes]:
            found = []
            inner = environ | {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
            chunks = self.app(inner, lambda status, headers, *_: found.append((status, headers)))
            return *found[0], b"".join(chunks)

        if self.spoil:
            status, headers, content = self.spoil(method, path, body, answer)
        else:
            status, headers, content = answer(body)
        start_response(status, headers)
        return [content]

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def env(self) -> dict[str, str]:
        """What a process needs to reach it: the libraries' own variables."""
        region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        return KEYS | region | {"AWS_ENDPOINT_URL": self.endpoint}

    def s3(self):
        """A client of its own, to look at what is there, and to damage it."""
        import boto3

        keys = dict(zip(("aws_access_key_id", "aws_secret_access_key"), KEYS.values()))
        return boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1", **keys)

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.s3().get_paginator("list_objects_v2").paginate(Bucket="runs", Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def content(self, key: str) -> bytes:
        return self.s3().get_object(Bucket="runs", Key=key)["Body"].read()


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    running = Server()
    running.s3().create_bucket(Bucket="runs")
    yield running
    running.close()


@pytest.fixture
def s3(server, monkeypatch, request):
    """The server, in working order and for this process too; `.url` is this test's own folder."""
    import s3fs

    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    server.spoil = None
    server.folder = f"{request.node.name.partition('[')[0]}{next(_folders)}"
    server.url = f"s3://runs/{server.folder}"
    yield server
    server.spoil = None


_folders = itertools.count()


@pytest.fixture
def quick(monkeypatch):
    """A lease that is watched for a moment."""
    monkeypatch.setattr(mirror, "RENEW_S", 0.05)
    monkeypatch.setattr(mirror, "WATCH_S", 1.0)


@pytest.fixture(params=["s3", "folder"])
def url(request, tmp_path, quick):
    """The URL of a folder in each kind of store."""
    if request.param == "s3":
        return request.getfixturevalue("s3").url
    return str(tmp_path / "far")


def error(status: str, code: str):
    """An answer of S3 that refuses."""
    text = f"<Error><Code>{code}</Code><Message>{code} says the test</Message></Error>"
    return status, [("Content-Type", "application/xml")], text.encode()


def refuses_a_quarter(method, path, body, answer):
    """Busy: the answer that S3 asks its clients to repeat a request for."""
    return error("503 Slow Down", "SlowDown") if _draw.random() < 0.25 else answer(body)


_draw = random.Random(4)
