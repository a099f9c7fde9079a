"""Multiple choice by log-likelihood: which of the answers does the model find likeliest?

`statistics` gives the figures of a task, those that lm_eval prints among them; `verdict` says in
words whether a figure means anything. Small models are at chance on most exams, so chance is
computed from the questions themselves, and a model that always names the same letter is told apart
from one that knows. A model that was tuned on conversations is asked in their template. eval.py
calls `answer_all`. Next: questions.py and harness.py have the questions.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from string import ascii_uppercase
from typing import Literal

from config import Count, UsageError, install
from instruments.exams.likelihood import log_likelihoods
from instruments.exams.lines import saving
from instruments.exams.questions import Question, continuations, from_file, sample
from machinery.trained import EvalConfig, is_tuned, keep_record, open_data, open_tokenizer
from model import GPT
from tokenizer import Tokenizer

NORMS = {"sum": lambda text: 1, "per character": len, "per byte": lambda text: len(text.encode())}
CONSTANT = 0.9  # a letter predicted more often than this is a constant answer

Answered = list[tuple[Question, list[float]]]  # questions, and the nats of their answers


@dataclass(frozen=True)
class ChoiceConfig(EvalConfig):
    """Multiple choice: which answer does the model find likeliest?"""

    task: tuple[str, ...] = ("continuation",)
    """continuation (held-out text, no download), tasks of lm_eval (hellaswag, arc_easy, mmlu ...)
    and of instruments/exams/tasks (enem, oab ...), or JSONL files with `query`, `choices` and
    `gold`."""
    shots: int = 0
    """Solved examples before each question."""
    limit: int = 0
    """Ask only N questions of each task, drawn from all, the same each time; 0: all."""
    batch: Count = 8
    """Answers per forward pass."""
    save: str = ""
    """Write each question's log-likelihoods to this JSONL file."""
    dtype: Literal["auto", "bf16", "fp32"] = "fp32"
    """Dtype of the computation. Only fp32 gives the figures of lm_eval: bf16 moves an answer's
    log-likelihood by a tenth of a nat, which decides close questions."""


def answer_all(config: ChoiceConfig, load_model: Callable) -> None:
    """`eval.py choice`: print the accuracy of each task, and keep a record of it."""
    model, trainer = load_model(config)
    tokenizer, tuned = open_tokenizer(config, trainer), is_tuned(trainer)
    if tuned:
        print("tuned on conversations: each question is a user's, each answer the model's")
    with saving(config.save) as save:
        measured = measure(config, model, tokenizer, lambda: open_data(config, trainer), tuned)
        for task, answered in measured.items():
            for question, nats in answered:
                save(task=task, gold=question.gold, nats=nats)
        for record in report(config, measured, tokenizer):
            keep_record(config, trainer, **record)


# ----------------------------------------------------------------------------- the measurement


def measure(
    config: ChoiceConfig,
    model: GPT,
    tokenizer: Tokenizer,
    load_manifest: Callable,
    tuned: bool = False,
) -> dict[str, Answered]:
    """Each task's questions with the nats of their answers. All tasks are read before the first is
    scored. load_manifest(): the data, if a task needs it."""
    if not config.task:
        raise UsageError("--task needs a name; leave it out for continuation")
    seq_len = model.config.seq_len
    read = {task: read_task(task, config, seq_len, load_manifest) for task in config.task}
    for task, questions in read.items():
        if len(questions) < 2:
            raise UsageError(
                f"{task} has {len(questions)} questions to ask; a standard error needs 2 or more"
            )
    return {task: score(own, model, tokenizer, config.batch, tuned) for task, own in read.items()}


def read_task(
    task: str, config: ChoiceConfig, seq_len: int, load_manifest: Callable
) -> list[Question]:
    """The questions of a task."""
    if task == "continuation":
        if config.shots:
            raise UsageError(f"continuation takes no examples; leave --shots {config.shots} out")
        return sample(continuations(load_manifest(), seq_len), config.limit)
    if task.endswith(".jsonl") or Path(task).is_file():
        return from_file(task, config.shots, config.limit)
    try:
        from instruments.exams import harness
    except ImportError as error:
        how = install("requirements-eval.txt")
        raise UsageError(f"--task {task} needs the package {error.name}: {how}") from None
    return list(harness.questions(task, config.shots, config.limit))


def score(
    questions: list[Question], model: GPT, tokenizer: Tokenizer, batch: int, tuned: bool = False
) -> Answered:
    """The nats of each question's answers."""
    pairs = [pair for question in questions for pair in question.pairs(tokenizer, tuned)]
    nats = iter(x for x, _ in log_likelihoods(model, pairs, batch, tell=True))
    return [(question, [next(nats) for _ in question.answers]) for question in questions]


# -------------------------------------------------------------------------------- the figures


