"""`eval.py chat`: a conversation in the terminal with a model that was tuned on conversations.

A question is a line; the answer is printed as it is drawn. Keys and values of the conversation stay
in the cache, so a turn computes only its own tokens. When the conversation no longer fits into the
model's positions, the oldest questions go, and the cache is computed anew. Ctrl-C ends an answer;
at the prompt it ends the program, as the end of the input does. Next: preparation/chat.py.
"""

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from config import Count, Share, UsageError
from machinery.trained import EvalConfig, is_tuned, open_tokenizer
from model import GPT, KVCache
from preparation.chat import encode, marks
from tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatConfig(EvalConfig):
    """Talk with a model that was tuned on conversations."""

    system: str = ""
    """What the model is told before the first question."""
    max_new_tokens: Count = 256
    """Tokens of an answer, at most; never more than half of the model's positions."""
    temperature: float = 0.8
    """0: always the likeliest token; 1: the model's own probabilities."""
    top_k: int = 50
    """Draw among this many of the likeliest tokens; 0: among all."""
    top_p: Share = 1.0
    """Draw among the likeliest tokens that hold this share of the probability; 1: among all."""
    seed: int = 0
    """Seed of the draws."""


class TooLongError(UsageError):
    """A question that leaves no room for its answer."""


class Talk:
    """A conversation that goes on. `exchanges`: the questions and the ids of their answers, those
    that the model still sees; `cache`: keys and values of a beginning of their ids."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, config: ChatConfig):
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.stops = (tokenizer.bos_id, *marks(tokenizer))  # none of them belongs to an answer
        self.most = min(config.max_new_tokens, model.config.seq_len // 2)
        self.room = model.config.seq_len - self.most  # for all but the answer
        self.exchanges: list[tuple[str, list[int]]] = []
        self.cache = None
        self.dropped = 0  # exchanges that the newest question has displaced
        self.stopped = False  # asked to end the answer
        self.generator = torch.Generator(model.cos.device).manual_seed(config.seed)

    def ids(self, question: str) -> list[int]:
        """The whole conversation up to where the answer begins."""
        ids = [self.tokenizer.bos_id]
        before = [("system", self.config.system)]  # for the oldest question that is left
        for asked, answer in [*self.exchanges, (question, [])]:
            ids += encode([*before, ("user", asked)], self.tokenizer, reply=True) + answer
            before = []
        return ids

    def make_room(self, question: str) -> list[int]:
        """`ids`, after dropping as many of the oldest exchanges as it takes; TooLongError, and
        nothing is dropped, if the question does not even fit alone."""
        kept, self.dropped = self.exchanges, 0
        while len(ids := self.ids(question)) > self.room:
            if not self.exchanges:
                self.exchanges = kept
                raise TooLongError(
                    f"the question takes {len(ids)} of {self.room} tokens; ask in fewer words"
                )
            self.exchanges = self.exchanges[1:]
        self.dropped = len(kept) - len(self.exchanges)
        if self.dropped:  # the others have moved: their keys are of other positions
            self.cache = None
        return ids

    def answer(self, question: str) -> Iterator[int]:
        """Draw the answer, id by id, until the model ends it, it is long enough, or `stopped` is
        set. However it ends, it becomes part of the conversation when the caller is done."""
        ids, drawn, config = self.make_room(question), [], self.config
        self.stopped = False
        model, device = self.model, self.model.cos.device
        cache = self.cache
        if cache is None:
            cache = KVCache(model.config, 1, model.config.seq_len, model.compute_dtype, device)
        self.cache = None  # until all is well
        # The last id drawn, and perhaps its <|end|>, are not in the cache: new ids begin with them.
        new = torch.tensor([ids[cache.length :]], device=device)  # (1, T)
        how = (self.most, config.temperature, config.top_k, self.generator, -1, config.top_p)
        try:
            for token in model.stream(new, *how, cache=cache):
                if (i := token.item()) in self.stops:
                    break
                drawn.append(i)
                yield i
                if self.stopped:
                    break
        finally:
            self.exchanges.append((question, [*drawn, self.stops[3]]))
        self.cache = cache


@contextlib.contextmanager
def ctrl_c(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls stop() instead of interrupting a forward pass, which would spoil the cache."""
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def questions() -> Iterator[str]:
    """The lines of the input that are not empty, until its end or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() edits and remembers lines with it)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while sys.stdin:
            line = input("> ").strip()
            if not sys.stdin.isatty():  # nobody has typed it here
                print(line)
            if line:
                yield line
    print()


def say(talk: Talk, question: str) -> None:
    """Print the answer to a question as it comes, but for a character whose last bytes are not
    there yet."""
    drawn, shown = [], ""
    with ctrl_c(lambda: setattr(talk, "stopped", True)):
        for i in talk.answer(question):
            drawn.append(i)
            if len(drawn) == 1 and talk.dropped:
                print(
                    f"[forgotten, as it no longer fits: the oldest of the conversation, "
                    f"{talk.dropped} of your questions]"
                )
            ready = talk.tokenizer.decode(drawn).rstrip("\ufffd")
            print(ready[len(shown) :], end="", flush=True)
            shown = ready
    print(talk.tokenizer.decode(drawn)[len(shown) :], flush=True)
    if talk.stopped:
        print("[stopped]")
    elif len(drawn) == talk.most:
        print(f"[cut at {talk.most} tokens]")


def talk(config: ChatConfig, load_model: Callable) -> None:
    """`eval.py chat`. load_model: EvalConfig -> (model, trainer.json)."""
    model, trainer = load_model(config)
    if not is_tuned(trainer):
        raise UsageError(
            f"{trainer['path']} was not tuned on conversations, so it completes text and does not "
            "answer; docs/chat.md says how to tune it, and eval.py sample shows what it writes"
        )
    conversation = Talk(model, open_tokenizer(config, trainer), config)
    for question in questions():
        try:
            say(conversation, question)
        except TooLongError as error:
            print(f"[{error}]")
