"""The knobs: one dataclass per concern, a docstring per field (its help text), and the presets.

TrainConfig says what a run *is*: a different value makes a different run. RunConfig says where and
how it is carried out: a resumed run may change it. GPTConfig is the architecture. Every field is an
option of its program. Imports nothing of ours and no torch, so that any file may import it. Next:
machinery/cli.py turns a command line into a preset.
"""

import math
import re
import shlex
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal


class UsageError(ValueError):
    """A user's mistake: the programs print its text, one sentence with the value and the way out,
    and exit with 2. Raised on purpose; an unexpected exception shows a traceback."""

    exit_code = 2


def install(requirements: str) -> str:
    """The command that installs optional packages: `install("requirements-eval.txt")`."""
    file = str(Path(__file__).with_name(requirements))
    return shlex.join([sys.executable, "-m", "pip", "install", "-r", file])


LARGEST = 10**15  # a float still holds it exactly
# The least and the most an option may be; others: 0 to LARGEST (int) or to 1e30 (float).
Size = Annotated[int, 1, 1 << 20]
Count = Annotated[int, 1, LARGEST]
Share = Annotated[float, 0, 1]
Local = Annotated[str, "a path on this machine"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]


def check_values(options) -> None:
    """UsageError if a number in a dataclass is out of its range, as NaN always is; or for a URL as
    the name of a Local file, which would make a folder of that name, password included."""
    for option in fields(options):
        value = getattr(options, option.name)
        if option.type is Local and "://" in value:
            raise UsageError(f"--{option.name} is a URL, but must be a path on this machine")
        if isinstance(value, int | float):
            most = LARGEST if isinstance(value, int) else 1e30
            least, most = getattr(option.type, "__metadata__", (0, most))
            if not least <= value <= most:
                raise UsageError(f"--{option.name} {value} must be {least} or more, up to {most:,}")


EXTRAS = ("key_offset", "value_embeds")
VALUE_GATE_CHANNELS = 12  # the gate looks at the first few channels only: a few FLOPs


@dataclass(frozen=True)
class GPTConfig:
    """The architecture. Some (`in_stock_shape`, smol-135m) have a stock class of transformers; an
    export of any other brings its own modelling file."""

    seq_len: Size = 2048
    """Positions the model sees at once (a row holds one token more)."""
    vocab_size: Size = 32_768
    """Tokens in the vocabulary; the tables are padded to a multiple of 64 rows."""
    n_layer: Annotated[int, 1, 256] = 12
    """Transformer blocks."""
    n_head: Size = 6
    """Query heads."""
    n_kv_head: Size = 6
    """Key/value heads; fewer than n_head is grouped-query attention (GQA)."""
    head_dim: Size = 128
    """Channels of a head."""
    n_embd: Annotated[int, VALUE_GATE_CHANNELS, 1 << 20] = 768
    """Width of the residual stream."""
    mlp: Literal["relu2", "swiglu"] = "relu2"
    """Activation of the MLP: ReLU squared, or SwiGLU."""
    mlp_hidden: Size = 3072
    """Hidden width of the MLP."""
    qk_norm: bool = True
    """RMSNorm on queries and keys, per head."""
    qk_gain: bool = False
    """Learned factors on queries and keys after that norm, one per channel of a head, shared by the
    heads of a layer; as in the Qwen3 of others, from which they come (--init_from)."""
    embed_norm: bool = True
    """RMSNorm right after the embedding."""
    tie_embeddings: bool = False
    """One table for the embedding and the head."""
    logit_softcap: float = 15.0
    """Soft cap: squash the logits to +-this with tanh; 0: none."""
    rope_theta: Annotated[float, 1, LARGEST] = 100_000.0
    """Base of the rotary frequencies."""
    nope_every: int = 0
    """No positional encoding (NoPE) on every k-th layer; 0: RoPE everywhere."""
    doc_mask: bool = False
    """Keep attention within a document (dense mask: memory grows with T squared)."""
    extras: tuple[str, ...] = ()
    """Shortcuts that make small models learn faster: key_offset, value_embeds (see Attention).
    Give an empty string for none."""
    bos_id: int = 0
    """Id of the token that begins each document, and each piece of one that was cut."""

    def __post_init__(self):
        object.__setattr__(self, "extras", tuple(name for name in self.extras if name))
        check_values(self)
        for name in self.extras:
            if name not in EXTRAS:
                raise UsageError(f"extras has no {name!r}; choose from {', '.join(EXTRAS)}")
        if self.n_head % self.n_kv_head:
            raise UsageError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}; "
                f"try --n_kv_head {math.gcd(self.n_head, self.n_kv_head)}"
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs of channels")
        if self.seq_len * self.head_dim > 1 << 27:  # a file of 3 MB could ask for tables of 64 GB
            raise UsageError(
                f"{self.seq_len:,} positions of {self.head_dim:,} channels are too many for the "
                "tables of RoPE"
            )
        if self.mlp not in ("relu2", "swiglu"):
            raise UsageError(f"mlp {self.mlp!r} is neither relu2 nor swiglu")

    @property
    def padded_vocab(self) -> int:
        """Rows of the tables: vocab_size rounded up to 64, for the tensor cores."""
        return (self.vocab_size + 63) // 64 * 64

    def has_value_embed(self, layer: int) -> bool:
        """Alternate layers, the last one included."""
        return "value_embeds" in self.extras and (self.n_layer - layer) % 2 == 1

    def has_rope(self, layer: int) -> bool:
        return self.nope_every == 0 or (layer + 1) % self.nope_every != 0


