"""A model as one GGUF file, for llama.cpp, Ollama and LM Studio: `export.py MODEL --gguf f16`.

Weights and names are those that mapping.py makes for transformers' stock classes; `gguf` writes
them. Guarantees: the file is kept only after stock llama.cpp (the package xllamacpp), reading it,
gave our token ids and our log probabilities, and ended where a text ends. A model or a tokenizer
that llama.cpp does not support is refused before anything is written. Needs requirements-eval.txt.
Next: export.py calls this.
"""

import json
import re
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from config import GPTConfig, UsageError, install
from hf import mapping, parity, template
from machinery import disk
from machinery.errors import ParityError
from machinery.output import say
from machinery.trained import Trained
from model import GPT
from tokenizer import Tokenizer, split_of

TOLERANCE = {"f32": 1e-4, "f16": 0.01, "bf16": 0.05, "q8_0": 0.2}
"""Of log p, in nats, beside our model with the weights that the file has. llama.cpp rounds the
inputs of each matmul to the form of its weights, as well."""
CANDIDATES = 5  # tokens at each position whose log p is compared
# What llama.cpp calls a split that cuts text like ours.
SPLIT_NAMES = {
    split_of(digits=1, combining=False): "qwen2",
    split_of(digits=1, combining=True): "qwen35",
}

MODELFILE = '''FROM ./{file}
TEMPLATE """{template}"""
PARAMETER temperature 0.8
PARAMETER top_k 50
PARAMETER top_p 1
PARAMETER repeat_penalty 1
PARAMETER num_ctx {seq_len}
'''
# chat.py's conversation in Ollama's language, a Go template; the file says that BOS comes first.
CHAT = """{{ $before := .System }}{{ range .Messages }}{{ if eq .Role "user" }}<|user|>\
{{ if $before }}{{ $before }}

{{ end }}{{ $before = "" }}{{ .Content }}<|end|>{{ else if eq .Role "assistant" }}<|assistant|>\
{{ .Content }}<|end|>{{ end }}{{ end }}<|assistant|>"""


def need_packages() -> None:
    """UsageError if gguf or xllamacpp is not installed."""
    if not (find_spec("gguf") and find_spec("xllamacpp")):
        raise UsageError(f"--gguf needs gguf and xllamacpp ({install('requirements-eval.txt')})")


def check_supported(c: GPTConfig, tokenizer: Tokenizer, form: str) -> None:
    """UsageError, with the way out, if llama.cpp does not support the model or the tokenizer."""
    name, reason = mapping.choose_class(c)
    if name == mapping.OWN:
        problem = f"{reason}, nor has llama.cpp; train a preset like d12-stock"
    elif c.nope_every:
        problem = f"llama.cpp has no nope_every {c.nope_every}; train with --nope_every 0"
    elif tokenizer.nfc:
        problem = "llama.cpp does not normalize text (nfc); prepare it with --no_nfc"
    elif tokenizer.split not in SPLIT_NAMES:
        problem = "llama.cpp does not split text so; prepare it with --digits 1, no --tokenizer"
    elif form == "q8_0" and any(w % 32 for w in (c.n_embd, c.mlp_hidden, c.n_head * c.head_dim)):
        problem = "q8_0 takes 32 weights at once, and a width is no multiple of it; take f16"
    else:
        return
    raise UsageError(f"--gguf: {problem} (docs/leave.md)")


