"""profiler.py: a few steps on the CPU, their table and their trace."""

import gzip
import json
import re
from unittest.mock import Mock, call

import pytest
import torch
from torch.profiler import record_function

from config import UsageError
from instruments.run import profiler
from machinery.errors import DataError


def run_in(folder):
    """What the profiler needs of train.py's, on the second of two ranks; its calls are recorded."""
    world = Mock(rank=1, world_size=2, device=torch.device("cpu"))
    return Mock(world=world, log=Mock(run_dir=folder), progress=Mock(step=4))


def test_a_run_is_profiled_over_its_own_steps(tmp_path):
    run = run_in(tmp_path)
    log_step = Mock()
    weight = torch.nn.Parameter(torch.ones(256, 256))
    optimizer = torch.optim.AdamW([weight])

    def take_steps():
        for step in range(1, 10):
            with record_function("data"):
                x = torch.ones(256, 256)
            (x @ weight).sum().backward()
            with record_function("communication"):
                weight.grad.mul_(0.5)
            optimizer.step()
            yield dict(step=step)

    assert profiler.run(run, take_steps(), log_step) == 0
    # one to warm up, three to record
    assert log_step.mock_calls == [call(run, dict(step=step)) for step in (1, 2, 3, 4)]
    run.log.status.assert_called_once_with("profiled", step=4, exit_code=0)
    trace = tmp_path / "profile" / "rank_1" / "trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("ProfilerStep") for event in events) == 3
    text = "\n".join(said.args[0] for said in run.log.print.mock_calls)
    assert "sums of 3 steps" in text and str(trace) in text
    rows = re.findall(r"^ *(\S.*?) +([\d.]+)% .* (\d+) *$", text, re.MULTILINE)
    names, shares, calls = zip(*rows)
    assert {*names[:4]} == {"ProfilerStep*", "data", "communication", "Optimizer.step#AdamW.step"}
    assert calls[:4] == ("3",) * 4 and "aten::mm" in names and len(rows) == profiler.ROWS
    assert sorted(shares[4:], key=float, reverse=True) == [*shares[4:]]


def test_too_few_steps_is_a_sentence(tmp_path):
    with pytest.raises(UsageError, match="--steps 4"):
        profiler.run(run_in(tmp_path), iter([dict(step=1)]), Mock())


def test_a_link_in_the_run_is_not_written_through(tmp_path):
    (tmp_path / "profile").symlink_to(tmp_path.parent)
    with pytest.raises(DataError):
        profiler.run(run_in(tmp_path), iter(()), None)
