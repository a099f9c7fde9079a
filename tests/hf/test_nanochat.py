"""hf/nanochat.py and the class NanoChat in hf/imported.py: against nanochat's forward pass, written
out below; against its own code, where NANOCHAT names a clone; and what is refused, by its name."""

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import tiktoken
import torch
import torch.nn.functional as F
from conftest import environment, look, write_json
from damages import flipped

from config import UsageError
from hf import imported, mapping, nanochat
from machinery.errors import DataError
from tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

SHAPE = dict(sequence_len=48, n_layer=3, n_head=4, n_kv_head=2, n_embd=32)
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL = ("<|bos|>", "<|user_start|>", "<|user_end|>")


@pytest.fixture(scope="module")
def encoding() -> tiktoken.Encoding:
    """As nanochat makes it: special tokens after the others, ids in the order of the merges."""
    ours = Tokenizer.train(["the cat sat on the mat, 1234 cats' mats. " * 40], 300)
    texts = [ours.bytes_of[i] for i in range(ours.vocab_size) if i not in ours.special.values()]
    ranks = {text: rank for rank, text in enumerate(texts)}
    special = {name: len(ranks) + i for i, name in enumerate(SPECIAL)}
    return tiktoken.Encoding(
        "rustbpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def write(folder: Path, encoding, weights: dict, **shape) -> Path:
    """A folder as nanochat leaves it: base/checkpoints/d3, with base/tokenizer."""
    checkpoint = folder / "base_checkpoints" / "d3"
    checkpoint.mkdir(parents=True)
    config = SHAPE | dict(vocab_size=encoding.n_vocab) | shape
    torch.save(weights, checkpoint / "model_000012.pt")
    write_json(checkpoint / "meta_000012.json", {"model_config": config, "step": 12})
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    return checkpoint


def random_weights(encoding, padded: int = 320) -> dict[str, torch.Tensor]:
    """Of unit scale, under nanochat's names; tables with rows of padding."""
    torch.manual_seed(0)
    n = SHAPE["n_embd"]
    kv = n // 2
    shapes = {"transformer.wte": (padded, n), "lm_head": (padded, n)}
    for i in range(SHAPE["n_layer"]):
        h = f"transformer.h.{i}"
        shapes |= {f"{h}.attn.c_q": (n, n), f"{h}.attn.c_k": (kv, n), f"{h}.attn.c_v": (kv, n)}
        shapes |= {f"{h}.attn.c_proj": (n, n), f"{h}.mlp.c_fc": (4 * n, n)}
        shapes |= {f"{h}.mlp.c_proj": (n, 4 * n)}
    draw = lambda shape: torch.randn(shape) * shape[1] ** -0.5
    weights = {f"{name}.weight": draw(shape) for name, shape in shapes.items()}
    weights["transformer.wte.weight"] *= 5
    return weights


def forward(w: dict, ids: torch.Tensor) -> torch.Tensor:
    """nanochat's logits (T, V) of one row, in float64 and as its code reads: it turns by -t, and
    takes the norm of q and k afterwards."""
    w = {name: x.double() for name, x in w.items()}
    n = SHAPE["n_embd"]
    heads = SHAPE["n_head"]
    groups = SHAPE["n_kv_head"]
    D = n // heads
    T = len(ids)
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    angle = torch.outer(torch.arange(T), 10_000.0 ** -(torch.arange(0, D, 2) / D)).double()

    def turned(x):  # (T, D)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], -1)

    x = norm(w["transformer.wte.weight"][ids])
    for i in range(SHAPE["n_layer"]):
        of = lambda part: w[f"transformer.h.{i}.{part}.weight"].T  # noqa: B023
        x = w.get("resid_lambdas", torch.ones(9))[i] * x
        y = norm(x)
        q, k, v = (y @ of(f"attn.c_{part}") for part in "qkv")
        out = []
        for h in range(heads):
            g = h // (heads // groups)
            mine = slice(h * D, h * D + D)
            theirs = slice(g * D, g * D + D)
            scores = norm(turned(q[:, mine])) @ norm(turned(k[:, theirs])).T / D**0.5
            scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
            out.append(scores.softmax(-1) @ v[:, theirs])
        x = x + torch.cat(out, -1) @ of("attn.c_proj")
        x = x + F.relu(norm(x) @ of("mlp.c_fc")).square() @ of("mlp.c_proj")
    return 15 * torch.tanh(norm(x) @ w["lm_head.weight"].T / 15)


def convert(checkpoint, folder):
    return nanochat.main([str(checkpoint), str(folder / "out")])


def ours(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Our logits (T, V) of the folder that was written."""
    source = imported.ForeignModel(folder)
    state, _ = source.read(source.config)
    with torch.no_grad():
        return mapping.model_of(source.config, state)(ids[None])[0]


@pytest.mark.parametrize("lambdas", ["", "resid", "compiled"])
def test_logits_are_those_of_nanochat(lambdas, encoding, tmp_path, capsys):
    weights = random_weights(encoding)
    if lambdas == "resid":
        weights["resid_lambdas"] = torch.tensor([1.15, 0.7, 1.4])
        weights["x0_lambdas"] = torch.zeros(3)
    ids = torch.randint(encoding.n_vocab, (48,), generator=torch.Generator().manual_seed(1))
    expected = forward(weights, ids)[:, : encoding.n_vocab]
    prefix = "_orig_mod." if lambdas == "compiled" else ""
    saved = {prefix + name: w for name, w in weights.items()}
    checkpoint = write(tmp_path / "base", encoding, saved, window_pattern="L")
    out = tmp_path / "out"
    assert convert(checkpoint, tmp_path) == 0
    assert "logits differ by" in capsys.readouterr().out
    found = ours(out, ids)
    assert expected.std() > 0.5 and (found - expected).abs().max() < 1e-5
    text = "The cats' mat, 1234 x\u00e9 <|bos|>\n\n  y"
    ids = encoding.encode_ordinary(text)
    tokenizer = imported.ForeignModel(out).tokenizer
    assert tokenizer.encode(text) == ids
    assert tokenizer.bos_id == encoding._special_tokens["<|bos|>"]
    given = transformers.AutoTokenizer.from_pretrained(out)(text).input_ids
    assert given == [tokenizer.bos_id, *ids]
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644
    words = ["--prompt", "the cat", "--max_new_tokens", 8]
    assert "--- 'the cat'" in look(capsys, "sample", out, *words)


def has_value_embeddings(weights):
    weights["value_embeds.2.weight"] = torch.zeros(320, 16)
    weights["transformer.h.2.attn.ve_gate.weight"] = torch.zeros(2, 12)


REFUSED = {
    "value embeddings": (has_value_embeddings, {}, "value embeddings.*times 1.15 or 1.2"),
    "smear": (lambda w: w.update({"smear_lambda": torch.zeros(1)}), {}, "smear.*times 1.2"),
    "backout": (lambda w: w.update({"backout_lambda": torch.ones(1)}), {}, "backout"),
    "x0": (lambda w: w.update({"x0_lambdas": torch.full((3,), 0.1)}), {}, "x0_lambdas"),
    "signs": (lambda w: w.update({"resid_lambdas": torch.tensor([1, -1, 1.0])}), {}, "positive"),
    "windows": (lambda w: None, dict(window_pattern="SSSL"), "SSSL"),
    "a new option": (lambda w: w.update(other=torch.ones(3)), {}, "other"),
    "a layer too few": (lambda w: None, dict(n_layer=4), "transformer.h.3"),
    "another tokenizer": (lambda w: None, dict(vocab_size=250), "250"),
    "an option of a fork": (lambda w: None, dict(rope_theta=5e5), "rope_theta"),
    "NaN": (lambda w: w["lm_head.weight"][3].fill_(torch.nan), {}, "damaged.*lm_head"),
    "integers": (lambda w: w.update({"lm_head.weight": torch.ones(320, 32).int()}), {}, "lm_head"),
    "one dimension": (lambda w: w.update({"lm_head.weight": torch.ones(320)}), {}, "lm_head"),
    "far": (lambda w: w.update({"resid_lambdas": torch.full((3,), 0.01)}), {}, "product"),
    "lambdas": (lambda w: w.update({"resid_lambdas": torch.ones(2)}), {}, "says: .'resid_lambdas'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_exactly_is_refused_by_name(case, encoding, tmp_path):
    change, shape, words = REFUSED[case]
    weights = random_weights(encoding)
    change(weights)
    checkpoint = write(tmp_path / "base", encoding, weights, **shape)
    with pytest.raises(UsageError, match=words):
        convert(checkpoint, tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / "base"], "nothing is left"


class Runs:
    """A pickle that touches a file when it is opened."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_a_pickle_runs_nothing(encoding, tmp_path):
    """Neither as the weights nor as the tokenizer."""
    checkpoint = write(tmp_path / "base", encoding, {"lm_head.weight": Runs(tmp_path / "ran")})
    with pytest.raises(UsageError, match="model_000012.pt"):
        convert(checkpoint, tmp_path)
    torch.save(random_weights(encoding), checkpoint / "model_000012.pt")
    (checkpoint / "tokenizer.pkl").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(UsageError, match="tokenizer.pkl.*mkdir"):
        convert(checkpoint, tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / "base"]


def test_a_bit_that_flips_is_seen(encoding, tmp_path):
    """torch.load does not look at the checksums of its file."""
    checkpoint = write(tmp_path / "base", encoding, random_weights(encoding))
    flipped(checkpoint / "model_000012.pt")
    with pytest.raises(UsageError, match="damaged"):
        convert(checkpoint, tmp_path)


def test_mistakes_are_sentences(encoding, tmp_path):
    checkpoint = write(tmp_path / "base", encoding, random_weights(encoding))
    meta = checkpoint / "meta_000012.json"
    pkl = tmp_path / "base" / "tokenizer" / "tokenizer.pkl"
    for argv, words in (
        ([], "needs"),
        ([tmp_path, tmp_path / "out"], "no model_"),
        ([checkpoint, tmp_path / "base"], "exists"),
    ):
        with pytest.raises(UsageError, match=words):
            nanochat.main([*map(str, argv)])
    whole = meta.read_text()
    meta.write_text(whole.replace('"n_head": 4', '"n_head": "x"'))
    with pytest.raises(DataError, match="n_head"):
        convert(checkpoint, tmp_path)
    meta.write_text(whole)
    pkl.write_bytes(b"\x80")
    with pytest.raises(UsageError, match="tokenizer.pkl"):
        convert(checkpoint, tmp_path)
    pkl.write_bytes(pickle.dumps(tiktoken.get_encoding))
    with pytest.raises(UsageError, match="get_encoding"):
        convert(checkpoint, tmp_path)


# --------------------------------------------------------------------------- nanochat's own code

OWN = """
import json, sys, torch
from pathlib import Path
from nanochat.gpt import GPT, GPTConfig
folder, shape = Path(sys.argv[1]), json.loads(sys.argv[2])
half = torch.bfloat16  # to which it rounds the tables of RoPE, a part in 256
torch.bfloat16, torch.Tensor.bfloat16 = torch.float32, torch.Tensor.float
torch.manual_seed(0)
model = GPT(GPTConfig(**shape))
model.init_weights()
for name, p in model.named_parameters():
    if p.ndim == 2:
        torch.nn.init.normal_(p, std=p.shape[1] ** -0.5 * (5 if "wte" in name else 1))
    else:
        torch.nn.init.constant_(p, float(sys.argv[3]) if name == "x0_lambdas" else 1.2)
ids = torch.randint(shape["vocab_size"], (1, shape["sequence_len"]))
with torch.no_grad():
    logits = model.eval()(ids)
torch.bfloat16 = half
torch.save((ids, logits), folder / "logits.pt")
torch.save(model.state_dict(), folder / "weights.pt")
"""
CLONE = os.environ.get("NANOCHAT", "")


@pytest.mark.skipif(not CLONE, reason="NANOCHAT does not name a clone of nanochat")
@pytest.mark.parametrize(
    "commit, x0, refused",
    [
        ("3a5e0bc", 0, ""),  # the first
        ("ccf4b7f", 0, ""),  # 7 January 2026, the last without lambdas
        ("aa530cd", 0, ""),  # 11 January
        ("aa530cd", 0.1, "x0_lambdas"),
        ("92d63d4", 0.1, "value embeddings.*smear.*backout.*x0_lambdas.*SSSL"),  # July 2026
    ],
)
def test_logits_are_those_of_its_own_code(commit, x0, refused, encoding, tmp_path):
    archive = subprocess.run(
        ["git", "-C", CLONE, "archive", commit, "nanochat"], check=True, capture_output=True
    ).stdout
    tarfile.open(fileobj=io.BytesIO(archive)).extractall(tmp_path / "code", filter="data")
    shape = SHAPE | dict(vocab_size=encoding.n_vocab)
    argv = [sys.executable, "-c", OWN, str(tmp_path), json.dumps(shape), str(x0)]
    env = environment(PYTHONPATH=str(tmp_path / "code"))
    subprocess.run(argv, check=True, env=env, cwd=tmp_path, timeout=120)
    windows = dict(window_pattern="SSSL") if commit == "92d63d4" else {}
    weights = torch.load(tmp_path / "weights.pt")
    checkpoint = write(tmp_path / "base", encoding, weights, **windows)
    if refused:
        with pytest.raises(UsageError, match=refused):
            convert(checkpoint, tmp_path)
        return
    convert(checkpoint, tmp_path)
    ids, expected = torch.load(tmp_path / "logits.pt")
    far = (ours(tmp_path / "out", ids[0]) - expected[0]).abs().max().item()
    print(f"{commit}: {far:.1e}, of a standard deviation of {expected.std():.2f}")
    assert expected.std() > 0.5 and far < 1e-5
