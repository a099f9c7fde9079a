"""CORE: the mean of 22 centered accuracies of a base model, and how it stands beside GPT-2's.

Reads the 22 tasks' files from a folder (`choice --task core=FOLDER`; WHERE says where to get it);
prints a line for each task, then CORE by two tables of baselines. Nothing is sampled: a task is
multiple choice (mc: the likeliest of several answers), schema (the likeliest of several contexts of
one continuation) or lm (each token of the answer must be the likeliest). Prompts, spans and picks
are those of nanochat's core_eval.py, the metric that of DCLM (arXiv 2406.11794). A finished task
stays in RUN_DIR/core, so that a killed run goes on with the next. choice.py calls `run`.
"""

import hashlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from string import ascii_uppercase

import torch
import torch.nn.functional as F

from config import UsageError
from instruments.choice import log_likelihoods, padded
from machinery import cli, disk
from machinery.errors import DataError, NonFiniteError
from machinery.log import duration
from machinery.trained import run_of
from model import GPT
from tokenizer import Tokenizer

WHERE = (
    "get the folder from nanochat's evaluation bundle (its scripts/base_eval.py has the address) "
    "or by git clone --depth 1 https://github.com/mosaicml/llm-foundry, and give it as in --task "
    "core=FOLDER (or core:copa,piqa=FOLDER for some of its tasks)"
)
CHUNK = 256  # items that are encoded and scored at once
LOGITS = 1 << 27  # of a forward pass of an lm task: 0.5 GB in fp32


@dataclass(frozen=True)
class Task:
    """A row of the table. base: accuracy without knowledge, in percent, in DCLM's
    eval_meta_data_v1.csv, which is behind GPT-2 XL's 0.256525; later: in its eval_meta_data.csv."""

    name: str
    kind: str  # mc, schema or lm
    shots: int
    delimiter: str
    base: float
    later: float
    items: int
    file: str
    blob: str  # the first digits of `git hash-object FILE`
    gpt2_xl: float  # accuracy, on at most 1,000 items
    letters: bool = False  # the answers are letters