def export(loaded: Trained, folder: Path, out: Path, form: str) -> str:
    """Write NAME.gguf and Modelfile into the folder, which is to be called `out`, and compare;
    returns a command that uses them. ParityError if anything differs."""
    tokenizer = loaded.tokenizer
    tuned = loaded.provenance.tuned
    c = replace(loaded.model.config, doc_mask=False)  # a text is one document
    check_supported(c, tokenizer, form)
    # As Ollama wants it; with a dash in front, it would be an option.
    name = re.sub(r"[^\w.-]|^\W", "_", loaded.run_dir.name[:100], flags=re.ASCII)
    file = folder / f"{name}.gguf"
    rounded = write(file, loaded, form)
    kind, _ = mapping.choose_class(c)
    rounded_model = mapping.model_of(c, mapping.from_huggingface(c, rounded, kind))
    served = Served(file, c.seq_len)
    far = compare_numbers(rounded_model, served, TOLERANCE[form])
    chats = compare_texts(served, tokenizer, tuned)
    say(
        f"checked with llama.cpp: {len(parity.TEXTS)} texts and {chats} conversations have equal "
        f"ids; log p differs by {far:.1g} at most"
    )
    words = CHAT if tuned else "{{ .Prompt }}"
    disk.write_text(
        folder / "Modelfile", MODELFILE.format(file=file.name, template=words, seq_len=c.seq_len)
    )
    return shlex.join(["llama-server", "-m", str(out / file.name)])


def facts_of(loaded: Trained, name: str, form: str) -> dict:
    """What a file says of the shape, the tokenizer and the conversations; each fact is for the
    method of GGUFWriter that begins with add_."""
    import gguf

    c = loaded.model.config
    tokenizer = loaded.tokenizer
    ends = template.ends(tokenizer, loaded.provenance.tuned)
    tree = json.loads(tokenizer.spec)["model"]
    special = tokenizer.special.values()
    texts = {i: text for text, i in (tree["vocab"] | tokenizer.special).items()}
    facts = dict(
        name=name,
        file_type=gguf.LlamaFileType[f"{'ALL' if form == 'f32' else 'MOSTLY'}_{form.upper()}"],
        context_length=c.seq_len,
        embedding_length=c.n_embd,
        block_count=c.n_layer,
        feed_forward_length=c.mlp_hidden,
        head_count=c.n_head,
        head_count_kv=c.n_kv_head,
        key_length=c.head_dim,
        value_length=c.head_dim,
        rope_dimension_count=c.head_dim,
        rope_freq_base=c.rope_theta,
        layer_norm_rms_eps=1e-6,
        vocab_size=c.vocab_size,
        tokenizer_model="gpt2",  # a byte-level BPE
        tokenizer_pre=SPLIT_NAMES[tokenizer.split],
        token_list=[texts[i] for i in range(c.vocab_size)],
        token_types=[
            gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in sorted(texts)
        ],
        token_merges=[" ".join(pair) for pair in tree["merges"]],
        add_bos_token=True,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=ends[0],
        eot_token_id=ends[-1],
    )
    if loaded.provenance.tuned:
        facts["chat_template"] = template.TEMPLATE
    return facts


def write(file: Path, loaded: Trained, form: str) -> dict[str, Tensor]:
    """Write the file; returns the weights as it has them, rounded, named as in transformers."""
    import gguf

    c = loaded.model.config
    arch = "qwen3" if c.qk_norm else "llama"
    out = gguf.GGUFWriter(file, arch)
    for fact, value in facts_of(loaded, file.stem, form).items():
        getattr(out, f"add_{fact}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.n_layer)
    rounded = {}
    for theirs, weight in mapping.to_huggingface(loaded.model).items():
        kind = gguf.GGMLQuantizationType[form.upper() if weight.ndim == 2 else "F32"]
        values = gguf.quants.quantize(weight.numpy(), kind)
        rounded[theirs] = torch.from_numpy(gguf.quants.dequantize(values, kind))
        if not rounded[theirs].isfinite().all():
            raise UsageError(f"--gguf: a weight of {theirs} is too large for {form}, or no number")
        heads = {"q_proj": c.n_head, "k_proj": c.n_kv_head}.get(theirs.split(".")[-2])
        if heads and arch == "llama":
            # it rotates neighbours (2i, 2i + 1), where we rotate i and i + D/2
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2)
            values = values.reshape(-1, values.shape[-1]).copy()
        out.add_tensor(names.get_name(theirs, (".weight",)), values, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    disk.fsync(file)
    return rounded


class Served:
    """Stock llama.cpp with a file: its server, on this machine, until this object is gone. To
    `parity` and `template` it is a tokenizer of transformers."""

    def __init__(self, file: Path, seq_len: int):
        import requests
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = seq_len
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.port = 0  # any that is free
        params.cpuparams.n_threads = 1  # several spin while they wait for each other
        params.cpuparams_batch.n_threads = 1
        params.verbosity = 0
        params.prefill_assistant = False  # a conversation that ends with an answer stays as it is
        # Keys and values stay in fp32; flash attention would take them in fp16.
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        try:
            self.server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise ParityError(f"llama.cpp does not open {file}: {error}") from None
        self.session = requests.Session()
        self.session.trust_env = False  # no proxy

    def ask(self, path: str, **body) -> dict:
        how = "POST" if body else "GET"
        answer = self.session.request(how, self.server.listening_address + path, json=body)
        if not answer.ok:
            raise ParityError(f"llama.cpp refuses {path}: {answer.text[:200]}")
        return answer.json()

    def __call__(self, text: str, add_special_tokens=True, parse_special=False, **_):
        how = dict(add_special=add_special_tokens, parse_special=parse_special)
        return SimpleNamespace(input_ids=self.ask("/tokenize", content=text, **how)["tokens"])

    def decode(self, ids: list[int]) -> str:
        return self.ask("/detokenize", tokens=ids)["content"]

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool, **_):
        how = dict(messages=messages, add_generation_prompt=add_generation_prompt)
        return self(self.ask("/apply-template", **how)["prompt"], parse_special=True).input_ids


