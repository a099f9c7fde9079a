"""eval.py serve: real clients and a real server on a free loopback port, against slow oracles; what
a client may do wrong; clients that leave; what the page gets is in test_serve_page.py."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

import pytest
from conftest import ROOT, SMALL, command, environment

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

import torch  # noqa: E402

import train  # noqa: E402
from config import GPTConfig, UsageError  # noqa: E402
from hf import parity  # noqa: E402
from instruments import drawing, serve  # noqa: E402
from model import GPT  # noqa: E402
from preparation import chat  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

SEQ_LEN = 96
NAN = float("nan")


@pytest.fixture(scope="module")
def tokenizer():
    words = [
        f"def name_{i}(x):\n    return x + {i}  # caf\u00e9 \u4f60\u597d\n" for i in range(200)
    ]
    return Tokenizer.train(words, 340)


def build(tokenizer, seed: int = 1, **changes) -> GPT:
    """A model with random weights behind which nothing hides; its text is rubbish of all bytes."""
    shape = dict(n_layer=2, n_head=2, n_kv_head=2, head_dim=16, n_embd=32, mlp_hidden=64)
    shape |= dict(seq_len=SEQ_LEN, extras=("key_offset",)) | changes
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **shape))
    model.init_weights()
    parity.set_unit_weights(model, seed)
    return model.eval()


def slow(model: GPT, seconds: float) -> list[float]:
    """Let each forward pass take this long; returns the times at which they began."""
    times = []

    def wait(*args):
        times.append(time.monotonic())
        time.sleep(seconds)

    model.register_forward_pre_hook(wait)
    return times


@contextmanager
def serving(model, tokenizer, tuned=False, token="", **options):
    """A server in a thread of this process: its address without /v1, and the Service."""
    config = serve.ServeConfig(port=0, **options)
    service = serve.Service(model, tokenizer, "small", tuned, config)
    listener = serve.open_socket("127.0.0.1", 0)
    app = serve.build_app(service, token)
    settings = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def base(tokenizer):
    with serving(build(tokenizer), tokenizer) as (url, service):
        yield url, service


@pytest.fixture(scope="module")
def tuned(tokenizer):
    with serving(build(tokenizer, 2), tokenizer, tuned=True) as (url, service):
        yield url, service


@lru_cache
def client(url: str, key: str = "none") -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)


def post(url: str, body, kind: str = "completions", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}/v1/{kind}", content=content, headers=headers, timeout=120)


@torch.no_grad()
def log_probs(model: GPT, ids: list[int]) -> list[float]:
    """The obvious way: log p of each id but the first."""
    table = torch.log_softmax(model(torch.tensor([ids[:-1]]))[0].double(), -1)
    return [table[t, i].item() for t, i in enumerate(ids[1:])]


def greedy(model: GPT, tokenizer: Tokenizer, ids: list[int], count: int) -> list[int]:
    """The likeliest ids after a prompt, by a whole forward pass for each; ends with a special."""
    new = []
    for _ in range(count):
        with torch.no_grad():
            new.append(model(torch.tensor([ids + new]))[0, -1].argmax().item())
        if new[-1] in tokenizer.special.values():
            break
    return new


# --------------------------------------------------------------------------------- what is drawn


def test_text_is_shown_as_soon_as_it_is_whole():
    """Any cut of the bytes gives the text of all of them, up to the first stop, held back no
    longer than it must be."""
    text = "caf\u00e9 \u4f60\u597d STOP \U0001f642 and S and STO \xff"
    raw = text.encode() + b"\xe4\xbd"  # an incomplete character at the end
    for size in (1, 2, 3, 7):
        for stops in ((), ("STOP",), ("\u597d ST", "P"), ("nowhere", "STOX")):
            reader, shown, stopped = drawing.Text(stops), "", False
            for at in range(0, len(raw), size):
                ready, stopped = reader.add(raw[at : at + size])
                shown += ready
                if stopped:
                    break
                if not stops:  # nothing is held back but the bytes of a character
                    whole = raw[: at + size].decode(errors="ignore")
                    assert len(whole) <= len(shown) + 1 and whole.startswith(shown)
            if not stopped:
                ready, stopped = reader.add(b"", final=True)
                shown += ready
            whole = raw.decode(errors="replace")
            ends = [whole.find(stop) for stop in stops if stop in whole]
            assert stopped == bool(ends)
            assert shown == whole[: min(ends, default=None)]


def test_bytes_of_tokens_are_those_that_decode_gives(base, tokenizer):
    raw = base[1].writer.raw
    assert sorted(raw) == list(range(tokenizer.vocab_size))
    for i, content in raw.items():
        assert tokenizer.decode([i]) == content.decode(errors="replace")
        if i not in tokenizer.special.values():
            assert len(content) == tokenizer.token_bytes[i]


@pytest.mark.parametrize("text", ["def name_1(x):", "caf\u00e9 <|end|> \u4f60", ""])
def test_a_completion_is_the_text_of_the_model(base, tokenizer, text):
    """Greedily, and with the log-probabilities of a whole forward pass."""
    url, service = base
    model, ids = service.writer.model, [0, *tokenizer.encode(text)]
    new = greedy(model, tokenizer, ids, 20)
    options = dict(model="small", prompt=text, max_tokens=20, temperature=0)
    reply = client(url).completions.create(**options, logprobs=3, echo=True)
    (choice,) = reply.choices
    shown = [i for i in new if i not in tokenizer.special.values()]
    assert choice.text == text + tokenizer.decode(shown)
    assert choice.finish_reason == ("length" if len(shown) == 20 else "stop")
    assert reply.usage.prompt_tokens == len(ids) and reply.usage.completion_tokens == len(new)
    found = choice.logprobs
    assert found.token_logprobs == pytest.approx(log_probs(model, ids + new), abs=1e-4)
    assert found.text_offset[: len(ids) - 1] == [
        len(tokenizer.decode(ids[1:t]).rstrip("\ufffd")) for t in range(1, len(ids))
    ]
    for token, own, table in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        assert table[token] == own and 3 <= len(table) <= 4
        assert sum(p > own for p in table.values()) <= 3
    assert all(
        t[k] == max(t.values())
        for t, k in zip(found.top_logprobs[-len(new) :], found.tokens[-len(new) :])
    )

    plain = client(url).completions.create(**options)
    assert plain.choices[0].text == tokenizer.decode(shown) and plain.choices[0].logprobs is None
    parts = list(
        client(url).completions.create(
            **options, stream=True, logprobs=0, stream_options={"include_usage": True}
        )
    )
    *parts, last = parts
    assert last.usage == reply.usage and not last.choices
    assert "".join(p.choices[0].text for p in parts) == plain.choices[0].text
    streamed = [x for p in parts for x in p.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx(found.token_logprobs[-len(new) :], abs=1e-5)
    assert [p.choices[0].finish_reason for p in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == choice.finish_reason and len(parts) > 3


def test_log_probabilities_of_a_prompt_alone(base, tokenizer):
    """echo with no new token, and with the one that lm_eval asks for; text, or ids with BOS or
    without; several at once."""
    url, service = base
    texts = ["def name_1(x):\n", "return", "x + \u00e9"]
    bare = [tokenizer.encode(text) for text in texts]
    with_bos = [[0, *ids] for ids in bare]
    expected = [log_probs(service.writer.model, ids) for ids in with_bos]
    for prompts in (texts, bare, with_bos, texts[0], bare[0], with_bos[0]):
        for extra in (0, 1):
            reply = client(url).completions.create(
                model="small",
                prompt=prompts,
                max_tokens=extra,
                echo=True,
                logprobs=1,
                temperature=0,
            )
            given = prompts if isinstance(prompts[0], list) or prompts is texts else [prompts]
            assert [choice.index for choice in reply.choices] == list(range(len(given)))
            for prompt, values, choice, text in zip(given, expected, reply.choices, texts):
                found = choice.logprobs.token_logprobs
                found = found[: len(found) - extra]
                if prompt[0] == 0:  # nothing stands before a BOS that was sent
                    assert found[0] is None and choice.logprobs.top_logprobs[0] is None
                    found = found[1:]
                assert found == pytest.approx(values, abs=1e-4)
                assert extra or choice.text.removeprefix("<|bos|>") == text


def test_seeds_several_answers_and_stops(base, tokenizer):
    url, _ = base
    options = dict(model="small", prompt=["def", "x"], max_tokens=12, n=2)
    one, two = (client(url).completions.create(**options, seed=5).choices for _ in range(2))
    assert [c.text for c in one] == [c.text for c in two] and len({c.text for c in one}) == 4
    other = client(url).completions.create(**options, seed=6).choices
    assert [c.text for c in one] != [c.text for c in other]
    text = one[1].text
    stop = text[len(text) // 2 :][:2]
    again = client(url).completions.create(**options, seed=5, stop=[stop, "\x00 no"]).choices
    assert again[1].text == text[: text.find(stop)] and again[1].finish_reason == "stop"
    narrow = client(url).completions.create(**options, seed=5, extra_body=dict(top_k=1)).choices
    assert narrow[0].text == narrow[1].text and narrow[2].text == narrow[3].text
    tight = client(url).completions.create(**options, seed=9, top_p=1e-6).choices
    assert [c.text for c in tight] == [c.text for c in narrow]


def test_a_conversation_is_answered(tuned, tokenizer):
    url, service = tuned
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi <|end|> \u00e9"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ]
    turns = chat.read_turns(messages)
    ids = [0, *chat.encode(turns, tokenizer, reply=True)]
    assert ids[-1] == tokenizer.special["<|assistant|>"] and ids.count(ids[-1]) == 2
    new = greedy(service.writer.model, tokenizer, ids, 15)
    text = tokenizer.decode(i for i in new if i not in tokenizer.special.values())
    options = dict(model="small", messages=messages, temperature=0)
    reply = client(url).chat.completions.create(
        **options, max_completion_tokens=15, logprobs=True, top_logprobs=2
    )
    message, found = reply.choices[0].message, reply.choices[0].logprobs.content
    assert (message.role, message.content) == ("assistant", text)
    assert [b for t in found for b in t.bytes] == [b for i in new for b in service.writer.raw[i]]
    values = log_probs(service.writer.model, ids + new)[-len(new) :]
    assert [t.logprob for t in found] == pytest.approx(values, abs=1e-4)
    assert all(len(t.top_logprobs) == 2 for t in found)
    assert all(t.top_logprobs[0].logprob == t.logprob for t in found)  # greedy
    parts = list(client(url).chat.completions.create(**options, max_tokens=15, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in parts) == text
    assert [p.choices[0].delta.role for p in parts] == ["assistant"] + [None] * (len(parts) - 1)
    long = client(url).chat.completions.create(**options).choices[0]  # to the end of seq_len
    assert long.message.content.startswith(text.rstrip("\ufffd"))
    assert client(url).completions.create(model="small", prompt="def", max_tokens=2).choices


def test_the_model_is_listed(base, tuned):
    (model,) = client(base[0]).models.list().data
    assert (model.id, model.seq_len, model.tuned) == ("small", SEQ_LEN, False)
    assert client(tuned[0]).models.list().data[0].tuned
    health = httpx.get(f"{base[0]}/health").json()
    assert health == dict(status="ok", active=0, waiting=0)


# -------------------------------------------------------------------- many clients, and lost ones


def load(url: str, **headers) -> dict:
    return httpx.get(f"{url}/health", headers=headers).json()


def idle_within(url: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while (now := load(url))["active"] + now["waiting"] and time.monotonic() < end:
        time.sleep(0.02)
    return not now["active"] + now["waiting"]


def test_fifty_clients_at_once_get_what_each_would_get_alone(base):
    """Half of them stream; drawing is by a seed of each, in whatever order they take turns."""
    url, _ = base

    def ask(i: int) -> str:
        options = dict(model="small", prompt=f"def name_{i}", max_tokens=8, seed=i)
        reply = client(url).completions.create(**options, stream=i % 2 == 1)
        if i % 2:
            return "".join(part.choices[0].text for part in reply)
        return reply.choices[0].text

    with ThreadPoolExecutor(50) as pool:
        together = list(pool.map(ask, range(50)))
    assert together == [ask(i) for i in range(50)] and len(set(together)) == 50
    assert idle_within(url, 1)


def test_short_answers_do_not_wait_for_long_ones(tokenizer):
    model = build(tokenizer)
    slow(model, 0.01)
    with serving(model, tokenizer, active=2) as (url, _):
        options = dict(model="small", prompt="def", temperature=0, logprobs=0)
        stream = client(url).completions.create(**options, max_tokens=80, stream=True)
        times = []
        long = threading.Thread(target=lambda: times.extend(time.monotonic() for _ in stream))
        long.start()
        client(url).completions.create(**options, max_tokens=5)
        short_done = time.monotonic()
        long.join()
        before = sum(t < short_done for t in times)
        assert len(times) > 40 and before < 25  # they took turns


def test_too_many_requests_are_refused_in_a_sentence(tokenizer):
    model = build(tokenizer)
    slow(model, 0.01)
    with serving(model, tokenizer, active=1, waiting=2) as (url, _):
        body = dict(prompt="def", max_tokens=30, temperature=0, stop=["\x00"])
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: post(url, body), range(8)))
        assert sorted(r.status_code for r in replies) == [200] * 3 + [503] * 5
        for reply in replies:
            if reply.status_code == 503:
                sentence = reply.json()["error"]["message"]
                assert sentence == "3 requests are being served; try again later"
        assert post(url, body).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_generation(tokenizer, stream):
    """Whether it is drawn or waits, and whether it streams or not."""
    model = build(tokenizer)
    times = slow(model, 0.05)
    body = json.dumps(dict(prompt="def", max_tokens=90, temperature=0, stream=stream)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with serving(model, tokenizer, active=1, waiting=8) as (url, service):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        sockets = [socket.create_connection(address) for _ in range(3)]
        for one in sockets:
            one.sendall(head.encode() + body)
            time.sleep(0.1)
        assert load(url) == dict(status="ok", active=1, waiting=2)
        sockets[1].close()  # it waits
        time.sleep(0.15)
        assert load(url) == dict(status="ok", active=1, waiting=1)
        sockets[0].close()  # it is being drawn: the last one follows
        time.sleep(0.3)
        assert load(url) == dict(status="ok", active=1, waiting=0)
        sockets[2].close()
        assert idle_within(url, 1)
        count = len(times)
        time.sleep(0.3)
        assert len(times) == count < 40  # of the 270 that they asked for
        assert not service.engine.jobs


def test_a_request_ends_in_time(tokenizer):
    model = build(tokenizer)
    slow(model, 0.05)
    with serving(model, tokenizer, active=1, max_seconds=0.5) as (url, _):
        begin = time.monotonic()
        reply = post(url, dict(prompt="def", max_tokens=90, stop=["\x00"]))
        assert reply.status_code == 503 and time.monotonic() - begin < 2
        assert "not done within 0.5 s (--max_seconds)" in reply.json()["error"]["message"]
        with pytest.raises(openai.APIError, match="not done within"):  # after some text
            list(
                client(url).completions.create(
                    model="small", prompt="def", max_tokens=90, stream=True
                )
            )
        assert idle_within(url, 1)


def test_a_model_that_fails_is_told_apart(tokenizer, capsys):
    """NaN and a bug: one sentence each, and the server goes on; the bug's traceback is printed."""
    model = build(tokenizer)
    with serving(model, tokenizer) as (url, _):
        good = model.embed.weight.detach().clone()
        model.embed.weight.data.fill_(NAN)
        reply = post(url, dict(prompt="def", temperature=0, logprobs=1))
        assert reply.status_code == 500
        assert "logits that are NaN or infinite" in reply.json()["error"]["message"]
        model.embed.weight.data.copy_(good)
        hook = model.register_forward_pre_hook(lambda *args: 1 / 0)
        reply = post(url, dict(prompt="def"))
        assert reply.status_code == 500
        assert "the model failed with ZeroDivisionError" in reply.json()["error"]["message"]
        assert "Traceback" in capsys.readouterr().err
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            list(client(url).completions.create(model="small", prompt="def", stream=True))
        hook.remove()
        assert post(url, dict(prompt="def")).status_code == 200


