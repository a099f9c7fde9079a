"""The questions that `eval.py choice` asks: exams from the Hub, a JSONL file, or held-out text.

A task is an exam's name (`arc_easy`), an exam from a local copy of its repository
(`arc_easy=FOLDER`), a JSONL file with the fields `query`, `choices`, `gold` and optionally `cue`,
or `continuation`. `ask(task, ...)` gives Questions: a context and the answers whose
log-likelihoods are compared. Reads through `datasets`; writes nothing. Next: choice.py scores them.
"""

import json
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from config import UsageError
from machinery.cli import find
from machinery.errors import DataError

MODES = ("letter", "answer", "options")
ANSWER_TOKENS, CONTEXT_TOKENS = 32, 64  # of a continuation
CONTINUATIONS = 300  # a standard error below 0.03


@dataclass(frozen=True)
class Item:
    """One question of an exam, before it is written out for a model."""

    query: str
    choices: tuple[str, ...]
    gold: int  # which of the choices is right
    cue: str = ""  # the line after the question, such as "Answer:"
    subject: str = ""  # few-shot examples are of the same subject
    margin: str = ""  # before the letter of an option
    intro: str = ""  # before the examples
    is_cloze: bool = False  # the choices go into the blank, _, of the query
    tags: dict[str, str] = field(default_factory=dict, compare=False)  # subject, year: for tables


@dataclass(frozen=True)
class Question:
    """What the model is given, and the answers to choose from; ids (without BOS) for
    continuations, whose borders lie between tokens, else text. A tuple of contexts, one for each
    answer: which context makes the same answer likeliest?"""

    context: str | list[int] | tuple[str, ...]
    answers: tuple
    gold: int
    tags: dict[str, str] = field(default_factory=dict)


def write_out(item: Item, mode: str) -> tuple[str | tuple[str, ...], tuple[str, ...]]:
    """An item -> context and answers, in LightEval's three formulations.

    answer:  "Question: 1+1?\\nAnswer:"                   -> " 2", " 3": the options are not shown,
             the full answers are compared (cloze)
    letter:  "Question: 1+1?\\nA. 2\\nB. 3\\nAnswer:"     -> " A", " B"
    options: the same context as letter's                 -> " 2", " 3"

    The answer mode of an item with a blank, "Ann paid Eve as _ had worked.", asks after which
    context, "Ann paid Eve as Ann" or "Ann paid Eve as Eve", " had worked." is likelier.
    """
    if mode == "answer" and item.is_cloze:
        before, _, after = item.query.partition("_")
        return tuple(before + choice for choice in item.choices), (after.strip(),) * 2
    if mode == "answer":
        return "\n".join(filter(None, (item.query, item.cue))), item.choices
    letters = tuple(string.ascii_uppercase[: len(item.choices)])
    shown = (f"{item.margin}{a}. {choice}" for a, choice in zip(letters, item.choices))
    context = "\n".join((item.query, *shown, item.cue or "Answer:"))
    return context, letters if mode == "letter" else item.choices


def with_examples(item: Item, examples: Iterable[Item], mode: str) -> Question:
    """The item after solved examples, each "context answer", with an empty line between them."""
    solved = []
    for example in examples:
        context, answers = write_out(example, mode)
        context = context[example.gold] if isinstance(context, tuple) else context
        solved.append(f"{context} {answers[example.gold]}")
    context, answers = write_out(item, mode)
    if isinstance(context, tuple):
        context = tuple("\n\n".join((*solved, own)) for own in context)
    else:
        context = item.intro + "\n\n".join((*solved, context))
    return Question(context, answers, item.gold, item.tags)


# ------------------------------------------------------------------------- exams on the Hub


def _hellaswag(row: dict) -> Item:
    def clean(text: str) -> str:
        """Drop the marks that WikiHow's pages left, as lm_eval does."""
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    query = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return Item(clean(query), tuple(map(clean, row["endings"])), int(row["label"]))


