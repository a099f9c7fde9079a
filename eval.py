"""Look at a trained model: `python eval.py loss [PRESET]`, `python eval.py sample [PRESET]`.

Reads RUN_DIR's newest valid checkpoint (or --checkpoint) and the data folder it was trained on.
`loss` gives nats per token and bits per byte on the whole validation split; `sample` continues a
prompt. A pretrained model completes text; it does not answer. Works with the raw module, on one
device. Next: train.py made the checkpoint, model.py has generate().
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import data
from machinery import checkpoint, cli, ranks, shards
from model import GPT, GPTConfig


@torch.no_grad()
def bits_per_byte(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], token_bytes: Tensor
) -> tuple[float, float]:
    """Loss in nats per token and in bits per byte of text, over all ranks' batches.

    Bits per byte does not depend on the tokenizer: total nats of the targets that stand for text,
    over ln 2, over the bytes of that text. Special tokens (0 bytes) are left out of it, and are in
    the mean loss. batches: inputs and targets (B, T); every rank must bring as many batches (the
    parts of a sharded model compute in step). token_bytes: (V,) bytes per token id.
    """
    total = torch.zeros(4, dtype=torch.float64)  # nats, targets, text nats, bytes: on the host
    training = model.training
    model.eval()
    for inputs, targets in batches:
        nats = model(inputs, targets, reduction="none")  # (B, T)
        size = token_bytes[targets]  # (B, T)
        sums = (nats, torch.ones_like(nats), nats * (size > 0), size)
        total += torch.stack([x.sum(dtype=torch.float32) for x in sums]).cpu()
    model.train(training)
    if dist.is_initialized():
        dist.all_reduce(total)
    nats, targets, text_nats, n_bytes = total.tolist()
    return nats / targets, text_nats / math.log(2) / n_bytes


@dataclass(frozen=True)
class EvalConfig:
    """Which model to look at."""

    run_dir: str = ""
    """Folder of the run; empty: runs/PRESET."""
    checkpoint: str = ""
    """A checkpoint folder; empty: the newest valid one of the run."""
    data_dir: str = ""
    """Data folder; empty: the one that the run was trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""


@dataclass(frozen=True)
class LossConfig(EvalConfig):
    """Bits per byte on the validation split."""

    rows: int = 0
    """Validation rows to score; 0: all."""
    batch: int = 8
    """Rows per forward pass."""


@dataclass(frozen=True)
class SampleConfig(EvalConfig):
    """Continue a prompt."""

    prompt: tuple[str, ...] = ()
    """Texts to continue, one sample each."""
    max_new_tokens: int = 80
    """Tokens to add."""
    temperature: float = 0.8
    """0: always the likeliest token; 1: as the model believes."""
    top_k: int = 50
    """Draw among this many of the likeliest tokens; 0: among all."""
    seed: int = 0
    """Of the draws."""


def load(config: EvalConfig) -> tuple[GPT, dict, shards.Manifest]:
    """The model with its weights, what its trainer saved, and its data."""
    root = Path(config.run_dir) / "checkpoints"
    path = Path(config.checkpoint) if config.checkpoint else checkpoint.latest_valid(root)
    if path is None or not path.exists():
        raise ValueError(
            f"there is no checkpoint in {path or root}; train one first: torchrun train.py "
            f"{Path(config.run_dir).name}"
        )
    trainer = checkpoint.read_trainer(path)
    device = ranks.pick_device(config.device)
    with torch.device("meta"):
        model = GPT(GPTConfig(**trainer["model"]), compute_dtype=ranks.pick_dtype(device))
    model.to_empty(device=device)
    model.init_weights()  # the rotary tables; the weights are overwritten
    checkpoint.load_model(path, model, verified=not config.checkpoint)
    manifest = shards.Manifest.load(config.data_dir or trainer["data_dir"])
    if manifest.tokenizer_sha256 != trainer["identity"]["tokenizer_sha256"]:
        raise ValueError(
            f"{manifest.dir} has another tokenizer than {path} was trained with; "
            f"give its data folder with --data_dir"
        )
    print(
        f"{path}: step {trainer['step']:,}, {trainer['tokens']:,} tokens; computed in "
        f"{str(model.compute_dtype).removeprefix('torch.')}"
    )
    return model.eval(), trainer, manifest


def score(config: LossConfig) -> None:
    """Print the loss, and append it to RUN_DIR/eval.jsonl."""
    model, trainer, manifest = load(config)
    device = model.cos.device
    batches = data.val_batches(manifest, config.batch, config.rows, device=device)
    token_bytes = torch.from_numpy(manifest.token_bytes()).to(device)
    loss, bpb = bits_per_byte(model, batches, token_bytes)
    rows = min(config.rows or manifest.rows("val"), manifest.rows("val"))
    print(
        f"validation: {loss:.4f} nats per token, {bpb:.4f} bits per byte, on {rows:,} rows of "
        f"{manifest.dir} (fingerprint {manifest.fingerprint[:12]})"
    )
    record = dict(step=trainer["step"], tokens=trainer["tokens"], val_loss=loss, val_bpb=bpb,
                  rows=rows, data_fingerprint=manifest.fingerprint)  # fmt: skip
    with open(Path(config.run_dir) / "eval.jsonl", "a") as file:
        file.write(json.dumps(record | asdict(config)) + "\n")


def sample(config: SampleConfig) -> None:
    """Print a continuation of each prompt. The prompt begins a document, so BOS goes before it."""
    from tokenizer import Tokenizer

    model, _, manifest = load(config)
    tokenizer = Tokenizer.load(manifest.dir / "tokenizer.json")
    device = model.cos.device
    for prompt in config.prompt:
        generator = torch.Generator(device).manual_seed(config.seed)
        # In training text a space belongs to the word after it (" name" is one token), so a prompt
        # that ends in one is unlike any text: the model does better without.
        text = prompt.rstrip(" ") or prompt
        if text != prompt:
            print(f"the spaces at the end of {prompt!r} are left out: words begin with theirs")
        out = model.generate(
            torch.tensor([[manifest.bos_id, *tokenizer.encode(text)]], device=device),
            config.max_new_tokens, config.temperature, config.top_k, generator,
            stop_id=manifest.bos_id,
        )[0].tolist()  # fmt: skip
        print(f"--- {prompt!r}\n{tokenizer.decode([i for i in out if i != manifest.bos_id])}\n")


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

    report.Run(config.run_dir)  # refuses a folder that is not a run's
    report.take_samples(config, load)
    print(report.write(config.run_dir, config.usd_per_hour))


COMMANDS = {
    "loss": (score, LossConfig),
    "sample": (sample, SampleConfig),
    "report": (report, ReportConfig),
}


def main(argv: list[str]) -> int:
    """`eval.py COMMAND [PRESET] [--option value ...]`"""
    if not argv:
        raise ValueError(f"eval.py needs a command: {' or '.join(COMMANDS)}")
    if argv[0] == "compare":  # its words are folders of runs, not a preset
        from instruments import report

        print(report.compare(argv[1:]))
        return 0
    run, kind = cli.find("command", argv[0], COMMANDS)
    name, options = cli.split_preset(argv[1:])
    prompts = cli.find_preset(name).prompts
    default = kind(run_dir=f"runs/{name}", **({"prompt": prompts} if kind is SampleConfig else {}))
    run(cli.read_options(default, options, f"eval.py {argv[0]}"))
    return 0


if __name__ == "__main__":
    cli.run(main)
