"""Conversations: the template, the packing, which targets count, and what a step of them is."""

import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from chat_helpers import here
from conftest import losses, read_lines
from data_helpers import pieces_of
from test_counted import assert_same

import data
import eval
from config import UsageError
from machinery import checkpoint
from machinery.shards import Manifest
from machinery.trained import EvalConfig
from preparation import chat, stdlib_chats
from tokenizer import Tokenizer

pytest_plugins = ["chat_helpers"]


def test_a_reply_is_asked_for_after_a_question_alone(tokenizer):
    turns = [("system", "Be brief."), ("user", "<|end|> Hi"), ("assistant", ""), ("user", "the")]
    assert chat.encode(turns, tokenizer, reply=True) == [*chat.encode(turns, tokenizer), 2]
    for cannot in ([], turns[:1], turns[:3]):
        with pytest.raises(UsageError):
            chat.encode(cannot, tokenizer, reply=True)


WORDS = ["", " ", "cat", "the mat", "\n\n", "olá 汉"]
WORDS += ["<|assistant|>", "a<|end|>b", "<|bos|>", "\ud800"]


def random_turns(rng: random.Random, most: int = 4) -> list[chat.Turn]:
    """A conversation of awkward words; a question at its end may have no answer."""
    roles = ["system"] * (rng.random() < 0.3) + ["user", "assistant"] * rng.randint(1, most)
    turns = [(role, "".join(rng.choices(WORDS, k=rng.randint(0, 6)))) for role in roles]
    return turns[:-1] if rng.random() < 0.2 and len(turns) > 3 else turns


def beside(turns: list[chat.Turn], tokenizer) -> tuple[list[int], list[bool]]:
    """The oracle: ids with BOS, and for each whether it counts, written down beside the text."""
    ids = [0]
    counts = [False]
    system = ""
    for role, text in turns:
        if role == "system":
            system = text + "\n\n" if text else ""
            continue
        words = tokenizer.encode(system + text if role == "user" else text)
        ids += [1 if role == "user" else 2, *words, 3]
        counts += [False, *[role == "assistant"] * (len(words) + 1)]
        system = "" if role == "user" else system
    return ids, counts


def counted(ids: list[int]) -> list[bool]:
    """Of each id but the first: whether it counts as a target."""
    return (data.targets_of(np.array([ids], np.uint16), (1, 2, 3))[0] != data.IGNORED).tolist()


def test_what_counts_follows_from_the_ids_alone(tokenizer):
    """1,000 conversations, special tokens typed into many, against a mask made beside the text."""
    rng = random.Random(0)
    for _ in range(1000):
        turns = random_turns(rng)
        ids, counts = beside(turns, tokenizer)
        assert [0, *chat.encode(turns, tokenizer)] == ids
        assert counted(ids) == counts[1:], turns


ASKED = {"role": "user", "content": "q", "weight": 0}
ANSWER = {"role": "assistant", "content": "a", "train": True, "loss": None, "reasoning": None}
NOT_LEARNED = """{"content": ""}
{"content": " \\t", "tool_calls": [1]}
{"content": [{"type": "text", "text": ""}]}
{"weight": 0}
{"train": false}
{"training": false}
{"loss": 0.0}"""
BESIDE = '{"thinking": "hm", "reasoning_content": "hm", "tool_calls": []}'


def test_an_answer_that_is_not_to_be_learned_costs_its_conversation():
    """What a question says of its weight is nothing; what is beside an answer is counted."""
    turns = lambda answer: [ASKED, ANSWER, ASKED, ANSWER | json.loads(answer)]
    for answer in NOT_LEARNED.splitlines():
        with pytest.raises(chat.TurnsError, match="an empty|not to be learned"):
            chat.read_example(turns(answer), Counter())
    notes = Counter()
    assert len(chat.read_example(turns(BESIDE), notes)) == 4
    assert [*notes.values()] == [1, 1]


def test_all_of_a_row_of_text_counts():
    """Beside rows of conversations."""
    rows = np.array([[0, 7, 8, 0, 9]], np.uint16)
    assert data.targets_of(rows, (1, 2, 3)).tolist() == rows[:, 1:].tolist()


def slow_pieces(turns, tokenizer, row_len):
    """The oracle of `chat.pieces`: (pieces, tokens of answers, tokens of them lost)."""
    head = turns[:1] if turns[0][0] == "system" else []
    body = turns[len(head) :]
    size = lambda group: len(beside(head + group, tokenizer)[0])
    groups = [body[:2]]
    for i in range(2, len(body) - 1, 2):
        pair = body[i : i + 2]
        if size(groups[-1] + pair) > row_len:
            groups.append([])
        groups[-1] += pair
    kept = []
    total = 0
    lost = 0
    for group in groups:
        ids, counts = beside(head + group, tokenizer)
        total += sum(counts)
        lost += sum(counts[row_len:])
        if any(counts[:row_len]):
            kept.append(ids[1:row_len])
    return kept, total, lost


