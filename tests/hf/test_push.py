"""hf/push.py: huggingface_hub itself against a Hub on this machine."""

import base64
import hashlib
import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, environment
from faults import start

from config import UsageError
from hf import push

TOKEN = "hf_thisIsOnlyForTheTests"


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's API that a push needs. repos: {(repo, branch): {path: bytes}}."""

    repos: dict = {}
    private: dict = {}
    large: dict = {}  # sha256 -> bytes
    asked: list = []
    refuses = False

    def log_message(self, *args):
        pass

    def reply(self, tree: dict | list, status: int = 200):
        content = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        path = self.path.partition("?")[0]
        self.asked.append((self.command, path))
        here = f"http://{self.headers['Host']}"
        if path.startswith("/lfs/"):
            sha256 = path[5:]
            if hashlib.sha256(body).hexdigest() == sha256:  # as the store of the Hub does
                self.large[sha256] = body
            return self.reply({}, 200 if sha256 in self.large else 400)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or self.refuses:
            return self.reply({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if (repo, "main") in self.repos:
                return self.reply({"url": f"{here}/{repo}", "error": "exists"}, 409)
            self.private[repo] = asked.get("private") or asked.get("visibility") == "private"
            self.repos[repo, "main"] = {}
            return self.reply({"url": f"{here}/{repo}"})
        if path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = []
            for found in json.loads(body)["objects"]:
                where = {"upload": {"href": f"{here}/lfs/{found['oid']}", "header": {}}}
                objects.append(found | {"actions": where})
            return self.reply({"transfer": "basic", "objects": objects})
        kind, owner, name, what, *rest = path.removeprefix("/api/").split("/")
        assert kind == "models"
        branch, repo = "/".join(rest) or "main", f"{owner}/{name}"
        files = self.repos[repo, branch]
        if what == "preupload":
            asked = json.loads(body)["files"]
            mode = lambda path: "lfs" if path.endswith(".safetensors") else "regular"
            found = [
                {"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False}
                for f in asked
            ]
            return self.reply({"files": found})
        if what == "commit":
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                if entry["key"] == "lfsFile":
                    files[value["path"]] = self.large[value["oid"]]
            commit = {"commitUrl": f"{here}/{repo}/commit/1", "commitOid": "1" * 40}
            return self.reply(commit | {"success": True, "hookOutput": ""})
        return self.reply({"error": f"no {path} here"}, 404)

    do_GET = do_POST = do_PUT = handle_any


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The library, sent to a Hub of this test's own."""
    hub = type("OneHub", (Hub,), dict(repos={}, private={}, large={}, asked=[]))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    hub.env = environment(
        HF_ENDPOINT=hub.endpoint,
        HF_TOKEN=TOKEN,
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HOME=str(tmp_path / "hf_home"),
    )
    del hub.env["HF_HUB_OFFLINE"]  # as at a user's: the program has to leave the Hub alone itself
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path) -> Path:
    """What an export looks like to the Hub."""
    folder = tmp_path / "export_00000012"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# a model\n")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 500)
    return folder


def ends(hub, *command, **env) -> subprocess.CompletedProcess:
    """A process of its own, since the library reads its variables when it is imported."""
    how = dict(cwd=ROOT, capture_output=True, text=True, timeout=300)
    return subprocess.run([sys.executable, *map(str, command)], env=hub.env | env, **how)


def pushed(hub, folder: Path, *args: str, **env) -> str:
    code = (
        "import sys; from pathlib import Path; from machinery import cli; from hf import push\n"
        "cli.run(lambda argv: print('pushed', push.push(Path(argv[0]), *argv[1:])))"
    )
    done = ends(hub, "-c", code, folder, *args, **env)
    return f"{done.returncode} {done.stdout}{done.stderr}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_is_pushed_whole_to_a_private_repository(hub, folder):
    """Twice is once; the token is in no output."""
    for _ in range(2):
        said = pushed(hub, folder, "hf:me/toy")
        assert said.startswith(f"0 pushed {hub.endpoint}/me/toy\n"), said
        assert hub.repos == {("me/toy", "main"): contents(folder)}
    assert hub.private == {"me/toy": True} and TOKEN not in said


def test_a_push_that_fails_is_one_sentence(hub, folder):
    hub.refuses = True
    said = pushed(hub, folder, "hf:me/toy")
    assert said.startswith("2 error: ") and "me/toy" in said and TOKEN not in said
    hub.refuses = False
    other = pushed(hub, folder, "hf:me/toy", HF_HUB_OFFLINE="1")
    assert other.startswith("6 error: me/toy ") and said.count("\n") == other.count("\n") == 1
    for wrong in ("me/toy", "hf:toy", "hf:a/b/c", "hf:", "https://huggingface.co/me/toy"):
        with pytest.raises(UsageError, match=re.escape(repr(wrong))):
            push.repo_of(wrong)


@pytest.mark.slow
def test_export_pushes_after_its_check_and_asks_the_hub_for_nothing_before(
    hub, small_data, tmp_path
):
    """With the card; the folder in the Hub is the folder on the disk."""
    start(small_data, tmp_path / "run").end(0)  # with extras: the folder has code of its own
    done = ends(hub, "export.py", tmp_path / "run", "--out", tmp_path / "quiet")
    assert done.returncode == 0 and not hub.asked, done.stderr
    options = ["--out", tmp_path / "out", "--push", "hf:me/toy"]
    done = ends(hub, "export.py", tmp_path / "run", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index("checked: ") < done.stdout.index("pushed: ")
    files = hub.repos["me/toy", "main"]
    assert files == contents(tmp_path / "out")
    assert b"library_name: transformers" in files["README.md"]
    done = ends(hub, "export.py", tmp_path / "run", "--push", "me/toy")
    assert done.returncode == 2 and not (tmp_path / "run" / "export_00000012").exists()
