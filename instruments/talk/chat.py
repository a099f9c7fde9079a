"""`eval.py chat`: a conversation in the terminal with a model that was tuned on conversations.

A question is a line; the answer is printed as it is drawn. When the conversation no longer fits
into the model's positions, the oldest questions go. Ctrl-C ends an answer; at the prompt it ends
the program, as the end of the input does. Next: preparation/chat.py has the template.
"""

import codecs
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from config import Count, UsageError
from instruments.talk.sample import DrawConfig, draw_on_one_thread
from machinery.output import printable, say
from model import GPT
from preparation.chat import encode, marks
from tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatConfig(DrawConfig):
    """Talk with a model that was tuned on conversations."""

    system: str = ""
    """What the model is told before the first question."""
    max_new_tokens: Count = 256
    """Tokens of an answer, at most; never more than half of the model's positions."""


@dataclass
class Talk:
    """A conversation that goes on. `exchanges`: the questions that the model still sees, each with
    the ids of its answer."""

    model: GPT
    tokenizer: Tokenizer
    config: ChatConfig

    def __post_init__(self):
        seq_len = self.model.config.seq_len
        self.most = min(self.config.max_new_tokens, seq_len // 2)
        self.room = seq_len - self.most  # for all but the answer
        self.exchanges = []

    def ids(self, exchanges: list[tuple[str, list[int]]]) -> list[int]:
        """The conversation up to where its last answer continues."""
        ids = [self.tokenizer.bos_id]
        before = [("system", self.config.system)]
        _, _, end = marks(self.tokenizer)
        for asked, answer in exchanges:
            turns = [*before, ("user", asked)]
            ids += [*encode(turns, self.tokenizer, reply=True), *answer, end]
            before = []  # the system text stands before the oldest question that is left
        return ids[:-1]

    def ask(self, question: str) -> int:
        """Add a question; returns how many of the oldest had to go. UsageError, and nothing has
        changed, if the question does not fit alone."""
        kept = [*self.exchanges, (question, [])]
        while (count := len(self.ids(kept))) > self.room:
            kept = kept[1:]
            if not kept:
                raise UsageError(
                    f"the question, with --system, has {count} tokens, and {self.room} fit: use "
                    "fewer words"
                )
        dropped = len(self.exchanges) + 1 - len(kept)
        self.exchanges = kept
        return dropped

    def answer(self) -> Iterator[str]:
        """Draw the answer to the last question, until the model ends it or it has `most` tokens:
        its text, whole characters at a time. What was drawn stays in the conversation, even if the
        caller stops early."""
        config = self.config
        device = self.model.cos.device
        idx = torch.tensor([self.ids(self.exchanges)], device=device)  # (1, T)
        drawn = self.exchanges[-1][1]
        stream = self.model.stream(
            idx,
            max_new_tokens=self.most,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            generator=torch.Generator(device).manual_seed(config.seed + len(self.exchanges)),
        )
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for new in stream:
            token = new.item()
            if token in self.tokenizer.special.values():
                break
            drawn.append(token)
            text = decoder.decode(self.tokenizer.bytes_of[token])
            if text:  # else the token began a character, which the next ones end
                yield text
        yield decoder.decode(b"", final=True)


def questions() -> Iterator[str]:
    """The lines of the input that are not empty, until its end or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() edits and remembers lines with it)
    sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input("> ").strip()
            if line:
                yield line
    print()


def reply(talk: Talk, question: str) -> None:
    """Print the answer to a question as it comes; Ctrl-C ends it."""
    dropped = talk.ask(question)
    if dropped:
        say(f"[context full: questions dropped, the oldest first: {dropped}]")
    try:
        for text in talk.answer():
            print(printable(text), end="", flush=True)
        if len(talk.exchanges[-1][1]) == talk.most:
            say(f"\n[cut at {talk.most} tokens]", end="")
    except KeyboardInterrupt:
        print("\n[stopped]", end="")
    print(flush=True)


def talk(config: ChatConfig, load_model: Callable) -> None:
    """`eval.py chat`. load_model: EvalConfig -> Trained."""
    loaded = load_model(config)
    if not loaded.provenance.tuned:
        raise UsageError(
            f"{loaded.path} was not tuned on conversations, so it completes text; docs/chat.md "
            "says how to tune it, and eval.py sample shows what it writes"
        )
    draw_on_one_thread(loaded.model)
    conversation = Talk(loaded.model, loaded.tokenizer, config)
    for question in questions():
        try:
            reply(conversation, question)
        except UsageError as error:
            say(f"[{error}]")
