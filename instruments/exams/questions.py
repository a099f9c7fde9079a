"""The questions of `eval.py choice` that need no download: those of a JSONL file.

Next: harness.py, the questions of public exams; choice.py scores them all.
"""

import random
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Annotated

from instruments.exams.lines import check_options, read_lines
from machinery.formats import Whole


class Asked:
    """A line of a file: a `query`, its `choices`, and the place of the right one, `gold`."""

    def __post_init__(self):
        check_options(self.choices, self.gold)
        if not all(self.choices) or len({*self.choices}) < len(self.choices):
            raise ValueError("its choices must be different texts, none of them empty")


@dataclass(frozen=True)
class QueryLine(Asked):
    query: str
    choices: tuple[str, ...]
    gold: Whole


@dataclass(frozen=True)
class QuestionLine(Asked):
    """The same under other names."""

    question: str
    choices: tuple[str, ...]
    answer: Whole | Annotated[str, "[A-Z]"]
    """Its index, or its letter."""

    @property
    def query(self) -> str:
        return self.question

    @property
    def gold(self) -> int:
        is_letter = isinstance(self.answer, str)
        return ascii_uppercase.index(self.answer) if is_letter else self.answer


@dataclass(frozen=True)
class Question:
    """For each answer, a context and a continuation, whose log-likelihoods are compared."""

    given: tuple[tuple[str, str], ...]
    answers: tuple[str, ...]  # without the space that stands before a continuation
    gold: int  # which of the answers is right


def from_file(path: str, shots: int, limit: int) -> list[Question]:
    """The questions of a JSONL file except its first `shots`, which precede each as solved
    examples. limit: ask this many (0: all), a sample that is the same each time."""
    rows = read_lines(path, QueryLine | QuestionLine)
    examples = "".join(f"{row.query} {row.choices[row.gold]}\n\n" for row in rows[:shots])
    questions = []
    for i in sample(range(shots, len(rows)), limit):
        row = rows[i]
        given = tuple((examples + row.query, f" {choice}") for choice in row.choices)
        questions.append(Question(given, row.choices, row.gold))
    return questions


def sample(items, limit: int) -> list:
    """`limit` of the items (0: all) in their order. Drawn, since files are often sorted by subject;
    the same ones each time."""
    items = list(items)
    if limit and limit < len(items):
        chosen = random.Random(0).sample(range(len(items)), limit)
        items = [items[i] for i in sorted(chosen)]
    return items
