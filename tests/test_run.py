"""run.sh: it installs the PyTorch that the GPU's driver can run, before anything else happens.

Small scripts stand in for nvidia-smi and Python, and record the arguments that pip gets."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, commit_all, environment, git

from machinery import disk

# `-m venv .venv` copies the script there; as .venv/bin/python it notes its arguments, and for pip
# also the requirements, each as a package in site/. Code (-c) is run, with the packages of site/.
PYTHON = """#!PYTHON -S
import os, pathlib, shutil, sys, time
words, sys.path[0] = sys.argv[1:], "site"
if words[1:2] == ["venv"]:
    os.makedirs(".venv/bin", exist_ok=True)
    shutil.copy(__file__, ".venv/bin/python")
    sys.exit()
if words[0] == "-c":
    os.execve(sys.executable, [sys.executable, "-S", *words], os.environ | {"PYTHONPATH": "site"})
with open("commands", "a") as file:
    print(*words, file=file)
trains = os.path.exists("trained")
if words[0] == "prepare_data.py":
    time.sleep(1.1)
    if trains:
        os.makedirs(f"data/{words[1]}")
        open(f"data/{words[1]}/manifest.json", "w").close()
if words[0] == "train.py" and trains:
    shutil.copy("trained", f"runs/{words[1]}/status.json")
if words[1:3] == ["pip", "install"]:
    from pip._vendor.packaging.requirements import Requirement
    lines = open(words[-1]).readlines()
    if "--no-deps" not in words:
        open("installed", "w").writelines(lines)
    texts = [line.split("#")[0].strip() for line in lines]
    for wanted in [Requirement(text) for text in texts if text]:
        if not wanted.marker or wanted.marker.evaluate():
            name = wanted.name.replace("-", "_")
            version = min(wanted.specifier, key=lambda one: one.operator == "<").version
            for old in pathlib.Path("site").glob(name + "-*"):
                if old.name.split("-")[1].removesuffix(".dist") in wanted.specifier:
                    break
                shutil.rmtree(old)
            else:
                info = pathlib.Path("site", f"{name}-{version}.dist-info")
                info.mkdir()
                (info / "METADATA").write_text(f"Name: {name}\\nVersion: {version}")
