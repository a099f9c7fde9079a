"""machinery/cli.py: a command line becomes a preset; how a program ends; what a URL hides."""

import errno
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment, run

import config
from config import UsageError
from instruments.talk.sample import SampleConfig
from machinery import cli, errors


def parse(*argv):
    return cli.parse("train.py", "train", list(argv))


def test_tyro_says_once_per_node_what_is_wrong(monkeypatch, capsys):
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end:
            parse("--run_dirs", "x")
        said = capsys.readouterr().err
        assert end.value.code == 2 and ("--run_dir " in said) == (rank == "0")


def test_help_ends_in_a_narrow_terminal():
    for words, code in (("--help", 0), ("--sourze", 2)):
        done = run("prepare_data.py", words, timeout=30, COLUMNS="1")
        assert done.returncode == code and "--source" in done.stdout + done.stderr


def test_an_option_of_another_project_is_answered_with_ours():
    assert parse("--run-dir", "x").run.run_dir == "x"  # tyro takes both
    preset = config.PRESETS["tiny"]
    parts = (preset.model, preset.train, preset.run, preset.data, SampleConfig())
    names = {f"--{name}" for part in parts for name in vars(part)}
    named = re.findall(r"--\w+", " ".join(config.FOREIGN.values()))
    assert len(named) > 40 and set(named) <= names
    assert names & {f"--{name}" for name in config.FOREIGN} == {
        f"--{name}"
        for name in "usd_per_hour name n max_new_tokens prompt temperature top_k top_p".split()
    }


LENGTHS = dict(steps=3, tokens="1M", epochs=0.5)


@pytest.mark.parametrize("name", LENGTHS)
def test_one_length_is_typed_and_overrides_the_presets(name):
    train = parse(f"--{name}={LENGTHS[name]}").train
    assert {k: getattr(train, k) for k in LENGTHS if getattr(train, k)} == {name: LENGTHS[name]}


def test_a_name_is_that_of_data_and_run():
    """A folder that is given wins."""
    folders = lambda *words: {k: v for k, v in vars(parse(*words).run).items() if k[-4:] == "_dir"}
    assert folders("d12") == dict(data_dir="data/d12", run_dir="runs/d12")
    assert folders("--name", "a.b") == dict(data_dir="data/a.b", run_dir="runs/a.b")
    assert folders("--name=pt", "--run_dir=runs/tiny") == dict(
        data_dir="data/pt", run_dir="runs/tiny"
    )
    home = os.path.expanduser("~")
    assert parse("--run_dir=~/x").run.run_dir == f"{home}/x"
    assert parse("--mirror=~").run.mirror == home and parse("--stage=~x=~/").run.stage == "~x=~/"
    assert cli.parse("prepare_data.py", "data", ["--name", "pt"]).data.data_dir == "data/pt"


