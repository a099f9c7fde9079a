"""hf/llama_cpp.py: stock llama.cpp has our ids, log probabilities and greedy text of what
`export.py --gguf` writes; what it would compute differently is refused; a wrong file is never left.
"""

import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import jinja2
import numpy as np
import pytest
import test_export
import torch
from table import read_table
from test_export import STOCK, provenance_of

from config import EXTRAS, UsageError, find_preset
from hf import export, llama_cpp, mapping, template
from machinery import trained as models
from machinery.errors import ParityError
from machinery.trained import EvalConfig, Trained
from model import GPT
from preparation import chat
from tokenizer import Tokenizer, split_of

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

DIGITS = split_of(digits=1, combining=False)
LINES = [f"def name_{i}(x):\n    return x + {i}  # café\n" for i in range(200)]
LLAMA = STOCK | dict(qk_norm=False)
TIED = dict(embed_norm=False, tie_embeddings=True)
SHAPES = {
    "tiny-stock": STOCK,
    "grouped queries, wide heads": STOCK | dict(n_kv_head=2, head_dim=32, qk_gain=True),
    "tied": STOCK | TIED,
    "llama": LLAMA,
    "llama, tied, one key head": LLAMA | TIED | dict(n_kv_head=1),
    "llama, odd width": LLAMA | dict(n_embd=66),
}
LONG = dict(seq_len=256)  # conversations fit in


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES, 300, split=DIGITS)


@pytest.fixture
def export_gguf(tokenizer, tmp_path, monkeypatch):
    """export.export for a model in memory, without a run on disk."""

    def export_gguf(model, form="f32", tuned=False, tokenizer=tokenizer, name="run"):
        provenance = provenance_of(model, conversations=tuned)
        loaded = Trained(EvalConfig(), tmp_path / name, provenance, model, tokenizer)
        monkeypatch.setattr(models, "load_model", lambda *_: loaded)
        return export.export(export.ExportConfig(out=str(tmp_path / "out"), gguf=form))

    return export_gguf


def build(tokenizer, **changes) -> GPT:
    return test_export.build(vocab_size=tokenizer.vocab_size, **changes)


@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_writes_our_greedy_text(shape, export_gguf, tokenizer, capsys):
    changes = SHAPES[shape] | LONG
    folder = export_gguf(build(tokenizer, **changes), tuned=True)
    assert f"and {22 * 2} conversations have equal ids" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"run.gguf", "Modelfile"}
    ours = build(tokenizer, **changes)
    served = llama_cpp.Served(folder / "run.gguf", 256)
    prompt = [0, *tokenizer.encode(LINES[7])]
    ends = template.ends(tokenizer, True)
    how = dict(n_predict=32, temperature=0, cache_prompt=False, return_tokens=True)
    how["logit_bias"] = [[end, -1e4] for end in ends]  # it goes on
    new = served.ask("/completion", prompt=prompt, **how)["tokens"]
    for token in new:
        logits = ours(torch.tensor([prompt]))[0, -1]
        logits[ends] = -torch.inf
        assert token == logits.argmax().item()
        prompt.append(token)
    assert len(new) == 32


@pytest.mark.parametrize("form", ["f16", "bf16", "q8_0"])
def test_the_model_has_the_rounded_weights_of_the_file(form, export_gguf, tokenizer, monkeypatch):
    """When they are compared, so that no error as large as the rounding is let through."""
    compared = []
    honest = llama_cpp.compare_numbers

    def check(model, *others):
        compared.append(model.head.weight.detach()[: tokenizer.vocab_size].numpy())
        return honest(model, *others)

    monkeypatch.setattr(llama_cpp, "compare_numbers", check)
    folder = export_gguf(build(tokenizer, **STOCK), form)
    tensors = {t.name: t for t in gguf.GGUFReader(folder / "run.gguf").tensors}
    head = tensors["output.weight"]
    assert np.array_equal(compared[0], gguf.quants.dequantize(head.data, head.tensor_type))
    kinds = {name: t.tensor_type.name for name, t in tensors.items()}
    assert kinds["output.weight"] == kinds["blk.1.ffn_down.weight"] == form.upper()
    assert kinds["output_norm.weight"] == kinds["blk.0.attn_q_norm.weight"] == "F32"


