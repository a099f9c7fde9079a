"""Look at a trained model: `python eval.py COMMAND [MODEL] [--option value ...]`.

    loss        nats per token and bits per byte on held-out text
    sample      continue prompts, or answer them if the model was tuned on conversations
    chat        talk with a model that was tuned on conversations
    choice      multiple choice by log-likelihood; CORE, with GPT-2's beside it
    look        a page on what the model does inside: where it looks, what each head is worth
    tournament  checkpoints continue the same prompts, and a judge compares them
    serve       a page to try it, and OpenAI's protocol for programs
    report      a page on a run; `compare RUN RUN ...` puts several into one picture

MODEL: a preset's name; the folder of a run, a checkpoint or an export; or a stock model, its folder
or hf:REPO. `loss` and `choice` append their figures to eval.jsonl in the folder of the run or
model. Works with the raw module, on one device. Next: model.py has stream(), flops.py the metric,
instruments/ all commands but `loss`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch

import data
from config import Count, UsageError
from flops import score_text
from hf import imported
from machinery import cli, trained
from machinery.log import sources_line
from machinery.trained import EvalConfig, keep_record, open_data

load_model = partial(trained.load_model, read_export=imported.load)


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
    model, trainer = load_model(config)
    manifest, device = open_data(config, trainer), model.cos.device
    if (long := manifest.row_len - 1) > (most := model.config.seq_len):
        why = f"the rows of {manifest.dir} have {long} inputs, but {trainer['path']} reads {most}"
        raise UsageError(f"{why}; docs/context.md tells how it learns to read more")
    batches = data.val_batches(manifest, config.batch, config.rows, device=device)
    token_bytes = torch.from_numpy(manifest.token_bytes()).to(device)
    sources = [source for source, _ in data.val_places(manifest, config.rows)]
    nats, bpb, by_source = score_text(model, batches, token_bytes, 0, sources, manifest.sources)
    there = manifest.rows("val")
    rows = min(config.rows or there, there)
    part = "all" if rows == there else f"{rows:,} of the"
    print(
        f"validation: {nats:.4f} nats per token, {bpb:.4f} bits per byte{sources_line(by_source)}, "
        f"on {part} {there:,} rows of {manifest.dir} (fingerprint {manifest.fingerprint[:12]})"
    )
    figures = dict(val_loss=nats, val_bpb=bpb, val_bpb_by_source=by_source, rows=rows)
    keep_record(config, trainer, **figures, data_fingerprint=manifest.fingerprint)


# ----------------------------------------------------------------------------- the commands
# Each gives what to call, and its options; an instrument is imported when its command is asked for.


def sample() -> tuple[Callable, type]:
    from instruments import sample

    return partial(sample.sample, load_model=load_model), sample.SampleConfig


def chat() -> tuple[Callable, type]:
    from instruments import chat

    return partial(chat.talk, load_model=load_model), chat.ChatConfig


def choice() -> tuple[Callable, type]:
    from instruments import choice

    tools = dict(load_model=load_model, keep_record=keep_record)
    return partial(choice.answer_all, **tools), choice.ChoiceConfig


def look() -> tuple[Callable, type]:
    from instruments import look

    return partial(look.look, load_model=load_model), look.LookConfig


def tournament() -> tuple[Callable, type]:
    from instruments import tournament

    return partial(tournament.hold, load_model=load_model), tournament.TournamentConfig


def serve() -> tuple[Callable, type]:
    from instruments import serve

    return partial(serve.run, load_model=load_model), serve.ServeConfig


def report() -> tuple[Callable, type]:
    from instruments import report

    return partial(report.sample_and_write, load_model=load_model), report.ReportConfig


def compare() -> tuple[Callable, None]:
    from instruments import report

    return lambda folders: print(report.compare(folders)), None


COMMANDS = {
    "loss": lambda: (loss, LossConfig),
    "sample": sample,
    "chat": chat,
    "choice": choice,
    "look": look,
    "tournament": tournament,
    "serve": serve,
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
