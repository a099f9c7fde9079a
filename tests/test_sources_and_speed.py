"""Bits per byte by source (flops.py, train.py, eval.py, the report), and the watch on speed: a slow
disk and a slow Hub are seen, and named."""

import json
import math
import re
import shutil
import threading
import time
from collections import Counter
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, metrics, run

import data
import eval as evaluate
import flops
import train
from instruments import curves, report, watch
from machinery.log import sources_line
from machinery.shards import Manifest
from preparation import sources


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
        assert tuple(total) == flops.bits_per_byte(Table(), batches, size, padded)
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


def test_eval_and_the_pages_tell_the_sources(trained, tmp_path, capsys):
    evaluate.main(["loss", str(trained), "--device", "cpu", "--dtype", "fp32"])
    said = capsys.readouterr().out
    record = json.loads((trained / "eval.jsonl").read_text().splitlines()[-1])
    whole = next(r for r in metrics(trained) if "full_val_bpb" in r)
    own = record["val_bpb_by_source"]
    assert own == pytest.approx(whole["full_val_bpb_by_source"], rel=1e-5)
    words = f"bits per byte (code {own['code']:.4f}, prose {own['prose']:.4f}), on all"
    assert words in said

    report.write(trained)
    text = (trained / "report.md").read_text()
    assert re.search(r"reading prose: [\d.]+ MB of text at", text)
    last = [r for r in metrics(trained) if "val_bpb" in r][-1]["val_bpb_by_source"]
    for name, bpb in last.items():
        assert f"source {name}: {bpb:.4f} bits per byte at step 12, {own[name]:.4f} on all" in text
    page = (trained / "report.html").read_text()
    assert page.count("<img") == 7, "six curves, and that of the sources"

    other = shutil.copytree(trained, tmp_path / "other")
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.get("val_bpb_by_source", {}).pop("prose", None)
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = report.compare([str(trained), str(other)])
    head, first, second = re.findall(r"^bpb by source.*\n.*\n.*$", table, re.M)[0].splitlines()
    assert head.split()[-2:] == ["code", "prose"]
    assert first.split()[-2:] == [f"{last[name]:.4f}" for name in ("code", "prose")]
    assert second.split()[-2:] == [f"{last['code']:.4f}", "n/a"]
    (trained.parent / "compare.png").unlink(missing_ok=True)


def test_a_single_source_is_told_once(small_data, tmp_path):
    folders = ["--data_dir", str(small_data), "--run_dir", str(tmp_path / "run")]
    assert train.main(["tiny", *SMALL, *folders, "--steps", "2"]) == 0
    for r in metrics(tmp_path / "run"):
        if "val_bpb" in r:
            assert r["val_bpb_by_source"] == {"texts": r["val_bpb"]}  # to the bit
    text = (tmp_path / "run" / "report.md").read_text()
    assert "source texts: " not in text.partition("## Data")[0]


# ---------------------------------------------------------------------------- the watch on speed


class Fake:
    """What watch.rows_of reads of a run."""

    def __init__(self, steps, starts=(0.0,)):
        self.steps, self.starts = steps, [dict(time=t) for t in starts]


def step(n: int, seconds: float = 1.0, tokens: int = 100, **seen) -> dict:
    found = dict(wait_s=0.0, longest_wait_s=0.0, rows=[], read_mb=0.1, read_s=0.01)
    seen = found | dict(saving=False) | seen
    return dict(step=n, tokens=n * tokens, time=float(n), step_s=seconds, watch=seen)


def test_a_slow_step_is_counted_with_its_cause():
    steps = [step(n) for n in range(1, 101)]
    steps[0]["step_s"] = 90.0  # compiles
    steps[9] |= step(10, 2.5, wait_s=1.4, longest_wait_s=1.4, rows=["train/a_00.npy row 3"])
    steps[19] |= step(20, 2.5, saving=True)
    steps[29] |= step(30, 9.0, wait_s=6.0, longest_wait_s=5.0, rows=["a row 1", "b row 2", "c"])
    steps[39] |= step(40, 3.0, wait_s=0.5)  # a wait that explains a quarter of it
    steps[49] |= step(50, 1.9, wait_s=0.9)  # not over twice the median
    found = dict(watch.rows_of(Fake(steps)))
    assert found["slow steps"] == (
        "4 of 99 steps took over twice the median, 2 of them waiting for data, 1 while saving; "
        "the 95th percentile is 1.90 x the median"
    )
    assert found["longest wait for data"] == "5.00 s, in step 30, for a row 1 to c (3 rows)"
    assert found["rows read"].startswith("10.0 MB at 10.0 MB/s")


