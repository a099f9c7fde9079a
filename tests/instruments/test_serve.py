"""eval.py serve: real clients and a real server on a free loopback port, against slow oracles; what
a client may do wrong; clients that leave; what the page gets is in test_serve_page.py."""

import asyncio
import importlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache

import conftest
import pytest
import torch
from conftest import ROOT, command, environment

from config import GPTConfig, UsageError
from hf import parity
from machinery.trained import EvalConfig
from model import GPT
from preparation import chat
from tokenizer import Tokenizer

httpx = pytest.importorskip("httpx")
SEQ_LEN = 96


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


class Gate:
    """Before each forward pass of a model: waits until the test lets it through."""

    def __init__(self, model: GPT) -> None:
        self.begun, self.allowed, self.changed = 0, 0, threading.Condition()
        model.register_forward_pre_hook(self.wait)

    def wait(self, *args) -> None:
        with self.changed:
            self.begun += 1
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.allowed >= self.begun, 120)

    def let(self, n: int = 1 << 30) -> None:
        with self.changed:
            self.allowed += n
            self.changed.notify_all()

    def until(self, n: int) -> None:
        """Until n passes have begun."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun >= n, 120)


@contextmanager
def serving(model, tokenizer, tuned=False, token="", **limits):
    """A server in a thread of this process: its address without /v1, and the Service."""
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name)
    from instruments.talk import serve

    before = {name: getattr(serve, name) for name in limits}
    vars(serve).update(limits)
    service = serve.Service(model, tokenizer, "small", tuned)
    listener = serve.open_socket("127.0.0.1", 0)
    server = serve.server_of(serve.build_app(service, token))
    thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        vars(serve).update(before)


@contextmanager
def held(tokenizer, **limits):
    """A server whose model waits at a Gate: its address, and the gate."""
    gate = Gate(model := build(tokenizer))
    with serving(model, tokenizer, **limits) as (url, _):
        try:
            yield url, gate
        finally:
            gate.let()


@pytest.fixture(scope="module")
def base(tokenizer):
    with serving(build(tokenizer), tokenizer) as (url, service):
        yield url, service


@pytest.fixture(scope="module")
def tuned(tokenizer):
    with serving(build(tokenizer, 2), tokenizer, tuned=True) as (url, service):
        yield url, service


@lru_cache
def client(url: str, key: str = "none"):
    import openai

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
def test_text_is_shown_as_soon_as_it_is_whole(tokenizer):
    """A byte a token: the text of all up to the first stop, held back no longer than need be."""
    from instruments.talk.drawing import Text

    token_of = {tokenizer.bytes_of[i]: i for i in range(tokenizer.vocab_size)}
    text = "caf\u00e9 \u4f60\u597d STOP \U0001f642 and S and STO \xff"
    raw = text.encode() + b"\xe4\xbd"  # an incomplete character at the end
    for stops in ((), ("STOP",), ("\u597d ST", "P"), ("nowhere", "STOX")):
        reader, shown = Text(tokenizer, stops), ""
        for at, byte in enumerate(raw, 1):
            shown += reader.add(token_of[bytes([byte])])
            if reader.stopped:
                break
            if not stops:  # nothing is held back but the bytes of a character
                assert shown == raw[:at].decode(errors="ignore")
        shown += "" if reader.stopped else reader.add(None)
        whole = raw.decode(errors="replace")
        ends = [whole.find(stop) for stop in stops if stop in whole]
        assert reader.stopped == bool(ends)
        assert shown == whole[: min(ends, default=None)]


def test_a_tokenizer_with_added_tokens_is_served(tokenizer):
    """As those of SmolLM3 and Qwen: some added tokens are not special, some are in the vocabulary
    as well; none is spelled in the symbols of bytes."""
    tree, size = json.loads(tokenizer.spec), tokenizer.vocab_size
    added = tree["added_tokens"]
    for i, text in enumerate(("<think> \u4f60", "<|im_end|>")):
        added.append(added[0] | dict(id=size + i, content=text, special=i == 1))
        tree["model"]["vocab"][text] = size + i
    other = Tokenizer(json.dumps(tree))
    with serving(build(other), other) as (url, _):
        body = dict(prompt=[5, size, size + 1], max_tokens=1, echo=True, logprobs=20)
        (choice,) = post(url, body).json()["choices"]
        assert choice["text"].startswith(other.decode([5]) + "<think> \u4f60<|im_end|>")
        assert choice["logprobs"]["tokens"][1:3] == ["<think> \u4f60", "<|im_end|>"]


@pytest.mark.parametrize("text", ["caf\u00e9 <|end|> \u4f60", ""])
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
    for token, own, table in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        assert table[token] == own and 3 <= len(table) <= 4
        assert sum(p > own for p in table.values()) <= 3
    plain = client(url).completions.create(**options)
    assert plain.choices[0].text == tokenizer.decode(shown) and plain.choices[0].logprobs is None
    more = dict(stream=True, logprobs=0, stream_options={"include_usage": True})
    *parts, last = client(url).completions.create(**options, **more)
    assert last.usage == reply.usage and not last.choices
    assert "".join(p.choices[0].text for p in parts) == plain.choices[0].text
    streamed = [x for p in parts for x in p.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx(found.token_logprobs[-len(new) :], abs=1e-5)
    assert [p.choices[0].finish_reason for p in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == choice.finish_reason and len(parts) > 3


def test_log_probabilities_of_a_prompt(base, tokenizer):
    """With the one new token that lm_eval asks for; text, or ids with BOS or without; several."""
    url, service = base
    texts = ["def name_1(x):\n", "return", "x + \u00e9"]
    bare = [tokenizer.encode(text) for text in texts]
    with_bos = [[0, *ids] for ids in bare]
    expected = [log_probs(service.writer.model, ids) for ids in with_bos]
    options = dict(model="small", max_tokens=1, echo=True, logprobs=1, temperature=0)
    for prompts in (texts, bare, with_bos, texts[0], bare[0], with_bos[0]):
        reply = client(url).completions.create(prompt=prompts, **options)
        given = prompts if isinstance(prompts[0], list) or prompts is texts else [prompts]
        assert [choice.index for choice in reply.choices] == list(range(len(given)))
        for prompt, values, choice, text in zip(given, expected, reply.choices, texts):
            found = choice.logprobs.token_logprobs[:-1]
            if prompt[0] == 0:  # nothing stands before a BOS that was sent
                assert found[0] is None and choice.logprobs.top_logprobs[0] is None
                found = found[1:]
            assert found == pytest.approx(values, abs=1e-4)
            assert choice.text.startswith("<|bos|>" * (prompt[0] == 0) + text)


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
    assert [b for t in found for b in t.bytes] == [*b"".join(tokenizer.bytes_of[i] for i in new)]
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


# -------------------------------------------------------------------- many clients, and lost ones
def load(url: str, **headers) -> dict:
    return httpx.get(f"{url}/health", headers=headers).json()


def until(url: str, active: int = 0, waiting: int = 0) -> None:
    """Until so many requests are running, and so many wait."""
    conftest.until(lambda: load(url) == dict(status="ok", active=active, waiting=waiting))


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
    until(url, 0, 0)


def test_short_answers_do_not_wait_for_long_ones(tokenizer):
    with held(tokenizer, ACTIVE=2) as (url, gate), ThreadPoolExecutor(2) as pool:
        body = dict(prompt="def", temperature=0, stop=["\x00"])
        long = pool.submit(post, url, body | dict(max_tokens=90))
        gate.until(1)
        short = pool.submit(post, url, body | dict(max_tokens=5))
        until(url, active=2)
        gate.let(5 + 8)  # of the short one, and of the long one meanwhile
        assert short.result(60).status_code == 200 and not long.done()
        gate.let()


def test_too_many_requests_are_refused(tokenizer):
    with held(tokenizer, ACTIVE=1, WAITING=2) as (url, gate), ThreadPoolExecutor(3) as pool:
        body = dict(prompt="def", max_tokens=9, temperature=0)
        served = [pool.submit(post, url, body) for _ in range(3)]
        until(url, active=1, waiting=2)
        for stream in (False, True):
            reply = post(url, body | dict(stream=stream))
            assert reply.status_code == 503 and "3 requests" in refusal(reply)
        gate.let()
        assert [reply.result(60).status_code for reply in served] == [200] * 3
        assert post(url, body).status_code == 200


def raw_request(body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


def connect(url: str, content: bytes = b"") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30)
    one.sendall(content)
    return one


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_generation(tokenizer, stream):
    """Whether it is drawn or waits, and whether it streams or not."""
    gate = Gate(model := build(tokenizer))
    request = raw_request(dict(prompt="def", max_tokens=90, temperature=0, stream=stream))
    with serving(model, tokenizer, ACTIVE=1) as (url, service):
        sockets = []
        for i in range(3):
            sockets.append(connect(url, request))
            until(url, active=1, waiting=i)
        gate.let(3)
        gate.until(4)
        sockets[1].close()  # it waits
        until(url, active=1, waiting=1)
        sockets[0].close()  # it is being drawn: the last one follows
        until(url, active=1, waiting=0)
        sockets[2].close()
        until(url)
        gate.let()
        service.drawing.submit(int).result(60)  # the thread has done all that it was asked
        assert gate.begun <= 5  # of the 270 that they asked for


def test_a_request_ends_in_time(tokenizer):
    """Before anything was drawn it has a status; after that the stream says why."""
    from instruments.talk import serve

    with held(tokenizer, ACTIVE=1, MAX_SECONDS=0.2) as (url, gate):
        body = dict(prompt="def", max_tokens=90, temperature=0, stop=["\x00"])
        for stream in (False, True):
            reply = post(url, body | dict(stream=stream))
            assert reply.status_code == 503 and "0.2 s" in refusal(reply)
        gate.let(2 + 9)
        serve.MAX_SECONDS = 3.0  # enough for nine passes, of which each takes a millisecond
        reply = post(url, body | dict(stream=True))
        *parts, error, done, _ = reply.text.split("\n\n")
        assert reply.status_code == 200 and parts and done == "data: [DONE]"
        assert "3 s" in json.loads(error.removeprefix("data: "))["error"]["message"]
        until(url)


def test_a_model_that_fails_is_told_apart(tokenizer, capsys):
    """NaN and a bug: one sentence each, and the server goes on; the traceback is printed."""
    with serving(model := build(tokenizer), tokenizer) as (url, _):
        hook = model.register_forward_pre_hook(lambda *args: 1 / 0)
        for stream in (False, True):
            reply = post(url, dict(prompt="def", stream=stream))
            assert reply.status_code == 500 and "ZeroDivisionError" in refusal(reply)
        assert "Traceback" in capsys.readouterr().err
        hook.remove()
        assert post(url, dict(prompt="def")).status_code == 200
        model.embed.weight.data.fill_(float("nan"))
        reply = post(url, dict(prompt="def", temperature=0, logprobs=1))
        assert reply.status_code == 500 and "NonFiniteError" in refusal(reply)


# ------------------------------------------------------------------------ what a client does wrong
OK = dict(prompt="def", max_tokens=2)
LONG = "def name_1(x): " * 40
MANY = b"{" + b",".join(b'"a%d":0' % i for i in range(300_000)) + b"}"
WRONG = {  # name -> (body, status, the value that is named)
    "no JSON": (b'{"prompt', 400, "JSON"),
    "nested": (b"[" * 100_000, 400, "JSON"),
    "another model": (OK | dict(model="gpt-4"), 404, "'gpt-4'"),
    "a surrogate": (b'{"model": "\\ud800"}', 404, "ud800"),
    "an unknown field": (OK | dict(best=1), 400, "'best'"),
    "many fields": (MANY, 400, "'a0'"),
    "penalties": (OK | dict(frequency_penalty=0.5), 400, "frequency_penalty 0.5"),
    "far too long": (dict(prompt=LONG * 999), 400, "96"),
    "ids too long": (dict(prompt=[5] * 95), 400, "96 tokens"),
    "an odd id": (dict(prompt=[5, 340]), 400, "340"),
    "a mixed prompt": (dict(prompt=["a", 5]), 400, "['a', 5]"),
    "too many": (OK | dict(n=128, prompt=["a", "b"]), 400, "2 times 128"),
    "many prompts": (OK | dict(prompt=[[]] * 200), 400, "prompt"),
    "no answer": (OK | dict(max_tokens=0), 400, "max_tokens"),
    "NaN": (b'{"temperature": NaN}', 400, "nan"),
    "true": (OK | dict(top_k=True), 400, "True"),
    "a seed": (OK | dict(seed=1 << 64), 400, "18446744073709551616"),
    "an option": (OK | dict(stream_options=dict(x=1)), 400, "'x'"),
    "stops": (OK | dict(stop=["a"] * 17), 400, "16"),
    "huge": (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413, "4,194,304"),
}  # fmt: skip
TURN = {"role": "user", "content": "hi"}
WRONG_CHATS = {
    "nothing": ({}, 400, "messages"),
    "no turns": (dict(messages=[1]), 400, "[1]"),
    "out of turn": (dict(messages=[TURN, TURN]), 400, "out of turn"),
    "an image": (dict(messages=[TURN | dict(content=[{"type": "image"}])]), 400, "image"),
    "answered": (dict(messages=[TURN, TURN | dict(role="assistant")]), 400, "last turn"),
    "too long": (dict(messages=[TURN | dict(content=LONG)]), 400, "96"),
    "many": (dict(messages=[TURN, TURN | dict(role="assistant")] * 999 + [TURN]), 400, "96"),
    "alternatives": (dict(messages=[TURN], top_logprobs=2), 400, "top_logprobs 2"),
}


def refusal(reply) -> str:
    """Its sentence, in OpenAI's form."""
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 400
    return error["message"]


