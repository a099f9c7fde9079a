"""instruments/pages/report.py: the page of a run and the comparison of several, on invented run
folders with known figures, and at the end of a real run."""

import html
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from browsing import SCREENS, browser, opened  # noqa: F401
from conftest import CPU, ROOT, logged, train_here, write_json, write_lines
from data_helpers import fingerprint, prepare_tiny

import eval
from config import PRESETS, UsageError
from instruments.pages import curves, report
from instruments.pages.records import thinned
from instruments.talk.sample import find_prompts
from machinery.formats import METRICS, SampleLine, parse, read_lines
from machinery.shards import Manifest

STEP_TOKENS = 1000


def step(n: int, time: float, **more) -> dict:
    """A training record as train.py writes it; each step takes 2 s."""
    record = dict(step=n, tokens=n * STEP_TOKENS, loss=8 / n, bpb=4 / n, lr=0.5, norm=1.0)
    record |= dict(time=time, step_s=2.0, tokens_per_s=500.0, tokens_per_s_mean=490.0, dt_ms=2000.0)
    record |= dict(data_wait_ms=0.1, tflops_full=0.2, tflops_causal=0.1, mfu_full=0.3)
    return record | dict(mfu_causal=0.25) | more


def validation(n: int, bpb: float, **more) -> dict:
    record = dict(step=n, tokens=n * STEP_TOKENS, val_loss=2 * bpb, val_bpb=bpb, val_rows=160)
    return record | dict(epochs={"a": 0.1}) | more


def make_run(folder, records, state=None, starts=(), **config):
    """starts: what the lines {"start": ...} of metrics.jsonl say; each stands before its steps."""
    folder.mkdir(parents=True)
    lines = [*records]
    for begun in starts:
        later = (i for i, r in enumerate(lines) if r.get("time", 0) >= begun["time"])
        lines.insert(next(later, len(lines)), {"start": begun})
    write_lines(folder / "metrics.jsonl", lines)
    write_json(folder / "config.json", dict(steps=10, seed=0, extras=[]) | config)
    if state:
        write_json(folder / "status.json", state)
    return folder


def start(time: float, **more) -> dict:
    where = dict(command="train.py tiny", device="cpu", world_size=1, data_dir="none")
    return dict(time=time) | where | more


def ten_steps(bpb_at_10: float = 2.0) -> list[dict]:
    steps = [step(n, 100 + 2.0 * n) for n in range(1, 11)]
    first, middle, last = map(validation, (0, 5, 10), (4.0, 3.0, bpb_at_10))
    return [first, *steps[:5], middle, *steps[5:], last]


class Page(HTMLParser):
    """What a page has; asserts that every tag is closed in order, and that none has a handler."""

    def __init__(self, page: str):
        super().__init__()
        self.page = page
        self.tags = []
        self.open = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def texts(self, tag: str) -> list[str]:
        found = re.findall(f"<{tag}>(.*?)</{tag}>", self.page, re.DOTALL)
        return [html.unescape(text).strip() for text in found]

    @property
    def rows(self) -> dict[str, str]:
        found = re.findall("<b>([^<]*)</b><span>(.*?)</span>", self.page, re.DOTALL)
        return {html.unescape(name): html.unescape(text).strip() for name, text in found[::-1]}

    @property
    def starts(self) -> list[dict]:
        names = self.texts("th")
        cells = iter(self.texts("td"))
        return [dict(zip(names, row)) for row in zip(*[cells] * len(names))]

    @property
    def head(self) -> str:
        return " ".join(self.texts("header")[0].split())


def page_of(folder) -> Page:
    page = report.write(folder)
    assert page == folder / "report.html"
    return Page(page.read_text())