# ------------------------------------------------------------------------ what a client does wrong

OK = dict(prompt="def", max_tokens=2)
LONG = "def name_1(x): " * 40
DEEP = b"[" * 100_000
WRONG = {  # name -> (body, status, what the sentence says)
    "no JSON": (b'{"prompt', 400, "the body is not JSON: Unterminated string"),
    "nothing": (b"", 400, "the body is not JSON: Expecting value"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, "the body is not JSON: 'utf-8' codec"),
    "nested": (DEEP, 400, "the body is not JSON"),
    "a list": ([1], 400, "the body must be a JSON object; given: [1]"),
    "another model": (OK | dict(model="gpt-4"), 404, "there is no model 'gpt-4' here, only small"),
    "an unknown field": (OK | dict(best=1), 400, "'best' is no field that this server reads"),
    "penalties": (OK | dict(frequency_penalty=0.5), 400, "no frequency_penalty: leave it out; giv"),
    "too long": (dict(prompt=LONG), 400, "tokens, but 96 fit, the answer's included; shorten it"),
    "far too long": (dict(prompt=LONG * 999), 400, "the prompt has at least"),
    "ids too long": (dict(prompt=[5] * 96), 400, "the prompt has 97 tokens, but 96 fit"),
    "no room": (dict(prompt=[5] * 95, max_tokens=1), 400, "the prompt has 96 tokens, but 96 fit"),
    "an odd id": (dict(prompt=[5, 340]), 400, "token ids go from 0 to 339; given: 340"),
    "a negative id": (dict(prompt=[-1]), 400, "token ids go from 0 to 339; given: -1"),
    "a mixed prompt": (dict(prompt=["a", 5]), 400, "a text or a list of token ids; given: 5"),
    "a true prompt": (dict(prompt=True), 400, "a text or a list of token ids; given: True"),
    "too many": (OK | dict(n=128, prompt=["a", "b"]), 400, "1 to 128 answers, prompts times n"),
    "no prompt": (OK | dict(prompt=[[]] * 200), 400, "given: 200 times 1"),
    "hot": (OK | dict(temperature=3), 400, "temperature must be a number from 0 to 2; given: 3"),
    "NaN": (b'{"temperature": NaN}', 400, "temperature must be a number from 0 to 2; given: nan"),
    "words": (OK | dict(max_tokens="2"), 400, "max_tokens must be a whole number from 0 to"),
    "a half": (OK | dict(max_tokens=2.5), 400, "max_tokens must be a whole number from 0 to"),
    "true": (OK | dict(top_k=True), 400, "top_k must be a whole number from 0 to"),
    "top_p 0": (OK | dict(top_p=0), 400, "top_p must be a number from 1e-06 to 1; given: 0"),
    "logprobs": (OK | dict(logprobs=21), 400, "logprobs must be a whole number from 0 to 20"),
    "stream": (OK | dict(stream="yes"), 400, "stream must be true or false; given: 'yes'"),
    "stream options": (OK | dict(stream_options=[]), 400, "stream_options has include_usage alone"),
    "stop": (OK | dict(stop=[1]), 400, "stop must be a text or a list of texts; given: [1]"),
    "stops": (OK | dict(stop=["a"] * 17), 400, "stop takes 16 texts of 256 characters at most"),
    "huge": (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413, "may have 4,194,304 bytes; send"),
    "a surrogate": (b'{"model": "\\ud800"}', 404, "there is no model '\\ud800' here"),
}  # fmt: skip
TURN = {"role": "user", "content": "hi"}
WRONG_CHATS = {
    "no messages": (dict(prompt="x"), "'prompt' is no field that this server reads"),
    "nothing": ({}, "messages must be a list of turns; given: None"),
    "empty": (dict(messages=[]), "messages must be a list of turns; given: []"),
    "a role": (dict(messages=[TURN | dict(role="tool")]), "a role other than system, user and as"),
    "out of turn": (dict(messages=[TURN, TURN]), "roles out of turn"),
    "an image": (dict(messages=[TURN | dict(content=[{"type": "image"}])]), "a part that is not t"),
    "answered": (
        dict(messages=[TURN, TURN | dict(role="assistant")]),
        "last turn of a conversation must be",
    ),
    "too long": (dict(messages=[TURN | dict(content=LONG)]), "tokens, but 96 fit"),
    "many": (dict(messages=[TURN] * 999), "999 messages have 1,998 tokens, but 96 fit"),
    "tools": (dict(messages=[TURN], tools=[{}]), "this server has no tools: leave it out; given"),
    "alternatives": (dict(messages=[TURN], top_logprobs=2), "top_logprobs 2 needs logprobs true"),
}


