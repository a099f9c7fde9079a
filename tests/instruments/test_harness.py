"""instruments/exams/harness.py and tasks/: public exams, from a Hub that is made here, scored by
our model through lm_eval; and by lm_eval's own model of the exported folder."""

import json
import math
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import SMALL

import eval as evaluate
import export
import train
from config import UsageError
from machinery.errors import DataError

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
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
    info = dict(subject="Biology", language="Polish" if i == 2 else "Portuguese")
    stem = dict(stem=f"O quê {i}?", choices=dict(text=["u", "v"], label=["A", "B"]))
    return dict(question=stem, answerKey="@AAB"[i % 4], info=info)


def m3exam(i: int) -> dict:
    options = ["(A)", "(B)"] if i == 0 else ["(A) sim", "(B) não"]
    background = "" if i == 1 else "Um texto."
    return dict(background=background, question_text="Qual?", options=options, answer_text="B")


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
    "eduagarcia/oab_exams": lambda i: keyed(
        i,
        question=f"Quem {i}?",
        exam_year=str(2010 + i // 3),
        question_type=("ETHICS", "TAX")[i % 2],
    ),
    "EleutherAI/lambada_openai": lambda i: dict(text=f"Ann had {WORDS[i]}"),
    "eduagarcia/enem_challenge": lambda i: keyed(i, question=f"Qual {i}?"),
    "mhardalov/exams": exams,
    "chiayewken/m3exam": m3exam,
}
TASKS = "arc_easy piqa hellaswag winogrande openbookqa enem oab".split()


@pytest.fixture(scope="module")
def hub():
    """Ten rows of each set instead of the Hub; and an index of its tasks alone, which is made in no
    time."""
    import datasets

    from instruments.exams import harness

    theirs = Path(harness.lm_eval.__file__).parent / "tasks"

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


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("harness") / "run"
    folders = ["--data_dir", str(small_data), "--run_dir", str(run_dir)]
    assert train.main(["tiny", *SMALL, *folders]) == 0
    return run_dir


def ask(run_dir, *args) -> list[dict]:
    """`eval.py choice`, in this process; the records of its scores."""
    before = (run_dir / "eval.jsonl").read_text() if (run_dir / "eval.jsonl").exists() else ""
    assert evaluate.main(["choice", *map(str, (run_dir, *args)), "--device", "cpu"]) == 0
    added = (run_dir / "eval.jsonl").read_text().removeprefix(before)
    return [json.loads(line) for line in added.splitlines()]


