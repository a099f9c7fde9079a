"""instruments/report.py: the page of a run and the comparison of several, on invented run folders
with known figures, and at the end of a real run."""

import errno
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from unittest import mock

import pytest
from conftest import SMALL

import eval
import train
from config import UsageError
from instruments import report, to_wandb
from machinery import cli, disk
from machinery.log import Log, read_jsonl

pytest.importorskip("matplotlib")
STEP_TOKENS = 1000


def step(n: int, time: float, **more) -> dict:
    """A training record as train.py writes it; each step takes 2 s."""
    record = dict(step=n, tokens=n * STEP_TOKENS, loss=8 / n, bpb=4 / n, lr=0.5, norm=1.0)
    record |= dict(time=time, step_s=2.0, tokens_per_s=500.0, tokens_per_s_mean=490.0, dt_ms=2000.0)
    record |= dict(data_wait_ms=0.1, tflops_full=0.2, tflops_causal=0.1, mfu_full=0.3)
    return record | dict(mfu_causal=0.25) | more


def validation(n: int, bpb: float) -> dict:
    record = dict(step=n, tokens=n * STEP_TOKENS, val_loss=2 * bpb, val_bpb=bpb, val_rows=160)
    return record | dict(epochs={"a": 0.1})


def make_run(folder, records, state=None, starts=(), **config):
    """starts: what the lines {"start": ...} of metrics.jsonl say; each stands before its steps."""
    folder.mkdir(parents=True)
    lines = [*records]
    for begun in starts:
        later = (i for i, r in enumerate(lines) if r.get("time", 0) >= begun["time"])
        lines.insert(next(later, len(lines)), {"start": begun})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    (folder / "config.json").write_text(json.dumps(dict(steps=10, seed=0, extras=[]) | config))
    if state:
        (folder / "status.json").write_text(json.dumps(state))
    return folder


def start(time: float, **more) -> dict:
    where = dict(command="train.py tiny", device="cpu", world_size=1, on_gpu=False)
    return dict(time=time, usd_per_hour=3.0, data_dir="none") | where | more


def ten_steps(bpb_at_10: float = 2.0) -> list[dict]:
    steps = [step(n, 100 + 2.0 * n) for n in range(1, 11)]
    return [
        validation(0, 4.0),
        *steps[:5],
        validation(5, 3.0),
        *steps[5:],
        validation(10, bpb_at_10),
    ]


class Page(HTMLParser):
    """The attributes and the text of a page; asserts that every tag is closed in order."""

    def __init__(self, page: str):
        super().__init__()
        self.links, self.text, self.open = [], "", []
        self.feed(page)
        assert self.open == ["html"], self.open

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text += text + "\n"


def pages(folder) -> tuple[str, Page]:
    page = report.write(folder)
    assert page == folder / "report.html"
    return (folder / "report.md").read_text(), Page(page.read_text())


@pytest.mark.pictures
def test_the_page_tells_the_figures_of_a_run_and_needs_nothing_else(tmp_path):
    state = {"state": "done", "step": 10, "exit_code": 0}
    folder = make_run(
        tmp_path / "a", ten_steps(), state, [start(90.0)], extras=["value_embeds", "<b>"]
    )
    sample = dict(step=10, tokens=10_000, prompt="<i>", text="if a < b:\n    return")
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    text, page = pages(folder)
    for words in (
        "done",
        "10 of 10",
        "2.0000 bits per byte, 4.0000 nats per token, at step 10",
        "500 tok/s, mfu 30.0% full, 25.0% causal",
        "training: 20s",
        "extras: value_embeds <b>",
        "step 0 to 10 in 30s: train.py tiny",
        "total time: 30s",
    ):
        assert words in text, words
        assert all(part in page.text for part in words.split(": ", 1)), words
    assert "if a < b:\n    return" in page.text and "cost" not in text
    assert len(page.links) == 6
    assert all(link.startswith("data:image/png;base64,iVBOR") for link in page.links)
    raw = (folder / "report.html").read_text()
    assert not re.search(r"https?://|url\(|<script", raw) and "width=device-width" in raw
    report.write(folder, usd_per_hour=120.0)
    assert "$1.00 at $120.00 per hour" in (folder / "report.md").read_text()


