"""instruments/exams/tournament.py and judge.py: who plays, who decides, and the arithmetic."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_helpers import random_model
from conftest import read_json
from table import read_table

import eval as eval_program
from config import UsageError
from instruments.exams import judge, tournament
from machinery import checkpoint
from machinery.shards import Manifest
from tokenizer import Tokenizer


def test_the_ratings_make_the_wins_as_expected_as_they_were():
    """The condition of the maximum: each player's expected wins are its wins. Even where one player
    has won everything, where plain iterations are slow; and with ties."""
    ties = judge.compare([*np.random.default_rng(0).normal(size=(6, 40)).round()]).sum(0)
    for wins in (20 * np.triu(np.ones((6, 6)), 1), ties):
        r = judge.bradley_terry(wins)
        virtual = (wins + 0.5) * (1 - np.eye(6))
        chance = 1 / (1 + 10 ** ((r[None] - r[:, None]) / 400))  # of i against j
        expected = ((virtual + virtual.T) * chance * (1 - np.eye(6))).sum(1)
        assert expected == pytest.approx(virtual.sum(1), rel=1e-4)
        assert r.mean() == pytest.approx(1000)


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    skill = np.array([0.0, 0.5, 1.0])
    # P(i beats j) for normal noise; the truth is the rating of very many prompts
    wins = lambda n: judge.compare([*(skill[:, None] + rng.normal(size=(3, n)))])
    truth = judge.bradley_terry(wins(50_000).sum(0))
    inside = []
    for trial in range(100):
        low, high = judge.interval(wins(60), resamples=200, seed=trial)
        inside.append((low <= truth) & (truth <= high))
    assert 0.88 <= np.mean(inside) <= 0.99


def test_novel_mean_is_the_mean_log_p_of_the_new_tokens():
    """Of those that end a bigram which was not there, in the prompt or before in the text. With
    nothing new, or nothing at all, a text gets the last place."""
    model = random_model(vocab_size=50)
    prompts = [[5, 6, 7], [5, 6, 7], [8, 8, 8], [9]]
    completions = [[8, 5, 6, 9, 8, 5], [1], [8, 8], []]
    got = judge.novel_mean(model, prompts, completions)
    for found, prompt, completion, new in zip(got, prompts, completions, ([3, 4, 6, 7], [3])):
        text = [0, *prompt, *completion]
        log_p = model(torch.tensor([text]))[0].log_softmax(-1)[range(len(text) - 1), text[1:]]
        assert found == pytest.approx(log_p[new].mean().item(), abs=1e-4)
    assert [*got[2:]] == [-np.inf] * 2
    wins = judge.compare([got[:1], got[2:3], got[3:]])[0]
    assert wins.tolist() == [[0.5, 1, 1], [0, 0.5, 0.5], [0, 0.5, 0.5]]


RANKED = """
best first: human text, loop, and others
h b a l => trusted
b h a l => trusted
b a h l => human text in place 3 of 4
h l b a => loop in place 2 of 4
h b l a c => loop in place 3 of 5
"""


def test_a_judge_is_doubted_for_the_loop_and_the_human():
    for names, (doubt,) in read_table(RANKED):
        names = [dict(h=tournament.HUMAN, l=tournament.LOOP).get(x, x) for x in names.split()]
        table = [dict(name=name, rating=1000 - i) for i, name in enumerate(names)]
        found = tournament.why_untrusted(table)
        assert doubt in (found or ["trusted"])[0] and len(found) < 2
    tied = tournament.why_untrusted([row | dict(rating=1000) for row in table])
    assert "loop in place 1 of 5" in tied[0]


OPTIONS = "--device cpu --prompt_tokens 8 --max_new_tokens 16".split()


def hold(run_dir: Path, *more) -> dict:
    """`eval.py tournament`, in this process; what it wrote to tournament.json."""
    argv = ["tournament", "--run_dir", run_dir, *OPTIONS, "--n_prompts", 12, *more]
    assert eval_program.main([str(a) for a in argv]) == 0
    return read_json(run_dir / "tournament.json")


def players(report: dict) -> set[str]:
    """The names, a checkpoint's without its run."""
    return {Path(row["name"]).name for row in report["players"]}


def test_the_judge_does_not_play_and_the_controls_always_do(own_run, tmp_path, capsys):
    """And the same seed is the same tournament."""
    report = hold(own_run)
    said = capsys.readouterr().out
    assert players(report) == {"step_00000004", "step_00000008", "human text", "loop"}
    assert report["judge"] == str(own_run / "checkpoints" / "step_00000012")
    for row in report["players"]:
        assert re.search(rf"^{row['name']} +\d+ +\d+ \.\. \d+$", said, re.M), said
    assert {*map(len, report["completions"].values())} == {12}
    for prompt, loop in zip(report["prompts"], report["completions"]["loop"], strict=True):
        assert loop == (prompt[-24:] * 64)[:64]
    assert report == hold(own_run)

    first, _, newest = sorted((own_run / "checkpoints").glob("step_*"))
    other = hold(tmp_path, "--judge", own_run, "--players", newest, first, "--seed", 1)
    assert players(other) == {"step_00000004", "human text", "loop"}
    assert other["prompts"] != report["prompts"]


def test_prompts_and_human_text_are_held_out_text(own_run, small_data):
    manifest = Manifest.load(small_data)
    tokenizer = Tokenizer.load(small_data / "tokenizer.json")
    rows = [manifest.row("val", 0, i) for i in range(manifest.rows("val"))]
    held_out = [tokenizer.decode(i for i in row if i != manifest.bos_id) for row in rows]
    many = hold(own_run, "--n_prompts", 100)
    rests = many["completions"]["human text"]
    assert any(rest.startswith(" ") for rest in rests), "a space before a word is the word's"
    for prompt, rest in zip(many["prompts"], rests):
        assert any(prompt + rest in text for text in held_out)


def test_who_cannot_read_the_texts_is_told_before_anybody_writes(own_run, monkeypatch):
    """A judge with shorter rows than the players, with another tokenizer, or tuned."""
    first, newest = (own_run / "checkpoints" / f"step_{n:08d}" for n in (4, 12))
    good = checkpoint.read_trainer(newest)
    shown = {first: good}
    monkeypatch.setattr(tournament.checkpoint, "read_trainer", lambda path: shown[path])
    config = tournament.TournamentConfig(
        str(own_run), (str(first),), prompt_tokens=30, max_new_tokens=16
    )
    for part, change, words in (
        ("model", replace(good.model, seq_len=40), "40"),
        ("identity", good.identity | dict(tokenizer_sha256="0"), "tokenizer"),
        ("identity", good.identity | dict(conversations=True), "tuned"),
    ):
        shown[newest] = replace(good, **{part: change})
        with pytest.raises(UsageError, match=f"(?=.*{newest}).*{words}"):
            tournament.play(config, lambda _: pytest.fail("loaded"))