A, S = "\nAnswer: ", " "
LANGUAGE, WORLD = "language_understanding/", "world_knowledge/"
COMMON, SYMBOLS = "commonsense_reasoning/", "symbolic_problem_solving/"
READING, HELLASWAG = "reading_comprehension/", ("hellaswag_zeroshot", "hellaswag")
TASKS = [
    Task("hellaswag_zeroshot", "mc", 0, S, 25, 25, 10042, LANGUAGE + "hellaswag", "448321079f",
         .502),
    Task("jeopardy", "lm", 10, A, 0, 0, 2117, WORLD + "jeopardy_all", "2f771918db", .092),
    Task("bigbench_qa_wikidata", "lm", 10, S, 0, 0, 20321, WORLD + "bigbench_qa_wikidata",
         "5e1be72797", .531),
    Task("arc_easy", "mc", 10, A, 25, 25, 2376, WORLD + "arc_easy", "b5fd1bf87a", .595),
    Task("arc_challenge", "mc", 10, A, 25, 25, 1172, WORLD + "arc_challenge", "ce66b8dcfb", .299),
    Task("copa", "mc", 0, S, 50, 50, 100, COMMON + "copa", "b22f96e08a", .670),
    Task("commonsense_qa", "mc", 10, S, 20, 40.3, 1221, COMMON + "commonsense_qa", "f1cc16a88b",
         .227, letters=True),
    Task("piqa", "mc", 10, A, 50, 50, 1838, COMMON + "piqa", "a9992adfde", .725),
    Task("openbook_qa", "mc", 0, S, 25, 25, 500, COMMON + "openbook_qa", "a8aff255a6", .346),
    Task("lambada_openai", "lm", 0, S, 0, 0, 5153, LANGUAGE + "lambada_openai", "4da02dd53b", .523),
    Task("hellaswag", "mc", 10, S, 25, 25, 10042, LANGUAGE + "hellaswag", "448321079f", .512),
    Task("winograd", "schema", 0, S, 50, 50, 273, LANGUAGE + "winograd_wsc", "762fe030ac", .714286),
    Task("winogrande", "schema", 0, S, 50, 50, 1267, LANGUAGE + "winogrande", "316e87ae46", .569),
    Task("bigbench_dyck_languages", "lm", 10, S, 0, 0, 1000, SYMBOLS + "bigbench_dyck_languages",
         "27a4ac2b3b", .247),
    Task("agi_eval_lsat_ar", "mc", 3, S, 20, 25, 230, SYMBOLS + "agi_eval_lsat_ar", "d663b427ba",
         .273913, letters=True),
    Task("bigbench_cs_algorithms", "lm", 10, S, 0, 0, 1320, SYMBOLS + "bigbench_cs_algorithms",
         "7ecee0f270", .417),
    Task("bigbench_operators", "lm", 10, S, 0, 0, 210, SYMBOLS + "bigbench_operators", "a982dc4f96",
         .157143),
    Task("bigbench_repeat_copy_logic", "lm", 10, S, 0, 0, 32,
         SYMBOLS + "bigbench_repeat_copy_logic", "86621f10e7", .09375),
    Task("squad", "lm", 10, S, 0, 0, 10570, READING + "squad", "dc733b8f58", .309),
    Task("coqa", "lm", 0, S, 0, 0, 7983, READING + "coqa", "028bd4e513", .280),
    Task("boolq", "mc", 10, A, 62, 62, 3270, READING + "boolq", "f42083a587", .619),
    Task("bigbench_language_identification", "mc", 10, S, 9.1, 25, 10000,
         LANGUAGE + "bigbench_language_identification", "1f132fbbb1", .250, letters=True),
]  # fmt: skip
# By the first table. XL, large and medium on at most 1,000 items a task, small on all.
GPT2 = {"small": 0.113891, "medium": 0.184903, "large": 0.214641, "XL": 0.256525}
XL_ERROR = 0.0071  # the standard error of XL's
FIELDS = {  # of a line of the file, by kind: {field: type}
    "mc": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "lm": {"context": str, "continuation": str},
}


# ---------------------------------------------------------------------------------- the items


def parse(word: str) -> tuple[list[Task], str]:
    """`core=FOLDER` -> all tasks and the folder; `core:copa,piqa=FOLDER` -> these two.
    UsageError for a name that CORE does not have, and without a folder."""
    names, _, folder = word.partition("=")
    _, _, names = names.partition(":")
    by_name = {task.name: task for task in TASKS}
    tasks = [cli.find("task", name, by_name) for name in names.split(",")] if names else TASKS
    if not folder:
        raise UsageError(f"--task {word} names no folder with the tasks' files; {WHERE}")
    return tasks, folder


def find_files(tasks: list[Task], folder: str) -> dict[Task, Path]:
    """The files that are there, in the folder, or where a bundle or a clone has them."""
    places = ("", "eval_data", "eval_bundle/eval_data", "scripts/eval/local_data")
    for root in (Path(folder, place) for place in places):
        paths = {task: root / f"{task.file}.jsonl" for task in tasks}
        if found := {task: path for task, path in paths.items() if path.is_file()}:
            return found
    names = f"{tasks[0].file}.jsonl" + (" or any other of its tasks" if tasks[1:] else "")
    raise UsageError(f"{folder} has no {names}; {WHERE}")


def read_items(task: Task, path: Path) -> list[dict]:
    """The items of a file, in its order; DataError with the line that is none."""
    items = []
    with open(path, encoding="utf-8") as file:  # splitlines would break at U+2028 as well
        for number, line in enumerate(file, 1):
            try:
                item = json.loads(line)
            except (ValueError, RecursionError):
                item = None
            if not is_item(item, task.kind):
                wanted = ", ".join(FIELDS[task.kind])
                raise DataError(f"{path}, line {number} has not {wanted}: {line[:80]!r}")
            items.append(item)
    return items


