"""A checkpoint of nanochat -> a folder of transformers' class NanoChat, as others have it.

    python -m hf.nanochat ~/.cache/nanochat/base_checkpoints/d20 nanochat-d20

nanochat has no export. Its checkpoints and its tokenizer are pickles, opened here and nowhere else,
by readers that make tensors and tables of them, and run nothing. NanoChat is nanochat until January
2026; of the parts that came later, one can be folded, and the others are refused by name. The
folder gets its name only after our model gave the logits of transformers, and `tokenizers` the ids
of tiktoken. Next: imported.py, which reads such folders.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import tiktoken
import torch
from safetensors.torch import save_file
from torch import Tensor

from config import Size, UsageError
from hf import imported, parity, tokenizer_json
from machinery import cli, disk, formats
from machinery.errors import reason_of
from machinery.output import say

BOS = "<|bos|>"
TABLES = {"transformer.wte": "model.embed_tokens", "lm_head": "lm_head"}
PARTS = {  # of transformer.h.3 -> of model.layers.3
    "attn.c_q": "self_attn.q_proj",
    "attn.c_k": "self_attn.k_proj",
    "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
LATER = {  # in the name of a weight -> what nanochat does with it
    "value_embeds": "value embeddings",
    "ve_gate": "their gate, and since March 2026 q and k times 1.15 or 1.2 after the norm",
    "smear": "smear, and q and k times 1.2 after the norm",
    "backout": "backout",
}


@formats.record
class Shape:
    """`model_config` in nanochat's meta_*.json."""

    sequence_len: Size
    vocab_size: Size
    n_layer: Size
    n_head: Size
    n_kv_head: Size
    n_embd: Size
    window_pattern: str = "L"


@formats.record
class Meta:
    model_config: Shape


class Tables:
    """What a pickled tiktoken.Encoding holds."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class TablesOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return Tables
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tokenizer")


def main(argv: list[str]) -> int:
    """`python -m hf.nanochat CHECKPOINTS OUT`"""
    if len(argv) != 2 or argv[0].startswith("-"):
        raise UsageError(
            "python -m hf.nanochat CHECKPOINTS OUT needs nanochat's folder of model_*.pt, and the "
            "name of a new folder"
        )
    parity.need_transformers()
    source, out = map(Path, argv)
    file, shape = newest(source)
    weights = weights_of(file, shape)
    with disk.new_folder(out) as folder:
        bos_id = write_tokenizer(file.parent, folder)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        disk.write_json(folder / "config.json", config_json(shape, bos_id))
        written = imported.ForeignModel(folder)
        _, remark = written.read(written.config)
    say(f"{file}: {remark}\nwritten: {out}")
    return 0


def newest(folder: Path) -> tuple[Path, Shape]:
    """The weights of the last step, and their shape."""
    steps = {}
    for path in folder.glob("model_*.pt"):
        step = re.fullmatch(r"model_(\d{1,12})\.pt", path.name)
        if step:
            steps[int(step[1])] = path
    if not steps:
        raise UsageError(f"{folder} has no model_*.pt, a checkpoint of nanochat")
    file = steps[max(steps)]
    meta = file.with_name(file.name.replace("model", "meta")).with_suffix(".json")
    return file, formats.read(meta, Meta).model_config


def weights_of(file: Path, c: Shape) -> dict[str, Tensor]:
    """The weights in fp32, under transformers' names. UsageError for parts that NanoChat has not.

    resid_lambdas fold: in x <- l x + f(norm(l x)), the norm takes the positive l away. So let the
    stream be divided by the product of all l so far; f must be divided by it, too."""
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        saved = {name.removeprefix("_orig_mod."): w.float() for name, w in saved.items()}
    except Exception as error:  # of many classes
        raise UsageError(f"{file} cannot be read: {reason_of(error)}") from None
    of_layer = saved.pop("resid_lambdas", torch.ones(c.n_layer))
    of_first = saved.pop("x0_lambdas", torch.zeros(c.n_layer))
    later = [words for part, words in LATER.items() if any(part in name for name in saved)]
    if of_first.any():
        later.append("x0_lambdas, which add the embedding again before each layer")
    if not (of_layer > 0).all():
        later.append("resid_lambdas that are not positive")
    if "S" in c.window_pattern.upper():
        later.append(f"layers that see a part of a row (window_pattern {c.window_pattern})")
    if later:
        raise UsageError(f"{file} cannot be converted exactly; it has {'; '.join(later)}")
    names = dict(TABLES)
    for i in range(c.n_layer):
        for part, theirs in PARTS.items():
            names[f"transformer.h.{i}.{part}"] = f"model.layers.{i}.{theirs}"
    unlike = saved.keys() ^ {f"{name}.weight" for name in names}
    if unlike or len(of_layer) != c.n_layer:
        raise UsageError(f"{file} is not of its meta_*.json: {sorted(unlike)[:3]}")
    so_far = of_layer.float().cumprod(0).tolist()
    weights = {}
    for name, theirs in names.items():
        w = saved[f"{name}.weight"]
        if name in TABLES:
            w = w[: c.vocab_size]  # the padding goes
        elif name.endswith("c_proj"):
            w = w / so_far[int(name.split(".")[2])]
        weights[f"{theirs}.weight"] = w.contiguous()
    return weights


def config_json(c: Shape, bos_id: int) -> dict:
    """What NanoChat needs to know. RoPE's base and the cap stand in nanochat's code."""
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "hidden_size": c.n_embd,
        "intermediate_size": 4 * c.n_embd,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head,
        "max_position_embeddings": c.sequence_len,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 15.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "bos_token_id": bos_id,
        "eos_token_id": bos_id,
        "pad_token_id": bos_id,
    }


def write_tokenizer(source: Path, folder: Path) -> int:
    """tokenizer.json, from the tokenizer.pkl beside the checkpoint or where nanochat keeps it;
    returns the id of BOS."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    beside = source / "tokenizer.pkl"
    file = beside if beside.exists() else source / "../../tokenizer/tokenizer.pkl"
    try:
        with disk.open_file(file) as opened:
            state = TablesOnly(opened).load().state
        ranks, special = state["mergeable_ranks"], state["special_tokens"]
        theirs = tiktoken.Encoding(**state)
        converter = TikTokenConverter(pattern=state["pat_str"], extra_special_tokens=special)
        converter.load_tiktoken_bpe = lambda _: ranks  # not from a file
        converter.converted().save(str(folder / "tokenizer.json"))
    except Exception as error:  # of many classes
        raise UsageError(f"{file} cannot be read: {reason_of(error)}") from None
    options = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token=BOS)
    disk.write_json(folder / "tokenizer_config.json", options)
    ours = tokenizer_json.read(folder)
    for text in (*parity.TEXTS, " ".join(parity.TEXTS)):
        if ours.encode(text) != theirs.encode_ordinary(text) or ours.special != special:
            raise UsageError(f"{file}: `tokenizers` encodes {text[:40]!r} differently")
    return ours.bos_id


if __name__ == "__main__":
    cli.run(main)