@pytest.mark.pictures
def test_the_page_tells_the_figures_of_a_run_and_needs_nothing_else(tmp_path):
    state = {"state": "done", "step": 10, "exit_code": 0}
    whole = dict(step=10, tokens=10_000, full_val_loss=4.2, full_val_bpb=2.1, val_rows=348)
    config = dict(extras=["value_embeds", "<b>"], optimizer="muon", lr=1.0, lr_scale=1.0)
    begun = [start(90.0, world_size=4)]
    folder = make_run(tmp_path / "a", [*ten_steps(), whole], state, begun, **config)
    sample = dict(step=10, tokens=10_000, prompt="<i>", text="if a < b:\n    return")
    write_lines(folder / "samples.jsonl", [sample])
    page = page_of(folder)
    rows = page.rows
    assert "<b>2.1000</b> bits per byte</p> <p>on all 348 held-out rows" in page.head
    assert "10K tokens in 10 steps, 20s of training on 4 x cpu</p> </div>" in page.head
    scored = "2.0000 bits per byte, 4.0000 nats per token, at step 10, on 160 rows"
    assert rows["validation"] == scored
    assert rows["on all 348 rows"].startswith("2.1000 bits per byte, 4.2000 nats")
    assert rows["speed"] == "500 tok/s, mfu 30.0% full, 25.0% causal"
    assert rows["extras"] == "value_embeds <b>" and rows.keys().isdisjoint({"optimizer", "best"})
    one = dict(steps="0 to 10", time="30s", command="train.py tiny")
    assert one.items() <= page.starts[0].items()
    assert page.texts("pre") == ["if a < b:\n    return"]
    assert page.tags.count("svg") == 6
    raw = (folder / "report.html").read_text()
    policy = re.search("Content-Security-Policy.* content=\"default-src 'none'; ([^\"]*)", raw)[1]
    assert "script" not in page.tags + [policy]
    away = r'https?:(?!//www\.w3\.org)|(url\(|src="|href=")(?!#)|refresh|<details open'
    assert not re.search(away, raw)


def test_restarts_are_told_and_steps_done_twice_count_in_the_time(tmp_path):
    """Killed after step 8, of which 5 was saved; resumed 40 s later."""
    steps = [step(n, 100 + 2.0 * n, eval_s=3.0, save_s=1.0) for n in range(1, 6)]
    steps += [step(n, 150 + 2.0 * n, eval_s=2.0) for n in range(6, 9)]
    starts = [
        start(95.0, world_size=2),
        start(156.0, last_step=8, last_time=116.0),
        start(900.0, last_step=8, last_time=166.0),  # did not train
    ]
    page = page_of(make_run(tmp_path / "a", steps, {"state": "running"}, starts))
    first, second, total = page.starts
    assert (first["steps"], first["time"]) == ("0 to 8", "21s")
    assert (second["steps"], second["time"]) == ("5 to 8", "10s")
    assert [total[name] for name in ("time", "validation", "saving")] == ["31s", "5s", "1s"]
    assert "16s of training on 2 x cpu, then 1 x cpu" in page.head
    assert re.search('"refresh" content="60">.*<details open>', page.page, re.DOTALL)


