"""A GPT of this project as a model of transformers, and back.

`choose_class(config)` names the class that computes the same numbers: a stock one (Llama, Qwen3,
SmolLM3) if there is one, else OWN. `to_huggingface(model)` gives the weights under that class's
names, `config_json` its config.json. `load_exported(folder)` inverts both. Next: export.py writes
and checks the folder; modeling_nano2049.py is OWN.
"""

from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from config import GPTConfig, UsageError
from hf.tokenizer_json import file_in
from machinery import formats
from machinery.disk import has_sha256, read_json
from machinery.errors import CheckpointError, DataError, reason_of
from machinery.formats import Export
from model import GPT, kind_of, rms_norm

TABLES = ("embed", "head", "value_embeds")  # weights with a row per token
OWN = "Nano2049"
OWN_FILE = Path(__file__).with_name("modeling_nano2049.py")
STOCK = dict(mlp="swiglu", extras=(), logit_softcap=0.0)  # what all three stock classes have
KEYS = {  # a field of GPTConfig -> its key in the config.json of a stock class
    "seq_len": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_embd": "hidden_size",
    "mlp_hidden": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",  # transformers 4 would silently take 10,000 without it
}
THEIRS = {  # the kind of a weight (model.KINDS) -> its name in a stock class; {}: the layer
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "q_gain": "model.layers.{}.self_attn.q_norm.weight",
    "k_gain": "model.layers.{}.self_attn.k_norm.weight",
    "out": "model.layers.{}.self_attn.o_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
NORMS = {  # the kind of a weight -> the norm that it reads
    "head": "model.norm.weight",
    **dict.fromkeys("qkv", "model.layers.{}.input_layernorm.weight"),
    **dict.fromkeys(("up", "gate"), "model.layers.{}.post_attention_layernorm.weight"),
}


def choose_class(c: GPTConfig) -> tuple[str, str]:
    """(class name without ForCausalLM, the reason in words)."""
    others = [f"{key} {getattr(c, key)}" for key in STOCK if getattr(c, key) != STOCK[key]]
    if c.embed_norm and c.tie_embeddings:
        others.append("embed_norm with tie_embeddings")
    if c.qk_norm and c.nope_every:
        others.append("qk_norm with nope_every")
    if c.qk_gain and not c.qk_norm:
        others.append("qk_gain without qk_norm")
    if others:
        return OWN, f"no stock class has {', '.join(others)}"
    same = "it computes the same numbers"
    if c.qk_norm:
        return "Qwen3", same
    # Llama refuses heads that do not divide the width, whatever head_dim is.
    return "SmolLM3" if c.nope_every or c.n_embd % c.n_head else "Llama", same


def folded(c: GPTConfig) -> GPTConfig:
    """The model that an export has. For a stock class the norm after the embedding goes into the
    table: it is a function of the token alone."""
    return c if choose_class(c)[0] == OWN else replace(c, embed_norm=False)


def config_json(c: GPTConfig, name: str) -> dict:
    """config.json of a class."""
    tree = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "dtype": "float32",
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": c.bos_id,
        "eos_token_id": c.bos_id,
        "pad_token_id": c.bos_id,
    }
    if name == OWN:
        tree["auto_map"] = {
            "AutoConfig": f"{OWN_FILE.stem}.{OWN}Config",
            "AutoModelForCausalLM": f"{OWN_FILE.stem}.{OWN}ForCausalLM",
        }
        elsewhere = ("tie_embeddings", "bos_id", "doc_mask")  # two above, one for training only
        fields = asdict(c) | {"extras": list(c.extras)}
        return tree | {k: v for k, v in fields.items() if k not in elsewhere}
    if name == "SmolLM3":
        tree["no_rope_layers"] = [int(c.has_rope(i)) for i in range(c.n_layer)]  # 1: it has RoPE
    tree |= {key: getattr(c, field) for field, key in KEYS.items()}
    return tree | {
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
    }


