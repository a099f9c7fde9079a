"""What several tests share: a data folder, a trained run, and ways to run the programs.

Markers: `slow` (CI runs them too), `timing` (depends on the clock: run alone, see the end), and
`pictures` (this test looks at a picture; for all others none is painted).
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

# One thread: the models here are tiny, and threads that wait for each other on a busy machine
# take longer than the work.
os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).parent.parent
# A model of a few thousand weights, on the CPU, eager and in fp32; the peak is given, as to measure
# it takes longer than such a run.
SMALL = (
    "--n_layer 2 --n_embd 32 --n_head 2 --n_kv_head 2 --head_dim 16 --mlp_hidden 64 "
    "--tokens_per_step 512 --steps 12 --no_compile --device cpu --dtype fp32 --warmup 2 "
    "--eval_tokens 1024 --log_every 1 --decay 0.65 --peak_tflops 1"
).split()
CPU = "--device cpu --dtype fp32".split()  # eval.py's options


def environment(**more) -> dict[str, str]:
    """Of a child process: offline, one thread, no ranks inherited."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_"))
    }
    bin_dir = str(Path(sys.executable).parent)
    path = bin_dir + os.pathsep + env["PATH"]
    return env | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PATH=path) | more


def command(program: str, args, nproc: int = 0) -> list[str]:
    """nproc 0: plain python; else under torchrun, on a free port."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [sys.executable, *launcher * (nproc > 0), str(ROOT / program), *map(str, args)]


def ended(words: list[str], timeout: int = 120, cwd: Path = ROOT, **env):
    """Run a command to its end; `.returncode`, `.stdout`, `.stderr`."""
    how = dict(capture_output=True, text=True, timeout=timeout, cwd=cwd)
    return subprocess.run(words, env=environment(**env), **how)


def run(program: str, *args, nproc: int = 0, **how):
    """`ended` of a program."""
    return ended(command(program, args, nproc), **how)


def succeeded(done) -> str:
    """What a command printed, which must have succeeded."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(program: str, *args, **how) -> str:
    """`run`, which must succeed: what it prints."""
    return succeeded(run(program, *args, **how))


def run_code(code: str, *args, **how) -> str:
    """Run Python code in a process of its own, which must succeed: what it prints."""
    return succeeded(ended([sys.executable, "-c", code, *map(str, args)], **how))


def git(folder: Path, *words: str) -> str:
    """A git command, by somebody; what it prints."""
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.check_output(["git", "-C", folder, *own, *words], text=True)


def commit_all(folder: Path):
    """Make a repository of a folder, with one commit."""
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")


def until(ready, timeout_s: float = 200.0):
    """Wait for ready(), of something that happens soon, but in its own time."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"waited {timeout_s} s"
        time.sleep(0.005)


def train_here(data_dir, run_dir, *options) -> int:
    """`train.py tiny` of a small model, within this process; its exit code."""
    import train

    words = ["tiny", *SMALL, "--data_dir", data_dir, "--run_dir", run_dir, *options]
    return train.main([*map(str, words)])


def code_texts() -> list[str]:
    """A quarter of a megabyte of code that no change of this project changes, and so neither the
    models that are trained on it nor what they write."""
    names = "argparse calendar contextlib copy csv queue shutil textwrap tokenize types".split()
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [(folder / f"{name}.py").read_text("utf-8") for name in names]


def look(capsys, *words) -> str:
    """eval.py in this process, which must succeed: what it prints."""
    import eval

    capsys.readouterr()
    assert eval.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def read_json(path: Path):
    return json.loads(path.read_text("utf-8"))


def write_json(path: Path, tree):
    path.write_text(json.dumps(tree))


def read_lines(path: Path) -> list:
    """What each line of a .jsonl holds."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_lines(path: Path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def flip(file: Path, at: int = -10, bit: int = 1):
    """Spoil one byte of a file, as a disk may."""
    content = bytearray(file.read_bytes())
    content[at] ^= bit
    file.write_bytes(content)


def metrics(run_dir, having: str = "step") -> list[dict]:
    """The records of metrics.jsonl that have this field; by default, all steps and validations."""
    return [record for record in read_lines(Path(run_dir) / "metrics.jsonl") if having in record]


