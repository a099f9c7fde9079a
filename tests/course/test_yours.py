"""course/yours.py: the trainer of a student's own parts runs, and says which part is at fault."""

import io
import os
import re
from types import SimpleNamespace

import lesson
import own_page
import pytest
import spine
import yours
from test_page import ask
from trial import trial

SOLUTIONS = lesson.COURSE / "solutions"


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A small text and exam. -> a function: yours by number, functions -> parts, have, rows"""
    text = lesson.bytes_of_stdlib(31_025)
    monkeypatch.setattr(lesson, "exam", lambda: (text[:30_000], text[30_000:]))
    monkeypatch.setattr(lesson, "OUT", tmp_path)
    monkeypatch.setattr(spine, "MERGES", 20)
    monkeypatch.setattr(spine, "CHAT_STEPS", 2)
    monkeypatch.setattr(yours, "judged", lambda number, path: None)

    def collected(only=frozenset(spine.PARTS), fill="plain", **put):
        parts, rows = yours.collect(SOLUTIONS, only, fill)
        for name, function in put.items():
            parts[name].function = function
        have = {spine.PARTS[row["number"]].name for row in rows if not row["plain"]}
        return parts, have, rows

    return collected


def run(parts, have, rows, steps=3) -> dict | str:
    """Of what `small` gives."""
    return yours.guarded(parts, have, steps, 0, SOLUTIONS)


@pytest.mark.parametrize("only", [set(), {1, 2, 4, 5, 7}, {9, 11}])
def test_it_trains_with_any_parts(small, only):
    parts, have, rows = small(only)
    always = {"counting", "loop", "evaluation"}  # without a loop or an exam there is no run
    assert have == always | {spine.PARTS[number].name for number in only}
    out = run(parts, have, rows)
    assert 3 < out["bits"] < 8.1 and out["steps"] == 3 and out["sample"].startswith("def ")
    assert 2 < out["counting"] < 8  # the line to get under, also before lesson 1


def test_the_reference_in_the_place_of_a_part_changes_no_bit(small):
    runs = [run(*small(only, "ours")) for only in (set(), {*spine.PARTS})]
    assert runs[0]["bits"] == runs[1]["bits"]


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
    monkeypatch.setattr(spine, "PART_S", 2)
    honest = small()[0][name].function
    calls = []

    def later(*args):
        calls.append(1)
        return function(*args) if len(calls) > 9 else honest(*args)

    said = run(*small(**{name: later}), 9)
    assert f"part {number} " in said and f"check.py {number})" in said, said


def test_a_file_is_judged_once_until_it_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(lesson, "OUT", tmp_path)
    path = tmp_path / "ex08.py"
    right = (SOLUTIONS / "ex08.py").read_text()
    path.write_text(right)
    assert yours.judged(8, path) is None
    with monkeypatch.context() as patch:
        patch.setattr(yours.judging, "apart", fails)  # it is not asked again
        assert yours.judged(8, path) is None
    path.write_text(right + "\n\ndef rotate(x, positions, speeds):\n    return x\n")
    assert "keep one" in yours.judged(8, path)
    path.write_text(right + "\n\nturn = rotate\nrotate = lambda x, p, s: turn(x, -p, s)\n")
    assert yours.judged(8, path).startswith("python course/check.py 8: ")
    later = "def stretch(*_, **__):\n    raise NotImplementedError('write stretch too, then')\n\n\n"
    path.write_text(right.replace("def stretch(", later + "def unused("))
    assert yours.judged(8, path) is None  # the run needs no more of it
    wrong = SimpleNamespace(rotate=lambda x, *_: x)
    assert trial(8, wrong, yours.reference(8)).startswith("on the")


def test_a_long_run_has_more_time_and_a_timeout_blames_nobody(small, monkeypatch):
    monkeypatch.setattr(yours, "RUN_S", 0.5)
    monkeypatch.setattr(yours, "STEPS", 10**6)
    said = run(*small(), 10**5)
    assert "timeout" in said and "check.py" not in said and "part" not in said, said
    monkeypatch.setattr(yours, "STEPS", 1)
    assert run(*small(), 30)["steps"] == 30  # of 15 seconds


def test_the_last_model_is_kept_and_writes_and_answers(small, monkeypatch, capsys):
    folder = ["--folder", str(SOLUTIONS)]
    assert yours.main(["--prompt", "x", *folder]) == 2  # none yet
    assert yours.main(["--only", "1,4,9,11", "--steps", "3", *folder]) == 0
    assert spine.last()["have"] >= {"attention", "tokenizer", "packing"}
    capsys.readouterr()
    writes = []
    for only in ("1,4,6", "1,4"):  # by exercise 6 at once, without it the likeliest
        assert yours.main(["--prompt", "class A", "--only", only, *folder]) == 0
        writes.append(capsys.readouterr().out.split("\n", 1)[1])
    assert all(text.startswith("class A") for text in writes) and writes[0] != writes[1]
    monkeypatch.setattr(yours.sys, "stdin", io.StringIO("Hello\n\nWho are you?\n"))
    assert yours.main(["--chat", *folder]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n  ") == 4 and "ex05" in shown  # no GPT, so no page


@pytest.mark.parametrize("only", [{*spine.PARTS}, {5}])
def test_the_model_is_a_page_that_computes_what_the_parts_compute(small, monkeypatch, only):
    """In node, where it opens only if its ids and numbers are those of its model."""
    parts, have, _ = small(only)
    spine.run(parts, have, 1, 0)
    model = spine.chat(parts, have | {"chat"}, spine.last(), 0)
    for weight in model.weights.values():  # behind which nothing hides
        weight.data.normal_(0, 0.1)
    assert own_page.write(model, "Counter", "mine") is None
    assert ask(lesson.OUT / "yours_chat.html") == [{}]
    monkeypatch.setattr(model, "scores", lambda ids: 1.0)
    assert "no page" in own_page.write(model, "Counter", "mine")
    monkeypatch.setattr(model, "answer", lambda *_: "I would call it list.")
    assert model.name(0) == "list"


def test_a_run_keeps_its_number_if_it_cannot_write_and_its_page_escapes(small, capsys):
    parts, have, rows = small(generate=fails)
    out = run(parts, have, rows, 2)
    assert 3 < out["bits"] < 8.1 and out["failed"][0] == 6
    yours.show(rows, out, 0.0)
    assert "part 6 failed: ValueError: cache is full" in " ".join(capsys.readouterr().out.split())
    out["sample"] = "def <script>alert(1)</script>"
    past = yours.remember(rows, out, SOLUTIONS)
    assert yours.remember(rows, out, SOLUTIONS) == past  # no new part: one entry
    yours.page(rows, out, past)
    html = (lesson.OUT / "yours.html").read_text(encoding="utf-8")
    assert "<script" not in html and "&lt;script&gt;" in html and f"{out['counting']:.3f}" in html
    links = [lesson.COURSE / link[3:] for link in re.findall('href="(.*?)"', html)]
    assert len(links) == 1 + len(spine.PARTS) and all(link.is_file() for link in links)


def test_the_picture_of_the_page_is_the_model_that_is_trained():
    static = (lesson.COURSE / "figures/gpt.svg").read_text(encoding="utf-8")
    assert static == yours.drawing(set(), 513)
    lit = [yours.drawing({spec.name}, 513).count('class="lit"') for spec in spine.PARTS.values()]
    assert 'class="lit"' not in static and sum(lit) == 18 and min(lit) == 1  # 5 are the GPT's


def test_a_refused_part_is_named_and_its_plain_thing_trains(small, monkeypatch, capsys):
    said = {4: "python course/check.py 4: it is off"}
    monkeypatch.setattr(yours, "judged", lambda number, path: said.get(number))
    assert yours.main(["--steps", "1", "--folder", str(SOLUTIONS)]) == 1
    shown = capsys.readouterr().out
    words = (f"4 is refused: {said[4]}", spine.PARTS[4].plain, "13 of 14")
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