@dataclass(frozen=True)
class DataConfig:
    """What `prepare_data.py` reads and writes."""

    source: tuple[str, ...] = ("stdlib",)
    """Where the text comes from, one or more of `stdlib`, `stdlib+site`, `chats:stdlib`,
    `files:PATH`, `hf:REPO[:CONFIG[:SPLIT]][@REVISION]` (split: train, or as in
    `hf:HuggingFaceH4/ultrachat_200k::train_sft`). `NAME=` before it names the source in a mixture;
    `#FIELD+FIELD` after it names the fields that hold the text, `#messages` or `#conversations`
    those that hold conversations, of which only the answers are learned (docs/chat.md)."""
    name: str = ""
    """Of the data: data/NAME, in place of data/PRESET; train.py then takes the same --name."""
    data_dir: Local = ""
    """Folder to write; empty: data/PRESET, or that of `name`."""
    tokenizer: Local = ""
    """An existing tokenizer.json to use, its folder, or `hf:REPO`; empty: train one on the text."""
    bos_token: str = ""
    """The special token of `tokenizer` that begins each document; empty: the one it names."""
    vocab_size: Annotated[int, 0, 1 << 20] = 0
    """Tokens in the vocabulary, special tokens included; 0: as in the preset's model."""
    encoding: str = "utf-8"
    """Of the files, if it is another one: gb18030, big5, cp1251, cp1252 (Windows), latin-1."""
    nfc: bool = False
    """Normalize text to Unicode NFC before encoding."""
    digits: Annotated[int, 1, 3] = 2
    """Most digits of a number in one token of a tokenizer that is trained; llama.cpp needs 1
    (docs/leave.md)."""
    dedup: Literal["none", "exact"] = "none"
    """exact: drop documents that are equal to an earlier one of their source. It takes a second
    pass over the text."""
    row_len: Annotated[int, 0, 1 << 20] = 0
    """Tokens in a row: seq_len inputs + 1; 0: as in the preset's model."""
    tokens: str = ""
    """Stop after enough units for this many training tokens (`2B`, `500M`), shared among the
    sources by `mixture`; `all` or empty: everything (of a Hub source only if you say `all`)."""
    mixture: tuple[str, ...] = ()
    """Each source's share of `tokens`, `NAME=SHARE ...`; empty: the shares that the preset trains
    with, or equal shares if you give other sources."""
    publish: str = ""
    """Also upload the data to this URL (`s3://BUCKET/data`), which train.py --data_dir can read."""
    val_fraction: Annotated[float, 1e-9, 0.999] = 0.02
    """Share of the text, chosen by content hash, that is held out for validation."""
    workers: Annotated[int, 0, 1024] = 0
    """Processes; 0: one per core."""
    cluster: str = ""
    """Address of a Dask scheduler (`tcp://HOST:8786`) whose workers prepare the units; empty:
    processes of this machine. Scheduler and workers need the repository's folder in PYTHONPATH;
    all machines must share data_dir (and the files of a `files:` source)."""


