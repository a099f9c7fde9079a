"""instruments/exams/loss.py and pages/multiplier.py: the loss by class of targets, and how many
tokens a run needs for what another has."""

import re

import numpy as np
import pytest
import torch
from conftest import CPU, logged, look, read_lines
from test_report import make_run, start, step, validation

import data
from instruments.exams import loss
from instruments.exams.loss import CLASSES
from instruments.pages import multiplier
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


def test_the_classes_make_up_the_loss_of_the_run(own_run, capsys):
    """By the table that is printed, of which the loss is a mean, and by what the trainer found."""
    lines = look(capsys, "loss", own_run, *CPU, "--by", "copy").splitlines()
    record = read_lines(own_run / "eval.jsonl")[-1]
    assert [record["val_loss"]] == pytest.approx(logged(own_run, "full_val_loss"), rel=1e-5)
    rows = []
    for name in CLASSES:
        (line,) = [line for line in lines if line.startswith(name)]
        rows.append([float(cell.rstrip("%")) for cell in line.removeprefix(name).split()])
    share, nats, bpb, bits = np.array(rows).T
    assert [share.sum(), bits.sum()] == pytest.approx([100, 100], abs=0.3)
    assert (share * nats).sum() / 100 == pytest.approx(record["val_loss"], rel=3e-3)
    assert 100 / (bits / bpb).sum() == pytest.approx(record["val_bpb"], rel=3e-3)


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


def test_only_targets_that_count_are_scored():
    """By a loop over single targets, whose nats are told by id, input and place, of rows where
    some, or all, or none count; whatever the batches are, to the last bit."""
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (11, 22))
    inputs = ids[:, :-1]
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape) < 0.6] = data.IGNORED
    targets[3] = targets[:, 2] = data.IGNORED  # a row, and a position
    targets[5] = ids[5, 1:]
    sources = torch.arange(11) % 4  # of five: one has no row
    told = lambda inputs, targets, reduction: (
        targets.clamp(min=0) + 0.01 * inputs + torch.arange(21) / 7
    )
    nats = told(inputs, targets, "none")
    by_source = np.zeros((5, len(CLASSES), 4))
    by_place = np.zeros((2, 21))
    classes = loss.copy_classes(ids)
    for r, t in np.ndindex(11, 21):
        target = targets[r, t].item()
        if target != data.IGNORED:
            one = nats[r, t].item()
            by_source[sources[r], classes[r, t]] += one, 1, one if target else 0, target
            by_place[:, t] += one, 1
    found = []
    for n in (11, 4, 1):
        batches = zip(inputs.split(n), targets.split(n), map(torch.Tensor.tolist, sources.split(n)))
        sums, places = loss.score(told, batches, torch.arange(9), 5)
        assert sums.numpy() == pytest.approx(by_source, rel=1e-6) and sums.dtype == torch.double
        assert places.numpy() == pytest.approx(by_place, rel=1e-6) and places.dtype == torch.double
        found.append(sums)
    assert all(sums.equal(found[0]) for sums in found)


def test_a_model_that_says_nothing_is_an_error():
    """But not where no target counts."""
    rows = torch.zeros(2, 3, dtype=torch.long)
    model = lambda inputs, targets, reduction: torch.full(inputs.shape, torch.nan)
    with pytest.raises(NonFiniteError):
        loss.score(model, [(rows, rows, [0, 0])], torch.ones(1), 1)
    for sums in loss.score(model, [(rows, rows + data.IGNORED, [0, 0])], torch.ones(1), 1):
        assert not sums.any()


def test_a_factor_in_the_tokens_is_found_at_every_horizon():
    """Whichever of the two runs is the better one."""
    curve = lambda ahead: [(2.0**k, 8 - 0.3 * np.log2(ahead * 2.0**k)) for k in range(10, 20)]
    ours = curve(1)
    theirs = curve(1.5)
    for tokens, _ in ours[1:]:
        assert multiplier.meet(ours, theirs, tokens) == pytest.approx((tokens, tokens / 1.5))
        assert multiplier.meet(theirs, ours, tokens) == pytest.approx((tokens / 1.5, tokens))
    first, *_, later = (tokens for tokens, _ in ours)
    assert multiplier.meet(ours, theirs, first) == (first, 0)  # it had that before its first
    ours[4] = (ours[4][0], 99.0)  # a validation that went wrong is no loss that it ever needs
    assert multiplier.meet(ours, ours, later) == pytest.approx((later, later))


def run_ahead(folder, ahead: float, **config):
    """A run that is as good, and as fast, as one after `ahead` times as many tokens."""
    records = [start(flops_per_token=10, code=dict(files={"model.py": "0" * 64}))]
    records += [step(n, step_s=1 / ahead) for n in range(1, 65)]
    for n in (1, 2, 4, 8, 16, 32, 64):
        records.append(validation(n, 3 - 0.1 * np.log2(1000 * n * ahead)))
    return make_run(folder, records, **config)


def cells_of(said: str) -> list[list[str]]:
    """The rows of the table of factors: tokens, FLOPs, time."""
    return [re.split("  +", row) for row in re.findall(r"^\S+ tokens +(.*)", said, re.MULTILINE)]


def test_runs_are_compared_by_the_tokens_they_need(tmp_path, capsys):
    """Each with the first; and two seeds are noise, however far apart they are."""
    a = run_ahead(tmp_path / "a", 1.0)
    b = run_ahead(tmp_path / "b", 1.5, extras=["x"])
    seed = run_ahead(tmp_path / "seed", 1.25, seed=1)
    out = look(capsys, "compare", a, b, seed)
    assert cells_of(out) == [["1.50", "1.50", "2.25"]] * 3 + [["1.25", "1.25", "1.56"]] * 3
    assert f"\nhow many times less {b} needs than {a}:\nloss of both after " in out
    assert "larger than that between two seeds: python benchmarks/referee.py " in out
    assert "\nno difference: only the seed differs, so all of it is noise\n" in out
    assert cells_of(look(capsys, "compare", b, a)) == [["0.67", "0.67", "0.44"]] * 3
