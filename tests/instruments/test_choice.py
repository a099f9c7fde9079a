"""instruments/choice.py and exams.py: log-likelihoods against a slow oracle and against lm_eval,
statistics against simulation, and each exam's rows read from a local copy of its schema."""

import json
import math
import random
import re
import statistics as oracle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import SMALL, environment, run

from config import GPTConfig, UsageError
from instruments import choice, exams
from instruments.exams import Item
from machinery import cli
from machinery.shards import Manifest
from model import GPT
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(small_data):
    return Tokenizer.load(small_data / "tokenizer.json")


@pytest.fixture(scope="module")
def model(tokenizer):
    """Random, but with logits of size: an untrained one finds all tokens equally likely."""
    torch.manual_seed(0)
    config = GPTConfig(
        seq_len=64,
        vocab_size=tokenizer.vocab_size,
        n_layer=2,
        n_head=2,
        n_kv_head=1,
        head_dim=16,
        n_embd=32,
        mlp_hidden=64,
        extras=("key_offset", "value_embeds"),
    )
    model = GPT(config)
    model.init_weights()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=p.size(-1) ** -0.5)
    return model.eval()


# ------------------------------------------------------------------------------ scoring

QUESTIONS = [
    ("Question: 1 + 1?\nAnswer:", ["2", "3", "11"]),
    ("def f(x):\n    ", ["return x", "  pass\n"]),  # its spaces go to the answers
    ("", ["import os", "qqq"]),  # BOS alone
    ("raise ValueErr", ["or", "Exception"]),
    ("O céu é", ["azul", "日本語", "🎉"]),
    ("foo, 1234 " * 40, ["bar", "self"]),  # longer than seq_len
]


def test_the_log_likelihood_is_the_sum_over_the_answers_tokens(model, tokenizer):
    """One answer at a time, from the logits, without padding or batches."""
    pairs = [choice.encode_pair(tokenizer, c, a) for c, answers in QUESTIONS for a in answers]
    for batch in (1, 4, 100):
        found = choice.log_likelihoods(model, pairs, batch)
        for (context, answer), nats in zip(pairs, found):
            row = torch.tensor([(context + answer)[-65:]])
            logp = model(row[:, :-1]).detach().log_softmax(-1)[0]
            expected = sum(float(logp[-k, row[0, -k]]) for k in range(1, len(answer) + 1))
            assert nats == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="an answer of 65 tokens does not fit in seq_len 64"):
        choice.log_likelihoods(model, [([0], [5] * 65)], 1)


def test_context_and_answer_are_encoded_as_one_text(tokenizer):
    bos = tokenizer.bos_id
    for context, answers in QUESTIONS:
        for answer in answers:
            prefix, rest = choice.encode_pair(tokenizer, context, answer)
            assert prefix[0] == bos and bos not in rest
            assert tokenizer.decode(prefix[1:]) == context.rstrip()
            whole = tokenizer.encode(f"{context} {answer}")
            assert rest and whole[-len(rest) :] == rest
            assert len(prefix) + len(rest) == 1 + len(whole)


def test_statistics_are_those_of_the_questions():
    rng = random.Random(0)
    options = [rng.choice((2, 3, 4, 5)) for _ in range(200)]
    golds = [rng.randrange(k) for k in options]
    picks = [rng.randrange(k) for k in options]
    found = choice.statistics(picks, golds, options)
    hits = [p == g for p, g in zip(picks, golds)]
    assert found["accuracy"] == oracle.mean(hits)
    assert found["stderr"] == pytest.approx(oracle.stdev(hits) / math.sqrt(200))
    assert found["chance"] == pytest.approx(oracle.mean(1 / k for k in options))
    guesses = [sum(rng.randrange(k) == 0 for k in options) for _ in range(2000)]
    z = (sum(hits) - oracle.mean(guesses)) / oracle.stdev(guesses)
    assert found["z"] == pytest.approx(z, abs=0.15)
    assert found["most_picked_share"] == max(map(picks.count, range(5))) / 200
    assert found["best_constant_accuracy"] == max(map(golds.count, range(5))) / 200


