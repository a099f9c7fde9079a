"""A trained model by one word: the preset, run, checkpoint or export that it names -> the model.

Reads RUN_DIR's newest valid checkpoint, or the folder that is named, and its tokenizer.json; the
data folder only for held-out text. For the programs that look at a model, eval.py and export.py;
they hand in what reads an export or a stock model (hf/imported.py). Next: checkpoint.py.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from config import PRESETS, GPTConfig, UsageError, find_preset
from machinery import checkpoint, cli, disk, ranks, shards, stage
from machinery.errors import CheckpointError
from model import GPT
from tokenizer import Tokenizer

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the second to be refused in words


@dataclass(frozen=True)
class EvalConfig:
    """Which model to look at."""

    run_dir: str = ""
    """Folder of the run; empty: runs/PRESET."""
    checkpoint: str = ""
    """Folder of a checkpoint, an export or a stock model (or hf:REPO); empty: the newest valid
    checkpoint of the run."""
    data_dir: str = ""
    """Data folder; empty: the one that the run was trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the computation; auto: bf16 where the hardware has it."""


def is_export(path: Path) -> bool:
    """Whether this is the folder of a model for transformers, whole or damaged, or `hf:REPO`; hf/
    reads these."""
    names = [f"{name}{end}" for name in WEIGHTS for end in ("", ".index.json")]
    names.append("generation_config.json")
    return str(path).startswith("hf:") or any((path / name).exists() for name in names)


def find_model(word: str) -> dict[str, str]:
    """MODEL, the first word after the command -> the options that it stands for."""
    path = Path(word)
    if find_preset(word):
        return dict(run_dir=f"runs/{word}")
    if (path / "checkpoints").is_dir():
        return dict(run_dir=word)
    if (path / "trainer.json").exists() or is_export(path):
        return dict(checkpoint=word)
    runs = ", ".join(sorted(str(p.parent) for p in Path("runs").glob("*/checkpoints")))
    near = ", ".join(map(str, checkpoint.checkpoints(path.parent)))
    raise UsageError(
        f"{word!r} is neither a preset ({', '.join(PRESETS)}) nor the folder of a run (there are: "
        f"{runs or 'none'}), of a checkpoint ({path.parent} has: {near or 'none'}) or of an export"
    )


def run_of(path: str | Path) -> Path:
    """The folder of the run that a checkpoint (or its copy in a mirror) is of; else the path."""
    path = Path(os.path.abspath(path))
    if not path.name.startswith("step_"):
        return path
    folder = path.parent
    return folder.parent if folder.name == "checkpoints" else folder


def is_tuned(trainer: dict) -> bool:
    """Whether the data that a model was last trained on held conversations: then it answers."""
    return bool(trainer["identity"].get("conversations"))


def load_model(config: EvalConfig, read_export: Callable) -> tuple[GPT, dict]:
    """The model with its weights; and trainer.json, with `path`, the folder that it is from.
    read_export: hf.imported.load."""
    path, device = Path(config.checkpoint), ranks.pick_device(config.device)
    dtype = ranks.pick_dtype(device, config.dtype)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new length of the cache anew
    if config.checkpoint and is_export(path):
        model, trainer = read_export(path, device, dtype)
    else:
        root = Path(config.run_dir) / "checkpoints"
        path = path if config.checkpoint else checkpoint.latest_valid(root)
        if path is None or not path.exists():
            why = f"there is no checkpoint in {path or root}; train one first"
            raise UsageError(f"{why}: torchrun train.py {Path(config.run_dir).name}")
        try:
            model, trainer = read_checkpoint(path, device, dtype, verified=not config.checkpoint)
        except CheckpointError:
            if config.checkpoint or path.exists():
                raise
            return load_model(config, read_export)  # the run goes on, and has deleted it meanwhile
    said = trainer.get("about") or f"step {trainer['step']:,}, {trainer['tokens']:,} tokens"
    print(f"{path}: {said}; computed in {dtype}")
    return model.eval(), trainer | {"path": str(path)}


def read_checkpoint(path: Path, device, dtype: torch.dtype, verified: bool) -> tuple[GPT, dict]:
    """The model and trainer.json of a checkpoint; verified: its files have just been hashed."""
    trainer = checkpoint.read_trainer(path)
    if unknown := sorted(trainer["model"].keys() - GPTConfig.__dataclass_fields__.keys()):
        raise UsageError(
            f"{path} has {', '.join(unknown)} in its configuration, which this model.py does not "
            "know; use the model.py that it was trained with"
        )
    with torch.device("meta"):
        model = GPT(GPTConfig(**trainer["model"]), compute_dtype=dtype)
    model.to_empty(device=device)
    model.init_weights()  # the rotary tables; the weights are overwritten
    checkpoint.load_model(path, model, verified)
    return model, trainer


def open_tokenizer(config: EvalConfig, trainer: dict) -> Tokenizer:
    """The tokenizer.json of the model's own folder, of its run or of its data, whichever is there.
    One with another hash is named, and not used. An export's has BOS added, and its own hash."""
    if "tokenizer" in trainer:  # a stock model's
        return trainer["tokenizer"]
    path, trained_with = Path(trainer["path"]), trainer["identity"]["tokenizer_sha256"]
    hashes = trainer.get("files", {})  # of an export
    for folder in dict.fromkeys([path.absolute(), run_of(path)]):
        if (file := folder / "tokenizer.json").is_file():
            if disk.has_sha256(file, hashes.get("tokenizer.json", trained_with)):
                return Tokenizer.load(file)
            print(f"warning: {file} is not used: it is not the tokenizer of {path}")
    return Tokenizer.load(open_data(config, trainer).tokenizer_file())


def open_data(config: EvalConfig, trainer: dict) -> shards.Manifest:
    """The data that the model was trained on, or another folder of the same tokenizer."""
    folder = config.data_dir or trainer.get("data_dir") or ""
    if not folder or "://" in folder and not config.data_dir:  # only a URL that was typed is opened
        where = f"was trained on {cli.public(folder)}" if folder else "does not say its data"
        raise UsageError(f"{trainer['path']} {where}; give --data_dir")
    manifest = shards.Manifest.load(stage.copy(folder, "") if "://" in folder else folder)
    own, same = trainer.get("tokenizer"), trainer["identity"]["tokenizer_sha256"]
    same = own.same_ids(Tokenizer.load(manifest.tokenizer_file())) if own else same
    if same not in (True, manifest.tokenizer_sha256):
        why = f"{manifest.dir} has a different tokenizer from that of {trainer['path']}"
        raise UsageError(f"{why}; give the folder of the data it was trained on with --data_dir")
    return manifest
