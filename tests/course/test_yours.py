"""course/yours.py: the trainer of a student's own parts runs, and says which part is at fault."""

import os
import re
from types import SimpleNamespace

import lesson
import pytest
import spine
import yours
from trial import trial


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A small text and exam. -> a function: yours by number, functions -> parts, have, rows"""
    text = lesson.bytes_of_stdlib(31_025)
    monkeypatch.setattr(lesson, "exam", lambda: (text[:30_000], text[30_000:]))
    monkeypatch.setattr(lesson, "OUT", tmp_path)
    monkeypatch.setattr(spine, "MERGES", 20)
    monkeypatch.setattr(yours, "judged", lambda number, path: None)

    def collected(only=frozenset(spine.PARTS), fill="plain", **put):
        parts, rows = yours.collect(lesson.COURSE / "solutions", only, fill)
        for name, function in put.items():
            parts[name].function = function
        return parts, {row["number"] for row in rows if not row["plain"]}, rows

    return collected


@pytest.mark.parametrize("only", [set(), {1, 2, 4, 5, 7}, {9, 11}])
def test_it_trains_with_any_parts(small, only):
    parts, have, rows = small(only)
    assert have == only | {1, 7, 32}  # without a loop or an exam there is no run
    out = yours.guarded(parts, have, steps=3, seed=0)
    assert 3 < out["bits"] < 8.1 and len(out["losses"]) == 3 and out["sample"].startswith("def ")
    assert 2 < out["counting"] < 8  # the line to get under, also before lesson 1


def test_the_reference_in_the_place_of_a_part_changes_no_bit(small):
    runs = [yours.guarded(*small(only, "ours")[:2], 3, 0) for only in (set(), {*spine.PARTS})]
    assert len({run["bits"] for run in runs}) == 1


nothing = lambda *_: None
ends = lambda *_: os._exit(0)


def fails(*_):
    raise ValueError("cache is full")


def hangs(*_):
    while True:
        pass


@pytest.mark.parametrize("number, function", [(4, fails), (9, nothing), (8, ends), (4, hangs)])
def test_a_part_that_fails_in_the_run_is_named(small, monkeypatch, number, function):
    name = spine.PARTS[number].functions[-1]
    monkeypatch.setattr(yours, "RUN_S", 4)
    honest = small()[0][name].function
    calls = []

    def later(*args):
        calls.append(1)
        return function(*args) if len(calls) > 9 else honest(*args)

    said = yours.guarded(*small(**{name: later})[:2], steps=9, seed=0)
    assert f"part {number} " in said and f"check.py {number})" in said, said


def test_a_file_is_judged_once_until_it_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(lesson, "OUT", tmp_path)
    path = tmp_path / "ex25.py"
    path.write_text((lesson.COURSE / "solutions/ex25.py").read_text())
    assert yours.judged(25, path) is None
    with monkeypatch.context() as patch:
        patch.setattr(yours.judging, "apart", fails)  # it is not asked again
        assert yours.judged(25, path) is None
    path.write_text(path.read_text().replace("min(1.0, rising", "min(1.1, rising"))
    assert yours.judged(25, path).startswith("python course/check.py 25: rate(")
    path.write_text(
        "def rate(step, steps, warmup):\n"
        "    return min(1, (step + 1) / (warmup or 1), 2 - 2 * step / steps)\n"
        "def best_rate(results):\n    raise NotImplementedError('write best_rate too, then')\n"
    )
    assert yours.judged(25, path) is None  # the run needs no more of it
    assert trial(25, SimpleNamespace(rate=lambda *_: 0.5), yours.reference(25)).startswith("on the")


def test_the_page_escapes_what_a_model_writes(small):
    parts, have, rows = small(set())
    out = yours.guarded(parts, have, 1, 0) | {"sample": "def <script>alert(1)</script>"}
    past = yours.remember(rows, out, lesson.COURSE / "solutions")
    assert yours.remember(rows, out, lesson.COURSE / "solutions") == past  # no new part: one entry
    yours.page(rows, out, past)
    html = (lesson.OUT / "yours.html").read_text(encoding="utf-8")
    assert "<script" not in html and "&lt;script&gt;" in html
    links = re.findall('href="(.*?)"', html)
    assert len(links) == 13 and all((lesson.COURSE / link[3:]).is_file() for link in links)
    assert f"{out['counting']:.3f}" in html


def test_a_refused_part_is_named_and_its_plain_thing_trains(small, monkeypatch, capsys):
    said = {3: "python course/check.py 4: it is off"}
    monkeypatch.setattr(yours, "judged", lambda number, path: said.get(number))
    assert yours.main(["--steps", "1", "--folder", str(lesson.COURSE / "solutions")]) == 1
    shown = capsys.readouterr().out
    words = (f"4 is refused: {said[4]}", spine.PARTS[4].plain, "11 of 12")
    assert all(word in shown for word in words)


def test_a_wrong_option_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as stopped:
        yours.main(["--only", "1,3"])
    assert stopped.value.code == 2 and "1,2,4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", spine.PARTS)
def test_the_trial_accepts_the_reference(number, monkeypatch):
    monkeypatch.setitem(trial.__globals__, "PART_S", 600)  # seconds: the machine may be busy
    assert trial(number, yours.reference(number), yours.reference(number)) is None
