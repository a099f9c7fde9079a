"""benchmarks/first_hour.sh and first_hour.py: one part that fails does not cost the others."""

import shutil
import subprocess
import sys
import tarfile

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import first_hour  # noqa: E402
import throughput  # noqa: E402

# As .venv/bin/python: notes its arguments; preparing data fails and the levers take too long.
PYTHON = """#!/bin/sh
echo "$@" >> commands
case "$*" in
  *environment*) echo "GPU               $GPU" ;;
  *prepare_data*) echo "no text"; exit 3 ;;
  *levers*) exit 124 ;;
esac
"""


@pytest.mark.parametrize("gpu", ["none", "NVIDIA H100 80GB HBM3"])
def test_a_part_that_fails_is_said_and_the_next_one_begins(gpu, tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    script = shutil.copy(ROOT / "benchmarks" / "first_hour.sh", tmp_path / "benchmarks")
    env = {"PATH": "/usr/bin:/bin", "GPU": gpu}
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    parts = (tmp_path / "first_hour" / "parts.txt").read_text()
    assert "failed with exit code 3; see data.txt" in parts
    assert "levers                 stopped after 370 s; see levers.txt" in parts
    assert parts.count(" ok (") == (5 if gpu == "none" else 7)
    assert ("no GPU: small sizes" in parts) == (gpu == "none")
    commands = (tmp_path / "commands").read_text()
    assert ("resume tiny" in commands) == ("--no_compile" in commands) == (gpu == "none")
    with tarfile.open(tmp_path / "first_hour.tar.gz") as tar:
        names = tar.getnames()
    assert "first_hour/data.txt" in names and "first_hour/work" not in names


def test_a_lever_is_compared_with_the_mean_of_the_runs_around_it():
    plain = dict(micro_batch=32, grad_accum=2, memory=30e9)
    with_it = plain | dict(tokens_per_s=330.0, memory=40e9, grad_accum=1, micro_batch=64)
    around = [plain | dict(tokens_per_s=speed) for speed in (290.0, 310.0)]
    cells = first_hour.compare(around[0], with_it, around[1])
    assert cells == ["64 x 1", "300 -> 330", "+10.0%", "30.0 -> 40.0 GB"]
    assert "took more" in first_hour.compare(plain, {"error": "took more than 240 s"}, plain)[2]


def test_levers_and_throughput_without_a_figure_have_failed(monkeypatch, capsys):
    for module in (first_hour, throughput):
        monkeypatch.setattr(module, "run_case", lambda case, **how: {"error": "no luck"})
    monkeypatch.setattr(throughput.sys, "argv", ["throughput.py", "tiny"])
    monkeypatch.setattr(throughput.signal, "signal", lambda *_: None)  # pytest keeps its own
    for work in (lambda: first_hour.levers("tiny", 2048, 1, ""), throughput.main):
        with pytest.raises(SystemExit) as end:
            work()
        assert end.value.code == 1 and "no luck" in capsys.readouterr().out


def test_losses_of_a_run_that_was_resumed(tmp_path):
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.5}', '{"step": 2, "val_loss": 9}']
    text = "\n".join([*lines, '{"step": 2, "loss": 2.0}', '{"step": 3, "lo'])
    (tmp_path / "metrics.jsonl").write_text(text)
    assert first_hour.losses(tmp_path) == {1: 3.0, 2: 2.0}
    assert first_hour.losses(tmp_path / "none") == {}
