"""Look at a trained model: `python eval.py COMMAND [MODEL] [--option value ...]`.

    loss        nats per token and bits per byte on held-out text
    sample      continue prompts; a pretrained model completes text, it does not answer
    choice      multiple choice by log-likelihood
    tournament  checkpoints continue the same prompts, and a judge compares them
    report      a page on a run; `compare RUN RUN ...` puts several into one picture

MODEL: a preset's name; the folder of a run, a checkpoint or an export; or a stock model, its folder
or hf:REPO. `loss` and `choice` append their figures to eval.jsonl in the folder of the run or
model. Works with the raw module, on one device. Next: model.py has stream(), flops.py the metric,
instruments/ the last three commands.
"""

import json
import os
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import torch

import data
from config import PRESETS, Count, Preset, Share, UsageError
from flops import bits_per_byte
from hf import imported
from machinery import cli, trained
from machinery.shards import Manifest
from machinery.trained import EvalConfig, open_data, open_tokenizer, run_of
from model import GPT
from tokenizer import Tokenizer

load_model = partial(trained.load_model, read_export=imported.load)


def load(config: EvalConfig) -> tuple[GPT, dict, Manifest]:
    """The model, trainer.json, and the data."""
    model, trainer = load_model(config)
    return model, trainer, open_data(config, trainer)


def keep_record(config: EvalConfig, trainer: dict, **figures) -> None:
    """Append a line to eval.jsonl in the folder of the run or the export, if it can be written."""
    run_dir = run_of(trainer["path"])
    line = asdict(config) | dict(
        run_dir=str(run_dir), step=trainer["step"], tokens=trainer["tokens"], **figures
    )
    try:
        with open(run_dir / "eval.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        reason = f"{run_dir / 'eval.jsonl'}: {error.strerror}"
        print(f"the figures above could not be written to {reason}", file=sys.stderr)


# --------------------------------------------------------------------------------- loss


@dataclass(frozen=True)
class LossConfig(EvalConfig):
    """Bits per byte on the validation split."""

    rows: int = 0
    """Validation rows to score; 0: all."""
    batch: Count = 8
    """Rows per forward pass."""


def loss(config: LossConfig) -> None:
    """Print the loss, and append it to eval.jsonl."""
    model, trainer, manifest = load(config)
    device = model.cos.device
    batches = data.val_batches(manifest, config.batch, config.rows, device=device)
    token_bytes = torch.from_numpy(manifest.token_bytes()).to(device)
    nats, bpb = bits_per_byte(model, batches, token_bytes)
    there = manifest.rows("val")
    rows = min(config.rows or there, there)
    part = "all" if rows == there else f"{rows:,} of the"
    print(
        f"validation: {nats:.4f} nats per token, {bpb:.4f} bits per byte, on {part} {there:,} rows "
        f"of {manifest.dir} (fingerprint {manifest.fingerprint[:12]})"
    )
    figures = dict(val_loss=nats, val_bpb=bpb, rows=rows, data_fingerprint=manifest.fingerprint)
    keep_record(config, trainer, **figures)


# ------------------------------------------------------------------------------- sample


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
    if name in PRESETS:
        print(f"prompts: those of the preset {name}")
        return PRESETS[name].prompts
    print("prompts: three that suit any text; give your own with --prompt")
    return Preset.prompts


def has_input() -> bool:
    """Whether standard input is a pipe or a file; it may also be closed."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def sample(config: SampleConfig) -> None:
    """Print continuations of each prompt, and on standard error the speed. The prompt begins a
    document, so BOS goes before it."""
    model, trainer = load_model(config)
    tokenizer = open_tokenizer(config, trainer)
    for prompt in find_prompts(config, Path(trainer["path"])):
        # In training text a space belongs to the word after it (" name" is one token), so a prompt
        # that ends in one is unlike any text: the model does better without.
        text = prompt.rstrip(" ") or prompt
        if text != prompt:
            print(f"the spaces at the end of {prompt!r} are left out: words begin with theirs")
        print(f"--- {prompt!r}")
        continue_prompt(model, tokenizer, text, config)


def continue_prompt(model: GPT, tokenizer: Tokenizer, text: str, config: SampleConfig) -> None:
    """Draw and print config.n continuations of a text, each up to the next BOS."""
    device, bos = model.cos.device, tokenizer.bos_id
    idx = torch.tensor([[bos, *tokenizer.encode(text)]] * config.n, device=device)  # (n, T)
    generator = torch.Generator(device).manual_seed(config.seed)
    rows, shown, start = [[] for _ in range(config.n)], "", time.perf_counter()
    stream = model.stream(
        idx, config.max_new_tokens, config.temperature, config.top_k, generator, bos, config.top_p
    )
    for new in stream:  # (n, 1)
        for row, token in zip(rows, new.flatten().tolist()):
            if bos not in row[-1:]:  # its text has not ended
                row.append(token)
        if config.n == 1:  # all but a character whose last bytes are still to come
            ready = text + tokenizer.decode(i for i in rows[0] if i != bos).rstrip("\ufffd")
            print(ready[len(shown) :], end="", flush=True)
            shown = ready
    seconds, count = time.perf_counter() - start, sum(map(len, rows))
    for row in rows:
        whole = text + tokenizer.decode(i for i in row if i != bos)
        print(whole[len(shown) :] + "\n")
    speed = f"{count} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens/s, prompt included"
    print(speed, file=sys.stderr)


# ----------------------------------------------------------------------------- the commands
# Each gives what to call, and its options; an instrument is imported when its command is asked for.


def choice() -> tuple[Callable, type]:
    from instruments import choice

    tools = dict(load_model=load_model, keep_record=keep_record)
    return partial(choice.answer_all, **tools), choice.ChoiceConfig


def tournament() -> tuple[Callable, type]:
    from instruments import tournament

    return partial(tournament.hold, load_model=load_model), tournament.TournamentConfig


def report() -> tuple[Callable, type]:
    from instruments import report

    return partial(report.sample_and_write, load_model=load_model), report.ReportConfig


def compare() -> tuple[Callable, None]:
    from instruments import report

    return lambda folders: print(report.compare(folders)), None


COMMANDS = {
    "loss": lambda: (loss, LossConfig),
    "sample": lambda: (sample, SampleConfig),
    "choice": choice,
    "tournament": tournament,
    "report": report,
    "compare": compare,  # has no options: its words are folders of runs
}


def main(argv: list[str]) -> int:
    """`eval.py COMMAND [MODEL] [--option value ...]`"""
    if not argv:
        raise UsageError(f"eval.py needs a command: {', '.join(COMMANDS)}")
    if argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    run, kind = cli.find("command", argv[0], COMMANDS)()
    if kind is None:
        run(argv[1:])
        return 0
    word, options = cli.first_word(argv[1:])
    given = trained.find_model(word)
    if not given.keys() <= {field.name for field in fields(kind)}:
        raise UsageError(f"eval.py {argv[0]} needs a preset or a run; {word} is neither")
    run(cli.read_options(kind(**given), options, f"eval.py {argv[0]}"))
    return 0


if __name__ == "__main__":
    cli.run(main)
