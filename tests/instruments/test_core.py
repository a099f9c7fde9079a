"""instruments/exams/core.py: prompts, spans and means against golden values of CORE's definition,
its traps one by one, GPT-2's published figures, and the command. All items are made by hand."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import look, read_lines, write_lines

from config import UsageError
from instruments.exams import core

BY_NAME = {task.name: task for task in core.TASKS}
choose = lambda gold, query, *choices: core.Choice(query, choices, gold)
MC = [
    choose(0, "Question: What do bees make?", "honey", "milk"),
    choose(0, "Question: Which of these is a metal? ", "iron", "in water", "ice"),
    choose(2, "Question: Where do fish live?", "in trees", "in sand", "in water"),
]
end = lambda gold, text, a, b, continuation: core.Schema(
    (f"{text} {a}", f"{text} {b}"), continuation, gold
)
SCHEMA = [
    end(0, "The cup fell on the glass so the", "cup", "glass", "broke."),
    end(1, "Ann paid Eve because", "Ann", "Eve", "had worked all day."),
    end(1, "The key did not fit the wall as the", "key", "wall", "had no hole."),
]
LM = [
    core.Completion("red red red red ", "red"),
    core.Completion("\n2 4 6 8 Answer: ", "10"),
    core.Completion("so no, no, no,", "no "),
]
TOY = {  # kind -> the task, its items
    "mc": (replace(BY_NAME["arc_easy"], shots=2), MC),
    "schema": (replace(BY_NAME["winograd"], shots=1), SCHEMA),
    "lm": (replace(BY_NAME["squad"], shots=1), LM),
}


class Bytes:
    bos_id = 256

    def encode(self, text):
        return list(text.encode())


class Toy:
    """Logit 3 for what followed the last earlier occurrence of the current token, 0 for others."""

    def __init__(self, seq_len=10_000):
        self.config = SimpleNamespace(seq_len=seq_len, vocab_size=257)
        self.cos = torch.zeros(1)

    def __call__(self, idx, targets=None, reduction=None):
        assert idx.size(1) <= self.config.seq_len
        logits = torch.zeros(*idx.shape, 257)
        for b, row in enumerate(idx.tolist()):
            followed = {}
            for t, token in enumerate(row):
                logits[b, t, followed.get(token, 0)] = 3.0
                if t + 1 < len(row):
                    followed[token] = row[t + 1]
        if targets is None:
            return logits
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def scored(kind, seq_len=10_000, batch=4):
    task, items = TOY[kind]
    return core.score(task, items, Toy(seq_len), Bytes(), batch)


def has_means(lines: list[dict], means: list[list[float]]):
    return [line["means"] for line in lines] == [pytest.approx(own, abs=5e-5) for own in means]


def test_the_order_and_the_examples_are_cores():
    assert core.shuffled([*range(10)], 5) == [0, 3, 7, 2, 1]
    items = [core.Completion(str(k), "") for k in range(1000)]
    shown = lambda i, n, shots: core.prompts(replace(BY_NAME["squad"], shots=shots), items[:n], i)
    numbers = lambda *of: [*map(int, re.findall(r"\d+", shown(*of)[0]))]
    assert numbers(7, 1000, 4) == [617, 618, 508, 783, 7]
    assert [numbers(i, 3, 2) for i in range(3)] == [[2, 1, 0], [2, 0, 1], [1, 0, 2]]


PROMPTS = {
    ("mc", 1): "Question: Where do fish live?\nAnswer: in water\n\nQuestion: What do bees make?\n"
    "Answer: honey\n\nQuestion: Which of these is a metal? \nAnswer: ice",
    ("schema", 0): "The key did not fit the wall as the wall had no hole.\n\nThe cup fell on the "
    "glass so the glass broke.",
    ("lm", 0): "so no, no, no, no \n\nred red red red red",
    ("lm", 1): "so no, no, no, no \n\n2 4 6 8 Answer: 10",
    ("lm", 2): "2 4 6 8 Answer: 10\n\nso no, no, no, no ",
}
MEANS = {
    "mc": [[5.6207, 4.8707], [5.6207, 5.1921, 5.6207], [5.6207, 5.6207, 5.0207]],
    "schema": [[4.7636, 5.1921], [5.1707, 5.0207], [4.9284, 5.1592]],
    "lm": [[2.6207], [5.6207], [3.3707]],
}
CORRECT = {"mc": [False, False, True], "schema": [True, True, False], "lm": [True, False, False]}


@pytest.mark.parametrize("kind, i", PROMPTS)
def test_prompts_are_the_golden_ones(kind, i):
    assert core.prompts(*TOY[kind], i)[-1] == PROMPTS[kind, i]


@pytest.mark.parametrize("kind", TOY)
@pytest.mark.parametrize("batch", [1, 8])
def test_means_and_hits_are_the_golden_ones(kind, batch):
    """No span begins or ends a token earlier or later: its mean would be another. Nor does the text
    before an answer, which the golden prompts have with it."""
    found = scored(kind, batch=batch)
    assert has_means(found, MEANS[kind])
    assert [line["correct"] for line in found] == CORRECT[kind]


def test_a_row_that_is_too_long_loses_its_beginning(capsys):
    """BOS goes, and the span moves; where it does not fit, it begins at 1."""
    assert has_means(scored("mc", 48), MEANS["mc"])
    assert "arc_easy: 3 items lose their first" in capsys.readouterr().out
    assert has_means(scored("schema", 48), [[5.1921, 5.6207], [5.3207, 5.1707], [4.9284, 5.1592]])
    rows = [[256, *text.encode()] for text in core.prompts(*TOY["schema"], 1)]
    assert [[*map(len, parts)] for parts in core.spans("schema", rows, 16)] == [[1, 15]] * 2
    for seq_len in (41, 39):
        capsys.readouterr()
        scored("lm", seq_len)  # 41 ids with BOS fit exactly
        assert ("items lose" in capsys.readouterr().out) == (seq_len == 39)


def test_an_answer_that_begins_another_has_an_empty_span_and_wins_only_as_the_first():
    task = replace(BY_NAME["piqa"], shots=0)
    items = [choose(gold, "a", "pull", "pull it") for gold in (0, 1)]
    found = core.score(task, items, Toy(), Bytes(), 4)
    assert [line["correct"] for line in found] == [True, False]
    assert all(math.isnan(line["means"][0]) and line["means"][1] > 0 for line in found)


def test_contexts_of_choices_keep_their_ends_and_those_of_lm_do_not():
    item = choose(0, "Open it\n", "x", "y")
    assert core.prompts(replace(BY_NAME["piqa"], shots=0), [item], 0)[0] == "Open it\n\nAnswer: x"
    language = replace(BY_NAME["bigbench_language_identification"], shots=0)
    item = choose(0, "Which? Answer: ", "A", "B")
    assert core.prompts(language, [item], 0)[1] == "Which? Answer:  B"
    item = core.Completion(" He said \n", "\nyes")
    assert core.prompts(BY_NAME["lambada_openai"], [item], 0) == ["He said", "He said \nyes"]


def test_a_prompt_that_is_no_prefix_of_that_with_the_answer():
    """Its last token joins the answer's first letter."""
    assert core.spans("lm", [[256, 1, 2, 3], [256, 1, 2, 9, 4]], 100) == [([256, 1, 2], [9, 4])]


