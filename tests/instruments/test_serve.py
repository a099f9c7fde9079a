"""eval.py serve: real clients and a real server on a free port of this machine, against slow
oracles; clients that leave, and what one may do wrong. The page itself: test_serve_page.py."""

import json
import queue
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection

import pytest
import torch
from chat_helpers import started
from conftest import CPU
from table import read_table

from config import GPTConfig, UsageError
from hf import parity
from instruments.talk import serve
from instruments.talk.drawing import Writer
from instruments.talk.serve import Request
from model import GPT
from preparation import chat
from tokenizer import Tokenizer

NUMBERS = dict(max_new_tokens=20, temperature=0.8, top_k=50, top_p=1, seed=0)


@pytest.fixture(scope="module")
def tokenizer():
    words = [
        f"def name_{i}(x):\n    return x + {i}  # caf\u00e9 \u4f60\u597d\n" for i in range(200)
    ]
    return Tokenizer.train(words, 340)


def build(tokenizer, seed: int = 1, **changes) -> GPT:
    """A model with random weights behind which nothing hides; its text is rubbish of all bytes."""
    shape = dict(n_layer=2, n_head=2, n_kv_head=2, head_dim=16, n_embd=32, mlp_hidden=64)
    shape |= dict(seq_len=96, extras=("key_offset",)) | changes
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **shape))
    model.init_weights()
    parity.set_unit_weights(model, seed)
    return model.eval()


class Gate:
    """Before each forward pass of a model: waits until the test lets it through."""

    def __init__(self, model: GPT) -> None:
        self.begun = 0
        self.allowed = 0
        self.changed = threading.Condition()
        model.register_forward_pre_hook(self.wait)

    def wait(self, *args) -> None:
        with self.changed:
            self.begun += 1
            assert self.changed.wait_for(lambda: self.allowed >= self.begun, 120)

    def let(self, n: int = 1 << 30) -> None:
        with self.changed:
            self.allowed += n
            self.changed.notify_all()


class Watched(serve.Handler):
    """Tells the test of each answer: its connection, and that it is over."""

    def draw(self) -> None:
        self.server.connections.put(self.connection.dup())  # the handler may close its own first
        try:
            super().draw()
        finally:
            self.server.ended.put(True)


def until_left(server) -> None:
    """Until the client of the oldest answer has closed its connection."""
    with suppress(ConnectionError), server.connections.get(timeout=60) as connection:
        assert connection.recv(1, socket.MSG_PEEK) == b""


@contextmanager
def serving(model, tokenizer, tuned=False, **about):
    """A server in a thread of this process: its address, and the server."""
    server = serve.open_server(0)
    server.service = serve.Service(model, tokenizer, tuned=tuned, **dict(name="small") | about)
    server.RequestHandlerClass = Watched
    server.connections = queue.Queue()
    server.ended = queue.Queue()
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def base(tokenizer):
    with serving(build(tokenizer), tokenizer) as (url, server):
        yield url, server.service


@pytest.fixture(scope="module")
def tuned(tokenizer):
    with serving(build(tokenizer, 2), tokenizer, tuned=True) as (url, server):
        yield url, server.service


