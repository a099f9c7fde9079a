"""instruments/exams/choice.py, likelihood.py and lines.py: figures against simulation
and slow oracles, questions from a file, log-likelihoods one at a time."""

import json
import math
import random
import statistics as oracle
from types import SimpleNamespace

import pytest
import torch
from chat_helpers import random_model
from conftest import write_json, write_lines

from config import UsageError
from instruments.exams import choice
from instruments.exams.choice import Question
from instruments.exams.likelihood import encode_pair, log_likelihoods
from instruments.exams.lines import read_lines
from machinery import formats
from machinery.errors import DataError, NonFiniteError
from preparation.chat import marks
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(small_data):
    return Tokenizer.load(small_data / "tokenizer.json")


def test_statistics_are_those_of_the_questions():
    rng = random.Random(0)
    options = [rng.choice((2, 3, 4, 5)) for _ in range(200)]
    golds = [rng.randrange(k) for k in options]
    picks = [rng.randrange(k) for k in options]
    found = choice.statistics(picks, golds, options)
    hits = [p == g for p, g in zip(picks, golds)]
    assert found["accuracy"] == oracle.mean(hits)
    assert found["stderr"] == pytest.approx(oracle.stdev(hits) / math.sqrt(200))
    assert found["chance"] == pytest.approx(oracle.mean(1 / k for k in options))
    guesses = [sum(rng.randrange(k) == 0 for k in options) for _ in range(2000)]
    z = (sum(hits) - oracle.mean(guesses)) / oracle.stdev(guesses)
    assert found["z"] == pytest.approx(z, abs=0.15)
    assert found["most_picked_share"] == max(map(picks.count, range(5))) / 200
    assert found["best_constant_accuracy"] == max(map(golds.count, range(5))) / 200


def test_guessing_is_called_chance_however_many_scores_are_printed():
    rng = random.Random(1)
    alarms = 0
    count = 18
    options = [4] * 200
    for _ in range(200):  # each prints 18 scores of a model that knows nothing
        limit = choice.limit_of_z(count)
        words = set()
        for _ in range(count):
            picks, golds = ([rng.randrange(4) for _ in options] for _ in range(2))
            words.add(choice.verdict(choice.statistics(picks, golds, options), limit, True))
        alarms += words != {"cannot be told from chance"}
    assert 1 <= alarms <= 22  # 5% of 200, and its spread
    assert choice.limit_of_z(1) == pytest.approx(1.96, abs=0.001)


def test_the_verdict_in_words():
    even = [1] * 50 + [2, 3] * 25
    uneven = [1] * 60 + [2] * 40
    for picks, golds, letters, words in (
        ([0] * 97 + [1] * 3, even, True, "a constant answer: nearly always A"),
        ([0] * 97 + [1] * 3, even, False, "below chance"),
        ([1] * 40 + [2, 3] * 30, even, True, "above chance"),
        ([1, 2] * 50, uneven, True, "above chance, but no better than a constant answer"),
    ):
        found = choice.statistics(picks, golds, [4] * 100)
        assert choice.verdict(found, choice.limit_of_z(1), letters) == words


def report(capsys, **measured) -> tuple[list[dict], str]:
    """The records of tasks whose nats are given, and what is printed."""
    capsys.readouterr()
    return list(choice.report(measured, 0)), capsys.readouterr().out


def test_norms_divide_by_characters(capsys):
    """Neither by bytes, of which é has two, nor with the space in front."""
    question = Question("Which?", ("é", "xxxx"), 1)
    records, _ = report(capsys, task=[(question, [-1.0, -3.9])] * 3)
    assert [(r["norm"], r["hits"]) for r in records] == [("sum", 0), ("per character", 3)]


def test_letters_are_told_from_answers(capsys):
    """Of letters one norm, and the one that is named most."""
    asked = [
        (Question("?", (*"ABC",), 0), [-1, 0, -1]),
        (Question("?", (*"ABCD",), 1), [0, 1, 0, 0]),
    ]
    records, said = report(capsys, letters=asked, same=[(Question("?", ("a", "b"), 0), [0, 1])] * 2)
    assert [(r["task"], r["norm"]) for r in records] == [
        ("letters", "sum"), ("same", "sum"), ("same", "per character")
    ]  # fmt: skip
    assert records[0]["hits"] == 1 and records[0]["most_picked"] == 1
    assert "a constant answer: nearly always B" in said
    assert records[0]["chance"] == pytest.approx((1 / 3 + 1 / 4) / 2)


