"""Somebody's checkpoint of a stock class of transformers -> our model, exactly or not at all.

Reads config.json, model.safetensors or its shards, and the tokenizer, of a folder or of the Hub
(`hf:REPO`); needs safetensors, not transformers. An allow-list: what our model.py does not compute
is an error, which names it. No file is opened that could run code. A folder of export.py is read as
well. Next: train.py --init_from and eval.py open one; mapping.py is the way out.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import config as cfg
from config import GPTConfig, UsageError
from hf import mapping, parity, tokenizer_json
from machinery import disk, folders, ranks
from machinery.errors import CheckpointError, ParityError
from machinery.shards import Manifest
from model import GPT, kind_of
from tokenizer import Tokenizer

TOLERANCE = 1e-4  # of logits in fp32, times their standard deviation if that is above 1
POSITIONS = 64  # of each of the two rows on which they are compared
EPS = 1e-6  # of model.rms_norm
CLASSES = ("Llama", "Mistral", "SmolLM3")
UNREAD = ("rotary_emb.inv_freq", "lm_head.weight")  # of old files; the second, of tied models


class Source:
    """A folder with a model for transformers. Made from its small files; `state` reads the rest."""

    def __init__(self, word: str | Path) -> None:
        """word: the folder, or hf:REPO[@REVISION]. UsageError if it is no model of ours."""
        self.word, self.folder = str(word), tokenizer_json.local_folder(word)
        path = tokenizer_json.file_in(self.folder, "config.json")
        self.tree = disk.read_json(path) if path.exists() else {}
        self.ours, self.name = "nano2049" in self.tree, ""  # export.py wrote it
        if self.ours:
            self.config, _ = mapping.read_facts(self.folder)
            return
        self.name = self._check_kind()
        self.files = dict(self._list_tensors())
        self.config = self._read_config()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_json.read(self.folder)

    # ------------------------------------------------------------------- config.json

    def need(self, holds: object, reason: str) -> None:
        if not holds:
            raise UsageError(f"{self.word} cannot be imported exactly: {reason}")

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0 of config.json, or the default where there is none."""
        value = self.tree.get(key)
        value = default if value is None else value
        is_number = type(value) in (int, float) and math.isfinite(value) and value > 0
        self.need(is_number, f"{key} is {value} in its config.json")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        self.need(type(value) is int, f"{key} is {value} in its config.json")
        return value

    def _check_kind(self) -> str:
        """The name of its class, without ForCausalLM; UsageError for what we do not compute."""
        get, need = self.tree.get, self.need
        classes = get("architectures")
        need(isinstance(classes, list) and classes, "its config.json names no architecture")
        name = str(classes[0]).removesuffix("ForCausalLM")
        known = ", ".join(CLASSES)
        need(name in CLASSES, f"{name} is none of {known}: its layers are others (docs/begin.md)")
        for key in ("auto_map", "quantization_config", "attention_bias", "mlp_bias"):
            need(not get(key), f"its config.json has {key}")
        act = get("hidden_act", "silu")
        need(act == "silu", f"its activation is {act}, not silu")
        kind = self.rope.get("rope_type", self.rope.get("type", "default"))
        need(kind == "default", f"its RoPE is scaled ({kind})")
        part = self.rope.get("partial_rotary_factor", get("partial_rotary_factor"))
        need(part in (None, 1), f"its RoPE turns {part} of a head")
        need(isinstance(get("layer_types") or [], list), "its layer_types are no list")
        others = {str(kind) for kind in get("layer_types") or []}
        others -= {"full_attention", "sliding_attention"}
        need(not others, f"it has layers of {', '.join(sorted(others))}")
        return name

    @property
    def rope(self) -> dict:
        """Its RoPE: transformers 5 writes rope_parameters, 4 rope_scaling and rope_theta."""
        found = self.tree.get("rope_parameters") or self.tree.get("rope_scaling") or {}
        self.need(isinstance(found, dict), f"its RoPE is {found} in its config.json")
        old = {"rope_theta": self.tree.get("rope_theta")}
        return old | {key: value for key, value in found.items() if value is not None}

    @property
    def window(self) -> int:
        """The positions that its attention sees; 0: all."""
        get, default = self.tree.get, 4096 if self.name == "Mistral" else None
        slides = default or get("use_sliding_window")
        slides = slides or "sliding_attention" in (get("layer_types") or [])
        there_is = slides and get("sliding_window", default)
        return self.whole("sliding_window", default) if there_is else 0

    def _read_config(self) -> GPTConfig:
        """With as many positions and tokens as the model has."""
        name, n_head = self.name, self.whole("num_attention_heads")
        width, positions = self.whole("hidden_size"), self.whole("max_position_embeddings")
        says_kv = name == "Llama" or "num_key_value_heads" in self.tree
        theta = self.rope["rope_theta"]
        if theta is None and name != "SmolLM3":  # old files of the others did not always say it
            theta = 10_000.0
        self.need(type(theta) in (int, float), f"its rope_theta is {theta} in its config.json")
        return GPTConfig(
            seq_len=min(positions, self.window or positions),
            vocab_size=self.whole("vocab_size"),
            n_layer=self.whole("num_hidden_layers"),
            n_head=n_head,
            n_kv_head=self.whole("num_key_value_heads", n_head if says_kv else None),
            head_dim=self.whole("head_dim", width // n_head),
            n_embd=width,
            mlp="swiglu",
            mlp_hidden=self.whole("intermediate_size"),
            qk_norm=False,
            embed_norm=False,
            tie_embeddings=False,
            logit_softcap=0.0,
            rope_theta=float(theta),
            nope_every=self._nope_every(),
        )

    def _nope_every(self) -> int:
        """SmolLM3 lists 1 for each layer with RoPE, 0 for the others."""
        if self.name != "SmolLM3":
            return 0
        listed, n = self.tree.get("no_rope_layers"), self.whole("num_hidden_layers")
        self.need(isinstance(listed, list) and len(listed) == n, "it does not list no_rope_layers")
        without = [i for i, on in enumerate(listed, 1) if not on]
        every = without[0] if without else n + 1
        regular = [i for i in range(1, n + 1) if i % every == 0]
        self.need(without == regular, f"its layers {without} have no RoPE: not every k-th")
        return every if without else 0

    @property
    def tied(self) -> bool:
        """Whether their head is the embedding. Some files say so by having no head."""
        said = self.tree.get("tie_word_embeddings")
        return "lm_head.weight" not in self.files if said is None else bool(said)

    # ------------------------------------------------------------------- the weights

    def _list_tensors(self) -> Iterator[tuple[str, Path]]:
        """(name, file) of each tensor of model.safetensors, or of the shards that its index
        lists."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            need = "pip install -r requirements-eval.txt"
            raise UsageError(f"to read {self.word}, {need}") from None
        index = tokenizer_json.file_in(self.folder, "model.safetensors.index.json")
        names = ["model.safetensors"]
        if index.exists():
            listed = disk.read_json(index).get("weight_map")
            self.need(isinstance(listed, dict), f"{index.name} has no weight_map")
            names = sorted({str(name) for name in listed.values()})
        for name in names:
            is_safe = name.endswith(".safetensors")
            path = is_safe and tokenizer_json.file_in(self.folder, name)
            reason = f"there is no {name}; a pickle (.bin) is never opened"
            self.need(is_safe and path.exists(), reason)
            try:
                disk.open_file(path).close()  # a regular file, no pipe
                with safe_open(path, "pt") as file:
                    yield from ((key, path) for key in file.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of the files in fp32; UsageError if it is missing or has another shape."""
        from safetensors import safe_open

        self.need(name in self.files, f"its files have no tensor {name}")
        with safe_open(self.files[name], "pt") as file:
            saved = [*file.get_slice(name).get_shape()]
            wrong = f"{name} is of shape {saved}, where config.json asks for {[*shape]}"
            self.need(saved == [*shape], wrong)
            w = file.get_tensor(name)
        self.need(w.is_floating_point(), f"{name} is {w.dtype}: its weights are quantized")
        return w.float()

    def state(self, vocab_size: int) -> dict[str, Tensor]:
        """A state dict of GPT(replace(self.config, vocab_size=vocab_size)): the tables are cut to
        vocab_size rows, and padded with zeros. UsageError for a tensor that nothing reads."""
        loaded = self.ours and mapping.load_exported(self.folder)[0].state_dict()
        state = dict(loaded) if self.ours else self._fold()
        rows = (vocab_size + 63) // 64 * 64 - vocab_size
        for name in ("embed.weight", "head.weight"):
            if name in state:
                state[name] = F.pad(state[name][:vocab_size], (0, 0, 0, rows))
        return {name: w.contiguous() for name, w in state.items()}

    def _fold(self) -> dict[str, Tensor]:
        """Their weights as ours, whose norms have no weight and add 1e-6.

        1. The weight w of a norm goes into the matrices that read it: (x * w) M = x (w M), for the
           last norm into the head, which is then no longer the embedding.
        2. eps: x / sqrt(mean(x^2) + eps) = s x / sqrt(mean((s x)^2) + 1e-6) with s = sqrt(1e-6 /
           eps). So the residual stream is scaled by s: the embedding, and what adds to it.
        """
        c, V = self.config, self.config.vocab_size
        C, hidden = c.n_embd, c.mlp_hidden
        q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
        shapes = dict(embed=(V, C), head=(V, C), q=(q, C), k=(kv, C), v=(kv, C), out=(C, q))
        shapes |= dict(up=(hidden, C), gate=(hidden, C), down=(C, hidden))
        factor = dict.fromkeys(("embed", "out", "down"), (EPS / self.number("rms_norm_eps")) ** 0.5)
        names = mapping.names_in(c, self.name)
        if self.tied:
            names["head.weight"] = names["embed.weight"]
        state = {}
        for ours, theirs in names.items():
            kind, layer = kind_of(ours), ".".join(theirs.split(".")[:3])  # model.layers.3
            norm = {"head": "model.norm.weight"}
            norm |= dict.fromkeys("qkv", f"{layer}.input_layernorm.weight")
            norm |= dict.fromkeys(("up", "gate"), f"{layer}.post_attention_layernorm.weight")
            w = self.tensor(theirs, *shapes[kind])
            w = w * self.tensor(norm[kind], C) if kind in norm else w
            state[ours] = w * factor.get(kind, 1.0)
        unread = self.files.keys() - names.values() - set(mapping.norms_in(c, self.name))
        odd = sorted(name for name in unread if not name.endswith(UNREAD))
        self.need(not odd, f"its files have {odd[:1]}, which its class does not read")
        return state

    # ------------------------------------------------------------------- for train.py

    def complete(self, preset: cfg.Preset) -> cfg.Preset:
        """The preset with this architecture; UsageError for an option that wants another one, and
        for learning rates that are not for such weights."""
        if not self.ours and preset.train.optimizer == "muon":
            rates = f"--optimizer muon has no learning rates for the weights of {self.word}"
            raise UsageError(f"{rates}; add --optimizer adamw --lr 3e-5")
        others = folders.OF_DATA | {"doc_mask"}
        shape = {k: v for k, v in asdict(self.config).items() if k not in others}
        return folders.decide(preset, shape, self.word, "leave it out", folders.MAY_CHANGE)

    def check_data(self, manifest: Manifest, preset: cfg.Preset) -> None:
        """UsageError if the rows are not such as this model was trained on."""
        if not self.tokenizer.same_ids(Tokenizer.load(manifest.tokenizer_file())):
            raise UsageError(
                f"{manifest.dir} was prepared with another tokenizer than that of {self.word}; "
                f"prepare it with: python prepare_data.py {preset.name} --tokenizer {self.word} "
                "--data_dir ANOTHER"
            )
        self._check_tokens(manifest.vocab_size)
        row, window = preset.model.seq_len, 0 if self.ours else self.window
        short = f"its attention sees {window} positions, fewer than the {row} of a row"
        self.need(not window or row <= window, short)

    def _check_tokens(self, tokens: int) -> None:
        rows = self.config.vocab_size
        self.need(rows >= tokens, f"its table has {rows:,} rows, its tokenizer {tokens:,} tokens")

    def load_into(self, model: GPT) -> str:
        """Give the model, sharded or not, these weights; returns what to print. The first rank
        reads and compares them."""
        state, compared, problem = {}, "", None
        if not (dist.is_initialized() and dist.get_rank()):
            try:
                state = self.state(model.config.vocab_size)
                compared = self.compare(state, model.config)
            except (UsageError, CheckpointError, ParityError) as error:
                problem = error
        if problem := ranks.any_rank(problem):
            raise problem
        whole = dict(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
        set_model_state_dict(model, state, options=StateDictOptions(**whole))
        return f"weights from {self.word}: {compared}"

    def compare(self, state: dict[str, Tensor], c: GPTConfig) -> str:
        """What was found of the logits of these weights and of transformers on two random rows;
        ParityError if they differ."""
        if self.ours:
            return "an export of this program"
        folded = f"{self.name}, its norms folded into the matrices (another path for AdamW)"
        if find_spec("transformers") is None:
            return f"{folded}; logits not compared, as transformers is not installed"
        theirs, _ = parity.open_model(self.folder)
        T = min(POSITIONS, c.seq_len, self.config.seq_len)
        ours = mapping.model_of(replace(self.config, vocab_size=c.vocab_size, seq_len=T), state)
        ids = torch.randint(c.vocab_size, (2, T), generator=torch.Generator().manual_seed(0))
        far, _ = parity.compare(ours, theirs, ids, TOLERANCE, f"of {self.word}")
        return f"{folded}; logits differ from transformers' by {far:.1g} at most"


def load(word: str | Path, device="cpu", dtype: torch.dtype = torch.float32) -> tuple[GPT, dict]:
    """What eval.py looks at: (GPT in eval mode, facts like those of trainer.json)."""
    source = Source(word)
    if source.ours:
        return mapping.load_exported(source.folder, device, dtype)
    tokenizer, tokens = source.tokenizer, source.tokenizer.vocab_size
    source._check_tokens(tokens)
    c = replace(source.config, vocab_size=tokens, bos_id=tokenizer.bos_id)
    facts = {
        "step": 0,
        "tokens": 0,
        "model": asdict(c),
        "tokenizer": tokenizer,
        "identity": {"tokenizer_sha256": tokenizer.sha256},
        "about": f"a {source.name}",
    }
    return mapping.model_of(c, source.state(tokens), dtype, device), facts
