"""What runtime.py does to the process: it keeps memory (ranks, devices: test_preflight.py)."""

import platform

import pytest
from conftest import ROOT, run

PAGE_FAULTS = """
import resource, runtime, torch
runtime.join("cpu", "fp32")
def fill():  # 64 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.full((1 << 24,), 1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fill()
print(fill())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
@pytest.mark.parametrize("tuned_by_user", [False, True])
def test_memory_of_a_freed_tensor_is_kept_for_the_next(tuned_by_user, tmp_path):
    (tmp_path / "faults.py").write_text(PAGE_FAULTS)
    theirs = {"MALLOC_PERTURB_": "0"} if tuned_by_user else {}
    result = run(tmp_path / "faults.py", PYTHONPATH=str(ROOT), **theirs)
    assert result.returncode == 0, result.stderr
    assert (int(result.stdout) > 5_000) == tuned_by_user  # 16,384 pages of 4 KB, or next to none