def test_a_files_first_items_are_the_examples(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [dict(query=f"{i} + 1 =", choices=[str(i), str(i + 1)], gold=1) for i in range(12)]
    write_lines(path, rows)
    head = "0 + 1 = 1\n\n1 + 1 = 2\n\n"
    found = [q.query for q in choice.read_questions(str(path), 2) if q.gold == 1]
    assert found == [f"{head}{i} + 1 =" for i in range(2, 12)]


def test_what_is_no_question():
    good = dict(query="a", choices=["b", "c"], gold=0)
    many = [str(i) for i in range(27)]
    assert formats.checked(Question, good, "it").gold == 0
    wrong = [dict(choices=x) for x in (["b"], ["b", "b"], ["b", ""], many)]
    for change in (*wrong, dict(gold=2)):  # wrong types: test_formats.py
        with pytest.raises(DataError):
            formats.checked(Question, good | change, "it")


def test_the_command_asks_files(tokenizer, tmp_path, monkeypatch):
    """By a model that knows one token: the likeliest answer is the one with most of it."""
    kept = []
    (known,) = tokenizer.encode(" self")

    def model(ids):
        return torch.eye(tokenizer.vocab_size)[known].expand(*ids.shape, -1)

    model.config = SimpleNamespace(seq_len=64, vocab_size=tokenizer.vocab_size)
    model.cos = torch.zeros(1)
    untuned = SimpleNamespace(tuned=False)
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer, provenance=untuned)
    loaded.append_result = lambda **figures: kept.append(figures)
    path = tmp_path / "own.jsonl"
    row = dict(query="q", choices=["z", "self"], gold=1)
    write_lines(path, [row] * 2)
    answer = lambda path: choice.answer_all(
        choice.ChoiceConfig(task=(str(path),)), lambda _: loaded
    )
    answer(path)
    assert (kept[0]["task"], kept[0]["n"], kept[0]["hits"]) == (str(path), 2, 2)
    write_json(path, row)
    with pytest.raises(UsageError, match="a standard error"):  # of one question there is none
        answer(path)


@pytest.fixture(scope="module")
def model(tokenizer):
    """Random, but with logits of size: an untrained one finds all tokens equally likely."""
    return random_model(vocab_size=tokenizer.vocab_size, n_kv_head=1, doc_mask=False).eval()


PAIRS = [
    ("Question: 1 + 1?\nAnswer:", [" 2", " 3", " 11"]),
    ("def f(x):\n    ", [" return x", "   pass\n"]),  # its spaces go to the answers
    ("", [" import os", " qqq"]),  # BOS alone
    ("raise ValueErr", [" or", " Exception"]),
    ("O céu é", [" azul", " 日本語"]),
    ("foo, 1234 " * 40, [" bar", " self"]),  # longer than seq_len
]


def test_the_log_likelihood_is_the_sum_over_the_answers_tokens(model, tokenizer, capsys):
    """One answer at a time, from the logits, without padding or batches."""
    pairs = [encode_pair(tokenizer, c, a) for c, answers in PAIRS for a in answers]
    best = model(torch.tensor([[0, 5]])).argmax(-1)[0, -1].item()
    pairs.append(([0, 5], [best]))
    for batch in (1, 100):
        found = log_likelihoods(model, pairs, batch)
        for (context, answer), (nats, hit) in zip(pairs, found):
            row = torch.tensor([(context + answer)[-65:]])
            logp = model(row[:, :-1]).detach().log_softmax(-1)[0]
            expected = sum(float(logp[-k, row[0, -k]]) for k in range(1, len(answer) + 1))
            assert nats == pytest.approx(expected, abs=1e-4)
            likeliest = logp.argmax(-1)[-len(answer) :].tolist()
            assert hit == (likeliest == answer)
        assert "2 of 14 answers" in capsys.readouterr().out  # lost the beginning of their context
    with pytest.raises(UsageError):
        log_likelihoods(model, [([0], [5] * 65)], 1)


def test_context_and_answer_are_encoded_as_one_text(tokenizer):
    for context, answers in PAIRS:
        for answer in answers:
            prefix, rest = encode_pair(tokenizer, context, answer)
            assert prefix[0] == tokenizer.bos_id and tokenizer.bos_id not in rest
            assert tokenizer.decode(prefix[1:]) == context.rstrip()
            whole = tokenizer.encode(context + answer)
            assert rest and whole[-len(rest) :] == rest
            assert len(prefix) + len(rest) == 1 + len(whole)
    # a word that grows into one token, so that no token is the answer's own
    begun, whole = (tokenizer.encode(text) for text in ("raise ValueErr", "raise ValueError"))
    assert len(begun) >= len(whole)
    assert encode_pair(tokenizer, "raise ValueErr", "or")[1] == tokenizer.encode("or")


def test_a_tuned_model_is_asked_as_a_user_asks(tokenizer):
    user, assistant, end = marks(tokenizer)
    question, answer = encode_pair(tokenizer, "1 + 1? ", " two", tuned=True)
    asked = [tokenizer.bos_id, user, *tokenizer.encode("1 + 1?"), end, assistant]
    assert question == asked and answer == tokenizer.encode("two")


def test_a_number_that_is_none_ends_the_exam(model, tokenizer):
    broken = lambda ids: torch.full((*ids.shape, tokenizer.vocab_size), math.nan)
    broken.config, broken.cos = model.config, model.cos
    with pytest.raises(NonFiniteError):
        log_likelihoods(broken, [encode_pair(tokenizer, "a", " b")], 1)


def test_a_line_that_is_none_is_named(tmp_path):
    """Blank ones are passed over, and U+2028 ends no line."""
    path = tmp_path / "a.jsonl"
    good = json.dumps(dict(a="x\u2028y"), ensure_ascii=False).encode()
    path.write_bytes(good + b"\n\n \r\n" + good + b"\r\n" + good)
    assert read_lines(path, dict[str, str]) == [dict(a="x\u2028y")] * 3
    for bad in (b"{", b'{"a": 1}'):
        path.write_bytes(good + b"\n\n" + bad + b"\n")
        with pytest.raises(DataError, match=f"{path}, line 3"):
            read_lines(path, dict[str, str])
    path.write_bytes(b"\n \n")
    with pytest.raises(DataError):
        read_lines(path, dict[str, str])
