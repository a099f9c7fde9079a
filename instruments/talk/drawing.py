"""Draws an answer token by token, with the probability of what else each token might have been.

`Writer.write` yields the pieces of an answer as they come. It draws with model.stream(), and keeps
the logits that stream() drew from. Next: chat.py prints the pieces, serve.py sends them to a page.
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from config import Share
from machinery.errors import NonFiniteError
from machinery.trained import EvalConfig
from model import GPT
from tokenizer import Tokenizer

ALTERNATIVES = 8  # of each token


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


@dataclass(frozen=True)
class Token:
    """A token that was drawn. Probabilities are the model's own, whatever the temperature."""

    id: int
    text: str  # a part of a character as its bytes: \\xe4
    p: float
    top: list[tuple[str, float]]  # (text, probability) of the likeliest


@dataclass(frozen=True)
class Piece:
    """A part of an answer, as it comes."""

    text: str  # whole characters
    tokens: list[Token]
    end: str = ""  # of the last piece: "stop" if the model ended the answer, else "length"


class Writer:
    """Draws answers with one model; to be called by one thread at a time."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.logits = None
        self.ends = set(tokenizer.special.values())  # ids that end a document or a turn
        draw_on_one_thread(model)
        # stream() draws, and does not say from what: this keeps the logits, (1, T, V).
        model.register_forward_hook(lambda module, args, logits: setattr(self, "logits", logits))

    def write(self, ids: list[int], options) -> Iterator[Piece]:
        """The answer to ids, BOS first. Several may be drawn in turn, a piece each. options: a
        DrawConfig with max_new_tokens, or what has these fields."""
        device = self.model.cos.device
        idx = torch.tensor([ids], device=device)  # (1, T)
        stream = self.model.stream(
            idx,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            generator=torch.Generator(device).manual_seed(options.seed),
        )
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tokens = []  # those whose text has not come yet: they begin a character
        end = "length"
        for drawn in stream:
            token = self.token(drawn.item())
            tokens.append(token)
            if token.id in self.ends:  # it has no text, but alternatives
                end = "stop"
                break
            text = decoder.decode(self.tokenizer.bytes_of[token.id])
            if text:
                yield Piece(text, tokens)
                tokens = []
        yield Piece(decoder.decode(b"", final=True), tokens, end)

    def token(self, id: int) -> Token:
        """The token that was drawn from the newest logits."""
        logits = self.logits[0, -1]  # (V,)
        self.logits = None  # of a whole prompt: not to be kept
        if not logits.logsumexp(-1).isfinite():
            raise NonFiniteError("the model gives logits that are NaN or infinite")
        probs = logits.softmax(-1)
        top, top_ids = probs.topk(min(ALTERNATIVES, len(probs)))
        texts = [
            self.tokenizer.bytes_of[i].decode(errors="backslashreplace")
            for i in (id, *top_ids.tolist())
        ]
        return Token(id, texts[0], probs[id].item(), list(zip(texts[1:], top.tolist())))
