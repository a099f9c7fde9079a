"""--keep_every: checkpoints of weights alone, which nothing deletes, written like all others."""

import json
from pathlib import Path

import pytest
import torch
from conftest import losses, parameters
from faults import start

import eval as evaluate
from instruments import positions
from instruments.exams import tournament
from machinery import checkpoint, cli, folders, plan, ranks
from machinery.checkpoint import MILESTONES
from machinery.trained import EvalConfig, run_of

EVERY_4 = ("--keep_every", 4, "--keep", 1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """name -> tensor of the milestone of a step."""
    run_dir = folder / "as_a_run"  # parameters() looks in RUN_DIR/checkpoints
    run_dir.mkdir(exist_ok=True)
    if not (run_dir / "checkpoints").exists():
        (run_dir / "checkpoints").symlink_to(folder / "checkpoints" / MILESTONES)
    return parameters(run_dir, step)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def kept(small_data, tmp_path_factory) -> Path:
    """A run with milestones at 4, 8 and 12, and a mirror beside it."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    start(small_data, run_dir, *EVERY_4, "--mirror", run_dir.parent / "mirror").end(0)
    return run_dir


def test_they_stay_and_hold_the_weights_alone(kept):
    root = kept / "checkpoints"
    steps = [f"step_{step:08d}" for step in (4, 8, 12)]
    assert names(root / MILESTONES) == steps
    assert all(checkpoint.why_invalid(root / MILESTONES / name) is None for name in steps)
    full, weights = parameters(kept, 12), tensors(kept, 12)
    assert weights.keys() == {name for name in full if name.startswith("model.")}
    assert weights.keys() < full.keys()
    assert all(torch.equal(weights[name], full[name]) for name in weights)
    different = [n for n in weights if not torch.equal(weights[n], tensors(kept, 4)[n])]
    assert len(different) > 5
    sizes = [size_of(folder / steps[-1] / "dcp") for folder in (root / MILESTONES, root)]
    assert sizes[0] < 0.6 * sizes[1]
    assert len(checkpoint.checkpoints(root)) <= 3  # --keep 1: the newest, the best, the decay's


def test_the_mirror_has_them_too_also_those_whose_copy_failed(kept, small_data, tmp_path):
    mirror = kept.parent / "mirror" / "run"
    assert names(mirror / MILESTONES) == names(kept / "checkpoints" / MILESTONES)
    for name in names(mirror / MILESTONES):
        files = [
            (folder / name / "MANIFEST.json").read_text()
            for folder in (mirror / MILESTONES, kept / "checkpoints" / MILESTONES)
        ]
        assert files[0] == files[1] and not checkpoint.why_invalid(mirror / MILESTONES / name)
    run_dir, mirror = tmp_path / "run", tmp_path / "mirror"
    options = (*EVERY_4, "--mirror", mirror)
    start(small_data, run_dir, *options, spoil=[("signal_at", 5, 15)]).end(143)
    (copy,) = (mirror / "run" / MILESTONES).iterdir()
    (copy / "MANIFEST.json").unlink()  # as a copy that was killed leaves it
    start(small_data, run_dir, *options).end(0)
    found = checkpoint.checkpoints(mirror / "run" / MILESTONES)
    assert [checkpoint.step_of(path) for path in found] == [12, 8, 4]
    assert not [path for path in found if checkpoint.why_invalid(path)]


@pytest.mark.parametrize("stage", ["write", "manifest", "rename"])
def test_killed_in_the_middle_none_is_half_written(stage, kept, small_data, tmp_path):
    """At each stage of the milestone of step 8; the same command then writes what the run that was
    not killed has. `rename`: it is there, but the checkpoint after it is not."""
    run_dir = tmp_path / "run"
    start(small_data, run_dir, *EVERY_4, spoil=[("kill_at_stage", stage, 8)]).end(-9)
    folder = run_dir / "checkpoints" / MILESTONES
    whole = [path for path in checkpoint.checkpoints(folder) if not checkpoint.why_invalid(path)]
    assert checkpoint.checkpoints(folder) == whole
    assert len(whole) == (2 if stage == "rename" else 1)
    assert not checkpoint.checkpoints(run_dir / "checkpoints")[0].name.endswith("8")
    text = start(small_data, run_dir, *EVERY_4).end(0)
    assert "resumed at step" in text
    assert names(folder) == names(kept / "checkpoints" / MILESTONES)  # nothing begins with .tmp-
    for step in (4, 8, 12):
        ours, theirs = tensors(run_dir, step), tensors(kept, step)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert losses(run_dir) == losses(kept)


def test_sharded_over_two_ranks(small_data, tmp_path):
    """Each writes its part, and one process reads them."""
    run_dir = tmp_path / "run"
    options = ("--parallel", "fsdp", "--keep_every", 6, "--eval_every", 0)
    start(small_data, run_dir, *options, world=2).end(0)
    full, weights = parameters(run_dir, 12), tensors(run_dir, 12)
    assert weights and all(torch.equal(weights[name], full[name]) for name in weights)
    path = run_dir / "checkpoints" / MILESTONES / "step_00000006"
    assert len(list((path / "dcp").glob("__*"))) == 2
    model, trainer = evaluate.load_model(EvalConfig(checkpoint=str(path), device="cpu"))
    assert trainer["step"] == 6
    assert torch.equal(model.embed.weight, tensors(run_dir, 6)["model.embed.weight"])


def test_what_opens_them(kept, small_data, tmp_path, capsys):
    """eval.py, the report, a new run; and the record goes to the run that they are of."""
    path = kept / "checkpoints" / MILESTONES / "step_00000008"
    assert run_of(path) == kept
    assert run_of(kept.parent / "mirror" / "run" / MILESTONES / path.name).name == "run"
    assert evaluate.main(["loss", str(path), "--device", "cpu", "--dtype", "fp32"]) == 0
    capsys.readouterr()
    (record,) = [json.loads(r) for r in (kept / "eval.jsonl").read_text().splitlines()]
    assert record["step"] == 8 and record["run_dir"] == str(kept)
    text = start(small_data, tmp_path / "new", "--steps", 2, "--init_from", path).end(0)
    assert f"weights from {path}" in text
    assert evaluate.main(["report", str(kept), "--device", "cpu", "--max_new_tokens", "4"]) == 0
    sampled = [json.loads(line) for line in (kept / "samples.jsonl").read_text().splitlines()]
    assert {r["step"] for r in sampled} >= {4, 8, 12}
    assert len({(r["step"], r["prompt"]) for r in sampled}) == len(sampled)
    assert positions.read(kept)["step"] == 12


@pytest.mark.parametrize("own", [True, False])
def test_only_resume_needs_the_optimizer(own, kept, small_data, tmp_path):
    """In the milestone's own run, too, which has a checkpoint to go on from."""
    path = kept / "checkpoints" / MILESTONES / "step_00000008"
    run_dir = kept if own else tmp_path / "other"
    text = start(small_data, run_dir, *EVERY_4, "--resume", path).end(2)
    assert f"error: {path} has no optimizer to resume; give it to --init_from" in text


def test_a_tournament_lets_them_play(kept, capsys):
    """Once per step; and the judge's own milestone is the judge."""
    paths, judge = tournament.entrants(tournament.TournamentConfig(run_dir=str(kept)))
    assert judge.name == "step_00000012" and judge.parent.name == "checkpoints"
    steps = [checkpoint.step_of(path) for path in paths]
    assert steps == sorted(set(steps)) and {4, 8} <= set(steps) and 12 not in steps
    milestones = kept / "checkpoints" / MILESTONES
    config = tournament.TournamentConfig(
        run_dir=str(kept), players=tuple(map(str, sorted(milestones.iterdir())))
    )
    paths, _ = tournament.entrants(config)
    assert paths == [milestones / "step_00000004", milestones / "step_00000008"]
    assert tournament.names(paths) == ["step 4", "step 8"]
    assert "is the judge, so it does not play" in capsys.readouterr().out


def test_the_plan_counts_them(tmp_path, monkeypatch):
    """In the table, and in the warning of a disk that is too small."""
    options = ["tiny", "--keep_every", "250", "--run_dir", str(tmp_path)]
    world = ranks.World(0, 1, 0, 1, torch.device("cpu"), torch.float32, 8 * 10**9)
    decided = plan.make_plan(cli.parse("train.py", "train", options), world)
    without = plan.make_plan(cli.parse("train.py", "train", options[:1]), world)
    assert decided.milestones == 4 and without.milestones == 0
    assert ", 4 milestones of 0.03 GB" in decided.text and "milestones" not in without.text
    assert 2 < decided.save_bytes / decided.milestone_bytes < 3
    needed = 5 * decided.save_bytes + 4 * decided.milestone_bytes
    for free, warns in ((needed + 1, False), (needed - 1, True)):
        monkeypatch.setattr(folders.disk, "free_bytes", lambda folder, free=free: free)
        said = folders.warn_of_disk(decided, tmp_path)
        assert ("warning: 5 checkpoints and 4 milestones more take" in said) == warns
