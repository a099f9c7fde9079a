"""benchmarks/throughput.py still fits train.py, and its row says what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_one_row_for_each_micro_batch_that_works(tmp_path):
    results = tmp_path / "RESULTS.md"
    command = [sys.executable, ROOT / "benchmarks" / "throughput.py", "tiny", "--no_compile"]
    command += ["--micro_batch", "1", "3", "--tokens_per_step", "1024", "--steps", "2"]
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
    row = r"\| tiny +\| 1 x 2 +\| (bfloat16|float32) +\| \w+ +\| [\d,]+ +\| [\d,]+ +\| n/a +\| n/a"
    assert len(re.findall(row, results.read_text())) == 1
    assert "tiny, micro-batch 3: ValueError: tokens_per_step 1024" in done.stdout
    share = float(re.search(r"([\d.]+)% of [\d.]+T", done.stdout)[1])
    assert 0 < share < 100
    assert re.search(r"## Throughput: .*, torch \d.*, \d{4}-\d\d-\d\d\n", results.read_text())
