"""A checkpoint of nanochat -> a folder of transformers' class NanoChat, which our programs open.

    python -m hf.nanochat ~/.cache/nanochat/base_checkpoints/d20 nanochat-d20

nanochat has no export. Its checkpoints and its tokenizer are pickles, opened here and nowhere else,
by readers that make tensors and tables of them, and run nothing. NanoChat is nanochat until January
2026; of the parts that came later, one can be folded, and the others are refused by name. The
folder gets its name only after our model gave the logits of transformers, and `tokenizers` the ids
of tiktoken. Next: imported.py, which reads such folders.
"""

import pickle
import zipfile
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import tiktoken
import torch
from torch import Tensor

from config import GPTConfig, Size, UsageError
from hf import export, imported, mapping, parity
from hf.tokenizer_json import Given, with_first_token
from machinery import cli, disk, formats
from machinery.errors import ParityError, reason_of
from machinery.output import say
from tokenizer import BOS, Tokenizer, of_library

TABLES = {"transformer.wte": "model.embed_tokens", "lm_head": "lm_head"}
PARTS = {  # of transformer.h.3 -> of model.layers.3
    "attn.c_q": "self_attn.q_proj",
    "attn.c_k": "self_attn.k_proj",
    "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
LATER = {  # in the name of a weight -> the part that is refused
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


class TablesOnly(pickle.Unpickler):
    """Gives what a pickled tiktoken.Encoding holds, as attributes; an error for any other class."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return SimpleNamespace
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tokenizer")


def main(argv: list[str]) -> int:
    """`python -m hf.nanochat CHECKPOINTS OUT`. UsageError for what cannot be read or converted,
    ParityError if the folder does not compute what it should; then there is none."""
    if len(argv) != 2 or argv[0].startswith("-"):
        raise UsageError(
            "python -m hf.nanochat CHECKPOINTS OUT needs nanochat's folder of model_*.pt, and the "
            "name of a new folder"
        )
    parity.need_transformers()
    source, out = map(Path, argv)
    file, shape = newest(source)
    weights = convert(load(file), shape, file)
    tokenizer = read_tokenizer(file.parent)
    if tokenizer.vocab_size != shape.vocab_size:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {shape.vocab_size}: put "
            f"the model's own tokenizer.pkl into {file.parent}"
        )
    with disk.new_folder(out) as folder:
        export.write_tokenizer(tokenizer, folder, shape.sequence_len, tuned=False)
        export.save_weights(weights, folder)
        disk.write_json(folder / "config.json", config_json(shape, tokenizer.bos_id))
        written = imported.ForeignModel(folder)
        _, remark = written.read(written.config)
    say(f"{file}: {remark}\nwritten: {out}")
    return 0


def newest(folder: Path) -> tuple[Path, Shape]:
    """The file of the last step's weights, and their shape."""
    files = sorted(path for path in folder.glob("model_[0-9]*.pt") if path.is_file())
    if not files:
        raise UsageError(f"{folder} has no model_*.pt, a checkpoint of nanochat")
    meta = folder / f"meta_{files[-1].stem.removeprefix('model_')}.json"
    given = disk.read_json(meta).get("model_config")
    shape = formats.checked(Shape, given, f"{meta}, model_config")
    unknown = given.keys() - {field.name for field in fields(Shape)}
    if unknown:
        raise UsageError(f"{meta} is of no nanochat that is known here: {sorted(unknown)}")
    return files[-1], shape


def load(file: Path) -> dict[str, Tensor]:
    """nanochat's weights; UsageError unless they are whole, and finite floating-point numbers."""
    try:
        damaged = zipfile.ZipFile(file).testzip()  # torch.load does not look at the checksums
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        is_number = lambda w: w.is_floating_point() and bool(w.isfinite().all())
        odd = [name for name, w in saved.items() if not is_number(w)]
    except Exception as error:  # of many classes
        raise UsageError(f"{file} cannot be read: {reason_of(error)}") from None
    if damaged or odd:
        raise UsageError(
            f"{file} is damaged, or has other than finite floats: {damaged or odd[:3]}"
        )
    return {name.removeprefix("_orig_mod."): w for name, w in saved.items()}


def convert(saved: dict[str, Tensor], c: Shape, file: Path) -> dict[str, Tensor]:
    """nanochat's weights -> the same in fp32 under transformers' names. UsageError, which names
    them and the file, for parts that NanoChat does not have.

    resid_lambdas fold: in x <- l x + f(norm(l x)), the norm takes the positive l away. So let the
    stream be divided by the product of all l so far; f must be divided by it, too."""
    of_layer = saved.pop("resid_lambdas", torch.ones(c.n_layer)).float()
    of_first = saved.pop("x0_lambdas", torch.zeros(c.n_layer))
    later = [words for part, words in LATER.items() if any(part in name for name in saved)]
    if of_first.any():
        later.append("x0_lambdas, which add the embedding again before each layer")
    # Our norms add 1e-6 to a mean square: with a product far from 1, that is no longer little.
    so_far = of_layer.cumprod(0)
    if not ((of_layer > 0) & (so_far > 0.1) & (so_far < 10)).all():
        later.append("resid_lambdas that are not positive, or whose product is not about 1")
    if "S" in c.window_pattern.upper():
        later.append(f"layers that see a part of a row (window_pattern {c.window_pattern})")
    if later:
        raise UsageError(f"{file} cannot be converted exactly; it has {'; '.join(later)}")
    names = dict(TABLES)
    for i in range(c.n_layer):
        for part, theirs in PARTS.items():
            names[f"transformer.h.{i}.{part}"] = f"model.layers.{i}.{theirs}"
    unlike = saved.keys() ^ {f"{name}.weight" for name in names}
    unlike |= {name for name, w in saved.items() if w.ndim != 2}
    if so_far.shape != (c.n_layer,):
        unlike.add("resid_lambdas")
    if unlike:
        raise UsageError(
            f"{file} has other weights than its meta_*.json says: {sorted(unlike)[:3]}"
        )
    weights = {}
    for name, theirs in names.items():
        w = saved[f"{name}.weight"].float()
        if name in TABLES:
            w = w[: c.vocab_size]  # the padding goes
        elif name.endswith("c_proj"):
            w = w / so_far[int(name.split(".")[2])]
        weights[f"{theirs}.weight"] = w.contiguous()
    return weights


def config_json(c: Shape, bos_id: int) -> dict:
    """What NanoChat needs to know. RoPE's base and the cap stand in nanochat's code."""
    config = GPTConfig(
        seq_len=c.sequence_len,
        vocab_size=c.vocab_size,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_kv_head=c.n_kv_head,
        n_embd=c.n_embd,
        head_dim=c.n_embd // c.n_head,
        mlp_hidden=4 * c.n_embd,
        rope_theta=10_000.0,
        bos_id=bos_id,
        **mapping.NANOCHAT,
    )
    own = {"hidden_act": "relu2", "final_logit_softcapping": 15.0}
    return mapping.config_json(config, "NanoChat") | own


def read_tokenizer(folder: Path) -> Tokenizer:
    """From the tokenizer.pkl in the checkpoint's folder, or where nanochat keeps it. UsageError if
    it cannot be read, ParityError if `tokenizers` gives other ids than tiktoken."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = folder / "tokenizer.pkl"
    if not file.exists():
        file = folder / "../../tokenizer/tokenizer.pkl"
    try:
        with disk.open_file(file) as opened:
            state = vars(TablesOnly(opened).load())
        special = state["special_tokens"]
        theirs = of_library(tiktoken.Encoding, **state)
        converter = TikTokenConverter(pattern=state["pat_str"], extra_special_tokens=special)
        converter.load_tiktoken_bpe = lambda _: state["mergeable_ranks"]  # not from a file
        spec = of_library(converter.converted).to_str()
    except Exception as error:  # of many classes
        raise UsageError(f"{file} cannot be read: {reason_of(error)}") from None
    ours = Given(with_first_token(spec, BOS, folder))
    alike = [*map(ours.encode, parity.TEXTS)] == theirs.encode_ordinary_batch(parity.TEXTS)
    if not alike or ours.special != special:
        raise ParityError(f"{file}: `tokenizers` has other ids or special tokens")
    return ours


if __name__ == "__main__":
    cli.run(main)
