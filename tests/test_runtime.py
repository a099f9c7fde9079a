"""What runtime.py does to the process: it keeps memory (ranks, devices: test_preflight.py)."""

import platform

import pytest
from conftest import ROOT, run

KEPT = """
import os, runtime, torch
runtime.join("cpu", "fp32")
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
torch.full((1 << 24,), 1.0)  # 64 MB, freed at once
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
@pytest.mark.parametrize("tuned_by_user", [False, True])
def test_memory_of_a_freed_tensor_is_kept_for_the_next(tuned_by_user, tmp_path):
    (tmp_path / "kept.py").write_text(KEPT)
    theirs = {"MALLOC_PERTURB_": "0"} if tuned_by_user else {}
    result = run(tmp_path / "kept.py", PYTHONPATH=str(ROOT), **theirs)
    assert result.returncode == 0, result.stderr
    assert (int(result.stdout) < 32 << 20) == tuned_by_user