@dataclass(frozen=True)
class TrainConfig:
    """What a run of `train.py` is, apart from its model and its data."""

    # How much
    steps: int = 0
    """Optimizer steps; 0: as many as `tokens` takes."""
    tokens: str = ""
    """Tokens to train on (`2B`, `500M`); empty: 10.5 per weight of the blocks and the head."""
    epochs: Annotated[float, 0, 1e7] = 0.0
    """How often to read the data's training rows (2, or 0.5), instead of steps or tokens."""
    tokens_per_step: Count = 524_288  # 256 rows x 2,048
    """Tokens in one optimizer step over all ranks and micro-batches."""

    # On which rows
    mixture: tuple[str, ...] = ()
    """Weights of the data's sources, `NAME=WEIGHT ...`; empty: in proportion to their rows."""
    decay_mixture: tuple[str, ...] = ()
    """Another mixture for the last `decay` of the run; empty: the same."""
    seed: int = 0
    """Seed of the initial weights and of the order of the rows."""

    # Optimizer
    optimizer: Literal["muon", "adamw"] = "muon"
    """muon: Muon for the matrices, AdamW for the rest; adamw: AdamW for all; best with
    --tie_embeddings."""
    lr: float = 6e-4
    """Learning rate of `--optimizer adamw`; small models want a higher one, large ones a lower."""
    lr_scale: float = 1.0
    """Factor on the three learning rates of `--optimizer muon`, which follow."""
    matrix_lr: float = 0.02
    """Muon: matrices inside the blocks."""
    embedding_lr: float = 0.3
    """AdamW alongside Muon: embedding tables, at width 768 (scaled by width^-1/2)."""
    head_lr: float = 0.008
    """AdamW alongside Muon: the head, likewise."""
    rates_at: Count = 524_288
    """Tokens per step at which these three rates were tuned. Another tokens_per_step scales them by
    a factor, which the program prints (optim.py)."""
    weight_decay: float = 0.1
    """muon: of the matrices, cautious, scheduled like the learning rate (that of the tables is
    fixed, in optim.py); adamw: of all 2-D weights."""
    grad_clip: float = 0.0
    """Largest gradient norm; 0: no clipping."""
    schedule: Literal["wsd", "cosine", "multistep"] = "wsd"
    """Learning rate over the run: warmup-stable-decay, cosine, or steps at 80% and 90%."""
    warmup: int = 40
    """Steps of linear warmup; Muon's momentum takes up to 20 times as many."""
    decay: Share = 0.65
    """Last share of the run, in which wsd lowers the learning rate and decay_mixture applies."""
    final_lr: Share = 0.05
    """Final learning rate, as a fraction of the peak (wsd, cosine)."""
    dtype: Dtype = "auto"
    """Dtype of the computation; the weights are fp32. auto: bf16 where the hardware has it, fp16 on
    older GPUs with tensor cores (V100, T4). fp16 uses a loss scale (optim.py)."""

    def __post_init__(self):
        check_values(self)
        if any(self.decay_mixture) and not self.decay:
            raise UsageError("--decay_mixture has no effect with --decay 0")


@dataclass(frozen=True)
class RunConfig:
    """Where and how a run is carried out; a resumed run may change any of it."""

    # Where
    name: str = ""
    """Of the run and its data: runs/NAME and data/NAME, in place of runs/PRESET and data/PRESET."""
    run_dir: Local = ""
    """Folder of the run; empty: runs/PRESET, or that of `name`."""
    data_dir: str = ""
    """Folder that prepare_data.py wrote, or URL that it published to; empty: data/PRESET, or that
    of `name`."""
    stage: Local = ""
    """Copy the data to this (local, fast) folder first, verify it, and read from there. Data behind
    a URL is always copied: by default to data/cache."""

    # On what
    device: str = "auto"
    """auto, cuda, mps or cpu."""
    compile: bool = True
    """torch.compile the training step; if that fails, run eager (a sharded run stops instead)."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Several ranks: a whole model on each (ddp), or sharded (fsdp)."""
    micro_batch: int = 0
    """Rows per forward pass on one rank; 0: found by the program."""
    recompute: bool = False
    """Compute each block again in backward: less memory, a third more time, the same gradients."""

    # Watch
    log_every: int = 10
    """Steps between printed lines, or 15 s (metrics.jsonl gets every step); 0: first and last."""
    eval_every: int = 250
    """Steps between validations; each new best one saves a checkpoint. Validation always runs
    before the first step and at the end; 0: only then."""
    eval_tokens: Count = 10_485_760  # 20 x 524,288
    """Validation targets to score while training, always the same ones; the end scores all."""
    wandb: bool = False
    """Send metrics.jsonl to Weights & Biases as well (if its own settings, such as `wandb offline`,
    allow it)."""
    profile: bool = False
    """Record a few steps: a trace, peak memory, and where the time goes; then stop."""
    plan: bool = False
    """Print the run's size, data, hours and dollars, and stop. Other machines: `eval.py plan`."""
    usd_per_hour: float = 3.0
    """What one GPU costs; for --plan."""
    peak_tflops: float = 0.0
    """Peak of one device in dense TFLOP/s, for MFU; 0: looked up by name; on a CPU, measured."""

    # Survive
    save_every: int = 0
    """Steps between checkpoints; 0: by the clock alone (there is one at the end anyway)."""
    save_minutes: float = 15.0
    """Minutes between checkpoints; 0: by steps alone."""
    keep: Count = 2
    """Newest valid checkpoints to keep, besides the best; 2 or more survive a damaged file."""
    keep_every: int = 0
    """Steps between checkpoints that are kept for good (0: none)."""
    mirror: str = ""
    """Also copy each checkpoint to MIRROR/NAME, where NAME is the last part of run_dir, in the
    background; a folder, or the URL of a store (`s3://BUCKET/runs`). On another machine the same
    command resumes from there (docs/store.md)."""
    resume: Local = "auto"
    """auto: from the newest valid checkpoint in run_dir, if any. Or the path of a checkpoint: this
    run's newest valid one, or one of another run to start from (afterwards, the same command
    resumes from this run's own)."""
    init_from: Local = ""
    """Begin a new run with the weights of a checkpoint, or of a run's newest one (as in eval.py, a
    preset or a name in runs/ will do); or of a model for transformers, given by its folder or as
    `hf:REPO`, which then decides the architecture."""
    skip_nonfinite: int = 0
    """Steps with a non-finite loss or gradient to skip before giving up; 0: stop at the first."""

    def __post_init__(self):
        check_values(self)


