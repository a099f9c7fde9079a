"""A real S3 server on this machine, moto's, behind a middleware that can spoil what passes."""

import itertools
import logging
import threading

import pytest
from conftest import until  # noqa: F401

from stores import mirror
from stores.mirror import Lease

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDfortests", "AWS_SECRET_ACCESS_KEY": "s3cr3t-of-the-tests"}


class Server:
    """S3 at `.endpoint`, with a bucket `runs`. spoil(method, path) sees each request, and returns
    an error ("403 AccessDenied") to refuse it."""

    def __init__(self):
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.app = DomainDispatcherApplication(create_backend_app)
        self.spoil = None
        self.requests = []  # method, path
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __call__(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        refusal = self.spoil and self.spoil(method, path)
        if not refusal:
            return self.app(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        text = f"<Error><Code>{refusal[4:]}</Code><Message>so says the test</Message></Error>"
        start_response(refusal, [("Content-Type", "application/xml")])
        return [text.encode()]

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def env(self) -> dict[str, str]:
        """What a process needs to reach it: the libraries' own variables."""
        region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        return KEYS | region | {"AWS_ENDPOINT_URL": self.endpoint}


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    running = Server()
    yield running
    running.close()


@pytest.fixture
def s3(server, monkeypatch, request):
    """The server, in working order and for this process too; `.url` is this test's own folder."""
    import s3fs

    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdirs("runs", exist_ok=True)
    server.spoil = None
    server.folder = f"{request.node.name.partition('[')[0]}{next(_folders)}"
    server.url = f"s3://runs/{server.folder}"
    yield server
    server.spoil = None


_folders = itertools.count()


@pytest.fixture
def quick(monkeypatch):
    """A lease that is watched for a moment, and renewed no longer than the test lasts."""
    monkeypatch.setattr(mirror, "RENEW_S", 0.05)
    monkeypatch.setattr(mirror, "WATCH_S", 1.0)
    taken = []
    honest = Lease._renew_often
    monkeypatch.setattr(Lease, "_renew_often", lambda own: taken.append(own) or honest(own))
    yield
    for own in taken:
        own._over.set()


@pytest.fixture(params=["s3", "folder"])
def url(request, tmp_path, quick):
    """The URL of a folder in each kind of store."""
    if request.param == "s3":
        return request.getfixturevalue("s3").url
    return str(tmp_path / "far")
