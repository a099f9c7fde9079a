"""Multiple choice by log-likelihood: which of the answers does the model find likeliest?

`statistics` gives the figures of a task, those that lm_eval prints among them; `verdict` says in
words whether a figure means anything. Small models are at chance on most exams, so chance is
computed from the questions themselves, and a model that always names the same letter is told apart
from one that knows. A model that was tuned on conversations is asked in their template. Public
exams are taken by lm_eval itself, from an export; tasks/ has those that it lacks. eval.py calls
`answer_all`. Next: likelihood.py.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from string import ascii_uppercase

from config import Count, Dtype, UsageError
from instruments.exams.likelihood import encode_pair, log_likelihoods
from instruments.exams.lines import read_lines
from machinery.formats import Whole
from machinery.output import say
from machinery.trained import EvalConfig, Trained

NORMS = {"sum": lambda text: 1, "per character": len}  # lm_eval's acc, acc_norm
CONSTANT = 0.9  # a letter predicted more often than this is a constant answer


@dataclass(frozen=True)
class ChoiceConfig(EvalConfig):
    """Multiple choice: which answer does the model find likeliest?"""

    task: tuple[str, ...] = ()
    """JSONL files with `query`, `choices` and `gold` on each line."""
    shots: int = 0
    """Solved examples before each question: the first lines of its file."""
    batch: Count = 8
    """Answers per forward pass."""
    dtype: Dtype = "fp32"
    """Dtype of the computation. Only fp32 gives the figures of lm_eval: bf16 moves an answer's
    log-likelihood by a tenth of a nat, which decides close questions."""


def answer_all(config: ChoiceConfig, load_model: Callable) -> None:
    """`eval.py choice`: print the accuracy of each task, and keep a record of it."""
    if not config.task:
        raise UsageError("choice needs a file of questions: --task FILE.jsonl (docs/evaluation.md)")
    asked = {task: read_questions(task, config.shots) for task in config.task}
    loaded = load_model(config)
    answered = {task: score(own, loaded, config.batch) for task, own in asked.items()}
    for record in report(answered, config.shots):
        loaded.append_result(**record)


# ------------------------------------------------------------------------------ the questions


@dataclass
class Question:
    """A line of a file. The likelihoods of the choices, after the query and a space, are
    compared; gold: the place of the right one."""

    query: str
    choices: tuple[str, ...]
    gold: Whole

    def __post_init__(self):
        n = len(self.choices)
        if not max(1, self.gold) < n <= 26 or len({*self.choices} - {""}) < n:
            raise ValueError(
                f"it needs 2 to 26 different choices, none of them empty, and number {self.gold}, "
                "counted from 0, is to be the right one"
            )


Answered = list[tuple[Question, list[float]]]  # questions, and the nats of their answers


def read_questions(task: str, shots: int) -> list[Question]:
    """The questions of a JSONL file except its first `shots`, which precede each as solved
    examples."""
    if not Path(task).is_file():
        raise UsageError(
            f"--task {task} is no file; public exams are lm_eval's: python export.py MODEL, then "
            "lm_eval --model hf --model_args pretrained=FOLDER,trust_remote_code=True "
            f"--include_path instruments/exams/tasks --tasks {task}"
        )
    rows = read_lines(task, Question)
    examples = "".join(f"{row.query} {row.choices[row.gold]}\n\n" for row in rows[:shots])
    found = [replace(row, query=examples + row.query) for row in rows[shots:]]
    if len(found) < 2:
        raise UsageError(
            f"--shots {shots} leaves {len(found)} to ask; a standard error of {task} needs 2"
        )
    return found


def score(questions: list[Question], loaded: Trained, batch: int) -> Answered:
    """The nats of each question's answers."""
    pairs = [
        encode_pair(loaded.tokenizer, question.query, f" {answer}", loaded.provenance.tuned)
        for question in questions
        for answer in question.choices
    ]
    nats = iter(x for x, _ in log_likelihoods(loaded.model, pairs, batch))
    return [(question, [next(nats) for _ in question.choices]) for question in questions]


# -------------------------------------------------------------------------------- the figures


def statistics(picks: Sequence[int], golds: Sequence[int], options: Sequence[int]) -> dict:
    """Accuracy with its standard error, sqrt(p (1 - p) / (n - 1)), and its distance from chance,
    z = (hits - sum of 1/k) / sqrt(sum of 1/k (1 - 1/k)) with k the options.

    Also what a constant answer would look like: the share of the position picked most often, and
    the accuracy of always naming the position that is most often right."""
    n = len(picks)
    hits = sum(pick == gold for pick, gold in zip(picks, golds))
    p = hits / n
    expected = sum(1 / k for k in options)
    picked, times = Counter(picks).most_common(1)[0]
    best, right = Counter(golds).most_common(1)[0]
    return dict(
        n=n,
        hits=hits,
        accuracy=p,
        stderr=math.sqrt(p * (1 - p) / (n - 1)),
        z=(hits - expected) / math.sqrt(sum(1 / k * (1 - 1 / k) for k in options)),
        chance=expected / n,
        most_picked=picked,
        most_picked_share=times / n,
        best_constant=best,
        best_constant_accuracy=right / n,
    )


def limit_of_z(count: int) -> float:
    """A |z| that, of `count` scores at chance, one or more exceed in at most 5% of cases
    (Bonferroni)."""
    return NormalDist().inv_cdf(1 - 0.05 / count / 2)


def verdict(figures: dict, limit: float, letters: bool) -> str:
    """A figure in plain words; a |z| up to `limit` cannot be told from chance."""
    if letters and figures["most_picked_share"] > CONSTANT:
        return f"a constant answer: nearly always {ascii_uppercase[figures['most_picked']]}"
    if abs(figures["z"]) <= limit:
        return "cannot be told from chance"
    if figures["z"] < 0:
        return "below chance"
    if letters and figures["accuracy"] <= figures["best_constant_accuracy"]:
        return "above chance, but no better than a constant answer"
    return "above chance"


def picks_of(own: Answered, norm: str) -> list[int]:
    """The likeliest answer of each question. norm: by the sum of the nats, or by that divided by
    the characters of the answer (without the space in front)."""
    picks = []
    for question, nats in own:
        scaled = [x / NORMS[norm](text) for x, text in zip(nats, question.choices)]
        picks.append(scaled.index(max(scaled)))
    return picks


def report(answered: dict[str, Answered], shots: int) -> Iterator[dict]:
    """Print the figures of each task; yields a record of each."""
    limit = limit_of_z(len(NORMS) * len(answered))
    for task, own in answered.items():
        letters = all("".join(q.choices) == ascii_uppercase[: len(q.choices)] for q, _ in own)
        say(f"{task}: {len(own):,} questions, {shots} examples")
        for norm in ("sum",) if letters else NORMS:
            f = statistics(
                picks_of(own, norm), [q.gold for q, _ in own], [len(nats) for _, nats in own]
            )
            say(
                f"  {norm:13}  {f['accuracy']:.4f} +- {f['stderr']:.4f}  "
                f"chance {f['chance']:.4f}  z {f['z']:+6.2f}  {verdict(f, limit, letters)}"
            )
            yield dict(task=task, norm=norm, **f)
    say(f"a score differs from chance if |z| > {limit:.2f} (5% family-wise error)")