BROKEN = {
    "nothing yet": ([], "0 tokens in 0 of 10 steps"),
    "no validation": ([step(1, 102.0)], "1K tokens in 1 of 10 steps"),
    "validation alone": ([validation(0, 4.0)], "<b>4.0000</b>"),
    "mfu unknown": ([step(1, 102.0, mfu_full=None)], "0.20 TFLOP/s full, 0.10 causal"),
    "skipped": ([step(1, 102.0), dict(step=2, tokens=2000, skipped=1)], "skipped steps</b><span>1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_page_of_an_unfinished_run(name, tmp_path):
    records, words = BROKEN[name]
    folder = make_run(tmp_path / "a", records)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 1.')  # killed while it wrote
    for file, content in (("status.json", b"\xff"), ("config.json", b'{"steps": 10')):
        page = page_of(folder)
        assert words in page.page and "unknown" in page.head
        assert page.tags.count("svg") == 6 * any("loss" in r for r in records)
        (folder / file).write_bytes(content)
        words = words.replace(" of 10", "") if file == "config.json" else words


# ---------------------------------------------------------------------- what a stranger's run says
EVIL = "</pre><script>document.title = 1</script><img src=http://127.0.0.1:9 onerror=x()> $\\frac$"
ODD = [EVIL, "\ud800\x1b[2J\0", None, True, -1, 10**400, math.nan, [EVIL], {EVIL: EVIL}, {}]


def every_field(record: dict):
    """The record with each of its fields put to each odd value."""
    for name in record:
        for odd in ODD:
            yield record | {name: odd}


START = {"start": start(90.0, command=EVIL, device=EVIL)}
FILES = {
    "config.json": dict(steps=10, data_fingerprint="x", seed=0, lr=0.1),
    "status.json": dict(state="done", error="no"),
}


@pytest.mark.pictures
def test_odd_values_in_any_field_are_text_or_left_out(tmp_path, monkeypatch):
    """A page that closes its tags, and runs and loads nothing. Which lines are left out:
    test_formats.py."""
    seen = dict(watch=dict(wait_s=0.5, saving=True))
    watched = [r | seen if "loss" in r else r for r in ten_steps()]
    by_source = validation(10, 1.9, val_bpb_by_source={EVIL: 1.0, "b": 2.0}, epochs={EVIL: 1.0})
    folder = make_run(tmp_path / "<b>&'$x_1$", [START, *watched, by_source], **{EVIL: EVIL})
    sample = dict(step=4, tokens=1, prompt="def", text="x")
    write_lines(folder / "samples.jsonl", every_field(sample))
    page = page_of(folder)  # with all its pictures
    assert set(page.tags) <= ALLOWED and page.tags.count("svg") == 6
    report.compared([str(folder), str(folder)])
    drawn = Page((tmp_path / "compare.svg").read_text()).page
    assert 'role="img"' in drawn and folder.name + "</text>" in html.unescape(drawn)
    monkeypatch.setattr(curves, "draw_run", lambda run: [])
    for name, record in FILES.items():
        for odd in every_field(record):
            write_json(folder / name, odd)
            assert set(page_of(folder).tags) <= ALLOWED


ALLOWED = {
    *"html meta title style main header h1 h2 section div p b span table tr th td "
    "figure figcaption pre details summary svg g path defs use text clippath rect".split()
}


@pytest.mark.parametrize("width, scheme", SCREENS)
def test_in_a_browser_nothing_runs_and_nothing_is_loaded(width, scheme, browser, tmp_path):  # noqa: F811
    """Of hostile text; and were a part of it not escaped, the policy would stop it."""
    folder = make_run(tmp_path / "a", [START, *ten_steps()], {"state": EVIL}, extras=[EVIL])
    sample = dict(step=10, tokens=10_000, prompt=EVIL, text=EVIL * 50)
    write_lines(folder / "samples.jsonl", [sample])
    path = report.write(folder)
    with opened(browser, path, width, scheme) as page:
        assert page.title() == "Run a"
        assert page.locator("pre").inner_text().startswith("</pre><script>")
    path.write_text(path.read_text().replace("<h1>", f"<h1>{EVIL}"))
    with opened(browser, path, width, scheme) as page:
        assert page.title() == "Run a"


# -------------------------------------------------------------------------------- its colours
def luminance(rgb: list[float]) -> float:
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear)) + 0.05


GROUNDS = "card ask page paper sheet white whitesmoke".split()


@pytest.mark.parametrize("page", ROOT.glob("instruments/*/*.[hc][ts][ms]*"), ids=lambda p: p.stem)
def test_text_can_be_read_by_day_and_by_night(page):
    """WCAG 2: a contrast of 4.5, of the lines of a picture and the edges of a box 3; and that of a
    token with the most shade on it."""
    css = page.read_text()
    light, dark = re.findall(r"(?::root|svg) \{([^}]*--\w+: [^}]*)\}", css)
    for block in (light, light + dark):
        says = dict(re.findall(r"--([\w-]+): ([^;]+);", block))
        rgb = {k: [x / 255 for x in bytes.fromhex(v[1:])] for k, v in says.items() if v[0] == "#"}
        grounds = [rgb.pop(name) for name in GROUNDS if name in rgb]
        no_text = {*"line lightgray gainsboro".split()}
        pairs = [(rgb[k], g) for k in rgb.keys() - no_text for g in grounds]
        hue = re.findall(r"\d+", says.get("hue", ""))
        if hue:
            share = float(says["most"])
            shade = [share * int(a) / 255 + (1 - share) * b for a, b in zip(hue, grounds[-1])]
            pairs.append((rgb["ink"], shade))
        lines = [rgb.get(name) for name in ("silver", "edge")]
        for pair in pairs:
            low, high = sorted(map(luminance, pair))
            assert high / low >= (3 if pair[0] in lines else 4.5), (pair, block)


