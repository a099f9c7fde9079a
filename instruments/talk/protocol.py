"""OpenAI's protocol: requests -> wishes (`Reader`), pieces of answers -> objects (`Form`).

Nothing is ignored in silence: a field that would change the answer, and that this server does not
support, is refused. `Refused` is one sentence, with an HTTP status. Next: drawing.py draws what a
Wish asks for.
"""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from config import UsageError
from instruments.talk.drawing import Piece, Token, Wish
from preparation import chat
from tokenizer import Tokenizer

MAX_CHOICES = 128  # answers of a request: its prompts times n
MOST = 1 << 20  # tokens
# Clients send these unasked: taken with the value that changes nothing (NEUTRAL), or with any.
NEUTRAL = dict(best_of=1, frequency_penalty=0, presence_penalty=0, logit_bias={}, suffix="")
NEUTRAL |= dict(tools=[], response_format={"type": "text"})
UNREAD = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
UNREAD |= {"tool_choice"}


class Refused(Exception):
    """A request that is not served: its HTTP `status`, and one sentence."""

    def __init__(self, status: int, sentence: str, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.code = status, code

    def tree(self) -> dict:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": dict(message=str(self), type=kind, param=None, code=self.code)}


def short(value: object) -> str:
    """A value for a sentence, cut if it is long."""
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


# ----------------------------------------------------------------------------- what a client asks


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, tree: dict) -> dict:
        """The fields without those that change nothing. Refused if one is unknown."""
        if not isinstance(tree, dict):
            return tree
        given = {k: v for k, v in tree.items() if v is not None and k not in UNREAD}
        for name in NEUTRAL.keys() & given:
            if (value := given.pop(name)) != NEUTRAL[name]:
                raise Refused(400, f"{name} {short(value)} is not supported; leave it out")
        if unknown := given.keys() - cls.model_fields.keys():
            raise Refused(400, f"unknown field {short(min(unknown))}; leave it out")
        return given


class StreamOptions(Strict):
    include_usage: bool = False


Ids = Annotated[list[int], Field(fail_fast=True)]
Several = Annotated[list[str | Ids], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
Stop = Annotated[str, Field(max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]


class Asked(Strict):
    """What both kinds of requests have. A description completes "NAME must be ..."."""

    model: str = ""
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: int = Field(0, ge=0, le=MOST)
    top_p: float = Field(1.0, ge=1e-6, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), le=2**63)
    stop: str | Stops = Field([], description="a text or up to 16 texts, of 256 characters at most")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class Completion(Asked):
    """The body of /v1/completions."""

    prompt: str | Ids | Several = Field(
        "", description=f"a text, a list of token ids, or 1 to {MAX_CHOICES} of these"
    )
    max_tokens: int = Field(16, ge=1, le=MOST)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False


class Conversation(Asked):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)] = Field(
        description="a list of turns, role and content each"
    )
    max_tokens: int = Field(MOST, ge=1, le=MOST)
    max_completion_tokens: int = Field(MOST, ge=1, le=MOST)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)


def parse(body: bytes, kind: type[Asked]) -> Asked:
    """The body of a request; Refused, in one sentence, if it is no JSON object of this kind."""
    if body.count(b"[") + body.count(b"{") > 100_000:  # would take over a second to parse
        raise Refused(400, "the body has more than 100,000 lists and objects")
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise Refused(400, f"the body must be a JSON object; given: {short(tree)}")
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path, name = ".".join(map(str, first["loc"])), str(first["loc"][0])
    if what := kind.model_fields[name].description:
        raise Refused(400, f"{name} must be {what}; given: {short(tree.get(name))}")
    why = first["msg"].replace("Input should be", "must be")
    raise Refused(400, f"{path} {why}; given: {short(first['input'])}")


