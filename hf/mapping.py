"""A GPT of this project as a model of transformers, and back.

`choose_class(config)` names the stock class that computes the same numbers, or OWN and why there is
none. `to_huggingface(model)` gives the weights under that class's names, `config_json` its
config.json. `load_exported(folder)` inverts both. The classes differ from each other in four ways:
where the norms are, the MLP, which layers have RoPE, and (NanoChat) which way RoPE turns.
Next: export.py writes and checks the folder; modeling_nano2049.py is OWN.
"""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from config import GPTConfig, UsageError
from machinery.disk import has_sha256, read_json
from machinery.errors import CheckpointError
from model import GPT, kind_of, rms_norm

FORMAT = 3  # grows when older folders can no longer be read
OWN = "Nano2049"
OWN_FILE = Path(__file__).with_name("modeling_nano2049.py")
NEEDS = {"NanoChat": "5", OWN: "5.4 or newer"}  # the other classes are in 4.57 as well


def choose_class(c: GPTConfig) -> tuple[str, str]:
    """(class name without ForCausalLM, the reason in words)."""
    odd_width = c.n_embd % c.n_head != 0  # Llama and Arcee refuse it whatever head_dim is
    if c.extras:
        return OWN, f"no stock class has the extras {', '.join(c.extras)}"
    if c.mlp == "relu2" and c.qk_norm:
        if not c.embed_norm:
            return OWN, "no stock class has relu2 and qk_norm without embed_norm"
        if c.nope_every:
            return OWN, "no stock class has relu2, qk_norm and NoPE"
        return "NanoChat", "it has relu2, qk_norm and embed_norm"
    if c.logit_softcap:
        return OWN, "only NanoChat has a softcap, and it has relu2 and qk_norm with it"
    if c.mlp == "relu2":
        if c.nope_every or odd_width:
            return OWN, "no stock class has relu2 with NoPE, or with n_embd % n_head != 0"
        return "Arcee", "it is Llama with relu2"
    if c.qk_norm:
        if c.nope_every:
            return OWN, "no stock class has qk_norm and NoPE"
        return "Qwen3", "it has SwiGLU and qk_norm"
    if c.nope_every:
        return "SmolLM3", "it has SwiGLU, and NoPE on chosen layers"
    if odd_width:
        return "SmolLM3", "it takes an n_embd that is no multiple of n_head, with RoPE everywhere"
    return "Llama", "it has SwiGLU, and RoPE on every layer"


def config_json(c: GPTConfig, name: str) -> dict:
    """config.json of a class, for the GPTConfig that `to_huggingface` returned."""
    tree = dict(architectures=[f"{name}ForCausalLM"], model_type=name.lower(), dtype="float32")
    tree |= dict(vocab_size=c.vocab_size, tie_word_embeddings=c.tie_embeddings, use_cache=True)
    tree |= dict(bos_token_id=c.bos_id, eos_token_id=c.bos_id, pad_token_id=c.bos_id)
    if name == OWN:
        file = OWN_FILE.stem
        auto = {
            "AutoConfig": f"{file}.{OWN}Config",
            "AutoModelForCausalLM": f"{file}.{OWN}ForCausalLM",
        }
        elsewhere = ("tie_embeddings", "bos_id", "doc_mask")  # two above, one for training only
        return (
            tree | {"auto_map": auto} | {k: v for k, v in asdict(c).items() if k not in elsewhere}
        )
    tree |= dict(hidden_size=c.n_embd, num_hidden_layers=c.n_layer, head_dim=c.head_dim)
    tree |= dict(num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head)
    tree |= dict(intermediate_size=c.mlp_hidden, max_position_embeddings=c.seq_len)
    tree |= dict(
        rms_norm_eps=1e-6,
        attention_bias=False,
        hidden_act="relu2" if c.mlp == "relu2" else "silu",
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        rope_theta=c.rope_theta,  # for transformers 4, which would silently take 10,000 without it
    )
    if name == "NanoChat":
        tree["final_logit_softcapping"] = c.logit_softcap or None  # 0.0 would divide by zero
    if name == "SmolLM3":
        tree["no_rope_layers"] = [int(c.has_rope(i)) for i in range(c.n_layer)]  # 1: with RoPE
        tree["no_rope_layer_interval"] = c.nope_every or c.n_layer + 1
    return tree


def names_in(c: GPTConfig, name: str) -> dict[str, str]:
    """Our name of each weight -> its name in a stock class."""
    names = {"embed.weight": "model.embed_tokens.weight"}
    if not c.tie_embeddings:
        names["head.weight"] = "lm_head.weight"
    up, down = ("fc1", "fc2") if name == "NanoChat" else ("up_proj", "down_proj")
    parts = {"attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj"}
    parts |= {"attn.v": "self_attn.v_proj", "attn.out": "self_attn.o_proj"}
    parts |= {"mlp.up": f"mlp.{up}", "mlp.down": f"mlp.{down}"}
    if c.mlp == "swiglu":
        parts["mlp.gate"] = "mlp.gate_proj"
    for i in range(c.n_layer):
        for ours, theirs in parts.items():
            names[f"blocks.{i}.{ours}.weight"] = f"model.layers.{i}.{theirs}.weight"
    return names


