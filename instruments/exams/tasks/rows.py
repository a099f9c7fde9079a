"""Rows of the Portuguese sets -> those that can be asked, in the fields that the YAML files use."""

import re

LETTERS = "A B C D E".split()


def with_answer(rows):
    """Without the questions that were annulled: their key is the letter of no option."""
    return rows.filter(lambda row: row.get("label", row.get("answerKey")) in LETTERS)


def exams_pt(rows):
    rows = rows.filter(lambda row: row["info"]["language"] == "Portuguese")
    asked = lambda row: dict(question=row["question"]["stem"], choices=row["question"]["choices"])
    return with_answer(rows.map(asked))


def m3exam_pt(rows):
    """ "(A) sim" -> "sim"; an option without text was a picture."""

    def asked(row: dict) -> dict:
        texts = [re.sub(r"^\(?[A-Ea-e1-5][).]\s*", "", option) for option in row["options"]]
        question = "\n".join(filter(None, (row["background"], row["question_text"])))
        key = row["answer_text"].strip("() ").upper()
        is_whole = all(texts) and key in LETTERS[: len(texts)]
        choices = dict(text=texts, label=LETTERS[: len(texts)])
        return dict(question=question, choices=choices, answerKey=key if is_whole else "")

    return with_answer(rows.map(asked))
