"""A trained model behind HTTP: `python eval.py serve [MODEL]`, a page and OpenAI's protocol.

    GET  /                     a page: type, watch it stream, see each token's alternatives
    GET  /v1/models            the model, its seq_len, and whether it was tuned for conversations
    POST /v1/completions       continues text or token ids; echo and logprobs as lm_eval needs them
    POST /v1/chat/completions  answers a conversation, if the model was tuned for it
    GET  /health               how many requests are at work, and how many wait

One thread runs the model. Requests take turns, a token each, so that a short answer does not wait
for a long one. Their number, sizes and times are bounded, and a client that leaves ends its own.
Only this machine can connect, unless --host says otherwise: then a token is needed. Next:
protocol.py has what is asked and given, drawing.py draws it, serve.html is the page.
"""

import asyncio
import ipaddress
import json
import os
import re
import secrets
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from config import UsageError
from instruments.drawing import Piece, Writer
from instruments.protocol import Form, Reader, Refused, short
from machinery.errors import NonFiniteError
from machinery.trained import EvalConfig, is_tuned, open_tokenizer, run_of
from model import GPT
from tokenizer import Tokenizer

PAGE = Path(__file__).with_suffix(".html")
MAX_BODY = 4 << 20  # bytes of a request
READ_S = 10.0  # to send a request
HEADERS = {  # of the page: it loads nothing from anywhere, and no other page may frame it
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class ServeConfig(EvalConfig):
    """Serve a model: a page to try it, and OpenAI's protocol for programs."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but this machine's own (127.0.0.1, ::1, localhost) needs a token:
    that of --token, or one that is made and printed."""
    port: Annotated[int, 0, 65535] = 8049
    """Port to listen on; 0: a free one."""
    token: str = ""
    """What a client must send as its API key; empty: nothing, from this machine."""
    active: Annotated[int, 1, 1024] = 4
    """Requests that take turns, a token each; every one keeps a cache of keys and values."""
    waiting: Annotated[int, 0, 100_000] = 64
    """Requests that may wait for their turn; one more is refused (status 503)."""
    max_seconds: Annotated[float, 0.1, 86_400] = 300.0
    """Seconds for a request, its waiting included; then it ends."""


# ------------------------------------------------------------------------------------ taking turns


class Job:
    """A request on its way: the steps that are left, and where its pieces go. Its end is sent as
    None, its failure as the exception."""

    def __init__(self, steps: Iterator[Piece | None], send: Callable[[Any], object]) -> None:
        self.steps, self.send, self.left = steps, send, False

    def step(self) -> None:
        try:
            if (piece := next(self.steps)) is not None:
                self.send(piece)
        except StopIteration:
            self.left = True
            self.send(None)
        except Exception as error:
            self.left = True
            self.send(error)


class Engine:
    """A thread in which the first `active` jobs take turns; `waiting` more may wait for theirs."""

    def __init__(self, active: int, waiting: int) -> None:
        self.active, self.waiting = active, waiting
        self.jobs: list[Job] = []
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.work, name="model", daemon=True)
        self.thread.start()

    def submit(self, job: Job) -> Job:
        with self.changed:
            self.jobs = [other for other in self.jobs if not other.left]
            if len(self.jobs) >= self.active + self.waiting:
                raise Refused(503, f"{len(self.jobs)} requests are being served; try again later")
            self.jobs.append(job)
            self.changed.notify()
        return job

    def work(self) -> None:
        while True:
            with self.changed:
                self.jobs = [job for job in self.jobs if not job.left]
                self.changed.wait_for(lambda: self.jobs)
                turn = self.jobs[: self.active]
            for job in turn:
                if not job.left:
                    with suppress(RuntimeError):  # the event loop was closed: the program ends
                        job.step()
            del turn, job  # or a finished one keeps its cache until the next comes

    def load(self) -> dict[str, int]:
        count = len([job for job in self.jobs if not job.left])
        return dict(active=min(count, self.active), waiting=max(0, count - self.active))


# ------------------------------------------------------------------------------------- the server