def test_restarts_are_told_and_steps_done_twice_are_paid(tmp_path):
    """Killed after step 8, of which 5 was saved; resumed on a GPU, 40 s later."""
    steps = [step(n, 100 + 2.0 * n, eval_s=3.0, save_s=1.0) for n in range(1, 6)]
    steps += [step(n, 150 + 2.0 * n, eval_s=2.0) for n in range(6, 9)]
    starts = [
        start(95.0, on_gpu=True, usd_per_hour=36.0),
        start(156.0, on_gpu=True, last_step=8, last_time=116.0),  # $3 an hour
        start(900.0, last_step=8, last_time=166.0),  # did not train
    ]
    text, _ = pages(make_run(tmp_path / "a", steps, {"state": "running"}, starts))
    assert "step 0 to 8 in 21s" in text and "step 5 to 8 in 10s" in text
    assert text.count("train.py tiny") == 2
    assert "total time: 31s, of which 5s validation, 1s saving and 0s reporting" in text
    assert "training: 16s" in text and "$0.22 at $36.00, $3.00 per hour" in text  # 21 s and 10 s


def test_the_price_is_of_one_gpu_or_of_a_machine_without_one(tmp_path):
    """30 s on 8 GPUs, then 10 s on one; and 4 ranks of one machine."""
    steps = [*ten_steps(), step(11, 131.0)]
    on_8 = start(90.0, on_gpu=True, world_size=8, usd_per_hour=36.0)
    on_1 = start(121.0, on_gpu=True, usd_per_hour=36.0)
    text, _ = pages(make_run(tmp_path / "a", steps, starts=[on_8, on_1]))
    assert "cost: $2.50 at 8 x $36.00, $36.00 per hour" in text
    folder = make_run(tmp_path / "b", ten_steps(), starts=[start(90.0, world_size=4)])
    report.write(folder, usd_per_hour=120.0)
    assert "cost: $1.00 at $120.00 per hour" in (folder / "report.md").read_text()


def test_the_loss_on_all_rows_is_shown_beside_that_on_a_part(tmp_path):
    whole = dict(step=10, tokens=10_000, full_val_loss=4.2, full_val_bpb=2.1, val_rows=348)
    text, page = pages(make_run(tmp_path / "a", [*ten_steps(), whole], starts=[start(90.0)]))
    assert "validation: 2.0000 bits per byte, 4.0000 nats per token, at step 10, on 160" in text
    assert "on all 348 rows: 2.1000 bits per byte, 4.2000 nats per token, at step 10" in text
    assert "on all 348 rows" in page.text
    both = [make_run(tmp_path / name, [*ten_steps(), whole]) for name in "bc"]
    assert "2.0000" in report.compare([str(folder) for folder in both])


def test_a_damaged_small_file_is_named_and_left_out(tmp_path, capsys):
    for name, content in (
        ("config.json", b'{"steps": 1'),
        ("status.json", b"\xff"),
        ("config.json", b"5"),
    ):
        folder = make_run(tmp_path / f"{len(content)}{name}", ten_steps(), {"state": "done"})
        (folder / name).write_bytes(content)
        text, _ = pages(folder)
        assert f"warning: {folder / name} is damaged" in capsys.readouterr().out
        assert ("state: unknown" in text) == (name == "status.json") and "best: 2.0000" in text
        assert "picture" in report.compare([str(folder), str(folder)])


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    folder = make_run(tmp_path / "a", ten_steps())
    refused = PermissionError(errno.EACCES, "Permission denied")
    with (
        mock.patch.object(disk, "fsync", side_effect=refused),
        pytest.raises(UsageError, match="report.md cannot be written .*copy the run to where"),
    ):
        report.write(folder)


def test_what_stands_in_the_place_of_a_file_is_set_aside(tmp_path, capsys):
    folder = make_run(tmp_path / "a", ten_steps())
    (folder / "report.md").mkdir()
    (folder / "report.md" / "kept").touch()
    assert report.write(folder).exists() and (folder / "report.md").is_file()
    assert len(list(folder.glob("report.md.aside-*/kept"))) == 1
    assert "cannot be read (Is a directory): it is report.md.aside-" in capsys.readouterr().out


