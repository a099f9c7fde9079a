"""CORE: the mean of 22 centered accuracies of a base model, and how it stands beside GPT-2's.

Reads the 22 tasks' files from a folder (WHERE says where to get it); prints a line for each task,
then CORE. Nothing is sampled: a task is multiple choice (mc: the likeliest of several answers),
schema (the likeliest of several contexts of one continuation) or lm (each token of the answer must
be the likeliest). Prompts, spans and picks are those of nanochat's core_eval.py, the metric that of
DCLM (arXiv 2406.11794). eval.py calls `score_core`.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from os.path import commonprefix
from pathlib import Path

from config import Count, Dtype, Local, UsageError
from instruments.exams.likelihood import Pair, log_likelihoods
from instruments.exams.lines import read_lines
from machinery.formats import Whole
from machinery.output import say
from machinery.trained import EvalConfig
from model import GPT
from tokenizer import Tokenizer

WHERE = (
    "get the folder from nanochat's evaluation bundle (its scripts/base_eval.py has the address) "
    "or by git clone --depth 1 https://github.com/mosaicml/llm-foundry, and name it: --folder"
)


@dataclass(frozen=True)
class CoreConfig(EvalConfig):
    """CORE, and GPT-2's beside it."""

    folder: Local = ""
    """Folder with the tasks' files."""
    limit: int = 0
    """At most this many items of each task, after CORE's shuffle; 0: all."""
    batch: Count = 8
    """Rows per forward pass."""
    dtype: Dtype = "fp32"
    """Dtype of the computation; bf16 changes the result of close items."""


@dataclass(frozen=True)
class Task:
    """A line of core.jsonl. base: the baseline accuracy, in percent, of DCLM's
    eval_meta_data_v1.csv, by which GPT-2 XL has 0.256525 (0.2309 by the later table)."""

    name: str
    kind: str  # mc, schema or lm
    shots: int
    delimiter: str
    base: float
    items: int
    gpt2_xl: float  # accuracy, on at most 1,000 items
    file: str


TASKS = read_lines(Path(__file__).with_name("core.jsonl"), Task)  # in CORE's order


# ---------------------------------------------------------------------------------- the items


@dataclass
class Choice:
    """mc: several answers."""

    query: str
    choices: tuple[str, ...]
    gold: Whole

    def written(self, delimiter: str) -> list[str]:
        return [self.query + delimiter + choice for choice in self.choices]


@dataclass
class Schema:
    """schema: several contexts."""

    context_options: tuple[str, ...]
    continuation: str
    gold: Whole

    def written(self, delimiter: str) -> list[str]:
        return [context + delimiter + self.continuation for context in self.context_options]


@dataclass
class Completion:
    """lm: the one answer."""

    context: str
    continuation: str
    gold = 0

    def written(self, delimiter: str) -> list[str]:
        return [self.context.strip() + delimiter + self.continuation]


Item = Choice | Schema | Completion
KINDS = {"mc": Choice, "schema": Schema, "lm": Completion}


def shuffled(items: list[Item], limit: int) -> list[Item]:
    """The list in CORE's order; examples too come from the items that the limit leaves."""
    random.Random(1337).shuffle(items)
    return items[: limit or None]


def prompts(task: Task, items: list[Item], i: int) -> list[str]:
    """How item i is asked: a prompt for each answer (mc) or context (schema); for lm, one
    without the answer and one with it."""
    shown = random.Random(1234 + i).sample(items[:i] + items[i + 1 :], task.shots)
    right = [item.written(task.delimiter)[item.gold] for item in shown]
    before = "".join(f"{text}\n\n" for text in right)
    texts = [before + text for text in items[i].written(task.delimiter)]
    if task.kind == "lm":
        texts.insert(0, (before + items[i].context.strip() + task.delimiter).strip())
    return texts


# -------------------------------------------------------------------------------- the scoring


def spans(kind: str, rows: list[list[int]], seq_len: int) -> list[Pair]:
    """The ids of an item's prompts, BOS in front -> (context, the span that is scored) of each:
    from where they differ (mc), the end that they share (schema), or what the second has after
    the first (lm). A prompt longer than seq_len loses its beginning, and BOS with it."""
    starts = [len(commonprefix(rows))] * len(rows)
    if kind == "schema":
        shared = len(commonprefix([row[::-1] for row in rows]))
        starts = [len(row) - shared for row in rows]
    pairs = []
    for row, start in zip(rows, starts):
        start = max(1, start - max(0, len(row) - seq_len))
        row = row[-seq_len:]
        pairs.append((row[:start], row[start:]))
    return pairs[1:] if kind == "lm" else pairs


