"""Bits per byte by source: flops.py, train.py, eval.py, the report."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, metrics, run

import data
import eval as evaluate
import flops
import train
from machinery.log import sources_line
from machinery.shards import Manifest


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory) -> Path:
    """Rows of 65 tokens of Python ("code") and of invented prose ("prose"), twice as much code."""
    folder = tmp_path_factory.mktemp("two")
    for name in ("code", "prose"):
        (folder / name).mkdir()
    for path in sorted(ROOT.glob("*.py")):
        (folder / "code" / f"{path.stem}.txt").write_text(path.read_text())
    for i in range(60):
        text = f"The {i}th fox saw {i + 2} hens, and none of them was glad of it.\n" * (i + 3)
        (folder / "prose" / f"{i}.txt").write_text(text)
    options = "--vocab_size 512 --row_len 65 --val_fraction 0.2 --workers 1".split()
    options += ["--source", *(f"files:{folder / name}" for name in ("code", "prose"))]
    done = run("prepare_data.py", "tiny", *options, "--data_dir", folder / "data")
    assert done.returncode == 0, done.stderr
    return folder / "data"


class Table(torch.nn.Module):
    """Its loss at each place depends on the input and the target there."""

    def forward(self, inputs, targets, reduction):
        return 0.1 * inputs + 0.37 * targets  # (B, T)


def as_before(model, batches, token_bytes) -> tuple[float, float]:
    """The two figures as they were computed before there were sources: the same sums, in the same
    order."""
    parts = []
    for inputs, targets in batches:
        nats, size = model(inputs, targets, reduction="none"), token_bytes[targets]
        sums = (nats, torch.ones_like(nats), nats * (size > 0), size)
        parts.append(torch.stack([x.sum(dtype=torch.float32) for x in sums]))
    total = torch.stack(parts).double().sum(0)
    return float(total[0] / total[1]), float(total[2]) / math.log(2) / float(total[3])


def test_each_source_has_the_bits_of_its_own_text_and_the_total_is_as_before():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 5, (7, 9), generator=generator)
    size, own = torch.tensor([0, 1, 1, 2, 3]), [0, 2, 0, 2, 2, 0, 2]  # none is of source 1
    batches = [(part[:, :-1], part[:, 1:]) for part in rows.split(4)]
    names, bits, n_bytes = ("web", "empty", "code"), Counter(), Counter()
    for row, source in zip(rows.tolist(), own):
        for before, target in zip(row, row[1:]):
            if size[target]:
                bits[names[source]] += (0.1 * before + 0.37 * target) / math.log(2)
                n_bytes[names[source]] += int(size[target])
    for padded in (0, 4):
        *total, found = flops.score_text(Table(), batches, size, padded, own, names)
        assert found == pytest.approx({k: bits[k] / n_bytes[k] for k in ("web", "code")}, rel=1e-6)
        assert tuple(total) == as_before(Table(), batches, size)
        mean = sum(found[k] * n_bytes[k] for k in found) / n_bytes.total()
        assert mean == pytest.approx(total[1], rel=1e-6)
        assert tuple(total) == flops.score_text(Table(), batches, size, padded)[:2]
        *_, single = flops.score_text(Table(), batches, size, padded, [0] * 7, ["all"])
        assert single == {"all": total[1]}  # to the bit


def test_the_line_names_sources_only_if_there_are_two():
    assert sources_line({"web": 1.0}) == sources_line({}) == ""
    assert sources_line({"web": 1.0, "code": 0.5}) == " (web 1.0000, code 0.5000)"


def sizes(manifest: Manifest, places) -> Counter:
    """Bytes of the targets of these validation rows, by source."""
    size, found = manifest.token_bytes(), Counter()
    for source, row in places:
        found[manifest.sources[source]] += int(size[manifest.row("val", source, row)[1:]].sum())
    return found


@pytest.mark.slow
def test_one_rank_and_two_have_the_same_bits_by_source(two_sources, tmp_path):
    """23 rows: the ranks' batches differ in size."""
    options = ["tiny", *SMALL, "--steps", 2, "--eval_tokens", 23 * 64, "--data_dir", two_sources]
    options += ["--micro_batch", 4]
    manifest, found = Manifest.load(two_sources), []
    for nproc in (0, 2):
        where = ["--run_dir", tmp_path / f"{nproc}"]
        done = run("train.py", *options, *where, nproc=nproc, timeout=400)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if "validation on 23 of" in line]
        records = [r for r in metrics(tmp_path / f"{nproc}") if "val_bpb" in r]
        assert len(records) == len(lines) == 2
        for line, r in zip(lines, records):
            own = r["val_bpb_by_source"]
            assert f"({', '.join(f'{k} {v:.4f}' for k, v in own.items())})" in line
            assert list(own) == ["code", "prose"] and abs(own["code"] - own["prose"]) > 0.01
            weights = sizes(manifest, data.val_places(manifest, 23))
            mean = sum(own[k] * weights[k] for k in own) / weights.total()
            assert mean == pytest.approx(r["val_bpb"], rel=1e-6)
            found.append(own)
        whole = next(r for r in metrics(tmp_path / f"{nproc}") if "full_val_bpb" in r)
        weights = sizes(manifest, data.val_places(manifest))
        own = whole["full_val_bpb_by_source"]
        mean = sum(own[k] * weights[k] for k in own) / weights.total()
        assert mean == pytest.approx(whole["full_val_bpb"], rel=1e-6)
    assert found[0] == pytest.approx(found[2], rel=1e-6)
    assert found[1] == pytest.approx(found[3], rel=1e-4)


@pytest.fixture(scope="module")
def trained(two_sources, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    folders = ["--data_dir", str(two_sources), "--run_dir", str(run_dir)]
    assert train.main(["tiny", *SMALL, *folders, "--eval_every", "4"]) == 0
    return run_dir


def test_eval_tells_the_sources(trained, capsys):
    evaluate.main(["loss", str(trained), "--device", "cpu", "--dtype", "fp32"])
    said = capsys.readouterr().out
    record = json.loads((trained / "eval.jsonl").read_text().splitlines()[-1])
    whole = next(r for r in metrics(trained) if "full_val_bpb" in r)
    own = record["val_bpb_by_source"]
    assert own == pytest.approx(whole["full_val_bpb_by_source"], rel=1e-5)
    words = f"bits per byte (code {own['code']:.4f}, prose {own['prose']:.4f}), on all"
    assert words in said


def test_a_single_source_is_told_once(small_data, tmp_path):
    folders = ["--data_dir", str(small_data), "--run_dir", str(tmp_path / "run")]
    assert train.main(["tiny", *SMALL, *folders, "--steps", "2"]) == 0
    for r in metrics(tmp_path / "run"):
        if "val_bpb" in r:
            assert r["val_bpb_by_source"] == {"texts": r["val_bpb"]}  # to the bit
    text = (tmp_path / "run" / "report.html").read_text()
    assert "source texts" not in text.partition("<h2>Data")[0]