@pytest.mark.parametrize("name", [*WRONG, *WRONG_CHATS])
def test_a_wrong_request_gets_one_sentence(base, tuned, name):
    body, status, value = WRONG[name] if name in WRONG else WRONG_CHATS[name]
    reply = post(base[0], body) if name in WRONG else post(tuned[0], body, "chat/completions")
    assert reply.status_code == status and value in refusal(reply), reply.text


def test_what_clients_send_by_themselves_is_taken(tuned):
    extras = dict(frequency_penalty=0, presence_penalty=0.0, logit_bias={}, user="me", tools=[])
    extras |= dict(seed=None, stop=None, response_format={"type": "text"}, tool_choice="auto")
    reply = post(tuned[0], extras | dict(messages=[TURN], max_tokens=1), "chat/completions")
    assert reply.status_code == 200


def test_paths_and_methods(base, tuned):
    paths = {"/v1/completions": 405, "/../etc/passwd": 404, "/openapi.json": 404}
    for path, status in paths.items():
        reply = httpx.get(base[0] + path)
        assert reply.status_code == status and "GET" in refusal(reply)
    reply = post(base[0], dict(messages=[TURN]), "chat/completions")  # of a model of text
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "no_chat"
    for (url, _), is_tuned in ((base, False), (tuned, True)):
        (model,) = client(url).models.list().data
        assert (model.id, model.seq_len, model.tuned) == ("small", SEQ_LEN, is_tuned)