def statistics(picks: Sequence[int], golds: Sequence[int], options: Sequence[int]) -> dict:
    """Accuracy with its standard error, sqrt(p (1 - p) / (n - 1)), and its distance from chance,
    z = (hits - sum of 1/k) / sqrt(sum of 1/k (1 - 1/k)) with k the options of each question.

    Also what a constant answer would look like: the share of the position picked most often, and
    the accuracy of always naming the position that is most often right."""
    n, hits = len(picks), sum(p == g for p, g in zip(picks, golds))
    expected = sum(1 / k for k in options)
    deviation = math.sqrt(sum(1 / k * (1 - 1 / k) for k in options))
    (picked, times), (best, right) = (Counter(x).most_common(1)[0] for x in (picks, golds))
    p = hits / n
    stderr, z = math.sqrt(p * (1 - p) / max(1, n - 1)), (hits - expected) / deviation
    score = dict(n=n, hits=hits, accuracy=p, stderr=stderr, z=z)
    score |= dict(chance=expected / n, chance_sd=deviation / n)
    score |= dict(most_picked=picked, most_picked_share=times / n)
    return score | dict(best_constant=best, best_constant_accuracy=right / n)


def by_tag(questions: Sequence[Question], picks: list[int]) -> dict[str, dict[str, dict]]:
    """{"subject": {"law": its n, hits, accuracy, z}}: the questions by each tag that divides them.
    A question without the tag counts under "none", so that the sums are those of all."""
    found: dict[str, dict[str, dict]] = {}
    for tag in dict.fromkeys(name for q in questions for name in q.tags):
        own: dict[str, list[tuple]] = {}
        for q, pick in zip(questions, picks):
            own.setdefault(q.tags.get(tag, "none"), []).append((pick, q.gold, len(q.answers)))
        if len(own) > 1:
            rows = {name: statistics(*zip(*own[name])) for name in sorted(own)}
            few = ("n", "hits", "accuracy", "z")
            found[tag] = {name: {key: f[key] for key in few} for name, f in rows.items()}
    return found


def group_lines(groups: dict[str, dict[str, dict]]) -> Iterator[str]:
    """A table for each tag."""
    for tag, rows in groups.items():
        limit = limit_of_z(len(rows))
        width = max(map(len, [tag, *rows]))
        yield f"    {tag:{width}}  questions  right  accuracy       z (* differs from chance)"
        for name, f in rows.items():
            far = " *" if abs(f["z"]) > limit else ""
            figures = f"{f['n']:>9,}  {f['hits']:>5,}  {f['accuracy']:>8.4f}  {f['z']:+6.2f}{far}"
            yield f"    {name:{width}}  {figures}"


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


def norms_of(texts: list[tuple[str, ...]]) -> list[str]:
    """`sum`, and each measure of length that differs between the answers of a question: letters
    have one length, so that dividing by it changes nothing."""
    differ = lambda length: any(len(set(map(length, answers))) > 1 for answers in texts)
    return ["sum", *(name for name, length in NORMS.items() if differ(length))]


def picks_of(nats: list[list[float]], texts: list[tuple[str, ...]], norm: str) -> list[int]:
    """The likeliest answer of each question. norm: by the sum of the nats, or by that divided by
    the answer's characters or bytes (not counting the space in front)."""
    length = NORMS[norm]
    scaled = [
        [x / max(1, length(text)) for x, text in zip(*question)] for question in zip(nats, texts)
    ]
    return [values.index(max(values)) for values in scaled]


def report(
    config: ChoiceConfig, measured: dict[str, Answered], tokenizer: Tokenizer
) -> Iterator[dict]:
    """Print the figures of each task; yields a record of each."""
    texts = {
        task: [question.texts(tokenizer) for question, _ in answered]
        for task, answered in measured.items()
    }
    count = sum(len(norms_of(own)) for own in texts.values())
    limit = limit_of_z(count)
    for task, answered in measured.items():
        questions, nats = zip(*answered)
        golds, options = [q.gold for q in questions], [len(q.answers) for q in questions]
        letters = all(own == tuple(ascii_uppercase[: len(own)]) for own in texts[task])
        chance = sum(1 / k for k in options) / len(options)
        print(f"{task}: {len(questions):,} questions, {config.shots} examples, chance {chance:.4f}")
        for norm in norms_of(texts[task]):
            picks = picks_of(nats, texts[task], norm)
            f = statistics(picks, golds, options)
            print(
                f"  {norm:13}  {f['accuracy']:.4f} +- {f['stderr']:.4f}  z {f['z']:+6.2f}  "
                f"{verdict(f, limit, letters)}"
            )
            groups = by_tag(questions, picks) if norm == "sum" else {}
            yield dict(task=task, norm=norm, **f) | (dict(by=groups) if groups else {})
            for line in group_lines(groups):
                print(line)
            if letters:
                print(
                    f"  {ascii_uppercase[f['most_picked']]} is predicted in "
                    f"{f['most_picked_share']:.1%} of the questions; always "
                    f"{ascii_uppercase[f['best_constant']]} would score "
                    f"{f['best_constant_accuracy']:.4f}"
                )
    print(f"{count} scores: one differs from chance if |z| > {limit:.2f} (5% family-wise error)")
