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


def learns_the_question_too(turns, encode):
    ids, _ = render(turns, encode)
    return ids, [1] * len(ids)


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


def learns_the_padding(ids, mask, length):
    inputs, targets = shifted(ids, mask, length)
    known = len(ids) - 1
    return inputs, targets[:known] + [END] * (length - known)


WRONG = {  # name -> what of the reference it replaces
    "learns the question too": dict(render=learns_the_question_too),
    "the end is not in the mask": dict(render=never_stops),
    "a typed special token becomes special": dict(render=reads_special_tokens),
    "masks the inputs, not the targets": dict(shifted=masks_the_inputs),
    "learns the padding": dict(shifted=learns_the_padding),
}