def test_pieces_end_between_exchanges_and_what_is_lost_is_counted(tokenizer):
    rng = random.Random(1)
    cut = 0
    for _ in range(800):
        turns = random_turns(rng, 6)
        row_len = rng.randint(4, 60)
        notes = Counter()
        expected, total, lost = slow_pieces(turns, tokenizer, row_len)
        got = list(chat.pieces(turns, tokenizer, row_len, notes))
        assert got == expected, (turns, row_len)
        assert (notes[chat.ANSWERS], notes[chat.LOST]) == (total, lost)
        cut += len(got) > 1
    assert cut > 100


def test_rows_on_disk_hold_whole_conversations_and_count_their_answers(chat_data):
    """Every row against the masks made beside the text; a conversation is on one side only."""
    manifest = Manifest.load(chat_data)
    tokenizer = Tokenizer.load(manifest.tokenizer_file())
    known = {}
    for said in read_lines(chat_data.parent / "chats.jsonl"):
        ids, counts = beside(chat.read_turns(said["messages"]), tokenizer)
        known[tuple(ids)] = counts
    found = {"train": Counter(), "val": Counter()}
    for split, pieces in found.items():
        rows = [manifest.row(split, 0, r).tolist() for r in range(manifest.rows(split))]
        for row in rows:
            pieces.update(piece for piece in pieces_of(row) if len(piece) > 1)
            expected = [c for piece in pieces_of(row) for c in known.get(piece, [False])]
            assert counted(row) == expected[1:]
    scored = [row for _, targets, _ in data.val_batches(manifest, 7) for row in targets]
    assert [(row != data.IGNORED).tolist() for row in scored] == [*map(counted, rows)]
    train, val = found.values()
    assert (train + val).total() == 400 and len(val) > 20
    assert {*train, *val} == {*known} and not {*train} & {*val}


def test_conversations_of_the_standard_library():
    """From the code of a file alone: the same each time, and true to it."""
    code = (
        'def add(first, second, *rest):\n    """Return the sum of all numbers."""\n'
        'class Adder:\n    """An object that adds numbers for you all day."""\n'
        '    def add_all(self, numbers):\n        """Add all of these numbers up."""\n'
        'def _hidden(a):\n    """Nobody should know of this one."""\n'
    )
    read = lambda name, code=code: [*stdlib_chats.conversations(f"stdlib/{name}", code.encode())]
    told = [read(f"m{i}.py") for i in range(80)]
    assert told[3] == read("m3.py") and read("test/x.py") == read("x.py", "def f(:") == []
    assert all(len(t) == 2 for t in told)  # not `for you`, nor what is hidden
    said = [chat.read_turns(turns) for conversations in told for turns in conversations]
    answers = {q: a for turns in said for (_, q), (_, a) in zip(turns[-2::-2], turns[::-2])}
    takes = answers["Which arguments does add(first, second, *rest) take?"]
    assert all(name in takes for name in ("first", "second", "*rest"))
    assert "numbers" in answers["What do I pass to add_all(numbers)?"]
    assert answers["What does add do?"] == "Return the sum of all numbers."


def test_a_step_is_the_mean_over_the_answers(base, chat_data, tmp_path, capsys):
    """Losses, norms and validations; in micro-batches of 3 of 8 rows, one place is filled. The mean
    of the micro-batches' means is another number. --init_from takes a run, or its checkpoint."""
    tuned = tmp_path / "tuned"
    here(chat_data, tuned, "--init_from", base / "run", "--save_every", 4)
    newest = checkpoint.latest_valid(base / "run" / "checkpoints")
    here(chat_data, tmp_path / "again", "--init_from", newest, "--micro_batch", 3)
    assert f"weights from {newest}" in capsys.readouterr().out
    assert_same(tuned, tmp_path / "again")
    manifest = Manifest.load(chat_data)
    loader = data.RowLoader(manifest, data.order_of(manifest), 8)
    inputs, targets = loader.next_batch()
    loader.close()
    config = EvalConfig(checkpoint=str(newest), device="cpu", dtype="fp32")
    gpt = eval.load_model(config).model
    gpt.config = replace(gpt.config, doc_mask=True)
    nats = gpt(inputs, targets, reduction="none").detach()
    mean = float(nats.sum() / (targets >= 0).sum())
    assert losses(tuned)[1] == pytest.approx(mean, rel=1e-5)
    means = [float(n.sum() / (t >= 0).sum()) for n, t in zip(nats, targets)]
    assert abs(sum(means) / 8 - mean) > 1e-3