def test_guessing_is_called_chance_however_many_scores_are_printed():
    rng = random.Random(1)
    alarms, count, options = 0, 18, [4] * 200
    for _ in range(200):  # each prints 18 scores of a model that knows nothing
        limit, words = choice.limit_of_z(count), set()
        for _ in range(count):
            picks, golds = ([rng.randrange(4) for _ in options] for _ in range(2))
            words.add(choice.verdict(choice.statistics(picks, golds, options), limit, True))
        alarms += words != {"cannot be told from chance"}
    assert 1 <= alarms <= 22  # 5% of 200, and its spread
    assert choice.limit_of_z(1) == pytest.approx(1.96, abs=0.001)


@pytest.mark.parametrize(
    "picks, letters, words",
    [
        ([0] * 97 + [1] * 3, True, "a constant answer: nearly always A"),
        ([0] * 97 + [1] * 3, False, "below chance"),
        ([1] * 40 + [2, 3] * 30, True, "above chance"),
        ([1, 2] * 50, True, "above chance, but no better than a constant answer"),
    ],
)
def test_the_verdict_in_words(picks, letters, words):
    golds = [1] * 60 + [2] * 40 if "constant answer" in words else [1] * 50 + [2, 3] * 25
    found = choice.statistics(picks, golds, [4] * 100)
    assert choice.verdict(found, choice.limit_of_z(1), letters) == words


def test_norms_divide_by_characters_and_by_bytes(model, tokenizer):
    """A figure per norm, each from the answer's own length without the space in front."""
    rng, asked = random.Random(2), []
    for _ in range(30):
        answers = tuple("é" * rng.randrange(1, 9) + "x" * rng.randrange(9) for _ in range(3))
        asked.append(exams.Question("Which?", answers, rng.randrange(3)))
    figures, nats, cut = choice.score(asked, model, tokenizer, 16, False)
    lengths = {"sum": lambda a: 1, "per character": len, "per byte": lambda a: len(a.encode())}
    assert cut == 0 and figures.keys() == lengths.keys()
    for norm, length in lengths.items():
        hits = [
            max(range(3), key=lambda i: values[i] / length(q.answers[i])) == q.gold
            for q, values in zip(asked, nats)
        ]
        assert figures[norm]["accuracy"] == oracle.mean(hits)
    assert len({f["accuracy"] for f in figures.values()}) > 1
    assert list(choice.score(asked, model, tokenizer, 16, True)[0]) == ["sum"]


# ---------------------------------------------------------------------------- questions


def test_an_item_is_written_out_in_three_ways():
    item = Item("Question: 1+1?", ("2", "3"), 0, "Answer:")
    shown = "Question: 1+1?\nA. 2\nB. 3\nAnswer:"
    assert exams.write_out(item, "answer") == ("Question: 1+1?\nAnswer:", ("2", "3"))
    assert exams.write_out(item, "letter") == (shown, ("A", "B"))
    assert exams.write_out(item, "options") == (shown, ("2", "3"))
    again = exams.with_examples(item, [item], "letter")
    assert again.context == f"{shown} A\n\n{shown}" and again.gold == 0


def write_items(path, count=6):
    rows = [dict(query=f"{i} + 1 =", choices=[str(i), str(i + 1)], gold=1) for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_files_first_items_are_the_examples(tmp_path):
    path = str(write_items(tmp_path / "sums.jsonl"))
    asked = exams.ask(path, "answer", 2, 3, None, 64)
    head = "0 + 1 = 1\n\n1 + 1 = 2\n\n"
    assert [q.context for q in asked] == [f"{head}{i} + 1 =" for i in (2, 3, 4)]
    assert exams.resolve_mode(path, "auto") == "answer"


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"x",
        b"\xe9",
        b'{"query": "a"}',
        b'{"query": "a", "choices": ["b", "c"], "gold": 2}',
        b'{"query": "a", "choices": ["b", "c"], "gold": 0.5}',
        b'{"query": "a", "choices": ["b", "c"], "gold": true}',
        b'{"query": "a", "choices": ["b", "b"], "gold": 0}',
        b'{"query": "a", "choices": ["b", ""], "gold": 0}',
        b'{"query": "a", "choices": "bc", "gold": 0}',
        b'{"query": null, "choices": ["b", "c"], "gold": 0}',
        b'{"query": "a", "choices": ["b", "c"], "gold": 0, "cue": 1}',
        json.dumps(dict(query="a", choices=[str(i) for i in range(27)], gold=0)).encode(),
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = write_items(tmp_path / "sums.jsonl", 2)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match="sums.jsonl, line 3 is not"):
        exams.ask(str(path), "answer", 0, 0, None, 64)