@dataclass(frozen=True)
class Preset:
    """A model, its data and its training, under one name."""

    model: GPTConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    prompts: tuple[str, ...] = ("The largest planet is", "Once upon a time", "Water boils when")
    """What `eval.py sample` continues."""
    name: str = ""
    """That name; filled in by machinery/cli.py."""

    def __post_init__(self):
        sized = replace(
            self.data,
            vocab_size=self.data.vocab_size or self.model.vocab_size,
            row_len=self.data.row_len or self.model.seq_len + 1,
        )
        object.__setattr__(self, "data", sized)


TOKENS_PER_WEIGHT = 10.5  # of the blocks and the head: nanochat's ratio (docs/scaling.md)


def preset_of_depth(depth: int) -> Preset:
    """The depth dial, nanochat's: the rest follows from the number of layers.

    Width: 64 x depth, rounded up to whole heads of 128; MLP 4x. Tokens: 10.5 per weight of blocks
    and head; 2% more are prepared. Batch: 2^19 tokens at depth 12, elsewhere in proportion to
    tokens^0.383, to the nearest power of two. Learning rates: those of 2^19 tokens and width 768,
    times the factors of optim.py for this batch and this width. Weight decay: 0.28 up to
    depth 12, then in proportion to the root of the batch, and against the number of weights."""
    n_head = (depth + 1) // 2
    width = 128 * n_head
    model = GPTConfig(
        n_layer=depth,
        n_embd=width,
        n_head=n_head,
        n_kv_head=n_head,
        mlp_hidden=4 * width,
        extras=("key_offset", "value_embeds"),
    )
    weights = 12 * depth * width**2 + model.padded_vocab * width
    at_12 = 12 * 12 * 768**2 + 32_768 * 768
    batch = 2 ** round(19 + 0.383 * math.log2(weights / at_12))
    tokens = 1.02 * TOKENS_PER_WEIGHT * weights
    held_out = max(0.001, round(1e7 / tokens, 4))  # with 1M tokens, chance moves the loss by 1%
    data = DataConfig(
        ("hf:karpathy/climbmix-400b-shuffle",), tokens=f"{tokens / 1e9:.3g}B", val_fraction=held_out
    )
    decay = round(0.28 * min(1, math.sqrt(batch / 2**19) * at_12 / weights), 3)
    return Preset(
        model,
        data,
        TrainConfig(tokens_per_step=batch, weight_decay=decay),
        RunConfig(eval_tokens=2_097_152),
    )


def in_stock_shape(preset: Preset) -> Preset:
    """The nearest model that other programs know, Qwen3's: SwiGLU, with about as many weights as
    ReLU squared has, no extras, no softcap; one digit per token (docs/leave.md)."""
    hidden = 64 * round(preset.model.mlp_hidden * 2 / 3 / 64)  # three matrices instead of two
    shape = dict(mlp="swiglu", mlp_hidden=hidden, extras=(), logit_softcap=0.0)
    data = replace(preset.data, digits=1)
    return replace(preset, model=replace(preset.model, **shape), data=data)


