"""Somebody's checkpoint of a stock class of transformers -> our model, exactly or not at all.

Opens a folder, or a repository of the Hub (`hf:REPO`). transformers, which knows what each of its
releases wrote, is never shown the folder: a key of config.json may have it run code of the Hub, or
take all memory. It is given the keys in GIVEN, each checked, and the tensors of the safetensors.
Whatever model.py does not compute is an error that names it. No file is opened that could run code,
or that lies outside of the folder. A folder of export.py is read as well. Next: train.py
--init_from and eval.py open one; mapping.py is for exports.
"""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import config as cfg
from config import GPTConfig, Size, UsageError
from hf import mapping, parity, tokenizer_json
from machinery import disk, folders, formats
from machinery.errors import DataError, reason_of
from machinery.ranks import Team
from machinery.shards import Manifest
from machinery.trained import EvalConfig, Trained
from model import GPT, kind_of
from tokenizer import Tokenizer

TOLERANCE = 1e-4  # of logits in fp32, times their standard deviation if that is above 1
POSITIONS = 64  # of each of the two rows on which they are compared
EPS = 1e-6  # of model.rms_norm
# model_type -> class
KINDS = {"llama": "Llama", "mistral": "Mistral", "smollm3": "SmolLM3", "nanochat": "NanoChat"}

HARMLESS = set(
    """_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path
    activation architectures attention_dropout attn_implementation bos_token_id do_sample dtype
    embd_pdrop eos_token_id initializer_range is_llama_config max_length max_new_tokens
    max_sequence_length max_window_layers model_type original_max_position_embeddings pad_token_id
    pretraining_tp repetition_penalty resid_pdrop rope_interleaved temperature tokenizer_class top_k
    top_p torch_dtype transformers.js_config transformers_version unsloth_fixed unsloth_version
    use_cache""".split()
)
"""Keys of config.json that change no logit in transformers. They are not passed on either."""


Word = Annotated[str, "[A-Za-z_][A-Za-z0-9_]{0,63}"]
GIVEN = {
    Size: """
    head_dim hidden_size intermediate_size max_position_embeddings no_rope_layer_interval
    num_attention_heads num_hidden_layers num_key_value_heads sliding_window vocab_size""",
    formats.Positive: "final_logit_softcapping partial_rotary_factor rms_norm_eps rope_theta",
    bool: "attention_bias mlp_bias tie_word_embeddings use_sliding_window",
    Word: "hidden_act",
    list[int | Word]: "layer_types no_rope_layers",
    dict[Word, formats.Positive | Word | None]: "rope_parameters rope_scaling",
}
"""The type of a value -> the keys of config.json that transformers is given."""


