"""machinery/ranks.py: memory is kept, sums are the same each time, and nobody waits forever."""

import os
import signal

import pytest
import torch
from conftest import ROOT, run
from faults import launch, start

from config import UsageError
from machinery import ranks


def test_a_rank_without_a_gpu_of_its_own_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert ranks.pick_device("auto", 1) == torch.device("cuda", 1)
    for asked, rank in (("auto", 2), ("cuda:3", 0), ("cuda:x", 0), ("cpu:x", 0)):
        with pytest.raises(UsageError, match=f"2 GPUs|{asked}"):
            ranks.pick_device(asked, rank)


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    exists = os.path.exists
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidia0" or exists(path))
    with pytest.raises(UsageError) as error:
        ranks.pick_device("auto")
    assert torch.__version__ in str(error.value)
    assert ranks.pick_device("cpu") == torch.device("cpu")


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


@pytest.mark.slow
def test_threads_that_add_to_the_same_row_give_the_same_bits(tmp_path):
    (tmp_path / "sums.py").write_text(SAME_SUMS)
    result = run(tmp_path / "sums.py", PYTHONPATH=str(ROOT))
    assert "1 different sums" in result.stdout.splitlines(), result.stdout + result.stderr


# ------------------------------------------------------------------------ waiting for each other
@pytest.mark.parametrize("silent, starter", [(0, start), (1, start), (1, launch)])
def test_a_rank_that_does_not_come_costs_a_bounded_time(silent, starter, small_data, run_dir):
    spoil = [("limits", 3), ("late", silent)]
    run = starter(small_data, run_dir, world=2, spoil=spoil)
    run.until(lambda: 1 in run.codes())  # torchrun ends the silent one
    assert f"error: rank {1 - silent} of 2" in run.text and "GLOO_SOCKET_IFNAME" in run.text
    assert not run_dir.exists()


def test_a_rank_that_stops_in_the_middle_ends_the_other(small_data, run_dir):
    spoil = [("limits", 30, 10), ("slow", 0.1)]
    run = start(small_data, run_dir, "--steps", 400, world=2, spoil=spoil)
    run.until_step(3).kill(signal.SIGSTOP, ranks=[1])
    run.until(lambda: run.codes()[0] == 1)
    assert "rank 0 gets no answer" in run.text


@pytest.mark.parametrize("function, stopped", [("_hash_own", 1), ("_commit", 0)])
def test_a_rank_that_stops_in_the_last_save_ends_the_other(function, stopped, small_data, run_dir):
    """There is no next step, whose collective would tell."""
    spoil = [("limits", 30, 10), ("stopped_in", function, stopped)]
    run = start(small_data, run_dir, "--steps", 1, world=2, spoil=spoil)
    run.until(lambda: run.codes()[1 - stopped] in (1, 6), timeout_s=90)
    assert "Traceback" not in run.text