def refusal(reply) -> str:
    """Its sentence, in OpenAI's form."""
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 400
    return error["message"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_gets_one_sentence(base, name):
    body, status, words = WRONG[name]
    reply = post(base[0], body)
    assert reply.status_code == status, reply.text
    assert words in refusal(reply)


@pytest.mark.parametrize("name", WRONG_CHATS)
def test_a_wrong_conversation_gets_one_sentence(tuned, name):
    body, words = WRONG_CHATS[name]
    reply = post(tuned[0], body, "chat/completions")
    assert reply.status_code == 400 and words in refusal(reply), reply.text


def test_what_fits_exactly_is_served(base):
    for prompt, most in ((dict(prompt=[5] * 94), 9), (dict(prompt=[5] * 95, echo=True), 0)):
        reply = post(base[0], prompt | dict(max_tokens=most, logprobs=0, temperature=0)).json()
        tokens = reply["choices"][0]["logprobs"]["tokens"]
        assert len(tokens) == (1 if most else 95)  # the 96th position is the last


def test_what_clients_send_by_themselves_is_taken(tuned):
    extras = dict(frequency_penalty=0, presence_penalty=0.0, logit_bias={}, user="me", tools=[])
    extras |= dict(seed=None, stop=None, response_format={"type": "text"}, tool_choice="auto")
    reply = post(tuned[0], extras | dict(messages=[TURN], max_tokens=1), "chat/completions")
    assert reply.status_code == 200


def test_a_base_model_refuses_a_conversation(base):
    with pytest.raises(openai.BadRequestError) as caught:
        client(base[0]).chat.completions.create(model="small", messages=[TURN])
    assert "was never tuned for conversations" in str(caught.value)
    assert caught.value.code == "no_chat"


def test_paths_and_methods(base):
    for method, path, status in (
        ("GET", "/docs", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/", 405),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/openapi.json", 404),
        ("PUT", "/v1/models", 405),
    ):
        reply = httpx.request(method, base[0] + path)
        assert reply.status_code == status and "there is no " in refusal(reply)


def test_a_slow_sender_is_let_go(base, monkeypatch):
    monkeypatch.setattr(serve, "READ_S", 0.3)
    address = ("127.0.0.1", int(base[0].rpartition(":")[2]))
    with socket.create_connection(address, timeout=5) as one:
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
        reply = one.recv(10_000)
        assert b" 408 " in reply and b"did not come within 0.3 s" in reply
        while more := one.recv(10_000):  # until the server closes
            reply += more


# ------------------------------------------------------------------------------------ who may ask


def test_a_token(tokenizer):
    token = "a-token-of-20-letters"
    with serving(build(tokenizer), tokenizer, token=token) as (url, _):
        assert client(url, token).completions.create(model="small", prompt="def", max_tokens=1)
        for key, words in (("wrong-token", "the token is wrong"), ("", "the token is missing")):
            for path in ("/v1/completions", "/v1/models", "/health", "/v1/chat/completions"):
                method = "POST" if "completions" in path else "GET"
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                reply = httpx.request(method, url + path, headers=headers)
                assert reply.status_code == 401 and words in refusal(reply)
                assert reply.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError, match="the token is wrong"):
            client(url, "another").models.list()
        odd = httpx.get(f"{url}/health", headers={"Authorization": "Bearer caf\u00e9".encode()})
        assert odd.status_code == 401
        page = httpx.get(url)  # has nothing to hide, and asks for the token
        assert page.status_code == 200 and token not in page.text
        other = {"Authorization": f"Bearer {token}", "Host": "gpu-box:8049"}
        assert load(url, **other)["status"] == "ok"  # by whatever name it is reached


