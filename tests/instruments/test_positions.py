"""instruments/pages/positions.py: the loss by position in the row."""

import json
import shutil

import pytest
import torch

import data
import eval as evaluate
from instruments.pages import positions, report
from machinery.errors import NonFiniteError
from machinery.trained import EvalConfig


class Told(torch.nn.Module):
    """The nats of a target are told by its id, its input and its place in the row."""

    def forward(self, inputs, targets, reduction):
        return targets.clamp(min=0) + 0.01 * inputs + torch.arange(inputs.size(1)) / 7  # (B, T)


@pytest.mark.parametrize("first", [4, 32])
def test_only_targets_that_count_are_scored(first, monkeypatch):
    """By a loop over single targets, of rows where some, or all, or none count."""
    monkeypatch.setattr(positions, "FIRST", first)
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(0, 9, (2, 11, 21), generator=draw)
    targets[torch.rand(targets.shape, generator=draw) < 0.6] = data.IGNORED
    targets[3] = targets[:, 2] = data.IGNORED  # a row, and a position
    targets[:, 8:16] = data.IGNORED  # a range
    by_place = {t: [] for t in range(21)}
    for row, wanted in zip(inputs.tolist(), targets.tolist()):
        for t, (before, target) in enumerate(zip(row, wanted)):
            if target != data.IGNORED:
                by_place[t].append(target + 0.01 * before + t / 7)
    batches = lambda: zip(inputs.split(4), targets.split(4))
    means = positions.by_position(Told(), batches())
    for t, nats in by_place.items():
        assert means[t].item() == pytest.approx(sum(nats) / len(nats)) if nats else means[t].isnan()
    nats = positions.nats_of(Told(), batches())
    expected = []
    for begin, end in positions.ranges(21):
        if several := [x for t in range(begin, end) for x in by_place[t]]:
            expected.append((begin, end, pytest.approx(sum(several) / len(several))))
    assert positions.by_range(nats) == expected and len(expected) >= 1


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_model_that_says_nothing_is_an_error(wrong):
    rows = torch.zeros(2, 3, dtype=torch.long)
    model = lambda inputs, targets, reduction: torch.full(inputs.shape, wrong)
    with pytest.raises(NonFiniteError):
        positions.by_position(model, [(rows, rows)])


@pytest.mark.parametrize("T", [1, 32, 33, 1000, 2048])
def test_the_ranges_cover_each_position_once(T):
    ranges = positions.ranges(T)
    assert [i for begin, end in ranges for i in range(begin, end)] == [*range(T)]
    assert all(begin in (0, 32 * 2 ** (k - 1)) for k, (begin, _) in enumerate(ranges))


def test_the_report_has_it_of_the_newest_checkpoint(own_run, tmp_path):
    """Measured once, unless it is damaged; anew for other held-out text."""
    argv = ["report", str(own_run), "--device", "cpu", "--dtype", "fp32", "--max_new_tokens", "2"]
    assert evaluate.main(argv) in (0, None)
    path = own_run / "positions.json"
    written = json.loads(path.read_text())
    assert written["step"] == 12 and [part[:2] for part in written["nats"]] == [[0, 32], [32, 64]]
    page = (own_run / "report.html").read_text()
    assert "<b>32 to 63</b>" in page and f"{written['nats'][1][2]:.4f} nats" in page
    before = path.stat().st_mtime_ns
    assert evaluate.main(argv) in (0, None)  # done already
    assert path.stat().st_mtime_ns == before
    for damage in ("5", "{", "{}", '{"step": 60, "nats": 3}', '{"step": 1, "nats": [["a", 2, 3]]}'):
        path.write_text(damage)
        assert "Loss by position" not in report.write(own_run).read_text()
    other = shutil.copytree(written["data"], tmp_path / "other")
    newest = str(own_run / "checkpoints" / "step_00000012")
    for asked, data_dir in (("", written["data"]), (str(other), str(other)), ("", written["data"])):
        config = EvalConfig(str(own_run), newest, asked, device="cpu", dtype="fp32")
        positions.measure(config, evaluate.load_model)
        assert positions.read(own_run)["data"] == data_dir
    assert json.loads(path.read_text()) == written