# For the thesis's two runs, below. Its text names only RoPE and grouped queries. The tied head and
# biatron-345m's base of RoPE are those of its code (https://github.com/Fazzioni/Biatron), which has
# 1,000,000 for smol-135m. SwiGLU and its width, RMSNorm and the absence of biases are ours: that
# code has LayerNorm, biases, and a GELU of 4 x n_embd, with as many weights.
_LLAMA = dict(
    mlp="swiglu", head_dim=64, qk_norm=False, embed_norm=False, tie_embeddings=True,
    logit_softcap=0.0, rope_theta=10_000.0,
)  # fmt: skip

PRESETS = {
    "tiny": Preset(
        GPTConfig(
            seq_len=512, vocab_size=4096, n_layer=4, n_embd=256, n_head=2, n_kv_head=2,
            mlp_hidden=1024, extras=("key_offset", "value_embeds"),
        ),
        DataConfig(),
        TrainConfig(
            steps=1000, tokens_per_step=2048,  # 4 rows x 512
            lr=1e-3, matrix_lr=0.01, embedding_lr=0.05, head_lr=0.004, rates_at=2048,
            weight_decay=0.0, warmup=10, decay=0.8,
        ),
        RunConfig(log_every=25, eval_tokens=40_960, save_minutes=1.0),
        prompts=("def", "class", "import"),
    ),
    **{f"d{depth}": preset_of_depth(depth) for depth in (12, 20, 24)},
    # The two runs that the documents behind the course describe (course/README.md), by tables 8.1,
    # 9.2 and 9.3 of the thesis, except for _LLAMA, mlp_hidden and what is marked. Each trains a
    # tokenizer of its own, on its own text: the thesis took SmolLM2's for the first run, which
    # --tokenizer hf:HuggingFaceTB/SmolLM2-135M gives, and for the second one that it had trained on
    # FineWeb-2's Portuguese, without tokens for a pair seen fewer than 5 times (ours: 2).
    "smol-135m": Preset(
        GPTConfig(
            vocab_size=49_152, n_layer=30, n_embd=576, n_head=9, n_kv_head=3, mlp_hidden=1536,
            **_LLAMA,
        ),
        DataConfig(
            source=("hf:HuggingFaceFW/fineweb-edu:sample-100BT",), tokens="51B", val_fraction=0.001,
        ),
        TrainConfig(
            tokens="50B", tokens_per_step=2_097_152,  # 1,024 rows x 2,048
            optimizer="adamw", lr=6e-5, schedule="cosine", final_lr=0.1,
            warmup=100,  # ours
            grad_clip=1.0,  # as in its code, like the weight decay of 0.1
        ),
    ),
    "biatron-345m": Preset(
        GPTConfig(
            seq_len=4096, vocab_size=32_000, n_layer=32, n_embd=960, n_head=15, n_kv_head=5,
            mlp_hidden=2560, **_LLAMA,
        ),
        DataConfig(
            source=(
                "gigaverbo=hf:TucanoBR/GigaVerbo",
                "reasoning=hf:cnmoro/reasoning-v1-20m-portuguese#prompt+thought+answer",
                "finemath=hf:HuggingFaceTB/finemath:finemath-4plus",
                "infiwebmath=hf:HuggingFaceTB/finemath:infiwebmath-4plus",
            ),
            nfc=True, tokens="325B", val_fraction=0.001,
        ),
        TrainConfig(
            steps=152_000, tokens_per_step=2_097_152,  # 512 rows x 4,096
            optimizer="adamw", lr=6e-5, schedule="cosine", warmup=152,  # 0.1% of the steps
            # Both as in its code, whose cosine would reach final_lr only at step 430,000.
            final_lr=0.1, grad_clip=1.0,
            # 1.4, 2.1, 1.2 and 1.4 epochs of these (docs/scaling.md)
            mixture=("gigaverbo=60", "reasoning=30", "finemath=5", "infiwebmath=5"),
        ),
        prompts=("O maior planeta é", "Era uma vez", "A água ferve quando"),
    ),
}  # fmt: skip

