"""OpenAI's protocol: requests -> wishes (`Reader`), pieces of answers -> objects (`Form`).

Nothing is ignored in silence: a request with a field that would change the answer, and that this
server does not read, is refused. `Refused` is one sentence, with a status of HTTP. Next: drawing.py
draws what a Wish says.
"""

import codecs
import secrets
import time
from typing import Any

from config import UsageError
from instruments.drawing import Piece, Token, Wish
from preparation import chat
from tokenizer import Tokenizer

MAX_CHOICES = 128  # answers of a request: its prompts times n
MAX_STOPS, MAX_STOP = 16, 256  # strings, and the characters of one
MAX_LOGPROBS = 20  # alternatives to a token


class Refused(Exception):
    """A request that is not served: `status` of HTTP, and one sentence."""

    def __init__(self, status: int, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.status, self.code = status, code

    def tree(self) -> dict:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": dict(message=str(self), type=kind, param=None, code=self.code or None)}


# ----------------------------------------------------------------------------- what a client asks

NUMBERS = {  # of a request: its type, the least and the most
    "max_tokens": (int, 0, 1 << 20),
    "max_completion_tokens": (int, 0, 1 << 20),
    "temperature": (float, 0, 2),
    "top_k": (int, 0, 1 << 20),
    "top_p": (float, 1e-6, 1),
    "n": (int, 1, MAX_CHOICES),
    "seed": (int, -(2**63), 2**63),
    "logprobs": (int, 0, MAX_LOGPROBS),
    "top_logprobs": (int, 0, MAX_LOGPROBS),
}
BOTH = {"model", "temperature", "top_p", "top_k", "n", "stop", "seed", "stream", "stream_options"}
READ = {
    "completions": BOTH | {"prompt", "max_tokens", "echo", "logprobs"},
    "chat": BOTH | {"messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"},
}
# What clients send by themselves: taken with the value that changes nothing, or with any.
NEUTRAL = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
UNREAD = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}


def short(value: object) -> str:
    """A value in a sentence, however long it is."""
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


def check_names(tree: dict, read: set[str]) -> dict:
    """The fields of a request that are given. Refused for one that would be ignored."""
    given = {name: value for name, value in tree.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise Refused(400, f"this server has no {name}: leave it out; given: {short(value)}")
        if name not in read and name not in NEUTRAL and name not in UNREAD:
            raise Refused(400, f"{short(name)} is no field that this server reads; leave it out")
    return given


def number(given: dict, name: str, default: Any = None) -> Any:
    """A number of a request, within its range."""
    kind, least, most = NUMBERS[name]
    value = given.get(name, default)
    if name not in given:
        return value
    fits = type(value) is int or (kind is float and type(value) is float)
    if not (fits and least <= value <= most):
        what = "a whole number" if kind is int else "a number"
        raise Refused(400, f"{name} must be {what} from {least} to {most}; given: {short(value)}")
    return value


def flag(given: dict, name: str) -> bool:
    if not isinstance(value := given.get(name, False), bool):
        raise Refused(400, f"{name} must be true or false; given: {short(value)}")
    return value


def stops(given: dict) -> tuple[str, ...]:
    value = given.get("stop", [])
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(stop, str) for stop in found):
        raise Refused(400, f"stop must be a text or a list of texts; given: {short(value)}")
    found = tuple(stop for stop in found if stop)
    if len(found) > MAX_STOPS or any(len(stop) > MAX_STOP for stop in found):
        raise Refused(400, f"stop takes {MAX_STOPS} texts of {MAX_STOP} characters at most")
    return found


