"""Public exams are lm_eval's, from an export: offline, by its own program, they get the same
log-likelihoods and accuracies as `eval.py choice` on the same questions; and tasks/*.yaml ask what
they should."""

import json
import re
import shlex
import shutil
import subprocess

import pytest
from conftest import CPU, ROOT, environment, look, read_lines, write_lines

import eval as evaluate
import export
from config import UsageError
from instruments.exams import choice
from machinery.trained import EvalConfig

WORDS = "red green blue black white brown gray pink café 日本 import def self".split()


def keyed(i: int) -> dict:
    texts = [WORDS[(i + 3 * k) % 13] for k in range(3 + i % 2)]
    options = dict(text=texts, label=list("ABCD"[: len(texts)]))
    return dict(question=f"Quem {i}?", choices=options, answerKey="ABC"[i % 3])


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


def own(i: int) -> dict:
    """Full answers; a space at the end of a question; and one longer than the model's rows."""
    query = f"Why {i} {'of red ' * (40 if i == 5 else 1)}{WORDS[i]}?{' ' * (i % 2)}"
    return dict(query=query, choices=[f"{WORDS[i]} {i}", "eats", WORDS[-i]], gold=i % 3)


SETS = dict(enem=enem, oab=keyed, enem_challenge=keyed, exams_pt=exams, m3exam_pt=m3exam, own=own)
OWN = """task: own
dataset_path: here
test_split: rest
fewshot_split: examples
fewshot_config: {sampler: first_n}
num_fewshot: 2
output_type: multiple_choice
doc_to_text: "{{ query }}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.fixture(scope="module")
def taken(trained_run, tmp_path_factory):
    """A folder with ten rows that are made here in place of each set; and task -> what lm_eval says
    of each question: of our YAML files, and of one that has two rows as examples. The command is
    the one that `eval.py choice` names."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("exams")
    assert export.main([str(trained_run), "--out", str(folder / "FOLDER")]) == 0
    tasks = shutil.copytree(ROOT / "instruments/exams/tasks", folder / "instruments/exams/tasks")
    (tasks / "own.yaml").write_text(OWN)
    for name, row in SETS.items():
        rows = [row(i) for i in range(10)]
        parts = dict(train=rows, test=rows, dev=rows, examples=rows[:2], rest=rows[2:])
        for part, some in parts.items():
            write_lines(folder / f"{name}.{part}", some)
        files = {part: f"{folder}/{name}.{part}" for part in parts}
        here = f"dataset_path: json\ndataset_kwargs: {{data_files: {json.dumps(files)}}}"
        task = tasks / f"{name}.yaml"
        task.write_text(re.sub("dataset_path: .*", here, task.read_text()))
    with pytest.raises(UsageError) as error:
        choice.read_task(",".join(SETS), 0)
    words = shlex.split(re.search("lm_eval --.*", str(error.value))[0])
    words += "--device cpu --batch_size 4 --log_samples --output_path said".split()
    how = dict(env=environment(HF_HOME=str(folder / "home")), capture_output=True, text=True)
    done = subprocess.run(words, cwd=folder, timeout=600, **how)
    assert done.returncode == 0, done.stderr
    said = {}
    for path in sorted(folder.glob("said/**/samples_*.jsonl")):
        task = re.fullmatch(r"samples_(.*?)_\d+-.*", path.name)[1]
        said[task] = read_lines(path)
    return folder, said


def asked(line: dict) -> dict:
    """A question of lm_eval's, as a line of a file for `eval.py choice`."""
    texts = [*line["arguments"].values()]
    answers = [text["arg_1"].removeprefix(" ") for text in texts]
    return dict(query=texts[0]["arg_0"], choices=answers, gold=int(line["target"]))


@pytest.mark.slow
def test_both_find_the_same_log_likelihoods_and_accuracies(taken, own_run, capsys):
    """Of the questions as lm_eval writes them out; and of a file whose first two are examples."""
    folder, said = taken
    loaded = evaluate.load_model(EvalConfig(str(own_run), device="cpu", dtype="fp32"))
    assert len(said) == 8  # enem has a task for each year
    for task, lines in said.items():
        file = folder / f"{task}.jsonl"
        shots = 0
        write_lines(file, map(asked, lines))
        if task == "own":
            file = folder / "own.test"
            shots = 2
        questions = choice.read_task(str(file), shots)
        ours = choice.score(questions, loaded.model, loaded.tokenizer, 8)
        for (_, nats), line in zip(ours, lines, strict=True):
            theirs = [float(x) for x, _ in line["filtered_resps"]]
            assert nats == pytest.approx(theirs, rel=0, abs=2e-5)
        look(capsys, "choice", own_run, *CPU, "--task", file, "--shots", shots)
        for record in read_lines(own_run / "eval.jsonl")[-2 if task == "own" else -1 :]:
            metric = "acc" if record["norm"] == "sum" else "acc_norm"
            assert record["hits"] == sum(line[metric] for line in lines)
            assert record["n"] == len(lines) and record["task"] == str(file)


@pytest.mark.slow
def test_questions_are_written_out_as_the_sets_are(taken):
    _, said = taken
    found = {task: [*map(asked, lines)] for task, lines in said.items()}
    years = [questions for task, questions in found.items() if "202" in task]
    assert len(years) == 3 and years[0] == years[1] == years[2]
    texts = "Pergunta: Veja 1 e [0] 2. Qual 0?\n A. red\n B. blue\n C. white\n D. gray\n E. café\n"
    assert years[0][0] == dict(query=f"{texts}Resposta:", choices=[*"ABCDE"], gold=0)
    assert [q["gold"] for q in years[0]] == [0, 2, 3, 4, 0, 1, 2, 3, 4]  # without the annulled
    assert found["oab"] == found["enem_challenge"] and len(found["oab"]) == 10
    assert found["oab"][0]["query"].startswith("Pergunta: Quem 0?\n A. red\n")
    texts = [(q["query"], q["gold"]) for q in found["exams_pt"]]
    assert texts[:2] == [
        ("Pergunta: O quê 1?\n A. u\n B. v\nResposta:", 0),
        ("Pergunta: O quê 3?\n A. u\n B. v\nResposta:", 1),
    ]
    options = "\n A. A casa\n B. red\n C. green\n D. blue\n E. E. coli\nResposta:"
    first, second = (q["query"] for q in found["m3exam_pt"][:2])
    assert first == "Pergunta: Um texto.\nOnde 0?" + options
    assert second == "Pergunta: Onde 1?" + options
    assert [q["gold"] for q in found["m3exam_pt"]] == [4, 1, 0, 4, 1, 2, 3, 0]  # without 2 and 3