def test_a_line_may_hold_what_unicode_calls_the_end_of_one(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"query": "a\u2028b", "choices": ["c", "d"], "gold": 0}\n', encoding="utf-8")
    (question,) = exams.ask(str(path), "answer", 0, 0, None, 64)
    assert question.context == "a\u2028b"


def test_a_continuation_is_what_follows_in_the_held_out_text(small_data):
    manifest = Manifest.load(small_data)
    asked = exams.ask("continuation", "answer", 0, 0, lambda: manifest, 64)
    rows = [manifest.row("val", 0, i).tolist() for i in range(manifest.rows("val", 0))]
    texts = [" ".join(map(str, row)) + " " for row in rows]
    found = lambda ids: any(" ".join(map(str, ids)) + " " in text for text in texts)
    right, wrong = [], []
    for q in asked:
        assert found([manifest.bos_id, *q.context, *q.answers[q.gold]])
        right.append(tuple(q.answers[q.gold]))
        wrong += [tuple(a) for i, a in enumerate(q.answers) if i != q.gold]
    assert sorted(wrong) == sorted(3 * right)  # a span's own likelihood tells nothing
    assert {q.gold for q in asked} == {0, 1, 2, 3}
    assert len({q.gold for q in asked[: len(asked) // 4]}) == 4
    with pytest.raises(ValueError, match="has no options to show"):
        exams.resolve_mode("continuation", "letter")


KEYED = dict(
    question="Quem?",
    choices=dict(text=["x", "y", "z"], label=["A", "B", "C"]),
    answerKey="C",
    id="1",
    exam_id="2",
)
# exam -> rows of its schema, the items that they make (none for what is to be skipped)
M3EXAM = dict(question_text="Qual?", language="portuguese", level="high")
M3EXAM |= dict(subject="x", subject_category="y")
ROWS = {
    "hellaswag": (
        [
            dict(
                activity_label="Baking",
                ctx_a="He bakes.",
                ctx_b="he",
                label="1",
                endings=["eats [title] then", "runs [x] off  now", "c", "d"],
            )
        ],
        [Item("Baking: He bakes. He", ("eats. then", "runs off now", "c", "d"), 1)],
    ),
    "arc_easy": (
        [
            dict(
                question="Why?",
                choices=dict(text=["a", "b", "c"], label=["1", "2", "3"]),
                answerKey="2",
            )
        ],
        [Item("Question: Why?", ("a", "b", "c"), 1, "Answer:")],
    ),
    "piqa": (
        [dict(goal="Open it", sol1="pull", sol2="push", label=1)],
        [Item("Question: Open it", ("pull", "push"), 1, "Answer:")],
    ),
    "openbookqa": (
        [
            dict(
                id="7-1",
                question_stem="A dog is",
                choices=dict(text=["a mammal", "a bird"], label=["A", "B"]),
                answerKey="A",
            )
        ],
        [Item("A dog is", ("a mammal", "a bird"), 0)],
    ),
    "winogrande": (
        [dict(sentence="Ann paid Eve as _ worked.", option1="Ann", option2="Eve", answer="2")],
        [Item("Ann paid Eve as _ worked.", ("Ann", "Eve"), 1, "Answer:", is_cloze=True)],
    ),
    "mmlu_pro": (
        [
            dict(
                question_id=70,
                question="2+2? ",
                options=list("123456789"),
                answer="D",
                answer_index=3,
                cot_content="",
                category="maths",
                src="x",
            )
        ],
        [
            Item(
                "2+2?",
                tuple("123456789"),
                3,
                "Answer:",
                "maths",
                intro="The following are multiple choice questions (with answers) about maths.\n\n",
            )
        ],
    ),
    "mmlu": (
        [dict(question="2+2? ", subject="maths", choices=["1", "2", "3", "4"], answer=3)],
        [
            Item(
                "2+2?",
                ("1", "2", "3", "4"),
                3,
                "Answer:",
                "maths",
                intro="The following are multiple choice questions (with answers) about maths.\n\n",
            )
        ],
    ),
    "enem": (
        [
            dict(
                question="Veja [[placeholder]] e [[placeholder]]. Qual?",
                label="E",
                alternatives=list("pqrst"),
                description=["um mapa", "um [0] gráfico"],
                figures=[],
            ),
            dict(
                question="?",
                label="Anulado",
                alternatives=list("pqrst"),
                description=[],
                figures=[],
            ),
        ],
        [
            Item(
                "Pergunta: Veja um mapa e um [0] gráfico. Qual?",
                tuple("pqrst"),
                4,
                "Resposta:",
                margin=" ",
            )
        ],
    ),
    "oab": (
        [KEYED, KEYED | dict(answerKey="nula")],
        [Item("Pergunta: Quem?", ("x", "y", "z"), 2, "Resposta:", margin=" ")],
    ),
    "mmlu_pt": (
        [dict(Question="Onde?", A="1", B="2", C="3", D="4", Answer="B", Subject="law")],
        [Item("Pergunta: Onde?", ("1", "2", "3", "4"), 1, "Resposta:", "law", " ")],
    ),
    "m_mmlu_pt": (
        [
            dict(
                instruction="Onde?",
                option_a="1",
                option_b="2",
                option_c="3",
                option_d="4",
                answer="D",
                id="law/test/0",
            )
        ],
        [Item("Pergunta: Onde?", ("1", "2", "3", "4"), 3, "Resposta:", margin=" ")],
    ),
    "exams_pt": (
        [
            dict(
                id="1",
                question=dict(stem="O quê?", choices=dict(text=["u", "v"], label=["A", "B"])),
                answerKey=key,
                info=dict(grade=12, subject="Biology", language=language),
            )
            for key, language in (("B", "Portuguese"), ("@", "Portuguese"), ("A", "Polish"))
        ],
        [Item("Pergunta: O quê?", ("u", "v"), 1, "Resposta:", margin=" ")],
    ),
    "m3exam_pt": (
        [
            M3EXAM | dict(background="Um texto.", options=["(A) sim", "(B) não"], answer_text="B"),
            M3EXAM | dict(background="", options=["(A)", "(B)"], answer_text="A"),
        ],
        [Item("Pergunta: Um texto.\nQual?", ("sim", "não"), 1, "Resposta:", margin=" ")],
    ),
}
ROWS["arc_challenge"], ROWS["enem_challenge"] = ROWS["arc_easy"], ROWS["oab"]


def hub_copy(folder, name: str):
    """A repository with the rows of ROWS in the exam's configurations and splits."""
    exam, (rows, _) = exams.EXAMS[name], ROWS[name]
    configs = ["---", "configs:"]
    folder.mkdir()
    for config in exam.configs:
        configs += [f"- config_name: '{config or 'default'}'", "  data_files:"]
        for split in filter(None, (exam.split, exam.examples)):
            file = f"{config or 'default'}-{split}.jsonl"
            (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
            configs += [f"  - split: {split}", f"    path: {file}"]
    (folder / "README.md").write_text("\n".join([*configs, "---", ""]))
    return folder


@pytest.fixture
def offline(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def test_every_exam_has_rows_here():
    assert ROWS.keys() == exams.EXAMS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_an_exams_rows_become_items(name, offline, tmp_path):
    folder, exam = hub_copy(tmp_path / "copy", name), exams.EXAMS[name]
    expected = ROWS[name][1] * len(exam.configs)
    assert exams._rows(name, str(folder), exam.split) == expected
    assert exams.resolve_mode(f"{name}={folder}", "auto") == exam.mode


def test_examples_are_of_the_same_subject(offline, tmp_path):
    folder = hub_copy(tmp_path / "copy", "mmlu")
    row = ROWS["mmlu"][0][0]
    lines = [
        json.dumps(row | dict(subject=s, question=q))
        for s, q in (("law", "l1"), ("maths", "m1"), ("law", "l2"), ("maths", "m2"))
    ]
    (folder / "all-dev.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "all-test.jsonl").write_text("\n".join(lines[:2]) + "\n")
    asked = exams.ask(f"mmlu={folder}", "letter", 2, 0, None, 64)
    assert [re.findall(r"\b[lm]\d\b", q.context) for q in asked] == [
        ["l1", "l2", "l1"],
        ["m1", "m2", "m1"],
    ]
    with pytest.raises(ValueError, match="try --shots 2"):
        exams.ask(f"mmlu={folder}", "letter", 3, 0, None, 64)


def test_a_changed_schema_and_a_missing_hub_are_one_sentence(offline, tmp_path):
    folder = hub_copy(tmp_path / "copy", "piqa")
    for file in folder.glob("*.jsonl"):
        file.write_text(file.read_text().replace("sol1", "solution1"))
    with pytest.raises(exams.DataError, match="no field 'sol1', which piqa .*--task piqa=FOLDER"):
        exams.ask(f"piqa={folder}", "answer", 0, 0, None, 64)
    with pytest.raises(exams.DataError, match="piqa could not be loaded from baber/piqa"):
        exams.ask("piqa", "answer", 0, 0, None, 64)
    with pytest.raises(ValueError, match="did you mean piqa"):
        exams.ask("piqqa", "answer", 0, 0, None, 64)
    for task, words in (
        ("sums.jsonl", "--task sums.jsonl: there is no such file"),
        ("continuation=here", "--task continuation=here: continuation reads no folder"),
    ):
        with pytest.raises(UsageError, match=words):
            exams.ask(task, "answer", 0, 0, None, 64)


def test_a_fault_of_a_reader_is_a_traceback(offline, tmp_path, monkeypatch):
    """A student's, who has changed it: it is not the set that has changed."""
    folder = hub_copy(tmp_path / "copy", "piqa")
    broken = replace(exams.EXAMS["piqa"], read=lambda row: row["goal"].splitt())
    monkeypatch.setitem(exams.EXAMS, "piqa", broken)
    with pytest.raises(AttributeError) as caught:
        exams.ask(f"piqa={folder}", "answer", 0, 0, None, 64)
    assert cli.exit_code(caught.value) == 1


# ------------------------------------------------------------------------------ lm_eval

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {test}, examples: {examples}}}}}
test_split: test
fewshot_split: examples
fewshot_config: {{sampler: first_n}}
num_fewshot: {shots}
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_bytes, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""


@pytest.mark.slow
def test_the_figures_are_those_of_lm_eval(small_data, tmp_path):
    """Export a run, let lm_eval answer odd questions with the folder, and compare every answer."""
    pytest.importorskip("lm_eval")
    run_dir, folder = tmp_path / "run", tmp_path / "folder"
    for program, *args in (
        ("train.py", "tiny", *SMALL, "--data_dir", small_data, "--run_dir", run_dir),
        ("export.py", "--run_dir", run_dir, "--out", folder),
    ):
        done = run(program, *args, timeout=500)
        assert done.returncode == 0, done.stderr
    rows = [dict(query=q, choices=a, gold=i % len(a)) for i, (q, a) in enumerate(QUESTIONS)]
    shots = {"bare": 0, "taught": 2}  # of a file, the first items are the examples
    for name, n in shots.items():
        files = {"all": rows, "examples": rows[: n or 1], "test": rows[n:]}
        paths = {key: tmp_path / f"{name}_{key}.jsonl" for key in files}
        for key, path in paths.items():
            path.write_text("".join(json.dumps(row) + "\n" for row in files[key]))
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, shots=n, **paths))
        args = ("--task", paths["all"], "--shots", n, "--save", tmp_path / f"{name}_nats.jsonl")
        mine = run("eval.py", "choice", run_dir, *args, "--device", "cpu")
        assert mine.returncode == 0, mine.stderr
    options = "--model hf --tasks bare,taught --batch_size 4 --device cpu --log_samples".split()
    options += ["--model_args", f"pretrained={folder},dtype=float32,trust_remote_code=True"]
    options += ["--include_path", tmp_path, "--output_path", tmp_path / "out"]
    command = [sys.executable, "-m", "lm_eval", *options]
    env = environment(HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(results.read_text())["results"]
    records = [json.loads(x) for x in (run_dir / "eval.jsonl").read_text().splitlines()]
    for name in shots:
        (samples,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        theirs = {s["doc_id"]: s for s in map(json.loads, samples.read_text().splitlines())}
        ours = (tmp_path / f"{name}_nats.jsonl").read_text().splitlines()
        assert len(ours) == len(theirs)
        for i, line in enumerate(ours):
            expected = [float(answer[0]) for answer in theirs[i]["filtered_resps"]]
            assert json.loads(line)["nats"] == pytest.approx(expected, abs=1e-3), (name, i)
        for metric in ("acc", "acc_norm", "acc_bytes"):
            record = records.pop(0)
            assert record["accuracy"] == pytest.approx(results[name][f"{metric},none"])
            assert record["stderr"] == pytest.approx(results[name][f"{metric}_stderr,none"])
