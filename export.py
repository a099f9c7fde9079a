"""A checkpoint -> a folder that transformers loads: `python export.py [MODEL] [--out FOLDER]`.

Reads RUN_DIR's newest valid checkpoint (or --checkpoint), metrics.jsonl, and the data folder for
its tokenizer. Writes model.safetensors, config.json, the tokenizer, a model card, and, for a model
that no stock class computes, modeling_nano2049.py. Guarantees: the folder gets its name only after
transformers, reading it as any user would, gave our token ids, our logits and our greedy text.
Needs requirements-eval.txt. Next: hf/mapping.py, which class and which weights.
"""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from config import PRESETS, Preset
from eval import EvalConfig, find_model, is_export, load, run_of
from hf import mapping, parity
from machinery import checkpoint, cli, diary, durable
from machinery.errors import StorageError
from model import GPT
from tokenizer import BOS, Tokenizer


@dataclass(frozen=True)
class ExportConfig:
    """Which checkpoint, and where to."""

    run_dir: str = ""
    """Folder of the run; empty: runs/PRESET."""
    checkpoint: str = ""
    """A checkpoint folder; empty: the newest valid one of the run."""
    data_dir: str = ""
    """Data folder, for the tokenizer; empty: the one that the run was trained on."""
    out: str = ""
    """Folder to write; it must not exist. Empty: export_STEP in the run's folder."""
    usd_per_hour: float = 0.0
    """What the machine cost, for the model card; 0: not known."""


# ------------------------------------------------------------------------------- the folder


def write_model(model: GPT, folder: Path, facts: dict) -> dict:
    """Weights, config.json and generation_config.json; returns the facts of config.json."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    name, _ = mapping.choose_class(model.config)
    config, weights = mapping.to_huggingface(model)
    file = folder / "model.safetensors"
    durable.check_room(folder, sum(w.nbytes for w in weights.values()), "give another --out")
    try:
        save_file(weights, file, metadata={"format": "pt"})
    except SafetensorError as error:  # which is no OSError
        raise StorageError(f"{file} could not be written: {error}") from None
    file.chmod(0o644)  # safetensors makes it readable by its owner alone
    facts = dict(format=mapping.FORMAT, class_name=name) | facts
    facts |= dict(model=asdict(config), weights_sha256=durable.sha256_of(file))
    durable.write_json(
        folder / "config.json", mapping.config_json(config, name) | {"nano2049": facts}
    )
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), config.bos_id)
    sampling = dict(do_sample=True, temperature=0.8, top_k=50)
    durable.write_json(folder / "generation_config.json", ids | sampling)
    if name == mapping.OWN:
        shutil.copyfile(mapping.OWN_FILE, folder / "modeling_nano2049.py")
    return facts


def write_tokenizer(tokenizer: Tokenizer, folder: Path, seq_len: int) -> None:
    """tokenizer.json with BOS put first by a post-processor: of the ways to say so, the only one
    that every version of transformers and lm_eval obeys."""
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    text, second = ({"Sequence": {"id": s, "type_id": i}} for i, s in enumerate("AB"))
    entry = {"id": BOS, "ids": [tokenizer.bos_id], "tokens": [BOS]}
    template = {"type": "TemplateProcessing", "special_tokens": {BOS: entry}}
    template |= {"single": [bos, text], "pair": [bos, text, second]}
    durable.write_json(
        folder / "tokenizer.json", json.loads(tokenizer.spec) | {"post_processor": template}
    )
    options = dict(
        tokenizer_class="PreTrainedTokenizerFast",  # else the model type's, with another split
        bos_token=BOS,
        eos_token=BOS,  # the next document begins where one ends
        pad_token=BOS,
        split_special_tokens=True,  # "<|end|>" in a text is plain text, as in training
        clean_up_tokenization_spaces=False,
        model_max_length=seq_len,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    durable.write_json(folder / "tokenizer_config.json", options)


def training_facts(path: Path, trainer: dict, usd_per_hour: float) -> dict:
    """What config.json keeps of the training, and the card shows; None: not known."""
    step, records = trainer["step"], diary.read_jsonl(run_of(path) / "metrics.jsonl")
    bpb = [r["val_bpb"] for r in records if r["step"] == step and "val_bpb" in r]
    step_s = {r["step"]: r["step_s"] for r in records if "step_s" in r and r["step"] <= step}
    hours = sum(step_s.values()) / 3600 if len(step_s) == step else None
    return dict(
        step=step,
        tokens=trainer["tokens"],
        identity=trainer["identity"],
        checkpoint_sha256=durable.sha256_of(path / checkpoint.MANIFEST),
        val_bpb=bpb[-1] if bpb else None,
        hours=hours,
        usd=hours * usd_per_hour if hours and usd_per_hour else None,
    )


def write_card(folder: Path, title: str, facts: dict, model: GPT, manifest, usage: str) -> None:
    """README.md, the model card: what the model is, what it was trained on, how to use it."""
    c, identity, known = model.config, facts["identity"], lambda x, text: text if x else "not known"
    same_data = manifest.fingerprint == identity["data_fingerprint"]
    sources = [
        f"`{s['spec']}`" + (f" at `{s['revision']}`" if s.get("revision") else "")
        for s in manifest.tree["sources"]
    ]
    needs = mapping.NEEDS.get(facts["class_name"], "4.57 or newer")
    rows = {
        "class": f"{facts['class_name']}ForCausalLM, of transformers {needs}",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "shape": f"{c.n_layer} layers, width {c.n_embd}, {c.n_head} query heads and {c.n_kv_head} "
        f"key/value heads of {c.head_dim}, MLP {c.mlp} of {c.mlp_hidden}",
        "context": f"{c.seq_len:,} tokens",
        "training": f"{facts['step']:,} steps, {facts['tokens']:,} tokens",
        "validation": known(facts["val_bpb"], f"{facts['val_bpb'] or 0:.4f} bits per byte"),
        "time": known(facts["hours"], f"{facts['hours'] or 0:.2f} hours of steps"),
        "cost": known(facts["usd"], f"${facts['usd'] or 0:,.2f}"),
        "text": known(same_data, ", ".join(sources)),
        "data fingerprint": f"`{identity['data_fingerprint']}`",
        "tokenizer, before BOS was added": f"sha256 `{identity['tokenizer_sha256']}`",
        "checkpoint": f"sha256 of its MANIFEST.json `{facts['checkpoint_sha256']}`",
        "model.safetensors": f"sha256 `{facts['weights_sha256']}`",
    }
    masked = "It was trained with attention kept within a document. " if c.doc_mask else ""
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {title}

A pretrained language model, trained with nano2049. It completes text; it does not answer.

```python
{usage}
```

It loads in fp32; `dtype=torch.bfloat16` halves the memory. The tokenizer puts BOS in front, and a
special token written in a text is read as plain text. {masked}A row is one document.

| | |
| --- | --- |
""" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    (folder / "README.md").write_text(text, encoding="utf-8")