class Reader:
    """Requests -> wishes, for one model."""

    def __init__(self, tokenizer: Tokenizer, seq_len: int, name: str, tuned: bool) -> None:
        self.tokenizer, self.seq_len, self.name, self.tuned = tokenizer, seq_len, name, tuned
        self.longest = int(tokenizer.token_bytes.max())

    def completions(self, tree: dict) -> tuple[dict, Wish]:
        given = check_names(tree, READ["completions"])
        self.check_model(given)
        value = given.get("prompt", "")
        many = isinstance(value, list) and not all(type(part) is int for part in value)
        read = [self.ids(part) for part in (value if many else [value])]
        wish = dict(logprobs=number(given, "logprobs"), echo=flag(given, "echo"))
        wish |= dict(max_tokens=number(given, "max_tokens", 16))
        return given, self.wish(given, [ids for ids, _ in read], [n for _, n in read], wish)

    def chat(self, tree: dict) -> tuple[dict, Wish]:
        given = check_names(tree, READ["chat"])
        self.check_model(given)
        if not self.tuned:
            why = f"{self.name} was never tuned for conversations, it continues text"
            raise Refused(400, f"{why}: post a prompt to /v1/completions", "no_chat")
        messages = given.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused(400, f"messages must be a list of turns; given: {short(messages)}")
        if 2 * len(messages) > self.seq_len:
            raise self.too_long(f"{len(messages):,} messages have", 2 * len(messages))
        try:
            turns = chat.read_turns(messages)
            for _, text in turns:
                self.check_size(text)
            ids = [self.tokenizer.bos_id, *chat.encode(turns, self.tokenizer, reply=True)]
        except UsageError as error:
            raise Refused(400, str(error)) from None
        most = number(given, "max_completion_tokens", number(given, "max_tokens", self.seq_len))
        top = number(given, "top_logprobs", 0)
        if top and not flag(given, "logprobs"):
            raise Refused(400, f"top_logprobs {top} needs logprobs true")
        wish = dict(logprobs=top if flag(given, "logprobs") else None, max_tokens=most)
        return given, self.wish(given, [ids], [1], wish)

    def wish(self, given: dict, prompts: list[list[int]], hidden: list[int], more: dict) -> Wish:
        n = number(given, "n", 1)
        if not 1 <= len(prompts) * n <= MAX_CHOICES:
            why = f"a request takes 1 to {MAX_CHOICES} answers, prompts times n"
            raise Refused(400, f"{why}; given: {len(prompts)} times {n}")
        longest = max(map(len, prompts))
        if longest > self.seq_len or (longest == self.seq_len and more["max_tokens"]):
            raise self.too_long("the prompt has", longest)
        flag(given, "stream")
        options = given.get("stream_options", {})
        if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
            raise Refused(400, f"stream_options has include_usage alone; given: {short(options)}")
        flag(options, "include_usage")
        return Wish(
            prompts=prompts,
            hidden=hidden,
            n=n,
            temperature=number(given, "temperature", 1.0),
            top_k=number(given, "top_k", 0),
            top_p=number(given, "top_p", 1.0),
            seed=number(given, "seed", secrets.randbits(62)),
            stops=stops(given),
            **more,
        )

    def ids(self, prompt: object) -> tuple[list[int], int]:
        """A prompt, text or ids, -> (its ids, 1 if BOS had to be put in front). Every row that the
        model has learned from began with BOS."""
        bos, vocab_size = self.tokenizer.bos_id, self.tokenizer.vocab_size
        if isinstance(prompt, str):
            self.check_size(prompt)
            return [bos, *self.tokenizer.encode(prompt)], 1
        if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
            raise Refused(400, f"a prompt is a text or a list of token ids; given: {short(prompt)}")
        if odd := [i for i in prompt if not 0 <= i < vocab_size]:
            raise Refused(400, f"token ids go from 0 to {vocab_size - 1}; given: {short(odd[0])}")
        return (prompt, 0) if prompt[:1] == [bos] else ([bos, *prompt], 1)

    def check_model(self, given: dict) -> None:
        if (model := given.get("model", self.name)) != self.name:
            sentence = f"there is no model {short(model)} here, only {self.name}"
            raise Refused(404, sentence, "model_not_found")

    def check_size(self, text: str) -> None:
        """Refuse by its size alone, without encoding it, a text that cannot fit."""
        if (least := len(text) // self.longest) > self.seq_len:
            raise self.too_long("the prompt has at least", least)

    def too_long(self, what: str, count: int) -> Refused:
        sentence = f"{what} {count:,} tokens, but {self.seq_len:,} fit, the answer's included"
        return Refused(400, f"{sentence}; shorten it", "context_length_exceeded")


# ------------------------------------------------------------------------------- what it gets


class Form:
    """Pieces -> the objects of OpenAI's protocol."""

    def __init__(self, chat: bool, name: str, raw: dict[int, bytes], logprobs: bool) -> None:
        self.chat, self.raw, self.logprobs = chat, raw, logprobs
        self.object = "chat.completion" if chat else "text_completion"
        id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.same = dict(id=id, created=int(time.time()), model=name)
        self.lengths: dict[int, int] = {}  # characters of each answer so far

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
        start = self.lengths.get(piece.index)
        self.lengths[piece.index] = (start or 0) + len(piece.text)
        choice = dict(index=piece.index, finish_reason=piece.finish, logprobs=None)
        if not self.chat:
            logprobs = self.legacy_logprobs(piece.tokens, start or 0) if self.logprobs else None
            return choice | dict(text=piece.text, logprobs=logprobs)
        role = {"role": "assistant"} if start is None else {}
        if self.logprobs:
            content = [self.logprob(t) for t in piece.tokens]
            choice |= dict(logprobs={"content": content, "refusal": None})
        return choice | {said: role | {"content": piece.text}}

    def logprob(self, token: Token) -> dict:
        top = [dict(token=self.text(i), logprob=p, bytes=[*self.raw[i]]) for i, p in token.top]
        i = token.id
        own = dict(token=self.text(i), logprob=token.logprob, bytes=[*self.raw[i]])
        return own | dict(top_logprobs=top)

    def legacy_logprobs(self, tokens: list[Token], start: int) -> dict:
        """Those of /v1/completions. Each table has the token itself besides the likeliest."""
        decoder, offsets, tables = codecs.getincrementaldecoder("utf-8")("replace"), [], []
        for t in tokens:
            offsets.append(start)
            start += len(decoder.decode(self.raw[t.id]))
            table = {self.text(i): p for i, p in (*t.top, (t.id, t.logprob))}
            tables.append(None if t.logprob is None else table)
        return dict(
            tokens=[self.text(t.id) for t in tokens],
            token_logprobs=[t.logprob for t in tokens],
            top_logprobs=tables,
            text_offset=offsets,
        )

    def text(self, i: int) -> str:
        """A token as text; as `bytes:\\xe2\\x80`, OpenAI's way, if it is a part of a character."""
        try:
            return self.raw[i].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in self.raw[i])
