"""Look at a trained model: `python eval.py COMMAND [MODEL] [--option value ...]`.

    loss        nats per token and bits per byte on held-out text
    sample      continue prompts; a pretrained model completes text, it does not answer
    choice      multiple choice by log-likelihood
    tournament  checkpoints continue the same prompts, and a judge compares them
    report      a page on a run; `compare RUN RUN ...` puts several into one picture

MODEL: a preset's name, or the folder of a run, of a checkpoint or of an export. `loss` and `choice`
append their figures to eval.jsonl in the folder of the run or export. Works with the raw module, on
one device. Next: model.py has generate(), instruments/ most of the last three.
"""

import contextlib
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import data
from config import PRESETS, Preset
from machinery import checkpoint, cli, ranks, shards
from model import GPT, GPTConfig
from tokenizer import Tokenizer


@torch.no_grad()
def bits_per_byte(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], token_bytes: Tensor, rows: int = 0
) -> tuple[float, float]:
    """Loss in nats per token and in bits per byte of text, over all ranks' batches.

    Bits per byte does not depend on the tokenizer: total nats of the targets that stand for text,
    over ln 2, over the bytes of that text. Special tokens (0 bytes) are left out of it, but count
    in the mean loss. batches: inputs and targets (B, T), as many on every rank (the ranks of a
    sharded model run in lockstep). token_bytes: (V,) bytes per token id. rows: of every forward
    pass, since a compiled model is compiled for one shape; a smaller batch is padded with copies of
    its first row, which are not scored.
    """
    parts = []  # read after the loop, so that the host never waits for the device in between
    training = model.training
    model.eval()
    for inputs, targets in batches:
        n = len(inputs)
        fill = torch.arange(max(n, rows), device=inputs.device)
        fill = fill * (fill < n)  # 0 .. n - 1, then 0
        nats = model(inputs[fill], targets[fill], reduction="none")[:n]  # (n, T)
        size = token_bytes[targets]  # (n, T)
        sums = (nats, torch.ones_like(nats), nats * (size > 0), size)
        parts.append(torch.stack([x.sum(dtype=torch.float32) for x in sums]))
    model.train(training)
    total = torch.stack(parts).cpu().double().sum(0)  # nats, targets, text nats, bytes
    if dist.is_initialized():
        dist.all_reduce(total)
    nats, targets, text_nats, n_bytes = total.tolist()
    return nats / targets, text_nats / math.log(2) / n_bytes


# ------------------------------------------------------------------------- which model


@dataclass(frozen=True)
class EvalConfig:
    """Which model to look at."""

    run_dir: str = ""
    """Folder of the run; empty: runs/PRESET."""
    checkpoint: str = ""
    """A checkpoint's or an export's folder; empty: the newest valid checkpoint of the run."""
    data_dir: str = ""
    """Data folder; empty: the one that the run was trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the computation; auto: bf16 where the hardware has it."""


def is_export(path: Path) -> bool:
    """Whether export.py wrote this folder."""
    config = path / "config.json"
    return config.is_file() and "nano2049" in config.read_text() and not is_run(path)


def is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir()


def find_model(word: str) -> dict[str, str]:
    """MODEL, the first word after the command -> the options that it stands for."""
    path = Path(word)
    if word in PRESETS:
        return dict(run_dir=f"runs/{word}")
    if is_run(path):
        return dict(run_dir=word)
    if (path / "trainer.json").exists() or is_export(path):
        return dict(checkpoint=word)
    runs = sorted(str(p.parent) for p in Path("runs").glob("*/checkpoints"))
    steps = map(str, checkpoint.checkpoints(path.parent))
    raise ValueError(
        f"{word!r} is neither a preset ({', '.join(PRESETS)}) nor the folder of a run (there are: "
        f"{', '.join(runs) or 'none'}), of a checkpoint "
        f"{f'({path.parent} has: ' + names + ') ' if (names := ', '.join(steps)) else ''}"
        "or of an export"
    )


def load_model(config: EvalConfig) -> tuple[GPT, dict]:
    """The model with its weights; what its trainer recorded, and `path`, the folder it is from."""
    path, device = Path(config.checkpoint), ranks.pick_device(config.device)
    dtype = ranks.pick_dtype(device, config.dtype)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new length of the cache anew
    if config.checkpoint and is_export(path):
        from hf.mapping import load_exported

        model, trainer = load_exported(path, device, dtype)
    else:
        root = Path(config.run_dir) / "checkpoints"
        path = path if config.checkpoint else checkpoint.latest_valid(root)
        if path is None or not path.exists():
            raise ValueError(
                f"there is no checkpoint in {path or root}; train one first: torchrun train.py "
                f"{Path(config.run_dir).name}"
            )
        trainer = checkpoint.read_trainer(path)
        if unknown := sorted(trainer["model"].keys() - GPTConfig.__dataclass_fields__.keys()):
            raise ValueError(
                f"{path} has {', '.join(unknown)} in its configuration, which this model.py does "
                "not know; use the model.py that it was trained with"
            )
        with torch.device("meta"):
            model = GPT(GPTConfig(**trainer["model"]), compute_dtype=dtype)
        model.to_empty(device=device)
        model.init_weights()  # the rotary tables; the weights are overwritten
        checkpoint.load_model(path, model, verified=not config.checkpoint)
    print(
        f"{path}: step {trainer['step']:,}, {trainer['tokens']:,} tokens; computed in "
        f"{str(dtype).removeprefix('torch.')}"
    )
    return model.eval(), trainer | {"path": str(path)}