# ---------------------------------------------------------------------------------- the story


def export(config: ExportConfig) -> Path:
    """Load, write, compare, publish; returns the folder. ParityError if the comparison fails."""
    if config.checkpoint and is_export(Path(config.checkpoint)):
        raise ValueError(f"{config.checkpoint} is an export already; give a run or a checkpoint")
    where = EvalConfig(config.run_dir, config.checkpoint, config.data_dir, "cpu", "fp32")
    model, trainer, manifest = load(where)
    path = Path(trainer["path"])
    run_dir = run_of(path)
    out = Path(config.out or run_dir / f"export_{trainer['step']:08d}")
    prompt = PRESETS.get(run_dir.name, Preset).prompts[0].rstrip()
    tokenizer = Tokenizer.load(manifest.tokenizer_file())
    name, why = mapping.choose_class(model.config)
    own = name == mapping.OWN
    chosen = "modeling_nano2049.py beside the weights" if own else f"the stock {name}"
    print(f"class: {chosen} ({why})")
    trust = ", trust_remote_code=True" if own else ""
    usage = (
        "from transformers import pipeline\n"
        f'generate = pipeline("text-generation", "{{}}"{trust})\n'
        f'print(generate({prompt!r}, max_new_tokens=80)[0]["generated_text"])'
    )
    with durable.creating(out) as folder:
        facts = write_model(model, folder, training_facts(path, trainer, config.usd_per_hour))
        write_tokenizer(tokenizer, folder, model.config.seq_len)
        write_card(
            folder, f"nano2049 {run_dir.name}", facts, model, manifest, usage.format(out.name)
        )
        # A row of the exported model is one document, whatever the rows of training were.
        model.config = replace(model.config, doc_mask=False)
        print(f"checked: {parity.check(folder, model, tokenizer)}")
    print(f"written: {out}\n\nin Python:\n{usage.format(out)}\n\nto score it:")
    print(
        f"lm_eval --model hf --model_args pretrained={out},dtype=float32"
        f"{trust.replace(', ', ',')} --tasks hellaswag --batch_size 8 --device cpu"
    )
    return out


def main(argv: list[str]) -> int:
    """`export.py [MODEL] [--option value ...]`; MODEL: a preset, or a run or a checkpoint."""
    missing = [m for m in ("transformers", "safetensors") if find_spec(m) is None]
    if missing:
        raise ValueError(
            f"not installed: {' and '.join(missing)}; pip install -r requirements-eval.txt"
        )
    if tuple(map(int, (found := version("transformers")).split(".")[:2])) < (5, 4):
        raise ValueError(f"transformers {found} is too old; pip install -r requirements-eval.txt")
    word, options = cli.first_word(argv)
    export(cli.read_options(ExportConfig(**find_model(word)), options, "export.py"))
    return 0


if __name__ == "__main__":
    cli.run(main)
