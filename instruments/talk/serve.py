"""A page to try a trained model: `python eval.py serve [MODEL]`.

    GET  /      the page: type, watch it stream, see what else each token might have been
    POST /draw  what the page asks for; the answer is a line of JSON for each piece of text

Only this machine can connect, and of the pages in its browsers only this one. Each request has a
thread; one at a time draws a token. Next: drawing.py draws, serve.html is the page.
"""

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

from config import Size, UsageError
from instruments.talk.drawing import Piece, Writer
from instruments.talk.sample import prompts_of
from machinery.errors import DataError
from machinery.formats import parse
from machinery.output import say
from machinery.trained import EvalConfig
from model import GPT
from preparation import chat
from tokenizer import Tokenizer

PAGE = Path(__file__).with_suffix(".html")
MAX_BODY = 4 << 20  # bytes of a request
POLICY = (
    "default-src 'none'; script-src 'nonce-NONCE'; style-src 'nonce-NONCE'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class ServeConfig(EvalConfig):
    """Serve a page to try a model, on this machine."""

    port: Annotated[int, 0, 65535] = 8049
    """Port to listen on; 0: a free one."""


@dataclass(frozen=True)
class Request:
    """What the page asks for: a text to continue, or the turns of a conversation to answer."""

    max_new_tokens: Size
    temperature: Annotated[float, 0, 2]
    top_k: Annotated[int, 0, 1 << 20]
    top_p: Annotated[float, 1e-6, 1]
    seed: Annotated[int, 0, 1 << 53]
    text: str | None = None
    messages: Any = None


class Service:
    """A model and its page. about: what the page says of the model."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, **about) -> None:
        self.tokenizer = tokenizer
        self.writer = Writer(model, tokenizer)
        self.about = dict(seq_len=model.config.seq_len, vocab=tokenizer.vocab_size, **about)
        self.lock = threading.Lock()  # held while a piece is drawn

    def page(self) -> tuple[str, str]:
        """serve.html, which knows its model; and its policy: it loads nothing from anywhere, no
        other page may frame it, and no script or style runs but those with this nonce."""
        nonce = secrets.token_urlsafe()
        facts = json.dumps(self.about).replace("<", "\\u003c")  # no name ends the script
        text = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce).replace("MODEL", facts)
        return text, POLICY.replace("NONCE", nonce)

    def ids(self, request: Request) -> list[int]:
        """What the model is given, BOS first: a `text`, or the `messages` of a conversation."""
        if request.text is not None:
            return [self.tokenizer.bos_id, *self.tokenizer.encode(request.text)]
        if not self.about["tuned"]:
            raise UsageError("a model that was not tuned needs a text")
        turns = chat.read_turns(request.messages)
        return [self.tokenizer.bos_id, *chat.encode(turns, self.tokenizer, reply=True)]

    def draw(self, ids: list[int], request: Request) -> Iterator[Piece]:
        """The answer, as it is drawn. Between two pieces, other requests have their turn."""
        pieces = self.writer.write(ids, request)
        end = ""
        while not end:
            with self.lock:
                piece = next(pieces)
            end = piece.end
            yield piece


class Handler(BaseHTTPRequestHandler):
    """A request, in a thread of its own. In HTTP/1.0, an answer ends where its connection does."""

    disable_nagle_algorithm = True  # else a token waits until the one before has arrived

    def answer(self) -> None:
        try:
            self.route()
        except (UsageError, DataError) as error:
            self.send(400, str(error))
        except ConnectionError:
            pass  # the client has left

    do_GET = do_POST = answer

    def route(self) -> None:
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", f"http://{host}")
        is_local = host.partition(":")[0] in ("localhost", "127.0.0.1")
        # A page on the web can make the user's browser ask: by another name for this machine (DNS
        # rebinding), or from another origin.
        if not is_local or origin != f"http://{host}":
            self.send(403, f"only http://localhost is served, not {origin!r:.60}")
        elif (self.command, self.path) == ("GET", "/"):
            self.send(200, *self.server.service.page(), kind="text/html")
        elif (self.command, self.path) == ("POST", "/draw"):
            self.draw()
        else:
            self.send(404, f"there is no {self.path!r:.60} here, only a page, / (docs/serve.md)")

    def draw(self) -> None:
        service = self.server.service
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.send(413, f"a request has {MAX_BODY:,} bytes at most, not {length!r:.60}")
            return
        request = parse(self.rfile.read(int(length)), Request, "the request")
        ids = service.ids(request)
        room = service.about["seq_len"]
        if len(ids) >= room:
            self.send(
                413,
                f"the prompt has {len(ids):,} tokens, but {room:,} fit, the answer's included; "
                "shorten it",
            )
            return
        self.send(200, kind="application/x-ndjson")
        for piece in service.draw(ids, request):
            self.wfile.write(json.dumps(asdict(piece)).encode() + b"\n")

    def send(
        self,
        status: int,
        text: str = "",
        policy: str = "default-src 'none'",
        kind: str = "text/plain",
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(text.encode(errors="replace"))

    def log_message(self, *args) -> None:
        """Nothing is printed for a request."""


def open_server(port: int) -> ThreadingHTTPServer:
    """A server that listens to this machine; UsageError if it cannot."""
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UsageError(
            f"cannot listen on --port {port} ({error}); try --port 0, which takes a free one"
        ) from None


def run(config: ServeConfig, load_model: Callable) -> None:
    """`eval.py serve`: load the model, and answer until Ctrl-C."""
    server = open_server(config.port)  # before the model takes its time
    loaded = load_model(config)
    name = loaded.run_dir.name
    tuned = loaded.provenance.tuned
    server.service = Service(
        loaded.model,
        loaded.tokenizer,
        name=name,
        tuned=tuned,
        parameters=sum(p.numel() for p in loaded.model.parameters()),
        tokens=loaded.provenance.tokens,
        prompts=prompts_of(loaded),
    )
    say(f"{name} {'answers' if tuned else 'continues text'}; Ctrl-C ends it")
    say(f"page: http://127.0.0.1:{server.server_port}/", flush=True)
    try:
        server.serve_forever()
    finally:
        server.service.lock.acquire()  # Python cannot end while a thread is inside the model
