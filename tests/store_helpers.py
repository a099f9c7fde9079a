"""A real S3 server on this machine, moto's, behind a middleware that can spoil what passes."""

import functools
import logging
import threading

import pytest

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
        listening = make_server("127.0.0.1", 0, self, threaded=True)
        self.endpoint = f"http://127.0.0.1:{listening.port}"
        threading.Thread(target=listening.serve_forever, daemon=True).start()

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

    def env(self) -> dict[str, str]:
        """What a process needs to reach it: the libraries' own variables."""
        region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        return KEYS | region | {"AWS_ENDPOINT_URL": self.endpoint}


@functools.cache
def server() -> Server:
    """One for all tests of this process."""
    return Server()


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """The server, in working order and for this process too; `.url` is this test's own folder."""
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    running = server()
    for name, value in running.env().items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdirs("runs", exist_ok=True)
    running.spoil = None
    running.url = f"s3://runs/{tmp_path.name}"
    return running


@pytest.fixture(params=["s3", "folder"])
def url(request, tmp_path):
    """The URL of a folder in each kind of store."""
    if request.param == "s3":
        return request.getfixturevalue("s3").url
    return str(tmp_path / "far")
