"""instruments/exams/harness.py and tasks/: public exams, from a Hub that is made here, scored by
our model through lm_eval; and by lm_eval's own model of the exported folder."""

import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import look, read_lines

import eval as evaluate
import export
from config import UsageError
from instruments.exams import choice
from machinery.errors import DataError
from machinery.trained import EvalConfig

pytest.importorskip("lm_eval")
OURS = Path(evaluate.__file__).parent / "instruments" / "exams" / "tasks"
WORDS = "red green blue black white brown gray pink café 日本 import def self".split()


def keyed(i: int, **more) -> dict:
    texts = [WORDS[(i + 3 * k) % 13] for k in range(3 + i % 2)]
    return dict(
        choices=dict(text=texts, label=list("ABCD"[: len(texts)])), answerKey="ABC"[i % 3], **more
    )


def enem(i: int) -> dict:
    texts = [WORDS[(i + 2 * k) % 13] for k in range(5)]
    label = "Anulado" if i == 1 else "ABCDE"[i % 5]
    question = f"Veja [[placeholder]] e [[placeholder]]. Qual {i}? "
    return dict(question=question, alternatives=texts, label=label, description=["1", "[0] 2"])


def exams(i: int) -> dict:
    info = dict(language="Polish" if i == 2 else "Portuguese")
    stem = dict(stem=f"O quê {i}?", choices=dict(text=["u", "v"], label=["A", "B"]))
    return dict(question=stem, answerKey="@AAB"[i % 4], info=info)


def m3exam(i: int) -> dict:
    """2 has an option that is a picture, 3 no right one."""
    texts = ("A casa", "red", "green", "blue", "" if i == 2 else "E. coli")
    form = ("({}) {}", "{}. {}", "{}) {}")[i % 3]
    return dict(
        question_text=f"Onde {i}?",
        background="" if i else "Um texto.",
        answer_text="Anulada" if i == 3 else "eBCDA"[i % 5],
        options=[*map(form.format, "ABCDE" if i else "abcde", texts)],
    )


ROWS = {  # repository -> the i-th row, by its set's schema
    "allenai/ai2_arc": lambda i: keyed(i, question=f"Why {i} of {WORDS[i]}?"),
    "baber/piqa": lambda i: dict(goal=f"Open {i}", sol1=WORDS[i], sol2=f"pull {i}", label=i % 2),
    "Rowan/hellaswag": lambda i: dict(
        activity_label="Baking",
        ctx_a=f"He bakes {i}.",
        ctx_b="he",
        label=str(i % 4),
        endings=[f"eats [title] {i}", "runs [x] off  now", WORDS[i], f"{WORDS[i]} {i}"],
    ),
    "allenai/winogrande": lambda i: dict(
        sentence=f"Ann paid Eve as _ had {WORDS[i]}.",
        option1="Ann",
        option2="Eve",
        answer="12"[i % 2],
    ),
    "allenai/openbookqa": lambda i: keyed(i, question_stem=f"A {WORDS[i]} dog is", id=str(i)),
    "maritaca-ai/enem": enem,
    "eduagarcia/oab_exams": lambda i: keyed(i, question=f"Quem {i}?"),
    "EleutherAI/lambada_openai": lambda i: dict(text=f"Ann had {WORDS[i]}"),
    "eduagarcia/enem_challenge": lambda i: keyed(i, question=f"Qual {i}?"),
    "mhardalov/exams": exams,
    "chiayewken/m3exam": m3exam,
}
TASKS = "arc_easy piqa hellaswag winogrande openbookqa enem oab".split()