def is_this_machine(host: str) -> bool:
    """Whether only programs on this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_caller(request, token: str) -> None:
    """Refused unless the client may ask. Without a token, a page on the web could make the browser
    ask for it: by another name for this machine (DNS rebinding), or from another origin."""
    if token:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(sent.encode(), token.encode()):
            why = "is wrong" if sent else "is missing: send it as the API key (Bearer)"
            raise Refused(401, f"the token {why}; it is printed where the server was started")
        return
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if not is_this_machine(name := parts_of(f"//{host}").hostname or ""):
        sentence = f"this server answers to localhost, not {short(name)}; give it a --token"
        raise Refused(403, f"{sentence} to reach it by other names")
    if origin is not None and parts_of(origin).netloc != host:
        raise Refused(403, f"pages of {short(origin)} may not use this server")


def parts_of(address: str) -> SplitResult:
    """Of a URL; all empty if it is none."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


async def read_json(request) -> dict:
    """The body of a request. Refused if it is too long, too slow, or not a JSON object."""
    body = bytearray()

    async def read() -> None:
        async for part in request.stream():
            body.extend(part)
            if len(body) > MAX_BODY:
                raise Refused(413, f"a request may have {MAX_BODY:,} bytes; send less")

    try:
        await asyncio.wait_for(read(), READ_S)
        tree = json.loads(body)
    except asyncio.TimeoutError:
        raise Refused(408, f"the request did not come within {READ_S:g} s") from None
    except RecursionError:
        raise Refused(400, "the body is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise Refused(400, f"the body must be a JSON object; given: {short(tree)}")
    return tree


class Service:
    """One model, and what its clients get."""

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, name: str, tuned: bool, config: ServeConfig
    ) -> None:
        self.name, self.config, self.created = name, config, int(time.time())
        self.facts = dict(seq_len=model.config.seq_len, tuned=tuned)
        self.reader = Reader(tokenizer, model.config.seq_len, name, tuned)
        self.writer = Writer(model, tokenizer)
        self.engine = Engine(config.active, config.waiting)

    def models(self) -> dict:
        facts = dict(id=self.name, object="model", created=self.created, owned_by="nano2049")
        return {"object": "list", "data": [facts | self.facts]}

    async def answer(self, request, is_chat: bool):
        """The response to a request for text: whole, or as a stream of server-sent events."""
        from fastapi.responses import StreamingResponse

        tree = await read_json(request)
        given, wish = (self.reader.chat if is_chat else self.reader.completions)(tree)
        form = Form(is_chat, self.name, self.writer.raw, wish.logprobs is not None)
        queue = asyncio.Queue()
        send = partial(asyncio.get_running_loop().call_soon_threadsafe, queue.put_nowait)
        job = self.engine.submit(Job(self.writer.write(wish), send))
        pieces = self.follow(request, job, queue)
        usage = dict(prompt_tokens=sum(map(len, wish.prompts)), completion_tokens=0)
        if given.get("stream"):
            counts = given.get("stream_options", {}).get("include_usage")
            events = self.events(pieces, form, usage if counts else None)
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(events, headers=headers, media_type="text/event-stream")
        async with aclosing(pieces):
            found = [piece async for piece in pieces]
        return as_json(form.whole(found, counted(usage, found)))

    async def events(self, pieces: AsyncIterator[Piece], form: Form, usage: dict | None):
        found = []
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    found.append(piece._replace(text="", tokens=[]))
                    yield f"data: {json.dumps(form.chunk([piece]))}\n\n"
            if usage:
                yield f"data: {json.dumps(form.chunk([], usage=counted(usage, found)))}\n\n"
        except Refused as refusal:
            yield f"data: {json.dumps(refusal.tree())}\n\n"
        yield "data: [DONE]\n\n"

    async def follow(self, request, job: Job, queue: asyncio.Queue) -> AsyncIterator[Piece]:
        """The pieces of a job, until it ends, takes too long, or its client has left."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait(Refused(499, "the client has left"))

        loop, watcher = asyncio.get_running_loop(), asyncio.create_task(watch())
        end = loop.time() + self.config.max_seconds
        try:
            while (piece := await asyncio.wait_for(queue.get(), end - loop.time())) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        except asyncio.TimeoutError:
            why = f"it was not done within {self.config.max_seconds:g} s (--max_seconds)"
            raise Refused(503, f"the request was ended: {why}; ask for less, or later") from None
        except NonFiniteError as error:
            raise Refused(500, str(error)) from None
        except Exception as error:
            if isinstance(error, Refused):
                raise
            traceback.print_exception(error)
            why = f"{type(error).__name__}; the server's terminal has the traceback"
            raise Refused(500, f"the model failed with {why}") from None
        finally:
            job.left = True
            watcher.cancel()


def counted(usage: dict, pieces: list[Piece]) -> dict:
    new = sum(piece.n_new for piece in pieces)
    return usage | dict(completion_tokens=new, total_tokens=usage["prompt_tokens"] + new)


def as_json(tree: dict, status: int = 200, **headers):
    from fastapi import Response

    return Response(json.dumps(tree), status, headers, "application/json")


def build_app(service: Service, token: str):
    """The routes: a FastAPI app."""
    from fastapi import Depends, FastAPI, Request
    from fastapi.responses import HTMLResponse
    from starlette.exceptions import HTTPException

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)  # their pages load scripts

    def caller(request: Request) -> None:
        check_caller(request, token)

    @app.exception_handler(Refused)
    def refuse(request: Request, refusal: Refused):
        close = {"Connection": "close"} if refusal.status in (408, 413) else {}
        login = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
        return as_json(refusal.tree(), refusal.status, **close, **login)

    @app.exception_handler(HTTPException)
    def not_here(request: Request, error: HTTPException):
        where = f"{request.method} {short(request.url.path)}"
        sentence = f"there is no {where} here, but /, /v1/models, /v1/completions, "
        return as_json(
            Refused(error.status_code, sentence + "/v1/chat/completions and /health").tree(),
            error.status_code,
        )

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=HEADERS)

    only = [Depends(caller)]

    @app.get("/v1/models", dependencies=only)
    def models():
        return as_json(service.models())

    @app.get("/health", dependencies=only)
    def health():
        return as_json(dict(status="ok", **service.engine.load()))

    @app.post("/v1/completions", dependencies=only)
    async def completions(request: Request):
        return await service.answer(request, is_chat=False)

    @app.post("/v1/chat/completions", dependencies=only)
    async def chat_completions(request: Request):
        return await service.answer(request, is_chat=True)

    return app


# ---------------------------------------------------------------------------------- the command


def check_token(config: ServeConfig) -> str:
    """The token that clients must send: the one that was given; a new one, for an address that
    other machines can reach; else none."""
    if not config.token:
        return "" if is_this_machine(config.host) else secrets.token_urlsafe(18)
    if not re.fullmatch(r"[A-Za-z0-9._~+/=-]{8,200}", config.token):
        raise UsageError(
            f"--token {config.token!r} must have 8 to 200 characters, of A-Z a-z 0-9 . _ ~ + / = -"
        )
    return config.token


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; UsageError if the address is not of this machine, or is in use."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        code = getattr(error, "errno", None) or 0
        why = os.strerror(code) if code > 0 else "there is no such address"
        raise UsageError(
            f"cannot listen on --host {host} --port {port} ({why}); try --host 127.0.0.1, and "
            "--port 0 for a free port"
        ) from None


def run(config: ServeConfig, load_model: Callable) -> None:
    """`eval.py serve`: load the model, and answer until Ctrl-C."""
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as error:
        need = f"serve needs {error.name}: pip install -r requirements-eval.txt"
        raise UsageError(need) from None
    if not config.host:
        raise UsageError("--host '' is no address; try 127.0.0.1, or 0.0.0.0 for all of them")
    token = check_token(config)
    listener = open_socket(config.host, config.port)
    model, trainer = load_model(config)
    tokenizer = open_tokenizer(config, trainer)
    name, tuned = run_of(trainer["path"]).name, is_tuned(trainer)
    service = Service(model, tokenizer, name, tuned, config)
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"{name} {'answers' if tuned else 'continues text'}; Ctrl-C ends it")
    print(f"page: {address}/{f'#token={token}' if token else ''}")
    print(f"for programs: {address}/v1" + (f", API key {token}" if token else ""), flush=True)
    limits = dict(limit_concurrency=config.active + config.waiting + 256)
    server = uvicorn.Config(
        build_app(service, token),
        log_level="warning",
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
        **limits,
    )
    uvicorn.Server(server).run(sockets=[listener])
