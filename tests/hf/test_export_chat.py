"""export.py of a model that was tuned on conversations: transformers makes our ids of them, answers
as ours does, and a wrong template is refused."""

import io
import json
import random
import re
from contextlib import redirect_stdout

import pytest
import torch
from test_export import OPTIONS, build, edit_json, export_model, refused, tokenizer  # noqa: F401

from config import UsageError
from hf import export, mapping, template
from machinery.trained import is_tuned
from preparation import chat

transformers = pytest.importorskip("transformers")

END = 3


@pytest.fixture
def export_tuned(export_model):  # noqa: F811
    """The export of a model in memory that was tuned, as its trainer.json says."""
    return lambda model: export_model(model, conversations=True)


PIECES = (
    "", " ", "\n", "Hello", " there", "a\n\nb ", "caf\u00e9 \u4f60\u597d", "{{ x }}", "<|assis",
    "def f(x):\n    return x", "\u200d\U0001f469", "'s", "12345", "{% if %}", "\\", "\t",
)  # fmt: skip
TYPED = (*PIECES, "<|assistant|>", "<|user|>", "a<|end|>b", "<|bos|> x", "<|end|><|end|>")


def conversations(count: int, pieces: tuple[str, ...]):
    """Random ones: 1 to 5 exchanges, a third with a system text, a third without an end."""
    rng = random.Random(0)
    for _ in range(count):
        said = lambda: "".join(rng.choice(pieces) for _ in range(rng.randint(0, 4)))
        turns = [("system", said())] if rng.random() < 1 / 3 else []
        for _ in range(rng.randint(1, 5)):
            turns += [("user", said()), ("assistant", said())]
        yield turns[:-1] if rng.random() < 1 / 3 else turns


def as_messages(turns) -> list[dict]:
    return [dict(role=role, content=text) for role, text in turns]


def their_ids(theirs, turns, reply: bool, **how) -> list[int]:
    options = dict(add_generation_prompt=reply, return_dict=False)
    return theirs.apply_chat_template(as_messages(turns), **options, **how)


@pytest.fixture
def theirs(tokenizer, tmp_path):  # noqa: F811
    export.write_tokenizer(tokenizer, tmp_path, 96, tuned=True)
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_conversations_have_our_ids(theirs, tokenizer):  # noqa: F811
    """A special token that is typed says nothing about who speaks: with sanitized control tokens,
    as the card has it, roles and text are ours, though the ids beside such a token are others in
    some. Without, it becomes the role."""
    special, taken, other = set(tokenizer.special.values()), 0, 0
    for turns in [*conversations(60, PIECES), *conversations(100, TYPED)]:
        reply = turns[-1][0] == "user"
        ours = [0, *chat.encode(turns, tokenizer, reply)]
        ids, plain = (their_ids(theirs, turns, reply, **how) for how in (template.TYPED, {}))
        typed = any(name in text for name in tokenizer.special for _, text in turns)
        assert typed or ids == plain == ours, turns
        assert [i for i in ids if i in special] == [i for i in ours if i in special]
        assert theirs.decode(ids) == tokenizer.decode(ours)
        other += ids != ours
        taken += plain != ours
    assert taken > 60 and other < taken


def test_what_counts_is_what_transformers_masks(theirs, tokenizer):  # noqa: F811
    """The assistant mask of the template covers the answers and the <|end|> of each."""
    for turns in conversations(40, PIECES):
        if turns[-1][0] == "user" or any(not text for _, text in turns):
            continue  # an empty answer has no character to mask but that of <|end|>
        out = theirs.apply_chat_template(
            as_messages(turns), return_assistant_tokens_mask=True, return_dict=True
        )
        speaks, expected = False, []
        for i in out["input_ids"]:
            expected.append(int(speaks))
            speaks = (speaks or i == 2) and i != END
        assert out["assistant_masks"] == expected


@pytest.mark.parametrize(
    "roles", [["assistant"], ["user", "user"], ["user", "system"], ["user", "tool"], ["a"]]
)
def test_roles_out_of_turn_are_refused_there_too(theirs, roles):
    messages = [dict(role=role, content="x") for role in roles]
    with pytest.raises(UsageError):
        chat.read_turns(messages)
    with pytest.raises(Exception, match="roles out of turn"):
        theirs.apply_chat_template(messages)