def is_item(item: object, kind: str) -> bool:
    types = FIELDS[kind].items()
    if not isinstance(item, dict) or not all(type(item.get(k)) is t for k, t in types):
        return False
    if kind == "lm":
        return True
    options = item["choices" if kind == "mc" else "context_options"]
    texts = all(isinstance(text, str) for text in options)
    return texts and 1 < len(options) <= 26 and 0 <= item["gold"] < len(options)


def git_blob(path: Path) -> str:
    """What `git hash-object` says of a file."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def shuffled(items: list[dict], limit: int) -> list[dict]:
    """In CORE's order; the limit is taken after the shuffle, and examples are of what is left."""
    items = list(items)
    random.Random(1337).shuffle(items)
    return items[: limit or None]


def examples_of(i: int, n: int, shots: int) -> list[int]:
    """The places of item i's examples among n items: a sample of all the others, in order."""
    places = random.Random(1234 + i).sample(range(n - 1), shots)
    return [place + (place >= i) for place in places]


def prompts(task: Task, items: list[dict], i: int) -> list[str]:
    """What item i is asked as: a prompt for each answer (mc) or context (schema); for lm, one
    without the answer and one with it."""
    shown = [f"{solved(task, items[k])}\n\n" for k in examples_of(i, len(items), task.shots)]
    before, item = "".join(shown), items[i]
    if task.kind == "mc":
        return [before + item["query"] + task.delimiter + choice for choice in item["choices"]]
    if task.kind == "schema":
        ends = task.delimiter + item["continuation"]
        return [before + option + ends for option in item["context_options"]]
    context = before + item["context"].strip() + task.delimiter
    return [context.strip(), context + item["continuation"]]


def solved(task: Task, item: dict) -> str:
    """An item with its right answer, as an example."""
    if task.kind == "mc":
        return item["query"] + task.delimiter + item["choices"][item["gold"]]
    if task.kind == "schema":
        context = item["context_options"][item["gold"]]
    else:
        context = item["context"].strip()
    return context + task.delimiter + item["continuation"]


# -------------------------------------------------------------------------------- the scoring


@dataclass
class Spans:
    """The rows of an item to be scored, (ids, where the span begins, where it ends) each, and what
    had to be done to it."""

    rows: list[tuple[list[int], int, int]]
    cropped: bool = False  # longer than seq_len: it lost its beginning
    cut: bool = False  # so much that a part of the span went too
    mended: bool = False  # lm: the prompt without the answer was no prefix of that with it


def common(rows: list[list[int]]) -> int:
    """How many ids all rows begin with."""
    return sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*rows)))


def spans(kind: str, rows: list[list[int]], seq_len: int) -> Spans:
    """The ids of an item's prompts, BOS in front -> what is scored of them: from where they differ
    (mc), the end that they share (schema), or what the second has after the first (lm)."""
    found = Spans([])
    if kind == "schema":
        shared = common([row[::-1] for row in rows])
        starts = [len(row) - shared for row in rows]
    else:
        starts = [common(rows)] * len(rows)
    if kind == "lm":
        found.mended, rows, starts = starts[0] < len(rows[0]), rows[1:], starts[1:]
    for row, start in zip(rows, starts):
        lost = max(0, len(row) - seq_len)
        found.cropped |= lost > 0
        found.cut |= start - lost < 1
        found.rows.append((row[lost:], max(1, start - lost), len(row) - lost))
    return found


def mean_nats(model: GPT, found: list[Spans], batch: int) -> list[list[float]]:
    """For each item the mean nats per token of its rows' spans; NaN for an empty span, as where one
    answer begins another."""
    rows = [row for item in found for row in item.rows]
    pairs = [(ids[:start], ids[start:end]) for ids, start, end in rows]
    nats = iter(log_likelihoods(model, pairs, batch))
    means = iter([-x / len(p[1]) if p[1] else math.nan for x, p in zip(nats, pairs)])
    return [[next(means) for _ in item.rows] for item in found]


