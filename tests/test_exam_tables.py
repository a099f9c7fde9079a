"""Exams by subject and by year, and exams in which the contexts differ and the answer is one."""

import json
import math

import pytest
import torch
from test_choice import ROWS, hub_copy, model, offline, tokenizer  # noqa: F401

from instruments import choice, exams
from instruments.exams import Item, Question


def test_a_sentence_with_a_blank_asks_which_context_makes_the_rest_likelier():
    """As lm_eval's winogrande: the option goes into the blank, and the rest is scored."""
    item = Item("Ann paid Eve as _ had worked.", ("Ann", "Eve"), 1, "Answer:", is_cloze=True)
    asked = exams.with_examples(item, [], "answer")
    assert asked.context == ("Ann paid Eve as Ann", "Ann paid Eve as Eve")
    assert asked.answers == ("had worked.", "had worked.") and asked.gold == 1
    example = Item("The _ broke.", ("cup", "wall"), 0, "Answer:", is_cloze=True)
    asked = exams.with_examples(item, [example], "answer")
    assert asked.context[1] == "The cup broke.\n\nAnn paid Eve as Eve"
    shown = exams.with_examples(item, [], "letter")
    assert shown.context == "Ann paid Eve as _ had worked.\nA. Ann\nB. Eve\nAnswer:"
    assert shown.answers == ("A", "B")


def test_the_rest_is_scored_after_each_context(model, tokenizer):  # noqa: F811
    """One context at a time, from the logits."""
    texts = [("class Ann", "class Eve"), ("def f", "import g")]
    questions = [Question(own, ("(x): return x",) * 2, 0) for own in texts]
    figures, nats, cut = choice.score(questions, model, tokenizer, 3, letters=False)
    assert list(figures) == ["sum"] and cut == 0
    for own, found in zip(texts, nats):
        for context, value in zip(own, found):
            before, answer = choice.encode_pair(tokenizer, context, "(x): return x")
            row = torch.tensor([before + answer])
            logp = model(row[:, :-1]).detach().log_softmax(-1)[0]
            expected = sum(float(logp[-k, row[0, -k]]) for k in range(1, len(answer) + 1))
            assert value == pytest.approx(expected, abs=1e-4)
    picks = [0 if a >= b else 1 for a, b in nats]
    assert figures["sum"]["picks"] == picks and figures["sum"]["hits"] == picks.count(0)


def test_a_row_tells_its_subject_and_its_year():
    for row, config, tags in (
        (dict(subject="law"), None, dict(subject="law")),
        (dict(Subject="law"), "PT_BR", dict(subject="law")),
        (dict(category="maths", question="?"), None, dict(subject="maths")),
        (dict(id="law/test/3"), None, dict(subject="law")),
        (dict(info=dict(subject="Biology", grade=12)), None, dict(subject="Biology")),
        (dict(label="A"), "2023", dict(year="2023")),
        (dict(exam_id="2016-20", exam_year="2016"), None, dict(year="2016")),
        (
            dict(exam_id="2010-01", question_type="ETHICS"),
            None,
            dict(subject="ETHICS", year="2010"),
        ),
        (dict(year=2018, subject="x"), None, dict(subject="x", year="2018")),
        (dict(id="1", exam_id="2", info=5), "all", {}),
    ):
        assert exams.tags_of(row, config) == tags, row


def test_the_exams_rows_have_their_tags(offline, tmp_path):  # noqa: F811
    folder = hub_copy(tmp_path / "copy", "enem")
    asked = exams.ask(f"enem={folder}", "letter", 0, 0, None, 64)
    assert [q.tags for q in asked] == [dict(year=y) for y in ("2022", "2023", "2024")]
    folder = hub_copy(tmp_path / "pro", "mmlu_pro")
    (question,) = exams.ask(f"mmlu_pro={folder}", "letter", 0, 0, None, 64)
    assert question.tags == dict(subject="maths") and len(question.answers) == 9
    assert set(ROWS) >= {"openbookqa", "winogrande", "mmlu_pro"}


def questions_of(n: int) -> tuple[list[Question], list[int]]:
    """Of three subjects and two years, some without, with 2 to 5 options; and what was picked."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda most: int(torch.randint(most, (), generator=generator))
    questions, picks = [], []
    for i in range(n):
        k, tags = 2 + draw(4), dict(subject=("law", "maths", "art")[draw(3)])
        if i % 5:
            tags["year"] = ("2022", "2023")[draw(2)]
        questions.append(Question("q", tuple("ABCDE"[:k]), draw(k), tags))
        picks.append(draw(k))
    return questions, picks


def test_the_tables_sums_are_those_of_all_questions():
    questions, picks = questions_of(200)
    groups = choice.by_tag(questions, picks)
    assert list(groups) == ["subject", "year"] and list(groups["year"]) == ["2022", "2023", "none"]
    hits = sum(p == q.gold for p, q in zip(picks, questions))
    for tag, rows in groups.items():
        assert sum(f["n"] for f in rows.values()) == 200
        assert sum(f["hits"] for f in rows.values()) == hits
        for name, f in rows.items():
            own = [i for i, q in enumerate(questions) if q.tags.get(tag, "none") == name]
            right = sum(picks[i] == questions[i].gold for i in own)
            expected = sum(1 / len(questions[i].answers) for i in own)
            spread = sum(
                (1 - 1 / len(q.answers)) / len(q.answers) for q in (questions[i] for i in own)
            )
            assert (f["n"], f["hits"]) == (len(own), right)
            assert f["z"] == pytest.approx((right - expected) / math.sqrt(spread))
    lines = list(choice.group_lines(groups))
    assert sum(line.split()[:3] == ["all", "200", str(hits)] for line in lines) == 2
    assert choice.by_tag([Question("q", ("a", "b"), 0, dict(subject="law"))] * 3, [0] * 3) == {}


def test_the_command_prints_the_tables_and_keeps_them(model, tokenizer, offline, tmp_path, capsys):  # noqa: F811, E501
    folder = hub_copy(tmp_path / "copy", "mmlu")
    row = ROWS["mmlu"][0][0]
    rows = [row | dict(subject=s, question=f"{s} {i}?") for i, s in enumerate("abcab")]
    (folder / "all-test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = choice.ChoiceConfig(task=(f"mmlu={folder}",))
    (record,) = choice.run(config, model, tokenizer, None)
    out = capsys.readouterr().out
    assert list(record["by"]["subject"]) == ["a", "b", "c"] and "picks" not in record
    assert record["by"]["subject"]["a"]["n"] == 2 and "subject  questions  right" in out
    assert record["chance_sd"] == pytest.approx(math.sqrt(0.25 * 0.75 / 5))
    json.dumps(record)