# -------------------------------------------------------------------------------- several runs
def rows_of(table: str) -> list[list[str]]:
    return [re.split(r"  +", line) for line in table.split("\n\n")[0].splitlines()]


def test_runs_are_compared_at_the_tokens_they_share(tmp_path):
    a = make_run(tmp_path / "a", ten_steps(), extras=["value_embeds"])
    longer = [r for r in ten_steps(2.4) if r["step"] < 10]
    longer += [step(n, 200.0 + n) for n in range(10, 21)] + [validation(15, 2.0), validation(20, 1)]
    b = make_run(tmp_path / "b", longer)
    out = report.compared([str(a), str(b)])
    _, first, second = rows_of(out)
    assert first == [str(a), "10K", "2.0000", "3.0000", "+0.0000", "500", "10s"]
    assert second == [str(b), "20K", "1.0000", "3.0000", "+0.0000", "500", "10s"]  # at 5K
    assert "extras: value_embeds, none" in out and str(tmp_path / "compare.svg") in out
    begun = make_run(tmp_path / "c", [validation(5, 3.0), *ten_steps(1.99999)[7:]])
    _, _, third = rows_of(report.compared([str(a), str(begun)]))
    assert third[4] == "+0.0000"  # not -0.0000
    assert third[-1] == "n/a, begins at step 6"  # what the other one took is not in its folder


def test_where_no_two_validations_meet_the_figures_lie_between_two(tmp_path):
    others = [validation(6, 2.8), *ten_steps()[7:-1], validation(12, 2.2)]
    runs = [make_run(tmp_path / "a", ten_steps()[1:]), make_run(tmp_path / "b", others)]
    out = report.compared([*map(str, runs)])
    assert [row[3] for row in rows_of(out)] == ["bpb at 10K", "2.0000", "2.4000"]
    assert "warning: not all" in out


CODE = dict(commit="a" * 40, changed=False, files={"model.py": "1" * 64})


def test_what_a_difference_is_worth(tmp_path):
    def advice(*runs) -> str:
        return report.compared([str(run) for run in runs]).splitlines()[-2]

    same = dict(starts=[start(100.0, eval_tokens=1000, code=CODE)])
    a = make_run(tmp_path / "a", ten_steps(), **same)
    seed = make_run(tmp_path / "b", ten_steps(2.1), seed=1, **same)
    data = make_run(tmp_path / "c", ten_steps(), data_fingerprint="f", **same)
    brief = make_run(tmp_path / "d", ten_steps(), starts=[start(100.0, eval_tokens=10)])
    shape = make_run(tmp_path / "e", ten_steps(), n_layer=3, **same)
    equal = make_run(tmp_path / "f", ten_steps(2.1), **same)
    assert "noise" in advice(a, seed) and "seeds" in advice(a, shape)
    assert "no difference" in advice(a, equal) and "rounding" in advice(a, equal)
    assert "data differ" in advice(a, data) and "eval_tokens differ" in advice(a, brief)
    mixed = [*same["starts"], start(110.0, eval_tokens=10)]
    mixed = [make_run(tmp_path / name, ten_steps(), starts=mixed) for name in "gh"]
    assert "eval_tokens differ" in advice(*mixed)


