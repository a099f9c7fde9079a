"""profiler.py: a few steps on the CPU, their table and their trace."""

import gzip
import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import record_function

from config import UsageError
from instruments.run import profiler
from machinery.errors import DataError


def run_in(folder, printed, states, rank=0, world_size=1):
    device = torch.device("cpu")
    world = SimpleNamespace(rank=rank, world_size=world_size, is_first=True, device=device)
    status = lambda state, **facts: states.append((state, facts))
    log = SimpleNamespace(run_dir=folder, print=printed.append, status=status)
    return SimpleNamespace(world=world, log=log)


def test_a_run_is_profiled_over_its_own_steps(tmp_path):
    taken = []
    logged = []
    printed = []
    states = []
    weight = torch.nn.Parameter(torch.ones(256, 256))
    optimizer = torch.optim.AdamW([weight])

    def take_steps():
        for step in range(1, 10):
            taken.append(step)
            with record_function("data"):
                x = torch.ones(256, 256)
            (x @ weight).sum().backward()
            with record_function("communication"):
                weight.grad.mul_(0.5)
            optimizer.step()
            yield dict(step=step)

    run = run_in(tmp_path, printed, states, 1, 2)
    run.progress = SimpleNamespace(step=4)
    log_step = lambda *args: logged.append(args)
    assert profiler.run(run, take_steps(), log_step) == 0
    assert taken == [1, 2, 3, 4]  # one to warm up, three to record
    assert logged == [(run, dict(step=step)) for step in taken]
    assert states == [("profiled", dict(step=4, exit_code=0))]
    trace = tmp_path / "profile" / "rank_1" / "trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("ProfilerStep") for event in events) == 3
    text = "\n".join(printed)
    assert "sums of 3 steps" in text and str(trace) in text
    rows = re.findall(r"^ *(\S.*?) +([\d.]+)% .* (\d+) *$", text, re.MULTILINE)
    regions = {"ProfilerStep*", "data", "communication", "Optimizer.step#AdamW.step"}
    assert {(name, calls) for name, _, calls in rows[:4]} == {(name, "3") for name in regions}
    assert "aten::mm" in [name for name, *_ in rows] and len(rows) == profiler.ROWS
    shares = [float(share) for _, share, _ in rows[4:]]
    assert shares == sorted(shares, reverse=True)


def test_too_few_steps_is_a_sentence(tmp_path):
    run = run_in(tmp_path, [], [])
    with pytest.raises(UsageError, match="--steps 4"):
        profiler.run(run, iter([dict(step=1)]), lambda *_: None)


def test_a_link_in_the_run_is_not_written_through(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to(other)
    with pytest.raises(DataError):
        profiler.run(run_in(tmp_path / "run", [], []), iter(()), None)
    assert not list(other.iterdir())
