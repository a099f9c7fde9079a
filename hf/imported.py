"""Somebody's checkpoint of a stock class of transformers -> our model, exactly or not at all.

Opens a folder, or a repository of the Hub (`hf:REPO`). transformers, which knows what each of its
releases wrote, is never shown the folder: a key of config.json may have it run code of the Hub, or
take all memory. It is given the shape, each value checked, and the tensors of the safetensors. All
else that config.json says must be as the class has it anyway, or switch something off that it does
not have, or it is an error that names the key.
No file is opened that could run code, or that lies outside of the folder. A folder of export.py is
read as well. Next: train.py --init_from and eval.py open one; mapping.py is for exports.
"""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, get_type_hints

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import config as cfg
from config import GPTConfig, UsageError
from hf import mapping, parity, tokenizer_json
from machinery import disk, folders, formats
from machinery.errors import reason_of
from machinery.ranks import Team
from machinery.shards import Manifest
from machinery.trained import EvalConfig, Trained
from model import GPT, kind_of
from tokenizer import Tokenizer

TOLERANCE = 1e-4  # of logits in fp32, times their standard deviation if that is above 1
POSITIONS = 64  # of each of the two rows on which they are compared
KINDS = {"llama": "Llama", "mistral": "Mistral", "smollm3": "SmolLM3", "qwen3": "Qwen3"}
ASIDE = set(
    """activation architectures attention_dropout attn_implementation chunk_size_feed_forward dtype
    embd_pdrop finetuning_task gradient_checkpointing hidden_dropout hidden_dropout_prob
    id2label ignore_index initializer_range is_llama_config label2id max_sequence_length
    max_window_layers neftune_noise_alpha no_rope_layer_interval num_labels
    original_max_position_embeddings output_past prefix pretraining_tp problem_type resid_pdrop
    return_dict rope_interleaved task_specific_params tf_legacy_loss tie_encoder_decoder
    tokenizer_class torch_dtype torchscript transformers.js_config unsloth_fixed unsloth_version
    use_bfloat16 use_return_dict

    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind bad_words_ids begin_suppress_tokens bos_token_id cache_config
    cache_implementation compile_config constraints continuous_batching_config
    decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id
    epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids
    forced_bos_token_id forced_eos_token_id guidance_scale is_assistant length_penalty
    low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time
    min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_logits_to_keep
    num_return_sequences output_attentions output_hidden_states output_logits output_scores
    pad_token_id penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values
    renormalize_logits repetition_penalty return_dict_in_generate sequence_bias speculation_type
    stop_strings suppress_tokens target_lookbehind temperature token_healing top_h top_k top_p
    transformers_version typical_p use_cache use_mtp watermarking_config""".split()
)
"""Keys that programs write into config.json, and by which no logit changes. The second part: how to
generate."""


@formats.on_disk
class Index:
    """model.safetensors.index.json."""

    weight_map: dict[str, Annotated[str, r"[\w.-]{1,200}\.safetensors"]]
    """The name of a weight -> its file."""