@torch.no_grad()
def compare_numbers(model: GPT, served: Served, tolerance: float) -> float:
    """Compare log p of the likeliest tokens after some lengths of random text; returns the largest
    difference. ParityError if it is above the tolerance, times the logits' standard deviation if
    that is above 1."""
    c = model.config
    T = min(c.seq_len, parity.POSITIONS)
    ids = torch.randint(c.vocab_size, (T,), generator=torch.Generator().manual_seed(0))
    ids[0] = c.bos_id
    logits = model(ids[None])[0]  # (T, V)
    log_p = logits.log_softmax(-1)
    limit = tolerance * max(1.0, logits.std().item())
    letter = served("a", add_special_tokens=False).input_ids[0]
    # The server says nothing of a token that ends inside a character, so it is made to write a
    # letter. The log p are those before that bias.
    how = dict(n_predict=1, logit_bias=[[letter, 1e4]], n_probs=CANDIDATES, cache_prompt=False)
    found = []
    for n in (1, 2, T // 4, T // 2, T - 1):
        answer = served.ask("/completion", prompt=ids[:n].tolist(), **how)
        for token in answer["completion_probabilities"][0]["top_logprobs"]:
            found.append((token["logprob"], log_p[n - 1, token["id"]].item()))
    theirs, ours = np.array(found, float).T  # None, which is JSON's NaN, becomes NaN
    far = np.abs(theirs - ours).max()  # NaN stays
    if not far <= limit:  # NaN is wrong as well
        raise ParityError(
            f"log p differs by {far:.1e} nats from llama.cpp's, {limit:.1e} is allowed"
        )
    return far


def compare_texts(served: Served, tokenizer: Tokenizer, tuned: bool) -> int:
    """Compare ids of texts and of conversations, and where llama.cpp ends; returns how many
    conversations. ParityError if any differs."""
    parity.compare_ids(served, tokenizer)
    ends = template.ends(tokenizer, tuned)
    # Some ends it knows by their names; other programs look for the one that the file has.
    if served.ask("/props")["eos_token"] != tokenizer.decode(ends[:1]):
        raise ParityError(f"the end that the file names is not the token {ends[0]}")
    for end in ends:
        forced = served.ask("/completion", prompt="a", n_predict=2, logit_bias=[[end, 1e4]])
        if forced["stop_type"] != "eos":
            raise ParityError(f"llama.cpp does not end at the token {end}")
    if not tuned:
        return 0
    # In llama.cpp a special token that is typed is that token; in our programs it is plain text.
    plain = tuple(text for text in parity.TEXTS if "<|" not in text)
    return template.compare_conversations(served, tokenizer, plain)