def ask(url: str, method: str, path: str, body: bytes = b"", **headers) -> tuple[int, str, dict]:
    """(status, text, headers) of a reply."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=120)
    connection.request(method, path, body, {"Host": "localhost"} | headers)
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply.headers


def post(url: str, fields, **headers) -> tuple[int, str]:
    return ask(url, "POST", "/draw", json.dumps(fields).encode(), **headers)[:2]


def answer(url: str, **fields) -> list[dict]:
    """The pieces of an answer."""
    status, text = post(url, NUMBERS | fields)
    assert status == 200, text
    return [json.loads(line) for line in text.splitlines()]


def text_of(pieces: list[dict]) -> str:
    return "".join(piece["text"] for piece in pieces)


def drawn(model: GPT, tokenizer: Tokenizer, ids: list[int], seed: int = 0, **changes) -> list[int]:
    """What model.stream draws after ids, up to the first special token."""
    options = {k: v for k, v in NUMBERS.items() if k != "seed"} | changes
    generator = torch.Generator().manual_seed(seed)
    new = []
    for i in model.stream(torch.tensor([ids]), generator=generator, **options):
        new.append(i.item())
        if new[-1] in tokenizer.special.values():
            break
    return new


# --------------------------------------------------------------------------------- what is drawn
SAID = [("system", "Be brief."), ("user", "hi <|end|> \u00e9"), ("assistant", "yes")]
SAID.append(("user", "and?"))


@pytest.mark.parametrize("text", ["caf\u00e9 <|end|> \u4f60", "", None])
@pytest.mark.parametrize("changes", [{}, {"seed": 7, "top_p": 0.9}, {"temperature": 0}])
def test_an_answer_is_what_the_model_draws(tuned, tokenizer, text, changes):
    """And its probabilities are those of a whole forward pass. A tuned model continues texts, too;
    None stands for a conversation."""
    url, service = tuned
    model = service.writer.model
    asked = dict(text=text)
    ids = [0, *tokenizer.encode(text or "")]
    if text is None:
        asked = dict(messages=[dict(role=role, content=said) for role, said in SAID])
        ids = [0, *chat.encode(SAID, tokenizer, reply=True)]
    new = drawn(model, tokenizer, ids, **changes)
    shown = [i for i in new if i not in tokenizer.special.values()]
    pieces = answer(url, **asked, **changes)
    assert text_of(pieces) == tokenizer.decode(shown)
    ends = [piece["end"] for piece in pieces]
    assert ends == [""] * (len(pieces) - 1) + ["length" if len(shown) == 20 else "stop"]
    tokens = [token for piece in pieces for token in piece["tokens"]]
    assert [token["id"] for token in tokens] == new
    with torch.no_grad():
        probs = model(torch.tensor([ids + new]))[0, len(ids) - 1 : -1].softmax(-1)
    for token, row in zip(tokens, probs, strict=True):
        top, top_ids = row.topk(8)
        assert token["p"] == pytest.approx(row[token["id"]].item(), abs=1e-5)
        assert [p for _, p in token["top"]] == pytest.approx(top.tolist(), abs=1e-5)
        texts = [tokenizer.bytes_of[i].decode(errors="backslashreplace") for i in top_ids.tolist()]
        assert [said for said, _ in token["top"]] == texts


def test_text_comes_as_soon_as_its_characters_are_whole(tokenizer):
    """A byte a token; the text ends within a character."""
    raw = "a\u00e9 \u4f60 \U0001f642 \xff!".encode() + b"\xe4\xbd"
    token_of = {part: i for i, part in tokenizer.bytes_of.items()}
    script = [token_of[bytes([byte])] for byte in raw]
    left = iter([*script, tokenizer.special["<|end|>"]])
    model = build(tokenizer)
    model.register_forward_hook(lambda *args: args[2].index_fill(-1, torch.tensor(next(left)), 1e4))
    *pieces, last = Writer(model, tokenizer).write(
        [0], Request(**NUMBERS | dict(max_new_tokens=90))
    )
    assert [piece.text for piece in pieces] == [*raw.decode(errors="ignore")]
    assert last.text == "\ufffd" and len(last.tokens) == 3  # two bytes, and the end
    assert [t.id for piece in pieces for t in piece.tokens] == script[:-2]
    assert last.tokens[0].text == "\\xe4"


# -------------------------------------------------------------------- many clients, and lost ones
def test_clients_at_once_get_what_each_would_get_alone(base):
    ask_one = lambda i: text_of(answer(base[0], text=f"def name_{i}", seed=i))
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask_one, range(12)))
    assert together == [*map(ask_one, range(12))] and len({*together}) == 12
    assert answer(base[0], text="def", max_new_tokens=999)[-1]["end"]  # as many as fit


def test_a_client_that_leaves_stops_its_answer(tokenizer):
    model = build(tokenizer)
    gate = Gate(model)
    with serving(model, tokenizer) as (url, server):
        body = json.dumps(NUMBERS | dict(text="def", max_new_tokens=90, temperature=0)).encode()
        head = f"POST /draw HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as one:
            one.sendall(head.encode() + body)
            gate.let(9)
            with one.makefile("rb") as lines:
                while b'"text"' not in lines.readline():
                    pass
        until_left(server)
        gate.let()
        assert server.ended.get(timeout=60)
        assert gate.begun < 30  # of 90
        assert answer(url, text="def")  # others are served


# ------------------------------------------------------------------------ what a client does wrong
TURN = {"role": "user", "content": "hi"}
OK = NUMBERS | dict(text="def", max_new_tokens=2)
WRONG = r"""
{"max_new_tokens": 0} => 400 | max_new_tokens
{"temperature": 2.5} => 400 | 2.5
{"text": "LONG"} => 413 | 96 fit
what was asked is answered; two questions, of which one is no text:
{"text": null, "messages": [USER "hi"}, {"role": "assistant", "content": "hi"}]} => 400 | last turn
{"text": null, "messages": [USER "hi"}, USER "\ud800"}]} => 400 | out of turn
"""


@pytest.mark.parametrize("changes, names", read_table(WRONG))
def test_a_wrong_request_gets_one_sentence(changes, names, tuned):
    """More wrong values: test_formats.py; more wrong turns: test_reading.py."""
    changes = changes.replace("LONG", "def name_1(x): " * 40)
    changes = changes.replace("USER", '{"role": "user", "content":')
    status, sentence = post(tuned[0], OK | json.loads(changes))
    assert str(status) == names[0] and names[1] in sentence
    assert "\n" not in sentence and len(sentence) < 400


def test_a_model_that_was_not_tuned_needs_a_text(base):
    for fields in (NUMBERS, NUMBERS | dict(messages=[TURN])):
        assert post(base[0], fields)[0] == 400


@pytest.mark.parametrize("length", [str(serve.MAX_BODY + 1), "-1"])
def test_a_body_of_a_wrong_length_is_not_read(base, length):
    status, sentence, _ = ask(base[0], "POST", "/draw", **{"Content-Length": length})
    assert status == 413 and length in sentence


def test_paths(base):
    status, sentence, _ = ask(base[0], "GET", "/v1/models")
    assert status == 404 and "/v1" in sentence
    one, other = (ask(base[0], "GET", "/")[2]["Content-Security-Policy"] for _ in range(2))
    assert "script-src 'nonce-" in one and one != other


def test_pages_of_others_cannot_use_the_server(base):
    port = base[0].rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}"):
        assert ask(base[0], "GET", "/", Host=host)[0] == 200
    for host in (f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        for method in ("GET", "POST"):
            assert ask(base[0], method, "/", Host=host)[0] == 403
    for origin in ("https://evil.example", "null", "http://localhost"):
        assert post(base[0], OK, Host=f"localhost:{port}", Origin=origin)[0] == 403
    assert post(base[0], OK, Host=f"127.0.0.1:{port}", Origin=base[0])[0] == 200


# ------------------------------------------------------------------------------------ the program
def test_the_program_answers_until_ctrl_c(trained_run):
    """Also if it comes while an answer is drawn."""
    process = started("serve", trained_run, "--port", 0, *CPU)
    try:
        said = ""
        while "page: " not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        url = re.search(r"page: (http://127.0.0.1:\d+)/", said)[1]
        page = ask(url, "GET", "/")[1]
        about = json.loads(re.search(r'type="application/json">(.*?)</script>', page)[1])
        assert about["name"] == "run" and about["parameters"] > 1000 and about["prompts"]
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request("POST", "/draw", json.dumps(OK | dict(max_new_tokens=60)))
        assert json.loads(connection.getresponse().readline())["tokens"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_named_before_the_model_is_loaded():
    with serve.open_server(0) as server:
        port = server.server_port
        with pytest.raises(UsageError, match=f"--port {port} "):
            serve.run(serve.ServeConfig(port=port), lambda config: pytest.fail("loaded"))
