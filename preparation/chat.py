"""Conversations -> token ids: the template, and the pieces of a conversation that fit into rows.

    <|bos|> <|user|> question <|end|> <|assistant|> answer <|end|> <|user|> ...

No spaces or line feeds stand between these. What people write is encoded as text, so a special
token that is typed stays text. A system text has no token of its own: it goes before the first
question, a blank line between. Guarantee: the ids of a row alone say which targets count (data.py,
`targets_of`): those of the answers, and the <|end|> of each. Next: worker.py packs the pieces.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from config import UsageError

# Who speaks, as data sets call them: OpenAI's names, ShareGPT's, Gemma's, OpenAssistant's ...
ROLES = {"system": "system", "developer": "system"}
ROLES |= dict.fromkeys("user human prompter".split(), "user")
ROLES |= dict.fromkeys("assistant gpt chatgpt model bot ai".split(), "assistant")

# Of an answer, in the formats of OpenAI, axolotl and ms-swift: not to be learned if 0 or false.
WEIGHTS = "weight train training loss loss_weight".split()
BESIDE = re.compile("reasoning|think|thought|tool_calls|function_call")  # keys of other texts

Turn = tuple[str, str]  # (role, text); role: system (only the first), user or assistant


class TurnsError(UsageError):
    """A conversation that cannot be used; `reason`: why, in the same words for each of a kind."""

    def __init__(self, reason: str, value: object) -> None:
        self.reason = reason
        super().__init__(f"a conversation has {reason}: {value!r:.160}")


def read_turns(value: object) -> list[Turn]:
    """[{"role": "user", "content": "Hi"}, ...], or ShareGPT's [{"from": "human", "value": "Hi"},
    ...] -> [("user", "Hi"), ...]: perhaps a system text, then user and assistant in turn.

    A content may be a list of parts that are text: {"type": "text", "text": "Hi"}, or "Hi". Keys
    that are null count as absent. TurnsError if it is no such list."""
    turns = []
    for turn in value if isinstance(value, list) else [None]:
        if not isinstance(turn, dict) or not turn.keys() & {"role", "from"}:
            raise TurnsError('something else than turns, {"role": ...} each, or their JSON', value)
        text = first_of(turn, "content", "value")
        known = ROLES.get(str(first_of(turn, "role", "from")).strip().lower())
        if known is None:
            raise TurnsError("a role other than system, user and assistant", value)
        parts = text if isinstance(text, list) else [text]
        texts = [p.get("text") if isinstance(p, dict) else p for p in parts]
        if not all(isinstance(text, str) for text in texts):
            raise TurnsError("a part that is not text", value)
        turns.append((known, "".join(texts)))
    if not re.fullmatch("s?u(au)*a?", "".join(role[0] for role, _ in turns)):  # by initials
        raise TurnsError("roles out of turn", value)
    return turns


def first_of(turn: dict, *names: str) -> object:
    """The value of the first of these keys that is neither null nor empty, else an empty one."""
    return max((turn[name] for name in names if turn.get(name) is not None), key=bool, default=None)


def read_example(value: object, notes: Counter[str]) -> list[Turn]:
    """The turns of a conversation to learn from, a list or its JSON. TurnsError if it is no such
    list, or a model must not learn each of its answers: a row cannot say so (`targets_of`)."""
    if isinstance(value, str | bytes):
        with suppress(ValueError, RecursionError):  # the latter: nested too deeply
            value = json.loads(value)
    turns = read_turns(value)
    for (role, text), turn in zip(turns, value):
        if role != "system" and not text.strip():
            raise TurnsError("an empty question or answer", value)
        if role == "assistant" and any(turn.get(name) not in (None, 1) for name in WEIGHTS):
            raise TurnsError(f"an answer that is not to be learned ({' '.join(WEIGHTS)})", value)
    notes.update(
        f"turns with {name!r} beside their content, which is not learned"
        for turn in value
        for name in turn
        if turn[name] and BESIDE.match(name)
    )
    return turns


def marks(tokenizer) -> tuple[int, int, int]:
    """The ids of <|user|>, <|assistant|> and <|end|>; UsageError for a tokenizer without them."""
    names = "<|user|> <|assistant|> <|end|>".split()
    missing = [name for name in names if name not in tokenizer.special]
    if missing:
        raise UsageError(
            f"the tokenizer has no {missing[0]} token, which conversations need; take one that "
            "prepare_data.py has trained"
        )
    return tuple(map(tokenizer.special.get, names))


def encode(turns: list[Turn], tokenizer, reply: bool = False) -> list[int]:
    """Turns, as from `read_turns`, -> ids without BOS. reply: end in <|assistant|>, ready for the
    model to answer; UsageError unless the last turn is the user's."""
    user, assistant, end = marks(tokenizer)
    if reply and (not turns or turns[-1][0] != "user"):
        raise UsageError("the last turn of a conversation must be the user's, to be answered")
    ids = []
    before = ""
    for role, text in turns:
        if role == "system":
            before = f"{text}\n\n" if text else ""
            continue
        ids += [user if role == "user" else assistant, *tokenizer.encode(before + text), end]
        before = ""
    return [*ids, assistant] if reply else ids


def prompt_ids(text: str, tokenizer, tuned: bool) -> tuple[list[int], int]:
    """The ids that a model gets for a user's text, BOS first, and the id that ends what it writes:
    a document to continue until the next BOS; or, for a tuned one, a question to answer."""
    if tuned:
        ids = encode([("user", text)], tokenizer, reply=True)
        return [tokenizer.bos_id, *ids], marks(tokenizer)[2]
    return [tokenizer.bos_id, *tokenizer.encode(text)], tokenizer.bos_id


def as_text(turns: list[Turn]) -> str:
    """All that is said: the text by which a conversation goes to train or val."""
    return "\n\n".join(text for _, text in turns)


# What prepare_data.py counts, in its notes.
FILLERS = "BOS tokens fill rows, since no exchange is cut to fill them"
ANSWERS = "tokens in answers, the <|end|> of each included"
LOST = "tokens of answers lost, in exchanges longer than a row"
CUT = "conversations cut between exchanges, to fit into rows"
UNASKED = "questions longer than a row, left out with their answers"
UNANSWERED = "questions without an answer, left out"


def pieces(turns: list[Turn], tokenizer, row_len: int, notes: Counter[str]) -> Iterator[list[int]]:
    """A conversation -> ids without BOS, in pieces that fit into a row with their BOS. It is cut
    between exchanges, and each piece begins with the system text and a question. An exchange longer
    than a row loses the end of its answer with its <|end|>, so it does not teach to stop there."""
    assistant = marks(tokenizer)[1]
    system = [turn for turn in turns if turn[0] == "system"]
    asked = turns[len(system) :]
    piece = []
    for exchange in zip(asked[::2], asked[1::2]):
        ids = encode([*([] if piece else system), *exchange], tokenizer)
        if piece and len(piece) + len(ids) >= row_len:  # BOS has a place as well
            yield piece
            piece = []
            ids = encode([*system, *exchange], tokenizer)
            notes[CUT] += 1
        before = ids.index(assistant) + 1  # ids before the answer
        notes[ANSWERS] += len(ids) - before
        if len(ids) < row_len:
            piece += ids
            continue
        if 1 + before < row_len:
            yield ids[: row_len - 1]
        else:
            notes[UNASKED] += 1
        notes[LOST] += len(ids) - max(before, row_len - 1)
    if piece:
        yield piece
    if len(asked) % 2:
        notes[UNANSWERED] += 1
