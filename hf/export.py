"""A checkpoint -> a folder that transformers loads, a file for llama.cpp (llama_cpp.py), or a page
for browsers, which export.py hands down (instruments/pages/page.py); export.py is the command.

Reads RUN_DIR's newest valid checkpoint (or --checkpoint), its tokenizer.json and metrics.jsonl; the
data folder only for the model card. Writes model.safetensors, config.json, the tokenizer, the card,
and, for a model that no stock class computes, modeling_nano2049.py. Guarantees: the folder gets its
name only after transformers, reading it as any user would, gave our token ids, our logits and our
greedy text. Needs requirements-eval.txt. Next: mapping.py, which class and which weights.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from config import Local, Preset, UsageError, find_preset
from hf import card, imported, llama_cpp, mapping, parity, template, tokenizer_json
from machinery import cli, disk, trained
from machinery.checkpoint import MANIFEST
from machinery.errors import StorageError
from machinery.formats import EXPORT_FORMAT, Export
from machinery.output import say
from machinery.trained import Trained
from tokenizer import Tokenizer


@dataclass(frozen=True)
class ExportConfig:
    """Which checkpoint, and where to."""

    run_dir: Local = ""
    """Folder of the run; empty: runs/PRESET."""
    checkpoint: Local = ""
    """A checkpoint folder; empty: the newest valid one of the run."""
    out: Local = ""
    """Folder to write; it must not exist. Empty: export_STEP, or gguf_STEP, in the run's folder. Of
    a page: the file, or a folder for page.html."""
    gguf: Literal["", "f32", "f16", "bf16", "q8_0"] = ""
    """Instead of a folder for transformers, a file for llama.cpp and Ollama, with weights in this
    form (f16 if you name none), if the model has a shape that they know (docs/leave.md)."""
    page: bool = False
    """Instead of a folder, one HTML file that holds the model, for any browser (docs/page.md)."""
    page_fp16: bool = False
    """Likewise, with weights in fp16, twice as large as in int8."""


def main(argv: list[str], write_page=None) -> int:
    """`export.py [MODEL] [--option value ...]`; MODEL: a preset, or a run or a checkpoint; for a
    page also an export or a stock model. --gguf may stand without a value. write_page: (Trained,
    --out, whether in fp16) -> None."""
    word, options = cli.first_word(argv)
    if "--gguf" in options:
        at = options.index("--gguf") + 1
        form = [*options, "-"][at]
        if form.startswith("-"):
            options.insert(at, "f16")
        elif form not in llama_cpp.TOLERANCE:
            raise UsageError(
                f"--gguf takes f32, f16 (which it is alone), bf16 or q8_0, not {form}; the name of "
                "a model comes first: python export.py MODEL --gguf"
            )
    default = ExportConfig(**trained.find_model(word))
    config = cli.read_options(default, options, f"export.py {word}")
    if config.page or config.page_fp16:
        if config.gguf:
            raise UsageError("--page and --gguf make a file each; give one of them")
        write_page(load(config), config.out, config.page_fp16)
        return 0
    if config.gguf:
        llama_cpp.need_packages()  # after --help
    else:
        parity.need_transformers()
    export(config)
    return 0


def load(config: ExportConfig) -> Trained:
    """The model that the options name, in fp32."""
    which = trained.EvalConfig(config.run_dir, config.checkpoint, device="cpu", dtype="fp32")
    return trained.load_model(which, imported.load)


def export(config: ExportConfig) -> Path:
    """Load, write, compare; returns the folder. ParityError if the comparison fails."""
    if config.checkpoint and trained.is_export(Path(config.checkpoint)):
        raise UsageError(f"{config.checkpoint} is an export already; give a run or a checkpoint")
    loaded = load(config)
    kind = "gguf" if config.gguf else "export"
    out = Path(config.out or loaded.run_dir / f"{kind}_{loaded.provenance.step:08d}")
    with disk.new_folder(out) as folder:
        weights = loaded.model.state_dict().values()
        disk.check_room(folder, sum(w.nbytes for w in weights), "give another --out")
        if config.gguf:
            usage = llama_cpp.export(loaded, folder, out, config.gguf)
        else:
            usage = export_to_transformers(loaded, folder, out)
    say(f"written: {out}\n\n{usage}")
    return out


def export_to_transformers(loaded: Trained, folder: Path, out: Path) -> str:
    """Write the folder, which is to be called `out`, and compare; returns how to use it."""
    model = loaded.model
    tokenizer = loaded.tokenizer
    name, reason = mapping.choose_class(model.config)
    own = name == mapping.OWN
    tuned = loaded.provenance.tuned
    say(f"class: {'modeling_nano2049.py' if own else f'the stock {name}'} ({reason})")
    prompt = (find_preset(loaded.run_dir.name) or Preset).prompts[0].rstrip()
    write_tokenizer(tokenizer, folder, model.config.seq_len, tuned)
    record = write_model(loaded, folder)
    usage = card.usage(out.name, prompt, own, tuned)
    card.write_card(folder, record, loaded, usage)
    # A row of the exported model is one document, whatever the rows of training were.
    model.config = replace(model.config, doc_mask=False)
    say(f"checked: {parity.check(folder, model, tokenizer, tuned)}")
    return f"in Python:\n{card.usage(out, prompt, own, tuned)}"


def write_model(loaded: Trained, folder: Path) -> Export:
    """Weights, generation_config.json and, with the hash of every file, config.json; returns what
    it keeps under `nano2049`."""
    config = mapping.folded(loaded.model.config)
    name, _ = mapping.choose_class(config)
    save_weights(mapping.to_huggingface(loaded.model), folder)
    of = loaded.provenance
    generation = {
        "bos_token_id": config.bos_id,
        "pad_token_id": config.bos_id,
        "eos_token_id": template.ends(loaded.tokenizer, of.tuned),
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 50,
    }
    disk.write_json(folder / "generation_config.json", generation)
    if name == mapping.OWN:
        shutil.copyfile(mapping.OWN_FILE, folder / "modeling_nano2049.py")
    val_bpb, val_rows = card.validation_of(loaded)
    record = Export(
        format=EXPORT_FORMAT,
        class_name=name,
        model=config,
        step=of.step,
        tokens=of.tokens,
        identity=of.identity,
        checkpoint_sha256=disk.sha256_of(loaded.path / MANIFEST),
        val_bpb=val_bpb,
        val_rows=val_rows,
        files={path.name: disk.sha256_of(path) for path in sorted(folder.iterdir())},
    )
    disk.write_json(
        folder / "config.json", mapping.config_json(config, name) | {"nano2049": record}
    )
    return record


def save_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """model.safetensors; StorageError if it does not fit."""
    file = folder / "model.safetensors"
    try:
        save_file(weights, file, metadata={"format": "pt"})
    except SafetensorError as error:  # which is not an OSError
        raise StorageError(f"{file} could not be written: {error}") from None
    file.chmod(0o644)  # safetensors makes it readable by its owner alone
    disk.fsync(file)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, seq_len: int, tuned: bool) -> None:
    """tokenizer.json, with BOS put first, and what transformers must know about it. tuned: with a
    chat template."""
    tree = json.loads(tokenizer.spec)
    tree |= tokenizer_json.begin_with(tokenizer.bos, tokenizer.bos_id)
    disk.write_text(folder / "tokenizer.json", json.dumps(tree, ensure_ascii=False))
    options = dict(
        tokenizer_class="PreTrainedTokenizerFast",  # else the model type's, with another split
        bos_token=tokenizer.bos,
        eos_token=tokenizer.bos,  # the next document begins where one ends
        pad_token=tokenizer.bos,
        split_special_tokens=True,  # "<|end|>" in a text is plain text, as in training
        clean_up_tokenization_spaces=False,
        model_max_length=seq_len,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    if tuned:
        options |= template.options()
    disk.write_json(folder / "tokenizer_config.json", options)