def open_data(config: EvalConfig, trainer: dict) -> shards.Manifest:
    """The data that the model was trained on, or another folder of the same tokenizer."""
    folder = config.data_dir or trainer.get("data_dir")
    if not folder:
        raise ValueError(f"{trainer['path']} does not say what it was trained on; give --data_dir")
    manifest = shards.Manifest.load(folder)
    if manifest.tokenizer_sha256 != trainer["identity"]["tokenizer_sha256"]:
        raise ValueError(
            f"{manifest.dir} has a different tokenizer from that of {trainer['path']}; give the "
            "folder of the data it was trained on with --data_dir"
        )
    return manifest


def open_tokenizer(config: EvalConfig, trainer: dict) -> Tokenizer:
    """An export has its own tokenizer.json; a checkpoint's is in the data folder."""
    own = Path(trainer["path"], "tokenizer.json")
    return Tokenizer.load(own if own.exists() else open_data(config, trainer).tokenizer_file())


def load(config: EvalConfig) -> tuple[GPT, dict, shards.Manifest]:
    """The model, what its trainer recorded, and its data."""
    model, trainer = load_model(config)
    return model, trainer, open_data(config, trainer)


def run_of(path: str | Path) -> Path:
    """The folder of the run that a checkpoint (or its copy in a mirror) is of; else the path."""
    path = Path(os.path.abspath(path))
    if not path.name.startswith("step_"):
        return path
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


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
    batch: int = 8
    """Rows per forward pass."""


