"""CORE: the mean of 22 centered accuracies of a base model, and how it stands beside GPT-2's.

Reads the 22 tasks' files from a folder (WHERE says where to get it); prints a line for each task,
then CORE. Nothing is sampled: a task is multiple choice (mc: the likeliest of several answers),
schema (the likeliest of several contexts of one continuation) or lm (each token of the answer must
be the likeliest). Prompts, spans and picks are those of nanochat's core_eval.py, the metric that of
DCLM (arXiv 2406.11794). eval.py calls `measure`.
"""

import csv
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path

from tqdm import tqdm

from config import Count, Dtype, Local, UsageError
from instruments.exams.likelihood import Pair, log_likelihoods
from instruments.exams.lines import LARGEST, check_options, read_lines
from machinery import cli, disk
from machinery.formats import Whole
from machinery.output import say
from machinery.trained import EvalConfig
from model import GPT
from tokenizer import Tokenizer

WHERE = (
    "get the folder from nanochat's evaluation bundle (its scripts/base_eval.py has the address) "
    "or by git clone --depth 1 https://github.com/mosaicml/llm-foundry, and name it: --folder"
)
CHUNK = 256  # items that are encoded and scored at once
HEAD = (
    "task                             shots            items  accuracy            centered"
    "          GPT-2 XL  constant"
)


@dataclass(frozen=True)
class CoreConfig(EvalConfig):
    """CORE, and GPT-2's beside it."""

    folder: Local = ""
    """Folder with the tasks' files."""
    tasks: tuple[str, ...] = ()
    """Some of the tasks, as in `--tasks copa piqa`; empty: all 22."""
    limit: int = 0
    """At most this many items of each task, after CORE's shuffle; 0: all."""
    batch: Count = 8
    """Rows per forward pass."""
    dtype: Dtype = "fp32"
    """Dtype of the computation; bf16 changes the result of close items."""


@dataclass(frozen=True)
class Task:
    """A row of core.csv. base: the baseline accuracy, in percent, of DCLM's
    eval_meta_data_v1.csv, by which GPT-2 XL has 0.256525 (0.2309 by the later table)."""

    name: str
    kind: str  # mc, schema or lm
    shots: int
    delimiter: str
    base: float
    items: int
    file: str
    blob: str  # the first digits of `git hash-object FILE`
    gpt2_xl: float  # accuracy, on at most 1,000 items


def read_table() -> list[Task]:
    """The tasks, in CORE's order."""
    rows = csv.DictReader(disk.read_text(Path(__file__).with_name("core.csv")).splitlines())
    tasks = (Task(**{f.name: f.type(row[f.name]) for f in fields(Task)}) for row in rows)
    return [replace(task, delimiter=task.delimiter.replace("\\n", "\n")) for task in tasks]


TASKS = read_table()
GPT2_XL = 0.256525  # its CORE on at most 1,000 items a task
XL_ERROR = 0.0071  # its standard error


# ---------------------------------------------------------------------------------- the items


@dataclass(frozen=True)
class Choice:
    """mc: several answers."""

    query: str
    choices: tuple[str, ...]
    gold: Whole

    def __post_init__(self):
        check_options(self.choices, self.gold)

    def written(self, delimiter: str) -> list[str]:
        return [self.query + delimiter + choice for choice in self.choices]


@dataclass(frozen=True)
class Schema:
    """schema: several contexts."""

    context_options: tuple[str, ...]
    continuation: str
    gold: Whole

    def __post_init__(self):
        check_options(self.context_options, self.gold)

    def written(self, delimiter: str) -> list[str]:
        return [context + delimiter + self.continuation for context in self.context_options]


@dataclass(frozen=True)
class Completion:
    """lm: the one answer."""

    context: str
    continuation: str

    def written(self, delimiter: str) -> list[str]:
        return [self.context.strip() + delimiter + self.continuation]


Item = Choice | Schema | Completion
KINDS = {"mc": Choice, "schema": Schema, "lm": Completion}


def find_files(tasks: list[Task], folder: str) -> dict[Task, Path]:
    """The files that are there, wherever in the folder a bundle or a clone has them."""
    paths = {task: next(Path(folder).rglob(f"{task.file}.jsonl"), None) for task in tasks}
    found = {task: path for task, path in paths.items() if path}
    if found:
        return found
    raise UsageError(f"{folder} has no file of a task, as {tasks[0].file}.jsonl; {WHERE}")


