"""What several tests share: a small data folder, and ways to run the programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# One thread: the models here are tiny, and threads that wait for each other on a busy machine
# take longer than the work.
os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).parent.parent
# A model of a few thousand weights, on the CPU, eager and in fp32: its runs take seconds.
SMALL = (
    "--n_layer 2 --n_embd 32 --n_head 2 --n_kv_head 2 --head_dim 16 --mlp_hidden 64 "
    "--tokens_per_step 512 --steps 12 --no_compile --device cpu --dtype fp32 --warmup 2 "
    "--eval_tokens 1024 --log_every 1 --decay 0.65"
).split()


def environment(**more) -> dict[str, str]:
    """Of a child process: offline, one thread, no ranks inherited."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_"))
    }
    bin_dir = str(Path(sys.executable).parent)
    return env | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": bin_dir + os.pathsep + env["PATH"],
        **more,
    }


def command(program: str, args, nproc: int = 0) -> list[str]:
    """nproc 0: plain python; else under torchrun, on a free port."""
    if not nproc:
        return [sys.executable, str(ROOT / program), *map(str, args)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={nproc}", str(ROOT / program), *map(str, args)]


def run(program: str, *args, nproc: int = 0, timeout: int = 120, **env):
    """Run a program to its end; `.returncode`, `.stdout`, `.stderr`."""
    return subprocess.run(
        command(program, args, nproc),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=environment(**env),
    )


def flip(file: Path, at: int = -10, bit: int = 1) -> None:
    """Spoil one byte of a file, as a disk may."""
    content = bytearray(file.read_bytes())
    content[at] ^= bit
    file.write_bytes(content)


def metrics(run_dir) -> list[dict]:
    """The steps and validations of metrics.jsonl; `starts` has its other lines."""
    return [record for record in _records(run_dir) if "step" in record]


def starts(run_dir) -> list[dict]:
    """What metrics.jsonl says of each process that took up the run."""
    return [record["start"] for record in _records(run_dir) if "start" in record]


def _records(run_dir) -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in metrics(run_dir) if "loss" in r}


def parameters(run_dir, step: int) -> dict:
    """name -> tensor of a checkpoint: weights and optimizer state."""
    import torch
    from torch.distributed import checkpoint as dcp

    path = Path(run_dir) / "checkpoints" / f"step_{step:08d}" / "dcp"
    reader = dcp.HuggingFaceStorageReader(str(path))
    found = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in found.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.fixture(autouse=True)
def leave_no_run_behind():
    """A test that fails within a run must not slow down or confuse those after it."""
    yield
    if faults := sys.modules.get("faults"):
        while faults.Run.of_this_test:
            run = faults.Run.of_this_test.pop()
            if run.alive():
                run.stop()


@pytest.fixture(scope="session")
def small_data(tmp_path_factory) -> Path:
    """Rows of 65 tokens, a vocabulary of 512, from this project's own sources and invented text."""
    folder = tmp_path_factory.mktemp("small")
    texts = folder / "texts"
    texts.mkdir()
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py")]):
        (texts / f"{path.stem}.txt").write_text(path.read_text())
    for i in range(40):
        (texts / f"note{i}.txt").write_text(f"def note_{i}(x):\n    return x + {i}\n" * (i + 3))
    options = "--vocab_size 512 --row_len 65 --val_fraction 0.2 --workers 1".split()
    options += ["--source", f"files:{texts}", "--data_dir", folder / "data"]
    result = run("prepare_data.py", "tiny", *options)
    assert result.returncode == 0, result.stderr
    return folder / "data"
