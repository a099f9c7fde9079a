"""The questions of `eval.py choice` that need no download: those of a JSONL file.

Next: harness.py, the questions of public exams; choice.py scores them all.
"""

import random
from dataclasses import dataclass
from string import ascii_uppercase

from instruments.exams.lines import has_fields, read_lines

SHAPE = '{"query": text, "choices": [2 to 26 different texts], "gold": index of the right one}'


@dataclass(frozen=True)
class Question:
    """For each answer, a context and a continuation, whose log-likelihoods are compared."""

    given: tuple[tuple[str, str], ...]
    answers: tuple[str, ...]  # without the space that stands before a continuation
    gold: int  # which of the answers is right


def from_file(path: str, shots: int, limit: int) -> list[Question]:
    """The questions of a JSONL file except its first `shots`, which precede each as solved
    examples. limit: ask this many (0: all), a sample that is the same each time."""
    rows = [*map(ours, read_lines(path, is_question, SHAPE))]
    examples = "".join(f"{r['query']} {r['choices'][r['gold']]}\n\n" for r in rows[:shots])
    questions = []
    for i in sample(range(shots, len(rows)), limit):
        query = rows[i]["query"]
        choices = rows[i]["choices"]
        given = tuple((examples + query, f" {choice}") for choice in choices)
        questions.append(Question(given, tuple(choices), rows[i]["gold"]))
    return questions


def ours(row: object) -> object:
    """A line with the names `question` and `answer` (an index, or its letter) under our names."""
    if isinstance(row, dict) and "answer" in row and "gold" not in row:
        gold = row["answer"]
        gold = ascii_uppercase.index(gold) if gold in [*ascii_uppercase] else gold
        row = dict(query=row.get("question"), choices=row.get("choices"), gold=gold)
    return row


def sample(items, limit: int) -> list:
    """`limit` of the items (0: all) in their order. Drawn, since files are often sorted by subject;
    the same ones each time."""
    items = list(items)
    if limit and limit < len(items):
        chosen = random.Random(0).sample(range(len(items)), limit)
        items = [items[i] for i in sorted(chosen)]
    return items


def is_question(row: object) -> bool:
    """Whether a line of a file is a question."""
    row = ours(row)
    if not has_fields(row, ["query"], "choices"):
        return False
    return all(row["choices"]) and len(set(row["choices"])) == len(row["choices"])