PRESETS["tiny-stock"] = in_stock_shape(PRESETS["tiny"])
# tiny-chat and tiny-stock-chat learn to answer: they begin with the weights of runs/tiny and
# runs/tiny-stock, and have their tokenizers.
for _base in ("tiny", "tiny-stock"):
    _preset = PRESETS[_base]
    PRESETS[f"{_base}-chat"] = replace(
        _preset,
        model=replace(_preset.model, doc_mask=True),
        data=DataConfig(("chats:stdlib",), tokenizer=f"runs/{_base}/tokenizer.json"),
        train=replace(_preset.train, steps=320),
        run=replace(_preset.run, init_from=f"runs/{_base}", eval_every=80),
        prompts=("Who are you?", "Which arguments does join(a, b) take?", "What does open do?"),
    )


def find_preset(word: str) -> Preset | None:
    """The preset of that name, or of that depth: "d16"; "d16-stock" in a shape that other programs
    know. None if there is none."""
    match = re.fullmatch("d([1-9][0-9]?)(-stock)?", word)
    if match is None:
        return PRESETS.get(word)
    preset = preset_of_depth(int(match[1]))
    return in_stock_shape(preset) if match[2] else preset


# Options of nanoGPT, nanochat, litgpt, torchtitan, Megatron-LM, llama.cpp and the Trainer of
# transformers, under ours; and those of ours that are gone, or that only some commands have.
_FOREIGN = """
--tokens_per_step (in tokens) <= batch_size global_batch_size total_batch_size train_batch_size
--micro_batch <= device_batch_size local_batch_size micro_batch_size per_device_train_batch_size
what --tokens_per_step makes of it <= gradient_accumulation_steps grad_accum
--lr_scale, or with --optimizer adamw --lr <= learning_rate max_lr
--steps <= max_iters max_steps num_iterations num_steps train_iters
--epochs <= num_epochs num_train_epochs
--tokens, or in eval.py sample --max_new_tokens <= max_tokens
--steps, as many as fit (docs/machines.md counts them) <= minutes
--warmup (in steps) <= warmup_iters warmup_ratio warmup_steps lr_warmup_iters
--decay (a fraction of the run) <= lr_decay_iters warmdown_ratio
--schedule <= lr_scheduler_type lr_decay_style decay_lr
--final_lr (a fraction) <= min_lr final_lr_frac
--head_lr <= unembedding_lr
--grad_clip <= max_grad_norm max_norm clip_grad
--seq_len <= block_size context_length ctx_size max_seq_len seq_length sequence_len sequence_length
--n_layer, or the preset: d12 <= depth n_layers num_layers num_hidden_layers
--n_embd <= hidden_size d_model
--n_head <= n_heads num_heads num_attention_heads
--n_kv_head <= n_kv_heads num_key_value_heads n_query_groups
--mlp_hidden <= intermediate_size
--run_dir <= out_dir output_dir
--name <= run_name model_tag
--data_dir (prepare_data.py --source reads texts) <= dataset data_path
--source, of prepare_data.py <= input input_file train_file
the first word: eval.py loss NAME <= name
an option of eval.py sample <= n max_new_tokens prompt temperature top_k top_p
--prompt, of eval.py sample <= start
--n, of eval.py sample <= num_samples num_return_sequences
--max_new_tokens, of eval.py sample <= length max_length num_tokens n_predict num_predict
--temperature, of eval.py sample (0: always the likeliest token) <= temp do_sample greedy
no option, as text is read about once <= dropout
--eval_every and --save_every <= eval_interval eval_steps save_interval save_steps
--eval_tokens (in tokens) <= eval_iters
--log_every <= log_interval logging_steps
--keep <= save_total_limit
--dtype <= fp16 bf16 mixed_precision precision torch_dtype
--recompute <= gradient_checkpointing
--compile, the default <= torch_compile
torchrun's, which starts a process on each <= devices gpus num_gpus num_nodes nproc_per_node
--resume auto, the default: the same command goes on <= resume_from_checkpoint resume_from
--wandb <= wandb_log wandb_project report_to
the first word, a preset such as d12, or --init_from <= model model_name_or_path config
all 22, always; lm_eval asks any of them (docs/evaluation.md) <= tasks
an option of train.py --plan and of eval.py plan <= usd_per_hour
--workers, of prepare_data.py <= dataloader_num_workers num_proc num_workers
a constant in optim.py <= adam_beta1 adam_beta2 beta1 beta2
grep, in the text that was prepared <= find
"""
FOREIGN = {
    name: ours
    for ours, _, names in (row.partition(" <= ") for row in _FOREIGN.splitlines())
    for name in names.split()
}