FIRST = [("system", "Answer briefly."), ("user", "What is it?")]


def ending(tokenizer, **changes):  # noqa: F811
    """A model whose answer to FIRST ends: <|end|> takes the place of its sixth token."""
    model = build(tie_embeddings=False, **changes)
    ids = torch.tensor([[0, *chat.encode(FIRST, tokenizer, reply=True)]])
    sixth = model.generate(ids, 6, temperature=0)[0, -1].item()
    with torch.no_grad():
        model.head.weight[END] = 1.3 * model.head.weight[sixth]
    return model


@torch.no_grad()
def our_answer(model, tokenizer, turns, most: int) -> str:  # noqa: F811
    ids = torch.tensor([[0, *chat.encode(turns, tokenizer, reply=True)]])
    drawn = [new.item() for new in model.stream(ids, most, 0.0, 0, None, END)]
    return tokenizer.decode(i for i in drawn if i != END)


def test_the_pipeline_answers_as_ours(export_tuned, tokenizer, capsys):  # noqa: F811
    changes = dict(extras=("key_offset", "value_embeds"), seq_len=256)
    ours, folder = ending(tokenizer, **changes), export_tuned(ending(tokenizer, **changes))
    assert re.search(r"and [1-9]\d conversations", capsys.readouterr().out)  # compared, too
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["split_special_tokens"] is False and config["eos_token"] == "<|end|>"
    tree = json.loads((folder / "generation_config.json").read_text())
    assert (tree["bos_token_id"], tree["eos_token_id"], tree["pad_token_id"]) == (0, [END, 0], 0)
    assert is_tuned(mapping.load_exported(folder)[1])

    generate = transformers.pipeline("text-generation", str(folder), trust_remote_code=True)
    how = dict(max_new_tokens=20, do_sample=False, tokenizer_encode_kwargs=template.TYPED)
    turns, lengths = FIRST[:1], []
    for question in (FIRST[1][1], "Where is it? <|assistant|>", "name_1(x)", ""):
        turns.append(("user", question))
        mine = our_answer(ours, tokenizer, turns, 20)
        out = generate(as_messages(turns), **how)
        text = out[0]["generated_text"][-1]
        assert text == dict(role="assistant", content=mine), question
        lengths.append(len(tokenizer.encode(mine)))
        turns.append(("assistant", mine))
    assert min(lengths) < 20  # an answer ended by itself


def test_the_example_of_the_card_works_as_printed(export_tuned, tokenizer, monkeypatch, capsys):  # noqa: F811
    """That of the program's output too, but for the folder's path."""
    folder = export_tuned(ending(tokenizer, seq_len=256))
    printed = re.search(r"in Python:\n(.*)", capsys.readouterr().out, re.DOTALL)[1].strip()
    card = (folder / "README.md").read_text()
    example = re.search(r"```python\n(.*?)\n```", card, re.DOTALL)[1]
    assert printed.replace(str(folder), folder.name) == example
    assert "it answers" in card and "sanitize_control_tokens" in example
    monkeypatch.chdir(folder.parent)
    transformers.set_seed(3)
    with redirect_stdout(io.StringIO()) as said:
        exec(example, {})
    assert said.getvalue().strip() and "<|" not in said.getvalue()


MUTANTS = {  # name -> (what is spoilt, what the refusal says)
    "BOS for the end": (edit_json(OPTIONS, eos_token="<|bos|>"), r"\(331, 0, 0, 0\)"),
    "no BOS": (
        lambda m: m.setattr(template, "TEMPLATE", template.TEMPLATE.replace("{{ bos_token }}", "")),
        "the chat template encodes",
    ),
    "system text in front of all": (
        lambda m: m.setattr(
            template, "TEMPLATE", template.TEMPLATE.replace("{% set ns.before = '' %}", "")
        ),
        "the chat template encodes",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_template_is_refused(mutant, export_tuned, tmp_path, monkeypatch):
    spoil, words = MUTANTS[mutant]
    spoil(monkeypatch)
    refused(export_tuned, build(), tmp_path, words)


def test_a_base_model_has_no_template(export_model):  # noqa: F811
    folder = export_model(build())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert "chat_template" not in config and config["split_special_tokens"] is True
    assert "it does not answer" in (folder / "README.md").read_text()
