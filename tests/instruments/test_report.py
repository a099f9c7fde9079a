"""instruments/pages/report.py: the page of a run and the comparison of several, on invented run
folders with known figures; and what it does while a real run trains, which it neither changes nor
stops, and at its end."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from browsing import browser, opened  # noqa: F401
from conftest import (
    CPU,
    ROOT,
    SMALL,
    logged,
    look,
    losses,
    printed,
    read_lines,
    train_here,
    write_json,
    write_lines,
)
from data_helpers import fingerprint, prepare_tiny
from test_faults import assert_same_state

import eval
from config import PRESETS, UsageError
from instruments.pages import curves, report
from instruments.talk.sample import find_prompts
from machinery.shards import Manifest


def step(n: int, **more) -> dict:
    """A training record as train.py writes it; each step takes 2 s."""
    record = dict(step=n, tokens=1000 * n, loss=8 / n, bpb=4 / n, lr=0.5, norm=1.0)
    record |= dict(time=100 + 2.0 * n, step_s=2.0, tokens_per_s=500.0, data_wait_ms=0.1)
    record |= dict(tflops_full=0.2, tflops_causal=0.1, mfu_full=0.3, mfu_causal=0.25)
    return record | more


def validation(n: int, bpb: float, **more) -> dict:
    return dict(step=n, tokens=1000 * n, val_loss=2 * bpb, val_bpb=bpb, val_rows=160) | more


def ten_steps(bpb_at_10: float = 2.0) -> list[dict]:
    steps = [step(n) for n in range(1, 11)]
    first, middle, last = map(validation, (0, 5, 10), (4.0, 3.0, bpb_at_10))
    return [first, *steps[:5], middle, *steps[5:], last]


def start(time: float = 100.0, **more) -> dict:
    where = dict(command="train.py tiny", device="cpu", world_size=1, data_dir="none")
    return dict(start=dict(time=time) | where | more)


def make_run(folder, records, state="done", **config) -> Path:
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", records)
    write_json(folder / "config.json", dict(steps=10, seed=0, extras=[]) | config)
    write_json(folder / "status.json", dict(state=state))
    return folder


class Page(HTMLParser):
    """What a page has; asserts that every tag is closed in order, and that none has a handler.
    text: its words, a blank between two."""

    def __init__(self, html: str):
        super().__init__()
        self.html = html
        self.tags = []
        self.open = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text = " ".join([self.text, *data.split()])


def page_of(folder) -> Page:
    return Page(report.write(folder).read_text())


@pytest.mark.pictures
def test_the_page_tells_the_figures_of_a_run_and_needs_nothing_else(tmp_path):
    whole = dict(step=10, tokens=10_000, full_val_loss=4.2, full_val_bpb=2.1, val_rows=348)
    folder = make_run(tmp_path / "a", [start(90.0, world_size=4), *ten_steps(), whole])
    sample = dict(step=10, tokens=10_000, prompt="<i>", text="if a < b:\n    return")
    write_lines(folder / "samples.jsonl", [sample])
    page = page_of(folder)
    for words in (
        "2.1000 bits per byte on all 348 held-out rows "
        "10K tokens in 10 steps, 20s of training on 4 x cpu What it writes",
        "on all 348 rows 2.1000 bits per byte, 4.2000 nats per token, at step 10",
        "validation 2.0000 bits per byte, 4.0000 nats per token, at step 10, on 160 rows",
        "speed 500 tok/s, mfu 30.0% full, 25.0% causal",
        f"all options {folder}/config.json",
        "4 x cpu 0 to 10 30s 0s 0s 0s train.py tiny",
    ):
        assert words in page.text
    assert "<pre>if a &lt; b:\n    return</pre>" in page.html
    assert page.tags.count("svg") == 6
    assert "default-src 'none'; " in page.html and "script" not in page.html
    away = r'https?:(?!//www\.w3\.org)|(url\(|src="|href=")(?!#)|refresh|<details open'
    assert not re.search(away, page.html)


def test_restarts_are_told_with_the_time_of_the_steps_that_are_in_the_run(tmp_path):
    """Killed after step 8, of which 5 was saved; resumed 40 s later."""
    records = [step(n, eval_s=3.0, save_s=1.0) for n in range(1, 6)]
    records += [step(n, time=150 + 2.0 * n, eval_s=2.0) for n in range(6, 9)]
    records.append(dict(step=9, tokens=9000, skipped=1, time=170.0, step_s=4.0))
    records.append(start(95.0, world_size=2))
    records.append(start(156.0))
    records.append(start(900.0))  # did not train
    page = page_of(make_run(tmp_path / "a", records, "running"))
    assert "2 x cpu 0 to 5 15s 3s 1s" in page.text and "1 x cpu 5 to 8 10s 2s 0s" in page.text
    assert "all 25s 5s 1s" in page.text
    assert "20s of training on 2 x cpu, then 1 x cpu" in page.text
    assert re.search('"refresh" content="60">.*<details open>', page.html, re.DOTALL)


@pytest.mark.parametrize(
    "records, words",
    [
        ([], "0 tokens in 0 of 10 steps"),
        ([validation(0, 4.0)], "4.0000 bits per byte"),
        ([step(1, mfu_full=None)], "0.20 TFLOP/s full, 0.10 causal"),
        ([step(1), dict(step=2, tokens=2000, skipped=1)], "Result skipped steps 1"),
    ],
)
def test_a_page_of_an_unfinished_run(records, words, tmp_path):
    folder = make_run(tmp_path / "a", records, "failed")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 1.')  # killed while it wrote
    page = page_of(folder)
    assert words in page.text and '"failed">failed<' in page.html
    assert page.tags.count("svg") == 6 * any("loss" in r for r in records)


# ---------------------------------------------------------------------- what a stranger's run says
EVIL = "</pre><script>document.title = 1</script><img src=http://127.0.0.1:9 onerror=x()> $\\frac$"
ODD = [EVIL, "\ud800\x1b[2J\0", None, 10**400, math.nan, {EVIL: [EVIL]}]
ALLOWED = {
    *"html meta title style main header h1 h2 section div p b span table tr th td "
    "figure figcaption pre details summary svg g path defs use text clippath rect".split()
}


@pytest.fixture
def strange(tmp_path) -> Path:
    by_source = validation(10, 1.9, val_bpb_by_source={EVIL: 1.0, "b": 2.0})
    begun = start(90.0, command=EVIL, device=EVIL)
    folder = make_run(tmp_path / "<b>&'$x_1$", [begun, *ten_steps(), by_source], EVIL, a=EVIL)
    sample = dict(step=10, tokens=10_000, prompt=EVIL, text=EVIL * 50)
    write_lines(folder / "samples.jsonl", [sample])
    return folder


@pytest.mark.pictures
def test_odd_values_are_text(strange, monkeypatch):
    """On a page that closes its tags, and runs and loads nothing. Which lines are left out:
    test_formats.py."""
    page = page_of(strange)  # with all its pictures
    assert set(page.tags) <= ALLOWED and page.tags.count("svg") == 6
    report.compare([str(strange), str(strange)])
    drawn = Page(next(strange.parent.glob("compare_*.svg")).read_text())
    assert drawn.tags[0] == "svg" and strange.name in drawn.text
    monkeypatch.setattr(curves, "draw_run", lambda run: [])
    for odd in ODD:
        names = "steps minutes data_fingerprint tokenizer_sha256 revisions".split()
        write_json(strange / "config.json", dict.fromkeys(names, odd))
        assert set(page_of(strange).tags) <= ALLOWED


def test_in_a_browser_nothing_runs_and_nothing_is_loaded(browser, strange):  # noqa: F811
    """Of hostile text; and were a part of it not escaped, the policy would stop it."""
    path = report.write(strange)
    with opened(browser, path) as page:
        assert page.title() == f"Run {strange.name}"
        assert page.locator("pre").inner_text().startswith("</pre><script>")
    path.write_text(path.read_text().replace("<h1>", f"<h1>{EVIL}"))
    with opened(browser, path, 400, "dark") as page:
        assert page.title() == f"Run {strange.name}"


# -------------------------------------------------------------------------------- its colours
GROUNDS = "card ask page paper sheet white whitesmoke".split()
NO_TEXT = {*"line lightgray gainsboro".split()}


def luminance(rgb) -> float:
    linear = [x / 3294.6 if x <= 10 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in rgb]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear)) + 0.05


PAGES = {*ROOT.glob("instruments/*/*.[hc][ts][ms]*")} - {ROOT / "instruments/pages/report.html"}


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda p: p.stem)
def test_text_can_be_read_by_day_and_by_night(page):
    """WCAG 2: a contrast of 4.5, of the lines of a picture and the edges of a box 3; and that of a
    token with the most shade on it."""
    light, dark = re.findall(r"(?::root|svg) \{([^}]*--\w+: [^}]*)\}", page.read_text())
    for block in (light, light + dark):
        says = dict(re.findall(r"--([\w-]+): ([^;]+);", block))
        rgb = {name: bytes.fromhex(value[1:]) for name, value in says.items() if value[0] == "#"}
        grounds = [rgb.pop(name) for name in GROUNDS if name in rgb]
        pairs = [(name, rgb[name], ground) for name in rgb.keys() - NO_TEXT for ground in grounds]
        if "hue" in says:
            share = float(says["most"])
            hue = map(int, re.findall(r"\d+", says["hue"]))
            shade = [share * a + (1 - share) * b for a, b in zip(hue, grounds[-1])]
            pairs.append(("ink", rgb["ink"], shade))
        for name, *both in pairs:
            low, high = sorted(map(luminance, both))
            assert high / low >= (3 if name in ("silver", "edge") else 4.5), (name, block)


# -------------------------------------------------------------------------------- several runs
@pytest.fixture
def said(capsys):
    """said(A, B, ...): what `eval.py compare` prints, with the names A and B for their folders."""

    def compared(*folders) -> str:
        text = look(capsys, "compare", *folders)
        for name, folder in zip("AB", folders):
            text = text.replace(str(folder), name)
        return text

    return compared


def test_runs_are_compared_at_the_tokens_they_share(said, tmp_path):
    """Or, where no two validations meet, between two."""
    a = make_run(tmp_path / "a", ten_steps())
    longer = [
        *ten_steps(2.4)[:-1],
        *map(step, range(11, 21)),
        *map(validation, (15, 20), (2.0, 1.0)),
    ]
    b = make_run(tmp_path / "b", longer)
    text = said(a, b)
    assert re.search(r"B +20K +3.0000 +\+0.0000 +500 +10s\n", text)  # after 5K
    assert f"picture: {tmp_path}/compare_a+b.svg" in text
    later = make_run(tmp_path / "c", [validation(5, 3.0), *ten_steps(1.99999)[7:]])
    # not -0.0000; what the other one took is not in its folder
    assert re.search(r"B .* \+0.0000 +500 +n/a, begins at step 6\n", said(a, later))
    others = [validation(6, 2.8), *ten_steps()[7:-1], validation(12, 2.2)]
    text = said(make_run(tmp_path / "d", ten_steps()[1:]), make_run(tmp_path / "e", others))
    assert re.search(r"B +12K +2.4000 +\+0.4000 ", text) and "warning: not all" in text


CODE = dict(files={"model.py": "1" * 64})
LATER = dict(files={"model.py": "2" * 64})
KNOWN = dict(code=CODE, micro_batch=8, torch="2")
NONE = "no difference: options, seed, data and code"
UNKNOWN = "code: not that of all steps is known of B\ntrust"
# What is different in B; and what is said of it.
DIFFERENCES = {
    "nothing": ({}, NONE),
    "seed": (dict(seed=1), "seed is 0 in A and 1 in B\nno difference: only the seed"),
    "data": (dict(data_fingerprint="f"), "'f' in B\nwarning: the data or eval_tokens of A and B"),
    "validations": (
        dict(records=[*ten_steps(), validation(10, 1.0, val_rows=9)]),
        "warning: the data or eval_tokens of A and B",
    ),
    "weights": (
        dict(starts=[KNOWN | dict(init_from="x")]),
        "init_from is [None] in A and ['x'] in B\ntrust",
    ),
    "weights of a process that resumed": (dict(starts=[KNOWN, KNOWN | dict(init_from="x")]), NONE),
    "torch": (
        dict(starts=[KNOWN, KNOWN | dict(torch="3")]),
        "torch is ['2'] in A and ['2', '3'] in B\ntrust",
    ),
    "code for a while": (
        dict(starts=[KNOWN, KNOWN | dict(code=LATER), KNOWN], seed=1),
        "seed is 0 in A and 1 in B\ncode: model.py differs between A and B\ntrust",
    ),
    "code that is not known": (dict(starts=[KNOWN | dict(code=None)]), UNKNOWN),
    "begun later": (dict(records=[validation(5, 3.0), *ten_steps()[7:]]), UNKNOWN),
    "a start of which no step is left": (dict(begun=80.0, starts=[dict(code=LATER), KNOWN]), NONE),
    "a step that was skipped": (
        dict(records=[dict(step=1, tokens=1000, skipped=1), *ten_steps()[2:]]),
        NONE,
    ),
    "its range": (
        dict(records=[validation(0, 4.0), *ten_steps()[1:6], step(6), validation(30, 2.0)], x=1),
        "have no validation in the same range",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_in_what_runs_differ_and_what_it_is_worth(name, said, tmp_path):
    """By the starts, of which the first began to train at `begun`, the others 6 s later each."""

    def made(folder: Path, records=None, begun=100.0, starts=(KNOWN,), **config) -> Path:
        begun = [start(begun + 6 * n, **facts) for n, facts in enumerate(starts)]
        return make_run(folder, begun + (records or ten_steps()), **config)

    what, words = DIFFERENCES[name]
    a = made(tmp_path / "a", lr_scale=1.0)  # by default: B is older, and does not mention it
    text = said(a, made(tmp_path / "b", **what))
    assert words in text
    assert ("no difference" in text) == ("no difference" in words)


def test_flops_and_time_are_compared_where_they_can_be(said, tmp_path):
    """The first step of a process compiles: it counts as one of the others."""

    def made(name: str, **facts) -> Path:
        records = ten_steps()
        records[1]["step_s"] = 500.0
        records[8]["step_s"] = 300.0  # after a resume
        facts = KNOWN | dict(flops_per_token=100) | facts
        return make_run(tmp_path / name, [start(100.0, **facts), start(113.0, **facts), *records])

    def cells(b: Path) -> list[str]:
        return re.split("  +", re.search("loss of both.*\n(.*)", said(a, b))[1])[1:]

    a = make_run(tmp_path / "a", [start(**KNOWN, flops_per_token=100), *ten_steps()])
    assert f"B: equal to the last digit up to 10K tokens\n{NONE}" in said(a, made("b"))
    assert cells(made("wide", torch="3", flops_per_token=125)) == ["1.00", "0.80", "1.00"]
    other = made("other", device="another", flops_per_token=None, torch="3")
    assert cells(other)[1:] == ["n/a: not recorded", "n/a: not on one device"]


def test_a_run_that_cannot_be_compared_gets_a_sentence(tmp_path):
    a = make_run(tmp_path / "a", ten_steps())
    young = make_run(tmp_path / "young", [validation(0, 4.0), step(1)])
    short = make_run(tmp_path / "short", ten_steps()[:7])
    far = make_run(tmp_path / "far", [validation(9, 3.0), *ten_steps()[-2:]])
    for *folders, named in ((a, "two"), (a, young, young), (short, far, far)):
        with pytest.raises(UsageError, match=str(named)):
            eval.main(["compare", *map(str, folders)])


# ------------------------------------------------------------------------- while a run trains
OFTEN = "--save_every 4 --keep 9 --eval_every 4".split()  # as conftest's trained_run


def test_a_sample_at_each_validation_and_ten_pages(small_data, tmp_path, monkeypatch, capsys):
    """Which are no training time, but the meter's pauses. A page reads the whole run: after each of
    a thousand validations, it would take hours."""
    pages = []
    honest = report.write
    drawn = report.continuations
    models = []

    def write(run):
        pages.append((honest(run).read_text(), models[-1].training))

    monkeypatch.setattr(report, "write", write)

    def draw(model, *args):
        assert not model.training  # or a dropout of yours would be in it
        models.append(model)
        return drawn(model, *args)

    monkeypatch.setattr(report, "continuations", draw)
    assert train_here(small_data, tmp_path / "run", "--eval_every", 1) == 0
    for (page, trains), step in zip(pages, range(0, 13, 2), strict=True):
        assert f" tokens in {step}{' of 12' * (step < 12)} steps" in page
        assert (">running<" in page) == trains == (step < 12)
        assert page.count("<pre>") == step + 1
    assert len(models) == 13
    lines = capsys.readouterr().out.splitlines()
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    prompt = find_prompts("run", Manifest.load(small_data))[0]  # of its held-out text
    assert [(r["step"], r["prompt"]) for r in samples] == [(n, prompt) for n in range(13)]
    for r in samples:
        assert r["text"].startswith(prompt) and len(r["text"]) > 10
        assert lines.count(f"step {r['step']} | it writes {r['text'][:72]!r}") == 1


def test_it_changes_no_bit_and_no_fault_of_it_stops_a_run(
    trained_run, small_data, tmp_path, monkeypatch, capsys
):
    def fault(*args):
        torch.rand(1)  # a report may draw random numbers
        raise ZeroDivisionError

    monkeypatch.setattr(report, "continuations", fault)
    monkeypatch.setattr(report, "write", fault)
    assert train_here(small_data, tmp_path / "run", *OFTEN) == 0
    assert capsys.readouterr().out.count("ZeroDivisionError") == 5  # four samples, and the page
    assert losses(tmp_path / "run") == losses(trained_run)
    assert_same_state(tmp_path / "run", trained_run, 12)


@pytest.mark.slow
def test_sharded_weights_are_not_sampled_and_that_is_said(small_data, tmp_path):
    where = ["--data_dir", small_data, "--run_dir", tmp_path / "run", "--parallel", "fsdp"]
    said = printed("train.py", "tiny", *SMALL, *OFTEN, *where, nproc=2)
    assert "step 4 | no samples of sharded weights while it trains" in said
    assert " tokens in 12 steps" in (tmp_path / "run" / "report.html").read_text()


# ------------------------------------------------------------------------------- of a real run
@pytest.fixture(scope="module")
def two_sources(tmp_path_factory) -> Path:
    """Rows of 65 tokens of Python, and of prose."""
    folder = tmp_path_factory.mktemp("two") / "data"
    prepare_tiny(folder, "--vocab_size", 512, "--source", f"files:{ROOT}/machinery", ROOT / "docs")
    return folder


def test_a_finished_run_has_its_page(two_sources, tmp_path):
    folder = tmp_path / "run"
    assert train_here(two_sources, folder) == 0
    (folder / "report.html").unlink()
    assert eval.main(["report", str(folder)]) == 0
    page = Page((folder / "report.html").read_text())
    for words in ("in 12 steps", "1 thread 0 to 12 ", f"folder {two_sources} ", "train, docs "):
        assert words in page.text
    assert f"data_fingerprint {fingerprint(two_sources)}" in page.text
    assert f"--data_dir {two_sources}" in page.text
    last = logged(folder, "val_bpb_by_source")[-1]
    (whole,) = logged(folder, "full_val_bpb_by_source")
    for name in ("machinery", "docs"):
        scored = f"{last[name]:.4f} bits per byte at step 12, {whole[name]:.4f} on all"
        assert f"source {name} {scored}" in page.text
    assert eval.main(["loss", str(folder), *CPU]) == 0  # of all held-out rows
    found = read_lines(folder / "eval.jsonl")[-1]
    assert found["val_bpb_by_source"] == pytest.approx(whole, rel=1e-5)


def test_prompts_are_how_held_out_documents_begin_unless_the_text_is_the_presets(two_sources):
    texts = [path.read_text() for path in ROOT.glob("machinery/*.py")]
    manifest = Manifest.load(two_sources)
    for _ in range(2):
        prompts = find_prompts("tiny", manifest)
        assert prompts and all(any(prompt in text for text in texts) for prompt in prompts)
        manifest.facts.made.clear()  # as if prepared earlier
    manifest.facts = SimpleNamespace(sources=[SimpleNamespace(spec="stdlib")])
    assert find_prompts("tiny", manifest) == PRESETS["tiny"].prompts