def loss(config: LossConfig) -> None:
    """Print the loss, and append it to eval.jsonl."""
    if config.batch < 1 or config.rows < 0:
        raise ValueError(
            f"--batch {config.batch} must be 1 or more, --rows {config.rows} 0 or more"
        )
    model, trainer, manifest = load(config)
    device = model.cos.device
    batches = data.val_batches(manifest, config.batch, config.rows, device=device)
    token_bytes = torch.from_numpy(manifest.token_bytes()).to(device)
    nats, bpb = bits_per_byte(model, batches, token_bytes)
    rows = min(config.rows or manifest.rows("val"), manifest.rows("val"))
    print(
        f"validation: {nats:.4f} nats per token, {bpb:.4f} bits per byte, on {rows:,} rows of "
        f"{manifest.dir} (fingerprint {manifest.fingerprint[:12]})"
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
    n: int = 1
    """Samples of each prompt, drawn together; a single one is printed as it comes."""
    max_new_tokens: int = 80
    """Tokens to add."""
    temperature: float = 0.8
    """0: always the likeliest token; 1: the model's own probabilities."""
    top_k: int = 50
    """Draw among this many of the likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that hold this share of the probability; 1: among all."""
    seed: int = 0
    """Seed of the draws."""


def find_prompts(config: SampleConfig, path: Path) -> tuple[str, ...]:
    """The prompts of the command line, of standard input, or of the preset; says which."""
    if config.prompt:
        return config.prompt
    with contextlib.suppress(OSError):  # it may be closed
        mode = os.fstat(0).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISREG(mode):
            print("prompts: the lines of standard input, up to its end", flush=True)
            with open(0, encoding="utf-8", errors="replace", closefd=False) as file:
                if lines := tuple(line.rstrip("\n") for line in file if line.strip()):
                    return lines
            print("standard input is empty")
    name = run_of(path).name
    if name in PRESETS:
        print(f"prompts: those of the preset {name}")
        return PRESETS[name].prompts
    print("prompts: three that suit any text; give your own with --prompt")
    return Preset.prompts


def sample(config: SampleConfig) -> None:
    """Print continuations of each prompt, and on standard error the speed. The prompt begins a
    document, so BOS goes before it."""
    if config.n < 1:
        raise ValueError(f"--n {config.n} samples; give 1 or more")
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
            if bos not in row[-1:]:
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


# ------------------------------------------------------------------------------- choice


@dataclass(frozen=True)
class ChoiceConfig(EvalConfig):
    """Multiple choice: which answer does the model find likeliest?"""

    task: tuple[str, ...] = ("continuation",)
    """continuation (held-out text, no download), the exams of instruments/exams.py (hellaswag,
    arc_easy, mmlu, enem, oab ...; NAME=FOLDER reads a local copy), or JSONL files with `query`,
    `choices` and `gold`."""
    mode: Literal["auto", "letter", "answer", "options"] = "auto"
    """letter: the options are shown, their letters compared; answer: nothing is shown, the full
    answers are compared; options: shown, and the full answers compared. auto: the exam's usual."""
    shots: int = 0
    """Solved examples before each question."""
    limit: int = 0
    """Ask only the first N questions; 0: all."""
    batch: int = 8
    """Answers per forward pass."""
    save: str = ""
    """Write each question's log-likelihoods to this JSONL file."""
    dtype: Literal["auto", "bf16", "fp32"] = "fp32"
    """Dtype of the computation. Only fp32 gives the figures of lm_eval: bf16 moves an answer's
    log-likelihood by a tenth of a nat, which decides close questions."""


def choice(config: ChoiceConfig) -> None:
    """Print the accuracy of each task, and append it to eval.jsonl."""
    from instruments.choice import run

    model, trainer = load_model(config)
    tokenizer = open_tokenizer(config, trainer)
    for figures in run(config, model, tokenizer, lambda: open_data(config, trainer)):
        keep_record(config, trainer, **figures)


# ------------------------------------------------------------------------------------ tournament


@dataclass(frozen=True)
class TournamentConfig:
    """Let checkpoints continue the same prompts, and a judge compare what they wrote."""

    run_dir: str = ""
    """Folder of the run, for tournament.json; empty: runs/PRESET."""
    players: tuple[str, ...] = ()
    """Checkpoint folders; empty: all checkpoints of the run."""
    data_dir: str = ""
    """Data folder; empty: the one that the players were trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    prompts: tuple[str, ...] = ()
    """Texts: the first prompt_tokens of each are continued, the rest is what the human wrote.
    Empty: held-out documents of the data."""
    n_prompts: int = 60
    """Held-out documents to take."""
    prompt_tokens: int = 32
    """Tokens of a text that the players are given."""
    max_new_tokens: int = 64
    """Tokens that they add."""
    seed: int = 0
    """Of the choice of documents and of the draws."""
    judge: str = ""
    """A checkpoint, or a run's folder (its newest), which judges by likelihood; empty: the run's
    newest, which then does not play."""
    judge_url: str = ""
    """Ask an OpenAI-compatible server instead: `http://127.0.0.1:8000/v1`. A key, if it needs one,
    is read from OPENAI_API_KEY."""
    judge_model: str = ""
    """The model's name on that server."""
    judge_timeout: float = 60.0
    """Seconds to wait for one answer of the server."""


def tournament(config: TournamentConfig) -> None:
    """Print ratings of the players, and write them to RUN_DIR/tournament.json."""
    from instruments.tournament import hold

    fixed = dict(run_dir=config.run_dir, data_dir=config.data_dir, device=config.device)
    hold(config, lambda path: load(EvalConfig(checkpoint=str(path), **fixed)), bits_per_byte)


# ---------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class ReportConfig(EvalConfig):
    """A page on a run, RUN_DIR/report.html and report.md, with samples of its checkpoints."""

    prompt: tuple[str, ...] = ()
    """Texts to continue; empty: the beginnings of some held-out rows."""
    max_new_tokens: int = 60
    """Tokens to add."""
    usd_per_hour: float = 0.0
    """What the machine costs; 0: as train.py was told, if it ran on a GPU."""


def report(config: ReportConfig) -> None:
    """Sample from the checkpoints that have no samples yet; then write the page."""
    from instruments import report

    if config.checkpoint:
        raise ValueError(
            f"{config.checkpoint} is not the folder of a run; a report is of a whole run: "
            "python eval.py report RUN_DIR"
        )
    report.Run(config.run_dir)  # refuses a folder that is not a run's
    report.take_samples(config, load)
    print(report.write(config.run_dir, config.usd_per_hour))


def compare(run_dirs: list[str]) -> None:
    """Print bits per byte of several runs at equal tokens, and where their picture is."""
    from instruments import report

    print(report.compare(run_dirs))


COMMANDS = {
    "loss": (loss, LossConfig),
    "sample": (sample, SampleConfig),
    "choice": (choice, ChoiceConfig),
    "tournament": (tournament, TournamentConfig),
    "report": (report, ReportConfig),
    "compare": (compare, None),  # its words are folders of runs, not a preset
}


def main(argv: list[str]) -> int:
    """`eval.py COMMAND [MODEL] [--option value ...]`"""
    if not argv:
        raise ValueError(f"eval.py needs a command: {', '.join(COMMANDS)}")
    if argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    run, kind = cli.find("command", argv[0], COMMANDS)
    if kind is None:
        run(argv[1:])
        return 0
    word, options = cli.first_word(argv[1:])
    given = find_model(word)
    if not given.keys() <= {field.name for field in fields(kind)}:
        raise ValueError(f"eval.py {argv[0]} needs a preset or a run; {word} is neither")
    run(cli.read_options(kind(**given), options, f"eval.py {argv[0]}"))
    return 0


if __name__ == "__main__":
    cli.run(main)