def _labelled(question: str, choices: dict, key: str) -> tuple[str, tuple[str, ...], int]:
    return question, tuple(choices["text"]), list(choices["label"]).index(key)


def _arc(row: dict) -> Item:
    query, choices, gold = _labelled(row["question"], row["choices"], row["answerKey"])
    return Item(f"Question: {query}", choices, gold, "Answer:")


def _piqa(row: dict) -> Item:
    choices = (row["sol1"], row["sol2"])
    return Item(f"Question: {row['goal']}", choices, int(row["label"]), "Answer:")


def _openbookqa(row: dict) -> Item:
    return Item(*_labelled(row["question_stem"], row["choices"], row["answerKey"]))


def _winogrande(row: dict) -> Item:
    choices = (row["option1"], row["option2"])
    return Item(row["sentence"], choices, int(row["answer"]) - 1, "Answer:", is_cloze=True)


def _mmlu_pro(row: dict) -> Item:
    about = f"The following are multiple choice questions (with answers) about {row['category']}."
    choices, gold = tuple(row["options"]), int(row["answer_index"])
    query = row["question"].strip()
    return Item(query, choices, gold, "Answer:", row["category"], intro=f"{about}\n\n")


def _mmlu(row: dict) -> Item:
    query, choices = row["question"].strip(), tuple(row["choices"])
    about = row["subject"].replace("_", " ")
    intro = f"The following are multiple choice questions (with answers) about {about}.\n\n"
    return Item(query, choices, int(row["answer"]), "Answer:", row["subject"], intro=intro)


def _portuguese(query: str, choices: Iterable[str], gold: int, subject: str = "") -> Item:
    return Item(f"Pergunta: {query.strip()}", tuple(choices), gold, "Resposta:", subject, " ")


def _enem(row: dict) -> Item | None:
    if row["label"] not in tuple(string.ascii_uppercase):  # "Anulado": annulled by the examiners
        return None
    query = row["question"]
    for description in row["description"] or ():  # a figure's, in words
        query = query.replace("[[placeholder]]", description, 1)
    gold = string.ascii_uppercase.index(row["label"])
    return _portuguese(query, row["alternatives"], gold)


def _keyed(row: dict) -> Item | None:
    if row["answerKey"] not in row["choices"]["label"]:  # annulled
        return None
    return _portuguese(*_labelled(row["question"], row["choices"], row["answerKey"]))


def _mmmlu(row: dict) -> Item:
    choices, gold = (row[letter] for letter in "ABCD"), "ABCD".index(row["Answer"])
    return _portuguese(row["Question"], choices, gold, row["Subject"])


def _m_mmlu(row: dict) -> Item:
    choices = (row[f"option_{letter}"] for letter in "abcd")
    return _portuguese(row["instruction"], choices, "ABCD".index(row["answer"].upper()))


def _exams(row: dict) -> Item | None:
    if row["info"]["language"] != "Portuguese" or row["answerKey"] == "@":  # "@": no right answer
        return None
    question = row["question"]
    return _portuguese(*_labelled(question["stem"], question["choices"], row["answerKey"]))


def _m3exam(row: dict) -> Item | None:
    choices = [re.sub(r"^\(?[A-Ea-e1-5][).]\s*", "", option) for option in row["options"]]
    key = row["answer_text"].strip("() ").upper()
    gold = "ABCDE".find(key) if key else -1
    if not 0 <= gold < len(choices) or not all(choices):  # the option was a picture
        return None
    return _portuguese(
        "\n".join(filter(None, (row["background"], row["question_text"]))), choices, gold
    )


@dataclass(frozen=True)
class Exam:
    """Where an exam is on the Hub and how its rows become items."""

    repo: str
    configs: tuple[str | None, ...]
    split: str
    read: Callable[[dict], Item | None]  # None: the row is no question
    mode: str = "letter"  # the usual one
    examples: str = ""  # the split of the few-shot examples; empty: the first items themselves
    revision: str | None = None


