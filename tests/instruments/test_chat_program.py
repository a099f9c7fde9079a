"""eval.py chat: what the model is given, what is forgotten, and what Ctrl-C ends."""

import io
import itertools
import random
import re
import subprocess
import sys

import pytest
import torch
from chat_helpers import random_model
from conftest import ROOT, command, environment

import eval
from config import UsageError
from instruments.talk.chat import ChatConfig, Talk, questions, say
from machinery.cli import printable
from preparation import chat

pytest_plugins = ["chat_helpers"]


def talk_with(tokenizer, seq_len: int, **options) -> Talk:
    model = random_model(1, vocab_size=tokenizer.vocab_size, seq_len=seq_len).eval()
    return Talk(model, tokenizer, ChatConfig(**{"temperature": 0.0, **options}))


def test_each_turn_is_what_a_whole_conversation_says(tokenizer, capsys):
    """25 turns, during which the oldest go again and again; some answers are stopped half-way.
    The model is given the conversation by its template, and draws the likeliest token each time;
    the text is printed once, and whole."""
    talk = talk_with(tokenizer, 128, max_new_tokens=12, system="the cat")
    asked, rng, cuts = [], random.Random(2), 0
    for _ in range(25):
        words = rng.choices(["cat", "the mat", "<|end|>", "What?"], k=rng.randint(1, 5))
        asked.append(" ".join(words))
        if rng.random() < 0.3:
            dropped = talk.ask(asked[-1])
            text = printable(next(talk.answer()).text)
        else:
            say(talk, asked[-1])
            printed = capsys.readouterr().out
            dropped = "[context full" in printed
            text = re.sub(r"^\[context full.*\n|\n(\[cut.*\n)?\Z", "", printed)
        _, drawn = talk.exchanges[-1]
        assert text == printable(tokenizer.decode(drawn)) and len(drawn) <= 12
        questions = [q for q, _ in talk.exchanges]
        assert questions == asked[-len(questions) :]
        cuts += bool(dropped)
        turns = [("system", "the cat"), ("user", questions[0])]
        ids = [0, *chat.encode(turns, tokenizer, reply=True)]
        for (_, answer), question in zip(talk.exchanges, questions[1:]):
            ids += [*answer, 3, *chat.encode([("user", question)], tokenizer, reply=True)]
        for i in drawn:  # the slow way
            with torch.no_grad():
                assert talk.writer.model(torch.tensor([ids]))[0, -1].argmax() == i
            ids.append(i)
    assert cuts > 5


def test_a_question_that_cannot_fit_leaves_the_conversation_as_it_was(tokenizer):
    talk = talk_with(tokenizer, 64)
    assert talk.most == 32  # half of the positions, of the 256 asked for
    talk.ask("cat")
    say_all = lambda: [t.id for piece in talk.answer() for t in piece.tokens]
    before = [("cat", [i for i in say_all() if i not in tokenizer.special.values()])]
    with pytest.raises(UsageError) as caught:
        talk.ask("What is a mat? " * 20)
    assert "32" in str(caught.value)
    assert talk.exchanges == before
    talk.ask("cat")
    assert len(say_all()) <= 32


def test_a_system_text_that_leaves_no_room_is_named(tokenizer):
    """Before the first question, which is not the one that is too long."""
    with pytest.raises(UsageError) as caught:
        talk_with(tokenizer, 64, system="What is a mat? " * 20)
    assert "--system" in str(caught.value) and "16" in str(caught.value)
    talk = talk_with(tokenizer, 64, system="What is")
    assert talk.ask("cat") == 0


def test_a_conversation_in_the_terminal(answering, base):
    """Questions come from a pipe; a base model refuses, and names the way out."""
    args = ["chat", answering, "--temperature", 0, "--device", "cpu"]
    ask = "Say cat dog\n\n  \nSay river tree\n" + "Say fish " * 60 + "\nSay bird bird\n" * 6
    how = dict(text=True, capture_output=True, cwd=ROOT, env=environment(), timeout=120)
    done = subprocess.run(command("eval.py", args), input=ask, **how)
    assert done.returncode == 0, done.stderr
    assert "> I say cat dog.\n" in done.stdout
    assert "> I say river tree.\n" in done.stdout
    assert "of 32 tokens" in done.stdout
    assert re.search(r"> \[context full: .*\]\nI say", done.stdout)
    assert done.stdout.count("I say bird bird.") >= 4
    with pytest.raises(UsageError):
        eval.main(["chat", str(base / "run")])


def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_program(tokenizer, monkeypatch, capsys):
    talk, passes = talk_with(tokenizer, 128, max_new_tokens=12), itertools.count()
    lines = iter(["cat", "mat", KeyboardInterrupt, "never"])

    def type_in(prompt):
        print(prompt, end="")
        if (line := next(lines)) is KeyboardInterrupt:
            raise line
        return line

    def interrupt(*args):
        if next(passes) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", type_in)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    talk.writer.model.register_forward_pre_hook(interrupt)
    for question in questions():
        say(talk, question)
    first, second = capsys.readouterr().out.split("> ")[1:3]
    assert first.endswith("\n[stopped]\n") and "[stopped]" not in second
    assert [question for question, _ in talk.exchanges] == ["cat", "mat"]
    assert len(talk.exchanges[0][1]) <= 3 < len(talk.exchanges[1][1])
    assert next(lines) == "never"