fails = pathlib.Path("fails")
sys.exit(fails.exists() and " ".join(words) in fails.read_text().splitlines())
""".replace("PYTHON", sys.executable, 1)


@pytest.fixture
def machine(tmp_path):
    """A folder with run.sh, and a function that runs it with a driver (None: no nvidia-smi), where
    a shell and modules have exported what leads elsewhere."""
    for name in ("bin", "site", f"others/{tmp_path.name}"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "site" / "pip").symlink_to(Path(pytest.importorskip("pip").__file__).parent)
    for name in ("run.sh", "requirements.txt", "requirements-store.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    _script(tmp_path / "bin" / "python3", PYTHON)

    def run(says, words=("test",)):
        if says is not None:
            _script(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\necho '{says}'\n")
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        elsewhere = dict(CDPATH=str(tmp_path / "others"), PYTHONHOME="/none")
        how = dict(cwd=tmp_path.parent, env=environment(PATH=path, PYTHON="python3", **elsewhere))
        command = ["bash", f"{tmp_path.name}/run.sh", *words]
        return subprocess.run(command, capture_output=True, text=True, **how)

    return run


def _script(path, text):
    path.write_text(text)
    path.chmod(0o755)


def torch_of(folder):
    """The line of the requirements that pip has got."""
    return re.search(r"^torch==\S+", (folder / "installed").read_text(), re.M)[0]


@pytest.mark.parametrize(
    "driver, capability, code, torch",
    [
        ("580.65.06", "9.0", 0, "torch==2.13.0"),
        ("525.60.13", "9.0", 0, "torch==2.10.0"),
        ("No devices were found", "", 6, "torch==2.13.0"),
        ("580.65.06", "7.5", 0, "torch==2.13.0"),  # a T4
        ("580.65.06", "7.0", 0, "torch==2.10.0"),  # a V100 has no kernels for CUDA 13
        ("580.65.06", "6.0", 0, None),  # a P100, neither these nor those
        ("470.82.01", "8.0", 0, None),
    ],
)
def test_torch_fits_the_driver_and_the_gpu(driver, capability, code, torch, machine, tmp_path):
    answers = f"case $1 in *cap) echo {capability} ;; *) echo {driver} ;; esac; exit {code}"
    _script(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\n{answers}\n")
    done = machine(None)
    if torch is None:  # nothing is downloaded
        assert done.returncode == 2 and not (tmp_path / ".venv").exists()
        assert f"driver {driver} is too old" in done.stderr or capability in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert torch_of(tmp_path) == torch
    assert ("torch 2.10 for CUDA 12" in done.stdout) == (torch == "torch==2.10.0")
    others = (tmp_path / "installed").read_text().replace(torch, "torch==2.13.0")
    assert others == (ROOT / "requirements.txt").read_text()  # the rest as it stands there


def test_the_driver_of_many_gpus_is_that_of_the_first(machine, tmp_path):
    """A tool that writes a line per GPU, slowly, must not die of a reader that has left."""
    slow = "for i in 1 2 3 4; do echo 535.183.01 || exit 1; sleep 0.02; done"
    _script(tmp_path / "bin" / "nvidia-smi", f"#!/bin/bash\n{slow}\n")
    assert machine(None).returncode == 0 and torch_of(tmp_path) == "torch==2.10.0"


@pytest.mark.parametrize("python", ["without pip", "gone", "of 3.9", "pip uninstall"])
def test_what_is_installed_is_what_the_python_of_the_venv_says(python, machine, tmp_path):
    own = tmp_path / ".venv" / "bin" / "python"
    assert machine("580.65").returncode == 0
    if python == "pip uninstall":
        shutil.rmtree(tmp_path / "site" / "torch-2.13.0.dist-info")
    else:
        own.unlink()
    if python == "gone":  # the system's, of which it is a link
        own.symlink_to(tmp_path / "python3.9")
    elif python != "pip uninstall":
        _script(own, f"#!/bin/sh\n[ '{python}' != 'without pip' -a $2 = pip ]\n")
    (own.parent / "activate").write_text("VIRTUAL_ENV=/before/.venv")  # it was moved as well
    (tmp_path / "installed").unlink()
    assert machine("580.65").returncode == 0 and torch_of(tmp_path) == "torch==2.13.0"
    assert (own.parent / "activate").read_text() == f"VIRTUAL_ENV={tmp_path}/.venv\n"


@pytest.mark.parametrize("said, version", [(">&2 echo", "2.7.18"), ("echo", "3.9.1")])
def test_a_python_that_is_too_old_is_named(said, version, machine, tmp_path):
    """Python 2 says its version on stderr; run.sh itself can be started by its name."""
    says = f"if [ $1 = -c ]; then exit 1; fi; {said} Python {version}; echo more"
    _script(tmp_path / "bin" / "python3", f"#!/bin/sh\n{says}\n")
    done = machine("580.65")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"python3 is not Python 3.10 or newer (Python {version})" in done.stderr
    assert os.access(ROOT / "run.sh", os.X_OK)


def test_options_go_to_the_training_but_no_folder(machine, tmp_path):
    wrong = ("tiny --run_dir x", "d12 --run-dir=x", "d12 --name=x", "d12 --plan")
    for words in (*wrong, "lesson", "lesson 99"):
        done = machine("580.65", words=words.split())
        assert done.returncode == 2 and words.removeprefix("lesson ") in done.stderr
    done = machine("580.65", words=["-h"])
    assert done.returncode == 0 and "bash run.sh lesson 7" in done.stdout
    assert not (tmp_path / ".venv").exists()  # nothing is installed for a mistake


@pytest.mark.parametrize(
    "words, prepares, store",
    [
        ("d12 --mirror s3://b/runs --keep 3", True, True),
        ("d12 --mirror gs://b/runs --data_dir gs://b/data", False, True),
        ("d12 --data-dir=data/other", False, False),
    ],
)
def test_a_whole_run(words, prepares, store, machine, tmp_path):
    run_dir = tmp_path / "runs" / "d12"
    (run_dir / "checkpoints" / "step_00000001").mkdir(parents=True)
    begin = [*["prepare_data.py d12"] * prepares, f"train.py {words}"]
    disk.write_json(run_dir / "status.json", {"state": "profiled"})
    assert machine("580.65", words=words.split()).returncode == 0
    assert _commands(tmp_path, ".py") == begin  # nothing was trained, and nothing went wrong
    (tmp_path / "commands").unlink()
    seconds = dict(start=48.4, steps=202, eval=1000.6, report=5, save=1)
    disk.write_json(tmp_path / "trained", {"state": "done", "seconds": seconds})
    (tmp_path / "fails").write_text("export.py d12 --page")  # a trained model is what counts
    done = machine("580.65", words=words.split())
    assert done.returncode == 0 and "page.html" not in done.stdout, done.stderr
    parts = (
        r"prepare \d s, " * prepares
        + "compile 48 s, train 202 s, validate 1001 s, report 5 s, save 1 s, samples and page"
    )
    assert re.search(rf"^time +{parts} ", done.stdout, re.M)
    assert ("preparing the text ..." in done.stdout) == prepares
    assert any((tmp_path / "site").glob("s3fs-*")) == store
    once = [*begin, "eval.py sample d12", "export.py d12 --page"]
    assert _commands(tmp_path, ".py") == once
    (tmp_path / "trained").unlink()
    (run_dir / "page.html").write_text("")
    said = machine("580.65", words=words.split()).stdout
    assert "page         runs/d12/page.html\n" in said and "time" not in said and "..." not in said
    assert _commands(tmp_path, ".py") == [*once, *begin]  # what it had made is not made again


SUITE = "-m pytest -n 4 --dist worksteal"
TIMING = "-m pytest -n 0 -m timing"
FIRST = f"{TIMING} --cache-clear"
AGAIN = f"{TIMING} --last-failed"


@pytest.mark.parametrize(
    "fails, code, runs",
    [
        ([SUITE], 1, [SUITE, FIRST]),
        ([FIRST], 0, [SUITE, FIRST, AGAIN]),
        ([FIRST, AGAIN], 1, [SUITE, FIRST, AGAIN]),
    ],
)
def test_only_what_depends_on_the_clock_is_tried_again(fails, code, runs, machine, tmp_path):
    (tmp_path / "fails").write_text("\n".join(fails))
    assert machine("580.65").returncode == code
    assert _commands(tmp_path, "-m pytest") == runs


def test_what_pytest_is_told_is_all_that_runs(machine, tmp_path):
    (tmp_path / "fails").write_text(f"{SUITE} -k x")
    assert machine("580.65", words=["test", "-k", "x"]).returncode == 1
    assert _commands(tmp_path, "-m pytest") == [f"{SUITE} -k x"]


def _commands(folder, part):
    """What Python was asked to run, of all that has this part."""
    return [line for line in (folder / "commands").read_text().splitlines() if part in line]


@pytest.mark.parametrize("fails", ["none", "test", "test -m slow and not timing"])
def test_ci_runs_the_commands_of_the_readme_and_nothing_twice(fails, tmp_path):
    for name in (".ci", "bin"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    _script(tmp_path / "run.sh", f'echo "run.sh $*"; [ "$*" != "{fails}" ]\n')
    _script(tmp_path / "bin" / "chromium", "")
    env = environment(PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    command = ["bash", tmp_path / ".ci" / "run"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == (fails != "none"), done.stderr
    words = [*" eval store scaling cluster course test".split(" "), "test -m slow and not timing"]
    assert done.stdout.splitlines() == [f"run.sh {word}" for word in words]


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_checkout_of_windows_has_the_same_bytes(tmp_path):
    """Its git is told to write CRLF. A picture has both, and no text in it."""
    ours = tmp_path / "ours"
    ours.mkdir()
    files = [ROOT / ".gitattributes", ROOT / "run.sh", ROOT / "docs/pictures/chat-dark.png"]
    for file in files:
        shutil.copy(file, ours)
    commit_all(ours)
    git(tmp_path, "-c", "core.autocrlf=true", "clone", "-q", "ours", "theirs")
    for file in files:
        assert (tmp_path / "theirs" / file.name).read_bytes() == file.read_bytes()


def test_installed_once_and_again_after_a_new_driver(machine, tmp_path):
    for words, says, installs in (
        (["store"], "550.54", 2),  # its own packages as well
        (["test"], "550.54", 2),
        (["test"], "580.65", 3),
        (["test"], "580.65", 3),
    ):
        assert machine(says, words=words).returncode == 0
        said = (tmp_path / "commands").read_text()
        assert said.count("-version-check -r") == installs and ".py" not in said
    assert torch_of(tmp_path) == "torch==2.13.0"


def test_a_build_that_the_user_chose_stays(machine, tmp_path):
    chosen = tmp_path / "site/torch-2.13.0+cu126.dist-info"
    chosen.mkdir()
    (chosen / "METADATA").write_text("Version: 2.13.0+cu126")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    _script(tmp_path / ".venv/bin/python", PYTHON)
    for driver in ("470.82.01", "550.54"):
        assert machine(driver).returncode == 0
    assert torch_of(tmp_path) == "torch==2.13.0"  # which pip finds there already
