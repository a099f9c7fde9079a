"""eval.py chat: what the model is given, what is forgotten, and what Ctrl-C ends. eval.py sample:
seeded text after prompts of the command line or of the preset; a tuned model is asked."""

import io
import random
import re
import sys
from itertools import takewhile
from unittest.mock import Mock

import pytest
import torch
from chat_helpers import random_model
from conftest import CPU, look

from config import PRESETS, Preset, UsageError
from instruments.talk import sample
from instruments.talk.chat import ChatConfig, Talk, questions, reply
from machinery.output import printable
from preparation import chat

pytest_plugins = ["chat_helpers"]


def talk_with(tokenizer, seq_len: int, **options) -> Talk:
    model = random_model(1, vocab_size=tokenizer.vocab_size, seq_len=seq_len).eval()
    return Talk(model, tokenizer, ChatConfig(**{"temperature": 0.0, **options}))


def test_each_turn_is_what_a_whole_conversation_says(tokenizer, capsys):
    """25 turns, during which the oldest go again and again; some answers are stopped half-way. The
    model is given the conversation by its template; the text is printed once, and whole."""
    talk = talk_with(tokenizer, 128, max_new_tokens=12, system="the cat")
    asked = []
    rng = random.Random(2)
    for _ in range(25):
        words = rng.choices(["cat", "the mat", "<|end|>", "What?"], k=rng.randint(1, 5))
        asked.append(" ".join(words))
        if rng.random() < 0.3:
            talk.ask(asked[-1])
            text = printable(next(talk.answer()))
        else:
            reply(talk, asked[-1])
            printed = capsys.readouterr().out
            text = re.sub(r"^\[context full.*\n|\n(\[cut.*\n)?\Z", "", printed)
        _, drawn = talk.exchanges[-1]
        assert text == printable(tokenizer.decode(drawn)) and len(drawn) <= 12
        questions = [q for q, _ in talk.exchanges]
        assert questions == asked[-len(questions) :]
        turns = [("system", "the cat"), ("user", questions[0])]
        ids = [0, *chat.encode(turns, tokenizer, reply=True)]
        for (_, answer), question in zip(talk.exchanges, questions[1:]):
            ids += [*answer, 3, *chat.encode([("user", question)], tokenizer, reply=True)]
        for i in drawn:  # the slow way
            with torch.no_grad():
                logits = talk.model(torch.tensor([ids]))[0, -1]
            assert logits[i] > logits.max() - 1e-4  # which of two equals, is no matter
            ids.append(i)
    assert len(talk.exchanges) < 10


def test_a_question_that_cannot_fit_leaves_the_conversation_as_it_was(tokenizer):
    talk = talk_with(tokenizer, 64)
    assert talk.most == 32  # half of the positions, of the 256 asked for
    reply(talk, "cat")
    before = [("cat", [*talk.exchanges[0][1]])]
    with pytest.raises(UsageError, match="32"):
        talk.ask("What is a mat? " * 20)
    assert talk.exchanges == before
    with pytest.raises(UsageError, match="--system.* 32"):
        talk_with(tokenizer, 64, system="What is a mat? " * 20).ask("cat")


def test_an_answer_is_drawn_as_it_was_asked_for(tokenizer):
    """The nth question with the nth seed."""
    options = dict(temperature=0.8, top_k=20, top_p=0.9)
    talk = talk_with(tokenizer, 128, max_new_tokens=20, seed=7, **options)
    for n in (1, 2):
        talk.ask("cat")
        ids = talk.ids(talk.exchanges)
        generator = torch.Generator().manual_seed(7 + n)
        drawn = talk.model.generate(torch.tensor([ids]), 20, generator=generator, **options)
        new = takewhile(lambda i: i > 3, drawn[0, len(ids) :].tolist())
        assert "".join(talk.answer()) == tokenizer.decode(new)