@pytest.mark.slow
def test_the_figures_are_those_of_lm_evals_own_model(hub, trained, tmp_path):
    """Of the exported folder: each answer's nats, as far as fp32 holds them, and each accuracy."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    saved, folder = tmp_path / "nats.jsonl", tmp_path / "folder"
    records = ask(trained, "--task", *TASKS, "--shots", 1, "--save", saved)
    assert export.main(["--run_dir", str(trained), "--out", str(folder)]) == 0
    how = dict(dtype="float32", device="cpu", batch_size=4, trust_remote_code=True)
    found = lm_eval.simple_evaluate(
        HFLM(str(folder), **how), tasks=TASKS, num_fewshot=1, task_manager=hub.manager()
    )
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    for name in TASKS:
        theirs = [s for t, own in found["samples"].items() if t.split("::")[0] == name for s in own]
        ours = [line["nats"] for line in lines if line["task"] == name]
        assert len(ours) == len(theirs) == (27 if name == "enem" else 10)
        for nats, sample in zip(ours, theirs):
            assert nats == pytest.approx([x for x, _ in sample["filtered_resps"]], rel=1e-6)
        for norm, metric in (("sum", "acc"), ("per character", "acc_norm")):
            for record in (r for r in records if (r["task"], r["norm"]) == (name, norm)):
                hits = sum(sample.get(metric, math.nan) for sample in theirs)
                assert math.isnan(hits) or record["hits"] == hits, (name, metric)


def test_the_command_scores_lm_evals_tasks_and_ours(hub, trained, tmp_path, capsys):
    """Accuracy by the saved nats, and by hand; a letter is told, answers are normalized."""
    saved = tmp_path / "nats.jsonl"
    records = ask(trained, "--task", "winogrande", "piqa", "enem", "--save", saved)
    said = capsys.readouterr().out
    assert [(r["task"], r["norm"]) for r in records] == [
        ("winogrande", "sum"),
        *(("piqa", n) for n in ("sum", "per character", "per byte")),
        ("enem", "sum"),
    ]
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    wino, piqa, enem = (
        [x for x in lines if x["task"] == t] for t in ("winogrande", "piqa", "enem")
    )
    assert [x["gold"] for x in wino] == [0, 1] * 5 and [x["gold"] for x in piqa] == [0, 1] * 5
    assert [x["gold"] for x in enem] == [0, 2, 3, 4, 0, 1, 2, 3, 4] * 3  # without the annulled
    best = lambda x: x["nats"].index(max(x["nats"]))
    for record, own in ((records[0], wino), (records[1], piqa), (records[4], enem)):
        assert record["hits"] == sum(best(x) == x["gold"] for x in own)
    texts = [(WORDS[i], f"pull {i}") for i in range(10)]
    per_byte = [
        [x / len(t.encode()) for x, t in zip(p["nats"], own)] for p, own in zip(piqa, texts)
    ]
    assert records[3]["hits"] == sum(v.index(max(v)) == p["gold"] for v, p in zip(per_byte, piqa))
    assert records[4]["chance"] == pytest.approx(1 / 5)
    assert {year: f["n"] for year, f in records[4]["by"]["year"].items()} == {
        "2022": 9,
        "2023": 9,
        "2024": 9,
    }
    assert "is predicted in" in said and "year  questions  right" in said


def asked(hub, name, **options) -> list:
    """What our model is asked: Questions, with numbers in the place of log-likelihoods."""
    lm = hub.Ours(None, None, 8)
    lm.loglikelihood = lambda requests: [(-float(i), False) for i in range(len(requests))]
    return list(hub.ask(lm, hub.open_tasks(name), **dict(shots=0, limit=0) | options))


def test_questions_are_written_out_as_the_sets_are(hub):
    (question, nats), *_ = asked(hub, "enem")
    assert question.context == (
        "Pergunta: Veja 1 e [0] 2. Qual 0?\n A. red\n B. blue\n C. white\n D. gray\n E. café\n"
        "Resposta:"
    )
    assert question.answers == tuple("ABCDE") and question.gold == 0 and nats == [0, -1, -2, -3, -4]
    assert question.tags == dict(year="2022")
    (question, _), *_ = asked(hub, "winogrande")
    assert question.context == "Ann paid Eve as Ann"
    assert question.answers == ("had red.",) * 2 and question.gold == 0
    (question, _), *_ = asked(hub, "oab", shots=1)
    assert question.context.startswith("Pergunta: Quem ") and question.context.count("Quem") == 2
    assert question.tags == dict(subject="ETHICS", year="2010")
    exams = asked(hub, "exams_pt")
    assert [(q.context, q.gold) for q, _ in exams[:2]] == [
        ("Pergunta: O quê 1?\n A. u\n B. v\nResposta:", 0),
        ("Pergunta: O quê 3?\n A. u\n B. v\nResposta:", 1),
    ]
    assert exams[0][0].tags == dict(subject="Biology")
    m3exam = asked(hub, "m3exam_pt")
    assert len(m3exam) == 9  # one has pictures as options
    first = "Pergunta: Qual?\n A. sim\n B. não\nResposta:"
    assert [q.context for q, _ in m3exam[:2]] == [first, first.replace("Qual", "Um texto.\nQual")]
    assert len(asked(hub, "enem_challenge")) == 10


def test_a_limit_draws_from_all_questions_the_same_each_time(hub):
    """Sets are sorted by subject and year: the first questions are of one."""
    some = [q.context for q, _ in asked(hub, "oab", limit=4)]
    every = [q.context for q, _ in asked(hub, "oab")]
    assert len(some) == 4 and some == [q.context for q, _ in asked(hub, "oab", limit=4)]
    assert some == sorted(some, key=every.index) and some != every[:4]
    years = [q.tags["year"] for q, _ in asked(hub, "enem", limit=12)]
    assert len(years) == 12 and set(years) == {"2022", "2023", "2024"}


def test_what_cannot_be_asked_is_one_sentence(hub, monkeypatch):
    with pytest.raises(UsageError) as caught:
        hub.open_tasks("lambada_openai")
    assert "lambada_openai" in str(caught.value) and "loglikelihood" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        hub.open_tasks("piqqa")
    assert "piqa" in str(caught.value)

    def no_hub(*_, **__):
        raise ConnectionError("no route\nand more")

    monkeypatch.setattr("datasets.load_dataset", no_hub)
    with pytest.raises(DataError) as caught:
        hub.open_tasks("piqa")
    assert "piqa" in str(caught.value) and "no route" in str(caught.value)
