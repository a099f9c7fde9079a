"""instruments/exams/core.py: prompts, spans and means against golden values of CORE's definition,
its traps one by one, GPT-2's published figures, and the command. All items are made by hand."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, look, read_json, read_lines, write_lines

from config import UsageError
from instruments.exams import core

BY_NAME = {task.name: task for task in core.TASKS}
GOLDEN = read_json(ROOT / "tests/instruments/exams/core.json")


def toy(name: str):
    """A task with the shots and the items for which golden values have been found."""
    golden = GOLDEN[name]
    task = replace(BY_NAME[golden["task"]], shots=golden["shots"])
    return task, [core.KINDS[task.kind](**item) for item in golden["items"]]


class Bytes:
    bos_id = 256

    def encode(self, text):
        return list(text.encode())


class Toy:
    """Logit 3 for what followed the last earlier occurrence of the current token, 0 for others."""

    def __init__(self, seq_len=10_000):
        self.config = SimpleNamespace(seq_len=seq_len, vocab_size=257)
        self.cos = torch.zeros(1)

    def __call__(self, idx):
        assert idx.size(1) <= self.config.seq_len
        logits = torch.zeros(*idx.shape, 257)
        for b, row in enumerate(idx.tolist()):
            followed = {}
            for t, token in enumerate(row):
                logits[b, t, followed.get(token, 0)] = 3.0
                if t + 1 < len(row):
                    followed[token] = row[t + 1]
        return logits


def scored(name, seq_len=10_000):
    return core.score(*toy(name), Toy(seq_len), Bytes(), 4)


def has_means(lines: list[dict], means: list[list[float]]):
    return [line["means"] for line in lines] == [
        pytest.approx(own, abs=5e-5, nan_ok=True) for own in means
    ]


def test_the_order_and_the_examples_are_cores():
    assert core.shuffled([*range(10)], 5) == [0, 3, 7, 2, 1]
    items = [core.Completion(str(k), "") for k in range(1000)]
    for n, shots, i, order in (
        (1000, 4, 7, "617 618 508 783 7"),
        (3, 2, 0, "2 1 0"),
        (3, 2, 1, "2 0 1"),
        (3, 2, 2, "1 0 2"),
    ):
        shown, _ = core.prompts(replace(BY_NAME["squad"], shots=shots), items[:n], i)
        assert re.findall(r"\d+", shown) == order.split()


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_means_and_hits_are_the_golden_ones(name):
    """No span begins or ends a token earlier or later: its mean would be another. Nor does the text
    before an answer, which the golden prompts have with it."""
    golden = GOLDEN[name]
    for i, prompt in golden["prompts"]:
        assert core.prompts(*toy(name), i)[-1] == prompt
    found = scored(name)
    assert has_means(found, golden["means"])
    assert [line["correct"] for line in found] == golden["correct"]


def test_a_row_that_is_too_long_loses_its_beginning(capsys):
    """BOS goes, and the span moves; where it does not fit, it begins at 1."""
    assert has_means(scored("mc", 48), GOLDEN["mc"]["means"])
    assert "arc_easy: 3 items lose their first" in capsys.readouterr().out
    assert has_means(scored("schema", 48), [[5.1921, 5.6207], [5.3207, 5.1707], [4.9284, 5.1592]])
    rows = [[256, *text.encode()] for text in core.prompts(*toy("schema"), 1)]
    assert [[*map(len, parts)] for parts in core.spans("schema", rows, 16)] == [[1, 15]] * 2
    for seq_len in (41, 39):
        capsys.readouterr()
        scored("lm", seq_len)  # 41 ids with BOS fit exactly
        assert ("items lose" in capsys.readouterr().out) == (seq_len == 39)


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
    cores = []
    told = 0
    for _ in range(150):
        rolled = torch.rand(22, 300) < torch.linspace(0.4, 0.8, 22)[:, None]
        figures = {task: figures_of(task, r) for task, r in zip(core.TASKS, rolled.tolist())}
        record = core.summary(figures)
        cores.append(record["core"])
        told += record["stderr"] / 150
    assert told == pytest.approx(torch.tensor(cores).std().item(), rel=0.15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The real format: files of the 22 tasks, with 15 items each."""
    folder = tmp_path_factory.mktemp("bundle")
    for task in core.TASKS:
        path = folder / "eval_data" / f"{task.file}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, [vars(item) for item in toy(task.kind)[1]] * 5)
    return folder


def test_the_whole_of_core(own_run, folder, capsys):
    out = look(capsys, "core", own_run, "--device", "cpu", "--folder", folder, "--limit", 12)
    record = read_lines(own_run / "eval.jsonl")[-1]
    assert record["task"] == "core" and record["seq_len"] == 64 and record["dtype"] == "fp32"
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
