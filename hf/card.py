"""The model card: what an exported model is, what it was trained on, how to use it.

Reads metrics.jsonl of the run; writes README.md into the folder of export.py. Next: export.py.
"""

from pathlib import Path

from config import UsageError
from hf import template
from machinery import disk
from machinery.errors import DataError
from machinery.formats import METRICS, Export, FullValidationLine, read_lines
from machinery.output import say
from machinery.trained import Trained

UNKNOWN = "not known"
BASE = """A pretrained language model, trained with nano2049: it completes text, it does not answer.
The tokenizer puts BOS in front, and encodes a special token that is typed as plain text."""
TUNED = """A language model, trained with nano2049 and tuned on conversations: it answers. To it,
a conversation is `<|bos|><|user|>question<|end|><|assistant|>answer<|end|><|user|>...`, with a
system text and a blank line in front of the first question. The template puts BOS in front. A
special token that is typed in a message is encoded as plain text with `sanitize_control_tokens`
(transformers 5), as the special token without."""

ANSWER = f"""messages = [{{"role": "user", "content": "What can you do?"}}]
typed = {template.TYPED}  # a role that is typed stays text
answer = generate(messages, max_new_tokens=80, tokenizer_encode_kwargs=typed)
print(answer[0]["generated_text"][-1]["content"])"""


def validation_of(loaded: Trained) -> tuple[float | None, int | None]:
    """Bits per byte on all held-out rows, and their number; None unless the run ended with this
    checkpoint."""
    for line in read_lines(loaded.run_dir / "metrics.jsonl", METRICS):
        if isinstance(line, FullValidationLine) and line.step == loaded.provenance.step:
            return line.full_val_bpb, line.val_rows
    return None, None


def usage(folder: str | Path, prompt: str, own: bool, tuned: bool) -> str:
    """Lines of Python that generate text, or an answer. own: the folder has our modelling file;
    tuned: on conversations."""
    trust = ", trust_remote_code=True" if own else ""
    base = f'print(generate({prompt!r}, max_new_tokens=80)[0]["generated_text"])'
    return f"""from transformers import pipeline
generate = pipeline("text-generation", {str(folder)!r}{trust})
{ANSWER if tuned else base}"""


def write_card(folder: Path, record: Export, loaded: Trained, usage: str) -> None:
    """README.md. usage: lines of Python."""
    c = loaded.model.config
    n = sum(p.numel() for p in loaded.model.parameters())
    validation = UNKNOWN
    if record.val_bpb:
        validation = f"{record.val_bpb:.4f} bits per byte, on {record.val_rows:,} rows"
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
---
# nano2049 {" ".join(loaded.run_dir.name.split())}

{TUNED if record.tuned else BASE}

```python
{usage}
```

It loads in fp32; `dtype=torch.bfloat16` halves the memory. Each row of a batch is one text.

| | |
| --- | --- |
| class | {record.class_name}ForCausalLM |
| shape | {n:,} parameters, {c.n_layer} layers, width {c.n_embd}, context {c.seq_len:,} tokens |
| training | {record.step:,} steps, {record.tokens:,} tokens |
| validation | {validation} |
| text | {text_of(loaded)} |
"""
    disk.write_text(folder / "README.md", text)


def text_of(loaded: Trained) -> str:
    """Where the text is from, if the data that the model was trained on can be read."""
    try:
        manifest = loaded.data
    except (UsageError, DataError):
        say(f"the card does not name the text: {loaded.provenance.data_dir} cannot be read")
        return UNKNOWN
    if manifest.fingerprint != loaded.provenance.identity.get("data_fingerprint"):
        return UNKNOWN
    specs = ", ".join(f"`{source.spec}`" for source in manifest.facts.sources)
    return " ".join(specs.split()).replace("|", r"\|")
