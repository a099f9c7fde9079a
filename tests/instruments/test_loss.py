"""instruments/exams/loss.py and pages/multiplier.py: the loss by class of targets, and how many
tokens a run needs for what another has."""

import gc
import re
import tracemalloc

import numpy as np
import pytest
import torch
from conftest import CPU, look, read_lines, write_json, write_lines

import data
from instruments.exams import loss
from instruments.exams.loss import CLASSES
from instruments.pages import multiplier, report
from instruments.pages.run_folder import RunFolder
from machinery.errors import NonFiniteError


def test_the_class_of_a_target_by_a_search_backwards():
    """Of rows of few tokens, so that all classes occur; no two pairs of them are confused."""
    few = torch.tensor([0, 1, 2, 1 << 16, 1 << 30, (1 << 31) - 1])
    torch.manual_seed(0)
    ids = few[torch.randint(0, len(few), (9, 40))]
    assert loss.copy_classes(ids[:, :2]).tolist() == [[4]] * 9
    for row, classes in zip(ids.tolist(), loss.copy_classes(ids).tolist()):
        for t, found in enumerate(classes):
            ends = [i for i in range(t) if row[i] == row[t]]
            pairs = [i for i in ends if 0 < i and row[i - 1] == row[t - 1]]
            last = (pairs or ends or [None])[-1]
            same = last is not None and row[last + 1] == row[t + 1]
            assert found == (4 if last is None else 2 * (not pairs) + (not same))


def test_the_loss_is_that_of_the_run_and_its_classes_make_it_up(own_run, monkeypatch, capsys):
    found = []
    score = loss.score
    monkeypatch.setattr(loss, "score", lambda *given: found.append(score(*given)) or found[-1])
    words = ["loss", own_run, *CPU, "--by"]
    lines = look(capsys, *words, "position").splitlines()
    parts = [line.split()[3] for line in lines if " to " in line]
    out = look(capsys, *words, "copy")
    record = read_lines(own_run / "eval.jsonl")[-1]
    assert np.mean([*map(float, parts)]) == pytest.approx(record["val_loss"], abs=1e-4)
    by_source, by_place = (sums.numpy() for sums in found[-1])
    by_class = by_source.sum(0)
    nats, targets, text_nats, size = by_class.sum(0)
    assert nats / targets == pytest.approx(record["val_loss"], rel=1e-6)
    assert text_nats / np.log(2) / size == pytest.approx(record["val_bpb"], rel=1e-6)
    assert by_place[1].tolist() == [record["rows"]] * 64 and targets == 64 * record["rows"]
    for name, sums in zip(CLASSES, by_class):
        (line,) = [line for line in out.splitlines() if line.startswith(name)]
        told = [float(cell.rstrip("%")) for cell in line.removeprefix(name).split()]
        shares = [100 * sums[1] / targets, 100 * sums[2] / text_nats]
        assert told[::3] == pytest.approx(shares, abs=0.06)
        each = [sums[0] / sums[1], sums[2] / np.log(2) / sums[3]]
        assert told[1:3] == pytest.approx(each, abs=1e-4)


@pytest.mark.parametrize("parts, line", [(16, "60 to 63: 61.5203"), (99, "63 to 63: 63.0000")])
def test_the_loss_of_a_part_of_a_row_weighs_targets(parts, line, own_run, monkeypatch, capsys):
    """Not positions: in conversations, each has another number of targets. A row may be shorter
    than the parts are many."""
    score = loss.score
    n = torch.arange(64.0)
    told = torch.stack([n**2, n])  # n targets of n nats each at the n-th position
    monkeypatch.setattr(loss, "score", lambda *given: (score(*given)[0], told))
    monkeypatch.setattr(loss, "PARTS", parts)
    out = look(capsys, "loss", own_run, *CPU, "--by", "position")
    assert f"\n{line} nats per token\n" in out and out.count(" to ") == min(parts, 64)


class Told(torch.nn.Module):
    """The nats of a target are told by its id, its input and its place in the row."""

    def forward(self, inputs, targets, reduction):
        return targets.clamp(min=0) + 0.01 * inputs + torch.arange(inputs.size(1)) / 7  # (B, T)


def test_only_targets_that_count_are_scored():
    """By a loop over single targets, of rows where some, or all, or none count; whatever the
    batches are, to the last bit."""
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (11, 22))
    inputs = ids[:, :-1]
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape) < 0.6] = data.IGNORED
    targets[3] = targets[:, 2] = data.IGNORED  # a row, and a position
    targets[5] = ids[5, 1:]
    sources = torch.arange(11) % 4  # of five: one has no row
    by_source = np.zeros((5, len(CLASSES), 4))
    by_place = np.zeros((2, 21))
    classes = loss.copy_classes(ids)
    for r, t in np.ndindex(11, 21):
        target = targets[r, t].item()
        if target != data.IGNORED:
            one = target + 0.01 * inputs[r, t].item() + t / 7
            by_source[sources[r], classes[r, t]] += one, 1, one if target else 0, target
            by_place[:, t] += one, 1
    token_bytes = torch.arange(9)
    found = []
    for n in (11, 4, 1):
        batches = zip(inputs.split(n), targets.split(n), map(torch.Tensor.tolist, sources.split(n)))
        sums, places = loss.score(Told(), batches, token_bytes, 5)
        assert sums.numpy() == pytest.approx(by_source, rel=1e-6) and sums.dtype == torch.double
        assert places.numpy() == pytest.approx(by_place, rel=1e-6) and places.dtype == torch.double
        found.append(sums)
    assert all(sums.equal(found[0]) for sums in found)