def git_blob(path: Path) -> str:
    """The hash that `git hash-object` prints for a file."""
    content = disk.read_bytes(path, LARGEST)
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def shuffled(items: list[Item], limit: int) -> list[Item]:
    """In CORE's order; examples too come from the items that the limit leaves after the shuffle."""
    items = list(items)
    random.Random(1337).shuffle(items)
    return items[: limit or None]


def examples_of(i: int, n: int, shots: int) -> list[int]:
    """The indices of item i's examples among n items: a sample of all the others."""
    indices = random.Random(1234 + i).sample(range(n - 1), shots)
    return [index + (index >= i) for index in indices]


def prompts(task: Task, items: list[Item], i: int) -> list[str]:
    """How item i is asked: a prompt for each answer (mc) or context (schema); for lm, one
    without the answer and one with it."""
    shown = [items[k] for k in examples_of(i, len(items), task.shots)]
    right = [item.written(task.delimiter)[getattr(item, "gold", 0)] for item in shown]
    before = "".join(f"{text}\n\n" for text in right)
    texts = [before + text for text in items[i].written(task.delimiter)]
    if task.kind == "lm":
        texts.insert(0, (before + items[i].context.strip() + task.delimiter).strip())
    return texts


# -------------------------------------------------------------------------------- the scoring


def common(rows: list[list[int]]) -> int:
    """How many ids all rows begin with."""
    return sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*rows)))


def spans(kind: str, rows: list[list[int]], seq_len: int) -> list[Pair]:
    """The ids of an item's prompts, BOS in front -> (context, the span that is scored) of each:
    from where they differ (mc), the end that they share (schema), or what the second has after
    the first (lm). A prompt longer than seq_len loses its beginning, and BOS with it."""
    starts = [common(rows)] * len(rows)
    if kind == "schema":
        shared = common([row[::-1] for row in rows])
        starts = [len(row) - shared for row in rows]
    pairs = []
    for row, start in zip(rows, starts):
        start = max(1, start - max(0, len(row) - seq_len))
        row = row[-seq_len:]
        pairs.append((row[:start], row[start:]))
    return pairs[1:] if kind == "lm" else pairs


def pick(means: list[float]) -> int:
    """As Python's min: the first of the smallest; a NaN only if it stands first."""
    return means.index(min(means))


def score(
    task: Task, items: list[Item], model: GPT, tokenizer: Tokenizer, batch: int
) -> list[dict]:
    """For each item: whether the model is right; the mean nats per token of its spans, NaN for an
    empty one, as where one answer begins another; and whether it was cropped."""
    lines = []
    seq_len = model.config.seq_len
    is_lm = task.kind == "lm"
    for start in tqdm(range(0, len(items), CHUNK), task.name, disable=None, leave=False):
        indices = range(start, min(start + CHUNK, len(items)))
        rows = [
            [[tokenizer.bos_id, *tokenizer.encode(text)] for text in prompts(task, items, i)]
            for i in indices
        ]
        pairs = [spans(task.kind, own, seq_len) for own in rows]
        flat = [pair for own in pairs for pair in own]
        found = iter(log_likelihoods(model, flat, batch, greedy=is_lm))
        for i, asked, own in zip(indices, rows, pairs):
            nats, hits = zip(*(next(found) for _ in own))
            means = [-x / len(span) if span else math.nan for x, (_, span) in zip(nats, own)]
            correct = hits[0] if is_lm else pick(means) == items[i].gold
            cropped = any(len(row) > seq_len for row in asked)
            lines.append(dict(correct=correct, means=means, cropped=cropped))
    return lines


def figures_of(task: Task, items: list[Item], lines: list[dict]) -> dict:
    """For a task: accuracy with its standard error, both centered too, and what guessing and an
    answer that is always the same would get."""
    n = len(items)
    hits = sum(line["correct"] for line in lines)
    scale = 1 - task.base / 100
    p = hits / n
    stderr = math.sqrt(p * (1 - p) / (n - 1))
    if task.kind == "lm":
        guess = 0.0
        answers = Counter(item.continuation for item in items)
    else:
        guess = sum(1 / len(item.written("")) for item in items) / n
        answers = Counter(item.gold for item in items)
    return dict(
        n=n,
        hits=hits,
        accuracy=p,
        stderr=stderr,
        centered=centered(p, task),
        centered_stderr=stderr / scale,
        guess=guess,
        guess_sd=math.sqrt(guess * (1 - guess) / n) / scale,
        constant_accuracy=max(answers.values()) / n,
        cropped=sum(line["cropped"] for line in lines),
    )