def test_wandb_gets_the_lines_that_have_a_step(tmp_path):
    folder = make_run(tmp_path / "a", ten_steps(), starts=[start(90.0)])
    found = list(to_wandb.records(folder, follow=False))
    assert found == ten_steps()


BROKEN = {
    "nothing yet": ([], "steps: 0 of 10"),
    "no validation": ([step(1, 102.0)], "steps: 1 of 10"),
    "validation alone": ([validation(0, 4.0)], "best: 4.0000"),
    "mfu unknown": ([step(1, 102.0, mfu_full=None)], "0.20 TFLOP/s full, 0.10 causal"),
    "a step was skipped": ([step(1, 102.0), dict(step=2, tokens=2000, skipped=1)], "1 skipped"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_page_of_an_unfinished_run(name, tmp_path):
    records, words = BROKEN[name]
    folder = make_run(tmp_path / "a", records)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 1.')  # killed while it wrote
    text, page = pages(folder)
    assert words in text and "state: unknown" in text
    assert len(page.links) == (6 if any("loss" in r for r in records) else 0)


def rows_of(table: str) -> list[list[str]]:
    return [re.split(r"  +", line) for line in table.split("\n\n")[0].splitlines()]


@pytest.mark.pictures
def test_runs_are_compared_at_the_tokens_they_share(tmp_path):
    a = make_run(tmp_path / "a", ten_steps(), extras=["value_embeds"])
    longer = [r for r in ten_steps(2.4) if r["step"] < 10]
    longer += [step(n, 200.0 + n) for n in range(10, 21)] + [validation(15, 2.0), validation(20, 1)]
    b = make_run(tmp_path / "b", longer)
    out = report.compare([str(a), str(b)])
    head, first, second = rows_of(out)
    assert head[2:5] == ["bpb at 10K", "difference", "best until then"]
    assert first == [str(a), "10K", "2.0000", "+0.0000", "2.0000", "500", "20s"]
    # b has 3.0 after 5K and 2.0 after 15K: 2.5 between them
    assert second == [str(b), "20K", "2.5000", "+0.5000", "2.5000", "500", "20s"]
    assert "extras: value_embeds, none" in out and "between two seeds" in out
    assert f"picture: {tmp_path / 'compare.png'}" in out
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_no_difference_has_a_minus(tmp_path):
    runs = [make_run(tmp_path / str(bpb), ten_steps(bpb)) for bpb in (2.0, 1.99999)]
    assert [row[3] for row in rows_of(report.compare([*map(str, runs)]))[1:]] == ["+0.0000"] * 2


def test_what_a_difference_is_worth(tmp_path):
    a = make_run(tmp_path / "a", ten_steps())
    seed = make_run(tmp_path / "b", ten_steps(2.1), seed=1)
    data = make_run(tmp_path / "c", ten_steps(), data_fingerprint="f")
    both = report.compare([str(a), str(seed)])
    assert "seed: 0, 1" in both and "the difference above is noise" in both
    assert "warning: the data differ" in report.compare([str(a), str(data)])
    started = [start(100.0, init_from="", eval_tokens=1000)]
    tuned = [start(100.0, init_from="runs/a", eval_tokens=1000)]
    brief = [start(100.0, init_from="", eval_tokens=10)]
    runs = [
        make_run(tmp_path / name, ten_steps(), starts=s)
        for name, s in zip("def", (started, tuned, brief))
    ]
    other = report.compare([str(runs[0]), str(runs[1])])
    assert "init_from: none, runs/a" in other and "larger than that between two seeds" in other
    assert "warning: eval_tokens differ" in report.compare([str(runs[0]), str(runs[2])])
    mixed = [start(100.0, eval_tokens=1000), start(110.0, eval_tokens=10)]
    mixed = [make_run(tmp_path / name, ten_steps(), starts=mixed) for name in "gh"]
    assert "warning: eval_tokens differ" in report.compare([str(folder) for folder in mixed])


def test_a_run_begun_from_another_has_no_training_time(tmp_path):
    """What the other one took is not in its folder."""
    a, later = make_run(tmp_path / "a", ten_steps()), ten_steps()[7:]
    b = make_run(tmp_path / "b", [validation(5, 3.0), *later])
    assert "n/a, begins at step 6" in report.compare([str(a), str(b)])
    c = make_run(tmp_path / "c", ten_steps()[:7])
    far = make_run(tmp_path / "far", [validation(9, 3.0), step(10, 120.0), validation(10, 2.0)])
    with pytest.raises(ValueError, match="far begins at 9K tokens, after another run has ended"):
        report.compare([str(c), str(far)])


def test_a_run_that_cannot_be_compared_gets_a_sentence(tmp_path):
    a = make_run(tmp_path / "a", ten_steps())
    young = make_run(tmp_path / "young", [validation(0, 4.0), step(1, 102.0)])
    mistakes = [
        ([a], "two runs or more"),
        ([a, young], "young has no validation after"),
        ([a, tmp_path / "c"], f"no metrics.jsonl.*there are {a}, {young}"),
    ]
    for folders, words in mistakes:
        with pytest.raises(ValueError, match=words) as error:
            eval.main(["compare", *map(str, folders)])
        assert cli.exit_code(error.value) == 2


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("report") / "run"
    args = ["--data_dir", str(small_data), "--run_dir", str(run_dir), "--save_every", "6"]
    assert train.main(["tiny", *SMALL, *args]) == 0
    return run_dir


def test_a_finished_run_writes_its_page(trained, small_data, tmp_path):
    text = (trained / "report.md").read_text()
    assert "steps: 12 of 12" in text and "state: done" in text
    assert "step 0 to 12" in text and f"--data_dir {small_data}" in text
    fingerprint = json.loads((small_data / "manifest.json").read_text())["fingerprint"]
    assert f"data_fingerprint: {fingerprint}" in text
    assert f"folder: {small_data}" in text and re.search(r"train, texts: \d+ documents", text)
    assert len(Page((trained / "report.html").read_text()).links) == 6


def drawn(folder) -> list[dict]:
    """The samples that eval.py took."""
    return [r for r in read_jsonl(folder / "samples.jsonl") if "live" not in r]


def test_by_hand_it_samples_from_each_checkpoint_once(trained, tmp_path, capsys):
    where = ["report", "--device", "cpu", "--run_dir"]
    for _ in range(2):
        options = ["--prompt", "def ", "--max_new_tokens", "8"]
        assert eval.main([*where, str(trained), *options]) == 0
        assert f"{trained}/report.html" in capsys.readouterr().out
        samples = drawn(trained)
        assert [(r["step"], r["prompt"]) for r in samples] == [(s, "def ") for s in (4, 6, 12)]
        assert all(r["text"].startswith("def ") and len(r["text"]) > 8 for r in samples)
    assert "step 6," in (trained / "report.md").read_text()
    assert eval.main([*where, str(trained), "--prompt", "class ", "--max_new_tokens", "8"]) == 0
    samples = drawn(trained)
    assert [(r["step"], r["prompt"]) for r in samples[3:]] == [(s, "class ") for s in (4, 6, 12)]
    log = Log(shutil.copytree(trained, tmp_path / "resumed"), is_first=True)
    log.begin(6, False, start(1.0))  # the steps 7 to 12 will be other ones
    assert [r["step"] for r in drawn(log.run_dir)] == [4, 6, 4, 6]
    (trained / "samples.jsonl").unlink()
    assert eval.main([*where, str(trained)]) == 0  # continues held-out text
    assert len(drawn(trained)) == 9
    with pytest.raises(ValueError, match=f"there are {trained}"):
        eval.main([*where, str(trained.parent / "none")])


@pytest.mark.parametrize("fault", ["an error", "no instruments", "no matplotlib"])
def test_no_fault_of_the_page_stops_a_run(fault, trained, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("report.*", "checkpoints"))
    if fault == "an error":
        monkeypatch.setattr(report, "draw_curves", lambda run: 1 / 0)
    elif fault == "no instruments":
        monkeypatch.setitem(sys.modules, "instruments", None)
    else:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = train.report(Log(folder, is_first=True))
    if fault == "no matplotlib":
        assert "no pictures, as matplotlib is not installed" in capsys.readouterr().out
        assert "steps: 12 of 12" in (folder / "report.md").read_text()
    else:
        assert line.startswith("report      none: ") and "\n" not in line
        assert not (folder / "report.html").exists()
