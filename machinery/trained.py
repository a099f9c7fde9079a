"""Loads a trained model that one word names: a preset, a run, a checkpoint or an export.

Reads RUN_DIR's newest valid checkpoint, or the folder that is named, and its tokenizer.json; the
data folder for held-out text, or if neither has the tokenizer. eval.py and export.py pass in what
reads exports and stock models (hf/imported.py). A URL is opened only if typed. Next: checkpoint.py.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from config import PRESETS, Dtype, GPTConfig, Local, UsageError, find_preset
from machinery import checkpoint, disk, ranks
from machinery.errors import CheckpointError
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


def find_model(word: str) -> dict[str, str]:
    """MODEL, the first word after the command -> the options that it stands for."""
    path = Path(word)
    if find_preset(word):
        return dict(run_dir=f"runs/{word}")
    if (path / "checkpoints").is_dir():
        return dict(run_dir=word)
    if (path / "trainer.json").exists() or is_export(path):
        return dict(checkpoint=word)
    raise UsageError(
        f"{word!r} is neither a preset ({', '.join(PRESETS)}) nor the folder of a run, a "
        "checkpoint or an export"
    )


def run_of(path: str | Path) -> Path:
    """The run folder to which a checkpoint (or its copy in a mirror) belongs; else the path."""
    path = Path(os.path.abspath(path))
    if path.parent.name.startswith("step_"):  # in a mirror: step_00001000/ID, beside ID.run
        return path.with_name(f"{path.name}.run")
    if not path.name.startswith("step_"):
        return path
    return path.parents[1] if path.parent.name == "checkpoints" else path.parent


def is_tuned(trainer: dict) -> bool:
    """Whether the data that a model was last trained on held conversations: then it can chat."""
    return bool(trainer["identity"].get("conversations"))


def load_model(config: EvalConfig, read_export: Callable) -> tuple[GPT, dict]:
    """The model; and its trainer.json, with `path`, the folder of both. NonFiniteError if a weight
    is NaN or infinite. read_export: hf.imported.load."""
    path = Path(config.checkpoint)
    device = ranks.pick_device(config.device)
    dtype = ranks.pick_dtype(device, config.dtype)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan for each length of the KV cache
    if config.checkpoint and is_export(path):
        model, trainer = read_export(path, device, dtype)
    else:
        root = Path(config.run_dir) / "checkpoints"
        path = path if config.checkpoint else checkpoint.latest_valid(root)
        name = root.parent.name
        step = re.fullmatch(r"(step_)?(\d{1,12})", config.checkpoint)
        if step and not path.exists():
            path = root / f"step_{int(step[2]):08d}"
        if path is None or not path.exists():
            runs = [] if find_preset(name) else sorted(root.parent.parent.glob("*/checkpoints"))
            names = ", ".join(map(str, checkpoint.checkpoints(root) or [p.parent for p in runs]))
            remedy = f"there are {names}" if names else f"train one first: python train.py {name}"
            raise UsageError(f"there is no checkpoint in {(path or root).absolute()}; {remedy}")
        model, trainer = read_checkpoint(path, device, dtype, verified=not config.checkpoint)
    checkpoint.check_finite(model.state_dict(), f"{path} cannot be used")
    text = trainer.get("about") or f"step {trainer['step']:,}, {trainer['tokens']:,} tokens"
    say(f"{path}: {text}; computed in {dtype}")
    return model.eval(), trainer | {"path": str(path)}


def read_checkpoint(path: Path, device, dtype: torch.dtype, verified: bool) -> tuple[GPT, dict]:
    """The model and trainer.json of a checkpoint. verified: its files have just been hashed."""
    record = checkpoint.read_trainer(path)
    trainer = {name: record[name] for name in checkpoint.RECORD if name in record}
    missing = {"step", "tokens", "identity", "model"} - trainer.keys()
    if missing:
        raise CheckpointError(f"{path / 'trainer.json'} has no {min(missing)}")
    with torch.device("meta"):
        model = GPT(config_of(path, trainer["model"]), compute_dtype=dtype)
    weights = checkpoint.weights_of(model)
    checkpoint.check_fits(path, weights, "model.")  # before any memory is taken
    model.to_empty(device=device)
    model.init_weights()  # the rotary tables; the weights are overwritten
    checkpoint.load_model(path, model, verified)
    return model, trainer


def config_of(path: Path, fields: dict) -> GPTConfig:
    """The architecture in a trainer.json; CheckpointError for an unknown field or a wrong type."""
    for name, value in fields.items():
        kind = type(getattr(GPTConfig, name, GPTConfig))  # `type` if there is no such field
        kinds = {tuple: (list,), float: (float, int)}.get(kind, (kind,))
        if type(value) not in kinds or kind is tuple and not all(type(x) is str for x in value):
            raise CheckpointError(f"{path} cannot be used here: {name} is {str(value)[:80]!r}")
    return GPTConfig(**fields)


def open_tokenizer(config: EvalConfig, trainer: dict) -> Tokenizer:
    """The tokenizer.json of the model's own folder, of its run or of its data, the first that has
    the hash it was trained with. An export's has BOS added, and a hash of its own."""
    if "tokenizer" in trainer:  # a stock model's
        return trainer["tokenizer"]
    path = Path(trainer["path"])
    trained_with = trainer["identity"].get("tokenizer_sha256")
    hashes = trainer.get("files", {})  # of an export
    for folder in dict.fromkeys([path.absolute(), run_of(path)]):
        file = folder / "tokenizer.json"
        if os.path.lexists(file):
            if disk.has_sha256(file, hashes.get("tokenizer.json", trained_with)):
                return Tokenizer.load(file)
            say(f"warning: {file} is not used: it is not the tokenizer of {path}")
    return Tokenizer.load(open_data(config, trainer).tokenizer_file())


def open_data(config: EvalConfig, trainer: dict) -> Manifest:
    """The data that the model was trained on, or --data_dir, if it has the same tokenizer."""
    folder = config.data_dir or trainer.get("data_dir")
    identity = trainer["identity"]
    if not folder:
        raise UsageError(f"{trainer['path']} does not say what it was trained on; give --data_dir")
    if is_published(folder):
        url = folder
        folder = disk.inside(CACHE, str(identity.get("data_fingerprint"))[:16])
        if not (folder / "manifest.json").exists():
            message = (
                f"{trainer['path']} was trained on {url}, which is opened only if you ask for it"
            )
            raise UsageError(f"{message}: give --data_dir {shlex.quote(url)}")
    manifest = Manifest.load(folder)
    own = trainer.get("tokenizer")
    same = identity.get("tokenizer_sha256")
    same = own.same_ids(Tokenizer.load(manifest.tokenizer_file())) if own else same
    if same not in (True, manifest.tokenizer_sha256):
        message = f"{manifest.dir} has a different tokenizer from that of {trainer['path']}"
        raise UsageError(
            f"{message}; give the folder of the data it was trained on with --data_dir"
        )
    return manifest


def keep_record(config: EvalConfig, trainer: dict, **figures) -> None:
    """Append a line to eval.jsonl in the folder of the run or the export, if it can be written."""
    run_dir = run_of(trainer["path"])
    facts = dict(run_dir=str(run_dir), step=trainer["step"], tokens=trainer["tokens"])
    try:
        disk.append(run_dir / "eval.jsonl", json_of(asdict(config) | facts | figures) + "\n")
    except OSError as error:
        say(f"not written to {run_dir / 'eval.jsonl'}: {error.strerror}", file=sys.stderr)
