"""The tournament on prompts that no human has continued: the project's own 40, a table by domain,
ties, and other criteria for the judge."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL
from test_tournament import judge_server

import eval as evaluate
import train
from config import UsageError
from instruments import judge, tournament
from tokenizer import Tokenizer

OWN = ROOT / "instruments" / "prompts.jsonl"


def test_the_projects_own_prompts_are_forty_in_seven_domains_and_two_languages():
    rows = tournament.read_prompts(str(OWN))
    domains = Counter(row["domain"] for row in rows)
    assert len(rows) == len({row["prompt"] for row in rows}) == 40 and len(domains) == 7
    assert min(domains.values()) >= 4
    for domain in domains:
        languages = Counter(row["language"] for row in rows if row["domain"] == domain)
        assert languages["en"] == languages["pt"], domain
    assert all(row["prompt"] == row["prompt"].strip() and not row.get("human") for row in rows)


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("prompts") / "run"
    folders = ["--data_dir", str(small_data), "--run_dir", str(run_dir)]
    train.main(["tiny", *SMALL, *folders, *"--save_every 4 --keep 9 --eval_every 0".split()])
    return run_dir


def hold(run_dir, *more) -> dict:
    argv = ["tournament", "--run_dir", run_dir, "--device", "cpu", "--max_new_tokens", 12, *more]
    assert evaluate.main([str(a) for a in argv]) == 0
    return json.loads((run_dir / "tournament.json").read_text())


def write(path, rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


ROWS = [
    dict(prompt="def f(x):", domain="code", language="py"),
    dict(prompt="class A", domain="code", language="py"),
    dict(prompt="import os, sys ", domain="code", language="py"),
    dict(prompt="Once upon a time", domain="story", language="en"),
    dict(prompt="O céu é", domain="story", language="pt"),
]


def test_prompts_without_a_human_text_are_taken_whole(trained, small_data, tmp_path, capsys):
    report = hold(trained, "--prompt_file", write(tmp_path / "p.jsonl", ROWS))
    said = capsys.readouterr().out
    assert report["prompts"] == [row["prompt"].rstrip() for row in ROWS]
    assert {row["name"] for row in report["players"]} == {"step 4", "step 8", "loop"}
    assert "no human takes part" in said
    assert not any("human" in doubt for doubt in report["doubts"])
    tokenizer = Tokenizer.load(small_data / "tokenizer.json")
    for prompt, loop in zip(report["prompts"], report["completions"]["loop"]):
        assert tokenizer.decode(tokenizer.encode(prompt)[-8:]) in loop
    assert all(report["completions"]["step 4"])
    groups = report["groups"]
    assert {name: g["prompts"] for name, g in groups["domain"].items()} == {"code": 3, "story": 2}
    assert {name: g["prompts"] for name, g in groups["language"].items()} == dict(py=3, en=1, pt=1)
    for own in groups.values():  # each match gives one win: on average a player wins half of them
        for facts in own.values():
            assert sum(facts["won"].values()) == pytest.approx(3 / 2)
    assert "share of matches won by domain (prompts)" in said and "code (3)  story (2)" in said


def test_a_human_text_in_each_line_plays(trained, tmp_path):
    rows = [row | dict(human=" and so on, as a human wrote it") for row in ROWS]
    report = hold(trained, "--prompt_file", write(tmp_path / "p.jsonl", rows))
    assert "human text" in {row["name"] for row in report["players"]}
    assert report["completions"]["human text"][0].startswith(" and so on")
    rows[2].pop("human")
    report = hold(trained, "--prompt_file", write(tmp_path / "p.jsonl", rows))
    assert "human text" not in {row["name"] for row in report["players"]}


def test_texts_on_the_command_line_may_be_whole_prompts(trained):
    report = hold(trained, "--prompts", "def f", "class", "--no_human")
    assert report["prompts"] == ["def f", "class"] and report["groups"] == {}
    with pytest.raises(UsageError, match="--no_human needs prompts"):
        hold(trained, "--no_human")


def test_the_share_by_domain_is_that_of_the_wins():
    """By a loop over the matches."""
    rng = np.random.default_rng(0)
    wins = judge.compare([rng.integers(0, 3, 9).astype(float) for _ in range(4)])
    values = ["a", "b", "a", "c", "b", "b", "a", "a", "b"]
    players = [tournament.Player(name, []) for name in "wxyz"]
    found = tournament.by_group(players, wins, values)
    for value, facts in found.items():
        for i, name in enumerate("wxyz"):
            own = [
                wins[n, i, j] for n in range(9) if values[n] == value for j in range(4) if j != i
            ]
            assert facts["won"][name] == pytest.approx(sum(own) / len(own))
    lines = tournament.group_table("domain", found)
    assert lines[2].split() == ["a", "(4)", "b", "(4)", "c", "(1)"] and len(lines) == 7


def test_draws_do_not_depend_on_the_order_of_the_prompts_lengths(trained):
    """A prompt is continued as itself, wherever it stands; those of one length as before."""

    class Echo:
        """Continues with the first token of the prompt."""

        class config:
            bos_id, seq_len = 0, 64

        cos = torch.zeros(1)

        def generate(self, idx, n, *_, stop_id=0):
            return torch.cat([idx, idx[:, 1:2].expand(-1, n)], 1)

    options = tournament.TournamentConfig(max_new_tokens=3)
    prompts = [[5], [7, 8, 9], [6], [4, 1], [3, 3, 3]]
    found = tournament.continue_all(Echo(), prompts, options)
    assert found == [[5] * 3, [7] * 3, [6] * 3, [4] * 3, [3] * 3]
    with pytest.raises(UsageError, match="prompts of 62 tokens .* need 66 positions, .* has 64"):
        tournament.continue_all(Echo(), [[1] * 62], options)


def test_a_tie_is_an_answer():
    for text, answer in (
        ("TIE", "tie"),
        ("Answer: tie.", "tie"),
        ("It is a tie", "tie"),
        ("A tie", "tie"),
        ("A", "A"),
        ("B.", "B"),
        ("A or tie", "unparsable"),
        ("<think>TIE</think>B", "B"),
        ("tied", "unparsable"),
    ):
        assert judge.parse(text) == answer, text


def test_the_judge_goes_by_other_criteria_and_a_tie_is_half_a_win(trained, tmp_path):
    pytest.importorskip("openai")
    seen = []

    def says_tie(question, number):
        seen.append(question)
        return "TIE"

    path = write(tmp_path / "p.jsonl", ROWS[:2])
    with judge_server(says_tie) as (url, _):
        server = ["--judge_url", url, "--judge_model", "scripted"]
        report = hold(trained, *server, "--prompt_file", path, "--criteria", "Which one is longer?")
    assert all("two continuations of it. Which one is longer?\n" in text for text in seen)
    assert report["judge_answers"] == {"A": 0, "B": 0, "tie": 24, "unparsable": 0}
    assert all(row["rating"] == pytest.approx(1000) for row in report["players"])
    with pytest.raises(UsageError, match="--criteria are for a judge that reads them"):
        hold(trained, "--criteria", "the longer one")


def test_a_bad_file_of_prompts_is_a_sentence(trained, tmp_path):
    for content, words in (
        ("", "has no line"),
        ('{"prompt": "a"}\n{"prompt": ""}\n', "line 2 is not"),
        ('{"prompt": 5}', "line 1 is not"),
        ("[1]", "line 1 is not"),
        ('{"prompt": "a", "domain": 3}', "line 1 is not"),
        ("{", "line 1 is not"),
    ):
        path = tmp_path / "p.jsonl"
        path.write_text(content)
        with pytest.raises(UsageError, match=words):
            tournament.read_prompts(str(path))
    with pytest.raises(UsageError, match="none.jsonl cannot be read"):
        tournament.read_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="give one of them"):
        hold(trained, "--prompts", "x", "--prompt_file", str(OWN))
