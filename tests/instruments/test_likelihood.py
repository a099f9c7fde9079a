"""instruments/exams/likelihood.py and lines.py: log-likelihoods against the logits, one answer at a
time; and the reader of the files that a user names."""

import json
import math

import pytest
import torch

from config import GPTConfig, UsageError
from instruments.exams.likelihood import encode_pair, log_likelihoods
from instruments.exams.lines import has_fields, read_lines
from machinery.errors import DataError, NonFiniteError
from model import GPT
from preparation.chat import marks
from tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(small_data):
    return Tokenizer.load(small_data / "tokenizer.json")


@pytest.fixture(scope="module")
def model(tokenizer):
    """Random, but with logits of size: an untrained one finds all tokens equally likely."""
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_head=2, n_kv_head=1, head_dim=16, n_embd=32, mlp_hidden=64)
    shape |= dict(extras=("key_offset", "value_embeds"))
    config = GPTConfig(seq_len=64, vocab_size=tokenizer.vocab_size, **shape)
    model = GPT(config)
    model.init_weights()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=p.size(-1) ** -0.5)
    return model.eval()


PAIRS = [
    ("Question: 1 + 1?\nAnswer:", [" 2", " 3", " 11"]),
    ("def f(x):\n    ", [" return x", "   pass\n"]),  # its spaces go to the answers
    ("", [" import os", " qqq"]),  # BOS alone
    ("raise ValueErr", [" or", " Exception"]),
    ("O céu é", [" azul", " 日本語", " 🎉"]),
    ("foo, 1234 " * 40, [" bar", " self"]),  # longer than seq_len
]


def test_the_log_likelihood_is_the_sum_over_the_answers_tokens(model, tokenizer, capsys):
    """One answer at a time, from the logits, without padding or batches."""
    pairs = [encode_pair(tokenizer, c, a) for c, answers in PAIRS for a in answers]
    best = model(torch.tensor([[0, 5]])).argmax(-1)[0, -1].item()
    pairs.append(([0, 5], [best]))
    for batch in (1, 100):
        found = log_likelihoods(model, pairs, batch, tell=True)
        greedy = log_likelihoods(model, pairs, batch, greedy=True)
        for (context, answer), (nats, _), (same, hit) in zip(pairs, found, greedy):
            row = torch.tensor([(context + answer)[-65:]])
            logp = model(row[:, :-1]).detach().log_softmax(-1)[0]
            expected = sum(float(logp[-k, row[0, -k]]) for k in range(1, len(answer) + 1))
            assert [nats, same] == pytest.approx([expected] * 2, abs=1e-4)
            likeliest = logp.argmax(-1)[-len(answer) :].tolist()
            assert hit == (likeliest == answer)
        assert "2 of 15 answers" in capsys.readouterr().out  # lost the beginning of their context
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
    broken = lambda ids, targets, reduction: torch.full(ids.shape, math.nan)
    broken.config, broken.cos = model.config, model.cos
    with pytest.raises(NonFiniteError):
        log_likelihoods(broken, [encode_pair(tokenizer, "a", " b")], 1)


# ------------------------------------------------------------------------------- the files


def test_a_line_that_is_none_is_named(tmp_path):
    """Blank ones are passed over, and U+2028 ends no line."""
    path = tmp_path / "a.jsonl"
    good = json.dumps(dict(a="x\u2028y"), ensure_ascii=False).encode()
    path.write_bytes(good + b"\n\n \r\n" + good + b"\r\n" + good)
    is_one = lambda row: has_fields(row, ["a"])
    assert read_lines(path, is_one, "it") == [dict(a="x\u2028y")] * 3
    for bad in (b"{", b"null", b"[1]", b"\xe9", b'{"a": 1}', b"[" * 100_000):
        path.write_bytes(good + b"\n\n" + bad + b"\n")
        with pytest.raises(DataError) as caught:
            read_lines(path, is_one, "it")
        assert f"{path}, line 3 " in str(caught.value)
    path.write_bytes(b"\n \n")
    with pytest.raises(DataError):
        read_lines(path, is_one, "it")
