"""Somebody's checkpoint of a stock class of transformers -> our model, exactly or not at all.

Opens a folder, or a repository of the Hub (`hf:REPO`), with transformers itself, which knows what
each of its releases wrote. An allow-list: whatever model.py does not compute is an error that
names it. Nothing in a folder is opened that could run code, or that lies outside of it. A folder of
export.py is read as well. Next: train.py --init_from and eval.py open one; mapping.py is for
exports.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
KINDS = ("llama", "mistral", "smollm3")  # model_type of config.json


class Source:
    """A folder with a model for transformers. Made from its config.json; `read` opens the rest."""

    def __init__(self, word: str | Path) -> None:
        """word: the folder, or hf:REPO[@REVISION]. UsageError if it is no model of ours."""
        self.word, self.folder = str(word), tokenizer_json.local_folder(word)
        path = tokenizer_json.file_in(self.folder, "config.json")
        tree = disk.read_json(path) if path.exists() else {}
        self.ours, self.window = "nano2049" in tree, 0  # export.py wrote it; it sees all positions
        if self.ours:
            self.config, _ = mapping.read_facts(self.folder)
            return
        parity.need_transformers()
        size = self._check_files(tree)
        self.config = c = self._read_config()
        layer = 2 * (c.n_head + c.n_kv_head) * c.head_dim + 3 * c.mlp_hidden
        n = c.n_embd * (c.vocab_size + c.n_layer * layer)  # weights of a byte or more each
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
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UsageError(f"{self.word} cannot be read by transformers: {reason}") from None

    def _check_files(self, tree: dict) -> int:
        """UsageError unless transformers may open the folder: one of KINDS, in safetensors, with no
        code, adapter, link or pipe. Returns the size of the weights in bytes."""
        kind = tree.get("model_type")
        self.need(kind in KINDS, f"a {kind} is none of {', '.join(KINDS)} (docs/begin.md)")
        for key in ("auto_map", "quantization_config", "transformers_weights"):
            self.need(not tree.get(key), f"its config.json has {key}")
        sizes = {}
        for path in self.folder.iterdir():
            if not path.is_dir():
                file = tokenizer_json.file_in(self.folder, path.name)
                self.need(file.is_file(), f"{path.name} is no regular file")
                sizes[path.name] = file.stat().st_size
        self.need("adapter_config.json" not in sizes, "it has an adapter")
        index, listed = "model.safetensors.index.json", {"": "model.safetensors"}
        if index in sizes:
            listed = disk.read_json(tokenizer_json.file_in(self.folder, index)).get("weight_map")
            self.need(isinstance(listed, dict), f"its {index} has no weight_map")
        names = {str(name) for name in listed.values()}
        for name in sorted(names):
            safe = name in sizes and name.endswith(".safetensors")
            self.need(safe, f"it has no {name}, or that is a pickle, which is never opened")
        return sum(sizes[name] for name in names)

    def _read_config(self) -> GPTConfig:
        """The architecture, with as many positions and tokens as the model has."""
        from transformers import AutoConfig

        here = dict(local_files_only=True, trust_remote_code=False)
        with self.reading():
            c = AutoConfig.from_pretrained(self.folder, **here)
        rope, n_head = c.rope_parameters, c.num_attention_heads
        is_whole = rope.get("partial_rotary_factor") in (None, 1)
        self.need(rope.get("rope_type") == "default" and is_whole, f"its RoPE is {rope}")
        self.need(c.hidden_act == "silu", f"its activation is {c.hidden_act}, not silu")
        self.need(c.rms_norm_eps > 0, f"its rms_norm_eps is {c.rms_norm_eps}")
        layers = set(getattr(c, "layer_types", None) or [])
        self.need(layers <= {"full_attention", "sliding_attention"}, f"it has layers of {layers}")
        if c.model_type == "mistral" or "sliding_attention" in layers:
            self.window = c.sliding_window or 0
        nope_every = self._nope_every(getattr(c, "no_rope_layers", None) or [])
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
            **mapping.LLAMA | dict(nope_every=nope_every),
        )

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
            theirs = parity.open_model(self.folder)
        state = mapping.fit_tables(c, self._fold(theirs))
        T = min(POSITIONS, c.seq_len, self.config.seq_len)
        ours = mapping.model_of(replace(self.config, vocab_size=c.vocab_size, seq_len=T), state)
        ids = torch.randint(c.vocab_size, (2, T), generator=torch.Generator().manual_seed(0))
        far, _ = parity.compare(ours, theirs, ids, TOLERANCE, f"of {self.word}")
        how = "its norms folded into the matrices (AdamW takes another path)"
        return state, f"a {theirs.config.model_type}, {how}; logits differ by {far:.1g} at most"

    def _fold(self, theirs: nn.Module) -> dict[str, Tensor]:
        """Their weights as ours, whose norms have no weight and add 1e-6.

        1. The weight w of a norm goes into the matrices that read it: (x * w) M = x (w M), for the
           last norm into the head, which is then no longer the embedding.
        2. eps: x / sqrt(mean(x^2) + eps) = s x / sqrt(mean((s x)^2) + 1e-6) with s = sqrt(1e-6 /
           eps). So the residual stream is scaled by s: the embedding, and what adds to it.
        """
        saved, names = theirs.state_dict(), mapping.names_in(self.config, "Llama")
        unread = saved.keys() - names.values() - set(mapping.norms_in(self.config, "Llama"))
        self.need(not unread, f"it has {sorted(unread)[:1]}, which our model has not")
        scale = (EPS / theirs.config.rms_norm_eps) ** 0.5
        factor = dict.fromkeys(("embed", "out", "down"), scale)
        state = {}
        for ours, name in names.items():
            kind, layer = kind_of(ours), ".".join(name.split(".")[:3])  # model.layers.3
            norm = {"head": "model.norm.weight"}
            norm |= dict.fromkeys("qkv", f"{layer}.input_layernorm.weight")
            norm |= dict.fromkeys(("up", "gate"), f"{layer}.post_attention_layernorm.weight")
            w = saved[name] * saved[norm[kind]] if kind in norm else saved[name]
            state[ours] = (w * factor.get(kind, 1.0)).detach()
        return state

    # ------------------------------------------------------------------- for train.py

    def complete(self, preset: cfg.Preset) -> cfg.Preset:
        """The preset with this architecture; UsageError for an option that wants another one, and
        for learning rates that are not for such weights."""
        if not self.ours and preset.train.optimizer == "muon":
            why = f"--optimizer muon has no learning rates for {self.word}"
            raise UsageError(f"{why}; add --optimizer adamw --lr 3e-5")
        others = folders.OF_DATA | {"doc_mask"}
        shape = {k: v for k, v in asdict(self.config).items() if k not in others}
        return folders.decide(preset, shape, self.word, "leave it out", folders.MAY_CHANGE)

    def check_data(self, manifest: Manifest, preset: cfg.Preset) -> None:
        """UsageError unless the rows have this model's tokens and fit into its attention window."""
        if not self.tokenizer.same_ids(Tokenizer.load(manifest.tokenizer_file())):
            why = f"{manifest.dir} was prepared with another tokenizer than that of {self.word}"
            how = f"python prepare_data.py {preset.name} --tokenizer {self.word} --data_dir ANOTHER"
            raise UsageError(f"{why}; prepare it with: {how}")
        row, window = preset.model.seq_len, self.window
        self.need(row <= (window or row), f"its attention sees {window} positions, a row has {row}")

    def load_into(self, model: GPT) -> str:
        """Give the model, sharded or not, these weights; returns what to print. The first rank
        reads and compares them."""
        state, said, problem = {}, "", None
        if not (dist.is_initialized() and dist.get_rank()):
            try:
                state, said = self.read(model.config)
            except (UsageError, CheckpointError, ParityError) as error:
                problem = error
        if problem := ranks.any_rank(problem):
            raise problem
        whole = dict(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
        set_model_state_dict(model, state, options=StateDictOptions(**whole))
        return f"weights from {self.word}: {said}"


def load(word: str | Path, device="cpu", dtype: torch.dtype = torch.float32) -> tuple[GPT, dict]:
    """The model for eval.py: (GPT in eval mode, facts like those of trainer.json)."""
    source = Source(word)
    if source.ours:
        return mapping.load_exported(source.folder, device, dtype)
    tokenizer, tokens = source.tokenizer, source.tokenizer.vocab_size
    c = replace(source.config, vocab_size=tokens, bos_id=tokenizer.bos_id)
    state, said = source.read(c)
    facts = dict(step=0, tokens=0, model=asdict(c), about=said, tokenizer=tokenizer)
    facts["identity"] = {"tokenizer_sha256": tokenizer.sha256}
    return mapping.model_of(c, state, dtype, device), facts
