"""`eval.py sample`: what a model writes after a prompt, or answers if it was tuned.

Prompts come from the command line, from the preset or from held-out text. Next: model.py has
`stream`, chat.py keeps a conversation.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

import torch

from config import Count, Preset, Share, UsageError, find_preset
from machinery.errors import DataError
from machinery.output import printable
from machinery.shards import Manifest
from machinery.trained import EvalConfig, Trained
from model import GPT
from preparation.chat import prompt_ids
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


@dataclass(frozen=True)
class SampleConfig(DrawConfig):
    """Continue a prompt."""

    prompt: tuple[str, ...] = ()
    """Texts to continue; none: the preset's own, or the first words of held-out text."""
    n: Count = 1
    """Samples of each prompt, drawn together."""
    max_new_tokens: Count = 80
    """Tokens to add."""


def find_prompts(run: str, manifest: Manifest | None) -> tuple[str, ...]:
    """The prompts of the preset that a run is named after, if the data are the preset's or gone
    (None); or how held-out documents begin."""
    preset = find_preset(run)
    usual = (preset or Preset).prompts
    own = preset and preset.data.source
    if manifest is None or own == tuple(source.spec for source in manifest.facts.sources):
        return usual
    known = manifest.facts.made.get("beginnings", "").splitlines()[:3]
    return tuple(dict.fromkeys(filter(None, known))) or usual


def prompts_of(loaded: Trained) -> tuple[str, ...]:
    """`find_prompts`, for a loaded model."""
    manifest = None
    with suppress(UsageError, DataError):  # it may be gone
        manifest = loaded.data
    return find_prompts(loaded.run_dir.name, manifest)


def sample(config: SampleConfig, load_model: Callable) -> None:
    """`eval.py sample`: print continuations of each prompt. The prompt begins a document, so BOS
    goes before it; for a tuned model it is a question."""
    loaded = load_model(config)
    draw_on_one_thread(loaded.model)
    tuned = loaded.provenance.tuned
    if tuned:
        print("tuned on conversations: each prompt is a question, and the answer follows")
    for prompt in config.prompt or prompts_of(loaded):
        # In training text a space belongs to the word after it (" name" is one token), so a prompt
        # that ends in one is unlike any text: the model does better without.
        prompt = prompt.rstrip(" ") or prompt
        texts = continuations(loaded.model, loaded.tokenizer, [prompt] * config.n, tuned, config)
        print(printable(f"--- {prompt!r}"))
        for text in texts:
            print(printable(prompt + "\n" * tuned + text), end="\n\n")


def continuations(
    model: GPT, tokenizer: Tokenizer, prompts: list[str], tuned: bool, config: SampleConfig
) -> list[str]:
    """What the model draws after each prompt, up to the next BOS; or, if it was tuned, its answer,
    up to <|end|>. Prompts of one length are drawn together."""
    device = model.cos.device
    generator = torch.Generator(device).manual_seed(config.seed)
    batches = defaultdict(dict)  # length -> place -> ids
    for place, prompt in enumerate(prompts):
        ids, stop = prompt_ids(prompt, tokenizer, tuned)
        batches[len(ids)][place] = ids
    texts = [""] * len(prompts)
    for length, batch in batches.items():
        out = model.generate(  # (n, T + new)
            torch.tensor([*batch.values()], device=device),  # (n, T)
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop_id=stop,
            generator=generator,
        )
        for place, row in zip(batch, out[:, length:].tolist()):
            texts[place] = tokenizer.decode(takewhile(lambda i: i != stop, row))
    return texts
