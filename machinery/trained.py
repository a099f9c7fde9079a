"""Loads a trained model that one word names: a preset, a run, a checkpoint or an export.

Reads RUN_DIR's newest valid checkpoint, or the folder that is named, and its tokenizer.json; the
data folder for held-out text, and for the tokenizer if neither the model's folder nor its run's has
it. eval.py passes in what reads exports and stock models (hf/imported.py). A URL is opened only if
typed. Next: checkpoint.py.
"""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch

from config import PRESETS, Dtype, Local, UsageError, find_preset
from machinery import checkpoint, disk, ranks
from machinery.formats import Export, Provenance
from machinery.output import json_of, say
from machinery.shards import CACHE, Manifest, is_published
from model import GPT
from tokenizer import Tokenizer

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the second is refused with a reason


@dataclass(frozen=True)
class EvalConfig:
    """Which model to evaluate."""

    run_dir: Local = ""
    """Folder of the run; empty: runs/PRESET."""
    checkpoint: Local = ""
    """A step of the run (900); the folder of a checkpoint, an export or a stock model (or hf:REPO);
    empty: the newest valid checkpoint of the run."""
    data_dir: str = ""
    """Data folder or URL; empty: the folder that the run was trained on."""
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    dtype: Dtype = "auto"
    """Dtype of the computation; auto: bf16 where the hardware has it, fp16 on a V100 or T4."""


def is_export(path: Path) -> bool:
    """Whether this is the folder of a model for transformers, whole or damaged, or `hf:REPO`."""
    names = ["generation_config.json", *(n + e for n in WEIGHTS for e in ("", ".index.json"))]
    return str(path).startswith("hf:") or any((path / name).exists() for name in names)


def folder_of(word: str) -> str:
    """The folder that a word means: that of a preset's run, its path, or its name in runs/."""
    own = f"runs/{word}"
    is_name = find_preset(word) or not os.path.exists(word) and os.path.isdir(own)
    return own if is_name else word


def find_model(word: str) -> dict[str, str]:
    """MODEL, the first word after the command -> the options that it stands for."""
    folder = folder_of(word)
    path = Path(folder)
    if find_preset(word) or (path / "checkpoints").is_dir():
        return dict(run_dir=folder)
    if (path / "dcp").is_dir() or is_export(path):
        return dict(checkpoint=folder)
    raise UsageError(
        f"{word!r} is neither a preset ({', '.join(PRESETS)}) nor a run, a checkpoint or a folder "
        f"with a {WEIGHTS[0]}; {remedy_for(word)}"
    )


def remedy_for(word: str) -> str:
    """What to do if there is no such run, or it has no checkpoint."""
    run = Path(word) if "/" in word else Path("runs", word).absolute()
    runs = sorted({path.parts[-3] for path in run.parent.glob("*/checkpoints/step_*")})
    preset = run.name if find_preset(run.name) else "tiny"
    return f"{run.parent} has {', '.join(runs) or 'no run'}; to train one: python train.py {preset}"


def run_of(path: str | Path) -> Path:
    """The run folder to which a checkpoint belongs; else the path."""
    path = Path(os.path.abspath(path))
    if not path.name.startswith("step_"):
        return path
    return path.parents[1] if path.parent.name == "checkpoints" else path.parent