def norms_in(c: GPTConfig, name: str) -> dict[str, Tensor]:
    """The norms' weights that a stock class has and we do not: ones."""
    if name == "NanoChat":
        return {}
    norms = {"model.norm.weight": torch.ones(c.n_embd)}
    for i in range(c.n_layer):
        layer = f"model.layers.{i}"
        norms[f"{layer}.input_layernorm.weight"] = torch.ones(c.n_embd)
        norms[f"{layer}.post_attention_layernorm.weight"] = torch.ones(c.n_embd)
        if name == "Qwen3":
            norms[f"{layer}.self_attn.q_norm.weight"] = torch.ones(c.head_dim)
            norms[f"{layer}.self_attn.k_norm.weight"] = torch.ones(c.head_dim)
    return norms


def swap_halves(w: Tensor, head_dim: int) -> Tensor:
    """Swap the two halves of each head's rows in q or k, (heads * D, C).

    We rotate (x1, x2) to (x1 cos - x2 sin, x2 cos + x1 sin), NanoChat by the opposite angle; with
    the halves swapped in both q and k, their dot products are unchanged. It is its own inverse.
    """
    return w.view(-1, 2, head_dim // 2, w.size(1)).flip(1).reshape(w.shape)


def turned(name: str, ours: str, w: Tensor, c: GPTConfig) -> Tensor:
    turn = name == "NanoChat" and kind_of(ours) in ("q", "k")
    return swap_halves(w, c.head_dim) if turn else w


def _is_table(name: str) -> bool:
    """Whether the weight has a row per token, padded to a multiple of 64."""
    return kind_of(name) in ("embed", "head", "value_embeds")


def to_huggingface(model: GPT) -> tuple[GPTConfig, dict[str, Tensor]]:
    """(config, the weights of `choose_class(model.config)`, cut to vocab_size rows, in fp32).

    A class without a norm after the embedding gets its table normalized row by row, which is the
    same thing. The GPTConfig returned says what was done: no embed_norm, and no tied head.
    """
    c, state = model.config, dict(model.state_dict())
    name, _ = choose_class(c)
    if c.embed_norm and name not in ("NanoChat", OWN):
        if c.tie_embeddings:
            state["head.weight"] = state["embed.weight"]
        state["embed.weight"] = rms_norm(state["embed.weight"])
        c = replace(c, embed_norm=False, tie_embeddings=False)
    names = {n: n for n in state} if name == OWN else names_in(c, name)
    weights = {} if name == OWN else norms_in(c, name)
    for ours, theirs in names.items():
        w = turned(name, ours, state[ours], c)
        w = w[: c.vocab_size] if _is_table(ours) else w
        weights[theirs] = w.detach().cpu().float().clone().contiguous()
    return c, weights


def from_huggingface(c: GPTConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_huggingface`: a state dict of GPT(c). The padding rows are zeros."""
    name, _ = choose_class(c)
    names = {n: n for n in weights} if name == OWN else names_in(c, name)
    state = {}
    for ours, theirs in names.items():
        w = turned(name, ours, weights[theirs], c)
        rows = c.padded_vocab - c.vocab_size if _is_table(ours) else 0
        state[ours] = F.pad(w, (0, 0, 0, rows)) if rows else w
    return state


def fingerprint(tree: dict) -> str:
    """sha256 over a config.json but for its own: a changed rope_theta would load, and compute."""
    facts = {key: value for key, value in tree["nano2049"].items() if key != "fingerprint"}
    text = json.dumps(tree | {"nano2049": facts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load_exported(
    folder: str | Path, device="cpu", dtype: torch.dtype = torch.float32
) -> tuple[GPT, dict]:
    """Read a folder of export.py back: (GPT in eval mode, facts).

    facts has `step`, `tokens`, `model` and `identity` like trainer.json, and the hash of every
    file. Needs safetensors, not transformers. UsageError if export.py did not write the folder,
    CheckpointError if a file is not as it was written.
    """
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UsageError(f"to read {folder}, pip install -r requirements-eval.txt") from None
    folder, file = Path(folder), Path(folder, "config.json")
    tree = read_json(file) if file.exists() else {}
    facts = read_facts(folder, tree)
    for name, sha256 in facts["files"].items():
        if not has_sha256(folder / name, sha256):
            raise CheckpointError(f"{folder / name} is not as it was exported; copy it again")
    c = GPTConfig(**facts["model"])
    with torch.device("meta"):
        model = GPT(c, compute_dtype=dtype)
    model.to_empty(device=device)
    model.init_weights()  # the rotary tables; the weights are overwritten
    model.load_state_dict(from_huggingface(c, load_file(folder / "model.safetensors")))
    return model.eval(), facts


def read_facts(folder: Path, tree: dict) -> dict:
    """What export.py wrote of the model into its config.json, `tree`; UsageError or CheckpointError
    as above."""
    if not isinstance(facts := tree.get("nano2049"), dict):
        raise UsageError(f"{folder} was not written by export.py: config.json has no nano2049")
    if (found := facts.get("format")) != FORMAT:
        how = f"has format {found}, this program reads {FORMAT}"
        raise UsageError(f"{folder} {how}; export it again")
    if facts.get("fingerprint") != fingerprint(tree):
        file = folder / "config.json"
        raise CheckpointError(f"{file} is not as it was exported; copy it again")
    return facts