class Reader:
    """Requests -> wishes, for one model."""

    def __init__(self, tokenizer: Tokenizer, seq_len: int, name: str, tuned: bool) -> None:
        self.tokenizer, self.seq_len, self.name, self.tuned = tokenizer, seq_len, name, tuned
        self.longest = int(tokenizer.token_bytes.max())

    def read(self, body: bytes, kind: type[Asked]) -> tuple[Asked, Wish]:
        """Slow for a long text: not to be called in the thread that listens."""
        asked = parse(body, kind)
        if asked.model not in ("", self.name):
            sentence = f"there is no model {short(asked.model)} here, only {self.name}"
            raise Refused(404, sentence, "model_not_found")
        return asked, (self.completion if kind is Completion else self.chat)(asked)

    def completion(self, asked: Completion) -> Wish:
        given = asked.prompt
        several = isinstance(given, list) and given and not isinstance(given[0], int)
        prompts = given if several else [given]
        if len(prompts) * asked.n > MAX_CHOICES:
            why = f"a request takes {MAX_CHOICES} answers at most, prompts times n"
            raise Refused(400, f"{why}; given: {len(prompts)} times {asked.n}")
        ids, hidden = zip(*(self.ids(prompt) for prompt in prompts))
        more = dict(logprobs=asked.logprobs, max_tokens=asked.max_tokens, echo=asked.echo)
        return self.wish(asked, ids, hidden, **more)

    def chat(self, asked: Conversation) -> Wish:
        if not self.tuned:
            why = f"{self.name} was never tuned for conversations, it continues text"
            raise Refused(400, f"{why}: post a prompt to /v1/completions", "no_chat")
        if asked.top_logprobs and not asked.logprobs:
            raise Refused(400, f"top_logprobs {asked.top_logprobs} needs logprobs true")
        try:
            turns = chat.read_turns(asked.messages)
            self.check_size(sum(len(text) for _, text in turns))
            ids = [self.tokenizer.bos_id, *chat.encode(turns, self.tokenizer, reply=True)]
        except UsageError as error:
            raise Refused(400, str(error)) from None
        most = min(asked.max_completion_tokens, asked.max_tokens)
        top = asked.top_logprobs if asked.logprobs else None
        return self.wish(asked, [ids], [1], logprobs=top, max_tokens=most)

    def wish(self, asked: Asked, prompts: Sequence, hidden: Sequence, **more) -> Wish:
        self.check_fit(max(map(len, prompts)))
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        more["seed"] = secrets.randbits(62) if asked.seed is None else asked.seed
        more |= {name: getattr(asked, name) for name in ("n", "temperature", "top_k", "top_p")}
        return Wish(prompts, hidden, stops=tuple(filter(None, stops)), **more)

    def ids(self, prompt: str | list[int]) -> tuple[list[int], int]:
        """A prompt -> (its ids, 1 if BOS had to be put in front). Every row that the model has
        learned from began with BOS."""
        bos, vocab_size = self.tokenizer.bos_id, self.tokenizer.vocab_size
        if isinstance(prompt, str):
            self.check_size(len(prompt))
            return [bos, *self.tokenizer.encode(prompt)], 1
        if odd := [i for i in prompt if not 0 <= i < vocab_size]:
            raise Refused(400, f"token ids go from 0 to {vocab_size - 1}; given: {short(odd[0])}")
        return (prompt, 0) if prompt[:1] == [bos] else ([bos, *prompt], 1)

    def check_size(self, characters: int) -> None:
        """Refuse by its size alone, without encoding it, a text that cannot fit."""
        self.check_fit(characters // self.longest, "at least ")

    def check_fit(self, count: int, about: str = "") -> None:
        if count >= self.seq_len:
            why = f"{about}{count:,} tokens, but {self.seq_len:,} fit, the answer's included"
            raise Refused(400, f"the prompt has {why}; shorten it", "context_length_exceeded")


# ------------------------------------------------------------------------------- what it gets


class Form:
    """Pieces -> the objects of OpenAI's protocol."""

    def __init__(self, chat: bool, name: str, tokenizer: Tokenizer, logprobs: bool) -> None:
        self.chat, self.tokenizer, self.logprobs = chat, tokenizer, logprobs
        self.object = "chat.completion" if chat else "text_completion"
        id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.same = dict(id=id, created=int(time.time()), model=name)
        self.begun: set[int] = set()  # the answers that have begun

    def whole(self, pieces: list[Piece], usage: dict) -> dict:
        answers: dict[int, Piece] = {}
        for p in pieces:
            a = answers.get(p.index, Piece(p.index, "", []))
            answers[p.index] = Piece(p.index, a.text + p.text, a.tokens + p.tokens, 0, p.finish)
        choices = [self.choice(answers[index], "message") for index in sorted(answers)]
        return self.same | dict(object=self.object, choices=choices, usage=usage)

    def chunk(self, pieces: list[Piece], **more) -> dict:
        """A part of a stream."""
        object = self.object + (".chunk" if self.chat else "")
        choices = [self.choice(piece, "delta") for piece in pieces]
        return self.same | dict(object=object, choices=choices) | more

    def choice(self, piece: Piece, said: str) -> dict:
        choice = dict(index=piece.index, finish_reason=piece.finish, logprobs=None)
        if self.logprobs:
            choice["logprobs"] = (self.of_chat if self.chat else self.of_text)(piece.tokens)
        if not self.chat:
            return choice | dict(text=piece.text)
        role = {} if piece.index in self.begun else {"role": "assistant"}
        self.begun.add(piece.index)
        return choice | {said: role | {"content": piece.text}}

    def of_chat(self, tokens: list[Token]) -> dict:
        def entry(i: int, logprob: float) -> dict:
            raw = self.tokenizer.bytes_of[i]
            return dict(token=self.text(i), logprob=logprob, bytes=[*raw])

        content = [
            entry(t.id, t.logprob) | dict(top_logprobs=[entry(*own) for own in t.top])
            for t in tokens
        ]
        return dict(content=content, refusal=None)

    def of_text(self, tokens: list[Token]) -> dict:
        """Each table has the token itself besides the likeliest."""
        tables = [{self.text(i): p for i, p in (*t.top, (t.id, t.logprob))} for t in tokens]
        return dict(
            tokens=[self.text(t.id) for t in tokens],
            token_logprobs=[t.logprob for t in tokens],
            top_logprobs=[None if t.logprob is None else own for t, own in zip(tokens, tables)],
        )

    def text(self, i: int) -> str:
        """A token as text; as `bytes:\\xe2\\x80`, OpenAI's way, if it is a part of a character."""
        raw = self.tokenizer.bytes_of[i]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
