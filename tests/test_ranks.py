"""What ranks.py does to the process: memory is kept, sums are the same each time.

Ranks and devices: test_preflight.py."""

import platform

import pytest
from conftest import ROOT, run

KEPT = """
import os, torch
from machinery import ranks
ranks.start("cpu", "fp32")
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


SAME_SUMS = """
import torch
from machinery import ranks
ranks.start("cpu", "fp32")
torch.set_num_threads(2)
torch.manual_seed(0)
table, ids = torch.nn.Embedding(16, 256), torch.randint(16, (20_000,))
noise = torch.randn(20_000, 256)
step = torch.compile(lambda: (table(ids) * noise).sum())
seen = set()
for _ in range(10):
    table.zero_grad()
    step().backward()
    seen.add(table.weight.grad.numpy().tobytes())
print(len(seen), "different sums")
"""


def test_threads_that_add_to_the_same_row_give_the_same_bits(tmp_path):
    (tmp_path / "sums.py").write_text(SAME_SUMS)
    result = run(tmp_path / "sums.py", PYTHONPATH=str(ROOT))
    assert "1 different sums" in result.stdout.splitlines(), result.stdout + result.stderr
