"""machinery/code.py: a run knows the code that made it, with git and without."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, commit_all, environment, git, read_json, starts, train_here
from test_checkpoint import rehash

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
    folder.mkdir(parents=True)
    for path in (*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py")):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
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
    """From the commit and the diff; a file that git does not know, too. Whatever git's settings."""
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
    assert "own/fresh.py" in probe(project)[0].files
    (project / ".#model.py").symlink_to("nowhere")  # as an editor leaves it
    (project / "README").write_text("computes nothing")
    (project / "eval.py").write_text("computes nothing here")
    now, edits = probe(project)
    edited = ("extra.py", "own/fresh.py", "a[1]*.py")
    wanted = {name: disk.sha256_of(project / name) for name in edited}
    assert now.commit == head and now.changed and wanted.items() <= now.files.items()
    assert "README" not in edits and "eval.py" not in edits and str(project) not in edits
    (project / "own/fresh.py").unlink()
    (project / "a[1]*.py").unlink()
    git(project, "checkout", "extra.py")
    subprocess.run(["git", "apply"], cwd=project, input=edits.encode(), check=True)
    assert wanted == {name: disk.sha256_of(project / name) for name in wanted}


def test_without_git_the_hashes_are_known(project):
    """It is not installed, hangs, knows no commit, or knows the folder around and not this one."""
    (project / "extra.py").write_text("x = 1\n")
    tools = project.parent / "tools"
    tools.mkdir()
    no_git = probe(project, PATH=str(tools))
    (tools / "git").write_text(f"#!/bin/sh\necho once >> {tools}/calls\nexec /bin/sleep 60\n")
    (tools / "git").chmod(0o755)
    hangs = probe(project, 1, PATH=str(tools))
    assert (tools / "calls").read_text() == "once\n"  # it is not waited for again
    shutil.rmtree(project / ".git")
    no_repository = probe(project)
    git(project, "init", "-q")
    no_commit = probe(project)
    shutil.rmtree(project / ".git")
    git(project.parent, "init", "-q")
    git(project.parent, "commit", "-q", "--allow-empty", "-m", "another project")
    inside = probe(project)
    shutil.rmtree(project.parent / ".git")
    (project / "extra.py").write_text("x = 2\n")
    commit_all(project)
    (project / "extra.py").write_text("x = 1\n")
    real = shutil.which("git")
    (tools / "git").write_text(
        f'#!/bin/sh\ncase "$*" in *diff*) exit 128; esac\nexec {real} "$@"\n'
    )
    no_diff = probe(project, PATH=f"{tools}:/bin:/usr/bin")
    found, _ = probe(project, GIT_DIR=str(ROOT / ".git"), GIT_WORK_TREE=str(ROOT))  # as in a hook
    assert found.commit == git(project, "rev-parse", "HEAD").strip() and found.changed
    for found, edits in (no_git, hangs, no_repository, no_commit, inside, no_diff):
        assert (found.commit, found.changed, edits) == (None, False, "")
        assert found.files["extra.py"] == disk.sha256_of(project / "extra.py")


def test_edits_tell_no_secret(project):
    """And say that they are not the run's; `git apply` takes them."""
    (project / "extra.py").write_text('a = "s3://me:hush-hush@bucket/rows?key=hush"\n')
    found, edits = probe(project)
    assert found.changed and "s3://bucket/rows" in edits and "hush" not in edits
    assert "secret" in edits.splitlines()[0]
    git(project, "checkout", "extra.py")
    subprocess.run(["git", "apply"], cwd=project, input=edits.encode(), check=True)
    assert "s3://bucket/rows" in (project / "extra.py").read_text()


PROGRAMS = {  # settings of a repository that make git run a program, RUN
    "fsmonitor": "core.fsmonitor RUN",
    "a clean filter": "filter.x.clean RUN",
    "a process": "filter.x.process RUN",
    "a smudge filter": "filter.x.smudge RUN",
    "textconv": "diff.x.textconv RUN",
    "a diff of one's own": "diff.x.command RUN",
    "an external diff": "diff.external RUN",
    "hooks": "core.hooksPath .hooks",
    "a pager": "core.pager RUN",
    "another name": "alias.diff !RUN",
    "a signature": "gpg.program RUN",
    "a merge": "merge.x.driver RUN",
    "a fetch": "remote.origin.uploadpack RUN",
}


@pytest.mark.parametrize("where", ["here", "around", "elsewhere"])
def test_a_repository_runs_no_program(project, tmp_path, where):
    """All settings at once: its own, those of a repository around it, those of one that a file
    names; some of its objects are missing, which git would fetch."""
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\ntouch {ran}\nexec cat "$@"\n')
    program.chmod(0o755)
    (project / ".gitattributes").write_text("*.py filter=x diff=x merge=x\n")
    (project / ".hooks").mkdir()
    for hook in (
        "post-index-change",
        "reference-transaction",
        "post-checkout",
        "fsmonitor-watchman",
    ):
        shutil.copy(program, project / ".hooks")
        (project / ".hooks/program").rename(project / ".hooks" / hook)
    commit_all(project)
    for setting in PROGRAMS.values():
        git(project, "config", *setting.replace("RUN", str(program)).split(" ", 1))
    git(project, "config", "remote.origin.url", str(ROOT))
    git(project, "config", "remote.origin.promisor", "true")
    (project / "extra.py").write_text("x = 1\n")
    if where == "around":
        (project / ".git").rename(project.parent / ".git")
    if where == "elsewhere":
        (project / ".git").rename(tmp_path / "stored")
        (project / ".git").write_text(f"gitdir: {tmp_path / 'stored'}\n")
    whole = probe(project)
    for stored in (project / ".git", tmp_path / "stored"):
        shutil.rmtree(stored / "objects", ignore_errors=True)
    missing = probe(project)
    assert not ran.exists()
    assert (whole[0].changed, "x = 1" in whole[1]) == (where != "around",) * 2
    assert (missing[0].changed, missing[1]) == (False, "")


def test_edits_are_kept_above_those_of_earlier_starts(tmp_path, monkeypatch):
    """Each once; a link that a stranger has put there is not followed."""
    now = lambda edits: monkeypatch.setattr(code, "of_process", lambda: (Code(files={}), edits))
    file = tmp_path / "code.diff"
    for edits, kept in (("", None), ("one\n", "one\n"), ("two\n", "two\none\n"), ("one\n", None)):
        before = file.read_text() if file.exists() else None
        now(edits)
        code.keep_edits(tmp_path)
        assert (file.read_text() if file.exists() else None) == (kept or before)
    (tmp_path / "mine").write_text("mine")
    file.unlink()
    file.symlink_to(tmp_path / "mine")
    code.keep_edits(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine" and not file.is_symlink()


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


def test_what_a_stranger_calls_code_is_not_believed(own_run, small_data, tmp_path, capsys):
    """A checkpoint of an older version has none."""
    checkpoint = own_run / "checkpoints" / "step_00000004"
    trainer = read_json(checkpoint / "trainer.json")
    for odd in (None, "x", {"files": {"\x1b[2J": "0" * 64}}, {"files": {}, "commit": "; rm -rf /"}):
        trainer["identity"]["code"] = odd
        rehash(checkpoint, **{"trainer.json": json.dumps(trainer).encode()})
        assert train_here(small_data, tmp_path / "new", "--resume", checkpoint) == 0
        assert "from the code" not in capsys.readouterr().out
        shutil.rmtree(tmp_path / "new")
