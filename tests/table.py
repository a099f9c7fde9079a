"""Tables of what is typed and what has to be said, as plain text."""


def read_table(text: str) -> list[tuple[str, list[str]]]:
    r"""`words => this | that` on a line: (words, [this, that]). Other lines are remarks; a `\n` in
    the words ends a line of theirs."""
    rows = [line.partition("=>") for line in text.splitlines()]
    cells = [(words.strip(), names.strip()) for words, arrow, names in rows if arrow]
    return [(words.replace(r"\n", "\n"), names.split(" | ")) for words, names in cells]