def test_pages_of_others_cannot_use_a_server_without_a_token(base):
    port = base[0].rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:99", "127.3.4.5"):
        assert load(base[0], Host=host)["status"] == "ok"
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1", "0"):
        reply = httpx.get(f"{base[0]}/health", headers={"Host": host})
        assert reply.status_code == 403 and "answers to localhost, not" in refusal(reply)
    for origin in ("https://evil.example", "null", "http://localhost", "http://["):
        reply = post(base[0], OK, Origin=origin)
        assert reply.status_code == 403 and "may not use this server" in refusal(reply)
    assert post(base[0], OK, Origin=base[0]).status_code == 200


# ------------------------------------------------------------------------------------ the program


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("serve") / "runs" / "small"
    train.main(["tiny", *SMALL, "--data_dir", str(small_data), "--run_dir", str(run_dir)])
    return run_dir


@contextmanager
def program(*args):
    """eval.py serve in a process; yields it, and what it printed before it was ready."""
    words = command("eval.py", ["serve", *args, "--device", "cpu", "--dtype", "fp32"])
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), **pipes)
    try:
        said = []
        while line := process.stdout.readline():
            said.append(line)
            if line.startswith("for programs"):
                break
        yield process, "".join(said)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_program(trained):
    with program(trained, "--port", 0) as (process, said):
        url = re.search(r"page: (http://127\.0\.0\.1:\d+)/\n", said)[1]
        assert "small continues text; Ctrl-C ends it" in said and f"programs: {url}/v1\n" in said
        reply = client(url).completions.create(model="small", prompt="def", max_tokens=5)
        assert reply.choices[0].text
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130 and process.stderr.read() == "stopped\n"