class ForeignModel:
    """A folder with a model for transformers. Made from its config.json; `read` opens the rest."""

    def __init__(self, word: str | Path):
        """word: the folder, or hf:REPO[@REVISION]. UsageError if it is no model of ours."""
        self.word = str(word)
        self.folder = tokenizer_json.local_folder(word)
        path = self.file("config.json")
        tree = disk.read_json(path) if path.exists() else {}
        self.ours = "nano2049" in tree  # export.py wrote it
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
        with self.reading():
            self._read_config(tree)
        self._compare(tree)
        with torch.device("meta"):
            weights = GPT(self.config).named_parameters()
        n = sum(w.numel() for name, w in weights if kind_of(name) != "head")  # it may be tied
        size = sum(file.stat().st_size for file in self.files)  # each weight has a byte or more
        self.need(n <= size, f"{n:,} weights do not fit into its files of {size:,} bytes")

    def file(self, name: str) -> Path:
        return tokenizer_json.file_in(self.folder, name)

    def need(self, holds: object, reason: str) -> None:
        if not holds:
            raise UsageError(f"{self.word} cannot be imported exactly: {reason}")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """UsageError for whatever transformers raises: its errors have many classes."""
        try:
            yield
        except Exception as error:
            raise UsageError(f"{self.word} cannot be imported: {reason_of(error)}") from None

    def _weight_files(self) -> list[Path]:
        """The files of weights: safetensors in the folder itself, no pickle, link or pipe."""
        self.need(not self.file("adapter_config.json").exists(), "it has an adapter")
        files = [self.file("model.safetensors")]
        index = self.file("model.safetensors.index.json")
        if index.exists() and not files[0].exists():
            files = sorted({self.file(x) for x in formats.read(index, Index).weight_map.values()})
        for file in files:
            self.need(file.is_file(), f"it has no {file.name}; a pickle (.bin) is never opened")
        return files

    def _read_config(self, tree: dict) -> None:
        """The architecture, with as many positions and tokens as the model has, and for it the
        config of transformers' class. What config.json does not say is as the class has it."""
        import transformers

        their_class = getattr(transformers, f"{self.kind}Config")
        rope = tree.get("rope_parameters")  # in which transformers 5 has rope_theta
        said = dict(vars(their_class)) | (rope if isinstance(rope, dict) else {}) | tree
        # A Mistral that does not say it sees 4,096 positions; our model sees all. The others have a
        # switch for it, which is off if they do not say it.
        off = hasattr(their_class, "use_sliding_window") and not said["use_sliding_window"]
        tree["sliding_window"] = None if off else said.get("sliding_window")
        n_head = said["num_attention_heads"]
        said["head_dim"] = said.get("head_dim") or said["hidden_size"] // n_head
        said["num_key_value_heads"] = said.get("num_key_value_heads") or n_head
        kinds = get_type_hints(GPTConfig, include_extras=True)
        shape = {
            k: formats.checked(kinds[k], said.get(key), key) for k, key in mapping.KEYS.items()
        }
        has_rope = formats.checked(list[int], said.get("no_rope_layers", []), "no_rope_layers")
        normed = self.kind == "Qwen3"
        c = GPTConfig(
            **shape,
            **mapping.STOCK,
            qk_norm=normed,
            qk_gain=normed,
            embed_norm=False,
            nope_every=has_rope.index(0) + 1 if 0 in has_rope else 0,
        )
        eps = formats.checked(formats.Positive, said["rms_norm_eps"], "rms_norm_eps")
        given = dict(rms_norm_eps=eps, sliding_window=None)
        self.theirs = their_class(**mapping.config_json(c, self.kind) | given)
        self.config = replace(c, tie_embeddings=False)  # see `_fold`

    def _compare(self, tree: dict) -> None:
        """UsageError if config.json, which is `tree`, says of the model what self.theirs does
        not."""
        standard = self.theirs.to_dict()
        standard |= standard["rope_parameters"]  # transformers 4 has rope_theta beside the others
        standard |= dict(is_causal=True, partial_rotary_factor=1.0)
        for key, value in tree.items():
            same = value is None or value == standard.get(key)
            off = key not in standard and not value  # false, 0 or empty
            self.need(
                same or off or key in ASIDE or key.startswith("_"),
                f"its config.json has {key[:60]!r}: {reprlib.repr(value)}, and our {self.kind} has "
                f"{reprlib.repr(standard.get(key))}; if no logit depends on it, remove it",
            )

    # ------------------------------------------------------------------- the weights

    def read(self, c: GPTConfig) -> tuple[dict[str, Tensor], str]:
        """(A state dict for GPT(c), and what to print about it.)
        UsageError for a weight that is missing or that nothing reads, ParityError if the logits of
        transformers on two random rows differ."""
        self.need(
            c.vocab_size <= self.config.vocab_size,
            f"its table has {self.config.vocab_size} rows for {c.vocab_size} tokens",
        )
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
        far, _ = parity.compare_logits(ours, theirs, ids, TOLERANCE, f"of {self.word}")
        return state, (
            f"a {self.kind}, its norms folded into the matrices (AdamW takes another path); "
            f"logits differ by {far:.1g} at most"
        )

    def _fold(self, theirs: nn.Module) -> dict[str, Tensor]:
        """Their weights as ours, whose norms have no weight and add 1e-6.

        1. The weight w of a norm goes into the matrices that read it: (x * w) M = x (w M), for the
           last norm into the head, which is then no longer the embedding.
        2. eps: x / sqrt(mean(x^2) + eps) = s x / sqrt(mean((s x)^2) + 1e-6) with s = sqrt(1e-6 /
           eps). So the residual stream is scaled by s: the embedding, and what adds to it. So are
           queries and keys that have a norm; its weight, after which RoPE comes, is our gain.
        """
        saved = theirs.state_dict()
        scale = (1e-6 / theirs.config.rms_norm_eps) ** 0.5
        scaled = ["embed", "out", "down", *("qk" if self.config.qk_norm else "")]
        state = {}
        for ours, name in mapping.names_in(self.config, self.kind).items():
            kind = kind_of(ours)
            w = saved[name]
            if kind in mapping.NORMS:
                w = w * saved[mapping.NORMS[kind].format(ours.split(".")[1])]
            state[ours] = w * scale if kind in scaled else w
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
        shape = asdict(self.config)
        for name in folders.OF_DATA | {"doc_mask"}:
            del shape[name]
        return folders.decide(preset, shape, self.word, "leave it out", folders.MAY_CHANGE)

    def check_data(self, manifest: Manifest, preset: cfg.Preset) -> None:
        """UsageError unless the rows have this model's tokens."""
        own = tokenizer_json.read(self.folder)
        if not own.same_ids(Tokenizer.load(manifest.tokenizer_file())):
            raise UsageError(
                f"{manifest.dir} was prepared with another tokenizer than that of {self.word}; "
                f"prepare it with: python prepare_data.py {preset.name} --tokenizer {self.word} "
                "--data_dir ANOTHER"
            )

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
    tokenizer = tokenizer_json.read(foreign.folder)
    c = replace(foreign.config, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id)
    state, remark = foreign.read(c)
    provenance = formats.Provenance(
        step=0, tokens=0, identity={"tokenizer_sha256": tokenizer.sha256}, model=c
    )
    return Trained(
        config, path, provenance, mapping.model_of(c, state, dtype, device), tokenizer, remark
    )
