"""Exercise 37: the reference, and answers that the oracle must refuse."""

import re

BOS, ROLES, END, IGNORED = 0, {"user": 1, "assistant": 2}, 3, -100


def render(turns, encode):
    ids, mask = [BOS], [0]
    for role, text in turns:
        said = [*encode(text), END]
        ids += [ROLES[role], *said]
        mask += [0] + [int(role == "assistant")] * len(said)
    if turns[-1][0] != "assistant":
        ids, mask = [*ids, ROLES["assistant"]], [*mask, 0]
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


def never_stops(turns, encode):
    """The end is not in the mask, so the model is not taught to end its answer."""
    ids, mask = render(turns, encode)
    return ids, [m and int(i != END) for i, m in zip(ids, mask)]


def reads_special_tokens(turns, encode):
    """Renders one string and looks for special tokens in it: also in what the user typed."""
    ids, mask = [BOS], [0]
    special = {"<|bos|>": BOS, "<|user|>": 1, "<|assistant|>": 2, "<|end|>": END}
    for role, text in turns:
        parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
        said = [i for p in parts for i in ([special[p]] if p in special else encode(p))] + [END]
        ids += [ROLES[role], *said]
        mask += [0] + [int(role == "assistant")] * len(said)
    return (ids, mask) if turns[-1][0] == "assistant" else (ids + [2], mask + [0])


def masks_the_inputs(ids, mask, length):
    """Off by one: the mask of the token that is read, not of the one that is predicted."""
    inputs, _ = shifted(ids, mask, length)
    targets = [i if m else IGNORED for i, m in zip(ids[1:], mask)]
    return inputs, (targets + [IGNORED] * length)[:length]


def letter_by_letter(turns, encode):
    return render(turns, lambda text: [i for letter in text for i in encode(letter)])


def all_after_the_first_answer(turns, encode):
    """From the first answer on everything is learned: the next questions too."""
    ids, mask = render(turns, encode)
    return ids, [int(1 in mask[: i + 1]) for i in range(len(ids))]


def keeps_the_end_of_it(ids, mask, length):
    """A long conversation loses its beginning, BOS too."""
    return shifted(ids[-length - 1 :], mask[-length - 1 :], length)


def forgets_whose_turn_it_is(turns, encode, length):
    """Does not count the id that lets the assistant speak."""
    return fit(turns, encode, length + (turns[-1][0] == "user"))


def the_list_itself(turns, encode, length):
    return turns if len(render(turns, encode)[0]) <= length else fit(turns, encode, length)


def two_at_a_time(turns, encode, length):
    """Takes it that questions and answers alternate."""
    while len(turns) > 2 and len(render(turns, encode)[0]) > length:
        turns = turns[2:]
    if (size := len(render(turns, encode)[0])) > length:
        raise ValueError(f"the last question and its answer take {size} ids, more than {length}")
    return turns


WRONG = {  # name -> what of the reference it replaces
    "the end is not in the mask": dict(render=never_stops),
    "a typed special token becomes special": dict(render=reads_special_tokens),
    "masks the inputs, not the targets": dict(shifted=masks_the_inputs),
    "encodes letter by letter": dict(render=letter_by_letter),
    "learns everything after the first answer": dict(render=all_after_the_first_answer),
    "a long conversation loses its beginning": dict(shifted=keeps_the_end_of_it),
    "fit forgets the assistant's id": dict(fit=forgets_whose_turn_it_is),
    "fit gives the list itself": dict(fit=the_list_itself),
    "fit drops two turns at a time": dict(fit=two_at_a_time),
}

PADDING = (
    "padding = [END] * (length - len(targets)), [IGNORED] * (length - len(targets)): "
    "`length - len(targets)` -> `length + len(targets)`"
)
EQUIVALENT = {  # a change that changes nothing -> why
    PADDING: "what is too long is cut off",
    PADDING + " (2)": "what is too long is cut off",
    "size = len(render(turns[start:], encode)[0]): `0` -> `1`": "the mask is as long as the ids",
}