def test_other_machines_need_a_token(trained):
    """It is made and printed; and a request that runs does not keep the program from ending."""
    with program(trained, "--port", 0, "--host", "0.0.0.0") as (process, said):
        token = re.search(r"/#token=(\S{20,})\n", said)[1]
        assert f"API key {token}\n" in said
        url = f"http://127.0.0.1:{re.search(r':([0-9]+)/v1', said)[1]}"
        assert httpx.get(f"{url}/health").status_code == 401
        assert client(url, token).models.list().data[0].id == "small"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_mistakes_of_the_command(monkeypatch):
    def refused(words, **options):
        with pytest.raises(UsageError, match=words):
            serve.run(serve.ServeConfig(**options), lambda config: pytest.fail("it was loaded"))

    refused("--token 'short' must have 8 to 200 characters", token="short")
    refused("--token 'with a space' must have", token="with a space")
    refused("--host '' is no address; try 127.0.0.1", host="")
    refused("cannot listen on --host nowhere.invalid --port 0", host="nowhere.invalid", port=0)
    with serve.open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        refused(rf"cannot listen on .*{port} \(Address already in use\); try .*--port 0", port=port)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused("serve needs uvicorn: pip install -r requirements-eval.txt")
    made = {serve.check_token(serve.ServeConfig(host=host)) for host in ("0.0.0.0", "::", "box")}
    assert len(made) == 3 and all(len(token) > 20 for token in made)
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert serve.check_token(serve.ServeConfig(host=host)) == ""