@dataclass
class Trained:
    """A trained model, what is known of it, and what belongs to it."""

    config: EvalConfig
    path: Path
    """The folder of the checkpoint or of the export."""
    provenance: Provenance
    model: GPT | None = None
    """In eval mode; None: only its provenance was read."""
    own_tokenizer: Tokenizer | None = None
    """A stock model's."""
    about: str = ""
    """What to say of it, instead of its steps."""

    @property
    def run_dir(self) -> Path:
        return run_of(self.path)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.json of the model's own folder, of its run or of its data, the first that
        has the hash it was trained with. An export's has BOS added, and a hash of its own."""
        if self.own_tokenizer:
            return self.own_tokenizer
        expected = self.provenance.tokenizer_sha256
        if isinstance(self.provenance, Export):
            expected = self.provenance.files.get("tokenizer.json")
        for folder in dict.fromkeys([self.path.absolute(), self.run_dir]):
            file = folder / "tokenizer.json"
            if os.path.lexists(file):
                if disk.has_sha256(file, expected):
                    return Tokenizer.load(file)
                say(f"warning: {file} is not used: it is not the tokenizer of {self.path}")
        return Tokenizer.load(self.data.tokenizer_file())

    @cached_property
    def data(self) -> Manifest:
        """The data that the model was trained on, or --data_dir, if it has the same tokenizer."""
        folder = self.config.data_dir or self.provenance.data_dir
        if not folder:
            raise UsageError(f"{self.path} does not say what it was trained on; give --data_dir")
        if is_published(folder):
            url = folder
            folder = disk.inside(CACHE, str(self.provenance.identity.get("data_fingerprint"))[:16])
            if not (folder / "manifest.json").exists():
                raise UsageError(
                    f"{self.path} was trained on {url}, which is opened only if you ask for it: "
                    f"give --data_dir {shlex.quote(url)}"
                )
        manifest = Manifest.load(folder)
        own = self.own_tokenizer
        if own:
            same = own.same_ids(Tokenizer.load(manifest.tokenizer_file()))
        else:
            same = self.provenance.tokenizer_sha256 == manifest.tokenizer_sha256
        if not same:
            raise UsageError(
                f"{manifest.dir} has a different tokenizer from that of {self.path}; give the "
                "folder of the data it was trained on with --data_dir"
            )
        return manifest

    def append_result(self, **figures) -> None:
        """Append a line to eval.jsonl in the folder of the run or the export, if it can be
        written."""
        of = self.provenance
        facts = dict(run_dir=str(self.run_dir), step=of.step, tokens=of.tokens)
        file = self.run_dir / "eval.jsonl"
        try:
            disk.append(file, json_of(asdict(self.config) | facts | figures) + "\n")
        except OSError as error:
            say(f"not written to {file}: {error.strerror}", file=sys.stderr)


def load_model(config: EvalConfig, read_export: Callable | None = None) -> Trained:
    """The model that the options name. NonFiniteError if a weight is NaN or infinite. read_export:
    hf.imported.load, needed only for an export or a stock model."""
    device = ranks.pick_device(config.device)
    dtype = ranks.pick_dtype(device, config.dtype)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan for each length of the KV cache
    if config.checkpoint and is_export(Path(config.checkpoint)):
        loaded = read_export(config, device, dtype)
    else:
        loaded = read_checkpoint(config, device, dtype)
    checkpoint.check_finite(loaded.model.state_dict(), f"{loaded.path} cannot be used")
    of = loaded.provenance
    about = loaded.about or f"step {of.step:,}, {of.tokens:,} tokens"
    say(f"{loaded.path}: {about}; computed in {dtype}")
    loaded.model.eval()
    return loaded


def find_checkpoint(config: EvalConfig) -> Path:
    """The checkpoint that the options name, or the newest valid one of the run."""
    root = Path(config.run_dir) / "checkpoints"
    path = Path(config.checkpoint) if config.checkpoint else checkpoint.latest_valid(root)
    if config.checkpoint.isdecimal() and not path.exists():
        path = root / f"step_{int(config.checkpoint):08d}"
    if path is None or not path.exists():
        own = ", ".join(map(str, checkpoint.checkpoints(root)))
        remedy = f"there are {own}" if own else remedy_for(config.run_dir or config.checkpoint)
        raise UsageError(f"there is no checkpoint at {(path or root).absolute()}; {remedy}")
    return path


def read_checkpoint(config: EvalConfig, device, dtype: torch.dtype) -> Trained:
    """The model of a checkpoint, which is hashed unless it was found to be valid just now."""
    path = find_checkpoint(config)
    trainer = checkpoint.read_trainer(path)
    with torch.device("meta"):
        model = GPT(trainer.model, compute_dtype=dtype)
    # before any memory is taken
    checkpoint.check_fits(path, checkpoint.weights_of(model), "model.")
    model.to_empty(device=device)
    model.init_weights()  # the rotary tables; the weights are overwritten
    checkpoint.load_model(path, model, verified=not config.checkpoint)
    return Trained(config, path, trainer, model)
