"""`eval.py sample`: what a model writes after a prompt, or answers if it was tuned.

Prompts come from the command line, from standard input or from the preset. A single sample is
printed as it is drawn. Next: model.py has `stream`, chat.py keeps a conversation.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from config import Count, Preset, UsageError, find_preset
from instruments.talk.drawing import DrawConfig, Text
from machinery.trained import is_tuned, open_tokenizer, run_of
from model import GPT
from preparation.chat import prompt_ids
from tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleConfig(DrawConfig):
    """Continue a prompt."""

    prompt: tuple[str, ...] = ()
    """Texts to continue; none: the preset's own; `-`: the lines of standard input."""
    n: Count = 1
    """Samples of each prompt, drawn together; a single one is printed as it comes."""
    max_new_tokens: Count = 80
    """Tokens to add."""


def find_prompts(given: tuple[str, ...], run: str) -> tuple[str, ...]:
    """The prompts of the command line, of standard input, or of the preset that a run is of."""
    if given == ("-",):
        lines = []
        if sys.stdin:  # None if it was closed
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
            lines = [line.rstrip("\n") for line in sys.stdin if line.strip()]
        if not lines:
            raise UsageError("--prompt - found no line on standard input; one line is one prompt")
        return tuple(lines)
    if given:
        return given
    preset = find_preset(run)
    print(f"prompts: {f'those of the preset {run}' if preset else 'three that suit any text'}")
    return (preset or Preset).prompts


def sample(config: SampleConfig, load_model: Callable) -> None:
    """`eval.py sample`: print continuations of each prompt, and on standard error the speed. The
    prompt begins a document, so BOS goes before it; for a tuned model it is a question."""
    model, trainer = load_model(config)
    tokenizer, tuned = open_tokenizer(config, trainer), is_tuned(trainer)
    if tuned:
        print("tuned on conversations: each prompt is a question, and what follows the answer")
    for prompt in find_prompts(config.prompt, run_of(trainer["path"]).name):
        # In training text a space belongs to the word after it (" name" is one token), so a prompt
        # that ends in one is unlike any text: the model does better without.
        text = prompt.rstrip(" ") or prompt
        if text != prompt:
            print(f"the spaces at the end of {prompt!r} are left out: words begin with theirs")
        print(f"--- {prompt!r}")
        continue_prompt(model, tokenizer, text, config, tuned)


def continue_prompt(
    model: GPT, tokenizer: Tokenizer, prompt: str, config: SampleConfig, tuned: bool = False
) -> None:
    """Draw and print config.n continuations of a prompt, each up to the next BOS; tuned: answers
    to it, up to <|end|>."""
    device, (ids, stop) = model.cos.device, prompt_ids(prompt, tokenizer, tuned)
    idx, prompt = torch.tensor([ids] * config.n, device=device), prompt + "\n" * tuned  # (n, T)
    generator = torch.Generator(device).manual_seed(config.seed)
    rows, start = [[] for _ in range(config.n)], time.perf_counter()
    stream = model.stream(
        idx, config.max_new_tokens, config.temperature, config.top_k, generator, stop, config.top_p
    )
    single = Text(tokenizer)
    print(prompt if config.n == 1 else "", end="", flush=True)
    for new in stream:  # (n, 1)
        for row, token in zip(rows, new.flatten().tolist()):
            if stop not in row[-1:]:  # its text has not ended
                row.append(token)
        if config.n == 1 and rows[0][-1] != stop:
            print(single.add(rows[0][-1]), end="", flush=True)
    seconds, count = time.perf_counter() - start, sum(map(len, rows))
    for row in rows:
        whole = prompt + tokenizer.decode(i for i in row if i != stop)
        print((single.add(None) if config.n == 1 else whole) + "\n")
    speed = f"{count} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens/s, prompt included"
    print(speed, file=sys.stderr)