def test_a_ramp_and_a_restart_are_no_slow_steps():
    """Half of the tokens in half of the time; and the first step of each process compiles."""
    steps = [step(n, 0.5, 50) for n in range(1, 41)]
    steps += [step(n, 1.0) | dict(tokens=2000 + (n - 40) * 100) for n in range(41, 101)]
    steps[70]["step_s"] = 60.0
    again = Fake(steps, [0.0, 70.5])
    assert dict(watch.rows_of(again))["slow steps"].startswith("0 of 98 steps")
    assert dict(watch.rows_of(Fake(steps)))["slow steps"].startswith("1 of 99 steps")
    without = [{k: v for k, v in r.items() if k != "watch"} for r in steps]
    assert watch.rows_of(Fake(without)) == watch.rows_of(Fake(steps[:1])) == []
    damaged = [r | dict(watch=bad) for r, bad in zip(steps, (5, [], None, {"wait_s": "x"}))]
    assert watch.rows_of(Fake(damaged)) == []


def test_a_slow_disk_is_seen_and_its_rows_are_named(small_data, tmp_path, monkeypatch):
    """From the 100th row on, four reads take 0.7 s each: a batch waits for them."""
    honest, reads, slow = Manifest.row, [], []

    def row(self, split, source, i):
        if split == "train":
            reads.append(i)
            if 100 < len(reads) <= 104:
                slow.append(f"{self.locate(split, source, i)[1]}")
                time.sleep(0.7)
        return honest(self, split, source, i)

    monkeypatch.setattr(Manifest, "row", row)
    folders = ["--data_dir", str(small_data), "--run_dir", str(tmp_path / "run")]
    more = ["--steps", "24", "--micro_batch", "2", "--eval_every", "0"]
    assert train.main(["tiny", *SMALL, *folders, *more]) == 0
    text = (tmp_path / "run" / "report.md").read_text()
    n, k = map(int, re.search(r"(\d+) of 23 steps took .*, (\d+) of them waiting", text).groups())
    assert n >= k >= 1
    waited = re.search(
        r"longest wait for data: ([\d.]+) s, in step \d+, for (.+) to (.+) \(2", text
    )
    assert float(waited[1]) > 0.5
    named = [name.split()[-1] for name in (waited[2], waited[3])]
    assert set(named) <= set(slow), "the rows that were slow"
    seen = [r["watch"] for r in metrics(tmp_path / "run") if "loss" in r]
    assert sum(w["read_mb"] for w in seen) >= 24 * 8 * 65 * 2 / 1e6
    assert sum(w["read_s"] for w in seen) > 2.8


def test_steps_taken_while_a_checkpoint_is_written_are_known(small_data, tmp_path, monkeypatch):
    from machinery import checkpoint

    honest = checkpoint._publish

    def slow(*args):
        time.sleep(0.5)
        return honest(*args)

    monkeypatch.setattr(checkpoint, "_publish", slow)
    folders = ["--data_dir", str(small_data), "--run_dir", str(tmp_path / "run")]
    more = "--steps 30 --save_every 10 --eval_every 0".split()
    assert train.main(["tiny", *SMALL, *folders, *more]) == 0
    steps = [r for r in metrics(tmp_path / "run") if "loss" in r]
    saving = [r["step"] for r in steps if r["watch"]["saving"]]
    assert saving and 11 in saving and not set(saving) & set(range(1, 11)), saving