# ------------------------------------------------------------------------------------ what is slow


def resident_mb(process) -> float:
    pages = int(open(f"/proc/{process.pid}/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_memory_stays_flat(trained):
    """Whole answers, streams, clients that leave, wrong requests."""
    with program(trained, "--port", 0) as (process, said):
        url = re.search(r"page: (http://\S+?)/\n", said)[1]
        body = dict(prompt="def", max_tokens=30, logprobs=5, temperature=1)

        def ask(i: int) -> None:
            if i % 4 == 0:
                post(url, body)
            elif i % 4 == 1:
                post(url, body | dict(stream=True))
            elif i % 4 == 2:
                post(url, dict(prompt=LONG * 20))
            else:
                with httpx.stream("POST", f"{url}/v1/completions", json=body | dict(stream=True)):
                    pass

        sizes = []
        with ThreadPoolExecutor(8) as pool:
            for _ in range(6):
                list(pool.map(ask, range(80)))
                assert idle_within(url, 5)
                sizes.append(resident_mb(process))
        print(f"resident memory in MB after each 80 requests: {[round(s, 1) for s in sizes]}")
        assert sizes[-1] - sizes[1] < 8, sizes


TASK = """task: odd
dataset_path: json
dataset_kwargs:
  data_files: {file}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{query}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.mark.slow
def test_lm_eval_gets_the_scores_of_choice(trained, tmp_path):
    """local-completions, with the tokenizer of an export: each answer within 0.001 nats."""
    for name in ("lm_eval", "tenacity", "transformers"):
        pytest.importorskip(name)
    import export

    questions = [
        dict(
            query=f"def note_{i}(x):\n    return",
            choices=["x + 1", f"{i}", "caf\u00e9  ", "not"],
            gold=i % 4,
        )
        for i in range(10)
    ]
    questions += [dict(query="ends in a space ", choices=["a", "<|end|>", "b c"], gold=0)]
    file = tmp_path / "odd.jsonl"
    file.write_text("".join(json.dumps(q) + "\n" for q in questions))
    (tmp_path / "odd.yaml").write_text(TASK.format(file=file))
    export.main([str(trained), "--out", str(tmp_path / "exported")])
    saved = tmp_path / "nats.jsonl"
    args = ["choice", trained, "--task", file, "--save", saved, "--device", "cpu"]
    subprocess.run(command("eval.py", args), cwd=ROOT, env=environment(), check=True)
    ours = [json.loads(line)["nats"] for line in saved.read_text().splitlines()]
    env = environment(HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    env["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    with program(trained, "--port", 0) as (_, said):
        url = re.search(r"for programs: (\S+)", said)[1]
        options = f"model=small,base_url={url}/completions,max_length=64,add_bos_token=True,"
        options += f"tokenizer={tmp_path / 'exported'},num_concurrent=4"
        words = ["--model", "local-completions", "--model_args", options, "--tasks", "odd"]
        words += ["--include_path", tmp_path, "--log_samples", "--output_path", tmp_path / "out"]
        command_line = [sys.executable, "-m", "lm_eval", *map(str, words)]
        done = subprocess.run(command_line, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = tmp_path.rglob("samples_odd_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows.sort(key=lambda row: row["doc_id"])
    theirs = [[float(r[0]) for r in row["filtered_resps"]] for row in rows]
    flat = [(a, b) for x, y in zip(ours, theirs) for a, b in zip(x, y)]
    worst = max(abs(a - b) for a, b in flat)
    print(f"{len(flat)} answers differ by {worst:.1e} nats at most")
    assert len(flat) == 43 and worst < 1e-3
