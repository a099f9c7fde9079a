"""Models of others: hf/imported.py against transformers, on random weights of unit scale, whose
norms and shapes are far from ours; their tokenizers, trained here, against `tokenizers` on the file
as it is; and what is refused, in its words."""

import contextlib
import io
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import CPU, code_texts, logged, printed, read_json, run_code, write_json
from data_helpers import prepare_tiny
from safetensors.torch import load_file, save_file
from table import read_table
from test_tokenizer import AWKWARD, oracle, random_texts
from torch.nn.functional import cross_entropy

import data
import eval as evaluate
import train
from config import UsageError
from hf import export, imported, mapping, tokenizer_json
from machinery.errors import DataError, ParityError
from machinery.shards import Manifest
from machinery.trained import EvalConfig
from tokenizer import Tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
END = "<|endoftext|>"


# What a tokenizer.json may have as its pre_tokenizer.
WORDS = '{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}'
DIGITS = '{"type": "Digits", "individual_digits": true}'


def in_turn(*steps: str) -> str:
    return f'{{"type": "Sequence", "pretokenizers": [{", ".join(steps)}]}}'


def splits(pattern: str) -> str:
    """By a pattern, then into bytes."""
    first = '{"type": "Split", "pattern": {"Regex": %s}, "behavior": "Isolated", "invert": false}'
    return in_turn(first % json.dumps(pattern), WORDS.replace("true}", "false}"))


FIRST = "<|begin_of_text|>"
FORMS = {  # name -> what is given to `make`
    "gpt2": dict(pre=WORDS, special=[END], late=True),
    "smollm2": dict(pre=in_turn(DIGITS, WORDS), special=[END, "<|im_start|>"]),
    "llama3": dict(
        pre=splits(LLAMA3), special=[FIRST, "<|end_of_text|>"], late=True, ignore_merges=True
    ),
    "qwen": dict(
        pre=splits(QWEN),
        special=[END, "<|im_end|>"],
        late=True,
        normalizer='{"type": "NFC"}',
        bos=None,
    ),
    "runs of spaces": dict(pre=WORDS, special=[END], plain=("  ", "    ")),
}
BLANK = """{"version": "1.0", "added_tokens": [], "normalizer": %s, "pre_tokenizer": %s,
"decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
"model": {"type": "BPE", "vocab": {}, "merges": []}}"""


def make(
    folder,
    pre,
    special,
    vocab_size=800,
    late=False,
    plain=(),
    normalizer="null",
    ignore_merges=False,
    bos=END,
):
    """Write tokenizer.json and tokenizer_config.json. late: the special tokens come last; where
    FIRST is one of them, it begins each text. bos: which begins one, as the second file says."""
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    bpe = Tokenizer.from_str(BLANK % (normalizer, pre))
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(plain) - late * len(special),
        special_tokens=[] if late else special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    others = ["Olá, açúcar! " * 20, "汉字 кириллица " * 50, "1234 567 3.14 a fish " * 80]
    bpe.train_from_iterator(code_texts()[1:6] + others, trainer)
    bpe.add_special_tokens(special)
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    if FIRST in special:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{FIRST} $A",
            pair=f"{FIRST} $A {FIRST} $B",
            special_tokens=[(FIRST, bpe.token_to_id(FIRST))],
        )
    tree = json.loads(bpe.to_str())
    tree["model"]["ignore_merges"] = ignore_merges
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tokenizer.json", tree)
    write_json(folder / "tokenizer_config.json", dict(bos_token=bos, eos_token=special[-1]))