def logged(run_dir, name: str) -> list:
    """The values of a field in metrics.jsonl, one after another."""
    return [record[name] for record in metrics(run_dir, name)]


def starts(run_dir) -> list[dict]:
    """What metrics.jsonl says of each process that took up the run."""
    return logged(run_dir, "start")


def losses(run_dir) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in metrics(run_dir, "loss")}


def parameters(run_dir, step: int) -> dict:
    """name -> tensor of a checkpoint: weights and optimizer state, put together from all ranks."""
    import torch
    import torch.distributed.checkpoint as dcp

    folder = Path(run_dir) / "checkpoints" / f"step_{step:08d}" / "dcp"
    reader = dcp.HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in saved.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def tensor_files(checkpoint) -> list[Path]:
    """The files of a checkpoint that hold tensors: one or more of each rank."""
    return sorted(p for p in (Path(checkpoint) / "dcp").iterdir() if p.name != ".metadata")


@pytest.fixture(autouse=True)
def leave_no_run_behind():
    """A test that fails within a run must not slow down or confuse those after it."""
    yield
    faults = sys.modules.get("faults")
    if faults:
        while faults.Run.of_this_test:
            run = faults.Run.of_this_test.pop()
            if run.alive():
                run.stop()


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once(name, make): a folder as make(folder) leaves it, made by the first of all workers of
    xdist that asks for it. Only to be read."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "once"
    root.mkdir(exist_ok=True)

    def made(name: str, make) -> Path:
        folder = root / name
        done = root / f"{name}.done"
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that has failed
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def small_data(once) -> Path:
    """Rows of 65 tokens, a vocabulary of 512, from code and invented text."""
    from data_helpers import prepare_tiny

    def make(folder: Path):
        texts = folder / "texts"
        texts.mkdir()
        for i, text in enumerate(code_texts()):
            (texts / f"code{i}.txt").write_text(text)
        for i in range(40):
            (texts / f"note{i}.txt").write_text(f"def note_{i}(x):\n    return x + {i}\n" * (i + 3))
        prepare_tiny(folder / "data", "--vocab_size", 512, "--source", f"files:{texts}")

    return once("small", make) / "data"


@pytest.fixture
def manifest(tmp_path):
    """That of a folder without text: two sources, in shards of 100 rows."""
    from data_helpers import SIZES, make_folder

    return make_folder(tmp_path / "d", SIZES)


@pytest.fixture(scope="session")
def trained_run(small_data, once) -> Path:
    """The folder of a finished run of 12 steps, with the checkpoints of steps 4, 8 and 12. Only to
    be read: a test that writes to it takes `own_run`."""

    def make(folder: Path):
        options = "--save_every 4 --keep 9 --eval_every 4".split()
        assert train_here(small_data, folder / "run", *options) == 0

    return once("trained", make) / "run"


@pytest.fixture
def full_disk(monkeypatch):
    """full_disk(free): from then on, all disks have no more than these bytes free."""

    def fill(free: int):
        usage = shutil.disk_usage("/")._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return fill


@pytest.fixture
def own_data(small_data, tmp_path) -> Path:
    """A copy of the data, in tmp_path, to be changed."""
    return shutil.copytree(small_data, tmp_path / "data")


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """Where a test trains."""
    return tmp_path / "run"


@pytest.fixture
def own_run(trained_run, tmp_path) -> Path:
    """A copy of the trained run, in tmp_path."""
    return shutil.copytree(trained_run, tmp_path / "run")


# ------------------------------------------------------------------------------- no pictures
def paint_nothing(paints=lambda: False):
    """Pictures of runs are empty, unless paints()."""
    from instruments.pages import curves

    honest = curves.paint
    curves.paint = lambda *args: honest(*args) if paints() else "<svg></svg>"


_pictures = None  # whether the test that runs looks at them; None before the first test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before the fixtures of a test, as those of a module or a session paint as well."""
    global _pictures
    if _pictures is None:
        paint_nothing(lambda: _pictures)
        hear_hangups()
    _pictures = item.get_closest_marker("pictures") is not None


def hear_hangups():
    """Under nohup SIGHUP is ignored, and children would inherit that: the programs respect it, but
    tests send it. A handler protects this process as well, and ends with it."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda signum, frame: None)