class SlowHub(SimpleHTTPRequestHandler):
    """Serves byte ranges; each answer takes a moment, and every third breaks off in the middle."""

    protocol_version, requests = "HTTP/1.0", 0

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        raw = Path(self.directory, self.path.lstrip("/")).read_bytes()
        first, last = 0, len(raw) - 1
        if wanted := self.headers.get("Range"):
            a, _, b = wanted.removeprefix("bytes=").partition("-")
            first, last = (int(a), int(b or last)) if a else (len(raw) - int(b), last)
        part = raw[first : min(last, len(raw) - 1) + 1]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(raw)}")
        self.end_headers()
        if body:
            type(self).requests += 1
            time.sleep(0.2)
            broken = self.requests % 3 == 2 and len(part) > 2000
            self.wfile.write(part[: len(part) // 2] if broken else part)

    def log_message(self, *_):
        pass


def test_a_slow_hub_is_seen_and_named(tmp_path, monkeypatch):
    """Its speed, and how often it had to be asked again, as the manifest and the lines say it."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    for name in ("READ", "OPEN"):
        monkeypatch.setattr(datasets.config, f"STREAMING_{name}_RETRY_INTERVAL", 0.01)
    texts = [f"document {i}: " + "the fox and the hens, " * (i % 30 + 5) for i in range(400)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "web.parquet", row_group_size=40)

    class Handler(SlowHub):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = sources.parse(f"hf:http://127.0.0.1:{server.server_port}/web.parquet")
    seen, units = sources.Reading(), sources.list_units(source)[0]
    found = [t for u in units for t in seen.timed(sources.documents(source, u, Counter()))]
    server.shutdown()
    assert found == texts and seen.retries >= 1 and seen.seconds > 0.2
    size = sum(map(len, texts))
    unit = {"s": seen.seconds, "bytes": size, "retries": seen.retries}
    ((name, text),) = watch.reading({"made": {"reading": {"web": [unit]}}})
    assert name == "web" and f"the Hub had to be asked again {seen.retries} times" in text
    assert f"at {size / 1e6 / seen.seconds:.1f} MB/s" in text
    quick = {"s": 0.1, "bytes": 10**6, "retries": 0}
    stalled = {"s": 50.0, "bytes": 10**6, "retries": 0}
    both = watch.reading({"made": {"reading": {"web": [quick, stalled, quick]}}})
    assert both == [("web", "3.0 MB of text at 0.1 MB/s, unit 1 of 3 at 0.0 MB/s")]


def test_the_reading_is_no_part_of_the_fingerprint(two_sources):
    manifest = Manifest.load(two_sources)
    seen = manifest.tree["made"]["reading"]
    assert set(seen) == {"code", "prose"} and all(u["s"] > 0 for own in seen.values() for u in own)
    assert re.search(
        r"^[\d.]+ MB of text at [\d,.]+ MB/s", dict(watch.reading(manifest.tree))["code"]
    )
    manifest.tree["made"]["reading"] = {}
    from machinery.shards import fingerprint

    assert fingerprint(manifest.tree) == manifest.fingerprint


def test_scores_over_checkpoints_are_drawn_with_their_band(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    line = dict(task="oab", mode="letter", norm="sum", n=100, chance=0.25, stderr=0.04, z=0.1)
    records = [line | dict(step=s, tokens=s * 512, accuracy=0.2 + s / 100) for s in (4, 12)]
    records += [r | dict(norm="per byte", accuracy=0.3) for r in records]
    records += [dict(val_loss=1.0, step=4), line | dict(n=50, step=4, tokens=9, accuracy=0.3)]
    lines = [json.dumps(r) for r in records]
    (folder / "eval.jsonl").write_text("\n".join([*lines, '{"task": 5']) + "\n")
    drawn = curves.figures(report.Run(folder))
    titles = [figure.axes[0].get_title(loc="left") for figure in drawn]
    letters = ["oab, letter: 100 questions", "oab, letter: 50 questions"]
    assert titles == ["validation by source", *letters]
    axes = drawn[1].axes[0]
    (band,) = axes.patches
    half = 1.96 * math.sqrt(0.25 * 0.75 / 100)
    assert band.get_y() == pytest.approx(0.25 - half) and band.get_height() == pytest.approx(
        2 * half
    )
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["guessing", "sum", "per byte"]
    own = dict(task="core", n=91_037, core=0.1, stderr=0.006, chance=-0.0007, chance_sd=0.005)
    own |= dict(gpt2_xl=0.256525, step=12, tokens=6144)
    with open(folder / "eval.jsonl", "a") as file:
        file.write("\n" + json.dumps(own) + "\n")
    axes = curves.figures(report.Run(folder))[-1].axes[0]
    assert axes.get_title(loc="left") == "core: 91,037 questions"
    assert axes.get_legend_handles_labels()[1] == ["guessing", "GPT-2 XL", "score"]
    report.write(folder)
    assert (folder / "report.html").read_text().count("<img") == 6 + 4