@pytest.fixture(scope="module")
def hub():
    """Ten rows of each set instead of the Hub; and an index of its tasks alone, soon made."""
    import datasets
    import lm_eval

    from instruments.exams import harness

    theirs = Path(lm_eval.__file__).parent / "tasks"

    def load(path, name=None, **_):
        rows = datasets.Dataset.from_list([ROWS[path](i) for i in range(10)])
        return datasets.DatasetDict(train=rows, validation=rows, test=rows, dev=rows)

    @lru_cache
    def manager():
        folders = [theirs / n for n in ("arc", "piqa", "hellaswag", "winogrande", "openbookqa")]
        folders += [theirs / "lambada", OURS]
        return harness.TaskManager(include_defaults=False, include_path=list(map(str, folders)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load)
        patch.setattr(harness, "manager", manager)
        datasets.disable_progress_bars()
        yield harness
        datasets.enable_progress_bars()


@pytest.mark.slow
def test_the_figures_are_those_of_lm_evals_own_model(hub, trained_run, tmp_path, monkeypatch):
    """Of the exported folder, in float64: each answer's nats, and each accuracy. (In fp32 they
    differ by 1e-5 nats, as sums are made in another order.)"""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path / "folder"
    assert export.main([str(trained_run), "--out", str(folder)]) == 0
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    loaded = evaluate.load_model(EvalConfig(str(trained_run), device="cpu", dtype="fp32"))
    model = loaded.model
    tokenizer = loaded.tokenizer
    how = dict(dtype="float64", softmax_dtype="float64", device="cpu", batch_size=4)
    peer = HFLM(str(folder), trust_remote_code=True, **how)
    exam = dict(tasks=TASKS, num_fewshot=1, task_manager=hub.manager())
    found = lm_eval.simple_evaluate(peer, **exam)
    model.double().compute_dtype = torch.float64
    for name in TASKS:
        theirs = [s for t, own in found["samples"].items() if t.split("::")[0] == name for s in own]
        ours = choice.score(list(hub.questions(name, 1, 0)), model, tokenizer, 8)
        assert len(ours) == len(theirs) == (27 if name == "enem" else 10)
        for (_, nats), sample in zip(ours, theirs):
            expected = [x for x, _ in sample["filtered_resps"]]
            assert nats == pytest.approx(expected, rel=0, abs=1e-6)
        golds = [q.gold for q, _ in ours]
        for norm, metric in (("sum", "acc"), ("per character", "acc_norm")):
            picks = choice.picks_of(ours, norm)
            hits = sum(sample.get(metric, math.nan) for sample in theirs)
            assert math.isnan(hits) or hits == sum(p == g for p, g in zip(picks, golds))


def test_the_command_scores_lm_evals_tasks_and_ours(hub, own_run, monkeypatch, capsys):
    """Accuracy by the nats, and by hand; a letter is told, answers are normalized."""
    names = ("winogrande", "piqa", "enem")
    seen = {}
    honest = choice.report
    monkeypatch.setattr(choice, "report", lambda own, shots: seen.update(own) or honest(own, shots))
    look(capsys, "choice", own_run, "--task", *names, "--device", "cpu")
    records = read_lines(own_run / "eval.jsonl")
    tasks = [("winogrande", "sum"), ("piqa", "sum"), ("piqa", "per character"), ("enem", "sum")]
    assert [(r["task"], r["norm"]) for r in records] == tasks
    golds = [[q.gold for q, _ in seen[name]] for name in names]
    assert golds[:2] == [[0, 1] * 5] * 2
    assert golds[2] == [0, 2, 3, 4, 0, 1, 2, 3, 4] * 3  # without the annulled
    for record, name in zip((records[0], records[1], records[3]), names):
        assert record["hits"] == sum(nats.index(max(nats)) == q.gold for q, nats in seen[name])
    assert records[3]["chance"] == pytest.approx(1 / 5) and records[3]["n"] == 27


def asked(hub, name, shots=0, limit=0) -> list:
    """The questions, and the texts that the first answer of each is scored by."""
    return [(q, *q.given[0]) for q in hub.questions(name, shots, limit)]


def test_questions_are_written_out_as_the_sets_are(hub):
    (question, context, answer), *_ = asked(hub, "enem")
    assert context == (
        "Pergunta: Veja 1 e [0] 2. Qual 0?\n A. red\n B. blue\n C. white\n D. gray\n E. café\n"
        "Resposta:"
    )
    assert question.answers == tuple("ABCDE") and question.gold == 0 and answer == " A"
    (question, *_), *_ = asked(hub, "winogrande")
    assert question.given == tuple((f"Ann paid Eve as {x}", " had red.") for x in ("Ann", "Eve"))
    assert question.answers == ("had red.",) * 2 and question.gold == 0
    (question, context, _), *_ = asked(hub, "oab", shots=1)
    assert context.startswith("Pergunta: Quem ") and context.count("Quem") == 2
    exams = asked(hub, "exams_pt")
    assert [(context, q.gold) for q, context, _ in exams[:2]] == [
        ("Pergunta: O quê 1?\n A. u\n B. v\nResposta:", 0),
        ("Pergunta: O quê 3?\n A. u\n B. v\nResposta:", 1),
    ]
    assert len(asked(hub, "enem_challenge")) == 10
    exams = asked(hub, "m3exam_pt")
    options = "\n A. A casa\n B. red\n C. green\n D. blue\n E. E. coli\nResposta:"
    assert exams[0][1] == "Pergunta: Um texto.\nOnde 0?" + options
    assert exams[1][1] == "Pergunta: Onde 1?" + options
    assert [q.gold for q, *_ in exams] == [4, 1, 0, 4, 1, 2, 3, 0]  # without 2 and 3


def test_a_limit_draws_from_all_questions_the_same_each_time(hub):
    """Sets are sorted by subject and year: the first questions are of one."""
    some, again, every = ([c for _, c, _ in asked(hub, "oab", 0, n)] for n in (4, 4, 0))
    assert len(some) == 4 and some == again
    assert some == sorted(some, key=every.index) and some != every[:4]
    found = Counter(context for _, context, _ in asked(hub, "enem", 0, 12))
    assert max(found.values()) == 3  # of a group, the members together


def test_what_cannot_be_asked_is_one_sentence(hub, monkeypatch):
    for name, said in (("lambada_openai", "loglikelihood"), ("piqqa", "piqa")):
        with pytest.raises(UsageError, match=said):
            hub.open_tasks(name)

    no_hub = Mock(side_effect=ConnectionError("no route\nand more"))
    monkeypatch.setattr("datasets.load_dataset", no_hub)
    with pytest.raises(DataError, match="piqa.* no route"):
        hub.open_tasks("piqa")
