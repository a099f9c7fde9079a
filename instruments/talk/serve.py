"""A trained model behind HTTP: `python eval.py serve [MODEL]`, a page and OpenAI's protocol.

    GET  /                     a page: type, watch it stream, see each token's alternatives
    GET  /v1/models            the model, its seq_len, and whether it was tuned for conversations
    POST /v1/completions       continues text or token ids; echo and logprobs as lm_eval needs them
    POST /v1/chat/completions  answers a conversation, if the model was tuned for it
    GET  /health               how many requests are running, and how many wait

One thread runs the model; requests take turns, a token each, so that a short answer does not wait
for a long one. Connections, requests, sizes and times are bounded. Only this machine can connect,
unless --host says otherwise: then a token is needed. Next: protocol.py has requests and responses,
drawing.py draws them, serve.html is the page.
"""

import asyncio
import json
import secrets
import socket
import time
import traceback
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from config import UsageError, install
from machinery.output import printable, say
from machinery.trained import EvalConfig, is_tuned, open_tokenizer, run_of
from model import GPT
from tokenizer import Tokenizer

try:
    import uvicorn
    from fastapi import Depends, FastAPI, Request, Response
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    how = install("requirements-eval.txt")
    raise UsageError(f"serve needs {error.name}: {how}") from None

from instruments.talk.drawing import Piece, Wish, Writer
from instruments.talk.protocol import Asked, Completion, Conversation, Form, Reader, Refused, short
from instruments.talk.sample import prompts_of

PAGE = Path(__file__).with_suffix(".html")
ACTIVE = 4  # requests that take turns, a token each; every one has a cache of keys and values
WAITING = 64  # requests that may wait for their turn
MAX_SECONDS = 300.0  # for a request, its waiting included
MAX_BODY = 4 << 20  # bytes of a request
MAX_CONNECTIONS = 256  # beyond it, uvicorn answers 503
READ_S = 10.0  # for a client to send the head of a request, and again for its body
TAKE_S = 5.0  # for a client to take what waits for it, before the next part of its answer
LOCAL = ("localhost", "127.0.0.1")  # what only programs on this machine can reach
DONE = "data: [DONE]\n\n"  # the end of a stream


@dataclass(frozen=True)
class ServeConfig(EvalConfig):
    """Serve a model: a page to try it, and OpenAI's protocol for programs."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but 127.0.0.1 and localhost needs a token: that of --token, or one
    that is made and printed."""
    port: Annotated[int, 0, 65535] = 8049
    """Port to listen on; 0: a free one."""
    token: str = ""
    """What a client must send as its API key; empty: nothing, from this machine."""


# ---------------------------------------------------------------------------------- who may ask


def check_caller(request: Request, token: str) -> None:
    """Refused unless the client may ask. Without a token, a page on the web could make the user's
    browser ask: by another name for this machine (DNS rebinding), or from another origin."""
    if token:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(sent.encode(), token.encode()):
            why = "the token is wrong or missing: send, as API key, the one that the server printed"
            raise Refused(401, why)
        return
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if host.partition(":")[0] not in LOCAL:
        raise Refused(403, f"without a --token this server is localhost, not {short(host)}")
    if origin is not None and origin.partition("://")[2] != host:
        raise Refused(403, f"pages of {short(origin)} may not use this server")


# --------------------------------------------------------------------- requests and their bounds


class Connection(H11Protocol):
    """Closes if the head of a request does not come within READ_S. (uvicorn's own timer begins
    after an answer, and any byte stops it.)"""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.expect_head()

    def on_response_complete(self) -> None:
        self.expect_head()
        super().on_response_complete()

    def expect_head(self) -> None:
        before = self.cycle  # a request makes a new one
        self.loop.call_later(READ_S, lambda: self.cycle is before and self.transport.abort())


async def read_body(request: Request) -> bytes:
    """The body of a request. Refused if it is too long or too slow."""
    body = bytearray()

    async def read() -> None:
        async for part in request.stream():
            body.extend(part)
            if len(body) > MAX_BODY:
                raise Refused(413, f"a request may have {MAX_BODY:,} bytes; send less")

    try:
        await asyncio.wait_for(read(), READ_S)
    except asyncio.TimeoutError:
        raise Refused(408, f"the request did not come within {READ_S:g} s") from None
    except ClientDisconnect:
        raise Refused(499, "the client has left") from None
    return bytes(body)


