"""Conversations about the functions and classes of the standard library, made offline.

Each function or class with one line of documentation gives one: what it does, what it is called,
which arguments it takes. Some answers can only be remembered (what it does, where it is); others
follow from what was said (its arguments, how many, its name), which even a small model learns.
A file gives the same conversations every time. Next: sources.py reads them as `chats:stdlib`.
"""

import ast
import random
import re
import warnings
from collections.abc import Iterator

SKIPPED = {"test", "tests", "idlelib", "lib2to3"}  # folders
SYSTEM = "Answer about Python's standard library."
# {topic: [(question, answer), ...]}. Each of the first three names what a conversation is about.
FORMS = {
    "what": [("What does {name} do?", "{line}"), ("What is {name} for?", "{line}")],
    "name": [
        ("What is it called? {line}", "It is called {name}."),
        ("Which {kind} is this? {line}", "That is {name}."),
    ],
    "arguments": [
        ("Which arguments does {name}({arguments}) take?", "It takes {listed}."),
        ("What do I pass to {name}({arguments})?", "You pass {listed}."),
    ],
    "kind": [("Is it a function or a class?", "{name} is a {kind}.")],
    "where": [("Where is it?", "It is in {module}."), ("In which module?", "In {module}.")],
    "again": [("What was its name again?", "Its name is {name}.")],
    "count": [("How many arguments are these?", "{count}."), ("How many is that?", "{count}.")],
}
COUNTS = "None One Two Three Four Five Six Seven Eight".split()
GREETINGS = [
    ("Hello", "Hello. Ask me about Python's standard library."),
    ("Hi!", "Hi. Ask me about Python's standard library."),
    ("Who are you?", "A small model that has read Python's standard library."),
    ("What can you do?", "I answer questions about Python's standard library, not always rightly."),
]
THANKS = [("Thank you.", "You are welcome."), ("Thanks!", "You are welcome.")]


def conversations(name: str, source: bytes) -> Iterator[list[dict[str, str]]]:
    """The conversations about one file: lists of turns, {"role": ..., "content": ...} each.

    name: "stdlib/os/path.py"; source: its Python code, which is parsed, not run."""
    parts = name.removesuffix(".py").removesuffix("/__init__").split("/")[1:]
    if SKIPPED & set(parts):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in old code
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # templates, and tests of the parser
        return
    rng = random.Random(name)
    found = {}
    for node in ast.walk(tree):
        facts = facts_of(node, ".".join(parts))
        if facts:
            found.setdefault((facts["name"], facts["line"]), facts)
    for facts in found.values():
        yield conversation(facts, rng)


def facts_of(node: ast.AST, module: str) -> dict[str, str] | None:
    """What there is to say about a definition; None if it is private, or has no short line of
    documentation, or more arguments than we can count."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return None
    line = (ast.get_docstring(node) or "").partition("\n")[0].strip()
    if not 15 < len(line) < 100 or re.search(r"\byour?\b", line, re.IGNORECASE):
        return None
    facts = dict(name=node.name, line=line, module=module, kind="class")
    if isinstance(node, ast.FunctionDef):
        names = [
            a.arg
            for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if a.arg not in ("self", "cls")
        ]
        rest = (("*", node.args.vararg), ("**", node.args.kwarg))
        names += [stars + a.arg for stars, a in rest if a]
        if len(names) >= len(COUNTS):
            return None
        facts |= dict(
            kind="function",
            arguments=", ".join(names),
            listed=" and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "nothing",
            count=COUNTS[len(names)],
        )
    return facts


def conversation(facts: dict[str, str], rng: random.Random) -> list[dict[str, str]]:
    """Perhaps a greeting or two, a first question, some others, perhaps thanks."""
    first = rng.choice(["what", "name"] + ["arguments"] * 2 * (facts["kind"] == "function"))
    others = ["kind", "where", "again"] + ["count"] * (first == "arguments")
    topics = [first] + [topic for topic in others if rng.random() < 0.5]
    exchanges = [rng.choice(FORMS[topic]) for topic in topics]
    if rng.random() < 0.2:
        exchanges = rng.sample(GREETINGS, rng.randint(1, 2)) + exchanges
    if rng.random() < 0.15:
        exchanges.append(rng.choice(THANKS))
    turns = [("system", SYSTEM)] * (rng.random() < 0.1)
    for question, answer in exchanges:
        turns += [("user", question), ("assistant", answer)]
    return [{"role": role, "content": text.format(**facts)} for role, text in turns]