def held() -> tuple[int, int]:
    """How many tensors are alive; bytes of these, and of what Python has taken."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return len(tensors), sum(x.nbytes for x in tensors) + tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_model_that_says_nothing_is_an_error(wrong):
    """But not where no target counts."""
    rows = torch.zeros(2, 3, dtype=torch.long)
    model = lambda inputs, targets, reduction: torch.full(inputs.shape, wrong)
    with pytest.raises(NonFiniteError):
        loss.score(model, [(rows, rows, [0, 0])], torch.ones(1), 1)
    for sums in loss.score(model, [(rows, rows + data.IGNORED, [0, 0])], torch.ones(1), 1):
        assert not sums.any()


def test_a_factor_in_the_tokens_is_found_at_every_horizon():
    """Whichever of the two runs is the better one."""
    at = [2.0**k for k in range(10, 20)]
    ours = [(tokens, 8 - 0.3 * np.log2(tokens)) for tokens in at]
    theirs = [(tokens, 8 - 0.3 * np.log2(1.5 * tokens)) for tokens in at]
    for tokens in at[1:]:
        assert multiplier.meet(ours, theirs, tokens) == pytest.approx((tokens, tokens / 1.5))
        assert multiplier.meet(theirs, ours, tokens) == pytest.approx((tokens / 1.5, tokens))
    assert multiplier.meet(ours, theirs, at[0]) == (at[0], 0)  # it had that before its first
    ours[4] = (ours[4][0], 99.0)  # a validation that went wrong is no loss that it ever needs
    assert multiplier.meet(ours, ours, at[5]) == pytest.approx((at[5], at[5]))
    assert multiplier.reached(ours[3][1], ours) == pytest.approx(ours[3][0])


def make_run(folder, ahead: float, **config):
    """A run whose loss is that of a run after `ahead` times as many tokens."""
    folder.mkdir()
    points = [(step, 1000 * step) for step in (1, 2, 4, 8, 16, 32, 64)]
    lines = [
        dict(step=step, tokens=n, val_rows=9, val_loss=1.0, val_bpb=3 - 0.1 * np.log2(ahead * n))
        for step, n in points
    ]
    code = dict(files={"model.py": "0" * 64})
    begun = dict(time=1.0, command="train.py", device="cpu", world_size=1, data_dir="", code=code)
    lines.append({"start": begun | dict(flops_per_token=10)})
    for step in range(1, 65):
        line = dict(step=step, tokens=1000 * step, loss=1.0, bpb=1.0, lr=1.0, norm=1.0, time=2.0)
        line |= dict(step_s=1 / ahead, tokens_per_s=1.0, data_wait_ms=0.0)
        lines.append(line | dict(tflops_full=1.0, tflops_causal=1.0))
    write_lines(folder / "metrics.jsonl", lines)
    write_json(folder / "config.json", config | dict(tokens_per_step=1000))
    write_json(folder / "status.json", dict(state="done"))
    return folder


def compared(*folders):
    runs = [*map(RunFolder, folders)]
    return report.compared(runs, report.common_point(runs)[0])


def cells_of(said: str) -> list[list[str]]:
    """The rows of the table of factors: tokens, FLOPs, time."""
    return [re.split("  +", row) for row in re.findall(r"^\S+ tokens +(.*)", said, re.MULTILINE)]


def test_runs_are_compared_by_the_tokens_they_need(tmp_path):
    a = make_run(tmp_path / "a", 1.0, n_layer=4)
    b = make_run(tmp_path / "b", 1.5, n_layer=4, extras=["x"])
    assert cells_of(compared(a, b)) == [["1.50", "1.50", "2.25"]] * 3
    out = compared(b, a)
    assert cells_of(out) == [["0.67", "0.67", "0.44"]] * 3
    assert f"\nhow many times less {a} needs than {b}:\nloss of both after " in out
    assert "larger than that between two seeds: python benchmarks/referee.py " in out


def test_two_seeds_are_noise(tmp_path):
    """However far apart they are."""
    runs = [make_run(tmp_path / str(s), 1 + s / 4, seed=s) for s in range(2)]
    wide = make_run(tmp_path / "wide", 1.0, mlp_hidden=9, seed=0)
    out = compared(runs[0], wide, runs[1])  # one of three differs in more
    less = ["1.25", "1.25", "1.56"]
    assert cells_of(out) == [["1.00"] * 3] * 3 + [less] * 3
    assert out.endswith("\nno difference: only the seed differs, so all of it is noise")