@pytest.mark.parametrize("split", llama_cpp.SPLIT_NAMES)
def test_ids_of_a_hundred_thousand_tokens(split, tmp_path):
    """Code, and text in other scripts, as a tokenizer of real size encodes them."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [file.read_text(errors="ignore")[:20_000] for file in sorted(library.glob("*.py"))[:40]]
    texts += [
        "Größe İstanbul ﬁn ǅ ①½²٣ 3.14e-10 0x1F 1_000 'LL they'Re I'm 'tis",
        "สวัสดี नमस्ते தமிழ் שָׁלוֹם العَرَبِيَّة 한글 가각 日本語、。",
        "👩\u200d💻🏳️\u200d🌈 a\u0301\u0323 \u0130\u017f",
        "\t\r\n\r\r\n \n  x\u00a0\u2009y \n\n !\n\r\n ...\n",
    ]
    tokenizer = Tokenizer.train(texts + texts[-4:] * 50, 4096, split=split)
    model = build(tokenizer, **STOCK | dict(seq_len=16))
    loaded = Trained(EvalConfig(), tmp_path / "run", provenance_of(model), model, tokenizer)
    file = tmp_path / "run.gguf"
    llama_cpp.write(file, loaded, "f16")
    served = llama_cpp.Served(file, 16)
    total = 0
    for text in texts:
        ids = tokenizer.encode(text)
        assert served(text).input_ids == [0, *ids], text[:40]
        total += len(ids)
    assert total > 100_000


# ------------------------------------------------------------------------------- wrong files


def writes(method: str, change):
    """Lets a method of GGUFWriter write change(what it was given)."""

    def spoil(monkeypatch):
        honest = getattr(gguf.GGUFWriter, method)
        lied = lambda self, value, *more: honest(self, change(value), *more)
        monkeypatch.setattr(gguf.GGUFWriter, method, lied)

    return spoil


def tensors(part: str, change):
    """Lets the tensors with `part` in their names be change(values)."""

    def spoil(monkeypatch):
        honest = gguf.GGUFWriter.add_tensor

        def add(self, name, values, **options):
            honest(self, name, change(values) if part in name else values, **options)

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)

    return spoil


def exchanged(values):
    """The rows of a head that belong together, beside each other, in halves again."""
    pairs = values.reshape(4, -1, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape).copy()


def replaced(module, name: str, value):
    return lambda monkeypatch: monkeypatch.setattr(module, name, value)


OFF = template.TEMPLATE.replace("<|user|>", "<|assistant|>")
FAULTS = {  # name -> (changes of the shape, what is spoilt, what the refusal says)
    "no permutation": (LLAMA, tensors("attn_q.", exchanged), "log p"),
    "a permutation that it needs not": (STOCK, tensors("attn_k.", exchanged), "log p"),
    "a norm of twos": (STOCK, tensors("ffn_norm", lambda w: 2 * w), "log p"),
    "a norm of keys": (STOCK, tensors("attn_k_norm", lambda w: 2 * w), "log p"),
    "a table that is not folded": (STOCK, replaced(mapping, "rms_norm", lambda w: w), "log p"),
    "what is no number": (STOCK, tensors("ffn_down", lambda w: np.nan * w), "differs by nan"),
    "another rotation": (STOCK, writes("add_rope_freq_base", lambda x: 10 * x), "log p"),
    "another eps": (STOCK, writes("add_layer_norm_rms_eps", lambda x: 100 * x), "log p"),
    "another pre-tokenizer": (
        STOCK,
        replaced(llama_cpp, "SPLIT_NAMES", {DIGITS: "gpt-2"}),
        "encodes",
    ),
    "merges in another order": (STOCK, writes("add_token_merges", lambda x: x[::-1]), "encodes"),
    "no BOS": (STOCK, writes("add_add_bos_token", lambda _: False), "encodes"),
    "another end of an answer": (STOCK, writes("add_eos_token_id", lambda _: 1), "the token 3"),
    "merges left out": (STOCK, writes("add_token_merges", lambda x: x[:-20]), "encodes"),
    "another end of a text": (STOCK, writes("add_eot_token_id", lambda _: 3), "the token 0"),
    "the user for the model": (STOCK, writes("add_chat_template", lambda _: OFF), "chat template"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_file_is_never_left(fault, export_gguf, tokenizer, tmp_path, monkeypatch):
    changes, spoil, words = FAULTS[fault]
    spoil(monkeypatch)
    with pytest.raises(ParityError, match=words):
        export_gguf(build(tokenizer, **changes | LONG), tuned=True)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------- refusals

REFUSED = {  # name -> (changes of the shape, of the tokenizer, the form, what is said)
    "extras": (STOCK | dict(extras=EXTRAS), {}, "f16", "extras.*d12-stock"),
    "softcap": (dict(mlp="swiglu"), {}, "f16", "logit_softcap 15.0"),
    "relu2": (dict(logit_softcap=0.0), {}, "f16", "mlp relu2"),
    "NoPE": (LLAMA | dict(nope_every=2), {}, "f16", "--nope_every 0"),
    "NFC": (STOCK, dict(nfc=True), "f16", "--no_nfc"),
    "two digits": (STOCK, dict(split=split_of(2, combining=False)), "f16", "--digits 1"),
    "marks and two digits": (STOCK, dict(split=split_of(2, combining=True)), "f16", "--digits 1"),
    "blocks of 32": (STOCK | dict(n_embd=66), {}, "q8_0", "f16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_would_compute_differently_is_refused(case, export_gguf, tmp_path):
    changes, of_tokenizer, form, words = REFUSED[case]
    tokenizer = Tokenizer.train(LINES, 300, **dict(split=DIGITS) | of_tokenizer)
    with pytest.raises(UsageError, match=words):
        export_gguf(build(tokenizer, **changes), form, tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_weight_that_the_form_cannot_hold_is_refused(export_gguf, tokenizer, tmp_path):
    model = build(tokenizer, **STOCK)
    with torch.no_grad():
        model.blocks[0].attn.q.weight[5, 5] = 1e5  # q is normed
    with pytest.raises(UsageError, match="q_proj.weight is too large for f16"):
        export_gguf(model, "f16")
    assert not list(tmp_path.iterdir())
    export_gguf(model, "bf16")


@pytest.mark.parametrize("name", ["x" * 250, "new\nline", "q'u\"ote$(x) \udce9", "é" * 120])
def test_a_run_of_any_name_has_a_file_that_the_modelfile_finds(name, export_gguf, tokenizer):
    folder = export_gguf(build(tokenizer, **STOCK | dict(seq_len=8)), name=name)
    (file,) = (path for path in folder.iterdir() if path.suffix == ".gguf")
    text = (folder / "Modelfile").read_text()
    assert text.splitlines()[0] == f"FROM ./{file.name}" and text.splitlines()[1][:8] == "TEMPLATE"
    assert re.fullmatch(r"[\w.-]+", file.name)


def test_what_does_not_open_is_an_error_of_one_sentence(export_gguf, tmp_path, capfd):
    """A tokenizer of bytes alone has no merges, which llama.cpp wants."""
    tokenizer = Tokenizer.train(["a"], 260, split=DIGITS)
    with pytest.raises(ParityError, match="does not open"):
        export_gguf(build(tokenizer, **STOCK), tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


def test_without_its_packages_it_says_how_to_install_them(monkeypatch):
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="gguf and xllamacpp .*requirements-eval.txt"):
        export.main(["tiny-stock", "--gguf", "f16"])


GO = r"""
{{ $before := .System }} => {% set ns = namespace(before=system) %}
{{ range .Messages }} => {% for m in messages %}
{{ if eq .Role "user" }} => {% if m.role == 'user' %}
{{ if $before }}{{ $before }} => {% if ns.before %}{{ ns.before }}
{{ end }} => {% endif %}
{{ $before = "" }} => {% set ns.before = '' %}
{{ .Content }} => {{ m.content }}
{{ else if eq .Role "assistant" }} => {% elif m.role == 'assistant' %}
{{ .Content }} => {{ m.content }}
{{ end }} => {% endif %}
{{ end }} => {% endfor %}
"""


def test_the_modelfile_has_the_conversation_of_the_template(export_gguf, tokenizer):
    """Ollama is not at hand, nor is Go: its template is rendered as one of Jinja."""
    text = (export_gguf(build(tokenizer, **STOCK | LONG), tuned=True) / "Modelfile").read_text()
    assert text.startswith("FROM ./run.gguf\n") and "PARAMETER num_ctx 256\n" in text
    spoken = text.split('"""')[1]
    for go, (jinja,) in read_table(GO):
        assert go in spoken
        spoken = spoken.replace(go, jinja, 1)
    for system in ("", "Be brief."):
        turns = [("user", "What?\n"), ("assistant", "A pen"), ("user", " Where? ")]
        messages = [dict(role=role, content=content) for role, content in turns]
        said = jinja2.Template(spoken).render(system=system, messages=messages)
        turns = [("system", system), *turns] if system else turns
        assert said == tokenizer.decode(chat.encode(turns, tokenizer, reply=True))


def test_stock_presets_have_the_size_of_the_fast_ones():
    for name in ("tiny", "d12", "d20"):
        fast, stock = (find_preset(word).model for word in (name, f"{name}-stock"))
        assert mapping.choose_class(stock)[0] == "Qwen3"
        assert find_preset(f"{name}-stock").data.digits == 1
        sizes = [c.mlp_hidden * (3 if c.mlp == "swiglu" else 2) for c in (fast, stock)]
        assert abs(sizes[1] / sizes[0] - 1) < 0.05
        kept = dict(mlp="relu2", mlp_hidden=fast.mlp_hidden, extras=fast.extras)
        assert replace(stock, logit_softcap=fast.logit_softcap, **kept) == fast
    tuned = find_preset("tiny-stock-chat")
    assert tuned.data.tokenizer == "runs/tiny-stock/tokenizer.json"
    assert tuned.run.init_from == "runs/tiny-stock"
