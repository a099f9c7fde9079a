"""The questions of `eval.py choice` that need no download: a JSONL file, or held-out text.

A Question is a context and the answers whose log-likelihoods are compared. Next: harness.py, the
questions of public exams; choice.py scores them all.
"""

import random
from dataclasses import dataclass
from string import ascii_uppercase

from config import UsageError
from instruments.exams.likelihood import Pair, encode_pair
from instruments.exams.lines import has_fields, read_lines
from tokenizer import Tokenizer

ANSWER_TOKENS, CONTEXT_TOKENS = 32, 64  # of a continuation
CONTINUATIONS = 300  # a standard error below 0.03
SHAPE = '{"query": text, "choices": [2 to 26 different texts], "gold": index of the right one}'


@dataclass(frozen=True)
class Question:
    """What the model is given, and what it may continue with: for each answer a context and a
    continuation. Texts; or ids without BOS, where the border lies between two tokens."""

    given: tuple[tuple, ...]
    answers: tuple  # without the space that stands before a continuation
    gold: int  # which of the answers is right

    def texts(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """The answers as texts."""
        return tuple(a if isinstance(a, str) else tokenizer.decode(a) for a in self.answers)

    def pairs(self, tokenizer: Tokenizer, tuned: bool) -> list[Pair]:
        """For each answer, the ids of its context and of the answer."""
        if isinstance(self.answers[0], str):
            return [encode_pair(tokenizer, *texts, tuned) for texts in self.given]
        return [([tokenizer.bos_id, *context], answer) for context, answer in self.given]


def ask(context: str | list[int], answers: list, gold: int) -> Question:
    """A question with one context; if that is text, a space goes before each answer."""
    space = " " if isinstance(context, str) else None
    given = ((context, space + a if space else a) for a in answers)
    return Question(tuple(given), tuple(answers), gold)


def from_file(path: str, shots: int, limit: int) -> list[Question]:
    """The questions of a JSONL file except its first `shots`, which precede each as solved
    examples. limit: ask this many (0: all), a sample that is the same each time."""
    rows = [*map(ours, read_lines(path, lambda row: is_question(ours(row)), SHAPE))]
    examples = "".join(f"{r['query']} {r['choices'][r['gold']]}\n\n" for r in rows[:shots])
    asked = [rows[i] for i in sample(range(shots, len(rows)), limit)]
    return [ask(examples + r["query"], r["choices"], r["gold"]) for r in asked]


def ours(row: object) -> object:
    """A line with the names `question` and `answer` (an index, or its letter) under our names."""
    if isinstance(row, dict) and "answer" in row and "gold" not in row:
        gold = row["answer"]
        gold = ascii_uppercase.index(gold) if gold in [*ascii_uppercase] else gold
        row = dict(query=row.get("question"), choices=row.get("choices"), gold=gold)
    return row


def sample(places, limit: int) -> list:
    """`limit` of the places (0: all) in their order. Drawn, since files are often sorted by
    subject; the same places each time."""
    places = list(places)
    if limit and limit < len(places):
        chosen = random.Random(0).sample(range(len(places)), limit)
        places = [places[i] for i in sorted(chosen)]
    return places


def is_question(row: object) -> bool:
    """Whether a line of a file is a question."""
    if not has_fields(row, ["query"], "choices"):
        return False
    return all(row["choices"]) and len(set(row["choices"])) == len(row["choices"])


def continuations(manifest, seq_len: int) -> list[Question]:
    """Which of four spans comes next in the held-out text? A test that nobody trained on, that
    needs no download, and that any trained model passes: if not, `choice` or the model is broken.

    An item is a document, or a piece of one, in a validation row: its first tokens are the context,
    the next ones the right answer. The wrong answers are the right ones of three other items, a
    quarter of the list apart, so that each span is right once and wrong three times: judging the
    answers without the context gives chance, 1/4, and so does any constant answer.
    """
    pieces, n = [], min(CONTEXT_TOKENS + ANSWER_TOKENS, seq_len // 2)
    for source in range(len(manifest.sources)):
        for i in range(manifest.rows("val", source)):
            row = manifest.row("val", source, i)[: seq_len + 1]
            starts = (row == manifest.bos_id).nonzero()[0].tolist()
            for start, end in zip(starts, [*starts[1:], len(row)]):
                if end - start > n:
                    pieces.append(row[start + 1 : start + 1 + n].tolist())
    count = min(CONTINUATIONS, len(pieces)) // 4 * 4
    pieces = [pieces[len(pieces) * k // count] for k in range(count)]  # spread over the split
    if not pieces:
        raise UsageError(
            f"the validation rows of {manifest.dir} hold fewer than 4 pieces of text of more than "
            f"{n} tokens; prepare more: --val_fraction"
        )
    questions, quarter, n = [], len(pieces) // 4, n // 3  # a third is the answer
    for i, piece in enumerate(pieces):
        gold = i % 4
        others = [pieces[(i + (k - gold) % 4 * quarter) % len(pieces)] for k in range(4)]
        questions.append(ask(piece[:-n], [other[-n:] for other in others], gold))
    return questions
