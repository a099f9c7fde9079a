"""instruments/pages/positions.py: the loss by position; and longer rows as a last stage
(docs/context.md), which it shows: what stays the same, what gets better."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import losses, metrics, run
from faults import start

import data
import eval as evaluate
from config import GPTConfig
from flops import score_text
from instruments.pages import positions, report
from machinery import checkpoint
from machinery.errors import NonFiniteError
from machinery.shards import Manifest
from model import GPT

SHAPE = ("--n_embd", 64, "--mlp_hidden", 256, "--eval_every", 0, "--rope_theta", 1000)
STEPS = 60


@pytest.fixture(scope="module")
def stages(small_data, tmp_path_factory) -> dict[str, Path]:
    """Rows of 129 tokens with the tokenizer of those of 65; a model of the short rows, and what
    becomes of it on the long ones."""
    folder = tmp_path_factory.mktemp("stages")
    texts = small_data.parent / "texts"
    options = f"--row_len 129 --tokenizer {small_data}/tokenizer.json --val_fraction 0.2".split()
    options += ["--workers", "1", "--source", f"files:{texts}", "--data_dir", folder / "long_data"]
    done = run("prepare_data.py", "tiny", *options)
    assert done.returncode == 0, done.stderr
    start(small_data, folder / "short", *SHAPE, "--steps", STEPS).end(0, timeout_s=400)
    path = folder / "short" / "checkpoints" / f"step_{STEPS:08d}"
    stage = ("--init_from", path, "--data_dir", folder / "long_data", "--steps", STEPS // 2)
    said = start(small_data, folder / "long", *SHAPE, *stage).end(0, timeout_s=400)
    (folder / "said").write_text(said)
    return dict(folder=folder, short_data=small_data, long_data=folder / "long_data", start=path)


def model_at(path: Path, seq_len: int = 0, **how) -> GPT:
    config = GPTConfig(**checkpoint.read_trainer(path)["model"])
    model = GPT(replace(config, seq_len=seq_len or config.seq_len, **how))
    model.init_weights()
    checkpoint.load_model(path, model)
    return model.eval()


def test_short_rows_are_read_as_before(stages):
    """Weights do not depend on the length: with the same theta the loss is the same, to the bit;
    with another it is not."""
    manifest = Manifest.load(stages["short_data"])
    token_bytes = torch.from_numpy(manifest.token_bytes())
    found = [
        score_text(model_at(stages["start"], *how), data.val_batches(manifest, 8), token_bytes)[:2]
        for how in ((), (128,))
    ]
    assert found[0] == found[1]
    said = [r for r in metrics(stages["folder"] / "short") if "full_val_loss" in r][-1]
    assert said["full_val_loss"] == pytest.approx(found[1][0], rel=1e-5)
    other = model_at(stages["start"], 128, rope_theta=10.0)
    assert score_text(other, data.val_batches(manifest, 8), token_bytes)[0] != found[0][0]


def test_long_rows_are_read_better_after_the_stage(stages):
    """Also where no position was trained before. The first validation is the model's own, before
    a step: nothing is lost on the way."""
    manifest, run_dir = Manifest.load(stages["long_data"]), stages["folder"] / "long"
    before = positions.by_position(model_at(stages["start"], 128), data.val_batches(manifest, 8))
    path = checkpoint.checkpoints(run_dir / "checkpoints")[0]
    after = positions.by_position(model_at(path), data.val_batches(manifest, 8))
    gains = before - after  # about 0.07 nats
    assert gains[:64].mean() > 0.02 and gains[64:].mean() > 0.02
    first = next(r for r in metrics(run_dir) if "val_loss" in r)
    rows = next(data.val_batches(manifest, first["val_rows"], first["val_rows"]))
    with torch.no_grad():
        untouched = model_at(stages["start"], 128)(*rows)
    assert first["step"] == 0 and first["val_loss"] == pytest.approx(float(untouched), rel=1e-4)
    said = (stages["folder"] / "said").read_text()
    assert "seq_len is 64 there and 128 here" in said
    assert len(losses(run_dir)) == STEPS // 2


def test_another_theta_is_named_and_another_tokenizer_refused(stages, small_data, tmp_path):
    stage = ("--init_from", stages["start"], "--data_dir", stages["long_data"], "--steps", 2)
    other = start(small_data, tmp_path / "a", *SHAPE, *stage, "--rope_theta", 4000)
    text = other.end(0, timeout_s=400)
    assert "rope_theta is 1000.0 there and 4000.0 here" in text
    texts = small_data.parent / "texts"
    options = "--row_len 129 --vocab_size 512 --val_fraction 0.2 --workers 1 --nfc".split()
    options += ["--source", f"files:{texts}", "--data_dir", tmp_path / "own"]
    assert run("prepare_data.py", "tiny", *options).returncode == 0
    stage = ("--init_from", stages["start"], "--data_dir", tmp_path / "own", "--steps", 2)
    text = start(small_data, tmp_path / "b", *SHAPE, *stage).end(2, timeout_s=400)
    assert "tokenizer_sha256 is" in text and "(--tokenizer)" in text


# ------------------------------------------------------------------------ the loss by position


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
        config = evaluate.EvalConfig(str(own_run), newest, asked, device="cpu", dtype="fp32")
        positions.measure(config, evaluate.load_model)
        assert positions.read(own_run)["data"] == data_dir
    assert json.loads(path.read_text()) == written