def test_help_begins_with_how_long(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    said = capsys.readouterr().out
    found = [said.index(f"--{name} ") for name in (*LENGTHS, "name", "run_dir", "n_layer")]
    assert found == sorted(found)


WHOLE = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
LEFT = "WORLD_SIZE=4", "RANK=0 WORLD_SIZE=4", "LOCAL_RANK=-1 RANK=", "WORLD_SIZE=1"


@pytest.mark.parametrize(
    "words", [*LEFT, "LOCAL_RANK=x MASTER_PORT=1 MASTER_ADDR=x RANK=1 WORLD_SIZE=2"]
)
def test_half_a_rank_is_ignored_with_a_sentence(words, monkeypatch, capsys):
    for name in (*WHOLE, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for word in words.split():
        monkeypatch.setenv(*word.split("="))
    cli.ignore_half_a_rank()
    said = capsys.readouterr().err
    assert all(w.startswith("MASTER") or f"{w} is ignored" in said for w in words.split())
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys()


# ---------------------------------------------------------------------------- how it ends
def test_exit_codes():
    for names, path, code in (
        ("EACCES ELOOP EISDIR ENOTDIR ENAMETOOLONG", "a", 2),
        ("ENOSPC EIO EMFILE", None, 6),
        ("EPERM EPIPE", None, 1),  # of os.kill, of a socket
        ("ENOENT", "a", 1),
    ):
        for name in names.split():
            assert cli.exit_code(OSError(getattr(errno, name), "", path)) == code, name
    assert [cli.exit_code(e) for e in (UsageError(), errors.DataError(), ValueError())] == [2, 3, 1]


ENDS = "import sys; from machinery import cli\ndef main(argv):\n {}\ncli.run(main)"


def ends(tmp_path, code: str, shell: str = "", **env) -> subprocess.CompletedProcess:
    (tmp_path / "ends.py").write_text(ENDS.format(code))
    line = f"{sys.executable} {tmp_path / 'ends.py'} {shell}; exit ${{PIPESTATUS[0]}}"
    env = environment(PYTHONPATH=str(ROOT), **env)
    return subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True)


def test_a_path_that_cannot_be_used_is_one_sentence(tmp_path):
    done = ends(tmp_path, f"open({str(tmp_path)!r}, 'w')")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert str(tmp_path) in done.stderr and done.stderr.count("\n") == 1


def test_a_mistake_reaches_the_launchers_summary_and_is_printed_once(tmp_path):
    mistake = "raise cli.UsageError('--x 3 https://u:secret@h')"
    for rank in (0, 1):
        file = tmp_path / f"error{rank}.json"
        env = dict(WHOLE, RANK=str(rank), LOCAL_RANK=str(rank), TORCHELASTIC_ERROR_FILE=str(file))
        done = ends(tmp_path, mistake, **env)
        assert done.returncode == 2 and ("--x 3" in done.stderr) == (rank == 0)
        assert "--x 3" in file.read_text() and "secret" not in file.read_text()


def test_a_program_whose_reader_has_gone_ends_in_silence(tmp_path):
    """As `| head` does to it: not by a signal, which would also end a run that only prints."""
    done = ends(tmp_path, "[print('x' * 80) for _ in range(10**5)]", "| true")
    assert done.returncode == 141 and not done.stderr
    assert ends(tmp_path, "print('x')", "<&- >&- 2>&-").returncode == 0


def test_a_name_of_any_bytes_is_printed(tmp_path):
    """But the terminal gets no commands and no secret from it, or from the text of an error."""
    text = r"\udce9\x1b]\x07\x9b\r\té汉 https://u:secret@h/x"
    for error, code in (("cli.UsageError", 2), ("ValueError", 1)):
        done = ends(tmp_path, rf"print('caf\udce9'); raise {error}('{text}')")
        assert done.returncode == code and "caf" in done.stdout and "\té汉" in done.stderr
        assert "secret" not in done.stderr and ("Traceback" in done.stderr) == (code == 1)
        assert not re.search("[^\n\t -~\xa0-\U0010ffff]", done.stderr)


BUSY_TO_THE_END = """
import sys, torch, torch.distributed as dist
from machinery.cli import run

def main(argv):
    dist.init_process_group("gloo")
    global group  # what outlives the call keeps gloo's threads at work
    group = dist.group.WORLD
    for _ in range(400):
        dist.all_reduce(torch.ones(300_000), async_op=True)
    return int(argv[0])

run(main)
"""


def test_a_busy_connection_does_not_turn_the_exit_code_into_an_abort(tmp_path):
    (tmp_path / "busy.py").write_text(BUSY_TO_THE_END)
    result = run(tmp_path / "busy.py", 6, nproc=2, PYTHONPATH=str(ROOT))
    assert "exitcode  : 6 " in result.stderr


def test_the_ways_to_say_that_a_gpu_is_full():
    for said in (
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmul`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ):
        assert errors.is_out_of_memory(RuntimeError(said)), said
    other = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not errors.is_out_of_memory(other)
