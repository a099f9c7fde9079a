"""`eval.py sample`: what a model writes after a prompt, or answers if it was tuned.

Prompts come from the command line, from standard input or from the preset. A single sample is
printed as it is drawn. Next: model.py has `stream`, chat.py keeps a conversation.
"""

import os
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from config import Count, Preset, Share, find_preset
from machinery.trained import EvalConfig, is_tuned, open_tokenizer, run_of
from model import GPT
from preparation.chat import prompt_ids
from tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleConfig(EvalConfig):
    """Continue a prompt."""

    prompt: tuple[str, ...] = ()
    """Texts to continue; none: the lines of standard input, if it is a pipe or a file, or else
    the preset's own."""
    n: Count = 1
    """Samples of each prompt, drawn together; a single one is printed as it comes."""
    max_new_tokens: Count = 80
    """Tokens to add."""
    temperature: float = 0.8
    """0: always the likeliest token; 1: the model's own probabilities."""
    top_k: int = 50
    """Draw among this many of the likeliest tokens; 0: among all."""
    top_p: Share = 1.0
    """Draw among the likeliest tokens that hold this share of the probability; 1: among all."""
    seed: int = 0
    """Seed of the draws."""


def find_prompts(config: SampleConfig, path: Path) -> tuple[str, ...]:
    """The prompts of the command line, of standard input, or of the preset; says which."""
    if config.prompt:
        return config.prompt
    if has_input():
        print("prompts: the lines of standard input, up to its end", flush=True)
        with open(0, encoding="utf-8", errors="replace", closefd=False) as file:
            lines = tuple(line.rstrip("\n") for line in file if line.strip())
        if lines:
            return lines
        print("standard input is empty")
    name = run_of(path).name
    if preset := find_preset(name):
        print(f"prompts: those of the preset {name}")
        return preset.prompts
    print("prompts: three that suit any text; give your own with --prompt")
    return Preset.prompts


def has_input() -> bool:
    """Whether standard input is a pipe or a file; it may also be closed."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def sample(config: SampleConfig, load_model: Callable) -> None:
    """`eval.py sample`: print continuations of each prompt, and on standard error the speed. The
    prompt begins a document, so BOS goes before it; for a tuned model it is a question."""
    model, trainer = load_model(config)
    tokenizer, tuned = open_tokenizer(config, trainer), is_tuned(trainer)
    if tuned:
        print("tuned on conversations: each prompt is a question, and what follows the answer")
    for prompt in find_prompts(config, Path(trainer["path"])):
        # In training text a space belongs to the word after it (" name" is one token), so a prompt
        # that ends in one is unlike any text: the model does better without.
        text = prompt.rstrip(" ") or prompt
        if text != prompt:
            print(f"the spaces at the end of {prompt!r} are left out: words begin with theirs")
        print(f"--- {prompt!r}")
        continue_prompt(model, tokenizer, text, config, tuned)


def continue_prompt(
    model: GPT, tokenizer: Tokenizer, text: str, config: SampleConfig, tuned: bool = False
) -> None:
    """Draw and print config.n continuations of a text, each up to the next BOS; tuned: answers to
    it, up to <|end|>."""
    device, (ids, stop) = model.cos.device, prompt_ids(text, tokenizer, tuned)
    idx, text = torch.tensor([ids] * config.n, device=device), text + "\n" * tuned  # (n, T)
    generator = torch.Generator(device).manual_seed(config.seed)
    rows, shown, start = [[] for _ in range(config.n)], "", time.perf_counter()
    stream = model.stream(
        idx, config.max_new_tokens, config.temperature, config.top_k, generator, stop, config.top_p
    )
    for new in stream:  # (n, 1)
        for row, token in zip(rows, new.flatten().tolist()):
            if stop not in row[-1:]:  # its text has not ended
                row.append(token)
        if config.n == 1:  # all but a character whose last bytes are still to come
            ready = text + tokenizer.decode(i for i in rows[0] if i != stop).rstrip("\ufffd")
            print(ready[len(shown) :], end="", flush=True)
            shown = ready
    seconds, count = time.perf_counter() - start, sum(map(len, rows))
    for row in rows:
        whole = text + tokenizer.decode(i for i in row if i != stop)
        print(whole[len(shown) :] + "\n")
    speed = f"{count} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens/s, prompt included"
    print(speed, file=sys.stderr)