@torch.no_grad()
def predicted(model: GPT, found: list[Spans], batch: int) -> tuple[list[bool], list[list[float]]]:
    """For each item of an lm task: whether every token of the span is the likeliest one; and the
    mean nats."""
    rows = [item.rows[0] for item in found]
    pairs = [(ids[:start], ids[start:end]) for ids, start, end in rows]
    hits, means, longest = [False] * len(rows), [[]] * len(rows), max(end for _, _, end in rows)
    batch = max(1, min(batch, LOGITS // (longest * model.config.vocab_size)))
    for part, ids in padded(pairs, batch, model.config.seq_len):
        ids = ids.to(model.cos.device)  # (B, T + 1)
        logits, targets = model(ids[:, :-1]), ids[:, 1:]  # (B, T, V), (B, T)
        nats = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").cpu()
        likeliest = (logits.argmax(-1) == targets).cpu()  # (B, T)
        for r, i in enumerate(part):
            span = slice(rows[i][1] - 1, rows[i][2] - 1)
            hits[i] = bool(likeliest[r, span].all())
            means[i] = [nats[r, span].double().mean().item()]
    return hits, means


def pick(means: list[float]) -> int:
    """The smallest, the first at a tie; a NaN wins if it is the first, and never later."""
    return min(range(len(means)), key=means.__getitem__)


@dataclass
class Scored:
    """What is known of the items of a task so far."""

    correct: list[bool] = field(default_factory=list)
    picks: list[int] = field(default_factory=list)
    means: list[list[float]] = field(default_factory=list)
    cropped: list[bool] = field(default_factory=list)
    oddities: Counter = field(default_factory=Counter)


def score(
    task: Task, items: list[dict], model: GPT, tokenizer: Tokenizer, batch: int, done: Callable
) -> Scored:
    """All items of a task. done(bytes): is told of the text that has been scored."""
    scored, bos = Scored(), [tokenizer.bos_id]
    for at in range(0, len(items), CHUNK):
        chunk = range(at, min(at + CHUNK, len(items)))
        asked = [prompts(task, items, i) for i in chunk]
        found = []
        for texts in asked:
            rows = [bos + tokenizer.encode(text) for text in texts]
            found.append(spans(task.kind, rows, model.config.seq_len))
        if task.kind == "lm":
            correct, means = predicted(model, found, batch)
        else:
            means = mean_nats(model, found, batch)
            scored.picks += (picks := [pick(own) for own in means])
            correct = [p == items[i]["gold"] for p, i in zip(picks, chunk)]
        for own, item in zip(means, found):
            bad = [x for x, (_, start, end) in zip(own, item.rows) if end > start]
            if not all(map(math.isfinite, bad)):
                raise NonFiniteError(f"{task.name}: the model's log-likelihoods are not finite")
            scored.oddities["empty spans"] += sum(map(math.isnan, own))
            scored.oddities["spans that were cropped too"] += item.cut
            scored.oddities["prefixes mended"] += item.mended
        scored.correct += correct
        scored.means += means
        scored.cropped += [item.cropped for item in found]
        done(sum(len(text.encode()) for texts in asked for text in texts))
    return scored


def figures_of(task: Task, items: list[dict], scored: Scored) -> dict:
    """Of a task: accuracy with its standard error, both centered by the first table, and what an
    answer that is always the same would get."""
    n, hits = len(items), sum(scored.correct)
    p = hits / n
    stderr = math.sqrt(p * (1 - p) / (n - 1))
    answers = [item["continuation"] if task.kind == "lm" else item["gold"] for item in items]
    (best, times), guess = Counter(answers).most_common(1)[0], 0.0
    if task.kind != "lm":
        option = "choices" if task.kind == "mc" else "context_options"
        guess = sum(1 / len(item[option]) for item in items) / n
    found = dict(n=n, hits=hits, accuracy=p, stderr=stderr)
    scale = 1 - task.base / 100
    found |= dict(centered=centered(p, task.base), centered_stderr=stderr / scale)
    found |= dict(constant=best, constant_accuracy=times / n, guess=guess)
    if scored.picks:
        most, count = Counter(scored.picks).most_common(1)[0]
        found |= dict(most_picked=most, most_picked_share=count / n)
    oddities = {name: count for name, count in scored.oddities.items() if count}
    return found | dict(cropped=sum(scored.cropped), oddities=oddities)


# ------------------------------------------------------------------------------------- the run


def run(config, model: GPT, tokenizer: Tokenizer, trainer: dict) -> Iterator[dict]:
    """`eval.py choice --task core=FOLDER`: score the tasks, print their figures and CORE; yields
    the record. config: a ChoiceConfig."""
    if config.shots or config.mode != "auto":
        raise UsageError("core has its own examples and modes; leave --shots and --mode out")
    if len(config.task) > 1:
        raise UsageError(
            f"core is a run of its own; leave {' '.join(config.task[1:])} out, or name several of "
            "its tasks as in core:copa,piqa=FOLDER"
        )
    tasks, folder = parse(config.task[0])
    files, asked = find_files(tasks, folder), {}
    for task, path in files.items():
        asked[task] = shuffled(read_items(task, path), config.limit)
        if len(asked[task]) <= max(1, task.shots):
            raise UsageError(
                f"{task.name} has {len(asked[task])} items to ask, and needs more than its "
                f"{task.shots} examples; try --limit {max(2, task.shots + 1)} or more"
            )
        if not git_blob(path).startswith(task.blob):
            print(f"warning: {path} is not the file that CORE is measured on")
    keep = kept_in(config, trainer)
    size = {task: size_of(task, items) for task, items in asked.items()}
    total, begun, results = sum(size.values()), time.monotonic(), {}
    print(header(config, model, asked, total))
    left = Clock(total)
    for task, items in asked.items():
        results[task] = result = resumed(keep, task, files[task], len(items))
        if not result:
            t0 = time.monotonic()
            scored = score(task, items, model, tokenizer, config.batch, left.advance)
            result = dict(blob=git_blob(files[task]), seconds=time.monotonic() - t0)
            result |= dict(figures=figures_of(task, items, scored), correct=scored.correct)
            result |= dict(means=scored.means, cropped=scored.cropped)
            results[task] = result
            store(keep, task, result)
        else:
            left.skip(size[task])
        again = "" if left.was_scored else "  kept from before"
        left.print(f"{line_of(task, result['figures'])}{again}  {left}".rstrip())
        for note in notes_on(task, result["figures"]):
            left.print(f"    {note}")
    left.bar.close()
    if config.save:
        save(config.save, results)
    record = summary(results) | dict(limit=config.limit, seq_len=model.config.seq_len)
    record |= dict(seconds=sum(result["seconds"] for result in results.values()))
    print("\n".join(conclusion(record, config.limit)))
    print(f"{duration(time.monotonic() - begun)}, with --dtype {config.dtype}")
    yield record


class Clock:
    """Progress in bytes of prompts: a bar on a terminal, and the time left as text."""

    def __init__(self, total: int):
        from tqdm import tqdm

        self.left, self.done, self.seconds, self.was_scored = total, 0, 0.0, False
        self.since = time.monotonic()
        self.bar = tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False)

    def advance(self, size: int) -> None:
        now = time.monotonic()
        self.seconds, self.since = self.seconds + now - self.since, now
        self.done, self.left, self.was_scored = self.done + size, self.left - size, True
        self.bar.update(size)

    def skip(self, size: int) -> None:
        self.left, self.since, self.was_scored = self.left - size, time.monotonic(), False
        self.bar.total -= size
        self.bar.refresh()

    def __str__(self) -> str:
        if not self.done or self.left <= 0:
            return ""
        return f"{duration(self.left * self.seconds / self.done)} left"

    def print(self, text: str) -> None:
        """Above the bar."""
        self.bar.write(text)
        sys.stdout.flush()


def size_of(task: Task, items: list[dict]) -> int:
    """Bytes of all prompts of a task, without writing them out."""
    own = [len(solved(task, item).encode()) + 2 for item in items]
    bare, total = replace(task, shots=0), 0
    for i in range(len(items)):
        before = sum(own[k] for k in examples_of(i, len(items), task.shots))
        total += sum(before + len(text.encode()) for text in prompts(bare, items, i))
    return total


def header(config, model: GPT, asked: dict[Task, list], size: int) -> str:
    limit = f", at most {config.limit:,} a task" if config.limit else ""
    count = sum(map(len, asked.values()))
    return (
        f"CORE: {len(asked)} of {len(TASKS)} tasks, {count:,} items{limit}, {size / 1e6:,.1f} MB "
        f"of prompts, seq_len {model.config.seq_len}\n"
        f"{'task':33}shots   items  accuracy            centered          GPT-2 XL  constant"
    )


def line_of(task: Task, f: dict) -> str:
    return (
        f"{task.name:33}{task.shots:>5} {f['n']:>7,}  {f['accuracy']:.4f} +- {f['stderr']:.4f}  "
        f"{f['centered']:+.4f} +- {f['centered_stderr']:.4f}  {task.gpt2_xl:8.3f}  "
        f"{f['constant_accuracy']:8.3f}"
    )


def notes_on(task: Task, f: dict) -> Iterator[str]:
    """What has to be known of a task's figure, beside its line."""
    if f["n"] < task.items:
        yield f"{f['n']:,} of its {task.items:,} items"
    if f["cropped"]:
        yield f"{f['cropped']:,} items cropped: they lost their first examples"
    yield from (f"{count:,} {name}" for name, count in f["oddities"].items())
    if task.letters:
        picked, best = ascii_uppercase[f["most_picked"]], ascii_uppercase[f["constant"]]
        yield (
            f"{picked} is predicted in {f['most_picked_share']:.1%} of the items; always {best} "
            f"would score {f['constant_accuracy']:.3f}"
        )
    elif task.kind == "lm" and f["constant_accuracy"] > 0.1:
        yield f"always {f['constant']!r} would score {f['constant_accuracy']:.3f}"


# ------------------------------------------------------------------------------ the conclusion


def summary(results: dict[Task, dict]) -> dict:
    """The record for eval.jsonl: the mean of the centered accuracies by both tables, called `core`
    only if all tasks are there, with its standard error; and the tasks' figures."""
    figures = {task: result["figures"] for task, result in results.items()}
    count = len(figures)
    later = [centered(f["accuracy"], task.later) for task, f in figures.items()]
    always = [centered(f["constant_accuracy"], task.base) for task, f in figures.items()]
    guesses = [centered(f["guess"], task.base) for task, f in figures.items()]
    variances = [f["guess"] * (1 - f["guess"]) / f["n"] for f in figures.values()]
    of_guesses = [v / (1 - task.base / 100) ** 2 for v, task in zip(variances, figures)]
    variance = sum(f["centered_stderr"] ** 2 for f in figures.values()) + 2 * covariance(results)
    mean = sum(f["centered"] for f in figures.values()) / count
    record = dict(task="core" if count == len(TASKS) else f"core, {count} of {len(TASKS)} tasks")
    record |= {"core" if count == len(TASKS) else "mean": mean}
    record |= dict(n=sum(f["n"] for f in figures.values()), stderr=math.sqrt(variance) / count)
    record |= dict(later_baselines=sum(later) / count, constant=sum(always) / count)
    record |= dict(chance=sum(guesses) / count, chance_sd=math.sqrt(sum(of_guesses)) / count)
    if count == len(TASKS):
        record |= dict(gpt2_xl=GPT2["XL"])
    return record | dict(tasks={task.name: f for task, f in figures.items()})


def centered(accuracy: float, percent: float) -> float:
    """0 at the baseline, 1 if all is right."""
    return (accuracy - percent / 100) / (1 - percent / 100)


def covariance(results: dict[Task, dict]) -> float:
    """Of the centered accuracies of the two hellaswags, which ask the same items."""
    both = [result["correct"] for task, result in results.items() if task.name in HELLASWAG]
    if len(both) < 2 or len(both[0]) != len(both[1]):
        return 0.0
    a, b = (torch.tensor(correct, dtype=torch.float64) for correct in both)
    n = len(a)
    return float(((a - a.mean()) * (b - b.mean())).sum()) / (n - 1) / n / 0.75**2


def conclusion(record: dict, limit: int) -> Iterator[str]:
    """CORE, GPT-2's, and the sentence that may be concluded."""
    error = record["stderr"]
    if "core" not in record:
        name = record["task"].removeprefix("core, ").removesuffix(" tasks")
        yield f"mean of {name}: {record['mean']:.4f} +- {error:.4f}; this is not CORE"
        return
    core = record["core"]
    yield (
        f"CORE: {core:.4f} +- {error:.4f} by eval_meta_data_v1.csv, the baselines behind GPT-2's "
        f"figures ({record['later_baselines']:.4f} by the later eval_meta_data.csv, with which "
        "GPT-2 XL has 0.2309)"
    )
    others = ", ".join(f"{name} {value:.4f}" for name, value in list(GPT2.items())[:-1])
    yield f"GPT-2 XL: {GPT2['XL']} +- {XL_ERROR}, at most 1,000 items a task ({others})"
    yield (
        f"guessing: {record['chance']:+.4f} +- {record['chance_sd']:.4f}; the best constant answer "
        f"to each task: {record['constant']:+.4f}"
    )
    two = 2 * math.sqrt(error**2 + XL_ERROR**2)
    distance = f"{abs(core - GPT2['XL']):.4f}; two standard errors of the difference are {two:.4f}"
    if core - GPT2["XL"] > two:
        yield f"GPT-2 grade: above GPT-2 XL by {distance}"
    elif GPT2["XL"] - core > two:
        yield f"below GPT-2 XL by {distance}"
    else:
        yield f"cannot be told from GPT-2 XL: it differs by {distance}"
    if limit != 1000:
        yield "like for like with GPT-2 XL would be --limit 1000"


# --------------------------------------------------------------------- what a killed run keeps


def kept_in(config, trainer: dict) -> Path:
    """The folder of this model's finished tasks: another for other weights, limit or dtype."""
    path = Path(trainer["path"])
    manifest = path / "MANIFEST.json"
    weights = disk.sha256_of(manifest) if manifest.exists() else trainer.get("files")
    what = [weights, config.limit, config.dtype, config.device]
    return run_of(path) / "core" / hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def store(folder: Path, task: Task, result: dict) -> None:
    """Keep a finished task; a folder that cannot be written is no reason to stop."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_json(folder / f"{task.name}.json", result)
    except OSError as error:
        print(f"{task.name} is not kept: {folder}: {error.strerror}")


def resumed(folder: Path, task: Task, path: Path, n: int) -> dict | None:
    """The result of a finished task, of the same file; None if there is none, or it is damaged."""
    file = folder / f"{task.name}.json"
    try:
        result = disk.read_json(file) if file.exists() else {}
        whole = result.get("blob") == git_blob(path) and len(result["correct"]) == n
        return result if whole and result["figures"]["n"] == n else None
    except (DataError, LookupError, TypeError):
        print(f"warning: {file} is damaged; {task.name} is scored again")
        return None


def save(path: str, results: dict[Task, dict]) -> None:
    """A line for each item of each task, so that two runs can be compared item by item."""
    with open(path, "w", encoding="utf-8") as file:
        for task, result in results.items():
            items = zip(result["correct"], result["means"], result["cropped"])
            for i, (correct, means, cropped) in enumerate(items):
                means = [None if math.isnan(x) else x for x in means]
                line = dict(task=task.name, index=i, correct=correct, means=means, cropped=cropped)
                file.write(json.dumps(line) + "\n")
