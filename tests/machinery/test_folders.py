"""machinery/folders.py: a run reads the data it was begun with, and no other writes its folder."""

import hashlib
import shutil
from pathlib import Path

import pytest
from conftest import losses, metrics, train_here
from faults import start
from test_checkpoint import at
from test_shards import edit

from config import PRESETS, UsageError
from machinery import checkpoint, folders, shards
from machinery.errors import StorageError


def test_a_run_does_not_go_on_with_other_data_or_another_tokenizer(own_data, run_dir):
    start(own_data, run_dir, spoil=[("signal_at", 5, 15)]).end(143)
    seen = losses(run_dir)

    edit(own_data, ("sources", 0, "note"), "prepared otherwise")
    assert "data_fingerprint" in start(own_data, run_dir).end(2)
    tokenizer = own_data / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert "tokenizer.json" in start(own_data, run_dir).end(3)  # not the data's
    edit(own_data, ("tokenizer", "sha256"), hashlib.sha256(tokenizer.read_bytes()).hexdigest())
    assert "tokenizer_sha256" in start(own_data, run_dir).end(2)
    assert losses(run_dir) == seen


def test_epochs_are_the_run_of_as_many_steps(trained_run, small_data, run_dir):
    rows = shards.Manifest.load(small_data).rows("train")
    words = ("--steps", 0, "--epochs", 12 * 8 / rows)  # 8 rows x 64 = 512 tokens a step
    assert "\nrun       12 steps x 512 tokens" in start(small_data, run_dir, *words).end(0)
    assert losses(run_dir) == losses(trained_run)
    assert "is finished (12 steps)" in start(small_data, run_dir).end(0)  # of --steps 12
    assert "12 there and 1 here" in start(small_data, run_dir, *words[:3], 1e-9).end(2)


def test_a_second_trainer_is_sent_away_and_the_first_does_not_notice(small_data, run_dir, tmp_path):
    go = tmp_path / "go"
    first = start(small_data, run_dir, spoil=[("hold", 2, str(go))]).until_step(2)
    who = f"process {first.processes[0].pid} on"
    for world in (1, 2):
        assert who in start(small_data, run_dir, world=world).end()
    assert first.alive()
    go.touch()
    first.end(0)
    assert [r["step"] for r in metrics(run_dir, "loss")] == list(range(1, 13))


def test_a_run_whose_folder_is_moved_stops(small_data, run_dir, tmp_path):
    """At its next save, which does not begin a folder of the old name."""
    go = tmp_path / "go"
    spoil = [("hold", 5, str(go))]
    run = start(small_data, run_dir, "--save_every", 3, spoil=spoil).until_step(5)
    checkpoints = run_dir / "checkpoints"
    run.until(lambda: len(checkpoint.checkpoints(checkpoints)) == 2)  # 3, and 4 before the decay
    run_dir.rename(tmp_path / "renamed")
    go.touch()
    assert str(run_dir) in run.end(6)
    assert not checkpoint.checkpoints(checkpoints)


def test_no_room_for_the_first_checkpoint(small_data, run_dir, trained_run, full_disk):
    """What is needed and what is free are said; a run that has checkpoints needs no room to end."""
    full_disk(100_000)
    with pytest.raises(StorageError, match=f"0.100 MB are free in {run_dir}"):
        train_here(small_data, run_dir)
    assert not run_dir.exists()
    shutil.copytree(trained_run, run_dir)
    assert train_here(small_data, run_dir) == 0


def test_a_strangers_configuration_is_another_run(own_data):
    now = folders.identity(PRESETS["tiny"], shards.Manifest.load(own_data)) | dict(schedule="wsd")
    with pytest.raises(UsageError):
        folders.check_same_run(now, Path("theirs"), at(3, now | dict(steps="12")))
    with pytest.raises(UsageError):
        folders.check_same_run(now, Path("theirs"), at(3))
