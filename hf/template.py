"""The chat template of an exported model: transformers encodes a conversation as we do.

`options()` goes into tokenizer_config.json of a model that was tuned on conversations;
`compare_conversations` is for parity.py and llama_cpp.py. Next: preparation/chat.py, whose template
this one translates.
"""

from machinery.errors import ParityError
from preparation import chat
from tokenizer import Tokenizer

END = "<|end|>"
# By the loop over parts, vLLM knows that it may hand over parts. {% generation %} marks what a mask
# for training covers, in trl for example.
TEMPLATE = r"""
{{ bos_token }}{% set ns = namespace(before='', next='user', text='') %}
{% for m in messages %}{% set ns.text = m['content'] %}
{% if ns.text is defined and ns.text is sequence and ns.text is not string and
 ns.text is not mapping %}{% set ns.text = '' %}
{% for part in m['content'] %}
{% set text = part if part is string else part['text'] %}
{% set ns.text = ns.text + text if ns.text is string and text is string else none %}
{% endfor %}{% endif %}{% if ns.text is not string %}
{{ raise_exception('a content or a part of one is not text') }}{% endif %}
{% if m['role'] == 'system' and loop.first %}
{% set ns.before = ns.text + '\n\n' if ns.text else '' %}
{% elif m['role'] != ns.next %}
{{ raise_exception('roles out of turn: perhaps system, then user and assistant in turn') }}
{% elif m['role'] == 'user' %}
{{ '<|user|>' + ns.before + ns.text + '<|end|>' }}
{% set ns.before = '' %}{% set ns.next = 'assistant' %}
{% else %}
<|assistant|>{% generation %}{{ ns.text + '<|end|>' }}{% endgeneration %}
{% set ns.next = 'user' %}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}
""".replace("\n", "")
# Our tokenizer reads a special token that is typed as plain text. transformers encodes the whole
# conversation as one text, so it has to parse special tokens; to tell those of the template from
# those that are typed, it must be told to, as in the card's example.
TYPED = {"sanitize_control_tokens": True}


def ends(tokenizer: Tokenizer, tuned: bool) -> list[int]:
    """The ids that end a text; those of an answer, if the model was tuned on conversations."""
    return [tokenizer.special[END], tokenizer.bos_id] if tuned else [tokenizer.bos_id]


def options() -> dict:
    """For tokenizer_config.json; split_special_tokens would make plain text of the roles."""
    return dict(chat_template=TEMPLATE, split_special_tokens=False, eos_token=END)


def compare_conversations(theirs, tokenizer: Tokenizer, texts: tuple[str, ...]) -> int:
    """Compare the ids of conversations in which each of `texts` stands in each role, with and
    without a prompt for an answer; returns how many. ParityError if they differ.

    At a special token that is typed, transformers cuts the text, so the tokens beside it may
    differ; the special ones, which say who speaks, and the text must be the same."""
    special = set(tokenizer.special.values())
    for i in range(len(texts)):
        variants = [texts[i - k] for k in range(4)]
        whole = list(zip(("system", "user", "assistant", "user"), variants))
        for turns, reply in ((whole, True), (whole[1:3], False)):
            ours = [tokenizer.bos_id, *chat.encode(turns, tokenizer, reply)]
            messages = [dict(role=role, content=content) for role, content in turns]
            ids = theirs.apply_chat_template(
                messages, add_generation_prompt=reply, return_dict=False, **TYPED
            )
            typed = any(token in content for token in tokenizer.special for content in variants)
            roles, our_roles = ([i for i in row if i in special] for row in (ids, ours))
            if ids != ours and not (typed and roles == our_roles):
                raise ParityError(f"the chat template encodes {str(turns)[:80]} differently")
            if theirs.decode(ids) != tokenizer.decode(ours):
                raise ParityError(f"the chat template changes the text of {str(turns)[:80]}")
    return 2 * len(texts)
