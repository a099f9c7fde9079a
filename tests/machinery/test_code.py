"""machinery/code.py: a run knows the code that made it, with git and without."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, commit_all, environment, git, read_json, starts, train_here
from test_checkpoint import at

from machinery import code, disk
from machinery.formats import Code

PROBE = """import json, sys
import extra
from machinery import code
code.GIT_S = float(sys.argv[1])
found, edits = code.of_process()
print(json.dumps([vars(found), edits]))
"""


@pytest.fixture
def project(tmp_path) -> Path:
    """A repository of our machinery, and a program that imports it."""
    folder = tmp_path / "outer" / "project"
    shutil.copytree(ROOT / "machinery", folder / "machinery")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "extra.py").write_text("def act(x):\n    return x\n")
    (folder / "probe.py").write_text(PROBE)
    commit_all(folder)
    return folder


def probe(folder: Path, git_s: float = 60, **env) -> tuple[Code, str]:
    command = [sys.executable, "probe.py", str(git_s)]
    done = subprocess.run(command, cwd=folder, env=environment(**env), capture_output=True)
    facts, edits = json.loads(done.stdout)
    return Code(**facts), edits


def test_what_was_edited_can_be_had_again(project):
    """From the commit and the diff; a file that git does not know, too. Whatever git's settings.
    But for what is secret, and that is said."""
    head = git(project, "rev-parse", "HEAD").strip()
    found, edits = probe(project)
    assert (found.commit, found.changed, edits) == (head, False, "")
    assert {"extra.py", "probe.py", "config.py", "machinery/code.py"} <= found.files.keys()
    assert all(found.files[name] == disk.sha256_of(project / name) for name in found.files)
    assert "eval.py" not in found.files  # it changes no number of a run

    for option in ("color.diff always", "diff.noprefix true", "diff.external true"):
        git(project, "config", *option.split())
    (project / "linked").symlink_to(project / "machinery")
    (project / "a[1]*.py").write_text("odd = 1\n")
    (project / "extra.py").write_text("from own import fresh\n\n\ndef act(x):\n    return -x\n")
    (project / "own").mkdir()
    (project / "own/fresh.py").write_text("y = 'ä'\n")
    (project / ".#model.py").symlink_to("nowhere")  # as an editor leaves it
    secret = project / "secret.py"
    secret.write_text('a = "s3://me:hush-hush@bucket/rows?key=hush"\n')
    (project / "README").write_text("computes nothing")
    (project / "eval.py").write_text("computes nothing here")
    now, edits = probe(project)
    edited = ("extra.py", "own/fresh.py", "a[1]*.py")
    wanted = {name: disk.sha256_of(project / name) for name in edited}
    assert now.commit == head and now.changed and wanted.items() <= now.files.items()
    assert "README" not in edits and "eval.py" not in edits and str(project) not in edits
    assert "hush" not in edits and "secret" in edits.splitlines()[0]
    secret.unlink()
    (project / "own/fresh.py").unlink()
    (project / "a[1]*.py").unlink()
    git(project, "checkout", "extra.py")
    subprocess.run(["git", "apply"], cwd=project, input=edits.encode(), check=True)
    assert wanted == {name: disk.sha256_of(project / name) for name in wanted}
    assert "s3://bucket/rows" in secret.read_text()


def test_without_git_the_hashes_are_known(project):
    """It is not installed, hangs, knows no commit, or knows the folder around and not this one."""
    (project / "extra.py").write_text("x = 1\n")
    tools = project.parent / "tools"
    tools.mkdir()
    probes = [probe(project, PATH=str(tools))]
    (tools / "git").write_text(f"#!/bin/sh\necho once >> {tools}/calls\nexec /bin/sleep 60\n")
    (tools / "git").chmod(0o755)
    probes.append(probe(project, 1, PATH=str(tools)))
    assert (tools / "calls").read_text() == "once\n"  # it is not waited for again
    found, _ = probe(project, GIT_INDEX_FILE=str(project / ".git/index"))  # as in a hook
    assert found.changed and not git(project, "diff", "--cached")
    shutil.rmtree(project / ".git")
    git(project, "init", "-q")
    probes.append(probe(project))
    shutil.rmtree(project / ".git")
    git(project.parent, "init", "-q")
    git(project.parent, "commit", "-q", "--allow-empty", "-m", "another project")
    probes.append(probe(project))
    for found, edits in probes:
        assert (found.commit, found.changed, edits) == (None, False, "")
        assert found.files["extra.py"] == disk.sha256_of(project / "extra.py")


# Settings of a repository that make git run a program, RUN.
PROGRAMS = """core.fsmonitor RUN
filter.x.clean RUN
filter.x.process RUN
filter.x.smudge RUN
diff.x.textconv RUN
diff.x.command RUN
diff.external RUN
core.hooksPath .hooks
core.pager RUN
alias.diff !RUN
gpg.program RUN
merge.x.driver RUN
remote.origin.uploadpack RUN"""
HOOKS = "post-index-change reference-transaction post-checkout fsmonitor-watchman"


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_repository_runs_no_program(project, tmp_path, where):
    """All settings at once: its own, or those of one that a file names; then its objects are
    missing, which git would fetch."""
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\ntouch {ran}\nexec cat "$@"\n')
    program.chmod(0o755)
    (project / ".gitattributes").write_text("*.py filter=x diff=x merge=x\n")
    (project / ".hooks").mkdir()
    for hook in HOOKS.split():
        shutil.copy(program, project / ".hooks" / hook)
    commit_all(project)
    for setting in PROGRAMS.splitlines():
        git(project, "config", *setting.replace("RUN", str(program)).split(" ", 1))
    git(project, "config", "remote.origin.url", str(ROOT))
    git(project, "config", "remote.origin.promisor", "true")
    (project / "extra.py").write_text("x = 1\n")
    if where == "elsewhere":
        (project / ".git").rename(tmp_path / "stored")
        (project / ".git").write_text(f"gitdir: {tmp_path / 'stored'}\n")
    whole = probe(project)
    for stored in [*tmp_path.rglob("objects/*")]:
        shutil.rmtree(stored)
    found, edits = probe(project)
    assert not ran.exists()
    assert whole[0].changed and "x = 1" in whole[1]
    assert (found.commit, found.changed, edits) == (None, False, "")


def test_edits_are_kept_above_those_of_earlier_starts(tmp_path, monkeypatch):
    """Each once."""
    file = tmp_path / "code.diff"
    for edits, kept in (("one\n", "one\n"), ("two\n", "two\none\n"), ("one\n", "two\none\n")):
        monkeypatch.setattr(code, "of_process", lambda edits=edits: (Code(files={}), edits))
        code.keep_edits(tmp_path)
        assert file.read_text() == kept


def test_a_difference_names_the_files_and_the_way_to_see_it():
    a = Code(commit="a" * 40, files={"model.py": "1" * 64, "optim.py": "2" * 64})
    same = Code(commit="b" * 40, changed=True, files=a.files)
    other = Code(commit="b" * 40, files=a.files | {"model.py": "3" * 64})
    edited = Code(commit="a" * 40, changed=True, files=other.files)
    unknown = Code(files=other.files | {"mine.py": "4" * 64})
    says = lambda b: code.difference(a, b)
    assert says(same) == ""  # another commit, but nothing in what computes
    assert says(other) == f"model.py differs (git diff {'a' * 12} {'b' * 12} -- model.py)"
    assert says(edited) == "model.py differs (code.diff)"
    assert says(unknown) == "mine.py, model.py differ"
    assert "-- '$(x).py')" in says(Code(commit="b" * 40, files=a.files | {"$(x).py": "6" * 64}))


def test_a_run_that_goes_on_under_other_code_says_so_once(
    own_run, small_data, tmp_path, capsys, monkeypatch
):
    """And goes on; its checkpoints have the new code from then on."""
    trained, _ = code.of_process()
    other = Code(commit=None, files=trained.files | {"model.py": "0" * 64})
    new = tmp_path / "new"
    first = own_run / "checkpoints" / "step_00000004"
    monkeypatch.setattr(code, "of_process", lambda: (other, "edits"))
    assert train_here(small_data, new, "--resume", first) == 0
    said = capsys.readouterr().out
    assert len(re.findall("warning: .*model.py.* differ.* from the code", said)) == 1
    last = new / "checkpoints" / "step_00000012"
    assert train_here(small_data, tmp_path / "again", "--resume", last) == 0
    assert "from the code" not in capsys.readouterr().out
    (start,) = starts(new)
    config = read_json(new / "config.json")
    assert start["code"] == config["code"] == dict(changed=False, files=other.files)
    assert (new / "code.diff").read_text() == "edits"


def test_what_a_stranger_calls_code_is_not_believed():
    """A checkpoint of an older version has none."""
    for odd in (None, "x", {"files": {"\x1b[2J": "0" * 64}}, {"files": {}, "commit": "; rm -rf /"}):
        assert at(1, dict(code=odd)).code is None