# ------------------------------------------------------------------------------------- the run


def measure(config: CoreConfig, load_model: Callable) -> None:
    """`eval.py core`: score the tasks, print their figures and CORE, and keep a record."""
    if not config.folder:
        raise UsageError(f"core needs the folder of the tasks' files; {WHERE}")
    by_name = {task.name: task for task in TASKS}
    tasks = [cli.find("task", name, by_name) for name in dict.fromkeys(config.tasks)] or TASKS
    asked = {}
    for task, path in find_files(tasks, config.folder).items():
        asked[task] = shuffled(read_lines(path, KINDS[task.kind]), config.limit)
        if len(asked[task]) <= max(1, task.shots):
            raise UsageError(
                f"{task.name} has {len(asked[task])} items to ask, too few beside its examples; "
                f"try --limit {max(2, task.shots + 1)} or more"
            )
        if not git_blob(path).startswith(task.blob):
            say(f"warning: {path} is not the file that CORE is measured on")
    loaded = load_model(config)
    model = loaded.model
    figures = {}
    say(f"CORE: {len(asked)} of {len(TASKS)} tasks, seq_len {model.config.seq_len}")
    say(HEAD)
    for task, items in asked.items():
        scored = score(task, items, model, loaded.tokenizer, config.batch)
        figures[task] = figures_of(task, items, scored)
        show(task, figures[task])
    record = summary(figures)
    say("\n".join(conclusion(record)))
    loaded.keep_record(seq_len=model.config.seq_len, **record)


def show(task: Task, f: dict) -> None:
    """Print the line of a task."""
    items = f"{f['n']:,} of {task.items:,}"
    say(
        f"{task.name:33}{task.shots:>5} {items:>16}  {f['accuracy']:.4f} +- {f['stderr']:.4f}  "
        f"{f['centered']:+.4f} +- {f['centered_stderr']:.4f}  {task.gpt2_xl:8.3f}  "
        f"{f['constant_accuracy']:8.3f}"
    )
    if f["cropped"]:
        say(f"    {f['cropped']:,} items cropped: they lost their first examples")


# ------------------------------------------------------------------------------ the conclusion


def summary(figures: dict[Task, dict]) -> dict:
    """The record for eval.jsonl: the mean of the centered accuracies, called `core` only if all
    tasks are there, with its standard error; what guessing and constant answers would get; and the
    tasks' figures."""
    count = len(figures)
    whole = count == len(TASKS)
    mean = lambda name: sum(centered(f[name], task) for task, f in figures.items()) / count
    error = lambda name: math.sqrt(sum(f[name] ** 2 for f in figures.values())) / count
    return {
        "task": "core" if whole else f"core, {count} of {len(TASKS)} tasks",
        "core" if whole else "mean": mean("accuracy"),
        "n": sum(f["n"] for f in figures.values()),
        "stderr": error("centered_stderr"),
        "constant": mean("constant_accuracy"),
        "chance": mean("guess"),
        "chance_sd": error("guess_sd"),
        "tasks": {task.name: f for task, f in figures.items()},
    }


def centered(accuracy: float, task: Task) -> float:
    """0 at the baseline, 1 if all is right."""
    return (100 * accuracy - task.base) / (100 - task.base)


def conclusion(record: dict) -> Iterator[str]:
    """CORE, GPT-2's, and what may be concluded."""
    error = record["stderr"]
    if "core" not in record:
        yield f"{record['task']}: mean {record['mean']:.4f} +- {error:.4f}; this is not CORE"
        return
    core = record["core"]
    yield f"CORE: {core:.4f} +- {error:.4f} by the baselines of eval_meta_data_v1.csv"
    yield f"GPT-2 XL: {GPT2_XL} +- {XL_ERROR}, on at most 1,000 items a task, as --limit 1000"
    yield f"guessing: {record['chance']:+.4f} +- {record['chance_sd']:.4f}"
    yield f"the best constant answer to each task: {record['constant']:+.4f}"
    two = 2 * math.sqrt(error**2 + XL_ERROR**2)
    far = f"{abs(core - GPT2_XL):.4f}; two standard errors of the difference are {two:.4f}"
    if core - GPT2_XL > two:
        yield f"GPT-2 grade: above GPT-2 XL by {far}"
    elif GPT2_XL - core > two:
        yield f"below GPT-2 XL by {far}"
    else:
        yield f"cannot be told from GPT-2 XL: it differs by {far}"