def test_runs_whose_code_differs_are_no_two_seeds(tmp_path):
    def made(name: str, *codes, seed=0) -> Path:
        starts = [start(100.0 + 5 * i, code=code) for i, code in enumerate(codes)]
        return make_run(tmp_path / name, ten_steps(), starts=starts, seed=seed)

    def said(a: Path, b: Path) -> str:
        text = report.compared([str(a), str(b)])
        assert "no difference" not in text
        return next(line for line in text.splitlines() if line.startswith("code"))

    edited = CODE | dict(changed=True, files={"model.py": "2" * 64})
    later = CODE | dict(commit="b" * 40, files={"model.py": "2" * 64})
    a = made("a", CODE)
    b = made("b", edited, seed=1)
    c = made("c", later)
    assert said(a, b) == f"code of {b}: model.py differs ({b}/code.diff) from that of {a}"
    assert f"git diff {'a' * 12} {'b' * 12} -- model.py" in said(a, c)
    on = made("d", CODE, later, CODE)
    assert said(a, on).startswith(f"code: while {on} trained, model.py differs")
    assert said(a, made("e", None)) == f"code: that of {tmp_path / 'e'} is not known"


def test_what_makes_a_run_another_one_is_seen(tmp_path):
    """And what does not: a start of which no step is left, what an older version did not record."""
    known = dict(code=CODE, eval_tokens=9, micro_batch=8, parallel="none", torch="2")

    def made(name: str, records=None, starts=None, **config) -> Path:
        starts = starts or [start(100.0, **known)]
        return make_run(tmp_path / name, records or ten_steps(), starts=starts, **config)

    def said(b: Path) -> str:
        return report.compared([str(a), str(b)])

    a = made("a", minutes=0.0)
    other = CODE | dict(files={"model.py": "2" * 64})
    redone = made("redone", starts=[start(90.0, **known | dict(code=other)), start(100.0, **known)])
    assert "no difference: code, data" in said(redone)
    older = made("older", starts=[start(100.0, code=CODE, eval_tokens=9)])
    assert "no difference: code, data" in said(older) and "micro_batch" not in said(older)
    skipped = [
        dict(step=1, tokens=1000, skipped=1) if r.get("time") == 102 else r for r in ten_steps()
    ]
    assert "begins" not in said(made("skipped", skipped))
    assert "torch: 2, 3" in said(made("torch", starts=[start(100.0, **known | dict(torch="3"))]))
    on = made("on", [validation(5, 3.0), *ten_steps()[7:]])
    assert f"code: {on} goes on from another run's step 5" in said(on)
    assert "no difference: " not in said(on)
    a = made("b", minutes=3.0, steps=0)
    longer = [*ten_steps()[:-1], step(11, 122.0), validation(11, 2.0)]
    assert "no difference: code" in said(made("same", minutes=3.0, steps=0))
    assert "steps: 10, 11" in said(made("longer", longer, minutes=3.0, steps=0))
    assert "no difference: " not in said(tmp_path / "longer")
    far = made("far", [validation(0, 4.0), *ten_steps()[1:6], step(6, 112.0), validation(30, 2.0)])
    assert "have no validation in the same range" in said(far)


def test_flops_and_time_are_compared_where_they_can_be(tmp_path):
    """The first step of a process compiles: it counts as one of the others."""

    def made(name: str, step_s: float, **facts) -> Path:
        records = [r | dict(step_s=step_s) if "loss" in r else r for r in ten_steps()]
        records[1]["step_s"] = 500.0
        records[8]["step_s"] = 300.0  # after a resume
        facts = dict(code=CODE, recompute=False) | facts
        starts = [start(100.0, **facts), start(113.0, **facts)]
        return make_run(tmp_path / name, records, starts=starts)

    def cells(a: Path, b: Path) -> list[str]:
        lines = report.compared([str(a), str(b)]).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("loss of both"))
        return re.split("  +", lines[at + 1])[1:]

    a = made("a", 2.0, flops_per_token=100)
    assert cells(a, made("b", 2.0, flops_per_token=100)) == ["no difference (1.00)"] * 3
    wide = make_run(
        tmp_path / "wide",
        ten_steps(),
        starts=[start(100.0, code=CODE, flops_per_token=125)],
        mlp_hidden=9,
    )
    assert cells(a, wide) == ["1.00", "0.80", "1.00"]
    slow = made("slow", 4.0, flops_per_token=100, recompute=True)
    assert cells(a, slow) == ["1.00", "1.00", "0.50"]
    assert "recompute: False, True" in report.compared([str(a), str(slow)])
    other = made("other", 2.0, device="another")
    assert cells(a, other)[1:] == ["n/a: not recorded", "n/a: not on one device"]


