"""Exercise 14: the reference, and answers that the oracle must refuse."""

from edits import edits

BOS = 0
ROLES = {"user": 1, "assistant": 2}
END = 3
IGNORED = -100


def render(turns, encode):
    ids = [BOS]
    mask = [0]
    for role, text in turns:
        said = [*encode(text), END]
        ids += [ROLES[role], *said]
        mask += [0] + [int(role == "assistant")] * len(said)
    if turns[-1][0] != "assistant":
        ids = [*ids, ROLES["assistant"]]
        mask = [*mask, 0]
    return ids, mask


def shifted(ids, mask, length):
    targets = [i if m else IGNORED for i, m in zip(ids[1:], mask[1:])]
    padding = [END] * (length - len(targets)), [IGNORED] * (length - len(targets))
    return (ids[:-1] + padding[0])[:length], (targets + padding[1])[:length]


def fit(turns, encode, length):
    for start, (role, _) in enumerate(turns):
        if role == "user":
            size = len(render(turns[start:], encode)[0])
            if size <= length:
                return turns[start:]
    raise ValueError(f"the last question and its answers take {size} ids, more than {length}")


edit = edits(__file__)


def reads_special_tokens(turns, encode):
    """Looks for special tokens in what was typed, too."""

    def read(text):
        first, *rest = text.split("<|end|>")
        return encode(first) + [i for part in rest for i in (END, *encode(part))]

    return render(turns, read)


def two_at_a_time(turns, encode, length):
    """Takes it that questions and answers alternate."""
    while len(turns) > 2 and len(render(turns, encode)[0]) > length:
        turns = turns[2:]
    size = len(render(turns, encode)[0])
    if size > length:
        raise ValueError(f"the last question and its answer take {size} ids, more than {length}")
    return list(turns)


TARGETS = "    targets = [i if m else IGNORED"
TURNS = "    for start, (role, _) in"
WRONG = {  # name -> what of the reference it replaces
    "the end is not in the mask": edit(
        '[int(role == "assistant")] * len(said)', '[int(role == "assistant")] * len(said[1:]) + [0]'
    ),
    "a typed special token becomes special": dict(render=reads_special_tokens),
    "masks the inputs, not the targets": edit("zip(ids[1:], mask[1:])", "zip(ids[1:], mask)"),
    "encodes letter by letter": edit(
        "*encode(text)", "*(i for letter in text for i in encode(letter))"
    ),
    "learns everything after the first answer": edit(
        "return ids, mask\n", "return ids, [int(1 in mask[: i + 1]) for i in range(len(ids))]\n"
    ),
    "a long conversation loses its beginning": edit(
        TARGETS, "    ids, mask = ids[-length - 1 :], mask[-length - 1 :]\n" + TARGETS
    ),
    "fit forgets the assistant's id": edit(
        "if size <= length:", 'if size <= length + (turns[-1][0] == "user"):'
    ),
    "fit gives the list itself": edit(
        TURNS, "    if len(render(turns, encode)[0]) <= length:\n        return turns\n" + TURNS
    ),
    "fit drops two turns at a time": dict(fit=two_at_a_time),
}