# --------------------------------------------------------------------------- hostile clients
@pytest.mark.parametrize("part", ['"",', "[],", "1,"])
def test_four_megabytes_of_little_prompts_are_refused_unread(base, part, monkeypatch):
    """None of them is encoded."""
    url, service = base
    seen = []
    monkeypatch.setattr(service.tokenizer, "encode", seen.append)
    body = '{"prompt": [' + part * (4_000_000 // len(part)) + part[:-1] + "]}"
    assert post(url, body.encode()).status_code == 400 and not seen


BEGINNINGS = {
    "nothing": b"",
    "a head": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ",
    "a body": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{",
    "a second head": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_slow_sender_is_let_go(base, name, monkeypatch):
    """Also one that goes on, a byte at a time, which keeps uvicorn's own timer from ringing."""
    from instruments.talk import serve

    monkeypatch.setattr(serve, "READ_S", 0.4)
    reply = b""

    def is_let_go() -> bool:
        nonlocal reply
        with suppress(OSError):  # what it has been told is read, although it may send no more
            one.sendall(b"x" if name != "nothing" else b"")
        try:
            more = one.recv(10_000)
        except TimeoutError:
            return False
        except OSError:
            return True
        reply += more
        return not more

    with connect(base[0], BEGINNINGS[name]) as one:
        one.settimeout(0.02)
        conftest.until(is_let_go)
    assert (b" 408 " in reply) == (name == "a body")


def test_a_client_that_takes_no_answer_is_let_go(tokenizer, monkeypatch):
    from instruments.talk import serve

    monkeypatch.setattr(serve, "TAKE_S", 0.01)
    service = serve.Service(build(tokenizer), tokenizer, "small", False)
    body = json.dumps(OK | dict(stream=True)).encode()
    answer = serve.Answer(service, *service.reader.read(body, serve.Completion))
    never = lambda *message: asyncio.Event().wait()  # nor does it leave
    asyncio.run(asyncio.wait_for(answer({}, never, never), 30))
    assert service.inside == 0


# ------------------------------------------------------------------------------------ who may ask
def test_a_token(tokenizer):
    token = "a-token-of-20-letters"
    with serving(build(tokenizer), tokenizer, token=token) as (url, _):
        assert client(url, token).completions.create(model="small", prompt="def", max_tokens=1)
        for path in ("completions", "models", "chat/completions"):
            for key in ("Bearer wrong-token", "Bearer caf\u00e9", ""):
                method = "GET" if path == "models" else "POST"
                headers = {"Authorization": key.encode()} if key else {}
                reply = httpx.request(method, f"{url}/v1/{path}", headers=headers)
                assert reply.status_code == 401 and refusal(reply)
        page = httpx.get(url)  # has nothing to hide, and asks for the token
        assert page.status_code == 200 and token not in page.text
        other = {"Authorization": f"Bearer {token}", "Host": "gpu-box:8049"}
        assert load(url, **other)["status"] == "ok"  # by whatever name it is reached


def test_pages_of_others_cannot_use_a_server_without_a_token(base):
    port = base[0].rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}"):
        assert load(base[0], Host=host)["status"] == "ok"
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1", "0"):
        reply = httpx.get(f"{base[0]}/health", headers={"Host": host})
        assert reply.status_code == 403 and host in refusal(reply)
    for origin in ("https://evil.example", "null", "http://localhost", "http://["):
        reply = post(base[0], OK, Origin=origin)
        assert reply.status_code == 403 and origin in refusal(reply)
    assert post(base[0], OK, Origin=base[0]).status_code == 200


# ------------------------------------------------------------------------------------ the program
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


@pytest.mark.parametrize("host, sent, code", [
    ("127.0.0.1", signal.SIGINT, 130), ("0.0.0.0", signal.SIGTERM, -signal.SIGTERM)
])  # fmt: skip
def test_the_program(trained_run, host, sent, code):
    """For other machines a token is made and printed."""
    with program(trained_run, "--port", 0, "--host", host) as (process, said):
        url = f"http://127.0.0.1:{re.search(r':([0-9]+)/v1', said)[1]}"
        key = re.search(r"API key (\S{20,})\n", said)
        assert (httpx.get(f"{url}/health").status_code == 401) == bool(key) == (host == "0.0.0.0")
        assert ("/#token=" in said) == bool(key)
        reply = client(url, key[1] if key else "none").completions.create(
            model="run", prompt="def", max_tokens=5
        )
        assert reply.choices[0].text
        process.send_signal(sent)
        assert process.wait(60) == code and "Traceback" not in process.stderr.read()


def test_mistakes_of_the_command(monkeypatch):
    from instruments.talk import serve

    with serve.open_socket("127.0.0.1", 0) as listener:
        taken = listener.getsockname()[1]
        for options in (dict(host="nowhere.invalid", port=0), dict(port=taken)):
            with pytest.raises(UsageError) as caught:
                serve.run(serve.ServeConfig(**options), lambda config: pytest.fail("loaded"))
            assert all(str(value) in str(caught.value) for value in options.values())
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "instruments.talk.serve")
    with pytest.raises(UsageError):
        importlib.import_module("instruments.talk.serve")


@pytest.mark.slow
def test_lm_eval_gets_the_log_likelihoods_of_the_model(own_run, tmp_path):
    """local-completions, with the tokenizer of an export, as docs/serve.md has it."""
    for name in ("lm_eval", "tenacity", "transformers"):
        pytest.importorskip(name)
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    import eval
    import export

    export.main([str(own_run), "--out", str(tmp_path / "exported")])
    model, _ = eval.load_model(EvalConfig(str(own_run), device="cpu", dtype="fp32"))
    tokenizer = Tokenizer.load(own_run / "tokenizer.json")
    pairs = [
        ("def note_7(x):\n    return", answer) for answer in (" x + 1", " caf\u00e9  ", " not")
    ]
    pairs += [("ends in a word", answer) for answer in (" a", "<|end|>", " b c")]
    with serving(model, tokenizer) as (url, _):
        how = dict(tokenizer=str(tmp_path / "exported"), max_length=64, add_bos_token=True)
        lm = LocalCompletionsAPI(model="small", base_url=f"{url}/v1/completions", **how)
        found = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    for (context, answer), (nats, _) in zip(pairs, found, strict=True):
        ids, begin = tokenizer.encode(context + answer), len(tokenizer.encode(context))
        assert nats == pytest.approx(sum(log_probs(model, [0, *ids])[begin:]), abs=1e-3)
