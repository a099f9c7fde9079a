"""The chat template of an exported model: what transformers makes of a conversation is our ids.

`options()` goes into tokenizer_config.json of a model that was tuned on conversations. `check` is
for parity.py. Next: preparation/chat.py, the template of which this is the translation.
"""

from collections.abc import Callable

from machinery.errors import ParityError
from tokenizer import Tokenizer

END = "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(before='', next='user') %}{% for m in messages %}"
    "{% if m['role'] == 'system' and loop.first %}"
    "{% set ns.before = m['content'] + '\n\n' if m['content'] else '' %}"
    "{% elif m['role'] != ns.next %}"
    "{{ raise_exception('roles out of turn: perhaps system, then user and assistant in turn') }}"
    "{% elif m['role'] == 'user' %}"
    "{{ '<|user|>' + ns.before + m['content'] + '<|end|>' }}"
    "{% set ns.before = '' %}{% set ns.next = 'assistant' %}"
    "{% else %}"  # {% generation %}: what a mask for training covers, in trl for example
    "<|assistant|>{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% set ns.next = 'user' %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Our tokenizer reads a special token that is typed as plain text. transformers encodes the whole
# conversation as one text, so it has to parse special tokens; to tell those of the template from
# those that are typed, it must be asked, as in the card's example.
TYPED = {"sanitize_control_tokens": True}


def options() -> dict:
    """Of tokenizer_config.json; with split_special_tokens the roles would be read as plain text."""
    return dict(chat_template=TEMPLATE, split_special_tokens=False, eos_token=END)


def ends(tokenizer: Tokenizer, tuned: bool) -> int | list[int]:
    """eos_token_id of generation_config.json: where a text ends, or a turn."""
    bos = tokenizer.bos_id
    return [tokenizer.special[END], bos] if tuned else bos


def conversations(texts: tuple[str, ...]) -> list[list[tuple[str, str]]]:
    """Turns of every shape, each text in every role."""
    found = []
    for i, text in enumerate(texts):
        other, third = texts[i - 1], texts[i - 2]
        asked = [("user", text), ("assistant", other), ("user", third), ("assistant", text)]
        found += [asked, asked[:3], asked[:1], [("system", other), *asked], [("system", text)]]
        found[-1].append(("user", third))
    return found


def check(theirs, tokenizer: Tokenizer, encode: Callable, texts: tuple[str, ...]) -> int:
    """Compare the ids of conversations made of `texts`; returns how many. ParityError if they
    differ. encode: preparation.chat.encode.

    Beside a special token that is typed transformers cuts the text, so there the tokens may be
    others; the special ones, which say who speaks, and the text must be the same."""
    special, found = set(tokenizer.special.values()), conversations(texts)
    for turns in found:
        messages, reply = [dict(role=r, content=t) for r, t in turns], turns[-1][0] == "user"
        ours = [tokenizer.bos_id, *encode(turns, tokenizer, reply)]
        ids = theirs.apply_chat_template(
            messages, add_generation_prompt=reply, return_dict=False, **TYPED
        )
        typed = any(token in text for token in tokenizer.special for _, text in turns)
        marks = [[i for i in row if i in special] for row in (ids, ours)]
        if ids != ours and not (typed and marks[0] == marks[1]):
            raise ParityError(f"the chat template encodes {str(turns)[:80]} differently")
        if theirs.decode(ids) != tokenizer.decode(ours):
            raise ParityError(f"the chat template changes the text of {str(turns)[:80]}")
    return len(found)
