"""Public exams are lm_eval's, from an export: offline, by its own program, they get the same
log-likelihoods and accuracies as `eval.py choice` on the same questions; and tasks/*.yaml ask what
they should."""

import json
import re
import shlex
import shutil
import subprocess

import pytest
from conftest import CPU, ROOT, environment, look, read_json, read_lines, write_lines

import eval as evaluate
import export
from config import UsageError
from instruments.exams import choice
from machinery.trained import EvalConfig

HERE = ROOT / "tests/instruments/exams"  # ten rows by the schema of each set; a task of our own


@pytest.fixture(scope="module")
def taken(trained_run, tmp_path_factory):
    """task -> what lm_eval says of each question: of our YAML files, with the rows that are here in
    place of the sets on the Hub; by the command that `eval.py choice` names."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("exams")
    assert export.main([str(trained_run), "--out", str(folder / "FOLDER")]) == 0
    tasks = shutil.copytree(ROOT / "instruments/exams/tasks", folder / "instruments/exams/tasks")
    shutil.copy(HERE / "own.yaml", tasks)
    names = [path.stem for path in HERE.glob("*.jsonl")]
    for name in names:
        rows = read_lines(HERE / f"{name}.jsonl")
        parts = dict(train=rows, test=rows, dev=rows, examples=rows[:2], rest=rows[2:])
        for part, some in parts.items():
            write_lines(folder / f"{name}.{part}", some)
        files = {part: f"{folder}/{name}.{part}" for part in parts}
        here = f"dataset_path: json\ndataset_kwargs: {{data_files: {json.dumps(files)}}}"
        task = tasks / f"{name}.yaml"
        task.write_text(re.sub("dataset_path: .*", here, task.read_text()))
    with pytest.raises(UsageError) as error:
        choice.read_questions(",".join(names), 0)
    words = shlex.split(re.search("lm_eval --.*", str(error.value))[0])
    words += "--device cpu --batch_size 4 --log_samples --output_path said".split()
    how = dict(env=environment(HF_HOME=str(folder / "home")), capture_output=True, text=True)
    done = subprocess.run(words, cwd=folder, timeout=600, **how)
    assert done.returncode == 0, done.stderr
    paths = folder.glob("said/**/samples_*.jsonl")
    return {re.match(r"samples_(.*)_\d+-", path.name)[1]: read_lines(path) for path in paths}


def asked(line: dict) -> dict:
    """A question of lm_eval's, as a line of a file for `eval.py choice`."""
    texts = [*line["arguments"].values()]
    answers = [text["arg_1"].removeprefix(" ") for text in texts]
    return dict(query=texts[0]["arg_0"], choices=answers, gold=int(line["target"]))


@pytest.mark.slow
def test_both_find_the_same_log_likelihoods_and_accuracies(taken, own_run, tmp_path, capsys):
    """Of the questions as lm_eval writes them out; and of a file whose first two are examples."""
    loaded = evaluate.load_model(EvalConfig(str(own_run), device="cpu", dtype="fp32"))
    assert len(taken) == 8  # enem has a task for each year
    for task, lines in taken.items():
        file = tmp_path / "exam.jsonl"
        shots = 0
        write_lines(file, map(asked, lines))
        if task == "own":
            file = HERE / "own.jsonl"
            shots = 2
        questions = choice.read_questions(str(file), shots)
        ours = choice.score(questions, loaded, 8)
        for (_, nats), line in zip(ours, lines, strict=True):
            theirs = [float(x) for x, _ in line["filtered_resps"]]
            assert nats == pytest.approx(theirs, rel=0, abs=2e-5)
        look(capsys, "choice", own_run, *CPU, "--task", file, "--shots", shots)
        for record in read_lines(own_run / "eval.jsonl")[-2 if task == "own" else -1 :]:
            metric = "acc" if record["norm"] == "sum" else "acc_norm"
            assert record["hits"] == sum(line[metric] for line in lines)


@pytest.mark.slow
def test_questions_are_written_out_as_the_sets_are(taken):
    """Each set as a person has read it once: its text, options and right answers, no annulled
    question. Of enem, each year has the same rows here."""
    seen = read_json(HERE / "asked.json")
    for task, lines in taken.items():
        assert [*map(asked, lines)] == seen[task.partition("_202")[0]], task