def test_text_comes_as_soon_as_its_characters_are_whole(tokenizer, capsys):
    """A byte a token; the text ends within a character."""
    raw = "a\u00e9 \u4f60 \U0001f642 \xff!".encode() + b"\xe4\xbd"
    token_of = {part: i for i, part in tokenizer.bytes_of.items()}
    script = [token_of[bytes([byte])] for byte in raw]
    left = iter([*script, tokenizer.special["<|end|>"]] * 3)
    talk = talk_with(tokenizer, 256)
    talk.model.register_forward_hook(
        lambda *args: args[2].index_fill(-1, torch.tensor(next(left)), 1e4)
    )
    talk.ask("cat")
    assert [*talk.answer()] == [*raw.decode(errors="ignore"), "\ufffd"]
    assert talk.exchanges == [("cat", script)]
    for talk.most in (len(script) + 1, len(script)):  # not reached; reached, and not passed
        reply(talk, "mat")
        cut = f"\n[cut at {talk.most} tokens]" * (talk.most == len(script))
        assert capsys.readouterr().out == f"{raw.decode(errors='replace')}{cut}\n"


def test_a_conversation_in_the_terminal(answering, monkeypatch, capsys):
    """Questions come from a pipe."""
    ask = "Say cat dog\n\n  \nSay river tree\n" + "Say fish " * 60 + "\nSay bird bird\n" * 6
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ask.encode())))
    said = look(capsys, "chat", answering, "--temperature", 0, *CPU)
    assert "> I say cat dog.\n" in said
    assert "> I say river tree.\n" in said
    assert "and 32 fit" in said
    assert re.search(r"> \[context full: .*\]\nI say", said)
    assert said.count("I say bird bird.") >= 4


def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_program(tokenizer, monkeypatch, capsys):
    talk = talk_with(tokenizer, 128, max_new_tokens=12)
    lines = Mock(side_effect=["cat", "mat", KeyboardInterrupt, "never"])
    passes = Mock(side_effect=[None, None, None, KeyboardInterrupt, *[None] * 50])
    monkeypatch.setattr("builtins.input", lines)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    talk.model.register_forward_pre_hook(passes)
    for question in questions():
        reply(talk, question)
    assert capsys.readouterr().out.count("\n[stopped]\n") == 1
    assert len(talk.exchanges[0][1]) <= 3 < len(talk.exchanges[1][1])
    assert [question for question, _ in talk.exchanges] == ["cat", "mat"]
    assert lines.call_count == 3


def test_samples_are_seeded_text(trained_run, capsys):
    args = (trained_run, *CPU, "--prompt", "def ", "import", "\x1b]\x9b\r", "--max_new_tokens", 20)
    torch.backends.cuda.enable_cudnn_sdp(True)
    first = look(capsys, "sample", *args)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # on a GPU, a new plan for each token
    assert first == look(capsys, "sample", *args) != look(capsys, "sample", *args, "--seed", 1)
    assert "--- 'def'\ndef" in first and "--- 'import'\nimport" in first
    assert not re.search("[^\n\t -~\xa0-\U0010ffff]", first) and r"\x1b]" in first


def test_several_samples_of_a_prompt_differ(trained_run, capsys):
    args = (trained_run, *CPU, "--prompt", "x = ", "--max_new_tokens", 20, "--n", 3)
    samples = re.findall(r"^x =.*", look(capsys, "sample", *args), re.MULTILINE)
    assert len(samples) == 3 and len({*samples}) > 1
    samples = re.findall(r"^x =.*", look(capsys, "sample", *args, "--temperature", 0), re.MULTILINE)
    assert len(samples) == 3 and len({*samples}) == 1


def test_a_tuned_model_is_asked(answering, base, capsys):
    out = look(capsys, "sample", answering, *CPU, "--prompt", "Say dog dog", "--temperature", 0)
    assert "Say dog dog\nI say dog dog.\n" in out
    out = look(capsys, "sample", base / "run", *CPU, "--prompt", "the cat", "--n", 2)
    assert "question" not in out


def test_prompts_of_the_preset_or_of_the_command_line(trained_run, capsys):
    assert sample.find_prompts("tiny", None) == PRESETS["tiny"].prompts
    assert sample.find_prompts("mine", None) == Preset.prompts
    out = look(capsys, "sample", trained_run, *CPU, "--max_new_tokens", 4, "--data_dir", "none")
    assert re.findall("^--- '(.*)'", out, re.MULTILINE) == [*Preset.prompts]