def test_a_run_that_cannot_be_compared_gets_a_sentence(tmp_path):
    a = make_run(tmp_path / "a", ten_steps())
    young = make_run(tmp_path / "young", [validation(0, 4.0), step(1, 102.0)])
    short = make_run(tmp_path / "short", ten_steps()[:7])
    far = make_run(tmp_path / "far", [validation(9, 3.0), step(10, 120.0), validation(10, 2.0)])
    for *folders, named in [(a, a), (a, young, young), (a, tmp_path / "c", a), (short, far, far)]:
        with pytest.raises(UsageError) as error:
            eval.main(["compare", *map(str, folders)])
        assert str(named) in str(error.value) or len(folders) == 1


# ------------------------------------------------------------------------------- of a real run
@pytest.fixture(scope="module")
def two_sources(tmp_path_factory) -> Path:
    """Rows of 65 tokens of Python, and of prose."""
    folder = tmp_path_factory.mktemp("two") / "data"
    prepare_tiny(folder, "--vocab_size", 512, "--source", f"files:{ROOT}/machinery", ROOT / "docs")
    return folder


@pytest.fixture(scope="module")
def trained(two_sources, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("report") / "run"
    assert train_here(two_sources, run_dir, "--save_every", 6) == 0
    return run_dir


def test_a_finished_run_writes_its_page(trained, two_sources):
    page = Page((trained / "report.html").read_text())
    rows = page.rows
    assert "in 12 steps" in page.head and rows["data_fingerprint"] == fingerprint(two_sources)
    assert "fingerprint" not in page.page.rpartition("<details>")[2]
    assert page.texts("summary")[-1] == "Configuration: what differs from tiny"
    assert rows["folder"] == str(two_sources) and "documents" in rows["train, docs"]
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    assert all(parse(line.encode(), METRICS, "a line") for line in lines)
    assert page.starts[0]["steps"] == "0 to 12"
    assert str(two_sources) in page.starts[0]["command"]
    last = logged(trained, "val_bpb_by_source")[-1]
    (whole,) = logged(trained, "full_val_bpb_by_source")
    for name in ("machinery", "docs"):
        scored = f"{last[name]:.4f} bits per byte at step 12, {whole[name]:.4f} on all"
        assert scored in rows[f"source {name}"]
    for step, tolerance in (("12", 1e-5), ("step_00000006", 1)):
        assert eval.main(["loss", str(trained), "--checkpoint", step, *CPU]) == 0
        found = read_lines(trained / "eval.jsonl", dict)[-1]  # of all held-out rows
        assert found["val_bpb_by_source"] == pytest.approx(whole, rel=tolerance)
        assert f"{found['step']:02}" == step[-2:]


def test_a_page_is_written_anew(trained):
    (trained / "report.html").unlink()
    assert eval.main(["report", str(trained)]) == 0 and (trained / "report.html").exists()


def test_prompts_are_how_held_out_documents_begin_unless_the_text_is_the_presets(two_sources):
    texts = [path.read_text() for path in ROOT.glob("machinery/*.py")]
    manifest = Manifest.load(two_sources)
    for _ in range(2):
        prompts = find_prompts((), "tiny", manifest)
        assert prompts and all(any(prompt in text for text in texts) for prompt in prompts)
        manifest.facts.made.clear()  # as if prepared earlier
    manifest.facts = SimpleNamespace(sources=[SimpleNamespace(spec="stdlib")])
    assert find_prompts((), "tiny", manifest) == PRESETS["tiny"].prompts


def test_the_samples_of_a_long_run_are_thinned():
    samples = [SampleLine(step=n, tokens=n, prompt="def", text="") for n in range(0, 1000, 7)]
    shown = [sample.step for sample in thinned([*samples, *samples[-3:]])]
    assert len(shown) <= 12 and shown[0] == samples[-1].step and len({*shown}) == len(shown)
    assert thinned(samples[:12])[::-1] == samples[:12] and thinned([]) == []