EXAMS = {
    "hellaswag": Exam("Rowan/hellaswag", (None,), "validation", _hellaswag, "answer", "train"),
    "arc_easy": Exam("allenai/ai2_arc", ("ARC-Easy",), "test", _arc, "answer", "train"),
    "arc_challenge": Exam("allenai/ai2_arc", ("ARC-Challenge",), "test", _arc, "answer", "train"),
    "piqa": Exam("baber/piqa", (None,), "validation", _piqa, "answer", "train"),
    "openbookqa": Exam("allenai/openbookqa", ("main",), "test", _openbookqa, "answer", "train"),
    "winogrande": Exam(
        "allenai/winogrande", ("winogrande_xl",), "validation", _winogrande, "answer", "train"
    ),
    "mmlu": Exam("cais/mmlu", ("all",), "test", _mmlu, examples="dev"),
    # Up to ten options. Usually scored by letting a model reason and write its answer: such figures
    # are not comparable with log-likelihoods.
    "mmlu_pro": Exam("TIGER-Lab/MMLU-Pro", (None,), "test", _mmlu_pro, examples="validation"),
    # In Portuguese. The first is LightEval's; the two of eduagarcia's are usually scored by
    # generating text, three-shot: such figures are not comparable with log-likelihoods.
    "enem": Exam("maritaca-ai/enem", ("2022", "2023", "2024"), "train", _enem),
    "enem_challenge": Exam("eduagarcia/enem_challenge", (None,), "train", _keyed),
    "oab": Exam("eduagarcia/oab_exams", (None,), "train", _keyed),
    "mmlu_pt": Exam(
        "openai/MMMLU",
        ("PT_BR",),
        "test",
        _mmmlu,
        revision="038c7808122969ead7456361af05cb8f47d247f8",
    ),
    "m_mmlu_pt": Exam("alexandrainst/m_mmlu", ("pt",), "test", _m_mmlu, examples="train"),
    "exams_pt": Exam("mhardalov/exams", ("multilingual",), "test", _exams),
    "m3exam_pt": Exam("chiayewken/m3exam", ("portuguese",), "test", _m3exam, examples="dev"),
}


def tags_of(row: dict, config: str | None) -> dict[str, str]:
    """The subject and the year of a question, where its row or its configuration tells them."""
    info = row.get("info") if isinstance(row.get("info"), dict) else {}
    mmlu = str(row.get("id", "")).partition("/test/")  # law/test/0
    subjects = [row.get(name) for name in ("subject", "Subject", "category", "question_type")]
    subjects += [info.get("subject"), mmlu[0] if mmlu[1] else ""]
    years = [row.get("exam_year"), row.get("year"), config, row.get("exam_id")]
    years = (re.search(r"\b(19|20)\d\d\b", str(year)) for year in years)
    tags = dict(subject=next((str(s) for s in subjects if s), ""))
    tags["year"] = next((year[0] for year in years if year), "")
    return {name: value for name, value in tags.items() if value}


def _rows(name: str, folder: str, split: str) -> list[Item]:
    """The items of one split of an exam, over its configurations; DataError if the Hub cannot be
    reached or the rows have other fields."""
    import datasets

    exam, items = EXAMS[name], []
    where, revision = (folder, None) if folder else (exam.repo, exam.revision)
    copy = f"give a copy of the repository: --task {name}=FOLDER"
    for config in exam.configs:
        try:
            rows = datasets.load_dataset(where, config, split=split, revision=revision)
        except Exception as error:  # of the network, the Hub or the set: it has no common class
            why = (str(error).strip() or "no reason given").splitlines()[0]
            raise DataError(
                f"{name} could not be loaded from {where} ({type(error).__name__}: {why[:200]}); "
                f"connect to the Hub, or {copy}"
            ) from None
        try:
            read = ((exam.read(row), tags_of(row, config)) for row in rows)
            items += [replace(item, tags=tags) for item, tags in read if item]
        except KeyError as error:
            raise DataError(
                f"a row of {where} has no field {error}, which {name} reads: the set has changed "
                f"since this was written; {copy}"
            ) from None
    return items