async def while_wanted(work: Coroutine, receive: Callable) -> None:
    """Do `work`, which is cancelled when its client leaves, or the time is up."""
    # The body has been read, so that the next message to receive is the end of the connection.
    tasks = drawn, left = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait(tasks, timeout=MAX_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if drawn.done():
            return drawn.result()
        if left.done():
            raise Refused(499, "the client has left")
        raise Refused(503, f"the request was not done in {MAX_SECONDS:g} s; ask for less, or later")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------------------------- the server


class Service:
    """One model, and what its clients get."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, name: str, tuned: bool) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.about = dict(id=name, object="model", created=int(time.time()), owned_by="nano2049")
        self.about |= dict(seq_len=model.config.seq_len, tuned=tuned)
        self.reader = Reader(tokenizer, model.config.seq_len, name, tuned)
        self.writer = Writer(model, tokenizer)
        self.inside, self.turns = 0, asyncio.Semaphore(ACTIVE)
        # A thread each, which runs its tasks in the order they come.
        self.reading, self.drawing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    async def answer(self, request: Request, kind: type[Asked]) -> Response:
        """The response to a request for text."""
        body, loop = await read_body(request), asyncio.get_running_loop()
        return Answer(self, *await loop.run_in_executor(self.reading, self.reader.read, body, kind))

    async def pieces(self, wish: Wish) -> AsyncIterator[Piece]:
        """What is drawn, as it comes. Up to ACTIVE requests take turns, a token each."""
        loop, steps, end = asyncio.get_running_loop(), self.writer.write(wish), object()
        step = lambda: loop.run_in_executor(self.drawing, next, steps, end)
        async with self.turns:
            try:
                while (piece := await step()) is not end:
                    if piece is not None:
                        yield piece
            except Exception as error:
                traceback.print_exception(error)
                why = f"{type(error).__name__}; the server's terminal has the traceback"
                raise Refused(500, f"the model failed with {why}") from None


class Answer(Response):
    """A response that is drawn while it is sent: whole, or as a stream of server-sent events."""

    def __init__(self, service: Service, asked: Asked, wish: Wish) -> None:
        super().__init__()
        if service.inside >= ACTIVE + WAITING:
            raise Refused(503, f"{service.inside} requests are being served; try again later")
        service.inside += 1
        self.service, self.asked, self.wish, self.began = service, asked, wish, False
        is_chat, logprobs = isinstance(asked, Conversation), wish.logprobs is not None
        self.form = Form(is_chat, service.name, service.tokenizer, logprobs)

    async def __call__(self, scope, receive, send) -> None:
        kind = b"text/event-stream" if self.asked.stream else b"application/json"
        headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
        give = lambda message: asyncio.wait_for(send(message), TAKE_S)

        async def part(text: str, more: bool = True) -> None:
            if not self.began:
                self.began = True
                await give(dict(type="http.response.start", status=200, headers=headers))
            await give(dict(type="http.response.body", body=text.encode(), more_body=more))

        try:
            with suppress(asyncio.TimeoutError):  # the client does not take what it is sent
                await while_wanted(self.draw(part), receive)
        except Refused as refusal:
            if not self.began:  # it still gets its status
                raise
            with suppress(asyncio.TimeoutError):
                await part(as_event(refusal.tree()) + DONE, False)
        finally:
            self.service.inside -= 1

    async def draw(self, part: Callable) -> None:
        found, asked, form = [], self.asked, self.form
        async with aclosing(self.service.pieces(self.wish)) as pieces:
            async for piece in pieces:
                if asked.stream:
                    await part(as_event(form.chunk([piece])))
                    piece = piece._replace(text="", tokens=[])
                found.append(piece)
        given, new = sum(map(len, self.wish.prompts)), sum(piece.n_new for piece in found)
        usage = dict(prompt_tokens=given, completion_tokens=new, total_tokens=given + new)
        if not asked.stream:
            return await part(json.dumps(form.whole(found, usage)), False)
        counts = asked.stream_options.include_usage
        await part(counts * as_event(form.chunk([], usage=usage)) + DONE, False)


def as_event(tree: dict) -> str:
    return f"data: {json.dumps(tree)}\n\n"


def as_json(tree: dict, status: int = 200, **headers) -> Response:
    return Response(json.dumps(tree), status, headers, "application/json")


def read_page() -> Response:
    """serve.html. It loads nothing from anywhere, no other page may frame it, and only the script
    and the style that are in the file run."""
    text = PAGE.read_text(encoding="utf-8")

    def only(tag: str) -> str:
        inside = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        return f"{tag}-src 'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'; "

    rules = f"default-src 'none'; {only('script')}{only('style')}connect-src 'self'; "
    rules += "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    headers = {"Content-Security-Policy": rules, "Cache-Control": "no-store"}
    headers |= {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
    return Response(text, headers=headers, media_type="text/html")


def build_app(service: Service, token: str) -> FastAPI:
    """The routes."""

    async def caller(request: Request) -> None:
        check_caller(request, token)

    rest = dict.fromkeys(("docs_url", "redoc_url", "openapi_url"))  # their pages load scripts
    app = FastAPI(dependencies=[Depends(caller)], **rest)
    page = read_page()

    async def index(request: Request) -> Response:
        return page

    app.router.add_route("/", index, ["GET"])  # for anybody: the page asks for the token

    @app.exception_handler(Refused)
    async def refuse(request: Request, refusal: Refused) -> Response:
        close = {"Connection": "close"} if refusal.status in (408, 413) else {}
        return as_json(refusal.tree(), refusal.status, **close)

    @app.exception_handler(HTTPException)
    async def not_here(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {short(request.url.path)} here; docs/serve.md lists the paths"
        return as_json(Refused(404, f"there is no {where}").tree(), error.status_code)

    @app.get("/v1/models")
    async def models() -> Response:
        return as_json({"object": "list", "data": [service.about]})

    @app.get("/health")
    async def health() -> Response:
        active = min(service.inside, ACTIVE)
        return as_json(dict(status="ok", active=active, waiting=service.inside - active))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.answer(request, Completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.answer(request, Conversation)

    return app


# ---------------------------------------------------------------------------------- the command


def server_of(app: FastAPI) -> uvicorn.Server:
    rest = dict(lifespan="off", ws="none", log_level="error", timeout_graceful_shutdown=1)
    rest |= dict(http=Connection, limit_concurrency=MAX_CONNECTIONS)
    return uvicorn.Server(uvicorn.Config(app, **rest))


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; UsageError if the address is not of this machine, or is in use."""
    try:
        return socket.create_server((host, port))
    except (OSError, UnicodeError) as error:
        why = f"--host {host} --port {port} ({error})"
        raise UsageError(f"cannot listen on {why}; try --host 127.0.0.1 --port 0") from None


def run(config: ServeConfig, load_model: Callable) -> None:
    """`eval.py serve`: load the model, and answer until Ctrl-C."""
    listener = open_socket(config.host, config.port)
    model, trainer = load_model(config)
    name, tuned = run_of(trainer["path"]).name, is_tuned(trainer)
    service = Service(model, open_tokenizer(config, trainer), name, tuned)
    size, prompts = sum(p.numel() for p in model.parameters()), prompts_of(config, trainer)
    service.about |= dict(parameters=size, tokens=trainer.get("tokens") or None, prompts=prompts)
    host, port = listener.getsockname()
    host = socket.gethostname() if host == "0.0.0.0" else host
    token = config.token or ("" if config.host in LOCAL else secrets.token_urlsafe(18))
    say(f"{name} {'answers' if tuned else 'continues text'}; Ctrl-C ends it")
    fragment = f"#token={quote(token)}" if token else ""
    print(printable(f"page: http://{host}:{port}/{fragment}"))  # say would hide the fragment
    key = f", API key {token}" if token else ""
    say(f"for programs: http://{host}:{port}/v1{key}", flush=True)
    server_of(build_app(service, token)).run(sockets=[listener])
    raise KeyboardInterrupt  # Ctrl-C ended it; asyncio may have turned that into a cancelled task
