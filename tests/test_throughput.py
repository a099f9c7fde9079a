"""benchmarks/throughput.py still fits train.py, and its row says what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_one_row_for_each_preset_that_works(tmp_path):
    """Three rows of tiny in a step, 2 at a time; the other's rows are longer, and do not fit."""
    results = tmp_path / "RESULTS.md"
    command = [sys.executable, ROOT / "benchmarks" / "throughput.py", "tiny", "gpt2-124m"]
    command += ["--no_compile", "--micro_batch", "2", "--tokens_per_step", "1536", "--steps", "2"]
    command += ["--warmup", "1", "--device", "cpu", "--results", results]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    row = r"\| tiny +\| 2 x 2 +\| (bfloat16|float32) +\| [\d,]+ +\| [\d,]+ +\| n/a +\| n/a"
    assert len(re.findall(row, results.read_text())) == 1
    assert "gpt2-124m, micro-batch 2: config.UsageError: tokens_per_step 1536" in done.stdout
    share = float(re.search(r"([\d.]+)% of [\d.]+T", done.stdout)[1])
    assert 0 < share < 100
    assert re.search(r"## Throughput: .*, torch \d.*, \d{4}-\d\d-\d\d\n", results.read_text())