MORE = ["12 3  45\n6 7", "a  1", "  1", "\n\n1", "x \u00a01", " x zebrafish zebrafishes", "e\u0301"]
MORE += ["<|endoftext|> a <|im_start|>user<tool_call> x <bos>", "<tool_call>", "a    b  c", "ab'LL"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """form -> its folder."""
    root = tmp_path_factory.mktemp("forms")
    for name, form in FORMS.items():
        make(root / name, **form)
    return {name: root / name for name in FORMS}


@pytest.mark.parametrize("name", FORMS)
def test_ids_are_those_of_tokenizers(name, made):
    """Also after a tokenizer has been saved and is read as any other, without hf/."""
    given = tokenizer_json.read(made[name])
    again = Tokenizer(given.spec)
    ids = oracle((made[name] / "tokenizer.json").read_text())
    for text in [*(text for text in AWKWARD if len(text) < 1100), *MORE, *random_texts(200, 3)]:
        plain = given.normalize(text)
        found = given.encode(text)
        assert found == again.encode(text) == ids(plain), repr(text[:80])
        assert given.decode(found) == plain
        assert sum(given.token_bytes[found]) == len(plain.encode())
        assert not set(found) & set(given.special.values())


def test_bos_is_known_by_its_role(made, tmp_path):
    for name, bos in (("llama3", FIRST), ("gpt2", END)):
        tokenizer = tokenizer_json.read(made[name])
        assert tokenizer.bos == bos == Tokenizer(tokenizer.spec).bos
        assert tokenizer.bos_id == tokenizer.special[bos]
    write_json(made["qwen"] / "config.json", dict(bos_token_id=798))
    one, other = (tokenizer_json.read(made["qwen"], bos) for bos in ("", "<|im_end|>"))
    assert (one.bos, other.bos) == (END, "<|im_end|>")
    assert one.same_ids(other) and one.sha256 != other.sha256
    shutil.copy(made["qwen"] / "tokenizer.json", tmp_path)  # alone, it does not say it
    assert tokenizer_json.read(tmp_path, END).bos == END
    for asked in ("", "<c>"):
        with pytest.raises(UsageError, match=r"--bos_token: <\|endoftext\|>, <\|im_end\|>"):
            tokenizer_json.read(tmp_path, asked)


def test_our_own_stay_as_they_are_to_the_byte(made, tmp_path):
    """And so does a file that begins a document by itself."""
    ours = Tokenizer.train(code_texts(), 400)
    (tmp_path / "tokenizer.json").write_text(ours.spec)
    assert tokenizer_json.read(tmp_path).spec == ours.spec
    assert tokenizer_json.read(tmp_path / "tokenizer.json", "<|end|>").bos == "<|end|>"
    text = (made["llama3"] / "tokenizer.json").read_text()
    assert tokenizer_json.read(made["llama3"]).spec == text


def test_others_are_refused_by_the_name_of_their_file(made, tmp_path):
    """Each kind of them: test_tokenizer.py."""
    tree = read_json(made["gpt2"] / "tokenizer.json")
    tree["model"] |= dict(byte_fallback=True, unk_token=END)  # as of SentencePiece
    write_json(tmp_path / "tokenizer.json", tree)
    for file in ("tokenizer.json", "none.json"):
        with pytest.raises(UsageError, match=str(tmp_path / file)):
            tokenizer_json.read(tmp_path / file, END)


V = 600  # tokens of the tokenizer; the tables have more rows
SHAPE = dict(vocab_size=631, hidden_size=72, intermediate_size=100, num_hidden_layers=4)
SHAPE |= dict(num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=96)
SHAPE |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def make_model(folder, name, max_shard_size="5GB", **options):
    """Save a model of transformers' class with weights of unit scale, and return it."""
    transformers = pytest.importorskip("transformers")

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    c = getattr(transformers, f"{name}Config")(**(SHAPE | options))
    model = getattr(transformers, f"{name}ForCausalLM")(c).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            draw = torch.randn(p.shape)
            if p.ndim == 1:  # norms: 0.3 .. 2.5, of either sign
                p.copy_(draw.sign() * (0.3 + draw.abs()))
            elif "embed" in key:
                p.copy_(draw * (0.125 if c.tie_word_embeddings else 0.3))
            else:
                p.copy_(draw * p.shape[1] ** -0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def refuses(word, words: str, kind=UsageError):
    with pytest.raises(kind, match=words):
        imported.ForeignModel(word)


def read(word) -> dict:
    source = imported.ForeignModel(word)
    return source.read(replace(source.config, vocab_size=V))[0]


SMOLLM2 = dict(tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=1e5, max_shard_size="60KB")
EXACT = {
    "shards": ("Llama", SMOLLM2),
    "head_dim": ("Llama", dict(head_dim=24, rms_norm_eps=1e-6)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=6, no_rope_layer_interval=3)),
    "qwen3": ("Qwen3", dict(head_dim=24, rms_norm_eps=1e-3, tie_word_embeddings=True)),
}


@pytest.mark.parametrize("case", EXACT)
def test_logits_are_those_of_transformers(case, tmp_path, monkeypatch):
    """On all positions that the model has, with tables cut to the tokens of a smaller tokenizer."""
    name, options = EXACT[case]
    theirs = make_model(tmp_path, name, **options)
    source = imported.ForeignModel(tmp_path)
    assert source.config.seq_len == 96 and source.config.vocab_size == 631
    c = replace(source.config, vocab_size=V)
    state, said = source.read(c)
    model = mapping.model_of(c, state)
    torch.manual_seed(1)
    ids = torch.randint(V, (3, 96))
    a = model(ids)
    b = theirs(ids).logits[..., :V]
    assert b.std() > 0.1 and (a - b).abs().max() < 2e-5 * max(1, b.std().item())
    if name == "Qwen3":
        (a.square().sum() + b.square().sum()).backward()
        one = model.blocks[1].attn.k_gain.grad
        other = theirs.model.layers[1].self_attn.k_norm.weight.grad
        assert (one - other).norm() < 1e-3 * other.norm()
    assert "logits differ by" in said
    wrong = state | {"blocks.1.attn.out.weight": 1.1 * state["blocks.1.attn.out.weight"]}
    monkeypatch.setattr(source, "_fold", lambda theirs: wrong)
    with pytest.raises(ParityError):
        source.read(c)


CHANGES = r"""
{"model_type": "qwen2"} => qwen2
{"model_type": "qwen3"} => k_norm
{"model_type": "qwen3", "sliding_window": 4096} => k_norm
{"model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": true} => sliding_window
{"model_type": "qwen3", "attention_bias": true} => bias
{"model_type": "qwen3", "layer_types": ["sliding_attention"]} => layer_types
{"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0}} => yarn
{"rope_parameters": {"rope_theta": "x"}} => 'x'
{"rope_scaling": {"type": "linear", "factor": 2.0}} => linear
{"partial_rotary_factor": 0.5} => 0.5
{"hidden_act": "gelu"} => gelu
{"attention_bias": true} => bias
{"model_type": "smollm3", "no_rope_layers": [1, 0, 0, 1]} => no_rope_layers
{"layer_types": ["conv", "conv", "conv", "conv"]} => conv
{"sliding_window": 32} => sliding_window': 32
what only the class says:
{"model_type": "mistral"} => sliding_window': 4096
{"is_causal": false} => is_causal
{"auto_map": {"AutoModel": "x.Y"}} => auto_map
{"quantization_config": {"bits": 4}} => quantization_config
{"pruned_heads": {"0": [1]}} => pruned_heads
{"is_encoder_decoder": true} => is_encoder_decoder
{"head_dim": 0.0} => head_dim
another width, which its tensors do not have; and one that its files cannot hold:
{"hidden_size": 54} => mismatched_keys
{"hidden_size": 589824} => bytes
{"num_hidden_layers": 5} => model.layers.4
{"num_hidden_layers": 3} => model.layers.3
{"head_dim": 144, "max_position_embeddings": 1048576} => positions
a key of 9 MB:
{"LONG": 1} => x{59}': 1, and
of another type, or of a size, of which transformers would make anything:
{"num_hidden_layers": 1e31} => num_hidden_layers
{"num_hidden_layers": 10000000000000000000000000000000} => num_hidden_layers
{"num_attention_heads": -1} => num_attention_heads
{"hidden_size": true} => hidden_size
{"max_position_embeddings": "a/b"} => max_position_embeddings
{"tie_word_embeddings": {"rope_type": "x"}} => tie_word_embeddings
{"rms_norm_eps": 1e400} => rms_norm_eps
{"rope_parameters": -1} => rope_theta
{"layer_types": DEEP} => layer_types
{"layer_types": "\u001b[2J"} => layer_types
{"model_type": "smollm3", "no_rope_layers": "a/b"} => no_rope_layers
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_model(folder, "Llama", tie_word_embeddings=False)
    return folder


@pytest.fixture
def own_llama(llama, tmp_path):
    """A copy, to be changed."""
    return shutil.copytree(llama, tmp_path / "m")


OF_VERSION_4 = """{"rope_theta": 77000.0, "rope_parameters": null, "head_dim": null,
    "rope_scaling": null, "quantization_config": null, "return_dict": true,
    "output_attentions": false, "torchscript": false, "torch_dtype": "float32", "num_labels": 2,
    "use_bfloat16": false, "tf_legacy_loss": false, "pruned_heads": {}, "is_decoder": false,
    "add_cross_attention": false, "cross_attention_hidden_size": null, "max_length": 20,
    "tie_encoder_decoder": false, "is_encoder_decoder": false, "id2label": {"0": "LABEL_0"},
    "gradient_checkpointing": false, "partial_rotary_factor": 1.0, "use_sliding_window": false}"""


def test_what_transformers_4_wrote_is_read_too(own_llama):
    file = own_llama / "config.json"
    write_json(file, read_json(file) | json.loads(OF_VERSION_4))
    source = imported.ForeignModel(own_llama)
    assert source.config.rope_theta == 77_000.0
    source.read(source.config)


@pytest.mark.parametrize("change, words", read_table(CHANGES))
def test_what_we_do_not_compute_is_refused_by_its_name(change, words, own_llama):
    """Before transformers makes anything of it, in a sentence, without what a terminal obeys."""
    file = own_llama / "config.json"
    change = change.replace("LONG", "x" * 9_000_000).replace("DEEP", "[" * 60 + "]" * 60)
    write_json(file, read_json(file) | json.loads(change))
    with pytest.raises(UsageError, match=f"{own_llama}.*{words[0]}") as refusal:
        read(own_llama)
    said = str(refusal.value)
    assert len(said) < 700 and "\x1b" not in said


STAND_IN = """
def get_kernel(repo, *args, **options):
    raise SystemExit(f"asked for the code of {repo}")

def __getattr__(name):
    does_nothing = lambda self, x=None, *args, **options: x
    return type(name, (), {"__init__": lambda self, *a, **k: None, "__call__": does_nothing})
"""
READ = "import sys; from hf.imported import *; s = ForeignModel(sys.argv[1]); s.read(s.config)"


def test_nobody_is_asked_for_the_code_that_a_file_names(own_llama, tmp_path):
    """By `_attn_implementation`, transformers would have `kernels` fetch and run it."""
    file = own_llama / "config.json"
    others = {"_attn_implementation", "_name_or_path", "architectures", "dtype", "bos_token_id"}
    write_json(file, read_json(file) | dict.fromkeys(imported.ASIDE | others, "a/b"))
    about = tmp_path / "site" / "kernels-0.18.2.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    (tmp_path / "site" / "kernels.py").write_text(STAND_IN)
    run_code(READ, own_llama, PYTHONPATH=str(tmp_path / "site"))


def test_of_the_folder_transformers_reads_nothing(llama, own_llama):
    """Each of these files would be read by its from_pretrained, or take the weights' place."""
    zeros = {k: torch.zeros_like(w) for k, w in load_file(llama / "model.safetensors").items()}
    save_file(zeros, own_llama / "shard-00001-model-00001-of-00001.safetensors")
    (own_llama / "generation_config.json").write_text("[" * 100_000)
    (own_llama / "model.safetensors.index.json").write_text("{}")
    ours = read(llama)
    again = read(own_llama)
    assert all(torch.equal(w, again[name]) for name, w in ours.items())


def test_no_pickle_is_opened_and_no_name_in_a_folder_leads_out_of_it(own_llama, tmp_path):
    """In the index of sharded weights; a link; a pipe, at which a program would wait for ever."""
    weights = own_llama / "model.safetensors"
    index = own_llama / "model.safetensors.index.json"
    outside = shutil.copy(weights, tmp_path / "outside.safetensors")
    weights.rename(own_llama / "pytorch_model.bin")
    refuses(own_llama, "model.safetensors")
    for name in ("pytorch_model.bin", "../outside.safetensors", str(outside), ""):
        write_json(index, {"weight_map": {"model.norm.weight": name}})
        refuses(own_llama, "index.json, weight_map, model.norm.weight is", DataError)
    index.unlink()
    weights.symlink_to(outside)
    refuses(own_llama, "link", DataError)
    weights.unlink()
    os.mkfifo(weights)
    refuses(own_llama, "model.safetensors")
    (own_llama / "adapter_config.json").write_text("{}")  # it names another folder
    refuses(own_llama, "adapter")


def test_a_model_of_the_hub_is_read_from_its_cache(llama, tmp_path, monkeypatch):
    """Offline, and through the cache's own links; and what is not there is said."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refuses("hf:me/other", "hf:me/other")
    snapshot = tmp_path / "models--me--mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(llama, tmp_path / "models--me--mine" / "blobs")
    for path in llama.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda word, **how: str(snapshot))
    assert read("hf:me/mine")["embed.weight"].shape == (640, 72)


TRAIN = (
    "tiny --steps 4 --tokens_per_step 512 --no_compile --device cpu --dtype fp32 --warmup 2 "
    "--eval_tokens 1024 --log_every 1 --peak_tflops 1 --optimizer adamw --lr 1e-4"
).split()


def quietly(main, *argv) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([str(word) for word in argv]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def begun(small_data, tmp_path_factory):
    """A model of Qwen3's form with SmolLM2's tokenizer, data prepared with it, and a run begun from
    it: (folder, what the run printed)."""
    folder = tmp_path_factory.mktemp("begun")
    make_model(folder / "model", "Qwen3", **SMOLLM2, head_dim=8)
    make(folder / "model", **FORMS["smollm2"], vocab_size=V)
    texts = f"files:{small_data.parent / 'texts'}"
    prepare_tiny(folder / "data", "--source", texts, "--tokenizer", folder / "model")
    where = ["--data_dir", folder / "data", "--run_dir", folder / "run"]
    said = quietly(train.main, *TRAIN, *where, "--init_from", folder / "model")
    return folder, said


def test_training_begins_where_transformers_stands(begun):
    """The validation before the first step is transformers' loss on the same rows."""
    import transformers

    folder, said = begun
    assert f"decided   by {folder / 'model'}: n_head 9, not 2" in said
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    nats = []
    for inputs, targets, _ in data.val_batches(Manifest.load(folder / "data"), 8, 16):
        with torch.no_grad():
            logits = theirs(inputs).logits[..., :V]
        counts = targets != data.IGNORED
        nats += cross_entropy(logits[counts], targets[counts], reduction="none").tolist()
    first, *_, last = logged(folder / "run", "val_loss")
    assert first == pytest.approx(sum(nats) / len(nats), abs=1e-4)
    assert 0 < last < first
    words = [folder / "model", *CPU, "--data_dir", folder / "data", "--rows", 16]
    assert f"{first:.4f}" in quietly(evaluate.main, "loss", *words)


def test_the_run_goes_on_and_is_exported_and_imported_again(begun, tmp_path):
    folder, _ = begun
    here = shutil.copytree(folder, tmp_path / "all")
    out = here / "export"
    begin = [*TRAIN, "--data_dir", here / "data"]
    said = quietly(train.main, *begin, "--run_dir", here / "run", "--init_from", here / "model")
    assert "is not read: the run has its own checkpoint" in said and "is finished" in said
    export.main([str(here / "run"), "--out", str(out)])
    given = tokenizer_json.read(here / "model")
    back = tokenizer_json.read(out)
    learned = mapping.load_exported(out)[0].blocks[2].attn.k_gain
    assert 0 < (learned - read(here / "model")["blocks.2.attn.k_gain"]).abs().max() < 1e-3
    assert imported.ForeignModel(out).ours and back.bos == END
    assert back.same_ids(given) and back.encode("12 ab  3") == given.encode("12 ab  3")
    begin = [*TRAIN[:-2], "--data_dir", here / "data"]  # without --lr
    said = quietly(train.main, *begin, "--run_dir", here / "again", "--init_from", out)
    assert "an export of this program" in said
    ends = pytest.approx(logged(here / "run", "val_loss")[-1], abs=1e-5)
    assert logged(here / "again", "val_loss")[0] == ends


def test_what_does_not_fit_is_refused_before_anything_is_built(begun, small_data, tmp_path):
    folder, _ = begun
    model = folder / "model"
    begin = [*TRAIN[:-2], "--init_from", model, "--run_dir", tmp_path / "run", "--data_dir"]
    for argv, value in (
        ([*begin, folder / "data", "--optimizer=muon"], "--optimizer muon"),
        ([*begin, folder / "data", "--n_layer=3"], "--n_layer 3"),
        ([*begin, small_data], f"--tokenizer {model}"),
    ):
        with pytest.raises(UsageError, match=value):
            train.main([str(word) for word in argv])
    assert not (tmp_path / "run").exists()
    source = imported.ForeignModel(model)
    with pytest.raises(UsageError, match="631 rows for 632 tokens"):
        source.read(replace(source.config, vocab_size=632))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_begin_where_one_does(parallel, begun, tmp_path):
    """The first rank reads, and hands each its part."""
    folder, _ = begun
    where = ["--data_dir", folder / "data", "--run_dir", tmp_path / "run", "--parallel", parallel]
    printed("train.py", *TRAIN, *where, "--init_from", folder / "model", nproc=2, timeout=500)
    one, two = (logged(path / "run", "val_loss") for path in (folder, tmp_path))
    assert two == pytest.approx(one, rel=1e-5)


def test_a_damaged_file_is_named(begun, tmp_path):
    folder, _ = begun
    for name in (
        "config.json",
        "model.safetensors.index.json",
        "model-00003-of-",
        "tokenizer.json",
    ):
        copied = shutil.copytree(folder / "model", tmp_path / name)
        (path,) = copied.glob(f"{name}*")
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises((UsageError, DataError), match=str(copied)):
            imported.load(EvalConfig(checkpoint=str(copied)))
