"""machinery/ranks.py: memory is kept, sums are the same each time, and nobody waits forever.

Ranks that do not come, and devices: test_preflight.py."""

import platform
import re
import signal
import time

import pytest
import torch
from conftest import ROOT, losses, run
from faults import free_port, start

from machinery import ranks

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


TIMEOUTS = """
import torch, torch.distributed as dist
from machinery import ranks
def timeout():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()
ranks.meet_and_test(ranks.World(0, 1, 0, 1, torch.device("cpu"), torch.float32, 1 << 30), 8.0)
print(timeout())
ranks.expect_answers()
print(timeout())
"""


def test_a_first_step_may_take_half_an_hour_and_the_next_ones_may_not(tmp_path):
    (tmp_path / "timeouts.py").write_text(TIMEOUTS)
    here = dict(MASTER_ADDR="localhost", MASTER_PORT=str(free_port()), PYTHONPATH=str(ROOT))
    result = run(tmp_path / "timeouts.py", **here)
    lines = [line for line in result.stdout.splitlines() if "[Gloo]" not in line]  # torch 2.10's
    assert lines == ["1800.0", "100.0"], result.stdout + result.stderr


def test_a_rank_without_a_gpu_of_its_own_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert ranks.pick_device("auto", 1) == torch.device("cuda", 1)
    for asked, rank in (("auto", 2), ("cuda:3", 0)):
        with pytest.raises(ValueError, match=f"rank {rank} .* there are 2 GPUs; try .*node=2"):
            ranks.pick_device(asked, rank)


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


# ------------------------------------------------------------------------ waiting for each other

WAITS = """
import os
from machinery import ranks
ranks.meet_and_test = lambda world, timeout_s: print(timeout_s)
ranks.dist.all_reduce = lambda *args: None
ranks.start("cpu", "fp32")
"""


@pytest.mark.parametrize("local_world_size, seconds", [(2, "30.0"), (1, "300.0")])
def test_nodes_may_come_later_than_the_ranks_of_one(local_world_size, seconds, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    env = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(local_world_size))
    result = run(tmp_path / "waits.py", PYTHONPATH=str(ROOT), **env)
    assert result.returncode == 0 and result.stdout.split() == [seconds], result.stderr


def test_a_rank_that_comes_but_does_not_connect_costs_a_bounded_time(small_data, tmp_path):
    ways_out = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME .* NCCL_P2P_DISABLE=1"
    words = rf"error: rank 0 \(cpu\) could not connect within 4 s \([^)]+\).*{ways_out}"
    run = start(small_data, tmp_path / "run", world=2, spoil=[("limits", 4), ("mute", 1)])
    run.until(lambda: run.codes() == [1, 1], timeout_s=40)
    assert re.search(words, run.text), run.text
    assert "Traceback" not in run.text and not (tmp_path / "run").exists()


def test_an_address_that_nobody_can_reach(small_data, tmp_path):
    """Each rank publishes an address of a network that is not there."""
    env = {"GLOO_SOCKET_IFNAME": "nowhere0"}
    run = start(small_data, tmp_path / "run", world=2, env=env)
    text = run.end(1, timeout_s=40)
    assert "could not connect within" in text and "nowhere0" in text
    assert "Traceback" not in text


def test_a_rank_that_stops_in_the_middle_ends_the_other(small_data, tmp_path):
    spoil = [("limits", 30, 3), ("slow", 0.1)]
    run = start(small_data, tmp_path / "run", "--steps", 100, world=2, spoil=spoil)
    run.until_step(3).kill(signal.SIGSTOP, ranks=[1])
    stopped = time.monotonic()
    run.until(lambda: run.codes()[0] == 1, timeout_s=30)
    assert 2 < time.monotonic() - stopped < 25
    assert "Timed out" in run.text
    run.kill().end()


def test_compilers_and_disks_may_take_longer_than_a_step(small_data, tmp_path):
    """The first step of one rank, and rank 0's copies to the mirror, take longer than the limit
    for an answer. Another step that does ends the run."""
    args = ["--save_every", 6, "--mirror", tmp_path / "mirror"]
    spoil = [("limits", 30, 3), ("slow_step", 0, 5, 1), ("slow_mirror", 5)]
    start(small_data, tmp_path / "run", *args, world=2, spoil=spoil).end(0)
    assert len(losses(tmp_path / "run")) == 12
    spoil[1] = ("slow_step", 6, 8, 1)
    text = start(small_data, tmp_path / "other", *args, world=2, spoil=spoil).end()
    assert "Timed out waiting 3000ms" in text and 6 <= len(losses(tmp_path / "other")) < 8
