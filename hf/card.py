"""The model card: what an exported model is, what it was trained on, how to use it.

Reads metrics.jsonl of the run; writes README.md into the folder of export.py. Next: export.py.
"""

from pathlib import Path

from hf import mapping, template
from machinery import checkpoint, disk
from machinery.log import read_jsonl
from machinery.shards import Manifest
from machinery.trained import is_tuned, run_of
from model import GPT

UNKNOWN = "not known"
QUESTION = "What can you do?"
BASE = "A pretrained language model, trained with nano2049. It completes text; it does not answer."
OF_BASE = """The tokenizer puts BOS in front, and a
special token written in a text is read as plain text."""
TUNED = """A language model, trained with nano2049 and tuned on conversations: it answers. To it,
a conversation is `<|bos|><|user|>question<|end|><|assistant|>answer<|end|><|user|>...`, with a
system text and a blank line in front of the first question."""
OF_TUNED = """The tokenizer puts
BOS in front of a text, the template in front of a conversation. A special token written in a
message is read as plain text with `sanitize_control_tokens` (transformers 5), as itself without."""


def training_facts(path: Path, trainer: dict) -> dict:
    """What config.json keeps of the training, and the card shows; None: not known. The validation
    is that on all rows, if the run ended with this checkpoint; else on val_rows of them."""
    step, records = trainer["step"], read_jsonl(run_of(path) / "metrics.jsonl")
    facts = dict(step=step, tokens=trainer["tokens"], identity=trainer["identity"])
    facts |= dict(checkpoint_sha256=disk.sha256_of(path / checkpoint.MANIFEST))
    facts |= dict(val_bpb=None, val_rows=None, hours=None)
    for name in ("full_val_bpb", "val_bpb"):  # that on all rows, if there is one
        for r in records:
            if r.get("step") == step and r.get(name) and r.get("val_rows") and not facts["val_bpb"]:
                facts |= dict(val_bpb=r[name], val_rows=r["val_rows"])
    step_s = {r["step"]: r["step_s"] for r in records if r.get("step_s") and r["step"] <= step}
    if len(step_s) == step:
        facts["hours"] = sum(step_s.values()) / 3600
    return facts


def usage(folder: str | Path, prompt: str, own: bool, tuned: bool) -> str:
    """Lines of Python that generate text, or answer. own: the folder has a modelling file of ours;
    tuned: on conversations."""
    trust = ", trust_remote_code=True" if own else ""
    lines = [
        "from transformers import pipeline",
        f'generate = pipeline("text-generation", "{folder}"{trust})',
    ]
    if not tuned:
        text = f'generate({prompt!r}, max_new_tokens=80)[0]["generated_text"]'
        return "\n".join([*lines, f"print({text})"])
    lines += [
        f'messages = [{{"role": "user", "content": "{QUESTION}"}}]',
        f"typed = {template.TYPED}  # a role that is typed stays text",
        "answer = generate(messages, max_new_tokens=80, tokenizer_encode_kwargs=typed)",
        'print(answer[0]["generated_text"][-1]["content"])',
    ]
    return "\n".join(lines)


def write_card(
    folder: Path, title: str, facts: dict, model: GPT, manifest: Manifest | None, usage: str
) -> None:
    """README.md. manifest: of the data, None if it is gone; usage: lines of Python."""
    c = model.config
    masked = "It was trained with attention kept within a document. " if c.doc_mask else ""
    table = "".join(f"| {a} | {b} |\n" for a, b in rows_of(facts, model, manifest).items())
    about, special = (TUNED, OF_TUNED) if is_tuned(facts) else (BASE, OF_BASE)
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {title}

{about}

```python
{usage}
```

It loads in fp32; `dtype=torch.bfloat16` halves the memory. {special}
{masked}A row is one document.

| | |
| --- | --- |
{table}"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def rows_of(facts: dict, model: GPT, manifest: Manifest | None) -> dict[str, str]:
    """The table of the card: name -> text."""
    c, identity = model.config, facts["identity"]
    needs = mapping.NEEDS.get(facts["class_name"], "4.57 or newer")
    return {
        "class": f"{facts['class_name']}ForCausalLM, of transformers {needs}",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "shape": f"{c.n_layer} layers, width {c.n_embd}, {c.n_head} query heads and {c.n_kv_head} "
        f"key/value heads of {c.head_dim}, MLP {c.mlp} of {c.mlp_hidden}",
        "context": f"{c.seq_len:,} tokens",
        "training": f"{facts['step']:,} steps, {facts['tokens']:,} tokens",
        "validation": validation(facts),
        "time": UNKNOWN if facts["hours"] is None else f"{facts['hours']:.2f} hours of steps",
        "text": sources(identity, manifest),
        "data fingerprint": f"`{identity['data_fingerprint']}`",
        "tokenizer, before BOS was added": f"sha256 `{identity['tokenizer_sha256']}`",
        "checkpoint": f"sha256 of its MANIFEST.json `{facts['checkpoint_sha256']}`",
        "model.safetensors": f"sha256 `{facts['files']['model.safetensors']}`",
    }


def validation(facts: dict) -> str:
    if facts["val_bpb"] is None:
        return UNKNOWN
    return f"{facts['val_bpb']:.4f} bits per byte, on {facts['val_rows']:,} validation rows"


def sources(identity: dict, manifest: Manifest | None) -> str:
    """Where the text is from, if this is the data that the model was trained on."""
    if manifest is None or manifest.fingerprint != identity["data_fingerprint"]:
        return UNKNOWN
    found = []
    for source in manifest.tree["sources"]:
        revision = f" at `{source['revision']}`" if source.get("revision") else ""
        found.append(f"`{source['spec']}`{revision}")
    return ", ".join(found)
