"""Conversations: the template, the packing, which targets count, and talking with a tuned model."""

import pytest

from config import UsageError
from preparation import chat
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat. " * 40, "What is a cat? An animal."], 300)


def test_turns_become_ids_and_typed_special_tokens_stay_text(tokenizer):
    e = tokenizer.encode
    turns = [("system", "Be brief."), ("user", "<|end|> Hi"), ("assistant", ""), ("user", "the")]
    first = [1, *e("Be brief.\n\n<|end|> Hi"), 3, 2, 3]
    assert chat.encode(turns, tokenizer) == [*first, 1, *e("the"), 3]
    assert chat.encode(turns, tokenizer, reply=True) == [*first, 1, *e("the"), 3, 2]
    assert chat.encode(turns[1:2], tokenizer) == [1, *e("<|end|> Hi"), 3]
    assert set(e("<|user|><|assistant|><|end|><|bos|>")).isdisjoint(range(4))
    for cannot in ([], turns[:1], turns[:3]):
        with pytest.raises(UsageError, match="must be the user's"):
            chat.encode(cannot, tokenizer, reply=True)


def test_both_forms_of_turns_are_read():
    said = [("system", "s"), ("human", "q"), ("gpt", "a"), ("human", "")]
    theirs = [{"from": role, "value": text} for role, text in said]
    turns = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "")]
    ours = [{"role": role, "content": text, "id": 7} for role, text in turns]
    assert chat.read_turns(theirs) == chat.read_turns(ours) == turns
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat.read_turns([{"role": "user", "content": parts}]) == [("user", "ab")]


@pytest.mark.parametrize(
    "value, reason",
    [
        ("text", "not a list of turns"),
        ([], "roles out of turn"),
        ([{"text": "q"}], "not a list of turns"),
        ([["user", "q"]], "not a list of turns"),
        ([{"role": "assistant", "content": "a"}], "roles out of turn"),
        ([{"role": "system", "content": "s"}], "roles out of turn"),
        ([{"role": "user", "content": "q"}] * 2, "roles out of turn"),
        ([{"role": "tool", "content": "q"}], "a role other than"),
        ([{"role": ["user"], "content": "q"}], "a role other than"),
        ([{"role": "user", "content": None}], "a part that is not text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part that is not text"),
        ([{"role": "user"}], "a part that is not text"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_beginning(value, reason):
    with pytest.raises(UsageError, match=reason) as error:
        chat.read_turns(value)
    assert isinstance(value, str) or str(value)[:1] in str(error.value)


def test_a_tokenizer_without_roles_is_refused(tokenizer):
    class Other:
        special = {"<|bos|>": 0, "<|user|>": 1}

    assert chat.marks(tokenizer) == (1, 2, 3)
    with pytest.raises(UsageError, match="has no <.assistant.> token"):
        chat.marks(Other)
