"""Lexical tokens of a Python file: names, operators, numbers and strings; no comments, docstrings,
semicolons or layout. Packing lines does not change their number.

    python tests/tokens.py machinery model.py      files and folders
"""

import ast
import sys
import tokenize
from pathlib import Path

LAYOUT = "COMMENT DEDENT ENCODING ENDMARKER INDENT NEWLINE NL".split()


def count_tokens(path: Path) -> int:
    """A string that is a statement of its own is a docstring, and not counted."""
    docstrings = set()  # the lines on which they stand
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstrings.update(range(node.lineno, node.end_lineno + 1))
    count = 0
    depth = 0  # in f-strings: each is one token, though Python 3.12 and later split it
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            name = tokenize.tok_name[token.type]
            if name == "FSTRING_START":
                count += depth == 0
                depth += 1
            elif name == "FSTRING_END":
                depth -= 1
            elif depth or name in LAYOUT or token.string == ";":
                continue
            else:
                count += name != "STRING" or token.start[0] not in docstrings
    return count


if __name__ == "__main__":
    for word in sys.argv[1:]:
        files = sorted(Path(word).rglob("*.py")) or [Path(word)]
        print(f"{word} {len(files)} files, {sum(map(count_tokens, files)):,} tokens")
