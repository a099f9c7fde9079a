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
from conftest import write_lines

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
    guesses = [sum(rng.randrange(k) == 0 for k in options) for _ in range(2000)]
    assert found["chance"] == pytest.approx(oracle.mean(guesses) / 200, abs=0.005)
    z = (sum(hits) - oracle.mean(guesses)) / oracle.stdev(guesses)
    assert found["z"] == pytest.approx(z, abs=0.15)


def test_of_all_scores_that_are_printed_one_in_twenty_models_at_chance_has_one_that_is_far_off():
    for count in (1, 18):
        one = 2 * oracle.NormalDist().cdf(-choice.limit_of_z(count))
        assert 1 - (1 - one) ** count == pytest.approx(0.05, abs=0.002)


def test_the_verdict_in_words():
    even = [1] * 50 + [2, 3] * 25
    uneven = [1] * 60 + [2] * 40
    for picks, golds, letters, words in (
        ([0] * 97 + [1] * 3, even, True, "a constant answer: nearly always A"),
        ([0] * 97 + [1] * 3, even, False, "below chance"),
        ([1] * 25 + [0] * 75, even, True, "cannot be told from chance"),
        ([1] * 40 + [2, 3] * 30, even, True, "above chance"),
        ([1, 2] * 50, uneven, True, "above chance, but no better than a constant answer"),
    ):
        found = choice.statistics(picks, golds, [4] * 100)
        assert choice.verdict(found, choice.limit_of_z(1), letters) == words


def report(capsys, **measured) -> tuple[list[dict], str]:
    """The records of tasks whose nats are given, and what is printed."""
    return list(choice.report(measured, 0)), capsys.readouterr().out


def test_norms_divide_by_characters(capsys):
    """Neither by bytes, of which é has two, nor with the space in front."""
    question = Question("Which?", ("é", "xxxx"), 1)
    records, _ = report(capsys, task=[(question, [-1.0, -3.9])] * 3)
    assert [(r["norm"], r["hits"]) for r in records] == [("sum", 0), ("per character", 3)]


def test_letters_are_told_from_answers(capsys):
    """Of letters one norm, and the one that is named most."""
    letters = [
        (Question("?", (*"ABC",), 0), [-1, 0, -1]),
        (Question("?", (*"ABCD",), 1), [0, 1, 0, 0]),
    ]
    records, said = report(capsys, letters=letters, same=[(Question("?", (*"ba",), 0), [0, 1])] * 2)
    found = [(r["task"], r["norm"], r["hits"]) for r in records]
    assert found == [("letters", "sum", 1), ("same", "sum", 0), ("same", "per character", 0)]
    assert "a constant answer: nearly always B" in said


def test_a_files_first_items_are_the_examples(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [dict(query=f"{i} + 1 =", choices=[str(i), str(i + 1)], gold=1) for i in range(12)]
    write_lines(path, rows)
    head = "0 + 1 = 1\n\n1 + 1 = 2\n\n"
    found = [q.query for q in choice.read_questions(str(path), 2)]
    assert found == [f"{head}{i} + 1 =" for i in range(2, 12)]
    with pytest.raises(UsageError, match="a standard error"):  # of one question there is none
        choice.read_questions(str(path), 11)


def test_what_is_no_question():
    good = dict(query="a", choices=["b", "c"], gold=0)
    many = [str(i) for i in range(27)]
    assert formats.checked(Question, good, "it").gold == 0
    wrong = [dict(choices=x) for x in (["b"], ["b", "b"], ["b", ""], many)]
    for change in (*wrong, dict(gold=2)):  # wrong types: test_formats.py
        with pytest.raises(DataError):
            formats.checked(Question, good | change, "it")


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
            whole = tokenizer.encode(context + answer)
            assert prefix == [tokenizer.bos_id, *tokenizer.encode(context.rstrip())]
            assert rest == whole[len(prefix) - 1 :] != []
    # "ValueError" is as few tokens as "ValueErr": none is left that is the answer's own
    assert encode_pair(tokenizer, "raise ValueErr", "or")[1] == tokenizer.encode("or")


def test_a_tuned_model_is_asked_as_a_user_asks(tokenizer):
    user, assistant, end = marks(tokenizer)
    question, answer = encode_pair(tokenizer, "1 + 1? ", " two", tuned=True)
    asked = [tokenizer.bos_id, user, *tokenizer.encode("1 + 1?"), end, assistant]
    assert question == asked and answer == tokenizer.encode("two")


def test_each_answer_of_a_question_has_its_own_nats(model, tokenizer):
    untuned = SimpleNamespace(tuned=False)
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer, provenance=untuned)
    asked = [Question("1 + 1 =", ("2", "3", "11"), 0), Question("q", ("a", "b"), 1)]
    for question, nats in choice.score(asked, loaded, 2):
        pairs = [encode_pair(tokenizer, question.query, f" {text}") for text in question.choices]
        assert nats == pytest.approx([x for x, _ in log_likelihoods(model, pairs, 1)], abs=1e-4)


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