def score(
    task: Task, items: list[Item], model: GPT, tokenizer: Tokenizer, batch: int
) -> list[dict]:
    """For each item: whether the model is right; and the mean nats per token of its spans, NaN for
    an empty one, as where one answer begins another. Prints how many items were cropped."""
    seq_len = model.config.seq_len
    pairs = []  # of each item
    cropped = 0
    for i in range(len(items)):
        asked = prompts(task, items, i)
        rows = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in asked]
        cropped += max(map(len, rows)) > seq_len
        pairs.append(spans(task.kind, rows, seq_len))
    if cropped:
        say(f"{task.name}: {cropped:,} items lose their first examples: seq_len is {seq_len}")
    found = iter(log_likelihoods(model, [*chain(*pairs)], batch))
    lines = []
    for item, own in zip(items, pairs):
        nats, hits = zip(*islice(found, len(own)))
        means = [-x / len(span) if span else math.nan for x, (_, span) in zip(nats, own)]
        # The first of the smallest; a NaN only if it stands first.
        correct = hits[0] if task.kind == "lm" else means.index(min(means)) == item.gold
        lines.append(dict(correct=correct, means=means))
    return lines


def figures_of(task: Task, lines: list[dict]) -> dict:
    """For a task: accuracy with its standard error; and the accuracy centered: 0 at the baseline, 1
    if all is right."""
    n = len(lines)
    p = sum(line["correct"] for line in lines) / n
    return dict(
        n=n,
        accuracy=p,
        stderr=math.sqrt(p * (1 - p) / (n - 1)),
        centered=(100 * p - task.base) / (100 - task.base),
    )


def summary(figures: dict[Task, dict]) -> dict:
    """The record for eval.jsonl: CORE, the mean of the centered accuracies, with its standard
    error; and the tasks' figures."""
    count = len(figures)
    errors = [100 * f["stderr"] / (100 - task.base) for task, f in figures.items()]
    return dict(
        task="core",
        core=sum(f["centered"] for f in figures.values()) / count,
        stderr=math.hypot(*errors) / count,
        tasks={task.name: f for task, f in figures.items()},
    )


# ------------------------------------------------------------------------------------- the run


def score_core(config: CoreConfig, load_model: Callable) -> None:
    """`eval.py core`: score the tasks, print their figures and CORE, and keep a record."""
    if not config.folder:
        raise UsageError(f"core needs the folder of the tasks' files; {WHERE}")
    asked = {}
    for task in TASKS:
        path = next(Path(config.folder).rglob(f"{task.file}.jsonl"), None)
        if path is None:
            raise UsageError(f"{config.folder} has no {task.file}.jsonl; {WHERE}")
        items = shuffled(read_lines(path, KINDS[task.kind]), config.limit)
        if len(items) <= max(1, task.shots):
            raise UsageError(
                f"{task.name} has {len(items)} items to ask, too few beside its examples; "
                f"try --limit {max(2, task.shots + 1)} or more"
            )
        asked[task] = items
    loaded = load_model(config)
    figures = {}
    say(
        "task                             shots             items  accuracy          centered  "
        "GPT-2 XL"
    )
    for task, items in asked.items():
        f = figures_of(task, score(task, items, loaded.model, loaded.tokenizer, config.batch))
        figures[task] = f
        say(
            f"{task.name:33}{task.shots:>5} {f['n']:>7,} of {task.items:<6,}  {f['accuracy']:.4f} "
            f"+- {f['stderr']:.4f}  {f['centered']:+8.4f}  {task.gpt2_xl:8.3f}"
        )
    record = summary(figures)
    say(f"CORE: {record['core']:.4f} +- {record['stderr']:.4f}")
    say("GPT-2 XL: 0.2565 +- 0.0071, on at most 1,000 items of each task, as --limit 1000")
    loaded.append_result(seq_len=loaded.model.config.seq_len, **record)
