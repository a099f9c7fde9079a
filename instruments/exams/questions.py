"""The questions of `eval.py choice`: those of a JSONL file. Next: choice.py scores them."""

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
    """Its answers, whose log-likelihoods after the query and a space are compared."""

    query: str
    answers: tuple[str, ...]
    gold: int  # which of the answers is right


def from_file(path: str, shots: int) -> list[Question]:
    """The questions of a JSONL file except its first `shots`, which precede each as solved
    examples."""
    rows = read_lines(path, QueryLine | QuestionLine)
    examples = "".join(f"{row.query} {row.choices[row.gold]}\n\n" for row in rows[:shots])
    return [Question(examples + row.query, row.choices, row.gold) for row in rows[shots:]]