# ------------------------------------------------------------------ files and held-out text


def _file(path: Path) -> list[Item]:
    """The items of a JSONL file; UsageError with the line that is not one."""
    items = []
    try:
        lines = path.read_bytes().splitlines()  # UTF-8
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not _is_item(row):
            raise UsageError(
                f'{path}, line {number} is not {{"query": text, "choices": [2 to 26 different '
                f'texts], "gold": index of the right one}}: {line[:80]!r}'
            )
        items.append(Item(row["query"], tuple(row["choices"]), row["gold"], row.get("cue", "")))
    return items


def _is_item(row: object) -> bool:
    """Whether a line of a file is a question, with or without a cue."""
    if not isinstance(row, dict):
        return False
    choices, gold = row.get("choices"), row.get("gold")
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(string.ascii_uppercase):
        return False
    texts = [row.get("query"), row.get("cue", ""), *choices]
    if not all(isinstance(text, str) for text in texts) or type(gold) is not int:
        return False  # True is not 1 here
    return all(choices) and len(set(choices)) == len(choices) and 0 <= gold < len(choices)


def continuations(manifest, seq_len: int) -> list[Question]:
    """Which of four spans comes next in the held-out text? A test that nobody trained on, that
    needs no download, and that any trained model passes: else `choice` or the model is broken.

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
        others = (pieces[(i + (k - gold) % 4 * quarter) % len(pieces)] for k in range(4))
        questions.append(Question(piece[:-n], tuple(other[-n:] for other in others), gold))
    return questions


# ---------------------------------------------------------------------------------- asking


def resolve_mode(task: str, mode: str) -> str:
    """The mode to use: `mode` itself or, if that is `auto`, the exam's own (`answer` for a file).
    UsageError for a `continuation` with options to show."""
    name = task.partition("=")[0]
    if task == "continuation":
        if mode not in ("auto", "answer"):
            raise UsageError(f"continuation has no options to show; leave --mode {mode} out")
        return "answer"
    if mode != "auto":
        return mode
    return EXAMS[name].mode if name in EXAMS else "answer"


def ask(
    task: str, mode: str, shots: int, limit: int, load_manifest, seq_len: int
) -> list[Question]:
    """The questions of a task, written out in this mode (one of MODES) after `shots` examples.

    Examples are the first of the same subject in the exam's own split for them. Where there is no
    such split, and in a file, the first items are the examples, and are not asked. limit: ask this
    many (0: all). load_manifest: gives the Manifest, called for `continuation` only.
    """
    if task == "continuation":
        if shots:
            raise UsageError(f"continuation takes no examples; leave --shots {shots} out")
        questions = continuations(load_manifest(), seq_len)
        return questions[: limit or None]
    name, _, folder = task.partition("=")
    if Path(task).is_file():
        items, split = _file(Path(task)), ""
    elif name in EXAMS:
        items, split = _rows(name, folder, EXAMS[name].split), EXAMS[name].examples
    elif name.endswith(".jsonl"):
        raise UsageError(f"--task {task}: there is no such file")
    else:
        find("task", name, {"continuation": None, "core": None, **EXAMS})  # names the nearest one
        raise UsageError(f"--task {task}: continuation reads no folder")
    if split:
        examples = _rows(name, folder, split) if shots else []
    else:
        examples, items = items[:shots], items[shots:]
    questions = []
    for item in items[: limit or None]:
        same = [e for e in examples if not split or e.subject == item.subject][:shots]
        if len(same) < shots:
            raise UsageError(
                f"{task} has {len(same)} examples of {item.subject or 'its own'}; "
                f"try --shots {len(same)}"
            )
        questions.append(with_examples(item, same, mode))
    return questions
