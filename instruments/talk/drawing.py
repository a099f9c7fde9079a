"""Draws answers token by token, with the log-probabilities of what was drawn and of the rest.

`Writer.write(wish)` yields the pieces of the answers as they come. It draws with model.stream(),
and keeps the logits that stream() drew from. Next: protocol.py makes wishes from requests, serve.py
lets several of them take turns.
"""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from config import Share
from machinery.errors import NonFiniteError
from machinery.trained import EvalConfig
from model import GPT
from tokenizer import Tokenizer


@dataclass(frozen=True)
class DrawConfig(EvalConfig):
    """How tokens are drawn."""

    temperature: float = 0.8
    """0: always the likeliest token; 1: the model's own probabilities."""
    top_k: int = 50
    """Draw among this many of the likeliest tokens; 0: among all."""
    top_p: Share = 1.0
    """Draw among the likeliest tokens that hold this share of the probability; 1: among all."""
    seed: int = 0
    """Seed of the draws."""


def draw_on_one_thread(model: GPT) -> None:
    """On a CPU: hardly slower for a small model, and several times faster if others run too."""
    if model.cos.device.type == "cpu" and model.config.n_embd < 1024:
        torch.set_num_threads(1)


class Token(NamedTuple):
    """A token of a prompt or of an answer; log-probabilities in nats, of the model's own
    distribution, whatever the temperature. None: not asked for, or nothing stands before it."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability) of the likeliest


class Piece(NamedTuple):
    """A part of an answer, as it comes."""

    index: int  # of the answer, among those of the request
    text: str
    tokens: list[Token]
    n_new: int = 0  # how many of the tokens were drawn
    finish: str | None = None  # "stop" or "length": the answer ends here


@dataclass(frozen=True)
class Wish:
    """What a client asks for."""

    prompts: Sequence[list[int]]  # BOS in front
    hidden: Sequence[int]  # how many ids of each, at its beginning, the client did not send: 0 or 1
    n: int = 1
    max_tokens: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[str, ...] = ()
    logprobs: int | None = None  # alternatives to each token; None: no log-probabilities
    echo: bool = False


class Text:
    """Tokens -> text that may be shown: whole characters, and nothing that may turn out to be the
    beginning of a stop string. `stopped`: one was there, and the text has ended."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stops, self.held, self.stopped = tokenizer, stops, "", False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, i: int | None) -> str:
        """The text that is ready after one more token. None: there are no more."""
        raw = b"" if i is None else self.tokenizer.bytes_of[i]
        self.held += self.decoder.decode(raw, final=i is None)
        ends = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        begun = [n for stop in self.stops for n in range(len(stop)) if self.held.endswith(stop[:n])]
        keep = 0 if i is None else max(begun, default=0)
        ready = self.held[: min(ends) if ends else len(self.held) - keep]
        self.stopped = self.stopped or bool(ends)
        self.held = "" if ends else self.held[len(ready) :]
        return ready


class Writer:
    """Draws what a Wish asks for; to be called from one thread only."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer, self.logits = model, tokenizer, None
        self.ends = set(tokenizer.special.values())  # ids that end a document or a turn
        draw_on_one_thread(model)
        # stream() draws, and does not say from what: this keeps the logits, (1, T, V).
        model.register_forward_hook(lambda module, args, logits: setattr(self, "logits", logits))

    def write(self, wish: Wish) -> Iterator[Piece | None]:
        """The answers one after the other; a step is a forward pass at most."""
        for index in range(len(wish.prompts) * wish.n):
            yield from self._answer(wish, index)

    def _answer(self, wish: Wish, index: int) -> Iterator[Piece | None]:
        ids, device = wish.prompts[index // wish.n], self.model.cos.device
        idx = torch.tensor([ids], device=device)  # (1, T)
        generator = torch.Generator(device).manual_seed((wish.seed + index) % 2**63)
        options = (wish.max_tokens, wish.temperature, wish.top_k, generator, -1, wish.top_p)
        text, waiting, begun = Text(self.tokenizer, wish.stops), [], False
        for drawn in self.model.stream(idx, *options):
            logits, self.logits = self.logits[0], None  # (T, V) of the prompt, then (1, V)
            if wish.echo and not begun:
                yield self._echo(wish, index, logits)
            begun = True
            token = self._tokens(logits[-1:], drawn[0], wish.logprobs)[0]
            waiting.append(token)
            # The token that ends an answer has no text, but is given: lm_eval counts on it.
            ended = token.id in self.ends
            ready = "" if ended else text.add(token.id)
            if ended or text.stopped:
                break
            yield Piece(index, ready, waiting, len(waiting)) if ready else None
            waiting = [] if ready else waiting
        ready = ready if text.stopped else text.add(None)
        finish = "stop" if ended or text.stopped else "length"
        yield Piece(index, ready, waiting, len(waiting), finish)

    def _echo(self, wish: Wish, index: int, logits: Tensor) -> Piece:
        """The prompt, as if it had been drawn. The first token has no log-probability, unless it
        follows a BOS that the client did not send."""
        ids, hidden = wish.prompts[index // wish.n], wish.hidden[index // wish.n]
        tokens = [Token(i) for i in ids]
        if wish.logprobs is not None and len(ids) > 1:
            after = torch.tensor(ids[1:], device=logits.device)  # (T - 1,)
            tokens[1:] = self._tokens(logits[: len(ids) - 1], after, wish.logprobs)
        return Piece(index, self.tokenizer.decode(ids[hidden:]), tokens[hidden:])

    def _tokens(self, logits: Tensor, ids: Tensor, k: int | None) -> list[Token]:
        """logits (T, V), ids (T,) that were drawn from them -> T tokens."""
        if k is None:
            return [Token(i) for i in ids.tolist()]
        norm = logits.logsumexp(-1, keepdim=True)  # (T, 1)
        if not norm.isfinite().all():
            raise NonFiniteError("the model gives logits that are NaN or infinite")
        chosen = (logits.gather(-1, ids[:, None]) - norm)[:, 0]  # (T,)
        top, top_ids = logits.topk(min(max(k, 1), logits.size(-1)))
        rows = zip(ids.tolist(), chosen.tolist(), top_ids.tolist(), (top - norm).tolist())
        return [Token(i, max(p, -9999.0), tuple(zip(a, b))[:k]) for i, p, a, b in rows]
