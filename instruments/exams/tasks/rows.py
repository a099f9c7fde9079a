"""Rows of the Portuguese sets -> those that can be asked, in the fields that the YAML files use."""

import re


def with_answer(rows):
    """Without the questions that were annulled: their key is the letter of no option."""
    return rows.filter(lambda row: row.get("label", row.get("answerKey")) in [*"ABCDE"])


def exams_pt(rows):
    rows = rows.filter(lambda row: row["info"]["language"] == "Portuguese")
    asked = lambda row: dict(question=row["question"]["stem"], choices=row["question"]["choices"])
    return with_answer(rows.map(asked))


def m3exam(rows):
    """Without those that have an option of a letter alone, as "(E)", or no right one."""
    empty = re.compile(r"\(?[A-Ea-e]?[.)\s]*").fullmatch
    rows = rows.filter(lambda row: not any(map(empty, row["options"])))
    # A list of letters, as the empty text is in every text.
    return rows.filter(lambda row: row["answer_text"].upper() in [*"ABCDE"[: len(row["options"])]])