def names_in(c: GPTConfig, name: str) -> dict[str, str]:
    """Our name of each weight -> its name in a stock class, or in OWN, which has ours."""
    with torch.device("meta"):
        ours = GPT(c).state_dict()
    if name == OWN:
        return {key: key for key in ours}
    return {key: THEIRS[kind_of(key)].format(key.split(".")[1]) for key in ours}


def fit_tables(c: GPTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with its tables, which have a row per token, cut to vocab_size rows and padded
    with zeros to those of GPT(c)."""
    padding = (0, 0, 0, c.padded_vocab - c.vocab_size)
    return {
        name: F.pad(w[: c.vocab_size], padding) if kind_of(name) in TABLES else w
        for name, w in state.items()
    }


def to_huggingface(model: GPT) -> dict[str, Tensor]:
    """The weights of `choose_class(model.config)`, cut to vocab_size rows, in fp32."""
    c = model.config
    state = model.state_dict()
    name, _ = choose_class(c)
    weights = {}
    if name != OWN:  # the norms' weights, which of ours only those of q and k may have
        sizes = dict.fromkeys(NORMS.values(), c.n_embd)
        if c.qk_norm:
            sizes |= {THEIRS["q_gain"]: c.head_dim, THEIRS["k_gain"]: c.head_dim}
        for i in range(c.n_layer):
            weights |= {norm.format(i): torch.ones(size) for norm, size in sizes.items()}
    for ours, theirs in names_in(c, name).items():
        w = state[ours].cpu().float()
        if kind_of(ours) in TABLES:
            w = w[: c.vocab_size]
        if kind_of(ours) == "embed" and name != OWN and c.embed_norm:
            w = rms_norm(w)  # see `folded`
        weights[theirs] = w.clone()
    return weights


def from_huggingface(c: GPTConfig, weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The inverse of `to_huggingface`: a state dict of GPT(c). name: of the weights' class."""
    names = names_in(c, name)
    return fit_tables(c, {k: weights[theirs] for k, theirs in names.items() if theirs in weights})


def model_of(c: GPTConfig, state: dict[str, Tensor], dtype=torch.float32, device="cpu") -> GPT:
    """GPT(c) in eval mode with these weights, which are not copied if they are fp32 on the device.
    CheckpointError, before anything is allocated, if they are not the weights of GPT(c)."""
    with torch.device("meta"):
        model = GPT(c, compute_dtype=dtype)
    state = {name: w.to(device, torch.float32) for name, w in state.items()}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights do not fit the architecture: {reason_of(error)}"
        ) from None
    model.init_tables()
    return model.eval()


def load_exported(folder: Path, device="cpu", dtype=torch.float32) -> tuple[GPT, Export]:
    """Read a folder of export.py back, without transformers: (GPT in eval mode, its record).

    UsageError if export.py did not write the folder, CheckpointError if a file is not as it was
    written.
    """
    record = read_record(folder)
    c = record.model
    for name, sha256 in record.files.items():
        if not has_sha256(file_in(folder, name), sha256):
            raise CheckpointError(f"{folder / name} is not as it was exported; copy it again")
    weights = load_file(file_in(folder, "model.safetensors"))
    return model_of(c, from_huggingface(c, weights, record.class_name), dtype, device), record


def read_record(folder: Path) -> Export:
    """What export.py wrote into config.json; errors as above."""
    file = file_in(folder, "config.json")
    tree = read_json(file) if file.exists() else {}
    if "nano2049" not in tree:
        raise UsageError(f"{folder} was not written by export.py: config.json has no nano2049")
    try:
        record = formats.checked(Export, tree["nano2049"], f"{file}, nano2049")
    except DataError as error:
        raise CheckpointError(f"{error}; export it again") from None
    # It states the model twice, for transformers and for us; edited in one place, both would run.
    # A shape that has a stock class today may have brought our own file when it was exported, and
    # one without gains did not say so.
    c = record.model
    name = record.class_name
    is_whole = config_json(c, name).items() <= ({"qk_gain": False} | tree).items()
    if not is_whole or name not in (OWN, choose_class(c)[0]):
        raise CheckpointError(f"{file} is not as it was exported; copy it again")
    return record