def figures_of(task, right: list[bool]) -> dict:
    return core.figures_of(task, [dict(correct=x) for x in right])


def test_gpt2_xl_has_its_published_core():
    """From the figures that a run of at most 1,000 items a task would have found."""
    figures = {}
    for task in core.TASKS:
        n = min(task.items, 1000)
        figures[task] = figures_of(task, [i < round(task.gpt2_xl * n) for i in range(n)])
    record = core.summary(figures)
    assert record["core"] == pytest.approx(0.256525, abs=1e-6)
    assert record["tasks"]["boolq"]["centered"] == pytest.approx(-0.002632, abs=1e-6)
    assert sum(task.items for task in core.TASKS) == 91_037 and len(core.TASKS) == 22


def test_the_standard_error_is_the_spread_of_simulated_runs():
    torch.manual_seed(0)
    found = []
    for _ in range(150):
        rolled = torch.rand(22, 300) < torch.linspace(0.4, 0.8, 22)[:, None]
        figures = {task: figures_of(task, r) for task, r in zip(core.TASKS, rolled.tolist())}
        found.append(core.summary(figures))
    spread = torch.tensor([r["core"] for r in found]).std()
    told = sum(r["stderr"] for r in found) / len(found)
    assert told == pytest.approx(float(spread), rel=0.15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The real format: files of the 22 tasks, with 15 items each."""
    folder = tmp_path_factory.mktemp("bundle")
    for task in core.TASKS:
        path = folder / "eval_data" / f"{task.file}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, [vars(item) for item in TOY[task.kind][1]] * 5)
    return folder


def test_the_whole_of_core(own_run, folder, capsys):
    out = look(capsys, "core", own_run, "--device", "cpu", "--folder", folder, "--limit", 12)
    record = read_lines(own_run / "eval.jsonl")[-1]
    assert record["task"] == "core" and len(record["tasks"]) == 22 and record["seq_len"] == 64
    assert record["dtype"] == "fp32"
    mean = sum(f["centered"] for f in record["tasks"].values()) / 22
    assert record["core"] == pytest.approx(mean)
    assert f"CORE: {mean:.4f} +- {record['stderr']:.4f}" in out
    assert "12 of 100 " in out and "12 items lose their first examples" in out
    f = record["tasks"]["squad"]
    assert re.search(rf"^squad .* {f['accuracy']:.4f} \+- {f['stderr']:.4f}", out, re.M)


def test_mistakes_are_sentences(folder, tmp_path):
    """Said before the model is loaded."""
    for options, value in (
        (dict(), "--folder"),
        (dict(folder=str(tmp_path)), str(tmp_path)),
        (dict(folder=str(folder), limit=10), "--limit 11"),
    ):
        with pytest.raises(UsageError, match=value):
            core.score_core(core.CoreConfig(**options), None)