class ForeignModel:
    """A folder with a model for transformers. Made from its config.json; `read` opens the rest."""

    def __init__(self, word: str | Path):
        """word: the folder, or hf:REPO[@REVISION]. UsageError if it is no model of ours."""
        self.word = str(word)
        self.folder = tokenizer_json.local_folder(word)
        path = tokenizer_json.file_in(self.folder, "config.json")
        tree = disk.read_json(path) if path.exists() else {}
        self.ours = "nano2049" in tree  # export.py wrote it
        self.window = 0  # it sees all positions
        if self.ours:
            self.config = mapping.read_record(self.folder).model
            return
        parity.need_transformers()
        kind = tree.get("model_type")
        self.need(
            kind in list(KINDS),  # it may be of any type
            f"a {reprlib.repr(kind)} is none of {', '.join(KINDS)} (docs/begin.md)",
        )
        self.kind = KINDS[kind]
        self.files = self._weight_files()
        self.theirs = self._their_config(tree)
        self.config = c = self._read_config()
        size = sum(file.stat().st_size for file in self.files)
        layer = 2 * (c.n_head + c.n_kv_head) * c.head_dim + 2 * c.mlp_hidden
        n = c.n_embd * (c.vocab_size + c.n_layer * layer)  # at least, and each has a byte or more
        self.need(n <= size, f"{n:,} weights do not fit into its files of {size:,} bytes")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_json.read(self.folder)

    def need(self, holds: object, reason: str) -> None:
        if not holds:
            raise UsageError(f"{self.word} cannot be imported exactly: {reason}")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """UsageError for whatever transformers raises: its errors have many classes."""
        try:
            yield
        except Exception as error:
            raise UsageError(
                f"{self.word} cannot be read by transformers: {reason_of(error)}"
            ) from None

    def _weight_files(self) -> list[Path]:
        """The files of weights: safetensors in the folder itself, no pickle, link or pipe."""
        there = {path.name for path in self.folder.iterdir()}
        self.need("adapter_config.json" not in there, "it has an adapter")
        index = "model.safetensors.index.json"
        listed = {"": "model.safetensors"}
        if index in there and "model.safetensors" not in there:
            listed = disk.read_json(tokenizer_json.file_in(self.folder, index)).get("weight_map")
            named = isinstance(listed, dict) and all(type(x) is str for x in listed.values())
            self.need(named, f"its {index} has no weight_map")
        files = []
        for name in sorted(set(listed.values())):
            safe = name in there and name.endswith(".safetensors")
            self.need(safe, f"it has no {name}, or that is a pickle, which is never opened")
            files.append(tokenizer_json.file_in(self.folder, name))
            self.need(files[-1].is_file(), f"{name} is no regular file")
        return files

    def _their_config(self, tree: dict):
        """The config of transformers' class, from the keys in GIVEN and from no others."""
        import transformers

        kinds = {key: kind for kind, keys in GIVEN.items() for key in keys.split()}
        given = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        for key, value in tree.items():
            if key not in HARMLESS:
                self.need(
                    key in kinds,
                    f"its config.json has {key[:60]!r}, which may change what it computes; "
                    "if not, remove it in a copy of the folder",
                )
                try:
                    given[key] = formats.checked(kinds[key] | None, value, key)
                except DataError as error:
                    self.need(False, str(error))
        with self.reading():
            return getattr(transformers, f"{self.kind}Config")(**given)

    def _read_config(self) -> GPTConfig:
        """The architecture, with as many positions and tokens as the model has."""
        c = self.theirs
        rope, n_head = c.rope_parameters, c.num_attention_heads
        is_whole = rope.get("partial_rotary_factor") in (None, 1)
        is_number = isinstance(rope["rope_theta"], int | float)
        kind = rope["rope_type"]
        is_plain = kind == "default" and is_whole and is_number
        self.need(is_plain, f"its RoPE is of type {kind}: {reprlib.repr(rope)}")
        own = mapping.LLAMA
        activation = "silu"
        if self.kind == "NanoChat":
            own = mapping.NANOCHAT | dict(logit_softcap=c.final_logit_softcapping or 0.0)
            activation = "relu2"
            # The stream cannot be scaled as in `_fold`: the norm after the embedding makes it 1.
            self.need(c.rms_norm_eps == EPS, f"its norms add {c.rms_norm_eps}, ours {EPS}")
        self.need(c.hidden_act == activation, f"its activation is {c.hidden_act}, not {activation}")
        layers = set(getattr(c, "layer_types", None) or [])
        self.need(layers <= {"full_attention", "sliding_attention"}, f"it has layers of {layers}")
        if c.model_type == "mistral" or "sliding_attention" in layers:
            self.window = c.sliding_window or 0
        nope_every = self._nope_every(getattr(c, "no_rope_layers", None) or [])
        try:
            return GPTConfig(
                seq_len=min(c.max_position_embeddings, self.window or c.max_position_embeddings),
                vocab_size=c.vocab_size,
                n_layer=c.num_hidden_layers,
                n_head=n_head,
                n_kv_head=c.num_key_value_heads,
                head_dim=getattr(c, "head_dim", None) or c.hidden_size // n_head,
                n_embd=c.hidden_size,
                mlp_hidden=c.intermediate_size,
                rope_theta=float(rope["rope_theta"]),
                tie_embeddings=False,
                **own | dict(nope_every=nope_every),
            )
        except UsageError as error:
            raise UsageError(f"{self.word} cannot be imported: {error}") from None

    def _nope_every(self, has_rope: list) -> int:
        """SmolLM3 lists 1 for each layer with RoPE, 0 for the others."""
        without = [i for i, on in enumerate(has_rope, 1) if not on]
        every = without[0] if without else len(has_rope) + 1
        regular = [i for i in range(1, len(has_rope) + 1) if i % every == 0]
        self.need(without == regular, f"its layers {without} have no RoPE: not every k-th")
        return every if without else 0

    # ------------------------------------------------------------------- the weights

    def read(self, c: GPTConfig) -> tuple[dict[str, Tensor], str]:
        """(A state dict for GPT(c), and what to print about it.)
        UsageError for a weight that is missing or that nothing reads, ParityError if the logits of
        transformers on two random rows differ."""
        rows = self.config.vocab_size
        self.need(c.vocab_size <= rows, f"its table has {rows} rows for {c.vocab_size} tokens")
        if self.ours:
            model, _ = mapping.load_exported(self.folder)
            return mapping.fit_tables(c, model.state_dict()), "an export of this program"
        with self.reading():
            weights = {}
            for file in self.files:
                weights |= load_file(file)
            theirs = parity.open_model(self.kind, None, config=self.theirs, state_dict=weights)
        state = mapping.fit_tables(c, self._fold(theirs))
        T = min(POSITIONS, c.seq_len, self.config.seq_len)
        ours = mapping.model_of(replace(self.config, vocab_size=c.vocab_size, seq_len=T), state)
        ids = torch.randint(c.vocab_size, (2, T), generator=torch.Generator().manual_seed(0))
        far, _ = parity.compare(ours, theirs, ids, TOLERANCE, f"of {self.word}")
        changed = "its norms folded into the matrices (AdamW takes another path)"
        if self.kind == "NanoChat":
            changed = "half of the rows of q and k with the opposite sign"
        return state, f"a {self.kind}, {changed}; logits differ by {far:.1g} at most"

    def _fold(self, theirs: nn.Module) -> dict[str, Tensor]:
        """Their weights as ours, whose norms have no weight and add 1e-6.

        1. The weight w of a norm goes into the matrices that read it: (x * w) M = x (w M), for the
           last norm into the head, which is then no longer the embedding.
        2. eps: x / sqrt(mean(x^2) + eps) = s x / sqrt(mean((s x)^2) + 1e-6) with s = sqrt(1e-6 /
           eps). So the residual stream is scaled by s: the embedding, and what adds to it.
        3. NanoChat has no weights in its norms, but rotates by the opposite angle. With S, 1 on the
           first half of a head's channels and -1 on the second, R(-t) = S R(t) S. So q and k are
           multiplied by S; the S in front leaves their product as it is. The norm of q and k
           commutes with all of these.
        """
        saved = theirs.state_dict()
        names = mapping.names_in(self.config, self.kind)
        norms = set(mapping.norms_in(self.config, self.kind))
        unread = saved.keys() - names.values() - norms
        self.need(not unread, f"it has {sorted(unread)[:1]}, which our model has not")
        scale = (EPS / theirs.config.rms_norm_eps) ** 0.5
        factor = dict.fromkeys(("embed", "out", "down"), scale)
        state = {}
        for ours, name in names.items():
            kind = kind_of(ours)
            layer = ".".join(name.split(".")[:3])  # model.layers.3
            norm = {"head": "model.norm.weight"}
            norm |= dict.fromkeys("qkv", f"{layer}.input_layernorm.weight")
            norm |= dict.fromkeys(("up", "gate"), f"{layer}.post_attention_layernorm.weight")
            w = saved[name] * factor.get(kind, 1.0)
            if norm.get(kind) in norms:
                w = w * saved[norm[kind]]
            if self.kind == "NanoChat" and kind in ("q", "k"):
                halves = w.unflatten(0, (-1, 2, self.config.head_dim // 2))  # (heads, 2, D/2, C)
                w = (halves * torch.tensor([1.0, -1.0])[:, None, None]).flatten(0, 2)
            state[ours] = w.detach()
        return state

    # ------------------------------------------------------------------- for train.py

    def complete(self, preset: cfg.Preset) -> cfg.Preset:
        """The preset with this architecture; UsageError for an option that wants another one, and
        for learning rates that are not for such weights."""
        if not self.ours and preset.train.optimizer == "muon":
            raise UsageError(
                f"--optimizer muon has no learning rates for {self.word}; add --optimizer adamw "
                "--lr 3e-5"
            )
        others = folders.OF_DATA | {"doc_mask"}
        shape = {k: v for k, v in asdict(self.config).items() if k not in others}
        return folders.decide(preset, shape, self.word, "leave it out", folders.MAY_CHANGE)

    def check_data(self, manifest: Manifest, preset: cfg.Preset) -> None:
        """UsageError unless the rows have this model's tokens and fit into its attention window."""
        if not self.tokenizer.same_ids(Tokenizer.load(manifest.tokenizer_file())):
            raise UsageError(
                f"{manifest.dir} was prepared with another tokenizer than that of {self.word}; "
                f"prepare it with: python prepare_data.py {preset.name} --tokenizer {self.word} "
                "--data_dir ANOTHER"
            )
        row = preset.model.seq_len
        window = self.window
        self.need(row <= (window or row), f"its attention sees {window} positions, a row has {row}")

    def load_into(self, model: GPT, team: Team) -> str:
        """Give the model, sharded or not, these weights; returns what to print. The first rank
        reads and compares them."""
        state = {}

        def read() -> str:
            weights, remark = self.read(model.config)
            state.update(weights)
            return remark

        remark = team.on_first(read)
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
        set_model_state_dict(model, state, options=whole)
        return f"weights from {self.word}: {remark}"


def load(config: EvalConfig, device="cpu", dtype: torch.dtype = torch.float32) -> Trained:
    """The model that --checkpoint names, for eval.py."""
    foreign = ForeignModel(config.checkpoint)
    path = Path(config.checkpoint)
    if foreign.ours:
        model, record = mapping.load_exported(foreign.folder, device, dtype)
        return Trained(config, path, record, model)
    tokenizer = foreign.tokenizer
    tokens = tokenizer.vocab_size
    c = replace(foreign.config, vocab_size=tokens, bos_id=tokenizer.bos_id)
    state, remark = foreign.read(c)
    origin = formats.Origin(
        step=0, tokens=0, identity={"tokenizer_sha256": tokenizer.sha256}, model=c
    )
    model = mapping.model_of(c, state, dtype, device)
    return Trained(config, path, origin, model, tokenizer, remark)
