"""Look at a trained model: `python eval.py COMMAND [MODEL] [--option value ...]`.

    loss        nats per token and bits per byte on held-out text
    sample      continue prompts, or answer them if the model was tuned on conversations
    chat        talk with a model that was tuned on conversations
    choice      multiple choice by log-likelihood, from a file of questions
    core        the CORE score, with GPT-2's beside it
    look        a page on what the model does inside: where it looks, what each head is worth
    tournament  models write after the same prompts, and a judge compares what they wrote
    report      a page on a run; `compare RUN RUN ...` puts several into one picture
    plan        memory, hours and loss of a run before it runs; the best one for an hour, or $50

MODEL: the name of a preset; the folder of a run, a checkpoint or an export; or a stock model by its
folder or hf:REPO. `loss`, `choice` and `core` append their figures to eval.jsonl in the folder of
the run or model. Uses the module uncompiled, on one device. bits_per_byte.py has the metric,
instruments/ the commands. Next: session.py.
"""

import machinery.needs  # first: it says which packages are missing

import importlib
from dataclasses import replace
from functools import partial

from config import UsageError
from machinery import cli, shards, trained


def read_export(*args):
    """An export or a stock model: hf/ is imported only for one."""
    from hf import imported

    return imported.load(*args)


load_model = partial(trained.load_model, read_export=read_export)

# command -> (module, function, class of its options; if empty, the function gets the words typed)
COMMANDS = {
    "loss": ("instruments.exams.loss", "score_held_out", "LossConfig"),
    "sample": ("instruments.talk.sample", "sample", "SampleConfig"),
    "chat": ("instruments.talk.chat", "talk", "ChatConfig"),
    "choice": ("instruments.exams.choice", "answer_all", "ChoiceConfig"),
    "core": ("instruments.exams.core", "score_core", "CoreConfig"),
    "look": ("instruments.pages.look", "look", "LookConfig"),
    "tournament": ("instruments.exams.tournament", "play", "TournamentConfig"),
    "report": ("instruments.pages.report", "rewrite", "ReportConfig"),
    "compare": ("instruments.pages.report", "compare", ""),
    "plan": ("instruments.run.forecast", "main", ""),
}


def with_prompts(words: list[str]) -> list[str]:
    """The words after the model: those before an option are prompts, and -p is --prompt."""
    words = ["--prompt" if word == "-p" else word for word in words]
    return words if not words or words[0].startswith("-") else ["--prompt", *words]


def main(argv: list[str]) -> int:
    """`eval.py COMMAND [MODEL] [--option value ...]`"""
    if not argv:
        raise UsageError(f"eval.py needs a command: {', '.join(COMMANDS)}")
    command, *words = argv
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    room, function, options = cli.lookup("command", command, COMMANDS)
    module = importlib.import_module(room)
    run = getattr(module, function)
    if not options:
        return run(words) or 0
    kind = getattr(module, options)
    word, rest = cli.first_word(words)
    given = trained.find_model(word)
    if not given.keys() <= vars(kind()).keys():
        raise UsageError(f"eval.py {command} needs a preset or a run; {word} is neither")
    if command == "sample":
        rest = with_prompts(rest)
    config = cli.read_options(kind(**given), rest, f"eval.py {command}")
    folder = getattr(config, "data_dir", "")
    if folder and shards.is_published(folder):
        from stores import stage

        config = replace(config, data_dir=stage.copy(folder))
    run(config, load_model)
    return 0


if __name__ == "__main__":
    cli.run(main)
